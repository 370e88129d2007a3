"""The log of one request's events: from the engine's outputs to numbered events that can be sent,
and sent again.

    outputs ──push──▶ pending (one merged delta) ──number──▶ events 1, 2, 3, … ──take──▶ readers

What is pending has no number yet: it grows while nobody takes it, so a slow reader costs one
delta, not thousands. A number is given when an event is first taken, and from then on it stands
for that event alone. Events are kept while `keep` is set; otherwise they go once the stream has
taken them.

A stop string is found here, where the text is made: the tokens after it are dropped, `on_stop`
tells the engine, and the terminal event says STOP whatever the engine's own reason was, because by
the output that the client sees the request had ended before that. Exactly one terminal event is
ever made: `_end` and `fail` do nothing after the first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.outputs import (
    Finish,
    FinishReason,
    RequestFailure,
    RequestOutput,
    Timings,
    TokenLogprobs,
    Usage,
)
from engine.text import StopMatch, TextStream
from engine.types import RequestId, TokenId
from service.delivery.errors import ResultGoneError
from service.delivery.events import (
    MAX_DELTA_BYTES,
    Accepted,
    DeliveryOptions,
    Delta,
    Event,
    Failed,
    Finished,
    NumberedEvent,
    PromptProcessed,
    at_most,
    delta_size,
)

if TYPE_CHECKING:
    from service.delivery.session import ResultStream


class RequestLog:
    """One accepted request's events. All methods run on the event loop; none blocks.

    Attributes:
        identity, request_id: whose request it is, and its name there.
        engine_id: its name in the engine, unique for the life of the process.
        stream: the stream that its results go to; None: they wait to be read. Set by ResultStream.
        cursor: the number of the next event for the stream. Set by ResultStream.
        keep: whether events are kept after the stream took them. Set by Registry.
        durable: whether it outlives its streams (it came by AddRequest).
        accepted: event number 1, once the engine took the request in.
        cancel_wanted: it was cancelled before that. Set by Registry.
        abandoned: whoever wanted it went away before that. Set by Registry.
        watchers: who waits in `changed`.
        timer: the pending lease or retention timer. Set by Registry.
        size: about how many bytes its kept events take.
    """

    __slots__ = (
        "_accepted_at",
        "_ending_ids",
        "_ids",
        "_kept",
        "_logprobs",
        "_next_seq",
        "_offset",
        "_on_stop",
        "_options",
        "_prompt",
        "_prompt_tokens",
        "_stop",
        "_stop_time",
        "_terminal",
        "_terminal_numbered",
        "_text",
        "_text_stream",
        "_times",
        "abandoned",
        "accepted",
        "cancel_wanted",
        "cursor",
        "durable",
        "engine_id",
        "identity",
        "keep",
        "request_id",
        "size",
        "stream",
        "timer",
        "watchers",
    )

    def __init__(
        self,
        *,
        identity: str,
        request_id: str,
        engine_id: RequestId,
        options: DeliveryOptions,
        text_stream: TextStream | None,
        ending_ids: frozenset[TokenId],
        prompt_tokens: int,
        now: float,
        on_stop: Callable[[RequestLog, int], None],
    ) -> None:
        self.identity = identity
        self.request_id = request_id
        self.engine_id = engine_id
        self.stream: ResultStream | None = None
        self.cursor = 1
        self.keep = False
        self.durable = False
        self.timer: asyncio.TimerHandle | None = None
        self.size = 0
        self.accepted: Accepted | None = None
        self.abandoned = False
        self.cancel_wanted = False
        self.watchers: list[asyncio.Future[None]] = []
        self._options = options
        self._text_stream = text_stream
        self._ending_ids = ending_ids
        self._prompt_tokens = prompt_tokens
        self._accepted_at = now
        self._on_stop = on_stop
        # Pending: what came since the last number was given.
        self._prompt: PromptProcessed | None = None
        self._ids: list[TokenId] = []
        self._text: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._times: list[float] = []
        self._terminal: Finished | Failed | None = None
        # Numbered.
        self._kept: list[NumberedEvent] = []
        self._next_seq = 1
        self._offset = 0  # tokens in numbered deltas
        self._terminal_numbered = False
        self._stop: StopMatch | None = None
        self._stop_time: float | None = None

    # What the registry asks

    @property
    def ended(self) -> bool:
        """Whether the terminal event is there (sent or not)."""
        return self._terminal is not None

    @property
    def terminal(self) -> Finished | Failed | None:
        """The terminal event, once it is there."""
        return self._terminal

    @property
    def delivered(self) -> bool:
        """Whether the stream has taken the terminal event."""
        return self._terminal_numbered and self.cursor >= self._next_seq

    @property
    def next_seq(self) -> int:
        """The number that the next new event gets."""
        return self._next_seq

    # Filling

    def accept(self, accepted: Accepted) -> None:
        """The engine took the request in: event number 1. Nothing can be taken before."""
        self.accepted = accepted
        self._number(accepted)

    def push(self, output: RequestOutput, now: float) -> None:
        """Take one step's output. The path of every token: kept short."""
        if self._terminal is not None:
            return
        if output.prompt_done is not None:
            self._prompt = PromptProcessed(self._prompt_tokens, output.prompt_done)
        if output.token_ids and self._stop is None:
            self._push_tokens(output.token_ids, output.logprobs, now)
        if output.finish is not None:
            self._end(output.finish)

    def _push_tokens(
        self,
        ids: tuple[TokenId, ...],
        logprobs: tuple[TokenLogprobs, ...] | None,
        now: float,
    ) -> None:
        if self._text_stream is not None:
            piece = self._text_stream.push(ids, ends_with_stop_token=ids[-1] in self._ending_ids)
            if piece.text:
                self._text.append(piece.text)
            if piece.stop is not None:
                ids = ids[: piece.num_tokens_kept]
                logprobs = logprobs[: piece.num_tokens_kept] if logprobs is not None else None
                self._stop = piece.stop
                self._stop_time = now
                self._on_stop(self, piece.stop.num_tokens)
        self._ids += ids
        if logprobs is not None:
            self._logprobs += logprobs
        if self._options.record_times:
            self._times += [max(now - self._accepted_at, 0.0)] * len(ids)

    def _end(self, finish: Finish) -> None:
        if self._text_stream is not None:
            # What was held back, because a character or a stop string might have been completed. A
            # stop string that is completed by a part of a character (U+FFFD) is found only here.
            rest = self._text_stream.finish()
            if rest:
                self._text.append(rest)
            if self._stop is None:
                self._stop = self._text_stream.stop
        stop = self._stop
        last_token = finish.timings.last_token
        if stop is not None:
            if last_token is not None and self._stop_time is not None:
                last_token = min(last_token, self._stop_time)
            usage = replace(finish.usage, completion_tokens=stop.num_tokens)
            self._terminal = Finished(
                FinishReason.STOP, stop.stop_string, finish, usage, last_token
            )
        elif finish.reason is FinishReason.ERROR:
            self._terminal = Failed(finish)
        else:
            self._terminal = Finished(finish.reason, None, finish, finish.usage, last_token)

    def fail(self, failure: RequestFailure, now: float) -> None:
        """End the request here with a failure, where the front end itself could not go on with
        it.
        """
        if self._terminal is not None:
            return
        tokens = self._offset + len(self._ids)
        self._terminal = Failed(
            Finish(
                FinishReason.ERROR,
                Usage(self._prompt_tokens, 0, tokens),
                Timings(self._accepted_at, None, None, None, now, 0),
                failure=failure,
            )
        )

    # Numbering

    def _number(self, event: Event) -> None:
        numbered = NumberedEvent(self._next_seq, event)
        self._next_seq += 1
        self._kept.append(numbered)
        self.size += numbered.size

    def _can_number(self) -> bool:
        if self.accepted is None or self._terminal_numbered:
            return False
        if self._terminal is not None:
            return True
        if self._options.final:
            return False
        return self._prompt is not None or len(self._ids) >= self._options.min_tokens_per_delta

    def _number_pending(self) -> None:
        """Give numbers to what is pending, as far as the delivery options let it go."""
        if not self._can_number():
            return
        if self._prompt is not None:
            self._number(self._prompt)
            self._prompt = None
        ending = self._terminal is not None
        if len(self._ids) >= self._options.min_tokens_per_delta or (
            ending and (self._ids or self._text)
        ):
            self._number_deltas()
        if self._terminal is not None:
            self._number(self._terminal)
            self._terminal_numbered = True

    def _number_deltas(self) -> None:
        """Turn the pending tokens and text into a delta, or several where one would be very
        large.
        """
        ids, text = self._ids, "".join(self._text)
        step = max(1, MAX_DELTA_BYTES // self._options.bytes_per_token)
        if len(ids) <= step:  # nearly always
            self._number(self._delta(tuple(ids), text, 0, len(ids)))
        else:
            for start in range(0, len(ids), step):
                part = tuple(ids[start : start + step])
                part_text = text if start + step >= len(ids) else ""
                self._number(self._delta(part, part_text, start, start + step))
        self._ids = []
        self._text = []
        if self._logprobs:
            self._logprobs = []
        if self._times:
            self._times = []

    def _delta(self, ids: tuple[TokenId, ...], text: str, start: int, end: int) -> Delta:
        """A delta of the pending tokens from `start` to `end`."""
        options = self._options
        delta = Delta(
            ids,
            text,
            self._offset,
            options.token_details,
            tuple(self._logprobs[start:end]) if self._logprobs else None,
            tuple(self._times[start:end]) if self._times else None,
            delta_size(text, len(ids), options),
        )
        self._offset += len(ids)
        return delta

    # Taking

    def has(self, seq: int) -> bool:
        """Whether there is an event to take from `seq` on."""
        return seq < self._next_seq or self._can_number()

    def check_from(self, seq: int) -> None:
        """Check that the events from `seq` on can be had.

        Raises:
            ResultGoneError: event `seq` is no longer kept, or lies behind the next one.
        """
        earliest = self._kept[0].seq if self._kept else self._next_seq
        if not earliest <= seq <= self._next_seq:
            raise ResultGoneError(self.request_id, seq, earliest, self._next_seq)

    def take_from(self, seq: int) -> list[NumberedEvent]:
        """Number what is pending and return the events from `seq` on. `seq` was checked."""
        self._number_pending()
        if not self._kept:
            return []
        start = seq - self._kept[0].seq
        return self._kept[start:] if start > 0 else list(self._kept)

    def take_for_stream(self, limit: int) -> list[NumberedEvent]:
        """Take what the stream has not had yet, at least one event and about `limit` bytes at most;
        forget what nobody may ask for again.
        """
        self._number_pending()
        kept = self._kept
        if not kept:
            return []
        start = self.cursor - kept[0].seq
        events = kept[start:] if start else kept
        if self.size > limit:
            events = at_most(events, limit)
        self.cursor += len(events)
        if not self.keep:
            self.drop_taken()
        return events

    def drop_taken(self) -> None:
        """Forget the events that the stream took."""
        if self.cursor == self._next_seq:  # nearly always
            self._kept = []
            self.size = 0
        else:
            self._kept = [event for event in self._kept if event.seq >= self.cursor]
            self.size = sum(event.size for event in self._kept)

    def pending_size(self) -> int:
        """About how many bytes the events take, the pending ones too."""
        text = sum(map(len, self._text))
        return self.size + text + len(self._ids) * self._options.bytes_per_token

    def notify(self) -> None:
        """Wake those who wait for events."""
        for watcher in self.watchers:
            if not watcher.done():
                watcher.set_result(None)
        self.watchers.clear()

    async def changed(self) -> None:
        """Wait until something was pushed, or the request ended."""
        future = asyncio.get_running_loop().create_future()
        self.watchers.append(future)
        try:
            await future
        finally:
            if future in self.watchers:
                self.watchers.remove(future)
