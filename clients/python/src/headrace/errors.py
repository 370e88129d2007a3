"""The errors raised by the client, made from the `google.rpc.Status` sent by the server.

Every error of a call, of a request on a session and of a line of a batch is a `HeadraceError`. The
class depends on the status code, so that the same mistake raises the same class in every method. No
`grpc.RpcError` leaves this package.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import (
    code_pb2,
    error_details_pb2,
    status_pb2,
)

if TYPE_CHECKING:
    from headrace.results import Result

_DETAILS_TRAILER = "grpc-status-details-bin"
_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """A field of a request that the server refused."""

    field: str
    """The path in the request's message, such as `sampling.top_p`."""
    description: str
    """What to change."""


class HeadraceError(Exception):
    """Base class of all errors of this package."""

    default_code = grpc.StatusCode.UNKNOWN

    def __init__(
        self,
        message: str,
        *,
        status: status_pb2.Status | None = None,
        request_id: str = "",
        partial: Result | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        """What happened, in words."""
        self.status = status or status_pb2.Status(code=self.default_code.value[0], message=message)
        """The complete status as received, with its details."""
        self.request_id = request_id
        """The id of the request concerned; empty if unknown."""
        self.partial = partial
        """The output that had arrived before the request failed, if it was streamed."""

    @property
    def code(self) -> grpc.StatusCode:
        """The gRPC status code."""
        return _CODES.get(self.status.code, grpc.StatusCode.UNKNOWN)

    @property
    def reason(self) -> str:
        """The server's machine-readable reason, such as `QUEUE_FULL`; empty if none was given."""
        return str(self._info().reason)

    @property
    def metadata(self) -> Mapping[str, str]:
        """Additional named values that the server sent with the reason."""
        return dict(self._info().metadata)

    @property
    def fields(self) -> tuple[FieldViolation, ...]:
        """The fields of the request that were refused; empty if the error names none."""
        found = error_details_pb2.BadRequest()
        self._unpack(found)
        return tuple(FieldViolation(one.field, one.description) for one in found.field_violations)

    @property
    def retry_after(self) -> float | None:
        """The number of seconds after which to retry, if the server gave one."""
        info = error_details_pb2.RetryInfo()
        if not self._unpack(info) or not info.HasField("retry_delay"):
            return None
        return float(info.retry_delay.seconds + info.retry_delay.nanos / 1e9)

    def to_dict(self) -> dict[str, Any]:
        """Returns the error as JSON-ready values."""
        found: dict[str, Any] = {
            "code": self.code.name,
            "reason": self.reason,
            "message": self.message,
        }
        violations = [
            {"field": violation.field, "description": violation.description}
            for violation in self.fields
        ]
        if violations:
            found["field_violations"] = violations
        if self.retry_after is not None:
            found["retry_after"] = self.retry_after
        if error_id := self.metadata.get("error_id"):
            found["error_id"] = error_id
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (
            type(self),
            self.message,
            self.status.SerializeToString(),
            self.request_id,
        )

    def _info(self) -> error_details_pb2.ErrorInfo:
        info = error_details_pb2.ErrorInfo()
        self._unpack(info)
        return info

    def _unpack(self, into: Any) -> bool:
        for detail in self.status.details:
            try:
                if detail.Unpack(into):
                    return True
            except DecodeError:  # a detail that its sender spoiled is not worth another error
                into.Clear()
        return False


class InvalidArgumentError(HeadraceError, ValueError):
    """A field of the request is invalid. `fields` says which, and what to change."""

    default_code = grpc.StatusCode.INVALID_ARGUMENT


class OutOfRangeError(HeadraceError):
    """The requested events are no longer kept."""

    default_code = grpc.StatusCode.OUT_OF_RANGE


class NotSupportedError(HeadraceError):
    """The server does not support this (UNIMPLEMENTED); `ModelCard.features` lists what it
    supports.
    """

    default_code = grpc.StatusCode.UNIMPLEMENTED


class AlreadyExistsError(HeadraceError):
    """A request with this id is live, or its results are still kept."""

    default_code = grpc.StatusCode.ALREADY_EXISTS


class NotFoundError(HeadraceError):
    """The caller has no such request on this server."""

    default_code = grpc.StatusCode.NOT_FOUND


class FailedPreconditionError(HeadraceError):
    """The server's configuration does not allow this, such as chat with a model that has no chat
    template.
    """

    default_code = grpc.StatusCode.FAILED_PRECONDITION


class ResourceExhaustedError(HeadraceError):
    """A queue or a limit of the server is full. `retry_after` says when to retry."""

    default_code = grpc.StatusCode.RESOURCE_EXHAUSTED


class UnavailableError(HeadraceError):
    """The server cannot be reached, was lost, or is loading, draining or restarting."""

    default_code = grpc.StatusCode.UNAVAILABLE

    @property
    def reached_server(self) -> bool:
        """Whether a Headrace server sent this error. If not, the connection failed."""
        return bool(self.reason)


class DeadlineExceededError(HeadraceError, TimeoutError):
    """The call's timeout passed."""

    default_code = grpc.StatusCode.DEADLINE_EXCEEDED


class UnauthenticatedError(HeadraceError):
    """The server requires a token or a certificate, which was missing or invalid."""

    default_code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDeniedError(HeadraceError):
    """The caller is known but not allowed to do this."""

    default_code = grpc.StatusCode.PERMISSION_DENIED


class CallCancelledError(HeadraceError):
    """The call was cancelled by this client or on the way to the server."""

    default_code = grpc.StatusCode.CANCELLED


class RequestFailedError(HeadraceError):
    """The server failed to run the request. The request itself is not at fault."""

    default_code = grpc.StatusCode.UNKNOWN

    @property
    def error_id(self) -> str:
        """The id of the cause in the server's log; empty if not given."""
        return self.metadata.get("error_id", "")


class InternalError(RequestFailedError):
    """The server has a bug. Its operator can find the cause by `error_id`."""

    default_code = grpc.StatusCode.INTERNAL


class ProtocolError(HeadraceError):
    """The server's answer broke the contract: an event was missing, repeated or out of order."""

    default_code = grpc.StatusCode.DATA_LOSS


_CLASSES: dict[grpc.StatusCode, type[HeadraceError]] = {
    kind.default_code: kind
    for kind in (
        InvalidArgumentError,
        OutOfRangeError,
        NotSupportedError,
        AlreadyExistsError,
        NotFoundError,
        FailedPreconditionError,
        ResourceExhaustedError,
        UnavailableError,
        DeadlineExceededError,
        UnauthenticatedError,
        PermissionDeniedError,
        CallCancelledError,
        InternalError,
    )
}


@dataclass(frozen=True, slots=True)
class Peer:
    """The server that a call went to, for use in messages."""

    target: str
    proxy: str = ""
    """A description of the proxy that may be in front of the server."""
    is_tls: bool = False
    has_certificate: bool = False
    """Whether this client presents a certificate."""

    def __str__(self) -> str:
        return f"{self.target} ({self.proxy})" if self.proxy else self.target


def error_from_status(
    status: status_pb2.Status, *, request_id: str = "", partial: Result | None = None
) -> HeadraceError:
    """Returns the error for the status of an event or of a call."""
    code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    kind = _CLASSES.get(code, RequestFailedError)
    message = status.message or code.name.replace("_", " ").lower()
    return kind(message, status=status, request_id=request_id, partial=partial)


def error_from_rpc(
    error: grpc.RpcError,
    *,
    target: Peer | None = None,
    request_id: str = "",
    partial: Result | None = None,
) -> HeadraceError:
    """Returns the error for the end of a call, with the details from its trailers, if any."""
    code, text, trailers = _parts(error)
    status = _status_of(trailers)
    if status is None or status.code != code.value[0]:
        if code is grpc.StatusCode.UNAVAILABLE and target:
            why = _why_not_reached(text, target) or text or "connection lost"
            text = f"cannot reach a Headrace server at {target}: {why}"
        elif code is grpc.StatusCode.DEADLINE_EXCEEDED:
            text = f"the call's timeout passed before the server at {target or '?'} had answered"
        status = status_pb2.Status(code=code.value[0], message=text)
    return error_from_status(status, request_id=request_id, partial=partial)


def error_from_stream(
    error: grpc.RpcError, *, target: Peer | None = None, request_id: str = ""
) -> HeadraceError:
    """Returns the error for the end of a stream that was not closed by this client.

    Only this function decides whether a stream was lost: whatever code gRPC reports, a lost stream
    becomes UNAVAILABLE. An error sent by the server itself has a reason.
    """
    told = error_from_rpc(error, target=target, request_id=request_id)
    is_lost = told.code is grpc.StatusCode.CANCELLED or (
        not told.reason and (told.code in _LOST_ON_THE_WAY or _RESET in told.message)
    )
    if not is_lost:
        return told
    where = f" to {target}" if target else ""
    message = f"the stream{where} was closed or lost: {told.message}"
    return UnavailableError(message, request_id=request_id)


_LOST_ON_THE_WAY = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
"""The codes that gRPC reports for most streams ended by a broken connection or a proxy."""
_RESET = "RST_STREAM"
"""Part of gRPC's message for other lost streams. gRPC maps some HTTP/2 error codes to other status
codes.
"""


_HANDSHAKES = {
    "WRONG_VERSION_NUMBER": "it does not use TLS; leave out ca, tls and the client's certificate, "
    "or give the server a certificate (--tls-cert, --tls-key)",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not signed by an authority that this client "
    "trusts; give that authority, or a certificate that signed itself, as ca (--ca)",
    "Hostname Verification Check failed": "its certificate is for another name; use that name in "
    "the target, or give it as server_name",
    "Socket closed": "it closed the connection as soon as it was opened, as a server with TLS does "
    "with one in plain text; ask for TLS with tls=True or ca (--tls, --ca)",
}
"""What parts of gRPC's messages mean when a connection could not be opened."""
_ALGORITHMS = (
    "or the two have no signature algorithm in common: gRPC takes certificates of RSA, P-256 and "
    "P-384, and none of Ed25519 or P-521. The server's log says which"
)
_CLOSED_AFTER_TLS = {
    False: "it ended the TLS handshake; it may want a certificate of this client, given with "
    "client_cert and client_key (--client-cert, --client-key), " + _ALGORITHMS,
    True: "it ended the TLS handshake; this client's certificate may be of an authority that the "
    "server does not trust, or have expired, " + _ALGORITHMS,
}
"""What "Socket closed" means with TLS, by whether this client presented a certificate."""


def _why_not_reached(text: str, peer: Peer) -> str:
    """Explains gRPC's message about a connection; empty if the message is unknown."""
    if "failed to connect" not in text:
        return ""
    if peer.is_tls and "Socket closed" in text:
        return _CLOSED_AFTER_TLS[peer.has_certificate]
    return next((meaning for words, meaning in _HANDSHAKES.items() if words in text), "")


def is_about_tls(error: HeadraceError) -> bool:
    """Whether an error means that client and server disagree about TLS."""
    meanings = (*_HANDSHAKES.values(), *_CLOSED_AFTER_TLS.values())
    return any(meaning in error.message for meaning in meanings)


def moved_error(request_id: str) -> HeadraceError:
    """Returns the error for a request whose results continue on another stream."""
    info = error_details_pb2.ErrorInfo(domain="headrace", reason="REQUEST_MOVED")
    status = status_pb2.Status(
        code=code_pb2.ABORTED,
        message=f"the results of request {request_id!r} moved to a stream that attached to it",
    )
    status.details.add().Pack(info)
    return error_from_status(status, request_id=request_id)


def invalid_argument(field: str, description: str) -> InvalidArgumentError:
    """Returns the error for a value that this client cannot put in a message."""
    message = f"{field}: {description}"
    status = status_pb2.Status(code=code_pb2.INVALID_ARGUMENT, message=message)
    violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=description)
    status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    return InvalidArgumentError(message, status=status)


def _rebuild(
    kind: type[HeadraceError], message: str, status: bytes, request_id: str
) -> HeadraceError:
    return kind(message, status=status_pb2.Status.FromString(status), request_id=request_id)


def _parts(error: Any) -> tuple[grpc.StatusCode, str, Iterable[tuple[str, str | bytes]]]:
    """Returns the code, text and trailers of any kind of grpc error."""
    try:
        code, text, trailers = error.code(), error.details(), error.trailing_metadata()
    except (AttributeError, ValueError):  # such as a call on a closed channel
        return grpc.StatusCode.UNKNOWN, str(error), ()
    return code or grpc.StatusCode.UNKNOWN, text or "", trailers or ()


def _status_of(trailers: Iterable[tuple[str, str | bytes]]) -> status_pb2.Status | None:
    for key, value in trailers:
        if key == _DETAILS_TRAILER and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                return None
    return None
