"""One step of the engine: schedule, launch, collect. Single-threaded, and free of torch.

    commands (add, cancel, finish) ──▶ EngineCore ──schedule──▶ batch ──▶ Runner.launch ──▶ step
                                          ▲                                              │
                                          └── collect: append, fork, finish, free ◀──────┘

Without overlap a step is collected as soon as it was launched. With overlap the next one is
scheduled and launched first: each request that samples then carries a PENDING_TOKEN, whose value
the runner takes over on the device. A request whose token turns out to end it has been computed
once too often; that token is dropped, never delivered.

The runner is injected: a real one drives the device, a scripted one drives tests by the thousand.
Whatever the runner raises ends the requests of that batch with an error, and only them.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.batch import ScheduledBatch
from engine.endings import STATUS_OF, LiveRequest, describe_end, new_error_id
from engine.outputs import (
    FinishReason,
    RequestFailure,
    RequestOutput,
    StepOutputs,
    StepRecord,
    TokenLogprobs,
)
from engine.request import PENDING_TOKEN, GenerationRequest, Request, TokenMatcher
from engine.runner_protocol import INVALID_TOKEN, PendingStep, Runner, SampledTokens
from engine.scheduler.base import Scheduler
from engine.stats import EngineStats
from engine.types import RequestId, RequestKey, TokenId

logger = logging.getLogger(__name__)

MatcherFactory = Callable[[], TokenMatcher]
"""Makes a matcher at the beginning of a grammar, one for each choice."""


@dataclass(frozen=True, slots=True)
class _LaunchedStep:
    """A step whose results were not collected yet. `launched`: monotonic seconds."""

    batch: ScheduledBatch
    pending: PendingStep
    launched: float


class EngineCore:
    """The live requests and the step that moves them on. All methods are called on one thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        max_context_tokens: int,
        overlap: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Wire a core.

        Args:
            scheduler, runner: what decides a step, and what computes it.
            max_context_tokens: the longest request, prompt and output.
            overlap: whether the next step is scheduled and launched before the last one's tokens
                are on the host.
            clock: monotonic seconds.
        """
        self.scheduler = scheduler
        self.runner = runner
        self.max_context_tokens = max_context_tokens
        self.overlap = overlap
        self.clock = clock
        self._requests: dict[RequestId, LiveRequest] = {}
        self._deadlines: list[tuple[float, int, LiveRequest]] = []  # heap; ended ones stay a while
        self._outputs: list[RequestOutput] = []
        self._pending: _LaunchedStep | None = None
        self._record: StepRecord | None = None
        self._next_key = 0
        self._steps = 0
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._accepted = 0
        self._finished = 0
        self._last_step_s = 0.0

    # ---- commands ------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._requests) or bool(self._outputs) or self._pending is not None

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self.scheduler.waiting)

    def add(
        self, spec: GenerationRequest, arrival: float, make_matcher: MatcherFactory | None = None
    ) -> None:
        """Take in a request that admission has checked.

        Args:
            spec: the request.
            arrival: monotonic seconds.
            make_matcher: where the request has a grammar.
        """
        limit = min(len(spec.prompt) + spec.stop.max_tokens, self.max_context_tokens)
        choices = {}
        for choice in range(spec.n):
            self._next_key += 1
            choices[choice] = Request(
                spec=spec,
                arrival=arrival,
                max_total_tokens=limit,
                key=RequestKey(self._next_key),
                choice=choice,
                matcher=make_matcher() if make_matcher is not None else None,
            )
        live = LiveRequest(spec, choices, is_forked=spec.n == 1)
        self._requests[spec.request_id] = live
        self._accepted += 1
        if spec.time_limit_s is not None:
            heapq.heappush(self._deadlines, (arrival + spec.time_limit_s, self._accepted, live))
            if len(self._deadlines) > 2 * len(self._requests) + 64:
                self._deadlines = [entry for entry in self._deadlines if entry[2].choices]
                heapq.heapify(self._deadlines)
        self.scheduler.add(choices[0])

    def cancel(self, request_id: RequestId) -> bool:
        """End a request with CANCELLED; its output comes with the next step. False: not live."""
        live = self._requests.get(request_id)
        if live is None:
            return False
        self._end_all(live, FinishReason.CANCELLED)
        return True

    def finish(self, request_id: RequestId, num_tokens: int, choice: int = 0) -> bool:
        """End a choice with STOP as of its first `num_tokens` output tokens. False: it is not
        live.
        """
        live = self._requests.get(request_id)
        request = None if live is None else live.choices.get(choice)
        if live is None or request is None:
            return False
        known = request.num_output_tokens - request.num_pending_tokens
        kept = max(0, min(num_tokens, known))
        del request.token_ids[request.num_prompt_tokens + kept :]
        request.num_pending_tokens = 0
        self._end(live, request, FinishReason.STOP)
        return True

    def fail_all(self, message: str, *, retryable: bool) -> None:
        """End every live request with an error."""
        failure = RequestFailure(message=message, error_id=new_error_id(), retryable=retryable)
        for live in list(self._requests.values()):
            self._fail(live, failure)

    # ---- a step --------------------------------------------------------------------------------

    def step(self) -> StepOutputs:
        """Compute one batch. Also returns the ends of requests that were cancelled or ran out of
        time since.
        """
        now = self.clock()
        self._end_overdue(now)
        if self._pending is not None and self._must_wait():
            self._collect()
        batch = self.scheduler.schedule(now, is_step_pending=self._pending is not None)
        if batch is None:
            self._collect()
            batch = self.scheduler.schedule(self.clock())
        is_idle = batch is None or batch.is_empty
        launched = None if batch is None or is_idle else self._launch(batch, now)
        if self._pending is not None:
            self._collect()
        elif is_idle and self.scheduler.waiting and not self.scheduler.running:
            self._end_unschedulable()
        self._pending = launched
        if not self.overlap:
            self._collect()
        return self.take_outputs()

    def take_outputs(self) -> StepOutputs:
        """The outputs since the last call."""
        outputs, record = tuple(self._outputs), self._record
        self._outputs.clear()
        self._record = None
        return StepOutputs(time=self.clock(), outputs=outputs, step=record)

    def stats(self) -> EngineStats:
        """The figures now."""
        kv_cache = self.scheduler.kv_cache
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            blocks_total=kv_cache.num_blocks,
            blocks_used=kv_cache.num_used_blocks,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            requests_accepted=self._accepted,
            requests_finished=self._finished,
            preemptions=self.scheduler.num_preemptions,
            last_step_s=self._last_step_s,
        )

    def _must_wait(self) -> bool:
        """Whether the pending tokens are needed on the host before anything can be launched."""
        return any(
            request.num_pending_tokens and request.needs_host_tokens
            for request in self.scheduler.running.values()
        )

    def _launch(self, batch: ScheduledBatch, now: float) -> _LaunchedStep | None:
        """Begin a batch. An exception fails the batch's requests, and the loop goes on."""
        try:
            pending = self.runner.launch(batch)
        except Exception as error:
            self._step_failed(batch, error)
            return None
        for part in batch.requests:
            self.scheduler.launched(part)
            if part.samples:
                part.request.token_ids.append(PENDING_TOKEN)
                part.request.num_pending_tokens += 1
        return _LaunchedStep(batch, pending, now)

    def _collect(self) -> None:
        """Wait for the pending step, if there is one, and take its results."""
        step, self._pending = self._pending, None
        if step is None:
            return
        try:
            sampled = step.pending.result()
        except Exception as error:
            self._step_failed(step.batch, error)
            return
        self._steps += 1
        self._take(step, sampled)

    def _step_failed(self, batch: ScheduledBatch, error: Exception) -> None:
        """End a failed batch's requests."""
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
            live = self._requests.get(part.request.request_id)
            if live is not None and live.choices.get(part.request.choice) is part.request:
                self._fail(live, failure)
        self.scheduler.step_failed(batch)

    def _take(self, step: _LaunchedStep, sampled: SampledTokens) -> None:
        """Record what was computed, append the new tokens, end what is complete."""
        now = self.clock()
        tokens = iter(sampled.token_ids)
        logprobs = iter(sampled.logprobs) if sampled.logprobs is not None else None
        num_prompt_tokens = 0
        for part in step.batch.requests:
            request = part.request
            if part.num_tokens > 1 or part.start < request.num_prompt_tokens:
                num_prompt_tokens += part.num_tokens
            token = next(tokens) if part.samples else None
            token_logprobs = next(logprobs) if part.samples and logprobs is not None else None
            if request.status.is_terminal:
                continue  # it ended while the step ran
            live = self._requests[request.request_id]
            if part.samples and not live.is_forked:
                self._fork(live, request, now)
            self.scheduler.computed(part)
            known = sampled.prompt_logprobs.get(request.key, ())
            # What was reported before a preemption is not reported again.
            done = len(request.prompt_logprobs)
            request.prompt_logprobs.extend(known[max(0, done - part.start) :])
            if token is not None:
                position = part.start + part.num_tokens
                self._append(live, request, position, token, token_logprobs, now)
        self._prompt_tokens += num_prompt_tokens
        self._last_step_s = now - step.launched
        self._record = StepRecord(
            duration_s=self._last_step_s,
            num_requests=len(step.batch.requests),
            num_prompt_tokens=num_prompt_tokens,
            num_decode_tokens=step.batch.num_tokens - num_prompt_tokens,
        )

    def _append(
        self,
        live: LiveRequest,
        request: Request,
        position: int,
        token: TokenId,
        logprobs: TokenLogprobs | None,
        now: float,
    ) -> None:
        """Take the token that was sampled for a position of a live choice."""
        if token == INVALID_TOKEN:
            self._fail_alone(live, "the model gave no finite logits for this request")
            return
        prompt_done, prompt_logprobs = self._report_prompt(live, request)
        if position >= request.max_total_tokens:
            # Nothing may be generated: max_tokens is 0. The prompt was processed, the sampled token
            # is not wanted.
            if prompt_done is not None:
                self._outputs.append(
                    RequestOutput(
                        request.request_id,
                        prompt_done=prompt_done,
                        prompt_logprobs=prompt_logprobs,
                    )
                )
            self._end_all(live, FinishReason.LENGTH)
            return
        request.token_ids[position] = token
        request.num_pending_tokens -= 1
        self._generated_tokens += 1
        if request.first_token is None:
            request.first_token = now
        request.last_token = now
        reason = self._reason_to_end(request, position, token)
        if reason is FinishReason.ERROR:
            self._fail_alone(live, "the model left the form that was asked for")
            return
        finish = None
        if reason is not None:
            stop_token_id = token if token in request.ending_token_ids else None
            self._close(live, request, reason)
            finish = describe_end(request, reason, self.clock(), stop_token_id=stop_token_id)
        self._outputs.append(
            RequestOutput(
                request_id=request.request_id,
                choice=request.choice,
                token_ids=(token,),
                logprobs=(logprobs,) if logprobs is not None else None,
                prompt_done=prompt_done,
                prompt_logprobs=prompt_logprobs,
                finish=finish,
                ends_request=not live.choices,
            )
        )

    def _reason_to_end(
        self, request: Request, position: int, token: TokenId
    ) -> FinishReason | None:
        """Why a choice ends with its new token; ERROR: its grammar does not allow the token."""
        if token in request.ending_token_ids:
            return FinishReason.STOP
        if request.matcher is not None:
            if not request.matcher.accept(token):
                return FinishReason.ERROR
            if request.matcher.is_complete:
                return FinishReason.STOP
        if position + 1 < request.max_total_tokens:
            return None
        full = position + 1 - request.num_prompt_tokens >= request.spec.stop.max_tokens
        return FinishReason.LENGTH if full else FinishReason.CONTEXT

    def _report_prompt(
        self, live: LiveRequest, request: Request
    ) -> tuple[int | None, tuple[TokenLogprobs, ...] | None]:
        """What to say of the prompt, the first time that it was processed whole."""
        if live.is_prompt_reported:
            return None, None
        live.is_prompt_reported = True
        wanted = request.spec.prompt_logprobs is not None
        return request.num_cached_tokens, tuple(request.prompt_logprobs) if wanted else None

    def _fork(self, live: LiveRequest, parent: Request, now: float) -> None:
        """Let the other choices begin, the first time that the prompt was processed whole.

        Comes before the step is recorded as computed: then the blocks are still there that the
        last prompt token, which each choice computes for itself, can see.
        """
        if parent.num_prompt_tokens >= parent.max_total_tokens:
            return  # nothing may be generated, all choices end
        live.is_forked = True
        children = [request for request in live.choices.values() if request is not parent]
        for child in children:
            child.num_cached_tokens = parent.num_cached_tokens
        self.scheduler.fork(parent, children, now)

    # ---- ends ----------------------------------------------------------------------------------

    def _end_unschedulable(self) -> None:
        """End the head of the queue that does not even fit alone, which admission should have
        refused.
        """
        request = next(iter(self.scheduler.waiting.values()))
        self._fail_alone(
            self._requests[request.request_id], "the request does not fit the KV cache"
        )

    def _fail_alone(self, live: LiveRequest, what: str) -> None:
        """End one request with an error that is its own."""
        error_id = new_error_id()
        logger.error("error %s: %s: %s", error_id, live.spec.request_id, what)
        self._fail(live, RequestFailure(message=f"{what} (error {error_id})", error_id=error_id))

    def _fail(self, live: LiveRequest, failure: RequestFailure) -> None:
        """End a request with an error: one output, whatever was to come of its choices."""
        first, *others = live.choices.values()
        for request in (first, *others):
            self._close(live, request, FinishReason.ERROR)
        finish = describe_end(first, FinishReason.ERROR, self.clock(), failure=failure)
        self._outputs.append(
            RequestOutput(first.request_id, choice=first.choice, finish=finish, ends_request=True)
        )

    def _end_overdue(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, live = heapq.heappop(self._deadlines)
            self._end_all(live, FinishReason.TIME_LIMIT)
        for request in self.scheduler.take_hopeless(now):
            self._end_all(self._requests[request.request_id], FinishReason.TIME_LIMIT)

    def _end_all(self, live: LiveRequest, reason: FinishReason) -> None:
        """End a request's live choices now, with an output each."""
        for request in list(live.choices.values()):
            self._end(live, request, reason)

    def _end(self, live: LiveRequest, request: Request, reason: FinishReason) -> None:
        """End a choice now, with an output of its own."""
        self._close(live, request, reason)
        self._outputs.append(
            RequestOutput(
                request_id=request.request_id,
                choice=request.choice,
                finish=describe_end(request, reason, self.clock()),
                ends_request=not live.choices,
            )
        )

    def _close(self, live: LiveRequest, request: Request, reason: FinishReason) -> None:
        """Take a choice out of everything that knows it. The only way in which one ends."""
        was_first = request is next(iter(live.choices.values()))
        del live.choices[request.choice]
        if not live.choices:
            del self._requests[request.request_id]
            self._finished += 1
        elif was_first and not live.is_forked:
            # The one that computes the prompt ends before the others began: the next one does.
            self.scheduler.add(next(iter(live.choices.values())))
        self.scheduler.remove(request)
        self.runner.release(request.key)
        request.status = STATUS_OF[reason]
