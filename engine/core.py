"""One step of the engine: schedule, execute, update. Single-threaded, and free of torch.

    commands (add, cancel, finish) ──▶ EngineCore ──schedule──▶ batch ──▶ Runner.execute ──▶ tokens
                                          ▲                                                    │
                                          └────────── update: append, finish, free ◀───────────┘

The runner is injected: a real one drives the device, a scripted one drives tests by the thousand.
Whatever the runner raises ends the requests of that batch with an error, and only them.
"""

from __future__ import annotations

import heapq
import logging
import secrets
import time
from collections.abc import Callable

from engine.batch import ScheduledBatch
from engine.outputs import (
    Finish,
    FinishReason,
    RequestFailure,
    RequestOutput,
    StepOutputs,
    Timings,
    TokenLogprobs,
    Usage,
)
from engine.request import GenerationRequest, Request, RequestStatus
from engine.runner_protocol import INVALID_TOKEN, Runner, SampledTokens
from engine.scheduler.base import Scheduler
from engine.stats import EngineStats
from engine.types import RequestId, TokenId

logger = logging.getLogger(__name__)

_STATUS_OF = {
    FinishReason.STOP: RequestStatus.FINISHED,
    FinishReason.LENGTH: RequestStatus.FINISHED,
    FinishReason.CONTEXT: RequestStatus.FINISHED,
    FinishReason.CANCELLED: RequestStatus.CANCELLED,
    FinishReason.TIME_LIMIT: RequestStatus.CANCELLED,
    FinishReason.ERROR: RequestStatus.FAILED,
}


