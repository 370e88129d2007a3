"""Turns the events of one request into chunks and, at the end, its result.

Events are numbered 1, 2, 3 and so on within a request. A fold accepts each number once and in
order. A missing, repeated or out-of-order event makes the request fail with `ProtocolError`, so
that output is never silently wrong.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace._from_proto import (
    accepted_from_proto,
    call_chunks_from_proto,
    choice_from_proto,
    prompt_from_proto,
    tokens_from_proto,
)
from headrace.errors import HeadraceError, ProtocolError, error_from_status
from headrace.messages import ToolCall
from headrace.results import (
    Accepted,
    Choice,
    Chunk,
    PromptInfo,
    Result,
    ToolCallChunk,
    Usage,
)
from headrace.v1.generation_pb2 import FINISH_REASON_CANCELLED, Finished, ResultEvent


class Fold:
    """The state of one request, from its first event to its last.

    Args:
        request_id: the request's id; if empty, it is taken from the Accepted event.
        n: the number of choices; the request has ended when all of them have. 0 if unknown, in
            which case the Accepted event sets it.
        from_seq: the number of the first event to expect.
    """

    def __init__(self, request_id: str = "", *, n: int = 1, from_seq: int = 1) -> None:
        self.request_id = request_id
        self.n = n
        self.next_seq = max(from_seq, 1)
        """The number of the next event."""
        self.chunks: list[Chunk] = []
        """All output so far, in order of arrival."""
        self.accepted: Accepted | None = None
        self.prompt: PromptInfo | None = None
        self.error: HeadraceError | None = None
        """Why the request failed, if it did."""
        self.done = False
        """Whether the request has ended, successfully or not."""
        self._finished: dict[int, Finished] = {}
        self._token_counts: dict[int, int] = {}
        self._end_was_told = False  # by its events: nothing follows

    def add(self, event: ResultEvent) -> Chunk | None:
        """Processes the next event. Returns its output, if any; a failure is stored in `error`."""
        kind = event.WhichOneof("event")
        problem = self._problem(event, kind)
        if problem is not None:
            self.fail(ProtocolError(f"the server broke the contract: {problem}"))
            return None
        self.next_seq += 1
        if kind == "delta":
            return self._delta(event)
        if kind == "accepted":
            self.accepted = accepted_from_proto(self.request_id, event.accepted)
            self.n = event.accepted.n or self.n or 1
        elif kind == "prompt":
            self.prompt = prompt_from_proto(event.prompt)
        elif kind == "finished":
            self._finished[event.choice_index] = event.finished
            self.done = self._end_was_told = 0 < self.n <= len(self._finished)
        elif kind == "failed":
            self.fail(error_from_status(event.failed.status))
            self._end_was_told = True
        return None  # an event that is newer than this client is counted and passed over

    def fail(self, error: HeadraceError) -> None:
        """Ends the request with an error. Only the first error is kept."""
        if self.error is None:
            error.request_id = error.request_id or self.request_id
            error.partial = error.partial or self.partial()
            self.error = error
        self.done = True

    def cancelled(self) -> None:
        """Ends a cancelled request with the output so far, for when no server reports the end."""
        for index in range(max(self.n, 1)):
            self._finished.setdefault(index, Finished(reason=FINISH_REASON_CANCELLED))
        self.done = self._end_was_told = True

    def restart(self) -> None:
        """Discards all events, because the request is sent again and they start over."""
        self.next_seq = 1
        self.chunks.clear()
        self.accepted = self.prompt = self.error = None
        self.done = self._end_was_told = False
        self._finished.clear()
        self._token_counts.clear()

    def reopened(self) -> Fold:
        """Returns a fold that continues where this one was interrupted, with all its output.

        If the request's end has arrived, the new fold has ended too and there is nothing to
        continue.
        """
        fold = Fold(self.request_id, n=self.n, from_seq=self.next_seq)
        fold.chunks = list(self.chunks)
        fold.accepted, fold.prompt = self.accepted, self.prompt
        fold._finished = dict(self._finished)
        fold._token_counts = dict(self._token_counts)
        if self._end_was_told:
            fold.done = fold._end_was_told = True
            fold.error = self.error
        return fold

    def end(self) -> None:
        """Records that the request has ended, if this is known without an event."""
        self.done = True

    def result(self) -> Result:
        """Returns the complete result.

        Raises:
            HeadraceError: the request failed.
        """
        if self.error is not None:
            raise self.error
        return self.partial()

    def partial(self) -> Result:
        """Returns the output so far. A choice that has not ended has the finish reason UNKNOWN."""
        indexes = set(range(max(self.n, 1))) | self._finished.keys() | self._token_counts.keys()
        choices = tuple(self._choice(index) for index in sorted(indexes))
        prompt_tokens = self.prompt.prompt_tokens if self.prompt else 0
        cached_tokens = self.prompt.cached_tokens if self.prompt else 0
        usage = Usage(
            prompt_tokens=max([prompt_tokens, *(c.usage.prompt_tokens for c in choices)]),
            cached_tokens=max([cached_tokens, *(c.usage.cached_tokens for c in choices)]),
            completion_tokens=sum(choice.usage.completion_tokens for choice in choices),
            reasoning_tokens=sum(choice.usage.reasoning_tokens for choice in choices),
            draft_tokens=sum(choice.usage.draft_tokens for choice in choices),
            accepted_draft_tokens=sum(choice.usage.accepted_draft_tokens for choice in choices),
            prediction_draft_tokens=sum(one.usage.prediction_draft_tokens for one in choices),
            accepted_prediction_draft_tokens=sum(
                one.usage.accepted_prediction_draft_tokens for one in choices
            ),
        )
        return Result(self.request_id, choices, usage, self.prompt, self.accepted)

    def _problem(self, event: ResultEvent, kind: str | None) -> str | None:
        if kind == "accepted":
            self.request_id = self.request_id or event.accepted.request_id
            if event.accepted.request_id != self.request_id:
                name = event.accepted.request_id
                return f"{name!r} was accepted where {self.request_id!r} was due"
        if event.seq != self.next_seq:
            return f"event {event.seq} came where {self.next_seq} was due"
        # A failure is the whole request's, whatever choices finished before.
        if self.done or (kind != "failed" and event.choice_index in self._finished):
            return f"event {event.seq} came after the end"
        if self.n and event.choice_index >= self.n:
            return f"event {event.seq} is of choice {event.choice_index}, out of {self.n}"
        return None

    def _delta(self, event: ResultEvent) -> Chunk:
        delta, choice_index = event.delta, event.choice_index
        offset = self._token_counts.get(choice_index, 0)
        tokens = tokens_from_proto(delta.tokens) if delta.tokens else ()
        ids = tuple([token.id for token in tokens] if tokens else delta.token_ids[:])
        self._token_counts[choice_index] = offset + len(ids)
        calls = call_chunks_from_proto(delta.tool_calls) if delta.tool_calls else ()
        chunk = Chunk(
            self.request_id,
            delta.text,
            ids,
            tokens,
            choice_index,
            offset,
            event.seq,
            delta.reasoning,
            calls,
        )
        self.chunks.append(chunk)
        return chunk

    def _choice(self, index: int) -> Choice:
        own = [chunk for chunk in self.chunks if chunk.choice_index == index]
        token_ids = tuple(id_ for chunk in own for id_ in chunk.token_ids)
        finished = self._finished.get(index)
        return choice_from_proto(
            index,
            "".join(chunk.text for chunk in own),
            token_ids,
            tuple(token for chunk in own for token in chunk.tokens),
            finished if finished is not None else Finished(),
            "".join(chunk.reasoning for chunk in own),
            _joined_calls(part for chunk in own for part in chunk.tool_calls),
        )


def _joined_calls(parts: Iterable[ToolCallChunk]) -> tuple[ToolCall, ...]:
    """Joins the chunks of tool calls, which are in order, to whole calls."""
    own: dict[int, list[ToolCallChunk]] = {}
    for part in parts:
        own.setdefault(part.index, []).append(part)
    return tuple(
        ToolCall(some[0].id, some[0].name, "".join([part.arguments for part in some]))
        for some in own.values()
    )
