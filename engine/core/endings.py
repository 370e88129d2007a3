"""The record of the live requests: which ones are held, how they end, and what is reported when
they do.

Whatever the cause (a token, a command, a time limit, a failure), a choice ends exactly once, in
`close`. The scheduler and the runner then drop all their state for it.
"""

from __future__ import annotations

import heapq
import logging
import secrets
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace

from engine.contract.outputs import (
    Finish,
    FinishReason,
    RequestFailure,
    RequestOutput,
    Timings,
    Usage,
)
from engine.contract.request import GenerationRequest, Request, RequestStatus
from engine.contract.types import RequestId, TokenId
from engine.scheduler.base import Scheduler
from engine.scheduler.runner_protocol import Runner

logger = logging.getLogger(__name__)

_NO_TOKEN = (
    "no token can follow: the model gave no finite logits, or what is banned or may not be "
    "repeated is the whole vocabulary"
)

STATUS_OF = {
    FinishReason.STOP: RequestStatus.FINISHED,
    FinishReason.LENGTH: RequestStatus.FINISHED,
    FinishReason.CONTEXT: RequestStatus.FINISHED,
    FinishReason.CANCELLED: RequestStatus.CANCELLED,
    FinishReason.TIME_LIMIT: RequestStatus.CANCELLED,
    FinishReason.ERROR: RequestStatus.FAILED,
}


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request and its choices that have not ended.

    Attributes:
        spec: what was asked for.
        choices: the live choices by index; empty once the request has ended.
        is_forked: whether all choices have started (or all are ending); until then, the first one
            computes the prompt.
        is_prompt_reported: whether an output has said that the prompt was processed.
        is_held: whether all its choices are excluded from steps, including those that have not
            started.
    """

    spec: GenerationRequest
    choices: dict[int, Request]
    is_forked: bool
    is_prompt_reported: bool = False
    is_held: bool = False


def describe_end(
    request: Request,
    reason: FinishReason,
    now: float,
    *,
    stop_token_id: TokenId | None = None,
) -> Finish:
    """Describe how a choice ended. `now` is in monotonic seconds."""
    return Finish(
        reason=reason,
        usage=Usage(
            prompt_tokens=request.num_prompt_tokens,
            cached_tokens=request.num_cached_tokens,
            completion_tokens=request.num_output_tokens - request.num_pending_tokens,
            draft_tokens=request.num_draft_tokens,
            accepted_draft_tokens=request.num_accepted_draft_tokens,
            prediction_draft_tokens=request.num_prediction_draft_tokens,
            accepted_prediction_draft_tokens=request.num_accepted_prediction_draft_tokens,
        ),
        timings=Timings(
            arrival=request.arrival,
            first_scheduled=request.first_scheduled,
            first_token=request.first_token,
            last_token=request.last_token,
            finished=now,
            preemptions=request.preemptions,
        ),
        stop_token_id=stop_token_id,
    )


def describe_failure(requests: Sequence[Request], now: float, failure: RequestFailure) -> Finish:
    """Describe how a request failed.

    Args:
        requests: the choices that had not ended, at least one. Their tokens are added up, because
            this is the request's last output. The timings are those of the first one.
        now: monotonic seconds.
        failure: why it failed.
    """
    first = describe_end(requests[0], FinishReason.ERROR, now)
    usage = replace(
        first.usage,
        completion_tokens=sum(one.num_output_tokens - one.num_pending_tokens for one in requests),
        draft_tokens=sum(one.num_draft_tokens for one in requests),
        accepted_draft_tokens=sum(one.num_accepted_draft_tokens for one in requests),
        prediction_draft_tokens=sum(one.num_prediction_draft_tokens for one in requests),
        accepted_prediction_draft_tokens=sum(
            one.num_accepted_prediction_draft_tokens for one in requests
        ),
    )
    return replace(first, usage=usage, failure=failure)


def contradiction(request: Request) -> tuple[str, str] | None:
    """Explain which of a caller's own options leave no token to choose.

    Args:
        request: a choice for which no token could be chosen.

    Returns:
        The field, in engine terms, and what is wrong with it. None if the options leave some token,
            so that the model's logits are at fault.
    """
    spec, sampling, matcher = request.spec, request.spec.sampling, request.matcher
    num_tokens = request.num_output_tokens - request.num_pending_tokens
    listed = set(sampling.allowed_token_ids)
    fitting = listed if matcher is None else set(matcher.fitting())
    if matcher is None or spec.grammar is None:
        if not listed:
            return None
        field, what = "sampling.allowed_token_ids", "have none"
    elif not fitting:
        return spec.grammar.field, f"allows no token of the model's after {num_tokens}; change it"
    else:
        field, what = spec.grammar.field, "allows no token"
    forbidden: dict[str, Set[int]] = {
        "sampling.banned_token_ids": set(sampling.banned_token_ids),
        "sampling.no_repeat_ngram_size": _repeating(request),
        "stop.min_tokens": (
            request.ending_token_ids if num_tokens < spec.stop.min_tokens else frozenset()
        ),
    }
    left = fitting & listed if listed else fitting
    if left.difference(*forbidden.values()):
        return None
    guilty = [name for name, ids in forbidden.items() if ids & left]
    if left < fitting:
        guilty.insert(0, "sampling.allowed_token_ids")
    return field, (
        f"{what} that {' and '.join(guilty)} would leave after {num_tokens} tokens; change one of "
        "them, or leave it out"
    )


def _repeating(request: Request) -> frozenset[int]:
    """Return the tokens that no_repeat_ngram_size forbids. Takes time proportional to the
    length.
    """
    size, ids = request.spec.sampling.no_repeat_ngram_size, request.token_ids
    end = len(ids) - request.num_pending_tokens
    if not size or end < size:
        return frozenset()
    last = ids[end - size + 1 : end]
    return frozenset(
        ids[at + size - 1] for at in range(end - size + 1) if ids[at : at + size - 1] == last
    )


def new_error_id() -> str:
    """Return a short random id for finding an error's cause in the log."""
    return secrets.token_hex(6)


class LiveRequests:
    """The requests that have not ended. Requests end only through this class.

    Attributes:
        by_id: the live requests.
        outputs: the outputs to deliver next.
        num_accepted, num_finished, num_holds: counters since the start.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, clock: Callable[[], float]) -> None:
        """`scheduler` and `runner` are notified of each choice that ends. `clock` returns monotonic
        seconds.
        """
        self.by_id: dict[RequestId, LiveRequest] = {}
        self.outputs: list[RequestOutput] = []
        self.num_accepted = 0
        self.num_finished = 0
        self.num_holds = 0
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._deadlines: list[tuple[float, int, LiveRequest]] = []  # heap; ended ones stay a while

    def add(self, spec: GenerationRequest, choices: dict[int, Request]) -> LiveRequest:
        """Add a request, with its choices by index."""
        live = LiveRequest(spec, choices, is_forked=len(choices) == 1)
        self.by_id[spec.request_id] = live
        self.num_accepted += 1
        if spec.time_limit_s is not None:
            deadline = choices[0].arrival + spec.time_limit_s
            heapq.heappush(self._deadlines, (deadline, self.num_accepted, live))
        return live

    def hold(self, request_id: RequestId) -> bool:
        """Exclude a request and all its choices from all steps.

        Returns False if it is not live or already held.
        """
        live = self.by_id.get(request_id)
        if live is None or live.is_held:
            return False
        live.is_held = True
        self.num_holds += 1
        for request in live.choices.values():
            self._scheduler.hold(request)
        return True

    def unhold(self, request_id: RequestId) -> bool:
        """End a hold. Returns False if the request is not live or not held."""
        live = self.by_id.get(request_id)
        if live is None or not live.is_held:
            return False
        live.is_held = False
        for request in live.choices.values():
            self._scheduler.unhold(request)
        return True

    def take_outputs(self) -> tuple[RequestOutput, ...]:
        """Return the outputs since the last call."""
        outputs = tuple(self.outputs)
        self.outputs.clear()
        return outputs

    def fail_at_token(self, live: LiveRequest, request: Request, what: str | None) -> None:
        """End one request because of a choice's token.

        If its grammar can no longer be followed, the error says so. Otherwise the error is `what`,
        or if that is None, that no token could be chosen, and why.
        """
        matcher = request.matcher
        if matcher is not None and matcher.failure is not None:
            self.fail_grammar(live, matcher.failure)
        elif what is not None:
            self.fail_alone(live, what)
        elif (found := contradiction(request)) is not None:
            self._fail_field(live, *found)
        elif matcher is not None and matcher.failure is not None:  # as was found only now
            self.fail_grammar(live, matcher.failure)
        else:
            self.fail_alone(live, _NO_TOKEN)

    def fail_grammar(self, live: LiveRequest, description: str) -> None:
        """End one request because of its grammar. `description` says what is wrong and what to
        do.
        """
        grammar = live.spec.grammar
        self._fail_field(live, "grammar" if grammar is None else grammar.field, description)

    def _fail_field(self, live: LiveRequest, field: str, description: str) -> None:
        """End one request because of what its caller asked for. `field` is in engine terms."""
        error_id = new_error_id()
        logger.info("error %s: %s: %s %s", error_id, live.spec.logged, field, description)
        self.fail(live, RequestFailure(f"{field}: {description}", error_id, field=field))

    def fail_alone(self, live: LiveRequest, what: str, error: Exception | None = None) -> None:
        """End one request with an error that affects no other request."""
        error_id = new_error_id()
        logger.error("error %s: %s: %s", error_id, live.spec.logged, what, exc_info=error)
        self.fail(live, RequestFailure(message=f"{what} (error {error_id})", error_id=error_id))

    def fail(self, live: LiveRequest, failure: RequestFailure) -> None:
        """End a request with an error, with one output for all its choices."""
        live.is_forked = True  # so that no other choice takes over the prompt
        requests = tuple(live.choices.values())
        for request in requests:
            self.close(live, request, FinishReason.ERROR)
        self.outputs.append(
            RequestOutput(
                live.spec.request_id,
                choice=requests[0].choice,
                finish=describe_failure(requests, self._clock(), failure),
                ends_request=True,
            )
        )

    def end_overdue(self, now: float) -> None:
        """End the requests, including held ones, whose time limits have passed. `now` is in
        monotonic seconds.
        """
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, live = heapq.heappop(self._deadlines)
            self.end_all(live, FinishReason.TIME_LIMIT)

    @property
    def next_deadline(self) -> float | None:
        """When `end_overdue` may next have something to do, in monotonic seconds, or None if
        never.
        """
        return self._deadlines[0][0] if self._deadlines and self.by_id else None

    def end_all(self, live: LiveRequest, reason: FinishReason) -> None:
        """End all of a request's live choices now, each with its own output."""
        live.is_forked = True  # so that no other choice takes over the prompt
        for request in list(live.choices.values()):
            self.end(live, request, reason)

    def end(self, live: LiveRequest, request: Request, reason: FinishReason) -> None:
        """End a choice now, with its own output."""
        self.close(live, request, reason)
        self.outputs.append(
            RequestOutput(
                request_id=request.request_id,
                choice=request.choice,
                finish=describe_end(request, reason, self._clock()),
                ends_request=not live.choices,
            )
        )

    def close(self, live: LiveRequest, request: Request, reason: FinishReason) -> None:
        """Remove a choice from the scheduler, the runner and this record. Every choice ends
        here.
        """
        leads = not live.is_forked and request is next(iter(live.choices.values()))
        del live.choices[request.choice]
        if not live.choices:
            del self.by_id[request.request_id]
            self.num_finished += 1
            self._tidy_deadlines()
        self._scheduler.remove(request)
        self._runner.release(request.key)
        request.status = STATUS_OF[reason]
        if leads and live.choices:
            # The choice that computes the prompt ends before the others started: the next one takes
            # over.
            successor = next(iter(live.choices.values()))
            if request.first_scheduled is None:
                self._scheduler.add(successor)
            else:
                self._scheduler.put_back(successor)
            if live.is_held:
                self._scheduler.hold(successor)

    def _tidy_deadlines(self) -> None:
        """Drop the deadlines of ended requests once they are the majority. Amortised O(1)."""
        if len(self._deadlines) > 2 * len(self.by_id) + 64:
            self._deadlines = [entry for entry in self._deadlines if entry[2].choices]
            heapq.heapify(self._deadlines)
