"""Short ways to add requests, to read their results and to keep them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from headrace.v1 import generation_service_pb2 as rpc

from service.admission.accounts import Account, account_of
from service.delivery.kept import KeptResults
from service.delivery.served_request import ServedRequest
from tests.service.helpers import DEADLINE_S, Harness, spec

LEASE = {"seconds": 60}


async def add(h: Harness, request_id: str = "a", **fields: object) -> rpc.AddRequestResponse:
    message = rpc.AddRequestRequest(spec=spec(request_id=request_id, **fields))
    return await h.generation.AddRequest(message, timeout=DEADLINE_S)


async def get(h: Harness, request_id: str = "a", **fields: object) -> rpc.GetResultResponse:
    message = rpc.GetResultRequest(request_id=request_id, **fields)
    return await h.generation.GetResult(message, timeout=DEADLINE_S)


@dataclass(frozen=True, eq=False)
class Named:
    """What the keeper of results asks of a request."""

    account: Account
    identity: str
    request_id: str


def named(identity: str, name: str, on_behalf_of: str | None = None) -> ServedRequest:
    return cast(ServedRequest, Named(account_of(identity, on_behalf_of), identity, name))


def keep(kept: KeptResults, *logs: tuple[ServedRequest, int]) -> list[str]:
    """Keep some, one after the other; returns which had to go."""
    gone = []
    for log, size in logs:
        kept.add(log, size)
        while (surplus := kept.surplus()) is not None:
            kept.discard(surplus)
            gone.append(f"{surplus.identity}/{surplus.request_id}")
    return gone
