"""Every error that a caller may see: one table from exception classes to gRPC codes and google.rpc
details.

`to_status` makes the google.rpc.Status of any exception; RPCs send it as their status
(`interceptors.Recovery`), and sessions in-band. The message and the details say what to change. An
exception that is in no row of the table is an error of ours: it is logged under an error id, and
the caller gets INTERNAL with that id and nothing else.

Everything that a caller's text can reach is cut to a bound, so that the details stay below 4 KiB:
above 8 KiB of trailers clients see RESOURCE_EXHAUSTED in place of the real code.
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

from engine.errors import (
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
from engine.outputs import RequestFailure
from engine.text import ChatTemplateUnavailableError
from service.accounts import CallerNameError
from service.auth import PermissionDeniedError, UnauthenticatedError
from service.bounds import LimitReachedError
from service.call_errors import (
    AnswerTooLargeError,
    FieldError,
    MalformedMessageError,
    MessageMissingError,
    MessageTimeoutError,
    MessageTooLargeError,
    NotReadyError,
    PreconditionError,
    TooManyCallsError,
    UnsupportedFieldError,
)
from service.convert.fields import NamedError, contract_path, field_error
from service.delivery.result_errors import (
    OutputNotReadError,
    RequestFailedError,
    RequestMovedError,
    ResultGoneError,
    ResultsNotReadError,
)

logger = logging.getLogger(__name__)

DOMAIN = "headrace"
DETAILS_KEY = "grpc-status-details-bin"
PUSHBACK_KEY = "grpc-retry-pushback-ms"
_MAX_MESSAGE_BYTES = 600
_MAX_FIELD_BYTES = 160
_RESTART_DELAY_S = 1.0


@dataclass(frozen=True, slots=True)
class _Public:
    """What is said of an error."""

    code: grpc.StatusCode
    reason: str
    message: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    violation: tuple[str, str] | None = None  # field path, what to change
    retry_after_s: float | None = None


def _field(error: NamedError) -> _Public:
    told = field_error(error)
    if isinstance(told, UnsupportedFieldError):
        code, reason = grpc.StatusCode.UNIMPLEMENTED, "UNSUPPORTED_FIELD"
    else:
        code, reason = grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"
    return _Public(code, reason, str(told), {"field": told.path}, (told.path, told.description))


def _malformed(error: MalformedMessageError) -> _Public:
    return _Public(grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE", str(error))


def _message_timeout(error: MessageTimeoutError) -> _Public:
    return _Public(grpc.StatusCode.DEADLINE_EXCEEDED, "MESSAGE_TIMEOUT", str(error))


def _message_missing(error: MessageMissingError) -> _Public:
    return _Public(grpc.StatusCode.INVALID_ARGUMENT, "MESSAGE_MISSING", str(error))


def _too_many_calls(error: TooManyCallsError) -> _Public:
    return _Public(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "TOO_MANY_CALLS",
        str(error),
        retry_after_s=error.retry_after_s,
    )


def _message_too_large(error: MessageTooLargeError) -> _Public:
    # Not RESOURCE_EXHAUSTED, as gRPC's own: to try it again is of no use.
    return _Public(
        grpc.StatusCode.INVALID_ARGUMENT,
        "MESSAGE_TOO_LARGE",
        str(error),
        _limit("max_receive_bytes", error.limit, error.size),
    )


def _duplicate(error: DuplicateRequestError) -> _Public:
    return _Public(
        grpc.StatusCode.ALREADY_EXISTS,
        "DUPLICATE_REQUEST_ID",
        str(error),
        {"request_id": error.request_id},
    )


def _not_found(error: RequestNotFoundError) -> _Public:
    return _Public(
        grpc.StatusCode.NOT_FOUND, "REQUEST_NOT_FOUND", str(error), {"request_id": error.request_id}
    )


def _gone(error: ResultGoneError) -> _Public:
    return _Public(
        grpc.StatusCode.OUT_OF_RANGE,
        "RESULT_OUT_OF_RANGE",
        str(error),
        {
            "request_id": error.request_id,
            "earliest_seq": str(error.earliest),
            "next_seq": str(error.following),
        },
    )


def _answer_too_large(error: AnswerTooLargeError) -> _Public:
    # Not RESOURCE_EXHAUSTED, as gRPC's own: clients try that again, and all is generated again.
    return _Public(
        grpc.StatusCode.OUT_OF_RANGE,
        "ANSWER_TOO_LARGE",
        str(error),
        _limit("max_send_bytes", error.limit, error.size),
    )


def _moved(error: RequestMovedError) -> _Public:
    return _Public(
        grpc.StatusCode.ABORTED, "REQUEST_MOVED", str(error), {"request_id": error.request_id}
    )


def _queue_full(error: QueueFullError) -> _Public:
    return _Public(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "QUEUE_FULL",
        str(error),
        _limit("max_queue_size", error.limit, error.present) | _share(error),
        retry_after_s=error.retry_after_s,
    )


def _compile_queue_full(error: CompileQueueFullError) -> _Public:
    return _Public(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "COMPILE_QUEUE_FULL",
        str(error),
        _limit("max_waiting_forms", error.limit, error.present),
        retry_after_s=error.retry_after_s,
    )


def _limit_reached(error: LimitReachedError) -> _Public:
    return _Public(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        error.reason,
        str(error),
        _limit(error.option, error.limit, error.present) | _share(error),
        retry_after_s=error.retry_after_s,
    )


def _limit(option: str, limit: int, present: int) -> dict[str, str]:
    """What ErrorInfo says of a limit: its name, its value, and what there is now."""
    return {"limit": option, option: str(limit), "present": str(present)}


def _share(error: LimitReachedError | QueueFullError) -> dict[str, str]:
    """And of a caller's share of it, where that is why it is refused."""
    if error.share is None:
        return {}
    return {"share": str(error.share), "held": str(error.held)}


