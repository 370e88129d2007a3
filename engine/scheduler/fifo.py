"""First in, first out. Running requests come first, and decoding ones before prefilling ones."""

from __future__ import annotations

from engine.contract.request import Request
from engine.scheduler.base import Scheduler, StepPlan


class FIFOScheduler(Scheduler):
    """The default policy.

    1. Every decoding request gets its one token. Then each prefilling request gets a chunk from the
      rest of the token budget. If blocks run out, the last requests in this order are preempted
      until the others have what they need. A single request always fits; admission checks this.
    2. The rest of the budget goes to the queue, in order, as long as there is room for a request's
      whole prompt. No request is preempted for a new one, and none overtakes the head of the queue.
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
