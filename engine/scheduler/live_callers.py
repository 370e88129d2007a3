"""The callers of the live requests: how many requests each has waiting, and how much service it has
received.

Service is counted in computed tokens, weighted by cost: PROMPT_COST for a prompt token, OUTPUT_COST
for an output token. Prompt tokens are computed many at a time, while each output token takes a
separate step, which reads all weights and the request's whole KV. Measurements show that an output
token costs as much as a prompt token if the batch is full and compute is the limit, and about ten
times as much if memory bandwidth is the limit. A factor of two lies between these, and is what
Sheng et al. chose ("Fairness in Serving Large Language Models", OSDI 2024).

Each position of a request counts once, when it is launched. Tokens found in the prefix cache do not
count, nor do tokens computed again after a preemption, which the caller did not cause. If the
request lost its KV while it was held, because its results were not read, the tokens count again.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from engine.contract.request import Request
from engine.contract.stats import CallerStats
from engine.contract.types import CallerKey, RequestKey
from engine.scheduler.live_adapters import LiveAdapters
from engine.scheduler.scheduled_batch import ScheduledRequest

PROMPT_COST = 1
OUTPUT_COST = 2
NAMED_CALLERS = 32
"""How many callers have separate figures; the figures of the others are summed."""


@dataclass(slots=True, eq=False)
class _Caller:
    """One caller.

    Attributes:
        weight: the weight of its latest request.
        group: its name, or the name of the group whose weight it shares.
        live, waiting: how many requests it has running or waiting, and how many of these wait.
        service: how much service it has received, counted as this module describes.
    """

    weight: float
    group: CallerKey
    live: int = 0
    waiting: int = 0
    service: int = 0


class LiveCallers:
    """The callers that have requests, and a few that had some. Used on the engine's thread, O(1)
    for each change. `named` and `others` may be called on any thread.

    Attributes:
        adapters: the figures of the same requests' adapters.
    """

    def __init__(self) -> None:
        self.adapters = LiveAdapters()
        self._active: dict[CallerKey, _Caller] = {}
        self._named: dict[CallerKey, _Caller] = {}
        self._idle: OrderedDict[CallerKey, _Caller] = OrderedDict()  # named; longest idle first
        self._of: dict[RequestKey, _Caller] = {}  # of the requests that run or wait
        self._waiting: dict[RequestKey, _Caller] = {}
        self._groups: dict[CallerKey, int] = {}  # how many callers of a group have requests
        self._service = 0

    def enter(self, request: Request) -> None:
        """Record that a request runs or waits. Does nothing if it was already recorded."""
        if request.key in self._of:
            return
        spec = request.spec
        caller = self._active.get(spec.caller)
        if caller is None:
            caller = self._active[spec.caller] = self._make(spec.caller, spec.weight)
            caller.group = spec.caller_group or spec.caller
            self._groups[caller.group] = self._groups.get(caller.group, 0) + 1
        caller.weight = spec.weight
        caller.live += 1
        self._of[request.key] = caller
        if request.adapter is not None:
            self.adapters.of(request.adapter).live += 1

    def queue(self, request: Request) -> None:
        """Record that a request waits. Does nothing if it was already recorded."""
        self.enter(request)
        if request.key not in self._waiting:
            caller = self._waiting[request.key] = self._of[request.key]
            caller.waiting += 1
            if request.adapter is not None:
                self.adapters.of(request.adapter).waiting += 1

    def unqueue(self, request: Request) -> None:
        """Record that a request no longer waits. Does nothing if it was already recorded."""
        caller = self._waiting.pop(request.key, None)
        if caller is not None:
            caller.waiting -= 1
            if request.adapter is not None:
                self.adapters.of(request.adapter).waiting -= 1

    def leave(self, request: Request) -> None:
        """Record that a request neither runs nor waits. Does nothing if it was already recorded."""
        self.unqueue(request)
        caller = self._of.pop(request.key, None)
        if caller is None:
            return
        if request.adapter is not None:
            self.adapters.of(request.adapter).live -= 1
        caller.live -= 1
        if not caller.live:
            key = request.spec.caller
            del self._active[key]
            self._groups[caller.group] -= 1
            if not self._groups[caller.group]:
                del self._groups[caller.group]
            if key in self._named:
                self._idle[key] = caller

    def count(self, part: ScheduledRequest) -> int:
        """Charge a request's share of a step to its caller, and return the amount of service."""
        request, service = part.request, service_of(part)
        request.num_counted_tokens = max(request.num_counted_tokens, part.start + part.num_tokens)
        self._service += service
        caller = self._of.get(request.key)
        if caller is not None:
            caller.service += service
        return service

    def count_drafts(self, request: Request) -> None:
        """Record that the request's computed tokens were charged, as those of drafts are."""
        request.num_counted_tokens = max(request.num_counted_tokens, request.num_computed_tokens)

    def has(self, caller: CallerKey) -> bool:
        """Whether a caller has running or waiting requests."""
        return caller in self._active

    def num_running(self, caller: CallerKey) -> int:
        """The number of a caller's running requests."""
        found = self._active.get(caller)
        return 0 if found is None else found.live - found.waiting

    def weight(self, caller: CallerKey) -> float:
        """Return the effective weight of a caller that has requests. Callers of a group that have
        requests divide its weight equally.
        """
        found = self._active[caller]
        return found.weight / self._groups[found.group]

    def named(self) -> tuple[CallerStats, ...]:
        """Return the callers with separate figures, those with requests first."""
        named = list(self._named.items())  # a copy: the engine's thread may change it meanwhile
        named.sort(key=lambda item: item[1].live == 0)
        return tuple(
            CallerStats(key, one.weight, one.live - one.waiting, one.waiting, one.service)
            for key, one in named
        )

    def others(self, named: tuple[CallerStats, ...]) -> CallerStats | None:
        """Return the sum over all other callers, or None if there were none."""
        num_waiting = len(self._waiting)
        running = len(self._of) - num_waiting - sum(one.running for one in named)
        waiting = num_waiting - sum(one.waiting for one in named)
        service = self._service - sum(one.service for one in named)
        if running <= 0 and waiting <= 0 and service <= 0:
            return None
        return CallerStats(
            running=max(0, running), waiting=max(0, waiting), service=max(0, service)
        )

    def _make(self, key: CallerKey, weight: float) -> _Caller:
        """Create the record of a new caller. It gets separate figures if there is room, or in place
        of the named caller that has been without requests the longest.
        """
        known = self._idle.pop(key, None)
        if known is not None:
            return known
        if len(self._named) == NAMED_CALLERS and self._idle:
            del self._named[self._idle.popitem(last=False)[0]]
        caller = _Caller(weight, key)
        if len(self._named) < NAMED_CALLERS:
            self._named[key] = caller
        return caller


def service_of(part: ScheduledRequest) -> int:
    """The service that a request's share of a step counts as, drafts included, without tokens that
    were charged before.
    """
    request, end = part.request, part.start + part.num_tokens + len(part.drafts)
    start = max(part.start, request.num_counted_tokens)
    if start >= end:
        return 0
    num_prompt = max(0, min(end, request.num_prompt_tokens) - start)
    return PROMPT_COST * num_prompt + OUTPUT_COST * (end - start - num_prompt)
