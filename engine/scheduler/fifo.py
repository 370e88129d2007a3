"""First in, first out; running requests first, and among them the decoding ones before those that
still prefill.
"""

from __future__ import annotations

from engine.request import Request
from engine.scheduler.base import Scheduler, StepPlan


class FIFOScheduler(Scheduler):
    """The default policy.

    1. Every decoding request gets its one token, every prefilling one a chunk of what is left of
       the token budget. When blocks run out, the request that comes last in this order is
       preempted, until the others have what they need. One request alone always fits: admission saw
       to that.
    2. What is left of the budget goes to the queue, in its order, as long as a request's whole
       prompt has room. No one is preempted for a newcomer, and nobody overtakes the head of the
       queue.
    """

    def choose(self, plan: StepPlan, now: float) -> None:
        """Fill the step; see the class."""
        order = self._running_order()
        preempted = False
        index = 0
        while index < len(order) and plan.budget > 0:
            if self.extend(plan, order[index]):
                index += 1
            else:
                self.preempt(order.pop())
                preempted = True
        if preempted and plan.parts:
            return
        while plan.budget > 0 and self.waiting:
            if not self.admit(plan, next(iter(self.waiting.values())), now):
                return

    def _running_order(self) -> list[Request]:
        decoding: list[Request] = []
        prefilling: list[Request] = []
        for request in self.running.values():
            if not request.is_generated:
                (decoding if request.num_tokens_to_compute == 1 else prefilling).append(request)
        return decoding + prefilling
