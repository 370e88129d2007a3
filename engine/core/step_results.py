"""Processes a collected step: appends tokens, starts and ends choices, and measures the step.

SampledTokens ──take──▶ each request of the batch: computed ─▶ token appended ─▶ goes on or ends
                    └─▶ outputs (LiveRequests), the scheduler's times, a StepRecord
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.contract.outputs import FinishReason, RequestOutput, StepRecord, TokenLogprobs
from engine.contract.request import Request
from engine.contract.types import RequestKey, TokenId
from engine.core import grammar_budget
from engine.core.endings import LiveRequest, LiveRequests, describe_end
from engine.scheduler.base import Scheduler
from engine.scheduler.runner_protocol import INVALID_TOKEN, PendingStep, SampledTokens
from engine.scheduler.scheduled_batch import ScheduledBatch


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step whose results have not been collected yet.

    Attributes:
        batch, pending: what is computed, and the handle to its results.
        launched: monotonic seconds.
        void: requests whose results are wrong because an earlier step failed to copy their blocks.
    """

    batch: ScheduledBatch
    pending: PendingStep
    launched: float
    void: set[RequestKey] = field(default_factory=set)


class StepResults:
    """Processes the results of collected steps.

    Attributes:
        num_steps, num_decode_steps: the number of steps, and of those in which a request decoded.
        num_prompt_tokens, num_generated_tokens: the numbers of tokens computed for prompts, and of
            tokens appended.
        last_step_s: the seconds from the last step's launch to its results.
    """

    def __init__(
        self, scheduler: Scheduler, live: LiveRequests, clock: Callable[[], float]
    ) -> None:
        self._scheduler = scheduler
        self._live = live
        self._clock = clock
        self._last_collect = -math.inf
        self._record: StepRecord | None = None
        self.num_steps = 0
        self.num_decode_steps = 0
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.last_step_s = 0.0

    def take_record(self) -> StepRecord | None:
        """Return the last step's size and duration, or None if they were already taken."""
        record, self._record = self._record, None
        return record

    def take(self, step: StepInFlight, sampled: SampledTokens) -> None:
        """Record what was computed, append the new tokens, and end the choices that are
        complete.
        """
        self.num_steps += 1
        now = self._clock()
        tokens = iter(sampled.token_ids)
        logprobs = iter(sampled.logprobs) if sampled.logprobs is not None else None
        num_prompt_tokens = 0
        for part in step.batch.requests:
            request, start, num_tokens, _, samples = part
            if num_tokens > 1 or start < request.num_prompt_tokens:
                num_prompt_tokens += num_tokens
            token = next(tokens) if samples else None
            token_logprobs = next(logprobs) if samples and logprobs is not None else None
            if request.status.is_terminal or request.key in step.void:
                continue  # the request ended, or lost its blocks, while the step ran
            live = self._live.by_id[request.request_id]
            if samples and not live.is_forked:
                self._fork(live, request)
            self._scheduler.computed(part)
            if not live.is_prompt_reported:
                known = sampled.prompt_logprobs.get(request.key, ())
                # Results from before a preemption are dropped.
                done = len(request.prompt_logprobs)
                request.prompt_logprobs.extend(known[max(0, done - start) :])
            if token is not None:
                self._append(live, request, start + num_tokens, token, token_logprobs, now)
        self._measure(step, num_prompt_tokens, now)

    def _measure(self, step: StepInFlight, num_prompt_tokens: int, now: float) -> None:
        """Record the duration and size of a step. `now` is in monotonic seconds."""
        self.num_prompt_tokens += num_prompt_tokens
        self.last_step_s = now - step.launched
        num_tokens = step.batch.num_tokens
        self._record = StepRecord(
            duration_s=self.last_step_s,
            num_requests=len(step.batch.requests),
            num_prompt_tokens=num_prompt_tokens,
            num_decode_tokens=num_tokens - num_prompt_tokens,
        )
        # A step that was launched while another ran began when that one ended.
        seconds = now - max(step.launched, self._last_collect)
        is_decode = num_tokens > num_prompt_tokens
        self.num_decode_steps += is_decode
        self._scheduler.step_done(step.batch, seconds, is_decode=is_decode)
        self._last_collect = now

    def _append(
        self,
        live: LiveRequest,
        request: Request,
        position: int,
        token: TokenId,
        logprobs: TokenLogprobs | None,
        now: float,
    ) -> None:
        if token == INVALID_TOKEN:
            self._live.fail_at_token(live, request, None)
            return
        if position >= request.max_total_tokens:
            # max_tokens is 0: the prompt was processed, and the sampled token is dropped.
            prompt_done, prompt_logprobs = self._report_prompt(live, request)
            self._live.outputs.append(
                RequestOutput(
                    request.request_id,
                    choice=request.choice,
                    prompt_done=prompt_done,
                    prompt_logprobs=prompt_logprobs,
                )
            )
            self._live.end_all(live, FinishReason.LENGTH)
            return
        try:
            reason = self._reason_to_end(request, position, token)
        except Exception as error:
            self._live.fail_alone(live, "the grammar failed", error)
            return
        if reason is FinishReason.ERROR:
            self._live.fail_at_token(live, request, "the model left the form that was asked for")
            return
        if reason is None and not grammar_budget.charge(request, live.choices.values()):
            self._live.fail_grammar(live, grammar_budget.TOO_SLOW)
            return
        grammar_budget.release(request)
        prompt_done, prompt_logprobs = self._report_prompt(live, request)
        request.token_ids[position] = token
        request.num_pending_tokens -= 1
        self.num_generated_tokens += 1
        if request.first_token is None:
            request.first_token = now
        request.last_token = now
        finish = None
        if reason is not None:
            stop_token_id = token if token in request.ending_token_ids else None
            self._live.close(live, request, reason)
            finish = describe_end(request, reason, self._clock(), stop_token_id=stop_token_id)
        self._live.outputs.append(
            RequestOutput(
                request.request_id,
                request.choice,
                (token,),
                (logprobs,) if logprobs is not None else None,
                prompt_done,
                prompt_logprobs,
                finish,
                ends_request=not live.choices,
            )
        )

    def _reason_to_end(
        self, request: Request, position: int, token: TokenId
    ) -> FinishReason | None:
        """Return why a choice ends with its new token, or None if it does not. ERROR means that its
        grammar does not allow the token.
        """
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
        """Return what to report about the prompt when it has first been processed completely."""
        if live.is_prompt_reported:
            return None, None
        live.is_prompt_reported = True
        logprobs = tuple(request.prompt_logprobs)
        request.prompt_logprobs.clear()
        wanted = request.spec.prompt_logprobs is not None
        return request.num_cached_tokens, logprobs if wanted else None

    def _fork(self, live: LiveRequest, parent: Request) -> None:
        """Start the other choices when the prompt has first been processed completely.

        Called before the step is recorded as computed. Each choice computes the last prompt token
        for itself, and until then the blocks that this token attends to are still held.
        """
        if parent.num_prompt_tokens >= parent.max_total_tokens:
            return  # max_tokens is 0, so all choices end
        live.is_forked = True
        children = [request for request in live.choices.values() if request is not parent]
        self._scheduler.fork(parent, children)
        if live.is_held:
            for child in children:
                self._scheduler.hold(child)
