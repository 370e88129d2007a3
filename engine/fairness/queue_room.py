"""Decides who may put a request into the queue. The queue has a limit, and each caller a share of
it (`engine.fairness.shares`).

    enter ──▶ … its first output, or its end ──▶ begun

The loop knows exactly how many requests wait. For the shares, however, a request counts for its
caller until its first output. A request whose prompt is being computed therefore counts too, and a
preempted one does not. This changes the shares by no more than the number of running requests.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engine.contract.errors import QueueFullError
from engine.contract.outputs import RequestOutput
from engine.contract.request import GenerationRequest
from engine.contract.types import NO_CALLER, CallerKey, RequestId
from engine.fairness.drain_rate import DrainRate
from engine.fairness.shares import Shares


@dataclass(frozen=True, slots=True)
class _Asker:
    """A caller. `weight` is its group's weight."""

    key: CallerKey
    group: CallerKey
    weight: float


class QueueRoom:
    """Admits requests to the queue. The loop must hold its lock when calling any method except
    `has_of`.
    """

    def __init__(
        self,
        limit: int,
        ends: DrainRate,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`limit` is how many requests may wait; 0 means no limit. `ends` is the rate at which
        requests leave.
        """
        self._shares: Shares[_Asker] = Shares(limit or None, clock, jitter, rate=ends)
        self._is_bounded = limit > 0
        self._entered: dict[RequestId, tuple[_Asker, int]] = {}

    def enter(self, requests: Sequence[GenerationRequest], waiting: int) -> None:
        """Admit requests to the queue, either all or none.

        Args:
            requests: at least one.
            waiting: how many requests wait now.

        Raises:
            QueueFullError: there is no room.
        """
        if not self._is_bounded:
            return
        shares = self._shares
        askers = [self._asker(request) for request in requests]
        number = Counter(asker.key for asker in askers)
        ticket = requests[0].ticket if len(requests) == 1 else ""
        for asker in {asker.key: asker for asker in askers}.values():
            refusal = shares.ask(asker, number[asker.key], present=waiting, ticket=ticket)
            if refusal is not None:
                raise QueueFullError(
                    refusal.limit,
                    refusal.retry_after_s,
                    waiting,
                    refusal.held if refusal.is_above_share else None,
                    refusal.share if refusal.is_above_share else None,
                    refusal.kept,
                )
            waiting += number[asker.key]
        for asker, request in zip(askers, requests, strict=True):
            shares.add(asker, request.n)
            if shares.tickets.places and request.ticket:
                shares.got_in(asker, request.ticket)
            self._entered[request.request_id] = asker, request.n

    def has_of(self, outputs: Iterable[RequestOutput]) -> bool:
        """Whether `begun` has anything to do for these outputs. Requires no lock."""
        entered = self._entered
        return bool(entered) and any(output.request_id in entered for output in outputs)

    def begun(self, outputs: Iterable[RequestOutput]) -> None:
        """Stop counting requests whose first output is among these."""
        for output in outputs:
            entered = self._entered.pop(output.request_id, None)
            if entered is not None:
                self._shares.remove(*entered, served=True)

    def _asker(self, request: GenerationRequest) -> _Asker:
        group = request.caller_group
        if group == NO_CALLER:
            return _Asker(request.caller, request.caller, request.weight)
        # A request counts with its caller's part of the group's weight.
        callers = round(1 / self._shares.part_of(_Asker(request.caller, group, 1.0)))
        return _Asker(request.caller, group, request.weight * callers)
