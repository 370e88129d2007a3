"""Errors in OpenAI's format: an HTTP status, and an object with message, type, param and code.

`param` names the member of the body that a field of the contract came from. `code` is the server's
reason in lower case, so that programs can distinguish causes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import grpc

from headrace.errors import HeadraceError

_Code = grpc.StatusCode

STATUSES = {
    _Code.INVALID_ARGUMENT: (400, "invalid_request_error"),
    _Code.OUT_OF_RANGE: (400, "invalid_request_error"),
    _Code.FAILED_PRECONDITION: (400, "invalid_request_error"),
    _Code.UNIMPLEMENTED: (400, "invalid_request_error"),  # SDKs would repeat a 501
    _Code.UNAUTHENTICATED: (401, "authentication_error"),
    _Code.PERMISSION_DENIED: (403, "permission_error"),
    _Code.NOT_FOUND: (404, "not_found_error"),
    _Code.ALREADY_EXISTS: (409, "invalid_request_error"),
    _Code.ABORTED: (409, "invalid_request_error"),
    _Code.RESOURCE_EXHAUSTED: (429, "rate_limit_error"),
    _Code.UNAVAILABLE: (503, "server_error"),
    _Code.DEADLINE_EXCEEDED: (504, "server_error"),
}
"""The HTTP status and OpenAI's type for google.rpc's codes. Other codes are (500, server_error)."""
_RETRY_SECONDS = 1.0
"""The retry delay used if the server gives none."""
_PREFIXES = (
    "add.",
    "spec.",
    "chat.",
    "sampling.",
    "stop.",
    "output.",
    "scheduling.",
    "cache.",
    "text.",
)
_OF_CAPABILITIES = {
    "chat": "messages",
    "content_parts": "messages",
    "priorities": "priority",
    "reasoning_budget": "max_reasoning_tokens",
}
"""The members that need a capability, where they have another name than the capability."""
_TOO_LONG = re.compile(r"limits\.max_(prompt|context)_tokens")


class ApiError(Exception):
    """An error to send to a caller.

    Attributes:
        status: the HTTP status.
        headers: headers in addition to those of every answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        self._error = {"message": message, "type": type, "param": param, "code": code}

    def body(self) -> dict[str, Any]:
        """Returns OpenAI's error object."""
        return {"error": self._error}


def invalid(param: str, message: str, code: str | None = "invalid_field") -> ApiError:
    """Returns the error for an invalid member of the body."""
    return ApiError(400, f"{param}: {message}", param=param, code=code)


def from_headrace(error: HeadraceError, names: Mapping[str, str]) -> ApiError:
    """Converts an error of the contract.

    Args:
        error: an error of the client or the server.
        names: fields of the contract, with the members of the body that they came from.
    """
    status, kind = STATUSES.get(error.code, (500, "server_error"))
    reason = error.reason.lower() or None
    param, message = None, error.message
    field, colon, rest = message.partition(":")
    paths = [one.field for one in error.fields]
    if paths:
        reason = reason or "invalid_field"
        lacking = error.metadata.get("capability", paths[0])
        param = param_of(_OF_CAPABILITIES.get(lacking, lacking), names)
    if colon and (field in paths or field.startswith("add.spec.")):
        message = f"{param or param_of(field, names)}:{rest}"
    if param in ("messages", "prompt") and _TOO_LONG.search(message):
        reason = "context_length_exceeded"  # by which programs know it
    headers = {}
    if status in (429, 503):
        wait = _RETRY_SECONDS if error.retry_after is None else error.retry_after
        headers["retry-after"] = str(max(1, math.ceil(wait)))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
        reason = "invalid_api_key"
    if status == 404 and reason == "model_not_found":
        param = "model"
    return ApiError(status, message, type=kind, param=param, code=reason, headers=headers)


def param_of(field: str, names: Mapping[str, str]) -> str:
    """Converts a field's path to the body's names.

    For example, `chat.messages[1].content` becomes `messages[1].content`, and `stop.max_tokens`
    becomes the body's name for it.
    """
    for prefix in _PREFIXES:
        field = field.removeprefix(prefix)
    head = re.split(r"[.\[]", field, maxsplit=1)[0]
    return names.get(field) or names.get(head, head) + field[len(head) :]
