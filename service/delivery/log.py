"""The log of one request's events: turns the engine's outputs into numbered events that can be sent
and resent.

    outputs ──push──▶ choices (pending: `choice`) ──number──▶ events 1, 2, 3, … ──take──▶ readers

Pending output has no number yet. It is merged until it is taken, so a slow reader costs one delta
for each choice, not thousands. An event is numbered when it is first taken, and then never changes.
Events are kept while `keep` is set; otherwise they are dropped once the stream has taken them.

A request ends with one Finished for each of its choices, or with one Failed. It has ended when the
engine marks its last output (`ends_request`). After that, `push` and `fail` do nothing.

The log is only data: it has no access to streams, timers or the engine. It belongs to a
`served_request.ServedRequest`, which acts on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest

from engine.contract.errors import HeadraceError
from engine.contract.outputs import (
    Finish,
    FinishReason,
    RequestFailure,
    RequestOutput,
    Timings,
    Usage,
    without_drafts,
)
from engine.contract.token_ids import NO_IDS, TokenIds
from engine.contract.types import TokenId
from engine.text import StopMatch, TextStream
from service.delivery.choice import ChoiceLog
from service.delivery.events import (
    HELD_EVENT_BYTES,
    Accepted,
    DeliveryOptions,
    Delta,
    Event,
    Failed,
    NumberedEvent,
    PromptProcessed,
    at_most,
    held_logprobs,
    num_tokens,
    prompt_size,
)
from service.errors.result_errors import AcceptedRequestFailedError, ResultGoneError
from service.replies.reply_text import ReplyText


class EventLog:
    """One request's events, and the position of its reader.

    Attributes:
        cursor: the number of the next event for the reader. The reader is the request's stream, or
            GetResult if it has none.
        next_seq: the number of the next new event.
        keep: whether events are kept after the reader took them.
        accepted: event number 1, once the engine has accepted the request.
        failure: the terminal event of a request that failed.
        ended: whether all terminal events exist (taken or not).
        size: the approximate number of bytes of memory that the kept events take.
        read_size: the share of `size` in events that the reader has taken.
        untaken: the number of output tokens that the reader has not taken.
        credit: the number of tokens that the stream may still take, or None for no limit. May be
            negative, because an event that already has a number is not split.
        arrival: when the request was accepted, or until then when it was sent to the engine, in
            monotonic seconds.
        prompt_tokens: the number of tokens in the prompt.
    """

    def __init__(
        self,
        request_id: str,
        *,
        options: DeliveryOptions,
        text_streams: Sequence[TextStream | None],
        ending_ids: frozenset[TokenId],
        prompt: TokenIds,
        now: float,
        keep: bool = False,
        replies: Sequence[ReplyText] = (),
    ) -> None:
        """Make an empty log.

        Args:
            request_id: the request's id, for errors.
            options, keep, prompt: how the results are delivered, whether they are kept, and the
                prompt.
            text_streams: one for each choice, or None for each if no text is wanted.
            replies: one for each choice; empty if the replies are plain text.
            ending_ids: the stop and end-of-sequence ids in effect.
            now: monotonic seconds, used until the engine reports when the request arrived.
        """
        self.cursor = 1
        self.keep = keep
        self.size = 0
        self.read_size = 0
        self.accepted: Accepted | None = None
        self.failure: Failed | None = None
        self.ended = False
        self.untaken = 0
        self.credit: int | None = None
        self.arrival = now
        self.prompt_tokens = len(prompt)
        self._request_id = request_id
        self._at_least = options.min_tokens_per_delta
        self._flows = False  # whether output may be taken now: accepted, and not in one piece
        self._options = options
        self._unread_per_token = options.unread_per_token
        self._prompt_ids = prompt if options.describe_prompt else NO_IDS
        self._cached_tokens = 0
        self._first_token: float | None = None
        self._last_token: float | None = None
        # Pending: output since the last numbered event.
        self._choices = tuple(
            ChoiceLog(index, options=options, text_stream=text, ending_ids=ending_ids, reply=reply)
            for index, (text, reply) in enumerate(zip_longest(text_streams, replies))
        )
        self._ready: list[ChoiceLog] = []
        self._prompt: PromptProcessed | None = None
        # Numbered.
        self._kept: list[NumberedEvent] = []
        self.next_seq = 1
        self._end_numbered = False

    # What it has

    @property
    def n(self) -> int:
        """The number of choices of the request."""
        return len(self._choices)

    @property
    def output_tokens(self) -> int:
        """The number of tokens in all choices so far."""
        return sum(choice.num_tokens for choice in self._choices)

    @property
    def delivered(self) -> bool:
        """Whether the reader has taken the last event."""
        return self._end_numbered and self.cursor >= self.next_seq

    @property
    def held_size(self) -> int:
        """The approximate number of bytes of memory that the events take, including pending ones.
        O(1) for each choice.
        """
        size = self.size + sum([choice.held_size for choice in self._choices])
        return size if self._prompt is None else size + self._prompt.held

    @property
    def unread_size(self) -> int:
        """The approximate number of bytes of memory that untaken output takes. This is an upper
        limit, because text takes less memory once it is merged. Runs for every token, so kept
        short.
        """
        size = self.untaken * self._unread_per_token
        return size if self._prompt is None else size + self._prompt.held

    # Filling

    def accept(self, accepted: Accepted, arrival: float) -> None:
        """Record as event number 1 that the engine accepted the request at `arrival`, by its
        monotonic clock. Nothing can be taken before that.
        """
        self.accepted = accepted
        self._flows = not self._options.final
        self.arrival = arrival
        for choice in self._choices:
            choice.arrival = arrival
        self._number(accepted)

    def push(self, output: RequestOutput, now: float) -> StopMatch | None:
        """Add one step's output of one choice. Return its stop string if the output completed one.
        Called for every token, so kept short.

        Raises:
            RuntimeError: the engine ended the request but not all of its choices.
        """
        stop = None
        is_ready = False
        if self.ended:
            return stop
        if output.prompt_done is not None:
            self._prompt = self._processed(output.prompt_done, output)
            self._first_token = now
        choice = self._choices[output.choice]
        ids = output.token_ids
        if ids and choice.stop is None and choice.finished is None:
            stop = choice.push(ids, output.logprobs, now)
            self.untaken += len(ids)
            self._last_token = now
            if stop is None:
                is_ready = len(ids) >= self._at_least
            else:
                self.untaken = self._untaken_from(self.cursor)  # the tokens after it were dropped
        if output.finish is not None:
            self._finish(choice, output.finish)
        if not choice.queued and (is_ready or choice.is_ready):
            choice.queued = True
            self._ready.append(choice)
        if output.ends_request:
            self._check_ended()
            self.ended = True
        return stop

    def _processed(self, cached_tokens: int, output: RequestOutput) -> PromptProcessed:
        ids, self._prompt_ids = self._prompt_ids, NO_IDS
        self._cached_tokens = cached_tokens
        return PromptProcessed(
            self.prompt_tokens,
            cached_tokens,
            ids,
            output.prompt_logprobs or (),
            prompt_size(len(ids), self._options),
            HELD_EVENT_BYTES + len(ids) * held_logprobs(self._options.prompt_candidates),
        )

    def _finish(self, choice: ChoiceLog, finish: Finish) -> None:
        if finish.reason is not FinishReason.ERROR:
            if choice.finished is None:
                choice.flush()
                choice.end(finish)
            return
        # An error ends the whole request. But a choice with a stop string had already ended in the
        # output that the client sees.
        unfinished = [choice for choice in self._choices if choice.finished is None]
        for other in unfinished:
            other.flush()
        finish = self._counted(finish, unfinished)
        if all(other.stop is not None for other in unfinished):
            for other in unfinished:
                other.end(finish)
                # The counts of drafts are of all of them, and told once.
                finish = replace(finish, usage=without_drafts(finish.usage))
        else:
            self.failure = Failed(finish, None, _reasoning_tokens(unfinished))

    def _counted(self, finish: Finish, unfinished: Sequence[ChoiceLog]) -> Finish:
        """Return `finish` with the usage of the choices that a failure ends: their delivered (or
        pending) tokens. The engine and its counts may be gone.
        """
        tokens = sum(choice.num_tokens for choice in unfinished)
        first, last = finish.timings.first_token, finish.timings.last_token
        return replace(
            finish,
            usage=replace(
                finish.usage,
                prompt_tokens=self.prompt_tokens,
                cached_tokens=self._cached_tokens,
                completion_tokens=tokens,
            ),
            timings=replace(
                finish.timings,
                first_token=self._first_token if first is None else first,
                last_token=self._last_token if last is None else last,
            ),
        )

    def _check_ended(self) -> None:
        if self.failure is not None:
            return
        missing = [choice.index for choice in self._choices if choice.finished is None]
        if missing:
            raise RuntimeError(
                f"{self._request_id}: the engine ended the request, but not its choices {missing}"
            )

    def flush(self) -> None:
        """Release text that the choices held back, because no more output will come although the
        engine has not ended the request.
        """
        for choice in self._choices:
            if choice.finished is None:
                choice.flush()

    def fail(self, failure: RequestFailure, now: float, error: HeadraceError | None = None) -> None:
        """End the request with a failure because the front end stops it. `error`: the caller's
        error, unless the server is at fault.
        """
        if self.ended:
            return
        finish = Finish(
            FinishReason.ERROR,
            Usage(0, 0, 0),
            Timings(self.arrival, None, None, None, now, 0),
            failure=failure,
        )
        unfinished = [choice for choice in self._choices if choice.finished is None]
        finish = self._counted(finish, unfinished)
        self.failure = Failed(finish, error, _reasoning_tokens(unfinished))
        self.ended = True

    def raise_failure(self) -> None:
        """Raise the request's error if it failed.

        Raises:
            HeadraceError: the request failed.
        """
        failed = self.failure
        if failed is not None and failed.error is not None:
            raise failed.error
        if failed is not None and failed.finish.failure is not None:
            raise AcceptedRequestFailedError(failed.finish.failure)

    # Numbering

    def _number(self, event: Event) -> None:
        self._kept.append(NumberedEvent(self.next_seq, event))
        self.next_seq += 1
        self.size += event.held

    def _can_number(self) -> bool:
        if self.accepted is None:
            return False
        if self.ended:
            return not self._end_numbered
        if self._options.final:
            return False
        return self._prompt is not None or bool(self._ready)

    def _number_pending(self, room: int | None = None) -> None:
        """Number pending output as far as the delivery options allow, up to `room` tokens, or any
        number if it is None.
        """
        if not (self._ready and self._flows) and not self._can_number():
            return
        if self._prompt is not None:
            self._number(self._prompt)
            self._prompt = None
        ended = self.ended
        choices, self._ready = self._choices if ended else self._ready, []
        for choice in choices:
            taken = choice.take(self._number, ending=ended, room=room)
            choice.queued = room is not None and choice.is_ready
            if choice.queued:
                self._ready.append(choice)
            if room is not None:
                room -= taken
        if ended and not any(choice.num_pending for choice in self._choices):
            if self.failure is not None:
                self._number(self.failure)
            self._end_numbered = True

    # Taking

    def has(self, seq: int) -> bool:
        """Whether there are events to take from `seq` on."""
        return seq < self.next_seq or self._can_number()

    def check_from(self, seq: int) -> None:
        """Check that the events from `seq` on are available.

        Raises:
            ResultGoneError: event `seq` is no longer kept, or is after the next one.
        """
        earliest = self._kept[0].seq if self._kept else self.next_seq
        if not earliest <= seq <= self.next_seq:
            raise ResultGoneError(self._request_id, seq, earliest, self.next_seq)

    def take_from(self, seq: int) -> list[NumberedEvent]:
        """Number pending output and return the events from `seq` on. `seq` is already checked."""
        self._number_pending()
        if not self._kept:
            return []
        start = seq - self._kept[0].seq
        return self._kept[start:] if start > 0 else list(self._kept)

    @property
    def is_takeable(self) -> bool:
        """Whether the stream may take something now."""
        credit = self.credit
        if credit is None or credit > 0:
            if self._ready and self._flows:
                return True  # nearly always
            return self.cursor < self.next_seq or self._can_number()
        if self.cursor < self.next_seq:
            return num_tokens(self._kept[self.cursor - self._kept[0].seq].event) == 0
        # Events without tokens need no credit.
        if not self._can_number():
            return False
        if self._prompt is not None or (self.ended and not self.untaken):
            return True
        return any(choice.is_ready and not choice.num_pending for choice in self._choices)

    def take_for_stream(self, limit: int) -> list[NumberedEvent]:
        """Take new events for the stream, as far as its credit allows: about `limit` bytes at most,
        but at least one event if there is any. Drop events that need not be kept.
        """
        if self.credit is None:
            self._number_pending()
        else:
            numbered = self.untaken - self._num_pending
            self._number_pending(max(self.credit - numbered, 0))
        kept = self._kept
        if not kept:
            return []
        start = self.cursor - kept[0].seq
        events = kept[start:] if start else kept
        if self.credit is not None:
            events = self._affordable(events)
        if self.size > limit:
            events = at_most(events, limit)
        tokens = 0
        for taken in events:
            event = taken.event
            if isinstance(event, Delta):
                tokens += len(event.token_ids)
        self.untaken -= tokens
        if self.credit is not None:
            self.credit -= tokens
        self.cursor += len(events)
        if self.keep:
            self.read_size += sum([taken.event.held for taken in events])
            return events
        if self.cursor == self.next_seq:  # nearly always
            self._kept = []
            self.size = 0
        else:
            self._drop_taken()
        return events

    def _affordable(self, events: list[NumberedEvent]) -> list[NumberedEvent]:
        """Return the first events that the credit covers. Events are not split."""
        left = self.credit or 0
        for index, numbered in enumerate(events):
            cost = num_tokens(numbered.event)
            if cost and left <= 0:
                return events[:index]
            left -= cost
        return events

    def move_to(self, seq: int, credit: int | None = None) -> None:
        """Move the reader to `seq`, which must have been checked, with a new credit."""
        self.cursor = seq
        self.credit = credit
        self.untaken = self._untaken_from(seq)
        self.read_size = sum([kept.event.held for kept in self._kept if kept.seq < seq])

    @property
    def _num_pending(self) -> int:
        return sum([choice.num_pending for choice in self._choices])

    def _untaken_from(self, seq: int) -> int:
        """Return the number of output tokens that are pending or in the events from `seq` on."""
        kept = [num_tokens(numbered.event) for numbered in self._kept if numbered.seq >= seq]
        return sum(kept) + self._num_pending

    def keep_all(self, keep: bool) -> None:
        """Set whether events are kept after the reader took them. If not, events that were already
        taken are dropped.
        """
        if self.keep and not keep:
            self._drop_taken()
        self.keep = keep

    def _drop_taken(self) -> None:
        self._kept = [numbered for numbered in self._kept if numbered.seq >= self.cursor]
        self.size = sum(numbered.event.held for numbered in self._kept)
        self.read_size = 0

    def drop_read(self, most: int) -> None:
        """Drop the oldest events that the reader has taken, until the remaining taken events use at
        most `most` bytes. Dropped events cannot be read again.
        """
        count = 0
        while self.read_size > most:
            held = self._kept[count].event.held
            self.read_size -= held
            self.size -= held
            count += 1
        del self._kept[:count]


def _reasoning_tokens(choices: Sequence[ChoiceLog]) -> int:
    return sum(choice.reasoning_tokens for choice in choices)
