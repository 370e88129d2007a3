"""First in, first out; running requests first, and among them the decoding ones before those that
still prefill.
"""

from __future__ import annotations

from engine.contract.request import Request
from engine.scheduler.base import Scheduler, StepPlan


class FIFOScheduler(Scheduler):
    """The default policy.

    1. Every decoding request gets its one token, then every prefilling one a chunk from the rest of
      the token budget. If blocks run out, the last request in this order is preempted, until the
      others have what they need. One request alone always fits, as admission checks.
    2. The rest of the budget goes to the queue, in its order, as long as a request's whole prompt
      has room. No request is preempted for a new one, and none overtakes the head of the queue.
    """

    def choose(self, plan: StepPlan, now: float) -> None:
        """Fill the step; see the class."""
        if not self.waiting and self.extend_all(plan):
            return
        order = sorted(self.runnable(), key=_is_prefilling)
        victims = sorted(self.running.values(), key=_is_prefilling)
        for request in order:
            if plan.budget < 1 or request.key not in self.running:
                break
            if self.make_room(plan, request, victims):
                self.extend(plan, request)
        if plan.preempted:
            return
        while plan.budget > 0:
            head = self.next_waiting()
            if head is None or not self.admit(plan, head, now):
                return


def _is_prefilling(request: Request) -> bool:
    return request.num_tokens_to_compute > 1
