"""Converts the events and answers of `delivery` to messages.

There is one `Responder` for each loaded model. Every token of a session passes through `batch`,
which makes one message of everything that a stream took.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from google.protobuf import duration_pb2, timestamp_pb2
from headrace.v1 import generation_pb2, generation_service_pb2

from engine.contract.outputs import Finish, FinishReason, TokenLogprobs
from engine.contract.outputs import Usage as EngineUsage
from engine.contract.sampling_params import SCALARS, SamplingParams
from engine.contract.stats import EngineStats
from engine.text import Tokenizer
from service.convert.values import to_duration
from service.delivery import events
from service.delivery.session import Batch
from service.errors.status_table import failure_status, to_status
from service.replies.reply_text import Apart, CallPart

_REASONS = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
    FinishReason.CONTEXT: generation_pb2.FINISH_REASON_CONTEXT,
    FinishReason.CANCELLED: generation_pb2.FINISH_REASON_CANCELLED,
    FinishReason.TIME_LIMIT: generation_pb2.FINISH_REASON_TIME_LIMIT,
}
_CANCEL_STATUSES = {
    events.CANCELLED: generation_service_pb2.CANCEL_STATUS_CANCELLED,
    events.ALREADY_FINISHED: generation_service_pb2.CANCEL_STATUS_ALREADY_FINISHED,
    events.NOT_FOUND: generation_service_pb2.CANCEL_STATUS_NOT_FOUND,
}


def sampling_message(
    params: SamplingParams, *, seed: bool = True
) -> generation_pb2.SamplingOptions:
    """Return the effective parameters, with every field set."""
    scalars: dict[str, Any] = {name: getattr(params, name) for name in SCALARS}
    message = generation_pb2.SamplingOptions(
        **scalars,
        logit_bias=dict(params.logit_bias),
        allowed_token_ids=params.allowed_token_ids,
        banned_token_ids=params.banned_token_ids,
    )
    if seed:
        message.seed = params.seed
    return message


def _stop_message(event: events.Accepted) -> generation_pb2.StopOptions:
    params = event.stop
    return generation_pb2.StopOptions(
        max_tokens=min(params.max_tokens, 2**32 - 1),
        min_tokens=params.min_tokens,
        stop_strings=event.stop_strings,
        stop_token_ids=params.stop_token_ids,
        eos_token_ids=params.eos_token_ids,
        ignore_eos=params.ignore_eos,
        include_stop=event.include_stop,
        max_reasoning_tokens=event.max_reasoning_tokens,
    )


def _usage(usage: EngineUsage, reasoning_tokens: int) -> generation_pb2.Usage:
    return generation_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        reasoning_tokens=reasoning_tokens,
        draft_tokens=usage.draft_tokens,
        accepted_draft_tokens=usage.accepted_draft_tokens,
        prediction_draft_tokens=usage.prediction_draft_tokens,
        accepted_prediction_draft_tokens=usage.accepted_prediction_draft_tokens,
    )


def _load(stats: EngineStats) -> generation_service_pb2.ServerLoad:
    return generation_service_pb2.ServerLoad(
        running=stats.running,
        waiting=stats.waiting,
        kv_cache_usage=stats.kv_usage,
    )


def _total(usages: Sequence[generation_pb2.Usage]) -> generation_pb2.Usage:
    return generation_pb2.Usage(
        prompt_tokens=max(usage.prompt_tokens for usage in usages),
        cached_tokens=max(usage.cached_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
        draft_tokens=sum(usage.draft_tokens for usage in usages),
        accepted_draft_tokens=sum(usage.accepted_draft_tokens for usage in usages),
        prediction_draft_tokens=sum(usage.prediction_draft_tokens for usage in usages),
        accepted_prediction_draft_tokens=sum(
            usage.accepted_prediction_draft_tokens for usage in usages
        ),
    )


def _timings(finish: Finish, last_token: float | None) -> generation_pb2.Timings:
    timings = finish.timings

    def since(moment: float | None) -> duration_pb2.Duration | None:
        return None if moment is None else to_duration(moment - timings.arrival)

    return generation_pb2.Timings(
        first_scheduled_duration=since(timings.first_scheduled),
        first_token_duration=since(timings.first_token),
        last_token_duration=since(last_token),
        finished_duration=since(timings.finished),
        preemptions=timings.preemptions,
    )


class Responder:
    """Converts events to messages."""

    def __init__(self, tokenizer: Tokenizer | None, instance_id: str) -> None:
        """Make the responder of this process. `tokenizer`: provides the text of tokens, or None if
        they have no text.
        """
        self._tokenizer = tokenizer
        self._instance_id = instance_id

    def batch(
        self, batch: Batch, instance_id: str = "", load: EngineStats | None = None
    ) -> generation_service_pb2.StreamResultResponse:
        """Return one message with everything that a session took. A session's first message has the
        instance id. `load`: the engine's load, if it is to be reported.
        """
        message = generation_service_pb2.StreamResultResponse(instance_id=instance_id)
        self.add_events(message.events, batch.events)
        for reply in batch.replies:
            self._reply(message, reply)
        if load is not None:
            message.load.CopyFrom(_load(load))
        return message

    def add_events(
        self, target: Any, taken: Iterable[tuple[int, list[events.NumberedEvent]]]
    ) -> None:
        """Add the events of several requests (by number) to `target`, a message's repeated
        ResultEvent.

        The events are filled in directly: making a message and copying it into another costs three
        times as much.
        """
        add, is_delta = target.add, events.Delta
        for number, run in taken:
            for numbered in run:
                message = add()
                message.request_number = number
                message.seq = numbered.seq
                event = numbered.event
                if not isinstance(event, is_delta):
                    self._fill(message, event)
                    continue
                # New output. Runs for every token, so kept short.
                delta = message.delta
                delta.text = event.text
                if event.apart is not None:
                    _add_apart(delta, event.apart)
                if event.choice:
                    message.choice_index = event.choice
                if event.detailed:
                    delta.tokens.extend(self.tokens(event))
                else:
                    delta.token_ids.extend(event.token_ids)

    def _fill(
        self,
        message: generation_pb2.ResultEvent,
        event: events.Accepted | events.PromptProcessed | events.Finished | events.Failed,
    ) -> None:
        match event:
            case events.Accepted():
                message.accepted.CopyFrom(self.accepted(event))
            case events.PromptProcessed():
                message.prompt.CopyFrom(self.prompt(event))
            case events.Finished():
                message.choice_index = event.choice
                message.finished.CopyFrom(self.finished(event))
            case events.Failed():
                message.failed.CopyFrom(self.failed(event))

    def accepted(self, event: events.Accepted) -> generation_pb2.Accepted:
        """Return the message for an accepted request."""
        at = timestamp_pb2.Timestamp()
        at.FromNanoseconds(int(event.accepted_at * 1e9))
        return generation_pb2.Accepted(
            request_id=event.request_id,
            sampling=sampling_message(event.sampling),
            stop=_stop_message(event),
            prompt_tokens=event.prompt_tokens,
            queue_position=event.queue_position,
            command_id=event.command_id,
            accept_time=at,
            n=event.n,
            notes=event.notes,
            adapter_digest=event.adapter_digest,
        )

    def prompt(self, event: events.PromptProcessed) -> generation_pb2.PromptProcessed:
        """Return the message for a processed prompt."""
        tokens = [self.token(token_id) for token_id in event.token_ids]
        # The first token has no context, so it has no probability.
        for info, logprobs in zip(tokens[1:], event.logprobs, strict=False):
            self._add_logprobs(info, logprobs)
        return generation_pb2.PromptProcessed(
            prompt_tokens=event.prompt_tokens, cached_tokens=event.cached_tokens, tokens=tokens
        )

    def tokens(self, event: events.Delta) -> list[generation_pb2.TokenInfo]:
        """Return the tokens of a delta."""
        infos = [self.token(token_id) for token_id in event.token_ids]
        for info, logprobs in zip(infos, event.logprobs or (), strict=False):
            self._add_logprobs(info, logprobs)
        for info, moment in zip(infos, event.times or (), strict=False):
            info.elapsed_duration.CopyFrom(to_duration(moment))
        return infos

    def token(self, token_id: int) -> generation_pb2.TokenInfo:
        """Return one token with its text and bytes."""
        raw = self._bytes(token_id)
        return generation_pb2.TokenInfo(id=token_id, text=raw.decode("utf-8", "replace"), bytes=raw)

    def _bytes(self, token_id: int) -> bytes:
        return b"" if self._tokenizer is None else self._tokenizer.token_bytes(token_id)

    def _add_logprobs(self, info: generation_pb2.TokenInfo, logprobs: TokenLogprobs) -> None:
        info.logprob = logprobs.logprob
        info.rank = logprobs.rank
        for token_id, logprob in (*logprobs.candidates, *logprobs.requested):
            raw = self._bytes(token_id)
            info.candidates.add(
                id=token_id,
                text=raw.decode("utf-8", "replace"),
                bytes=raw,
                logprob=logprob,
            )

    def finished(self, event: events.Finished) -> generation_pb2.Finished:
        """Return the message for the normal end of a choice."""
        message = generation_pb2.Finished(
            reason=(
                generation_pb2.FINISH_REASON_TOOL_CALLS
                if event.calls_tools
                else _REASONS[event.reason]
            ),
            usage=_usage(event.usage, event.reasoning_tokens),
            timings=_timings(event.finish, event.last_token),
        )
        if event.stop_string is not None:
            message.stop_string = event.stop_string
        elif event.reason is FinishReason.STOP and event.finish.stop_token_id is not None:
            message.stop_token_id = event.finish.stop_token_id
        return message

    def failed(self, event: events.Failed) -> generation_pb2.Failed:
        """Return the message for a failed request."""
        finish = event.finish
        message = generation_pb2.Failed(
            usage=_usage(finish.usage, event.reasoning_tokens),
            timings=_timings(finish, finish.timings.last_token),
        )
        if event.error is not None:
            message.status.CopyFrom(to_status(event.error))
        elif finish.failure is not None:
            message.status.CopyFrom(failure_status(finish.failure))
        return message

    def result(
        self, request_id: str, n: int, run: Iterable[events.NumberedEvent]
    ) -> generation_service_pb2.GenerateResponse:
        """Merge all events of a finished request with n choices into one result."""
        message = generation_service_pb2.GenerateResponse(
            request_id=request_id, instance_id=self._instance_id
        )
        choices = [message.choices.add(index=index) for index in range(n)]
        texts: list[list[str]] = [[] for _ in range(n)]
        aparts: list[list[Apart]] = [[] for _ in range(n)]
        for numbered in run:
            match numbered.event:
                case events.Accepted() as event:
                    message.accepted.CopyFrom(self.accepted(event))
                case events.PromptProcessed() as event:
                    message.prompt.CopyFrom(self.prompt(event))
                case events.Delta() as event:
                    choice = choices[event.choice]
                    texts[event.choice].append(event.text)
                    if event.apart is not None:
                        aparts[event.choice].append(event.apart)
                    choice.token_ids.extend(event.token_ids)
                    if event.detailed:
                        choice.tokens.extend(self.tokens(event))
                case events.Finished() as event:
                    choices[event.choice].finished.CopyFrom(self.finished(event))
                case events.Failed():
                    pass  # the RPC's status says it
        for choice, text, apart in zip(choices, texts, aparts, strict=True):
            choice.text = "".join(text)
            _add_whole(choice, apart)
        message.usage.CopyFrom(_total([choice.finished.usage for choice in choices]))
        return message

    def _reply(
        self, message: generation_service_pb2.StreamResultResponse, reply: events.Reply
    ) -> None:
        match reply:
            case events.Rejected():
                message.rejections.add(
                    command_id=reply.command_id,
                    request_id=reply.request_id,
                    status=to_status(reply.error),
                )
            case events.Opened():
                message.opened.command_id = reply.command_id
                message.opened.lease.CopyFrom(to_duration(reply.lease_s))
            case events.Attached():
                message.attached.add(
                    command_id=reply.command_id,
                    request_id=reply.request_id,
                    from_seq=reply.from_seq,
                    request_number=reply.number,
                )
            case events.Detached():
                message.detached.add(request_id=reply.request_id, request_number=reply.number)
            case events.CancelAnswered():
                message.cancelled.append(
                    cancel_result(reply.request_id, reply.outcome, reply.command_id)
                )


def _add_apart(delta: generation_pb2.Delta, apart: Apart) -> None:
    delta.reasoning = apart.reasoning
    for call in apart.calls:
        delta.tool_calls.add(
            index=call.index, id=call.id, name=call.name, arguments_json=call.arguments
        )


def _add_whole(choice: generation_service_pb2.GeneratedChoice, parts: Sequence[Apart]) -> None:
    choice.reasoning = "".join([part.reasoning for part in parts])
    calls: dict[int, list[CallPart]] = {}
    for part in parts:
        for call in part.calls:
            calls.setdefault(call.index, []).append(call)
    for own in calls.values():
        arguments = "".join([call.arguments for call in own])
        choice.tool_calls.add(id=own[0].id, name=own[0].name, arguments_json=arguments)


def cancel_result(
    request_id: str, outcome: str, command_id: int = 0
) -> generation_service_pb2.CancelResult:
    """Return the answer to one cancel."""
    return generation_service_pb2.CancelResult(
        request_id=request_id, status=_CANCEL_STATUSES[outcome], command_id=command_id
    )
