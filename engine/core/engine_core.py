"""One step of the engine: schedule, launch, collect. Single-threaded, without torch.

    commands (add, cancel, …) ──▶ EngineCore ──schedule──▶ batch ──▶ Runner.launch ──▶ step
                                          ▲                                              │
                                          └── collect: append, fork, finish, free ◀──────┘

Without overlap, a step is collected right after its launch. With overlap, the next step is
scheduled and launched first. Each request that samples then carries a PENDING_TOKEN, whose value
the runner fills in on the device. If the token ends its request, the next step has computed one
token too many for the request, and that token is dropped.

Computing a step never needs the last step's tokens on the host. Choosing its tokens may need them,
for a grammar or for options that depend on the history. Such a step is still launched early. Its
tokens are chosen when the previous step is collected, while the step is being computed:

    launch 2 ──▶ collect 1: append, advance grammars ──▶ sample 2 ──▶ launch 3 ──▶ collect 2 …
    device:   1 ─────────▶│ 2 ───────────────────────────────────▶ tokens of 2 ▶│ 3 …

The runner is injected: a real one drives the device, and a scripted one drives most tests. If the
runner raises, only the requests of that batch end with an error. If it raises at launch, the
results of the previous step are still collected. If it raises in the results, the next step, which
is already launched, continues without the requests that ended.

`engine.core.step_results` processes the results of a collected step.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from engine.contract.adapters import Adapter
from engine.contract.errors import RanksLostError
from engine.contract.loaded_adapters import LoadedAdapters
from engine.contract.outputs import (
    FinishReason,
    RequestFailure,
    StepOutputs,
)
from engine.contract.request import PENDING_TOKEN, GenerationRequest, Request, TokenMatcher
from engine.contract.rope import RopeLengths
from engine.contract.stats import EngineStats
from engine.contract.types import RequestId, RequestKey
from engine.core import grammar_budget
from engine.core.endings import LiveRequests, new_error_id
from engine.core.step_results import StepInFlight, StepResults
from engine.scheduler.base import Scheduler
from engine.scheduler.runner_protocol import Runner
from engine.scheduler.scheduled_batch import ScheduledBatch

logger = logging.getLogger(__name__)


class EngineCore:
    """The live requests and the step that advances them. All methods are called on one thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        max_context_tokens: int,
        overlap: bool = False,
        rope: RopeLengths | None = None,
        adapters: LoadedAdapters | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Wire a core.

        Args:
            scheduler, runner: decides the contents of a step, and computes it.
            max_context_tokens: the longest request, prompt and output together.
            overlap: whether the next step is scheduled and launched before the last one's tokens
                are on the host.
            rope: how the model's rotary frequencies depend on a request's length; None if they do
                not.
            adapters: those that requests may name, for the statistics; None: there are none.
            clock: returns monotonic seconds.
        """
        self.scheduler = scheduler
        self.runner = runner
        self.max_context_tokens = max_context_tokens
        self.overlap = overlap
        self.rope = rope
        self._adapters = adapters or LoadedAdapters()
        self.clock = clock
        self._outgrown: list[Request] = []  # have just outgrown the original length of `rope`
        self._live = LiveRequests(scheduler, runner, clock)
        self._in_flight: deque[StepInFlight] = deque()  # at most two, the older first
        self._results = StepResults(scheduler, self._live, clock)
        self._next_key = 0

    # ---- commands ------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything. False if all live requests are held; `end_overdue` must
        then be called.
        """
        return self.scheduler.has_requests or bool(self._live.outputs) or bool(self._in_flight)

    @property
    def num_waiting(self) -> int:
        """The number of requests in the queue."""
        return len(self.scheduler.waiting)

    def add(
        self,
        spec: GenerationRequest,
        arrival: float,
        make_matcher: Callable[[], TokenMatcher] | None = None,
        adapter: Adapter | None = None,
    ) -> None:
        """Add a request that admission has checked.

        Args:
            spec: the request.
            arrival: monotonic seconds.
            make_matcher: given if the request has a grammar. If it raises, the request ends with an
                error.
            adapter: what is applied to the model for it; None: nothing.
        """
        limit = min(len(spec.prompt) + spec.stop.max_tokens, self.max_context_tokens)
        choices = {}
        endings = spec.stop.ending_token_ids
        for choice in range(spec.n):
            self._next_key += 1
            choices[choice] = Request(
                spec=spec,
                arrival=arrival,
                max_total_tokens=limit,
                key=RequestKey(self._next_key),
                choice=choice,
                adapter=adapter,
                ending_token_ids=endings,
                rope_group=0 if self.rope is None else self.rope.group(len(spec.prompt)),
            )
            self._bound_drafts(choices[choice])
        live = self._live.add(spec, choices)
        if make_matcher is not None:
            try:
                for request in choices.values():
                    request.matcher = make_matcher()
                    grammar_budget.begin(request)
                    grammar_budget.release(request)
            except Exception as error:
                self._live.fail_alone(live, "the grammar could not be begun", error)
                return
        self.scheduler.add(choices[0])

    def cancel(self, request_id: RequestId) -> bool:
        """End a request with CANCELLED; its output comes with the next step.

        Returns False if the request is not live.
        """
        live = self._live.by_id.get(request_id)
        if live is None:
            return False
        self._live.end_all(live, FinishReason.CANCELLED)
        return True

    def finish(self, request_id: RequestId, num_tokens: int, choice: int = 0) -> bool:
        """End a choice with STOP after its first `num_tokens` output tokens.

        Returns False if the request is not live.
        """
        live = self._live.by_id.get(request_id)
        request = None if live is None else live.choices.get(choice)
        if live is None or request is None:
            return False
        known = request.num_output_tokens - request.num_pending_tokens
        kept = max(0, min(num_tokens, known))
        del request.token_ids[request.num_prompt_tokens + kept :]
        request.num_pending_tokens = 0
        self._live.end(live, request, FinishReason.STOP)
        return True

    def hold(self, request_id: RequestId) -> bool:
        """Exclude a request and all its choices from all steps until `unhold`.

        A step that was already launched still delivers its tokens. The request keeps its blocks
        until others need them. Returns False if the request is not live or already held.
        """
        return self._live.hold(request_id)

    def unhold(self, request_id: RequestId) -> bool:
        """Resume a held request where it left off. Returns False if the request is not live or not
        held.
        """
        return self._live.unhold(request_id)

    def unhold_all(self) -> None:
        """Resume all held requests."""
        for request_id in list(self._live.by_id):
            self._live.unhold(request_id)

    def fail_all(self, message: str, *, retryable: bool) -> None:
        """End every live request with an error."""
        failure = RequestFailure(message=message, error_id=new_error_id(), retryable=retryable)
        for live in list(self._live.by_id.values()):
            self._live.fail(live, failure)

    def end_overdue(self) -> float | None:
        """End the requests whose time limits have passed, as `step` does. Used while no steps run.

        Returns the number of seconds until the next limit may pass, or None if no live request has
        one.
        """
        now = self.clock()
        self._live.end_overdue(now)
        deadline = self._live.next_deadline
        return None if deadline is None else max(0.0, deadline - now)

    # ---- a step --------------------------------------------------------------------------------

    def step(self) -> StepOutputs:
        """Compute one batch.

        The outputs include the ends of requests that were cancelled or ran out of time since the
        last step.
        """
        now = self.clock()
        self._live.end_overdue(now)
        if self._outgrown:
            self._restart_outgrown()
        resting = grammar_budget.choose_resting(self.scheduler.running.values())
        batch = self.scheduler.schedule(now, is_step_pending=bool(self._in_flight), resting=resting)
        if batch is None:
            self._collect()
            batch = self.scheduler.schedule(now, resting=resting)
        self._end_hopeless(now)
        is_launched = False
        if batch is not None and not batch.is_empty:
            is_launched = self._launch(batch, now)
        elif not self._in_flight and resting.isdisjoint(self.scheduler.running):
            self._check_idle()
        while len(self._in_flight) > (1 if self.overlap and is_launched else 0):
            self._collect()
        return self.take_outputs()

    def settle(self) -> None:
        """Wait for the running step, if any. After that, nothing uses the model until the next
        `step`.

        The step's results come with the next outputs.
        """
        while self._in_flight:
            self._collect()

    def forget_computed(self) -> None:
        """Discard all KV because the model has changed: cached prefixes, and live requests' KV on
        the device or the host.

        The requests' KV is recomputed, and they continue where they left off.
        """
        self.settle()
        self.scheduler.kv_cache.reset_prefix_cache()
        for live in self._live.by_id.values():
            for request in live.choices.values():
                self.scheduler.restart(request)

    def take_outputs(self) -> StepOutputs:
        """Return the outputs since the last call."""
        outputs, record = self._live.take_outputs(), self._results.take_record()
        return StepOutputs(time=self.clock(), outputs=outputs, step=record)

    def stats(self) -> EngineStats:
        """Return the current statistics."""
        kv_cache, pace = self.scheduler.kv_cache, self.scheduler.pace
        callers, results = self.scheduler.callers.named(), self._results
        adapters = self.scheduler.callers.adapters
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            held=self.scheduler.num_held,
            blocks_total=kv_cache.num_blocks,
            blocks_used=kv_cache.num_used_blocks,
            blocks_cached=kv_cache.num_cached_blocks,
            **kv_cache.state_figures(),
            **self._adapters.figures(),
            host_blocks_total=kv_cache.num_host_blocks,
            host_blocks_used=kv_cache.num_used_host_blocks,
            steps=results.num_steps,
            steps_with_decodes=results.num_decode_steps,
            steps_over_target=0 if pace is None else pace.num_over_target,
            requests_accepted=self._live.num_accepted,
            requests_finished=self._live.num_finished,
            prompt_tokens=results.num_prompt_tokens,
            generated_tokens=results.num_generated_tokens,
            drafts=results.num_drafts,
            draft_tokens=results.num_draft_tokens,
            accepted_draft_tokens=results.num_accepted_draft_tokens,
            **self._drafts_by_source(),
            steps_with_drafts=results.num_draft_steps,
            holds=self._live.num_holds,
            preemptions=self.scheduler.num_preemptions,
            offloads=kv_cache.offloads,
            restores=kv_cache.restores,
            prefix_queries=kv_cache.prefix_queries,
            prefix_hits=kv_cache.prefix_hits,
            last_step_s=results.last_step_s,
            callers=callers,
            other_callers=self.scheduler.callers.others(callers),
            by_adapter=adapters.named(),
            other_adapters=adapters.others(),
            block_size=kv_cache.block_size,
        )

    def _drafts_by_source(self) -> dict[str, int]:
        drafter = self.scheduler.drafter
        if drafter is None:
            return {}
        computed = {f"{one}_draft_tokens": n for one, n in drafter.num_drafted.items()}
        kept = {f"accepted_{one}_draft_tokens": n for one, n in drafter.num_kept.items()}
        return computed | kept

    def _restart_outgrown(self) -> None:
        """Restart requests that grew beyond the original length, so that they are recomputed
        (`contract.rope`).
        """
        self.settle()
        for request in self._outgrown:
            if self.rope is not None and not request.status.is_terminal:
                request.rope_length = request.num_tokens
                request.rope_group = self.rope.group(request.rope_length)
                self._bound_drafts(request)
                request.block_hashes.clear()
                self.scheduler.restart(request)
        self._outgrown.clear()

    def _bound_drafts(self, request: Request) -> None:
        """Set how far drafts may be tried. Those that would pass the original length are computed
        when the request has been restarted there.
        """
        spec, rope, most = request.spec, self.rope, request.max_total_tokens
        if spec.sampling.needs_history:
            most = 0
        elif rope and rope.restarts and request.rope_length <= rope.original:
            most = min(most, rope.original)
        request.max_drafted_tokens = most

    def _launch(self, batch: ScheduledBatch, now: float) -> bool:
        """Launch a batch. If that raises, the batch's requests fail and the engine continues.

        Raises:
            RanksLostError: nothing can be computed any more.
        """
        try:
            pending = self.runner.launch(batch)
        except RanksLostError:
            raise
        except Exception as error:
            while self._in_flight:
                self._collect()
            self._step_failed(batch, error)
            return False
        for part in batch.requests:
            self.scheduler.launched(part)
            if part.num_sampled:
                part.request.token_ids.append(PENDING_TOKEN)
                part.request.num_pending_tokens += 1
                rope = self.rope
                if rope and rope.restarts and part.request.num_tokens == rope.original + 1:
                    self._outgrown.append(part.request)
        self._in_flight.append(StepInFlight(batch, pending, now))
        return True

    def _collect(self) -> None:
        """Wait for the oldest step in flight and process its results.

        The next step then has everything it may need to choose its tokens.
        """
        step = self._in_flight.popleft()
        try:
            sampled = step.pending.result()
        except Exception as error:
            self._step_failed(step.batch, error)
        else:
            self._results.take(step, sampled)
        if self._in_flight:
            self._sample()

    def _sample(self) -> None:
        """Make the oldest step in flight choose its tokens, if it has not done so yet."""
        try:
            self._in_flight[0].pending.sample()
        except Exception as error:
            step = self._in_flight.popleft()
            self._step_failed(step.batch, error)

    def _step_failed(self, batch: ScheduledBatch, error: Exception) -> None:
        """End a failed batch's requests, and restart requests whose blocks it should have
        copied.
        """
        error_id = new_error_id()
        logger.error(
            "error %s: a step of %d requests failed; they end with an error, the others go on",
            error_id,
            len(batch.requests),
            exc_info=error,
        )
        failure = RequestFailure(
            message=f"the model failed on this request's batch (error {error_id})",
            error_id=error_id,
        )
        for part in batch.requests:
            live = self._live.by_id.get(part.request.request_id)
            if live is not None and live.choices.get(part.request.choice) is part.request:
                self._live.fail(live, failure)
        for request in self.scheduler.step_failed(batch):
            for step in self._in_flight:
                step.void.add(request.key)
            del request.token_ids[request.num_tokens - request.num_pending_tokens :]
            request.num_pending_tokens = 0
            request.is_verifying = False

    def _end_hopeless(self, now: float) -> None:
        """End the waiting requests that the policy gives up on. Choices that are already running
        may continue to the time limit.
        """
        for request in self.scheduler.take_hopeless(now):
            live = self._live.by_id[request.request_id]
            if live.is_forked:
                self._live.end(live, request, FinishReason.TIME_LIMIT)
            else:
                self._live.end_all(live, FinishReason.TIME_LIMIT)

    def _check_idle(self) -> None:
        """Handle an empty step. If nothing runs and the request at the head of the queue still does
        not fit, end that request; admission should have refused it.

        Raises:
            RuntimeError: the policy chose none of the running requests, and would do so forever.
        """
        if self.scheduler.running:
            raise RuntimeError("the scheduling policy chose none of the running requests")
        request = self.scheduler.next_waiting()
        if request is not None:
            live = self._live.by_id[request.request_id]
            self._live.fail_alone(live, "the request does not fit the KV cache")
