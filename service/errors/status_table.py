"""Every error that a caller may see: one table from exception classes to gRPC codes and google.rpc
details.

`to_status` makes the google.rpc.Status of any exception. RPCs send it as their status
(`interceptors.Recovery`), and sessions in-band. The message and the details say what to change. An
exception that is not in the table is a defect of the server: it is logged with an error id, and the
caller gets INTERNAL with only that id.

Text from callers is truncated, so that the details stay below 4 KiB. With more than 8 KiB of
trailers, clients see RESOURCE_EXHAUSTED instead of the real code.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from engine.contract.errors import (
    AdapterExistsError,
    AdapterNotLoadedError,
    AdapterRefusedError,
    AdapterRoomError,
    CompileQueueFullError,
    ConfigError,
    DuplicateRequestError,
    EngineUnavailableError,
    HeadraceError,
    InvalidRequestError,
    QueueFullError,
    RequestNotFoundError,
    UnsupportedFeatureError,
)
from engine.contract.outputs import RequestFailure
from engine.text import ChatTemplateUnavailableError
from service.errors.call_errors import (
    AnswerTooLargeError,
    CallerNameError,
    CapabilityMissingError,
    FieldError,
    LimitReachedError,
    MalformedMessageError,
    MessageMissingError,
    MessageTimeoutError,
    MessageTooLargeError,
    MethodNotServedError,
    ModelNotFoundError,
    NotGrantedError,
    NoTokenizerError,
    NotReadyError,
    PreconditionError,
    TooManyCallsError,
    UnknownCallerError,
    UnsupportedFieldError,
    WrongInstanceError,
)
from service.errors.contract_fields import NamedError, contract_path, field_error
from service.errors.result_errors import (
    AcceptedRequestFailedError,
    OutputNotReadError,
    RequestMovedError,
    ResultGoneError,
    ResultsFullError,
    ResultsNotReadError,
)

logger = logging.getLogger(__name__)

_Code = grpc.StatusCode

DOMAIN = "headrace.dev"
DETAILS_KEY = "grpc-status-details-bin"
PUSHBACK_KEY = "grpc-retry-pushback-ms"
_MAX_MESSAGE_BYTES = 600
_MAX_FIELD_BYTES = 160
_RESTART_DELAY_S = 1.0


@dataclass(frozen=True, slots=True)
class _Public:
    """The public form of an error."""

    code: grpc.StatusCode
    reason: str
    message: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    violation: tuple[str, str] | None = None  # field path, what to change
    retry_after_s: float | None = None


def _field(error: NamedError) -> _Public:
    told = field_error(error)
    if isinstance(told, UnsupportedFieldError):
        code, reason = _Code.UNIMPLEMENTED, "UNSUPPORTED_FIELD"
    else:
        code, reason = _Code.INVALID_ARGUMENT, "INVALID_FIELD"
    return _Public(code, reason, str(told), {"field": told.path}, (told.path, told.description))


def _capability(error: CapabilityMissingError) -> _Public:
    return _Public(
        _Code.UNIMPLEMENTED,
        "CAPABILITY_MISSING",
        str(error),
        {"capability": error.capability},
        ("required_capabilities", str(error)),
    )


def _as(
    code: grpc.StatusCode,
    reason: str = "",
    tell: Callable[[Any], Mapping[str, str]] = lambda _error: {},
) -> Callable[[Any], _Public]:
    """Make a row for an error whose message is made public unchanged. `reason`: empty to use the
    error's `reason`. `tell`: returns further machine-readable metadata. If the error has a retry
    delay, it is sent too.
    """

    def describe(error: Any) -> _Public:
        return _Public(
            code,
            reason or error.reason,
            str(error),
            tell(error),
            retry_after_s=getattr(error, "retry_after_s", None),
        )

    return describe


def _request(error: Any) -> dict[str, str]:
    return {"request_id": error.request_id}


def _events(error: ResultGoneError) -> dict[str, str]:
    there = {"earliest_seq": str(error.earliest), "next_seq": str(error.following)}
    return _request(error) | there


def _limit(option: str, limit: int, present: int) -> dict[str, str]:
    """Return the ErrorInfo metadata of a limit: its name, its value, and the amount in use."""
    return {"limit": option, option: str(limit), "present": str(present)}


def _share(error: LimitReachedError | QueueFullError) -> dict[str, str]:
    """Return the metadata of a caller's share of a limit, if the share is the reason."""
    if error.share is None:
        return {}
    return {"share": str(error.share), "held": str(error.held)}


def _unread(error: OutputNotReadError) -> dict[str, str]:
    metadata = {"unread_tokens": str(error.unread_tokens)}
    if error.max_hold_s is not None:
        metadata["max_hold_s"] = f"{error.max_hold_s:g}"
    return metadata


def _unavailable(error: EngineUnavailableError) -> _Public:
    reason = error.reason if isinstance(error, NotReadyError) else "ENGINE_STOPPED"
    return _Public(_Code.UNAVAILABLE, reason, str(error), retry_after_s=_RESTART_DELAY_S)


def _failed(error: AcceptedRequestFailedError) -> _Public:
    return _of_failure(error.failure)


def _of_failure(failure: RequestFailure) -> _Public:
    metadata = {"error_id": failure.error_id}
    if failure.retryable:
        return _Public(
            _Code.UNAVAILABLE,
            "ENGINE_STOPPED",
            failure.message,
            metadata,
            retry_after_s=_RESTART_DELAY_S,
        )
    if failure.field is not None:  # a grammar may turn out too costly or complex only late
        path = contract_path(failure.field)
        description = failure.message.removeprefix(f"{failure.field}: ")
        return _Public(
            _Code.INVALID_ARGUMENT,
            "INVALID_FIELD",
            f"{path}: {description}",
            {**metadata, "field": path},
            (path, description),
        )
    return _Public(_Code.INTERNAL, "REQUEST_FAILED", failure.message, metadata)


# The table. The first row with a matching class is used, so subclasses come before their bases.
_TABLE: tuple[tuple[type[HeadraceError], Callable[..., _Public]], ...] = (
    (FieldError, _field),
    (InvalidRequestError, _field),
    (UnsupportedFeatureError, _field),
    (MalformedMessageError, _as(_Code.INVALID_ARGUMENT, "MALFORMED_MESSAGE")),
    (
        MessageTooLargeError,
        # Not RESOURCE_EXHAUSTED, as gRPC itself would send: a retry is useless.
        _as(
            _Code.INVALID_ARGUMENT,
            "MESSAGE_TOO_LARGE",
            lambda error: _limit("max_receive_bytes", error.limit, error.size),
        ),
    ),
    (MessageTimeoutError, _as(_Code.DEADLINE_EXCEEDED, "MESSAGE_TIMEOUT")),
    (MessageMissingError, _as(_Code.INVALID_ARGUMENT, "MESSAGE_MISSING")),
    (TooManyCallsError, _as(_Code.RESOURCE_EXHAUSTED, "TOO_MANY_CALLS")),
    (
        AnswerTooLargeError,
        # Not RESOURCE_EXHAUSTED either: clients would retry, and everything would be generated
        # again.
        _as(
            _Code.OUT_OF_RANGE,
            "ANSWER_TOO_LARGE",
            lambda error: _limit("max_send_bytes", error.limit, error.size),
        ),
    ),
    (CapabilityMissingError, _capability),
    (
        ModelNotFoundError,
        _as(
            _Code.NOT_FOUND,
            "MODEL_NOT_FOUND",
            lambda error: {"model": error.model, "served": ",".join(error.served)},
        ),
    ),
    (
        AdapterNotLoadedError,
        _as(_Code.NOT_FOUND, "ADAPTER_NOT_LOADED", lambda error: {"adapter": error.name[:64]}),
    ),
    (AdapterExistsError, _as(_Code.ALREADY_EXISTS, "ADAPTER_LOADED")),
    (
        AdapterRoomError,
        _as(
            _Code.RESOURCE_EXHAUSTED,
            "ADAPTERS_FULL",
            lambda error: {"missing_bytes": str(error.missing_bytes)},
        ),
    ),
    (AdapterRefusedError, _as(_Code.FAILED_PRECONDITION, "ADAPTER_REFUSED")),
    (
        WrongInstanceError,
        _as(
            _Code.NOT_FOUND,
            "WRONG_INSTANCE",
            lambda error: {"owner_instance_id": error.owner, "instance_id": error.answering},
        ),
    ),
    (DuplicateRequestError, _as(_Code.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID", _request)),
    (RequestNotFoundError, _as(_Code.NOT_FOUND, "REQUEST_NOT_FOUND", _request)),
    (ResultGoneError, _as(_Code.OUT_OF_RANGE, "RESULT_OUT_OF_RANGE", _events)),
    (RequestMovedError, _as(_Code.ABORTED, "REQUEST_MOVED", _request)),
    (
        QueueFullError,
        _as(
            _Code.RESOURCE_EXHAUSTED,
            "QUEUE_FULL",
            lambda error: _limit("max_queue_size", error.limit, error.present) | _share(error),
        ),
    ),
    (
        CompileQueueFullError,
        _as(
            _Code.RESOURCE_EXHAUSTED,
            "COMPILE_QUEUE_FULL",
            lambda error: _limit("max_waiting_forms", error.limit, error.present),
        ),
    ),
    (
        LimitReachedError,
        _as(
            _Code.RESOURCE_EXHAUSTED,
            tell=lambda error: _limit(error.option, error.limit, error.present) | _share(error),
        ),
    ),
    (UnknownCallerError, _as(_Code.UNAUTHENTICATED)),
    (NotGrantedError, _as(_Code.PERMISSION_DENIED)),
    (CallerNameError, _as(_Code.INVALID_ARGUMENT, "CALLER_NAME_INVALID")),
    (ResultsNotReadError, _as(_Code.RESOURCE_EXHAUSTED, "RESULTS_NOT_READ")),
    (OutputNotReadError, _as(_Code.RESOURCE_EXHAUSTED, "RESULTS_NOT_READ", _unread)),
    (EngineUnavailableError, _unavailable),
    (NoTokenizerError, _as(_Code.UNIMPLEMENTED, "NO_TOKENIZER")),
    (MethodNotServedError, _as(_Code.UNIMPLEMENTED, "METHOD_NOT_SERVED")),
    (ChatTemplateUnavailableError, _as(_Code.FAILED_PRECONDITION, "NO_CHAT_TEMPLATE")),
    (PreconditionError, _as(_Code.FAILED_PRECONDITION, "FAILED_PRECONDITION")),
    (AcceptedRequestFailedError, _failed),
    # A request hit an option of the engine, which only the operator can change.
    (ConfigError, _as(_Code.FAILED_PRECONDITION, "SERVER_CONFIGURATION")),
)


def to_status(error: BaseException) -> status_pb2.Status:
    """Return the public status of an exception. A defect of the server is also logged."""
    return _to_message(_public(error))


def failure_status(failure: RequestFailure) -> status_pb2.Status:
    """Return the status of an accepted request that failed."""
    return _to_message(_of_failure(failure))


async def abort(context: Any, status: status_pb2.Status) -> None:
    """End an RPC with a status and its details. Always raises."""
    await context.abort(status_code(status), status.message, trailers(status))


def code_of(error: BaseException) -> grpc.StatusCode:
    """Return the gRPC code of an exception, without logging it."""
    for kind, describe in _TABLE:
        if isinstance(error, kind):
            return describe(error).code
    return _Code.INTERNAL


def reason_of(error: BaseException) -> str:
    """Return the ErrorInfo reason for an exception, without logging it."""
    for kind, describe in _TABLE:
        if isinstance(error, kind):
            return describe(error).reason
    return "INTERNAL"


def trailers(status: status_pb2.Status) -> tuple[tuple[str, str | bytes], ...]:
    """Return the trailing metadata with a status, and with the retry delay where clients' retry
    policies look for it.
    """
    metadata: list[tuple[str, str | bytes]] = [(DETAILS_KEY, status.SerializeToString())]
    if status.code == _number(_Code.RESOURCE_EXHAUSTED):
        retry = error_details_pb2.RetryInfo()
        for detail in status.details:
            if detail.Unpack(retry):
                metadata.append((PUSHBACK_KEY, str(max(1, retry.retry_delay.ToMilliseconds()))))
    return tuple(metadata)


def status_code(status: status_pb2.Status) -> grpc.StatusCode:
    """Return the gRPC code of a status."""
    return _CODES[status.code]


def code_of_number(number: int | None) -> grpc.StatusCode | None:
    """Return the gRPC code with a number, or None if there is none or it is 0 (no error)."""
    return _CODES.get(number) if number else None


def _public(error: BaseException) -> _Public:
    for kind, describe in _TABLE:
        if isinstance(error, kind):
            return describe(error)
    error_id = secrets.token_hex(8)
    logger.error("unexpected error [error_id=%s]", error_id, exc_info=error)
    return _Public(
        _Code.INTERNAL,
        "INTERNAL",
        f"an unexpected error happened in the server; its log has it under error id {error_id}",
        {"error_id": error_id},
    )


def _to_message(public: _Public) -> status_pb2.Status:
    status = status_pb2.Status(
        code=_number(public.code), message=_cut(public.message, _MAX_MESSAGE_BYTES)
    )
    info = error_details_pb2.ErrorInfo(reason=public.reason, domain=DOMAIN)
    for key, value in public.metadata.items():
        info.metadata[key] = _cut(value, _MAX_FIELD_BYTES)
    _add(status, info)
    if public.violation is not None:
        path, description = public.violation
        request = error_details_pb2.BadRequest()
        request.field_violations.add(
            field=_cut(path, _MAX_FIELD_BYTES), description=_cut(description, _MAX_MESSAGE_BYTES)
        )
        _add(status, request)
    if public.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(max(1, int(public.retry_after_s * 1000)))
        _add(status, error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def _add(status: status_pb2.Status, detail: Message) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)
    status.details.append(packed)


def _cut(text: str, limit: int) -> str:
    """Return the text, truncated between characters to at most `limit` bytes of UTF-8."""
    raw = text.encode("utf-8", "replace")
    if len(raw) <= limit:
        return raw.decode()
    return raw[: limit - 3].decode("utf-8", "ignore") + "..."


def _number(code: grpc.StatusCode) -> int:
    number: int = code.value[0]
    return number


NOT_REFUSALS = (
    AcceptedRequestFailedError,
    RequestMovedError,
    ResultsNotReadError,
    OutputNotReadError,
    ResultsFullError,
)
"""Errors of requests that had already been accepted."""

_CODES = {_number(code): code for code in grpc.StatusCode}
