"""One choice of a request: turns the engine's tokens into pending deltas and an end.

    tokens ──push──▶ text, stop strings ──▶ one pending delta ──take──▶ Delta, … and Finished
                     └▶ reasoning, calls

A request with n choices has n of these, which are independent: each has its own text, stop strings,
token offsets and end. Pending events have no number yet; `log.EventLog` numbers them when they are
taken.

Stop strings are found here, where the text is made. The tokens after a stop string are dropped. The
choice then ends with STOP regardless of the engine's reason, because the output that the client
sees had already ended.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from engine.contract.outputs import Finish, FinishReason, TokenLogprobs
from engine.contract.types import TokenId
from engine.text import StopMatch, TextStream
from service.delivery.events import (
    EVENT_BYTES,
    HELD_EVENT_BYTES,
    HELD_TEXT_BYTES,
    MAX_DELTA_BYTES,
    DeliveryOptions,
    Delta,
    Finished,
)
from service.replies.reply_text import Part, ReplyText, together


class ChoiceLog:
    """One choice's output that has not been taken yet.

    Attributes:
        index: the choice's index in the request.
        queued: whether it is in its request's list of choices to take from. Set by the request's
            log.
        stop: the stop string that ended it, once it was found.
        finished: its end, once it has ended (taken or not).
        arrival: when the request was accepted, in monotonic seconds. Known before anything is
            taken.
    """

    __slots__ = (
        "_at_least",
        "_bytes_per_token",
        "_end_taken",
        "_ending_ids",
        "_held_per_token",
        "_ids",
        "_logprobs",
        "_most",
        "_offset",
        "_options",
        "_reply",
        "_stop_time",
        "_text",
        "_text_ends",
        "_text_stream",
        "_times",
        "arrival",
        "finished",
        "index",
        "queued",
        "stop",
    )

    def __init__(
        self,
        index: int,
        *,
        options: DeliveryOptions,
        text_stream: TextStream | None,
        ending_ids: frozenset[TokenId],
        reply: ReplyText | None = None,
    ) -> None:
        self.index = index
        self.arrival = 0.0
        self.queued = False
        self.stop: StopMatch | None = None
        self.finished: Finished | None = None
        self._options = options
        self._at_least = options.min_tokens_per_delta
        self._bytes_per_token = options.bytes_per_token
        self._held_per_token = options.held_per_token
        self._most = max(1, MAX_DELTA_BYTES // options.bytes_per_token)  # tokens of one delta
        self._text_stream = text_stream
        self._reply = reply
        self._ending_ids = ending_ids
        self._ids: list[TokenId] = []
        self._text: list[Any] = []  # text; parts, where there is a reply
        self._text_ends: list[int] = []  # of each piece: how many of _ids there were behind it
        self._logprobs: list[TokenLogprobs] = []
        self._times: list[float] = []
        self._offset = 0  # tokens in deltas that were taken
        self._stop_time: float | None = None
        self._end_taken = False

    @property
    def num_tokens(self) -> int:
        """The number of tokens so far, taken and pending."""
        return self._offset + len(self._ids)

    @property
    def num_pending(self) -> int:
        """The number of tokens that have not been taken yet."""
        return len(self._ids)

    @property
    def is_ready(self) -> bool:
        """Whether the delivery options allow something to be taken now."""
        return len(self._ids) >= self._at_least or (
            self.finished is not None and not self._end_taken
        )

    @property
    def held_size(self) -> int:
        """The approximate number of bytes that the pending output takes. O(1), regardless of its
        length.
        """
        held = len(self._ids) * self._held_per_token + len(self._text) * HELD_TEXT_BYTES
        return held if self._reply is None else held + self._reply.size

    @property
    def reasoning_tokens(self) -> int:
        """The number of reasoning tokens so far."""
        return 0 if self._reply is None else self._reply.reasoning_tokens

    # Filling

    def push(
        self,
        ids: tuple[TokenId, ...],
        logprobs: tuple[TokenLogprobs, ...] | None,
        now: float,
    ) -> StopMatch | None:
        """Add one step's tokens to a choice that has not ended. Return the stop string if the
        tokens complete one. Called for every token, so kept short.
        """
        found = None
        text = ""
        parts: list[Part] | None = None
        if self._text_stream is not None:
            stream = self._text_stream
            ends = ids[-1] in self._ending_ids
            if self._reply is None:
                text = stream.push(ids, ends_with_stop_token=ends)
            else:
                parts = self._reply.push(stream, ids, ends_with_stop_token=ends)
            if stream.stop is not None:
                self.stop = found = stream.stop
                self._stop_time = now
                kept = found.num_tokens - self.num_tokens
                ids = ids[:kept]
                logprobs = logprobs[:kept] if logprobs is not None else None
        self._ids += ids
        if text:
            self._text.append(text)
            self._text_ends.append(len(self._ids))
        elif parts:
            self._add(parts)
        if logprobs is not None:
            self._logprobs += logprobs
        if self._options.record_times:
            self._times += [now] * len(ids)
        return found

    def flush(self) -> None:
        """Release text that was held back for an incomplete character or stop string, because no
        more tokens will come. Only here can an incomplete character (U+FFFD) complete a stop
        string.
        """
        if self._text_stream is None:
            return
        rest = self._text_stream.finish()
        if self._reply is not None:
            self._add(self._reply.finish(rest))
        elif rest:
            self._text.append(rest)
            self._text_ends.append(len(self._ids))
        if self.stop is None:
            self.stop = self._text_stream.stop

    def _add(self, parts: list[Part]) -> None:
        self._text += parts
        self._text_ends += [len(self._ids)] * len(parts)

    def end(self, finish: Finish) -> None:
        """Record the engine's end of this choice, after its text was flushed. If the reason is
        ERROR, the choice's stop string must already have been found.
        """
        stop = self.stop
        last_token = finish.timings.last_token
        if stop is None:
            reason, usage, thought = finish.reason, finish.usage, self.reasoning_tokens
            called = self._reply is not None and self._reply.calls_tools
            calls = called and reason is FinishReason.STOP
            self.finished = Finished(
                reason, None, finish, usage, last_token, self.index, calls, thought
            )
            return
        if last_token is not None and self._stop_time is not None:
            last_token = min(last_token, self._stop_time)
        usage = replace(finish.usage, completion_tokens=stop.num_tokens)
        self.finished = Finished(
            FinishReason.STOP,
            stop.stop_string,
            finish,
            usage,
            last_token,
            self.index,
            reasoning_tokens=self.reasoning_tokens,
        )

    # Taking

    def take(
        self, number: Callable[[Delta | Finished], None], *, ending: bool, room: int | None = None
    ) -> int:
        """Pass pending output to `number`, as far as the delivery options allow. If the choice or
        the request (`ending`) has ended, pass all of it. Pass at most `room` tokens, or any number
        if it is None. The end follows the last token.

        Returns:
            The number of tokens that were taken.
        """
        count = len(self._ids)
        if count >= self._at_least or (
            (count or self._text) and (ending or self.finished is not None)
        ):
            if count <= self._most and (room is None or count <= room):  # nearly always
                number(self._delta(count, self._text))
                self._ids = []
                self._text = []
                self._text_ends = []
                if self._logprobs:
                    self._logprobs = []
                if self._times:
                    self._times = []
            else:
                self._take_in_parts(number, count if room is None else min(count, room))
        if self.finished is not None and not self._end_taken and not self._ids:
            self._end_taken = True
            number(self.finished)
        return count - len(self._ids)

    def _take_in_parts(self, number: Callable[[Delta | Finished], None], count: int) -> None:
        """Take the first `count` tokens, in several deltas if one would be very large."""
        while count > 0:
            part = min(count, self._most)
            pieces = bisect_right(self._text_ends, part)
            number(self._delta(part, self._text[:pieces]))
            del self._ids[:part], self._logprobs[:part], self._times[:part]
            del self._text[:pieces], self._text_ends[:pieces]
            self._text_ends = [end - part for end in self._text_ends]
            count -= part

    def _delta(self, count: int, parts: list[Any]) -> Delta:
        """Make a delta of the first `count` pending tokens and the given text or reply parts."""
        size = EVENT_BYTES
        apart = None
        if self._reply is None:
            text = "".join(parts)
        else:
            text, apart = together(parts)
            if apart is not None:
                size += apart.size
        size += len(text)
        ids = tuple(self._ids if count == len(self._ids) else self._ids[:count])
        times = None
        if self._times:
            arrival = self.arrival
            times = tuple([max(moment - arrival, 0.0) for moment in self._times[:count]])
        delta = Delta(
            ids,
            text,
            self._options.token_details,
            tuple(self._logprobs[:count]) if self._logprobs else None,
            times,
            size + count * self._bytes_per_token,
            HELD_EVENT_BYTES - EVENT_BYTES + size + count * self._held_per_token,
            self.index,
            apart,
        )
        self._offset += count
        return delta
