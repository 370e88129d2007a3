"""Flow control: what becomes of a request whose output is not read.

    log.push ──── untaken tokens ──▶ pushed ── at the bound ──▶ the engine holds the request
    stream.take ─────────────────▶ taken ─── below half of it ─▶ it goes on
    attach, loss, credit ────────▶ moved
    nothing taken for max_pause ─▶ the request ends: RESULTS_NOT_READ

A request may have so many tokens of output that its stream has not taken: until then they merge,
and generation goes on. At the bound it is held (or ended at once, where the policy says so). What
counts is the writer's progress: it stands still while gRPC's flow control blocks it, and for a
request that is out of credit.

Not held are requests whose output is to be kept whatever their readers do: those of AddRequest, and
those that are delivered in one piece at their end. Their own length bounds them. A request whose
stream is lost, on a lease, is held as any other; while it has no stream, it waits for the lease's
end instead of max_pause, and GetResult reads in the stream's place.

A request that has ended, but whose stream is out of credit for it, is not kept waiting for ever
either: after max_pause the rest is sent without credit.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from service.delivery.events import DeliveryOptions

if TYPE_CHECKING:
    from service.delivery.log import RequestLog


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowOptions:
    """How much of a request may be unread, and what then.

    Attributes:
        max_unread_tokens, max_unread_bytes: the bound, of all choices together; whichever comes
            first. Bytes are estimated from what the request wants to be told of a token.
        ends: whether a request ends when it reaches the bound, instead of being held.
        max_pause_s: how long a request may be held while its stream takes nothing.
    """

    max_unread_tokens: int
    max_unread_bytes: int
    ends: bool
    max_pause_s: float


@dataclass(slots=True)
class LogFlow:
    """What is known of one request.

    Attributes:
        bound: with so many untaken tokens it is held.
        low: with so few it goes on.
        is_held: whether the engine was told to hold it.
        timer: ends the wait for its reader.
    """

    bound: int = sys.maxsize
    low: int = 0
    is_held: bool = False
    timer: asyncio.TimerHandle | None = None


class FlowControl:
    """Watches how far the requests' streams are behind. All methods run on the event loop."""

    def __init__(
        self,
        options: FlowOptions,
        *,
        hold: Callable[[RequestLog], None],
        unhold: Callable[[RequestLog], None],
        end: Callable[[RequestLog], None],
    ) -> None:
        """Wire it.

        Args:
            options: see the class.
            hold, unhold: tell the engine; must not block.
            end: ends a live request, because its results are not read.
        """
        self.options = options
        self._hold = hold
        self._unhold = unhold
        self._end = end

    def of(self, delivery: DeliveryOptions, n: int, *, is_kept: bool) -> LogFlow:
        """For a new request with n choices. `is_kept`: it came by AddRequest."""
        if is_kept or delivery.final:
            return LogFlow()
        options = self.options
        limit = min(
            options.max_unread_tokens,
            max(1, options.max_unread_bytes // delivery.bytes_per_token),
        )
        # What its own min_tokens_per_delta holds back is not unread.
        held_back = n * (delivery.min_tokens_per_delta - 1)
        return LogFlow(limit + held_back, limit // 2 + held_back)

    def pushed(self, log: RequestLog) -> None:
        """The log has reached its bound, or is beyond it."""
        if log.flow.is_held or log.ended or log.accepted is None:
            return
        if self.options.ends:
            self._give_up(log)
            return
        log.flow.is_held = True
        self._hold(log)
        self.moved(log)

    def taken(self, log: RequestLog) -> None:
        """Something of a log was taken that is held, or is on credit."""
        flow = log.flow
        if flow.is_held and not log.ended and log.untaken <= flow.low:
            flow.is_held = False
            self._unhold(log)
        self.moved(log)

    def moved(self, log: RequestLog) -> None:
        """The log is held, or has another stream or credit, or none any more: its wait begins anew,
        or is over.
        """
        flow = log.flow
        if flow.timer is not None:
            flow.timer.cancel()
            flow.timer = None
        if log.stream is None:
            return
        if log.ended:
            waits = log.credit is not None and not log.delivered and not log.is_takeable
        else:
            waits = flow.is_held
        if waits:
            loop = asyncio.get_running_loop()
            flow.timer = loop.call_later(self.options.max_pause_s, self._give_up, log)

    def over(self, log: RequestLog) -> None:
        """The log has ended, or is forgotten: nothing of it is held any more."""
        log.flow.is_held = False
        self.moved(log)

    def _give_up(self, log: RequestLog) -> None:
        log.flow.timer = None
        log.credit = None  # what is there goes with its end
        if not log.ended:
            self._end(log)
        elif log.stream is not None:
            log.stream.mark(log)
