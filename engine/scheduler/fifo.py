"""First in, first out; running requests first, and among them the decoding ones before those that
still prefill.
"""

from __future__ import annotations

from engine.batch import ScheduledBatch, ScheduledRequest
from engine.request import Request
from engine.scheduler.base import Scheduler


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

    def schedule(self, now: float) -> ScheduledBatch:
        """Choose the next step; see the class."""
        budget = self.max_batch_tokens
        order = self._running_order()
        batch: list[ScheduledRequest] = []
        preempted = False
        index = 0
        while index < len(order) and budget > 0:
            request = order[index]
            num_tokens = min(request.num_tokens_to_compute, budget)
            fits = self.kv_cache.allocate(
                request.request_id, request.num_computed_tokens + num_tokens
            )
            if fits:
                batch.append(self._scheduled(request, num_tokens))
                budget -= num_tokens
                index += 1
            else:
                self._preempt(order.pop())
                preempted = True
        if not (preempted and batch):
            self._schedule_waiting(batch, budget, now)
        batch.sort(key=_step_order)
        return ScheduledBatch(
            requests=tuple(batch), num_tokens=sum(part.num_tokens for part in batch)
        )

    def _running_order(self) -> list[Request]:
        decoding = [r for r in self.running.values() if r.num_tokens_to_compute == 1]
        if len(decoding) == len(self.running):
            return decoding
        return decoding + [r for r in self.running.values() if r.num_tokens_to_compute > 1]

    def _schedule_waiting(self, batch: list[ScheduledRequest], budget: int, now: float) -> None:
        while budget > 0 and self.waiting and len(self.running) < self.max_requests_per_batch:
            request = next(iter(self.waiting.values()))
            total = request.num_tokens_to_compute
            num_tokens = min(total, budget)
            if not self.kv_cache.can_admit(total, num_tokens, self._spare_blocks()):
                return
            self.kv_cache.allocate(request.request_id, num_tokens)
            self._admit(request, now)
            batch.append(self._scheduled(request, num_tokens))
            budget -= num_tokens

    def _spare_blocks(self) -> int:
        """Blocks to leave for the growth of the running requests, so that a newcomer does not make
        one preempt.
        """
        smallest = min((pool.num_blocks for pool in self.kv_cache.pools), default=0)
        return min(len(self.running), smallest // 10)


def _step_order(scheduled: ScheduledRequest) -> tuple[bool, int]:
    return scheduled.num_tokens > 1, scheduled.start
