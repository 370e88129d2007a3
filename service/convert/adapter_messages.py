"""Messages about adapters, of ModelService and ControlService."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.v1 import control_service_pb2, model_service_pb2

from engine.contract.adapters import AdapterInfo, AdapterLoad, why_no_name
from service.convert.values import page_size_of
from service.errors.call_errors import FieldError

_STATES = {
    "loading": model_service_pb2.ADAPTER_STATE_LOADING,
    "loaded": model_service_pb2.ADAPTER_STATE_LOADED,
    "unloading": model_service_pb2.ADAPTER_STATE_UNLOADING,
}


def load_of(request: control_service_pb2.LoadAdapterRequest) -> AdapterLoad:
    """Return what is to be loaded.

    Raises:
        FieldError: the source is missing.
    """
    if not request.source:
        raise FieldError("source", "is missing; name a directory below the server's --adapter-root")
    return AdapterLoad(
        name=request.name,
        source=request.source,
        is_pinned=request.pinned,
        replaces=request.replace,
    )


def adapter_message(one: AdapterInfo) -> model_service_pb2.Adapter:
    """Return the message for an adapter."""
    return model_service_pb2.Adapter(
        name=one.name,
        digest=one.digest,
        rank=one.rank,
        size_bytes=one.nbytes,
        modules=one.modules,
        state=_STATES[one.state],
        pinned=one.is_pinned,
        live_requests=one.requests,
        base_model=one.base_model,
    )


def adapters_page(
    request: model_service_pb2.ListAdaptersRequest, adapters: Sequence[AdapterInfo]
) -> model_service_pb2.ListAdaptersResponse:
    """Return a page of adapters, which are in the order of their names and digests.

    Raises:
        FieldError: the page token was not made by this server.
    """
    size, behind = page_size_of(request.page_size), _place_of(request.page_token)
    later = [one for one in adapters if (one.name, one.digest) > behind]
    page = later[:size]
    return model_service_pb2.ListAdaptersResponse(
        adapters=map(adapter_message, page),
        next_page_token=f"{page[-1].digest}/{page[-1].name}" if len(page) < len(later) else "",
        total_size=len(adapters),
    )


def _place_of(token: str) -> tuple[str, str]:
    """Return the name and digest of the last adapter before a page."""
    digest, slash, name = token.partition("/")
    if token and (not slash or why_no_name(name) or set(digest) - set("0123456789abcdef")):
        raise FieldError("page_token", "is not a next_page_token of this server; leave it out")
    return name, digest
