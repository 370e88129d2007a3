"""What every scheduling policy shares: the queue, the batch, and the blocks that go with them.

There is no prefill phase and no decode phase. Each request has tokens, of which the first
num_computed_tokens have their KV in the cache; a step computes some of the rest. A new prompt has
many tokens to compute, a decoding request has one, a preempted request has its prompt and its
output to compute again (or what the host did not keep), and all of them are the same thing.

    add ──▶ waiting ──────────▶ running ──remove──▶ (ended)
               ▲                   │
               └─────preempt───────┘   gives up all blocks; no token is lost
               └────set_aside──────┘   keeps them until others need them

A request that is held, because nobody reads what it generates, is in neither: no step takes it, and
it has no place in the batch. It keeps its blocks until they are needed, and is preempted before
anybody that runs.

    waiting, running ──hold──▶ held ──unhold──▶ waiting; running, where it still has its blocks and
                                                there is a place for it

A step: `schedule` decides it, `launched` records that its tokens are being computed, `computed`
that they are. Between the two a further step may be scheduled.

docs/schedulers.md shows how a policy is written and registered.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from typing import ClassVar

from engine.batch import ScheduledBatch, ScheduledRequest
from engine.kv_cache.manager import KVCacheManager
from engine.request import Request, RequestStatus
from engine.scheduler.callers import Callers
from engine.scheduler.pace import StepPace
from engine.scheduler.plan import StepPendingError, StepPlan
from engine.types import RequestKey

__all__ = ["Scheduler", "StepPendingError", "StepPlan"]  # what a policy is written with


class Scheduler(ABC):
    """Base of the policies. A policy is the order in which `choose` calls `make_room`, `extend` and
    `admit`; the bookkeeping is here. Called on the engine's thread only.

    Attributes:
        heeds_priorities: whether the policy looks at requests' priorities; of the class. Where it
            does not, a priority other than 0 is refused at admission.
        kv_cache: the blocks.
        max_batch_tokens: the token budget of a step.
        max_requests_per_batch: most requests that run at the same time.
        safety_margin: see ContinuousBatchingConfig.
        waiting: the queue, in the order of arrival; preempted requests at its head.
        running: the batch, in the order in which its requests were started.
        held: the requests that are held, with their blocks or without.
        callers: who has requests that run or wait, and how much service each was given.
        num_preemptions: since the start.
        pace: keeps steps in which requests decode to a target time; None: there is no target.
    """

    heeds_priorities: ClassVar[bool] = False

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
        self.held: dict[RequestKey, Request] = {}
        self.callers = Callers()
        # With blocks, and not running: held ones and, of those that wait, the ones that were set
        # aside, in the order in which they are to lose them; and those that are held no more and go
        # on with the next step.
        self._parked: dict[RequestKey, Request] = {}
        self._returning: dict[RequestKey, Request] = {}
        self.num_preemptions = 0
        self.pace: StepPace | None = None
        self._may_preempt = True
        self._resting: Container[RequestKey] = ()  # of the step that is being chosen

    # ---- the policy ----------------------------------------------------------------------------

    @abstractmethod
    def choose(self, plan: StepPlan, now: float) -> None:
        """Fill the step. Contract:

        - requests are put into it by `extend` (those of `runnable`), `extend_all` (all of these)
          and `admit` (waiting ones) alone, and taken out of the batch by `make_room`, `preempt` and
          `set_aside` alone; each is put in at most once, and only while `plan.budget` lasts;
        - a request for which `extend` found no blocks waits for the next step, or others are
          preempted for it (`make_room`); a request that runs alone always fits;
        - none that `admit` put in is preempted or set aside for the same step;
        - if anything is runnable or could be admitted, the step is not empty;
        - each request is put in after a bounded number of steps in which nothing new arrives: the
          simplest way is that one request, such as the one that was started first, is never
          preempted and never left out for long;
        - the cost does not grow with the queue's length;
        - StepPendingError passes through. `choose` is then called again, for an empty plan.

        Args:
            plan: empty, with the whole token budget.
            now: monotonic seconds.
        """

    def queued(self, request: Request) -> None:  # noqa: B027  # policies may do without
        """A request has entered the queue, new, preempted or set aside, or was preempted while it
        was there: for policies that keep an order of their own.
        """

    def unqueued(self, request: Request) -> None:  # noqa: B027  # likewise
        """A request has left the queue: it is not in `waiting` any more."""

    def served(self, request: Request, service: int) -> None:  # noqa: B027  # likewise
        """A step that was launched gives a request's caller so much service (see `callers`)."""

    def next_waiting(self) -> Request | None:
        """The waiting request whose turn is next; None: none waits."""
        return next(iter(self.waiting.values()), None)

    def take_hopeless(self, now: float) -> Iterable[Request]:
        """Waiting requests that cannot be done within their time limits: the core ends them. Called
        after each `schedule`.
        """
        return ()

    def measured(self, num_tokens: int, seconds: float) -> None:  # noqa: B027  # likewise
        """A step of this many tokens took this long: for policies that estimate. The pace is told
        by itself.
        """

    # ---- what the core calls -------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Put a new request into the queue."""
        self.waiting[request.key] = request
        self._enter_queue(request)

    def put_back(self, request: Request) -> None:
        """Put a request that was in the batch, or belongs to one, at the head of the queue."""
        self.waiting[request.key] = request
        self.waiting.move_to_end(request.key, last=False)
        self._enter_queue(request)

    def remove(self, request: Request) -> None:
        """Forget a request, wherever it is, and give its blocks back. O(its blocks)."""
        self._leave_queue(request)
        for place in (self.running, self.held, self._parked, self._returning):
            place.pop(request.key, None)
        self.callers.leave(request)
        self.kv_cache.free(request.key)

    def hold(self, request: Request) -> None:
        """Leave a request out of all steps from the next one on. One whose step is still running
        gets that step's token. Harmless for one that is in neither queue nor batch. O(1).
        """
        key = request.key
        if key in self.running or key in self._returning:
            self.running.pop(key, None)
            self._returning.pop(key, None)
            self.held[key] = self._parked[key] = request
        elif key in self.waiting:
            self._leave_queue(request)
            self.held[key] = request
        if key in self.held:
            self.callers.leave(request)

    def unhold(self, request: Request) -> None:
        """Let a request go on with the next step; where it has lost its blocks, or there is no
        place in the batch, from the head of the queue. Harmless for one that is not held. O(1).
        """
        if self.held.pop(request.key, None) is None:
            return
        if self._parked.pop(request.key, None) is not None:
            self._returning[request.key] = request
            self.callers.enter(request)
        else:
            self.put_back(request)

    @property
    def num_held(self) -> int:
        """Requests that are held, or go on with the next step."""
        return len(self.held) + len(self._returning)

    def fork(self, parent: Request, children: Sequence[Request]) -> None:
        """Take in the other choices of a request whose prompt has just been computed: they share
        its blocks where there is room, and wait at the head of the queue where there is none.
        """
        left: list[Request] = []
        for child in children:
            child.first_scheduled = parent.first_scheduled
            child.num_cached_tokens = parent.num_cached_tokens
            num_computed = None
            if len(self.running) < self.max_requests_per_batch:
                num_computed = self.kv_cache.fork(parent, child)
            if num_computed is None:
                left.append(child)
                continue
            child.num_computed_tokens = num_computed
            child.status = RequestStatus.PREFILLING
            self.running[child.key] = child
            self.callers.enter(child)
        for child in reversed(left):
            self.put_back(child)

    @property
    def has_requests(self) -> bool:
        """Whether there is anything that a step may take."""
        return bool(self.running) or bool(self.waiting) or bool(self._returning)

    def schedule(
        self,
        now: float,
        *,
        is_step_pending: bool = False,
        resting: Container[RequestKey] = (),
    ) -> ScheduledBatch | None:
        """Choose the next step.

        Args:
            now: monotonic seconds.
            is_step_pending: whether a step is still running, whose tokens and ends are not known.
            resting: running requests whose turn this step is not; they keep their places.

        Returns:
            The step; empty only if nothing can be computed now. None: blocks are short, and the
            pending step must be awaited before anybody is preempted.
        """
        plan = StepPlan(self.max_batch_tokens, self.pace, self.runnable)
        self._may_preempt = not is_step_pending
        self._resting = resting
        try:
            self._take_back()
            self.choose(plan, now)
        except StepPendingError:
            return None
        return ScheduledBatch(
            requests=tuple(sorted(plan.parts.values(), key=_step_order)),
            num_tokens=self.max_batch_tokens - plan.budget,
            copies=self.kv_cache.take_copies(),
        )

    def launched(self, part: ScheduledRequest) -> None:
        """Record that a part's step was launched. Called before the next token is appended."""
        request = part.request
        request.num_computed_tokens = part.start + part.num_tokens
        if part.samples:
            request.status = RequestStatus.DECODING
        service = self.callers.count(part)
        if service:
            self.served(request, service)

    def computed(self, part: ScheduledRequest) -> None:
        """Record that a part was computed, and its request still runs."""
        self.kv_cache.commit(part.request, part.start + part.num_tokens)

    def step_done(self, batch: ScheduledBatch, seconds: float, *, is_decode: bool) -> None:
        """Record how long a step took.

        Args:
            batch: the step.
            seconds: of the device; not those in which it waited for the step before.
            is_decode: whether requests decoded in it.
        """
        if self.pace is not None:
            self.pace.measured(batch, seconds, is_decode=is_decode)
        self.measured(batch.num_tokens, seconds)

    def step_failed(self, batch: ScheduledBatch) -> list[Request]:
        """A step failed; the requests in it were removed.

        Returns:
            Others, whose blocks were to be copied by it: they wait, and are computed again. What a
            later step that was launched already says of them is wrong.
        """
        lost: list[Request] = []
        for key in self.kv_cache.copies_failed(batch.copies):
            request = self.running.get(key) or self.waiting.get(key)
            request = request or self.held.get(key) or self._returning.get(key)
            if request is not None:
                self.kv_cache.free(key)
                if key in self.running or key in self._parked or key in self._returning:
                    self._give_up(request)
                request.num_computed_tokens = 0
                lost.append(request)
        return lost

    # ---- what a policy calls -------------------------------------------------------------------

    def runnable(self) -> list[Request]:
        """The running requests that have something to compute, in the order of `running`. The
        others wait for their last token, or for a later step.
        """
        resting = self._resting
        return [
            request
            for key, request in self.running.items()
            if not request.is_generated and key not in resting
        ]

    def extend_all(self, plan: StepPlan) -> bool:
        """Put all that the running requests have to compute into an empty step, if the budget, the
        time and the blocks last: then the order among them does not matter.

        Returns:
            Whether that was done; False: nothing is in the step.

        Raises:
            StepPendingError: there are not enough blocks while a step is pending.
            ValueError: the step is not empty.
        """
        if plan.parts:
            raise ValueError("all requests at once are put into an empty step")
        requests = self.runnable()
        counts = [len(one.token_ids) - one.num_computed_tokens for one in requests]
        num_tokens = sum(counts)
        if num_tokens > plan.budget:
            return False
        if num_tokens > len(requests) and not plan.has_time_for(requests):
            return False
        for request in requests:
            if not self._has_room(request, len(request.token_ids)):
                return False
        tables = self.kv_cache.tables
        for request, count in zip(requests, counts, strict=True):
            key = request.key
            plan.parts[key] = ScheduledRequest(
                request, request.num_computed_tokens, count, tables(key), samples=True
            )
        plan.budget -= num_tokens
        return True

    def extend(self, plan: StepPlan, request: Request) -> bool:
        """Put as many of a running request's tokens into the step as the budget and the time let.

        Returns:
            Whether it is in the step; False: there are not enough blocks, or it is a prompt and no
            time is left for it.

        Raises:
            StepPendingError: there are not enough blocks while a step is pending.
            ValueError: it is in the step already, or the budget is spent.
        """
        if plan.budget < 1 or request.key in plan.parts:
            raise ValueError("a request is put into a step once, while there is a token budget")
        num_tokens = plan.chunk(request, request.num_computed_tokens)
        return num_tokens > 0 and self._put(plan, request, num_tokens)

    def make_room(self, plan: StepPlan, request: Request, victims: list[Request]) -> bool:
        """Get the blocks for a running request's next tokens (as many as the budget and the time
        let; one where the budget is spent, none where the time is), so that `extend` finds them.

        Args:
            victims: running requests, from which as many as need be are preempted and removed, the
                last first. The request is one of them.

        Returns:
            False: it was preempted itself.

        Raises:
            StepPendingError: there are not enough blocks while a step is pending.
        """
        while True:
            wanted = 1
            if plan.budget > 0:
                wanted = plan.chunk(request, request.num_computed_tokens)
            if self._has_room(request, request.num_computed_tokens + wanted):
                return True
            victim = victims.pop()
            self.preempt(plan, victim)
            if victim is request:
                return False

    def admit(self, plan: StepPlan, request: Request, now: float) -> bool:
        """Move a waiting request into the batch, and its first tokens into the step.

        Returns:
            Whether that was done; False: the batch is full, or there are not enough blocks for all
            its tokens beside what the running requests may still need, or there is no time left
            for its prompt.

        Raises:
            StepPendingError: see `could_admit`.
        """
        if plan.budget < 1 or not self.could_admit(plan, request, ()):
            return False
        if request.key in self._parked:
            if not self._has_parked_room(plan, request):
                return False
        else:
            request.num_computed_tokens = self.kv_cache.start(request)
        if request.first_scheduled is None:
            request.first_scheduled = now
            request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        self._leave_queue(request)
        self.running[request.key] = request
        request.status = RequestStatus.PREFILLING
        # Others may have left it other blocks than `could_admit` saw; it goes on all the same.
        num_tokens = max(1, plan.chunk(request, request.num_computed_tokens))
        if not self._put(plan, request, num_tokens):
            raise RuntimeError("a request was started without room for its first tokens")
        return True

    def could_admit(self, plan: StepPlan, request: Request, without: Sequence[Request]) -> bool:
        """Whether `admit` would find a place, time and blocks if some of the running requests were
        preempted. Where they share blocks with others, it may find fewer than this thinks. Held
        requests, and those that were set aside, give up their blocks as far as that helps.

        Raises:
            StepPendingError: such requests have blocks to give up, and a step is pending.
        """
        num_running = len(self.running) - len(without)
        if num_running >= self.max_requests_per_batch:
            return False
        if request.key in self._parked:
            # Its blocks are there, but perhaps for one.
            return plan.chunk(request, request.num_computed_tokens) > 0
        spare = self._spare_blocks(num_running)
        for other in without:
            for index, table in enumerate(self.kv_cache.tables(other.key)):
                spare[index] -= table.length - table.released
        while True:
            found = self.kv_cache.find_prefix(request)
            num_tokens = plan.chunk(request, found)
            if num_tokens < 1:
                return False
            if self.kv_cache.can_start(request, found, num_tokens, spare):
                return True
            if not self._take_from_parked():
                return False

    def preempt(self, plan: StepPlan, request: Request) -> None:
        """Take a running request out of the batch, and of the step if it is in it: it gives up its
        blocks and goes back into the queue.

        Raises:
            StepPendingError: a step is pending.
        """
        if not self._may_preempt:
            raise StepPendingError
        self._take_out(plan, request)
        request.num_computed_tokens = self.kv_cache.preempt(request)
        self._give_up(request)

    def set_aside(self, plan: StepPlan, request: Request) -> None:
        """Take a running request that has something to compute out of the batch, and of the step if
        it is in it: it waits at the head of the queue. It keeps its blocks until others need them,
        and is then preempted before anybody that runs. A step may be pending.
        """
        self._take_out(plan, request)
        del self.running[request.key]
        self._parked[request.key] = request
        request.status = RequestStatus.WAITING
        self.put_back(request)

    def _take_out(self, plan: StepPlan, request: Request) -> None:
        """Take a request that will not run out of a step that is being put together."""
        plan.take_out(request.key)
        plan.preempted.add(request.key)

    def _has_parked_room(self, plan: StepPlan, request: Request) -> bool:
        """Whether a waiting request that was set aside has, or now got, the blocks for its next
        tokens. Then it may run.

        Raises:
            StepPendingError: blocks are short, or its last token must be on the host, and a step is
                pending.
        """
        if not self._may_preempt and request.num_pending_tokens and request.needs_host_tokens:
            raise StepPendingError
        del self._parked[request.key]  # not to be taken from for itself
        has_room = False
        try:
            num_tokens = plan.chunk(request, request.num_computed_tokens)
            has_room = self._has_room(request, request.num_computed_tokens + num_tokens)
        finally:
            if not has_room:
                self._parked[request.key] = request
        return has_room

    def _put(self, plan: StepPlan, request: Request, num_tokens: int) -> bool:
        """Put some of a running request's tokens into the step. False: there are not enough
        blocks.
        """
        start = request.num_computed_tokens
        if not self._has_room(request, start + num_tokens):
            return False
        plan.put(
            ScheduledRequest(
                request=request,
                start=start,
                num_tokens=num_tokens,
                tables=self.kv_cache.tables(request.key),
                samples=start + num_tokens == len(request.token_ids),
            )
        )
        return True

    def _has_room(self, request: Request, num_tokens: int) -> bool:
        """Whether a running request has, or now got, the blocks for its first tokens."""
        while not self.kv_cache.allocate(request.key, num_tokens):
            if not self._take_from_parked():
                if not self._may_preempt:
                    raise StepPendingError
                return False
        return True

    def _take_from_parked(self) -> bool:
        """Preempt the first of those that have blocks and do not run. False: none has.

        Raises:
            StepPendingError: one has, and a step is pending.
        """
        if not self._parked:
            return False
        if not self._may_preempt:
            raise StepPendingError
        request = next(iter(self._parked.values()))
        request.num_computed_tokens = self.kv_cache.preempt(request)
        self._give_up(request)
        return True

    def _take_back(self) -> None:
        """Find a place for those that are held no more.

        Raises:
            StepPendingError: there is none, or a token must be on the host, and a step is pending.
        """
        while self._returning:
            request = next(iter(self._returning.values()))
            has_place = len(self.running) < self.max_requests_per_batch
            needs_token = request.num_pending_tokens > 0 and request.needs_host_tokens
            if not self._may_preempt and (needs_token or not has_place):
                raise StepPendingError
            if has_place:
                self.running[request.key] = self._returning.pop(request.key)
            else:
                request.num_computed_tokens = self.kv_cache.preempt(request)
                self._give_up(request)

    def _give_up(self, request: Request) -> None:
        """Record that a request that had blocks has none any more. It waits, unless it is held."""
        if request.key in self.held or request.key in self._returning:
            # What is computed again because it was held counts.
            request.num_counted_tokens = min(
                request.num_counted_tokens, request.num_computed_tokens
            )
        self.running.pop(request.key, None)
        self._parked.pop(request.key, None)
        self._returning.pop(request.key, None)
        request.status = RequestStatus.WAITING
        request.preemptions += 1
        self.num_preemptions += 1
        if request.key not in self.held:
            self.put_back(request)

    def _enter_queue(self, request: Request) -> None:
        self.callers.queue(request)
        self.queued(request)

    def _leave_queue(self, request: Request) -> None:
        if self.waiting.pop(request.key, None) is not None:
            self.callers.unqueue(request)
            self.unqueued(request)

    def _spare_blocks(self, num_running: int) -> list[int]:
        """Blocks of each group to leave for the growth of the running requests, so that a newcomer
        does not make one preempt: the safety margin, or one block a request up to a tenth of the
        smallest group. None where nothing runs.
        """
        pools = self.kv_cache.pools
        if num_running == 0:
            return [0] * len(pools)
        if self.safety_margin is None:
            smallest = min((pool.num_blocks for pool in pools), default=0)
            return [min(num_running, smallest // 10)] * len(pools)
        # Less a hair, so that 0.7 of 10 is 7 however it is rounded.
        return [math.ceil(self.safety_margin * pool.num_blocks - 1e-6) for pool in pools]


def _step_order(part: ScheduledRequest) -> tuple[bool, int]:
    return part.num_tokens > 1, part.start
