"""What all scheduling policies share: the queue, the batch, and their KV blocks.

There is no prefill phase and no decode phase. The KV of a request's first num_computed_tokens
tokens is in the cache; a step computes some of the rest. A new prompt has many tokens to compute
and a decoding request has one. A preempted request must recompute its prompt and output, except for
what the host kept. All of them are handled alike.

    add ──▶ waiting ──────────▶ running ──remove──▶ (ended)
               ▲                   │
               └─────preempt───────┘   gives up all blocks; no token is lost
               └────set_aside──────┘   keeps them until others need them

A request is held if nobody reads its output. It is then neither waiting nor running: no step
includes it, and it takes no slot in the batch. It keeps its blocks until they are needed, and is
preempted before any running request.

    waiting, running ──hold──▶ held ──unhold──▶ waiting, or running if it still has its blocks and
                                                the batch has a free slot

For each step, `schedule` chooses the tokens, `launched` records that they are being computed, and
`computed` records that they have been. Another step may be scheduled between the last two.

docs/schedulers.md shows how to write and register a policy.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from typing import ClassVar, NotRequired, TypedDict

from engine.contract.request import Request, RequestStatus
from engine.contract.types import RequestKey
from engine.drafts.drafter import Drafter
from engine.kv_cache.groups import growth_blocks
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.scheduler.live_callers import LiveCallers
from engine.scheduler.pace import StepPace
from engine.scheduler.scheduled_batch import ScheduledBatch, ScheduledRequest, decode_rows
from engine.scheduler.step_plan import StepPendingError, StepPlan

__all__ = [
    "Scheduler",
    "SchedulerLimits",
    "StepPendingError",
    "StepPlan",
]  # re-exported for policies


class SchedulerLimits(TypedDict):
    """The arguments that a policy passes on to the base class's constructor."""

    max_batch_tokens: int
    max_requests_per_batch: int
    safety_margin: NotRequired[float | None]