class EngineCore:
    """The live requests and the step that moves them on. All methods are called on one thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        max_context_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.max_context_tokens = max_context_tokens
        self.clock = clock
        self._requests: dict[RequestId, Request] = {}
        self._deadlines: list[
            tuple[float, int, Request]
        ] = []  # heap; ended requests stay until their time
        self._outputs: list[RequestOutput] = []
        self._steps = 0
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._accepted = 0
        self._finished = 0
        self._last_step_s = 0.0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._requests) or bool(self._outputs)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self.scheduler.waiting)

    def add(self, spec: GenerationRequest, arrival: float) -> None:
        """Take in a request that admission has checked. `arrival`: monotonic seconds."""
        limit = min(len(spec.prompt) + spec.stop.max_tokens, self.max_context_tokens)
        request = Request(spec=spec, arrival=arrival, max_total_tokens=limit)
        self._requests[spec.request_id] = request
        self._accepted += 1
        if spec.time_limit_s is not None:
            heapq.heappush(self._deadlines, (arrival + spec.time_limit_s, self._accepted, request))
            if len(self._deadlines) > 2 * len(self._requests) + 64:
                self._deadlines = [e for e in self._deadlines if not e[2].status.is_terminal]
                heapq.heapify(self._deadlines)
        self.scheduler.add(request)

    def cancel(self, request_id: RequestId) -> bool:
        """End a request with CANCELLED; its output comes with the next step. False: not live."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._end(request, FinishReason.CANCELLED)
        return True

    def finish(self, request_id: RequestId, num_tokens: int) -> bool:
        """End a request with STOP as of its first `num_tokens` output tokens. False: it is not
        live.
        """
        request = self._requests.get(request_id)
        if request is None:
            return False
        kept = max(0, min(num_tokens, request.num_output_tokens))
        del request.token_ids[request.num_prompt_tokens + kept :]
        self._end(request, FinishReason.STOP)
        return True

    def fail_all(self, message: str, *, retryable: bool) -> None:
        """End every live request with an error."""
        failure = RequestFailure(message=message, error_id=new_error_id(), retryable=retryable)
        for request in list(self._requests.values()):
            self._end(request, FinishReason.ERROR, failure=failure)

    def step(self) -> StepOutputs:
        """Compute one batch. Also returns the ends of requests that were cancelled or ran out of
        time since.
        """
        started = self.clock()
        self._end_overdue(started)
        batch = self.scheduler.schedule(started)
        if batch.requests:
            sampled = self._execute(batch)
            if sampled is not None:
                self._update(batch, sampled)
            self._last_step_s = self.clock() - started
        elif self.scheduler.waiting and not self.scheduler.running:
            self._end_unschedulable()
        return self.take_outputs()

    def take_outputs(self) -> StepOutputs:
        """The outputs since the last call."""
        outputs = tuple(self._outputs)
        self._outputs.clear()
        return StepOutputs(time=self.clock(), outputs=outputs)

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

    def _execute(self, batch: ScheduledBatch) -> SampledTokens | None:
        """Run the batch. An exception fails the batch's requests, and the loop goes on."""
        try:
            sampled = self.runner.execute(batch)
        except Exception:
            error_id = new_error_id()
            logger.exception(
                "error %s: a step of %d requests failed; they end with an error, the others go on",
                error_id,
                len(batch.requests),
            )
            failure = RequestFailure(
                message=f"the model failed on this request's batch (error {error_id})",
                error_id=error_id,
            )
            for part in batch.requests:
                self._end(part.request, FinishReason.ERROR, failure=failure)
            return None
        self._steps += 1
        return sampled

    def _update(self, batch: ScheduledBatch, sampled: SampledTokens) -> None:
        """Record what was computed, append the new tokens, end what is complete."""
        now = self.clock()
        tokens = iter(sampled.token_ids)
        logprobs = iter(sampled.logprobs) if sampled.logprobs is not None else None
        for part in batch.requests:
            request = part.request
            self.scheduler.advance(part)
            if part.num_tokens > 1 or part.start < request.num_prompt_tokens:
                self._prompt_tokens += part.num_tokens
            if part.samples:
                token = next(tokens)
                token_logprobs = next(logprobs) if logprobs is not None else None
                self._append(request, token, token_logprobs, now)

    def _append(
        self, request: Request, token: TokenId, logprobs: TokenLogprobs | None, now: float
    ) -> None:
        if token == INVALID_TOKEN:
            self._fail_alone(request, "the model gave no finite logits for this request")
            return
        prompt_done = None if request.prompt_reported else 0
        request.prompt_reported = True
        if request.num_tokens >= request.max_total_tokens:
            # Nothing may be generated: max_tokens is 0. The prompt was processed, the sampled token
            # is not wanted.
            end = self._close(request, FinishReason.LENGTH)
            self._outputs.append(
                RequestOutput(request.request_id, prompt_done=prompt_done, finish=end)
            )
            return
        request.token_ids.append(token)
        self._generated_tokens += 1
        if request.first_token is None:
            request.first_token = now
        request.last_token = now
        finish: Finish | None = None
        if token in request.ending_token_ids:
            finish = self._close(request, FinishReason.STOP, stop_token_id=token)
        elif request.num_tokens >= request.max_total_tokens:
            full = request.num_output_tokens >= request.spec.stop.max_tokens
            finish = self._close(request, FinishReason.LENGTH if full else FinishReason.CONTEXT)
        self._outputs.append(
            RequestOutput(
                request_id=request.request_id,
                token_ids=(token,),
                logprobs=(logprobs,) if logprobs is not None else None,
                prompt_done=prompt_done,
                finish=finish,
            )
        )

    def _end_unschedulable(self) -> None:
        """End the head of the queue that does not even fit alone, which admission should have
        refused.
        """
        request = next(iter(self.scheduler.waiting.values()))
        self._fail_alone(request, "the request does not fit the KV cache")

    def _fail_alone(self, request: Request, what: str) -> None:
        """End one request with an error that is its own."""
        error_id = new_error_id()
        logger.error(
            "error %s: %s (%d tokens): %s", error_id, request.request_id, request.num_tokens, what
        )
        failure = RequestFailure(message=f"{what} (error {error_id})", error_id=error_id)
        self._end(request, FinishReason.ERROR, failure=failure)

    def _end_overdue(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, request = heapq.heappop(self._deadlines)
            if not request.status.is_terminal:
                self._end(request, FinishReason.TIME_LIMIT)

    def _end(
        self, request: Request, reason: FinishReason, *, failure: RequestFailure | None = None
    ) -> None:
        """End a request now, with an output of its own."""
        finish = self._close(request, reason, failure=failure)
        self._outputs.append(RequestOutput(request_id=request.request_id, finish=finish))

    def _close(
        self,
        request: Request,
        reason: FinishReason,
        *,
        stop_token_id: TokenId | None = None,
        failure: RequestFailure | None = None,
    ) -> Finish:
        """Take a request out of everything that knows it. The only way a request ends."""
        del self._requests[request.request_id]
        self.scheduler.remove(request)
        self.runner.release(request.request_id)
        request.status = _STATUS_OF[reason]
        self._finished += 1
        return Finish(
            reason=reason,
            usage=Usage(
                prompt_tokens=request.num_prompt_tokens,
                cached_tokens=0,
                completion_tokens=request.num_output_tokens,
            ),
            timings=Timings(
                arrival=request.arrival,
                first_scheduled=request.first_scheduled,
                first_token=request.first_token,
                last_token=request.last_token,
                finished=self.clock(),
                preemptions=request.preemptions,
            ),
            stop_token_id=stop_token_id,
            failure=failure,
        )


def new_error_id() -> str:
    """A short random name under which a cause stands in the log."""
    return secrets.token_hex(6)
