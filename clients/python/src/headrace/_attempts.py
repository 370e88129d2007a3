"""Retries in a fleet: which server a unary call or a new stream goes to, and after a failure, where
and when to try next. docs/fleet.md defines the rules.

    while True:
        found = attempts.next()             # a server, or how long to wait for a change
        ...                                 # the call
        pause = attempts.failed(server, error)   # or raises the error: no attempts are left
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace._fleet import PATIENCE_SECONDS, FleetState, Server
from headrace._fold import Fold
from headrace._placement import PrefixKeys
from headrace.errors import (
    CallCancelledError,
    HeadraceError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
    error_from_status,
)
from headrace.v1.generation_pb2 import ResultEvent

_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 2.0

WRONG_INSTANCE = "WRONG_INSTANCE"
_ADAPTER_NOT_LOADED = "ADAPTER_NOT_LOADED"


class Attempts:
    """The attempts of a call that any server may answer.

    Args:
        state: the servers.
        keys: the keys of the call's prompt.
        retries: the maximum number of retries.
        sticks: whether to retry once on the same server after a lost connection. That server may
            have accepted the request already, and recognizes it when it is sent again.
    """

    def __init__(
        self, state: FleetState, keys: PrefixKeys | None, *, retries: int, sticks: bool = False
    ) -> None:
        self._state = state
        self._keys = keys
        self._left = retries
        self._sticks = sticks
        self._same: Server | None = None
        self._tried: set[Server] = set()
        self._lacking: set[Server] = set()
        self._pauses = 0
        self._even_full = False
        self._began = state.clock()

    def next(self) -> Server | float:
        """Returns the server to call now, or the maximum number of seconds to wait for one.

        A change in the servers may end the wait early.

        Raises:
            UnavailableError: no server has become ready in time.
        """
        if self._same is not None:
            return self._same
        state = self._state
        server = state.choose(
            self._keys, avoid=self._tried, without=self._lacking, even_full=self._even_full
        )
        if server is not None:
            return server
        if (wait := state.room_in(self._lacking)) is not None:
            self._even_full = True  # it has waited once; now it may ask
            return wait
        left = self._began + PATIENCE_SECONDS - state.clock()
        if left <= 0:
            raise state.nobody()
        return left

    def failed(self, server: Server, error: HeadraceError) -> float:
        """Records a failed attempt. Returns the number of seconds to wait before the next one.

        Raises:
            HeadraceError: the given error, if there is no further attempt.
        """
        if lacks_adapter(error):
            self._same = None
            self._lacking.add(server)
            if self._state.room_in(self._lacking) is None:
                raise error
            return 0.0
        if not is_worth_a_retry(error) or not self._left:
            if isinstance(error, UnavailableError):
                self._state.set_aside(server, error)
            raise error
        self._left -= 1
        may = self._state.budget.failed()
        if self._sticks and self._same is None and not error.reason:
            self._same = server
            return 0.0 if may else self._pause(error)
        self._same = None
        note_failure(self._state, server, error)
        self._tried.add(server)
        other = self._state.choose(self._keys, avoid=self._tried, without=self._lacking)
        if may and other is not None and other not in self._tried:
            return 0.0
        self._tried.clear()
        self._even_full = True
        return self._pause(error)

    def succeeded(self) -> None:
        """Records that the call was answered."""
        self._state.budget.succeeded()

    def _pause(self, error: HeadraceError) -> float:
        """The server's `retry_after` if it gave one; otherwise the exponential backoff with
        jitter.
        """
        if error.retry_after is not None:
            return error.retry_after
        pause = _pause(self._pauses)
        self._pauses += 1
        return pause * (0.5 + self._state.jitter())


class OwnerTries:
    """The attempts of a call to the server that has a request.

    The call goes to the instance that an earlier answer named, or, if none is known, to one server
    after another.
    """

    def __init__(self, state: FleetState, request_id: str, *, retries: int) -> None:
        self._state = state
        self._request_id = request_id
        self.owner = state.owner(request_id)
        """The instance to name in the call; empty if none is known."""
        self._left = retries
        self._followed = False
        self._pauses = 0
        self._problem: HeadraceError | None = None
        if self.owner:
            self._servers = state.by_instance(self.owner)[:1]
        else:
            self._servers = state.reachable()

    def next(self) -> Server:
        """Returns the server to ask.

        Raises:
            HeadraceError: no server is left to ask.
        """
        if self._servers:
            return self._servers[0]
        if self._problem is not None:
            raise self._problem
        raise self._gone() if self.owner else self._state.nobody()

    def failed(self, server: Server, error: HeadraceError) -> float:
        """Records a failed attempt. Returns the number of seconds to wait before calling `next`.

        Raises:
            HeadraceError: the given error, if there is no further attempt.
        """
        if error.reason == WRONG_INSTANCE:
            self._follow(server, error)
            return 0.0
        if isinstance(error, NotFoundError) and not self.owner:
            self._servers.pop(0)
            self._problem = self._problem or error
            return 0.0
        if not is_worth_a_retry(error):
            raise error
        if self._left:
            self._left -= 1
            self._state.budget.failed()
            pause = _pause(self._pauses)
            self._pauses += 1
            return error.retry_after or pause * (0.5 + self._state.jitter())
        if self.owner:
            raise error
        self._servers.pop(0)
        self._problem = error  # it may be there: more than that it is nowhere else
        return 0.0

    def _follow(self, server: Server, error: HeadraceError) -> None:
        """Looks for the owner at another address after its old address answered as another
        process.
        """
        server.instance_id = error.metadata.get("instance_id", "")
        self._servers = [one for one in self._state.by_instance(self.owner) if one is not server]
        if self._followed or not self._servers:
            raise self._gone() from error
        self._followed = True

    def _gone(self) -> UnavailableError:
        return UnavailableError(
            f"the server that had request {self._request_id!r} (instance {self.owner}) is gone",
            request_id=self._request_id,
        )


def is_worth_a_retry(error: HeadraceError) -> bool:
    """Whether the same call may succeed later or on another server.

    This is so if the server was lost, is not ready, or has no room and says when to retry.
    """
    if isinstance(error, ResourceExhaustedError):
        return error.retry_after is not None
    return isinstance(error, (UnavailableError, CallCancelledError))


def lacks_adapter(error: HeadraceError) -> bool:
    """Whether the server does not have the request's adapter, which another server may have.

    Each server is asked once, so this needs neither a pause nor the budget.
    """
    return error.reason == _ADAPTER_NOT_LOADED


def note_failure(state: FleetState, server: Server, error: HeadraceError) -> None:
    """Marks the server as full for a while, or as not ready, according to the error."""
    if isinstance(error, ResourceExhaustedError):
        state.full(server, error.retry_after or 0.0)
    else:
        state.set_aside(server, error)


def failed_undelivered(fold: Fold, events: Iterable[ResultEvent]) -> HeadraceError | None:
    """Returns the failure in these events if the request can be sent again.

    That is possible if the server itself failed (its engine stopped) before any output was
    delivered.
    """
    for event in events:
        kind = event.WhichOneof("event")
        if fold.chunks or kind == "delta":
            return None
        if kind == "failed":
            error = error_from_status(event.failed.status, request_id=fold.request_id)
            return error if isinstance(error, UnavailableError) else None
    return None


def _pause(times: int) -> float:
    """The backoff in seconds, without jitter: 0.1 s, tripled after each failure, at most 2 s."""
    pause: float = _FIRST_PAUSE * 3**times
    return min(pause, _LONGEST_PAUSE)