def _unauthenticated(error: UnauthenticatedError) -> _Public:
    return _Public(grpc.StatusCode.UNAUTHENTICATED, error.reason, str(error))


def _denied(error: PermissionDeniedError) -> _Public:
    return _Public(grpc.StatusCode.PERMISSION_DENIED, error.reason, str(error))


def _caller_name(error: CallerNameError) -> _Public:
    return _Public(grpc.StatusCode.INVALID_ARGUMENT, "CALLER_NAME_INVALID", str(error))


def _not_read(error: ResultsNotReadError) -> _Public:
    return _Public(grpc.StatusCode.RESOURCE_EXHAUSTED, "RESULTS_NOT_READ", str(error))


def _output_not_read(error: OutputNotReadError) -> _Public:
    metadata = {"unread_tokens": str(error.unread_tokens)}
    if error.max_hold_s is not None:
        metadata["max_hold_s"] = f"{error.max_hold_s:g}"
    return _Public(grpc.StatusCode.RESOURCE_EXHAUSTED, "RESULTS_NOT_READ", str(error), metadata)


def _unavailable(error: EngineUnavailableError) -> _Public:
    reason = error.reason if isinstance(error, NotReadyError) else "ENGINE_STOPPED"
    return _Public(grpc.StatusCode.UNAVAILABLE, reason, str(error), retry_after_s=_RESTART_DELAY_S)


def _no_template(error: ChatTemplateUnavailableError) -> _Public:
    return _Public(grpc.StatusCode.FAILED_PRECONDITION, "NO_CHAT_TEMPLATE", str(error))


def _precondition(error: PreconditionError) -> _Public:
    return _Public(grpc.StatusCode.FAILED_PRECONDITION, "FAILED_PRECONDITION", str(error))


def _failed(error: RequestFailedError) -> _Public:
    return _of_failure(error.failure)


def _of_failure(failure: RequestFailure) -> _Public:
    metadata = {"error_id": failure.error_id}
    if failure.retryable:
        return _Public(
            grpc.StatusCode.UNAVAILABLE,
            "ENGINE_STOPPED",
            failure.message,
            metadata,
            retry_after_s=_RESTART_DELAY_S,
        )
    if failure.field is not None:  # what its form costs, or that it is too complex, shows late
        path = contract_path(failure.field)
        description = failure.message.removeprefix(f"{failure.field}: ")
        return _Public(
            grpc.StatusCode.INVALID_ARGUMENT,
            "INVALID_FIELD",
            f"{path}: {description}",
            {**metadata, "field": path},
            (path, description),
        )
    return _Public(grpc.StatusCode.INTERNAL, "REQUEST_FAILED", failure.message, metadata)


