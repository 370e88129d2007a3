"""New prompts first: the shortest time to a first token, at the cost of unsteady decoding."""

from __future__ import annotations

from typing import Unpack

from engine.contract.request import Request
from engine.contract.types import RequestKey
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.scheduler.base import Scheduler, SchedulerLimits, StepPlan

PATIENCE = 8
"""How many steps in a row may leave out a decoding request."""


class PrefillFirstScheduler(Scheduler):
    """Prefilling requests come before decoding ones.

    1. Decoding requests that were left out of PATIENCE steps in a row come first, longest wait
      first.
    2. Then the prefilling requests get their chunks, and the queue is admitted in order, as in
      FIFOScheduler. The other decoding requests share the rest of the token budget.

    So a decoding request gets a token within PATIENCE + ⌈max_requests_per_batch /
    max_batch_tokens⌉ steps, unless it is preempted.

    The blocks for one more token of each decoding request are taken before any request is admitted.
    If they run out, the request that was started last is preempted, so the one that was started
    first always continues.
    """

    def __init__(self, kv_cache: KVCacheManager, **limits: Unpack[SchedulerLimits]) -> None:
        super().__init__(kv_cache, **limits)
        self._left_out: dict[RequestKey, int] = {}  # by request: steps in a row without it

    def choose(self, plan: StepPlan, now: float) -> None:
        """Fill the step; see the class."""
        if not self.waiting and self.extend_all(plan):
            self._left_out.clear()
            return
        prefilling: list[Request] = []
        decoding: list[Request] = []
        for request in self.runnable():
            (decoding if request.num_tokens_to_compute == 1 else prefilling).append(request)
        decoding.sort(key=lambda request: -self._left_out.get(request.key, 0))
        overdue = [one for one in decoding if self._left_out.get(one.key, 0) >= PATIENCE]
        victims = list(self.running.values())
        for request in overdue + prefilling:
            self._extend(plan, request, victims)
        for request in decoding:
            if request.key in self.running:
                self.make_room(plan, request, victims)
        while plan.budget > 0 and not plan.preempted:
            head = self.next_waiting()
            if head is None or not self.admit(plan, head, now):
                break
        for request in decoding:
            self._extend(plan, request, victims)
        self._left_out = {
            request.key: self._left_out.get(request.key, 0) + 1
            for request in decoding
            if request.key in self.running and request.key not in plan.parts
        }

    def _extend(self, plan: StepPlan, request: Request, victims: list[Request]) -> None:
        """Put a request into the step if it still runs, is not in it yet, and budget is left."""
        is_open = plan.budget > 0 and request.key not in plan.parts
        if is_open and request.key in self.running and self.make_room(plan, request, victims):
            self.extend(plan, request)
