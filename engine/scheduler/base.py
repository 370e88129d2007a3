"""What every scheduling policy shares: the queue, the batch, and the blocks that go with them.

There is no prefill phase and no decode phase. Each request has tokens, of which the first
num_computed_tokens have their KV in the cache; a step computes some of the rest. A new prompt has
many tokens to compute, a decoding request has one, a preempted request has its prompt and its
output to compute again (or what the host did not keep), and all of them are the same thing.

    add ──▶ waiting ──────────▶ running ──remove──▶ (ended)
               ▲                   │
               └─────preempt───────┘   gives up all blocks; no token is lost

A step: `schedule` decides it, `launched` records that its tokens are being computed, `computed`
that they are. Between the two a further step may be scheduled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from engine.batch import ScheduledBatch, ScheduledRequest
from engine.kv_cache.manager import KVCacheManager
from engine.request import Request, RequestStatus
from engine.types import RequestKey


class StepPendingError(Exception):
    """There are not enough blocks, and a step is still running whose end may free some: nothing is
    decided now. Raised by `Scheduler.extend`, caught by `Scheduler.schedule`; policies let it pass.
    """


class StepPlan:
    """A step that is being put together: what is in it, and what is left of the token budget."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.parts: list[ScheduledRequest] = []


class Scheduler(ABC):
    """Base of the policies. A policy is the order in which `choose` calls `extend` and `admit`; the
    bookkeeping is here. Called on the engine's thread only.
    """

    def __init__(
        self,
        kv_cache: KVCacheManager,
        *,
        max_batch_tokens: int,
        max_requests_per_batch: int,
        safety_margin: float | None = None,
    ) -> None:
        self.kv_cache = kv_cache
        self.max_batch_tokens = max_batch_tokens
        self.max_requests_per_batch = max_requests_per_batch
        self.safety_margin = safety_margin
        self.waiting: OrderedDict[RequestKey, Request] = OrderedDict()
        self.running: dict[RequestKey, Request] = {}
        self.num_preemptions = 0
        self._may_preempt = True

    # ---- the policy ----------------------------------------------------------------------------

    @abstractmethod
    def choose(self, plan: StepPlan, now: float) -> None:
        """Fill the step. Contract:

        - requests are put into it by `extend` (running ones) and `admit` (waiting ones) alone, and
          taken out of the batch by `preempt` alone; each request at most once;
        - a request for which `extend` found no blocks waits for the next step, or others are
          preempted for it; a request that runs alone always fits;
        - if anything is runnable, the step is not empty;
        - the cost does not grow with the queue's length.

        Args:
            plan: empty, with the whole token budget.
            now: monotonic seconds.
        """

    # ---- what the core calls -------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Put a new request into the queue."""
        self.waiting[request.key] = request

    def remove(self, request: Request) -> None:
        """Forget a request, wherever it is, and give its blocks back. O(its blocks)."""
        self.waiting.pop(request.key, None)
        self.running.pop(request.key, None)
        self.kv_cache.free(request.key)

    def fork(self, parent: Request, children: Sequence[Request], now: float) -> None:
        """Take in the other choices of a request whose prompt has just been computed: they share
        its blocks where there is room, and wait at the head of the queue where there is none.
        """
        for child in reversed(children):
            if len(self.running) < self.max_requests_per_batch:
                num_computed = self.kv_cache.fork(parent, child)
                if num_computed is not None:
                    child.num_computed_tokens = num_computed
                    child.status = RequestStatus.PREFILLING
                    child.first_scheduled = now
                    self.running[child.key] = child
                    continue
            self.put_back(child)

    @property
    def has_requests(self) -> bool:
        """Whether anything is waiting or running."""
        return bool(self.running) or bool(self.waiting)

    def schedule(self, now: float, *, is_step_pending: bool = False) -> ScheduledBatch | None:
        """Choose the next step.

        Args:
            now: monotonic seconds.
            is_step_pending: whether a step is still running, whose tokens and ends are not known.

        Returns:
            The step; empty only if nothing can be computed now. None: blocks are short, and the
            pending step must be awaited before anybody is preempted.
        """
        plan = StepPlan(self.max_batch_tokens)
        self._may_preempt = not is_step_pending
        try:
            self.choose(plan, now)
        except StepPendingError:
            return None
        plan.parts.sort(key=_step_order)
        return ScheduledBatch(
            requests=tuple(plan.parts),
            num_tokens=self.max_batch_tokens - plan.budget,
            copies=self.kv_cache.take_copies(),
        )

    def take_hopeless(self, now: float) -> Iterable[Request]:
        """Waiting requests that cannot be done within their time limits: the core ends them."""
        return ()

    def launched(self, part: ScheduledRequest) -> None:
        """Record that a part's step was launched. Called before the next token is appended."""
        request = part.request
        request.num_computed_tokens = part.start + part.num_tokens
        if part.samples:
            request.status = RequestStatus.DECODING

    def computed(self, part: ScheduledRequest) -> None:
        """Record that a part was computed, and its request still lives. It may have been preempted
        since, and have started again with other blocks.
        """
        key = part.request.key
        if key in self.running and part.tables is self.kv_cache.tables(key):
            self.kv_cache.commit(part.request, part.start + part.num_tokens)

    def step_failed(self, batch: ScheduledBatch) -> None:
        """A step failed; the requests in it were removed. Those whose blocks were to be copied by
        it are computed again.
        """
        for key in self.kv_cache.copies_failed(batch.copies):
            request = self.running.get(key) or self.waiting.get(key)
            if request is not None:
                self.kv_cache.free(key)
                if key in self.running:
                    self._give_up(request)
                request.num_computed_tokens = 0

    # ---- what a policy calls -------------------------------------------------------------------

    def extend(self, plan: StepPlan, request: Request) -> bool:
        """Put as many of a running request's tokens into the step as the budget lets.

        Returns:
            Whether it is in the step; False: there are not enough blocks.

        Raises:
            StepPendingError: there are not enough blocks while a step is pending.
        """
        num_tokens = min(request.num_tokens_to_compute, plan.budget)
        end = request.num_computed_tokens + num_tokens
        if not self.kv_cache.allocate(request.key, end):
            if not self._may_preempt:
                raise StepPendingError
            return False
        self._put(plan, request, num_tokens)
        return True

    def admit(self, plan: StepPlan, request: Request, now: float) -> bool:
        """Move a waiting request into the batch, and its first tokens into the step.

        Returns:
            Whether that was done; False: the batch is full, or there are not enough blocks for all
            its tokens beside what the running requests may still need.
        """
        if len(self.running) >= self.max_requests_per_batch or request.num_pending_tokens:
            return False
        found = self.kv_cache.find_prefix(request)
        num_tokens = min(request.num_tokens - found, plan.budget)
        if not self.kv_cache.can_start(request, found, num_tokens, self._spare_blocks()):
            return False
        request.num_computed_tokens = self.kv_cache.start(request)
        if request.first_scheduled is None:
            request.first_scheduled = now
            request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        del self.waiting[request.key]
        self.running[request.key] = request
        request.status = RequestStatus.PREFILLING
        if not self.extend(plan, request):
            raise RuntimeError("a request was started without room for its first tokens")
        return True

    def preempt(self, request: Request) -> None:
        """Take a running request out of the batch: it gives up its blocks and goes back into the
        queue.
        """
        num_kept = self.kv_cache.preempt(request)
        self._give_up(request)
        request.num_computed_tokens = num_kept

    def put_back(self, request: Request) -> None:
        """Put a request that was in the batch, or belongs to one, at the head of the queue."""
        self.waiting[request.key] = request
        self.waiting.move_to_end(request.key, last=False)

    def _give_up(self, request: Request) -> None:
        del self.running[request.key]
        request.status = RequestStatus.WAITING
        request.preemptions += 1
        self.num_preemptions += 1
        self.put_back(request)

    def _put(self, plan: StepPlan, request: Request, num_tokens: int) -> None:
        start = request.num_computed_tokens
        plan.parts.append(
            ScheduledRequest(
                request=request,
                start=start,
                num_tokens=num_tokens,
                tables=self.kv_cache.tables(request.key),
                samples=start + num_tokens == len(request.token_ids),
            )
        )
        plan.budget -= num_tokens

    def _spare_blocks(self) -> int:
        """Blocks to leave for the growth of the running requests, so that a newcomer does not make
        one preempt.
        """
        smallest = min((pool.num_blocks for pool in self.kv_cache.pools), default=0)
        return min(len(self.running), smallest // 10)


def _step_order(part: ScheduledRequest) -> tuple[bool, int]:
    return part.num_tokens > 1, part.start
