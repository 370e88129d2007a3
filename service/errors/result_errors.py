"""Errors about results, in addition to the engine's own. `status_table` maps these classes to gRPC
codes.
"""

from __future__ import annotations

from engine.contract.errors import DuplicateRequestError, HeadraceError, RequestNotFoundError
from engine.contract.outputs import RequestFailure
from service.errors.call_errors import LimitReachedError

_RETRY_S = 1.0
"""The retry delay for waiting until a request ends, which may happen at any time."""


class OtherContentError(DuplicateRequestError):
    """The id belongs to a request of a different call: its content or its kind differs."""

    def __init__(self, request_id: str) -> None:
        HeadraceError.__init__(
            self,
            f"request_id: {request_id!r} was given before with other content, or in another kind "
            "of call, and that request is still live or its results are still kept; choose another "
            "id, or send the same again",
        )
        self.request_id = request_id


class TooManyWaitError(LimitReachedError):
    """Too many calls are waiting for a request."""

    def __init__(self, request_id: str, limit: int) -> None:
        super().__init__(
            "TOO_MANY_WAITING_CALLS",
            f"{limit} calls wait for the result of request {request_id!r}, as many as may "
            "(max_waiting_calls): end some of them",
            option="max_waiting_calls",
            limit=limit,
            present=limit,
            retry_after_s=_RETRY_S,
        )


class ResultDroppedError(RequestNotFoundError):
    """A request's result is no longer kept. `why`: the reason."""

    def __init__(self, request_id: str, why: str) -> None:
        HeadraceError.__init__(
            self,
            f"request_id: request {request_id!r} has ended, and its result is no longer kept, "
            f"because {why}; read results sooner, or add the request again",
        )
        self.request_id = request_id


class ResultGoneError(HeadraceError):
    """The requested event is no longer kept, or does not exist yet."""

    def __init__(self, request_id: str, wanted: int, earliest: int, following: int) -> None:
        super().__init__(
            f"from_seq: event {wanted} of request {request_id!r} is not here; "
            f"the events that can be asked for are {earliest} to {following}"
        )
        self.request_id = request_id
        self.earliest = earliest
        self.following = following


class ResultsNotReadError(HeadraceError):
    """A stream's client read nothing for so long that its results were dropped."""

    def __init__(self) -> None:
        super().__init__(
            "results of this stream were not read for minutes after their requests had ended, and "
            "are forgotten; read without long pauses, or use AddRequest and GetResult"
        )


class OutputNotReadError(HeadraceError):
    """A request was ended because its output was not read. `max_hold_s`: how long it was held
    before, or None if the policy is to end it immediately.
    """

    def __init__(self, unread_tokens: int, max_hold_s: float | None) -> None:
        waited = "" if max_hold_s is None else f", and nothing was read for {max_hold_s:g} s"
        super().__init__(
            f"{unread_tokens} tokens of the request's output were not read{waited}; read (or give "
            "credit) as results come, or use AddRequest and GetResult"
        )
        self.unread_tokens = unread_tokens
        self.max_hold_s = max_hold_s


class ResultsFullError(LimitReachedError):
    """A request whose whole result must fit in memory was ended, because unread results left no
    room for the rest of it. `cause`: the limit that is reached. `tokens`: the number of tokens it
    has.
    """

    def __init__(self, cause: LimitReachedError, tokens: int) -> None:
        HeadraceError.__init__(self, f"the request was ended after {tokens} tokens: {cause}")
        vars(self).update(vars(cause))


class RequestMovedError(HeadraceError):
    """The request's results continue on another stream that attached to it."""

    def __init__(self, request_id: str) -> None:
        super().__init__(
            f"the results of request {request_id!r} moved to a stream that attached to it"
        )
        self.request_id = request_id


class AcceptedRequestFailedError(HeadraceError):
    """An accepted request failed."""

    def __init__(self, failure: RequestFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure
