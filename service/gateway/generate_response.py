"""Translates a request's events to the gateway's `GenerateResponse`.

A streamed request gets a chunk with the new output for each delta, and a complete at the end of
each choice. A request that is not streamed gets only the completes. A complete has all token ids of
its choice. If the request is streamed, only the chunks have log-probabilities.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from engine.contract.outputs import FinishReason, TokenLogprobs
from engine.contract.types import TokenId
from service.delivery import events
from service.errors.call_errors import AnswerTooLargeError

_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CONTEXT: "length",
    FinishReason.CANCELLED: "abort",
    FinishReason.TIME_LIMIT: "abort",
}
TOO_LARGE = "set stream, which sends it in parts, or ask for less"


class Answers:
    """The responses of one request, including the completes built so far."""

    def __init__(self, request: Any, max_send_bytes: int) -> None:
        """Create the responses for a request.

        Args:
            request: the `GenerateRequest`; it is not kept.
            max_send_bytes: the largest message that may be sent.
        """
        params = request.sampling_params
        self._stream = bool(request.stream)
        self._candidates = params.logprobs
        self._prompt_candidates = params.prompt_logprobs
        self._stop_ids = frozenset(params.stop_token_ids)
        self._max_send_bytes = max_send_bytes
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._input: Any = None  # pb.InputLogProbs, if they were asked for
        self._completes: dict[int, Any] = {}
        self._sizes: dict[int, int] = {}
        self._begun: set[int] = set()

    def of(self, taken: Iterable[tuple[int, list[events.NumberedEvent]]]) -> list[Any]:
        """Return the responses for the events of one batch, in order.

        Raises:
            AnswerTooLargeError: a complete is larger than a message may be.
        """
        responses = []
        for _, run in taken:
            for numbered in run:
                match numbered.event:
                    case events.Accepted() as event:
                        self._prompt_tokens = event.prompt_tokens
                    case events.PromptProcessed() as event:
                        self._take_prompt(event)
                    case events.Delta() as event:
                        if (chunk := self._take(event)) is not None:
                            responses.append(pb.GenerateResponse(chunk=chunk))
                    case events.Finished() as event:
                        responses.append(pb.GenerateResponse(complete=self._finish(event)))
                    case events.Failed():
                        pass  # the RPC's status says it
        return responses

    def _take_prompt(self, event: events.PromptProcessed) -> None:
        self._cached_tokens = event.cached_tokens
        if event.token_ids:
            self._input = _input_logprobs(event, self._prompt_candidates)

    def _take(self, event: events.Delta) -> Any:
        """Record a delta and return its chunk; None if the request is not streamed."""
        complete = self._complete(event.choice)
        complete.output_ids.extend(event.token_ids)
        logprobs = None
        if event.logprobs:
            logprobs = _output_logprobs(event.token_ids, event.logprobs, self._candidates)
        if not self._stream:
            if logprobs is not None:
                self._sizes[event.choice] = size = (
                    self._sizes.get(event.choice, 0) + logprobs.ByteSize()
                )
                self._check(size)  # before it grows further
                complete.output_logprobs.MergeFrom(logprobs)
            return None
        chunk = pb.GenerateStreamChunk(
            token_ids=event.token_ids,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=len(event.token_ids),
            cached_tokens=self._cached_tokens,
            output_logprobs=logprobs,
            index=event.choice,
        )
        if event.choice not in self._begun:
            self._begun.add(event.choice)
            if self._input is not None:
                chunk.input_logprobs.CopyFrom(self._input)
        return chunk

    def _finish(self, event: events.Finished) -> Any:
        complete = self._complete(event.choice)
        complete.finish_reason = _REASONS[event.reason]
        complete.prompt_tokens = event.usage.prompt_tokens
        complete.cached_tokens = event.usage.cached_tokens
        complete.completion_tokens = event.usage.completion_tokens
        if event.stop_string is not None:
            complete.matched_stop_str = event.stop_string
        elif event.reason is FinishReason.STOP and event.finish.stop_token_id in self._stop_ids:
            complete.matched_token_id = event.finish.stop_token_id
        if self._input is not None and event.choice not in self._begun:
            complete.input_logprobs.CopyFrom(self._input)
        del self._completes[event.choice]
        self._check(complete.ByteSize())
        return complete

    def _complete(self, choice: int) -> Any:
        if choice not in self._completes:
            self._completes[choice] = pb.GenerateComplete(index=choice)
        return self._completes[choice]

    def _check(self, size: int) -> None:
        if size > self._max_send_bytes:
            raise AnswerTooLargeError(size, self._max_send_bytes, TOO_LARGE)


def _output_logprobs(
    ids: tuple[TokenId, ...], logprobs: tuple[TokenLogprobs, ...], candidates: int
) -> Any:
    message = pb.OutputLogProbs(
        token_logprobs=[one.logprob for one in logprobs], token_ids=ids[: len(logprobs)]
    )
    if candidates:
        message.top_logprobs.extend(_top(one, candidates) for one in logprobs)
    return message


def _input_logprobs(event: events.PromptProcessed, candidates: int) -> Any:
    """Return the prompt's log-probabilities. The first token has no context, so it has none."""
    message = pb.InputLogProbs(token_ids=event.token_ids)
    message.token_logprobs.add()
    if candidates:
        message.top_logprobs.add()
    for one in event.logprobs:
        message.token_logprobs.add(value=one.logprob)
        if candidates:
            message.top_logprobs.append(_top(one, candidates))
    return message


def _top(logprobs: TokenLogprobs, candidates: int) -> Any:
    best = logprobs.candidates[:candidates]
    return pb.TopLogProbs(
        values=[value for _, value in best], token_ids=[token_id for token_id, _ in best]
    )
