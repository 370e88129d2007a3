"""Processes a collected step: appends tokens, starts and ends choices, and measures the step.

SampledTokens ──take──▶ each request of the batch: computed ─▶ token appended ─▶ goes on or ends
                    └─▶ outputs (LiveRequests), the scheduler's times, a StepRecord
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from engine.contract.outputs import FinishReason, RequestOutput, StepRecord, TokenLogprobs
from engine.contract.request import Request, TokenMatcher
from engine.contract.types import RequestKey, TokenId
from engine.core import grammar_budget
from engine.core.endings import LiveRequest, LiveRequests, describe_end
from engine.scheduler.base import Scheduler
from engine.scheduler.runner_protocol import INVALID_TOKEN, PendingStep, SampledTokens
from engine.scheduler.scheduled_batch import ScheduledBatch, ScheduledRequest


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


class _TokenRefusedError(Exception):
    """A sampled token cannot be appended.

    Attributes:
        fail_request: ends the request. Called when the tokens before this one were delivered.
    """

    def __init__(self, fail_request: Callable[[], None]) -> None:
        super().__init__()
        self.fail_request = fail_request


class StepResults:
    """Processes the results of collected steps.

    Attributes:
        num_steps, num_decode_steps: the number of steps, and of those in which a request decoded.
        num_prompt_tokens, num_generated_tokens: the numbers of tokens computed for prompts, and of
            tokens appended.
        num_draft_steps: the number of steps with drafts.
        num_drafts, num_draft_tokens, num_accepted_draft_tokens: how often a request had drafts in
            a step, how many, and how many of them were kept.
        last_step_s: the seconds from the last step's launch to its results.
    """

    def __init__(
        self, scheduler: Scheduler, live: LiveRequests, clock: Callable[[], float]
    ) -> None:
        self._scheduler = scheduler
        self._adapters = scheduler.callers.adapters
        self._live = live
        self._clock = clock
        self._last_collect = -math.inf
        self._record: StepRecord | None = None
        self.num_steps = 0
        self.num_decode_steps = 0
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.num_draft_steps = 0
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_draft_tokens = 0
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
        tokens, logprobs = sampled.token_ids, sampled.logprobs
        end = 0  # of the part's rows among the sampled ones
        num_prompt_tokens = 0
        for part in step.batch.requests:
            request, start, num_tokens, _, num_sampled, _ = part
            if num_tokens > 1 or start < request.num_prompt_tokens:
                num_prompt_tokens += num_tokens
                if request.adapter is not None:
                    self._adapters.of(request.adapter).prompt_tokens += num_tokens
            first, end = end, end + num_sampled
            if request.status.is_terminal or request.key in step.void:
                continue  # the request ended, or lost its blocks, while the step ran
            live = self._live.by_id[request.request_id]
            if num_sampled and not live.is_forked:
                self._fork(live, request)
            self._scheduler.computed(part)
            if not live.is_prompt_reported:
                known = sampled.prompt_logprobs.get(request.key, ())
                # Results from before a preemption are dropped.
                done = len(request.prompt_logprobs)
                request.prompt_logprobs.extend(known[max(0, done - start) :])
            if num_sampled:
                known_logprobs = None if logprobs is None else logprobs[first:end]
                self._append(live, part, tokens[first:end], known_logprobs, now)
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
        self.num_draft_steps += any(part.drafts for part in step.batch.requests)
        self._scheduler.step_done(step.batch, seconds, is_decode=is_decode)
        self._last_collect = now

    def _append(
        self,
        live: LiveRequest,
        part: ScheduledRequest,
        tokens: Sequence[TokenId],
        logprobs: Sequence[TokenLogprobs | None] | None,
        now: float,
    ) -> None:
        """Append the sampled tokens that stand to a request, and report them.

        If one cannot be appended, the request fails, with the tokens before it delivered.
        """
        request, drafts = part.request, part.drafts
        position = part.start + part.num_tokens
        if position >= request.max_total_tokens:
            self._end_without_output(live, request)
            return
        count, reason, refused = 0, None, None
        for token in tokens:
            if count and token == INVALID_TOKEN:
                break  # what a draft led to: the next step chooses it again, or tells why not
            try:
                reason = self._accept(live, request, position + count, token)
            except _TokenRefusedError as error:
                refused = error
                break
            count += 1
            if reason is not None or count > len(drafts) or drafts[count - 1] != token:
                break
        if drafts:
            request.is_verifying = False
            tokens, num_kept = tokens[:count], max(0, count - 1)
            is_over = reason is not None or refused is not None
            self._count_drafts(request, len(drafts), num_kept, is_over=is_over)
            self._scheduler.rejected(request, position + num_kept)
        if count:
            self._deliver(live, request, position, tokens, logprobs, reason, now)
        if refused is not None:
            refused.fail_request()

    def _count_drafts(
        self, request: Request, num_drafts: int, num_kept: int, *, is_over: bool
    ) -> None:
        """Count a request's drafts and those kept. is_over: whether the request ends here."""
        request.num_draft_tokens += num_drafts
        request.num_accepted_draft_tokens += num_kept
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_draft_tokens += num_kept
        if self._scheduler.drafter is not None:
            self._scheduler.drafter.judge(request, num_drafts, num_kept, is_over=is_over)

    def _end_without_output(self, live: LiveRequest, request: Request) -> None:
        """End a request whose max_tokens is 0: its prompt was processed, and the sampled token is
        dropped.
        """
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

    def _accept(
        self, live: LiveRequest, request: Request, position: int, token: TokenId
    ) -> FinishReason | None:
        """Return why a choice ends with its new token, or None if it does not.

        Raises:
            _TokenRefusedError: the token cannot be taken.
        """
        if token == INVALID_TOKEN:
            raise _TokenRefusedError(partial(self._live.fail_at_token, live, request, None))
        if token in request.ending_token_ids:
            return FinishReason.STOP
        if request.matcher is not None and self._completes(live, request, request.matcher, token):
            return FinishReason.STOP
        if position + 1 < request.max_total_tokens:
            return None
        full = position + 1 - request.num_prompt_tokens >= request.spec.stop.max_tokens
        return FinishReason.LENGTH if full else FinishReason.CONTEXT

    def _completes(
        self, live: LiveRequest, request: Request, matcher: TokenMatcher, token: TokenId
    ) -> bool:
        """Advance a grammar by a choice's new token. Return whether the output is then complete.

        Raises:
            _TokenRefusedError: the grammar does not allow the token, or is too costly to follow.
        """
        try:
            is_allowed = matcher.accept(token)
            is_complete = is_allowed and matcher.is_complete
        except Exception as error:
            fail = partial(self._live.fail_alone, live, "the grammar failed", error)
            raise _TokenRefusedError(fail) from error
        if not is_allowed:
            what = "the model left the form that was asked for"
            raise _TokenRefusedError(partial(self._live.fail_at_token, live, request, what))
        if not is_complete and not grammar_budget.charge(request, live.choices.values()):
            fail = partial(self._live.fail_grammar, live, grammar_budget.TOO_SLOW)
            raise _TokenRefusedError(fail)
        grammar_budget.release(request)
        return is_complete

    def _deliver(
        self,
        live: LiveRequest,
        request: Request,
        position: int,
        tokens: Sequence[TokenId],
        logprobs: Sequence[TokenLogprobs | None] | None,
        reason: FinishReason | None,
        now: float,
    ) -> None:
        """Put tokens at a position, the first one in the place of a pending token, and report them.

        logprobs: one entry for each token, or for more; None if no request asked for them.
        """
        prompt_done, prompt_logprobs = self._report_prompt(live, request)
        request.token_ids[position] = tokens[0]
        request.num_pending_tokens -= 1
        self.num_generated_tokens += len(tokens)
        if request.adapter is not None:
            self._adapters.of(request.adapter).generated_tokens += len(tokens)
        if len(tokens) > 1:
            request.token_ids.extend(tokens[1:])
            self._scheduler.verified(request, len(tokens) - 1)
        if request.first_token is None:
            request.first_token = now
        request.last_token = now
        reported = None
        if logprobs is not None and request.spec.logprobs is not None:
            reported = tuple([one for one in logprobs[: len(tokens)] if one is not None])
        finish = None
        if reason is not None:
            stop_token_id = tokens[-1] if tokens[-1] in request.ending_token_ids else None
            self._live.close(live, request, reason)
            finish = describe_end(request, reason, self._clock(), stop_token_id=stop_token_id)
        self._live.outputs.append(
            RequestOutput(
                request.request_id,
                request.choice,
                tuple(tokens),
                reported,
                prompt_done,
                prompt_logprobs,
                finish,
                ends_request=not live.choices,
            )
        )

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