class Scheduler(ABC):
    """Base class of the policies. A policy is the order in which `choose` calls `make_room`,
    `extend` and `admit`; this class does the bookkeeping. Called on the engine's thread only.

    Attributes:
        heeds_priorities: class attribute: whether the policy uses priorities. If not, a priority
            other than 0 is refused at admission.
        kv_cache: the blocks.
        max_batch_tokens: the token budget of a step.
        max_requests_per_batch: the most requests that run at the same time.
        safety_margin: see ContinuousBatchingConfig.
        waiting: the queue, in order of arrival, with preempted requests at its head.
        running: the batch, in the order in which its requests were started.
        held: the requests that are held, with or without blocks.
        callers: the callers that have requests running or waiting, and the service each has
            received.
        num_preemptions: the number of preemptions since the start.
        pace: keeps steps in which requests decode to a target time; None if there is no target.
        drafter: guesses tokens that steps try; None if nothing is guessed.
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
        self.callers = LiveCallers()
        # Requests that have blocks but do not run, in the order in which they are to lose them:
        # held ones, and waiting ones that were set aside. Then those that were held and go on with
        # the next step.
        self._parked: dict[RequestKey, Request] = {}
        self._returning: dict[RequestKey, Request] = {}
        self.num_preemptions = 0
        self.pace: StepPace | None = None
        self.drafter: Drafter | None = None
        self._may_preempt = True
        self._resting: Container[RequestKey] = ()  # for the step that is being chosen

    # ---- the policy ----------------------------------------------------------------------------

    @abstractmethod
    def choose(self, plan: StepPlan, now: float) -> None:
        """Fill the step. Contract:

        - Requests enter the step only through `extend` (one of `runnable`), `extend_all` (all of
          those) and `admit` (a waiting one). They leave the batch only through `make_room`,
          `preempt` and `set_aside`. Each enters at most once, and only while `plan.budget` lasts.
        - If `extend` finds no blocks for a request, it waits for the next step, or others are
          preempted for it (`make_room`). A request that runs alone always fits.
        - A request that `admit` put in is not preempted or set aside in the same step.
        - The step is not empty if anything is runnable or could be admitted.
        - If nothing new arrives, each request is included after a bounded number of steps. The
          simplest way is that one request, such as the one started first, is never preempted and
          never left out for long.
        - The cost does not grow with the queue's length.
        - StepPendingError is not caught; `choose` is then called again, with an empty plan.

        Args:
            plan: empty, with the whole token budget.
            now: monotonic seconds.
        """

    def queued(self, request: Request) -> None:  # noqa: B027  # optional
        """Called when a request enters the queue (new, preempted or set aside), or is preempted
        while in the queue. For policies that keep their own order.
        """

    def unqueued(self, request: Request) -> None:  # noqa: B027  # optional
        """Called when a request has left the queue and is no longer in `waiting`."""

    def served(self, request: Request, service: int) -> None:  # noqa: B027  # optional
        """Called when a launched step gives a request's caller an amount of service (see
        `callers`).
        """

    def next_waiting(self) -> Request | None:
        """Return the waiting request that comes next, or None if the queue is empty."""
        return next(iter(self.waiting.values()), None)

    def take_hopeless(self, now: float) -> Iterable[Request]:
        """Return waiting requests that cannot finish within their time limits, for the core to end.
        Called after each `schedule`.
        """
        return ()

    def measured(self, num_tokens: int, seconds: float) -> None:  # noqa: B027  # optional
        """Called after a step with its number of tokens and its duration, for policies that
        estimate times. The pace is updated separately.
        """

    # ---- what the core calls -------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Put a new request into the queue."""
        self.waiting[request.key] = request
        self._enter_queue(request)

    def put_back(self, request: Request) -> None:
        """Put a request at the head of the queue. It was in the batch, or is another choice of a
        request in the batch.
        """
        self.waiting[request.key] = request
        self.waiting.move_to_end(request.key, last=False)
        self._enter_queue(request)

    def remove(self, request: Request) -> None:
        """Remove a request, whatever its state, and free its blocks. O(its blocks)."""
        self._leave_queue(request)
        for place in (self.running, self.held, self._parked, self._returning):
            place.pop(request.key, None)
        self.callers.leave(request)
        self.kv_cache.free(request.key)
        if self.drafter is not None:
            self.drafter.forget(request.key)

    def hold(self, request: Request) -> None:
        """Leave a request out of all steps from the next one on. If a step with it is still
        running, it gets that step's token. Does nothing if it is neither queued nor running. O(1).
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
        """Let a request continue with the next step. If it has lost its blocks, or the batch is
        full, it goes to the head of the queue. Does nothing if it is not held. O(1).
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
        """The number of requests that are held, or were just released and continue with the next
        step.
        """
        return len(self.held) + len(self._returning)

    def fork(self, parent: Request, children: Sequence[Request]) -> None:
        """Add the other choices of a request whose prompt has just been computed. They share its
        blocks. Those for which there is no room wait at the head of the queue.
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
        """Whether any request could be part of a step."""
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
            is_step_pending: whether a step is still running, so that its tokens, and which requests
                it ends, are not known yet.
            resting: running requests that this step leaves out; they stay in the batch.

        Returns:
            The step; empty only if nothing can be computed now. None if there are not enough
            blocks, and the pending step must finish before any request is preempted.
        """
        cut = self.kv_cache.cut if self.kv_cache.keeps else None
        plan = StepPlan(self.max_batch_tokens, self.pace, self.runnable, cut)
        self._may_preempt = not is_step_pending
        self._resting = resting
        try:
            self._take_back()
            if self.drafter is not None:
                requests = [] if is_step_pending else self._draftable()
                if requests or self.drafter.drafted:
                    self.drafter.draft(requests)
            self.choose(plan, now)
        except StepPendingError:
            return None
        return ScheduledBatch(
            requests=tuple(sorted(plan.parts.values(), key=_step_order)),
            num_tokens=self.max_batch_tokens - plan.budget,
            copies=self.kv_cache.take_copies(),
        )

    def launched(self, part: ScheduledRequest) -> None:
        """Record that a request's tokens were launched. Called before the next token is
        appended.
        """
        request = part.request
        request.num_computed_tokens = part.start + part.num_tokens
        if self.kv_cache.keeps:
            self.kv_cache.launched(request, request.num_computed_tokens)
        if part.num_sampled:
            request.status = RequestStatus.DECODING
            if request.drafts:
                request.is_verifying = bool(part.drafts)
                request.drafts = ()
        service = self.callers.count(part)
        if service:
            self.served(request, service)

    def computed(self, part: ScheduledRequest) -> None:
        """Record that a request's tokens were computed. The request must still be running."""
        self.kv_cache.commit(part.request, part.start + part.num_tokens)

    def verified(self, request: Request, num_drafts: int) -> None:
        """Record that a request's first `num_drafts` drafts were right. Called after they were
        appended to its tokens.
        """
        request.num_computed_tokens += num_drafts
        self.callers.count_drafts(request)
        self.kv_cache.commit(request, request.num_computed_tokens)

    def rejected(self, request: Request, num_tokens: int) -> None:
        """Record that of a request's rows those behind its first `num_tokens` tokens were wrong.
        Blocks that they alone needed are free again.
        """
        self.kv_cache.give_back(request.key, num_tokens)

    def step_done(self, batch: ScheduledBatch, seconds: float, *, is_decode: bool) -> None:
        """Record how long a step took.

        Args:
            batch: the step.
            seconds: the device time, without waiting for the previous step.
            is_decode: whether any request decoded in it.
        """
        if self.pace is not None:
            self.pace.measured(batch, seconds, is_decode=is_decode)
        self.measured(batch.num_tokens, seconds)
        if self.drafter is not None and (rows := decode_rows(batch)) is not None:
            self.drafter.measured(rows, seconds)

    def step_failed(self, batch: ScheduledBatch) -> list[Request]:
        """Handle a failed step whose requests were already removed.

        Returns:
            Other requests whose blocks the step should have copied. They wait and are computed
            again. Results for them from a later step that is already running are wrong.
        """
        lost: list[Request] = []
        for key in self.kv_cache.copies_failed(batch.copies):
            request = self.running.get(key) or self.waiting.get(key)
            request = request or self.held.get(key) or self._returning.get(key)
            if request is not None:
                self.restart(request)
                lost.append(request)
        return lost

    def restart(self, request: Request) -> None:
        """Recompute a request from its first token. No step with it may be pending."""
        key = request.key
        self.kv_cache.free(key)
        if key in self.running or key in self._parked or key in self._returning:
            self._give_up(request)
        request.num_computed_tokens = 0

    # ---- what a policy calls -------------------------------------------------------------------

    def runnable(self) -> list[Request]:
        """Return the running requests that have something to compute, in the order of `running`.
        The others wait for their last token, for drafts to be verified, or for a later step.
        """
        resting = self._resting
        return [
            request
            for key, request in self.running.items()
            if not request.awaits_results and key not in resting
        ]

    def extend_all(self, plan: StepPlan) -> bool:
        """Put everything that the running requests have to compute into an empty step, if budget,
        time and blocks are enough for all of it. Their order does not matter in that case.

        Returns:
            Whether this was done. If False, the step is still empty.

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
        plan.budget -= num_tokens
        for request, count in zip(requests, counts, strict=True):
            key = request.key
            part = ScheduledRequest(request, request.num_computed_tokens, count, tables(key), 1)
            if request.drafts:
                part = self._with_drafts(part, plan.budget, 0)
                plan.budget -= len(part.drafts)
            plan.parts[key] = part
        return True

    def extend(self, plan: StepPlan, request: Request) -> bool:
        """Put as many of a running request's tokens into the step as budget and time allow.

        Returns:
            Whether the request is in the step. False if there are not enough blocks, or it is in
            prefill and no time is left for that.

        Raises:
            StepPendingError: there are not enough blocks while a step is pending.
            ValueError: it is already in the step, or the budget is spent.
        """
        if plan.budget < 1 or request.key in plan.parts:
            raise ValueError("a request is put into a step once, while there is a token budget")
        num_tokens = plan.chunk(request, request.num_computed_tokens)
        return num_tokens > 0 and self._put(plan, request, num_tokens)

    def make_room(self, plan: StepPlan, request: Request, victims: list[Request]) -> bool:
        """Make sure that `extend` finds blocks for a running request's next tokens: as many as
        budget and time allow, one if the budget is spent, and none if the time is spent.

        Args:
            victims: running requests, including this one. They are preempted and removed from the
                list, starting with the last, until there are enough blocks.

        Returns:
            Whether the request still runs. False if it was itself preempted.

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
            Whether this was done. False if the batch is full, if there are not enough blocks for
            all its tokens and the growth of the running requests, or if no time is left for its
            prompt.

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
        # The blocks that are free now may differ from those that `could_admit` saw; start it all
        # the same.
        num_tokens = max(1, plan.chunk(request, request.num_computed_tokens))
        if not self._put(plan, request, num_tokens):
            raise RuntimeError("a request was started without room for its first tokens")
        return True

    def could_admit(self, plan: StepPlan, request: Request, without: Sequence[Request]) -> bool:
        """Whether `admit` would find a slot, time and blocks if the running requests `without` were
        preempted. This may be too optimistic if they share blocks with other requests. Held
        requests and those that were set aside give up their blocks as far as that helps.

        Raises:
            StepPendingError: held or set-aside requests have blocks to give up, and a step is
                pending.
        """
        num_running = len(self.running) - len(without)
        if num_running >= self.max_requests_per_batch:
            return False
        if request.key in self._parked:
            # It has its blocks, except perhaps one.
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
        """Take a running request out of the batch and, if present, out of the step. It gives up its
        blocks and goes back to the queue.

        Raises:
            StepPendingError: a step is pending.
        """
        if not self._may_preempt:
            raise StepPendingError
        self._take_out(plan, request)
        request.num_computed_tokens = self.kv_cache.preempt(request)
        self._give_up(request)

    def set_aside(self, plan: StepPlan, request: Request) -> None:
        """Take a running request that has something to compute out of the batch and, if present,
        out of the step. It waits at the head of the queue and keeps its blocks until others need
        them. It is then preempted before any running request. A step may be pending.
        """
        self._take_out(plan, request)
        del self.running[request.key]
        self._parked[request.key] = request
        request.status = RequestStatus.WAITING
        self.put_back(request)

    def _take_out(self, plan: StepPlan, request: Request) -> None:
        """Remove a request that will not run from the step under construction."""
        plan.take_out(request.key)
        plan.preempted.add(request.key)

    def _has_parked_room(self, plan: StepPlan, request: Request) -> bool:
        """Try to get the blocks for the next tokens of a waiting request that was set aside. Return
        True if it now has them and may run.

        Raises:
            StepPendingError: a step is pending, and there are not enough blocks.
        """
        del self._parked[request.key]  # it must not take blocks from itself
        has_room = False
        try:
            num_tokens = plan.chunk(request, request.num_computed_tokens)
            has_room = self._has_room(request, request.num_computed_tokens + num_tokens)
        finally:
            if not has_room:
                self._parked[request.key] = request
        return has_room

    def _put(self, plan: StepPlan, request: Request, num_tokens: int) -> bool:
        """Put the given number of a running request's tokens into the step. Return False if there
        are not enough blocks.
        """
        start = request.num_computed_tokens
        if not self._has_room(request, start + num_tokens):
            return False
        part = ScheduledRequest(
            request=request,
            start=start,
            num_tokens=num_tokens,
            tables=self.kv_cache.tables(request.key),
            num_sampled=int(start + num_tokens == len(request.token_ids)),
        )
        if request.drafts:
            # Every running request that may still enter the step keeps its token, and its block.
            others = len(self.running) - len(plan.parts)
            part = self._with_drafts(part, plan.budget - num_tokens - others, others)
        plan.put(part)
        return True

    def _with_drafts(self, part: ScheduledRequest, budget: int, spare: int) -> ScheduledRequest:
        """Add the request's drafts to its part: at most `budget`, and beyond its last block only as
        far as `spare` blocks stay free.
        """
        request, end = part.request, part.start + part.num_tokens
        most = min(len(request.drafts), budget, request.max_drafted_tokens - end - 1)
        if part.num_tokens > 1 or not part.num_sampled:
            return part
        if most > 0 and not self.kv_cache.allocate(request.key, end + most, spare):
            most = min(most, -end % self.kv_cache.block_size)
        if most < 1:
            return part
        return part._replace(num_sampled=1 + most, drafts=request.drafts[:most])

    def _draftable(self) -> list[Request]:
        """Return the requests of a step that may have drafts: all, or none if a prompt is or waits
        to be computed.
        """
        requests = [] if self.waiting else self.runnable()
        if any(len(one.token_ids) - one.num_computed_tokens > 1 for one in requests):
            return []
        return requests

    def _has_room(self, request: Request, num_tokens: int) -> bool:
        """Try to get the blocks for a running request's first `num_tokens` tokens. Return True if
        it now has them.
        """
        while not self.kv_cache.allocate(request.key, num_tokens):
            if not self._take_from_parked():
                if not self._may_preempt:
                    raise StepPendingError
                return False
        return True

    def _take_from_parked(self) -> bool:
        """Preempt the first request that has blocks but does not run. Return False if there is
        none.

        Raises:
            StepPendingError: there is one, and a step is pending.
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
        """Put the requests that are no longer held into the batch, or preempt them if it is full.

        Raises:
            StepPendingError: a step is pending, and the batch is full.
        """
        while self._returning:
            request = next(iter(self._returning.values()))
            has_place = len(self.running) < self.max_requests_per_batch
            if not self._may_preempt and not has_place:
                raise StepPendingError
            if has_place:
                self.running[request.key] = self._returning.pop(request.key)
            else:
                request.num_computed_tokens = self.kv_cache.preempt(request)
                self._give_up(request)

    def _give_up(self, request: Request) -> None:
        """Record that a request has lost its blocks. It goes to the queue unless it is held."""
        if request.key in self.held or request.key in self._returning:
            # Tokens that are computed again because it was held are charged.
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
        """Return how many blocks of each group to leave for the growth of the running requests, so
        that a new one does not cause a preemption: the safety margin, or what `growth_blocks`
        returns. 0 if nothing runs.
        """
        kinds = [group.kind for group in self.kv_cache.groups]
        pools = [pool.num_blocks if kind.grows else 0
                 for kind, pool in zip(kinds, self.kv_cache.pools, strict=True)]  # fmt: skip
        if num_running == 0:
            return [0] * len(pools)
        if self.safety_margin is None:
            most = growth_blocks(num_running, min(filter(None, pools), default=0))
            return [min(most, size) for size in pools]
        # Slightly less, so that 0.7 of 10 is 7 despite rounding.
        return [math.ceil(self.safety_margin * size - 1e-6) for size in pools]


def _step_order(part: ScheduledRequest) -> tuple[bool, int]:
    return part.num_tokens > 1, part.start