def _config(error: ConfigError) -> _Public:
    # An option of the engine that a request ran into: the operator's to change.
    return _Public(grpc.StatusCode.FAILED_PRECONDITION, "SERVER_CONFIGURATION", str(error))


# The table. The first row whose class fits counts: subclasses stand before their bases.
_TABLE: tuple[tuple[type[HeadraceError], Callable[..., _Public]], ...] = (
    (FieldError, _field),
    (InvalidRequestError, _field),
    (MalformedMessageError, _malformed),
    (MessageTooLargeError, _message_too_large),
    (MessageTimeoutError, _message_timeout),
    (MessageMissingError, _message_missing),
    (TooManyCallsError, _too_many_calls),
    (AnswerTooLargeError, _answer_too_large),
    (UnsupportedFeatureError, _field),
    (DuplicateRequestError, _duplicate),
    (RequestNotFoundError, _not_found),
    (ResultGoneError, _gone),
    (RequestMovedError, _moved),
    (QueueFullError, _queue_full),
    (CompileQueueFullError, _compile_queue_full),
    (LimitReachedError, _limit_reached),
    (UnauthenticatedError, _unauthenticated),
    (PermissionDeniedError, _denied),
    (CallerNameError, _caller_name),
    (ResultsNotReadError, _not_read),
    (OutputNotReadError, _output_not_read),
    (EngineUnavailableError, _unavailable),
    (ChatTemplateUnavailableError, _no_template),
    (PreconditionError, _precondition),
    (RequestFailedError, _failed),
    (ConfigError, _config),
)


def to_status(error: BaseException) -> status_pb2.Status:
    """The public status of an exception; logs it where it is an error of ours."""
    return _to_message(_public(error))


def failure_status(failure: RequestFailure) -> status_pb2.Status:
    """The status of an accepted request that failed."""
    return _to_message(_of_failure(failure))


async def abort(context: Any, status: status_pb2.Status) -> None:
    """End an RPC with a status and its details; always raises."""
    await context.abort(status_code(status), status.message, trailers(status))


def code_of(error: BaseException) -> grpc.StatusCode:
    """The gRPC code of an exception, without logging it."""
    for kind, describe in _TABLE:
        if isinstance(error, kind):
            return describe(error).code
    return grpc.StatusCode.INTERNAL


def trailers(status: status_pb2.Status) -> tuple[tuple[str, str | bytes], ...]:
    """The trailing metadata that carries a status, and retry advice where clients' retry policies
    look for it.
    """
    metadata: list[tuple[str, str | bytes]] = [(DETAILS_KEY, status.SerializeToString())]
    if status.code == _number(grpc.StatusCode.RESOURCE_EXHAUSTED):
        retry = error_details_pb2.RetryInfo()
        for detail in status.details:
            if detail.Unpack(retry):
                metadata.append((PUSHBACK_KEY, str(max(1, retry.retry_delay.ToMilliseconds()))))
    return tuple(metadata)


def status_code(status: status_pb2.Status) -> grpc.StatusCode:
    """The gRPC code of a status."""
    return _CODES[status.code]


def _public(error: BaseException) -> _Public:
    for kind, describe in _TABLE:
        if isinstance(error, kind):
            return describe(error)
    error_id = secrets.token_hex(8)
    logger.error("unexpected error [error_id=%s]", error_id, exc_info=error)
    return _Public(
        grpc.StatusCode.INTERNAL,
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
    """The text, cut to at most `limit` bytes of UTF-8 between characters."""
    raw = text.encode("utf-8", "replace")
    if len(raw) <= limit:
        return raw.decode()
    return raw[: limit - 3].decode("utf-8", "ignore") + "..."


def _number(code: grpc.StatusCode) -> int:
    number: int = code.value[0]
    return number


_CODES = {_number(code): code for code in grpc.StatusCode}
