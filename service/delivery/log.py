"""The log of one request's events: from the engine's outputs to numbered events that can be sent,
and sent again.

    outputs ──push──▶ choices (pending: `choice`) ──number──▶ events 1, 2, 3, … ──take──▶ readers

What is pending has no number yet: it grows while nobody takes it, so a slow reader costs one
delta for each choice, not thousands. A number is given when an event is first taken, and from then
on it stands for that event alone. Events are kept while `keep` is set; otherwise they go once the
stream has taken them.

A request ends in one Finished for each of its choices, or in one Failed. It has ended when the
engine says that nothing of it comes after (`ends_request`), and never twice: `push` and `fail` do
nothing after that.

The log is data: it knows no stream, no timer and no engine. `request.ServedRequest` has it, and
decides what becomes of the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.errors import HeadraceError
from engine.outputs import Finish, FinishReason, RequestFailure, RequestOutput, Timings, Usage
from engine.text import StopMatch, TextStream
from engine.token_ids import NO_IDS, TokenIds
from engine.types import TokenId
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
from service.delivery.result_errors import RequestFailedError, ResultGoneError


class EventLog:
    """One request's events, and how far its reader is.

    Attributes:
        cursor: the number of the next event for the reader, which is its stream, or GetResult where
            it has none.
        next_seq: the number that the next new event gets.
        keep: whether events are kept after the reader took them.
        accepted: event number 1, once the engine took the request in.
        failure: the terminal event of a request that failed.
        ended: whether the terminal events are all there (taken or not).
        size: about how much memory its kept events take.
        untaken: tokens of output that the reader has not taken.
        credit: how many tokens the stream may still take; None: any number. Below zero after an
            event that was numbered before, since such a one is not cut.
        arrival: when the request was taken in; before that: when it went to the engine. Monotonic
            seconds.
        prompt_tokens: tokens of its prompt.
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
    ) -> None:
        """An empty log.

        Args:
            request_id: whose it is, for errors.
            options, keep, prompt: how the results are delivered, and what of.
            text_streams: one for each choice; None where no text is wanted.
            ending_ids: stop and end-of-sequence ids in force.
            now: monotonic seconds, until the engine tells when the request arrived.
        """
        self.cursor = 1
        self.keep = keep
        self.size = 0
        self.accepted: Accepted | None = None
        self.failure: Failed | None = None
        self.ended = False
        self.untaken = 0
        self.credit: int | None = None
        self.arrival = now
        self.prompt_tokens = len(prompt)
        self._request_id = request_id
        self._at_least = options.min_tokens_per_delta
        self._flows = False  # whether output may go as it comes: accepted, and not in one piece
        self._options = options
        self._prompt_ids = prompt if options.describe_prompt else NO_IDS
        self._cached_tokens = 0
        self._first_token: float | None = None
        self._last_token: float | None = None
        # Pending: what came since the last number was given.
        self._choices = tuple(
            ChoiceLog(index, options=options, text_stream=text_stream, ending_ids=ending_ids)
            for index, text_stream in enumerate(text_streams)
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
        """How many choices it has."""
        return len(self._choices)

    @property
    def output_tokens(self) -> int:
        """Tokens of all its choices so far."""
        return sum(choice.num_tokens for choice in self._choices)

    @property
    def delivered(self) -> bool:
        """Whether the reader has taken the last event."""
        return self._end_numbered and self.cursor >= self.next_seq

    @property
    def held_size(self) -> int:
        """About how much memory its events take, the pending ones too; O(1) for each choice,
        however much it is.
        """
        size = self.size + sum([choice.held_size for choice in self._choices])
        return size if self._prompt is None else size + self._prompt.held

    # Filling

    def accept(self, accepted: Accepted, arrival: float) -> None:
        """The engine took the request in, at this moment of its monotonic clock: event number 1.
        Nothing can be taken before.
        """
        self.accepted = accepted
        self._flows = not self._options.final
        self.arrival = arrival
        for choice in self._choices:
            choice.arrival = arrival
        self._number(accepted)

    def push(self, output: RequestOutput, now: float) -> StopMatch | None:
        """Take one step's output of one choice; returns its stop string if that was completed. The
        path of every token: kept short.

        Raises:
            RuntimeError: the engine ended the request, and not all of its choices.
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
                self.untaken = self._untaken_from(self.cursor)  # what is behind it was dropped
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
        # An error ends the whole request; but a choice whose stop string was found had ended
        # before, by the output that the client sees.
        unfinished = [choice for choice in self._choices if choice.finished is None]
        for other in unfinished:
            other.flush()
        finish = self._counted(finish, unfinished)
        if all(other.stop is not None for other in unfinished):
            for other in unfinished:
                other.end(finish)
        else:
            self.failure = Failed(finish)

    def _counted(self, finish: Finish, unfinished: Sequence[ChoiceLog]) -> Finish:
        """A failure with what was delivered, or will be, of the choices that it ends. The engine
        may be gone, and with it whatever it had counted.
        """
        tokens = sum(choice.num_tokens for choice in unfinished)
        first, last = finish.timings.first_token, finish.timings.last_token
        return replace(
            finish,
            usage=Usage(self.prompt_tokens, self._cached_tokens, tokens),
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
        """No more output is taken, though the engine has not ended it: what the choices held back
        belongs to what they have.
        """
        for choice in self._choices:
            if choice.finished is None:
                choice.flush()

    def fail(self, failure: RequestFailure, now: float, error: HeadraceError | None = None) -> None:
        """End the request here with a failure, where the front end itself does not go on with it.
        `error`: what the caller is told, where it is no error of ours.
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
        self.failure = Failed(self._counted(finish, unfinished), error)
        self.ended = True

    def raise_failure(self) -> None:
        """Does nothing unless the request failed.

        Raises:
            HeadraceError: it did, and why.
        """
        failed = self.failure
        if failed is not None and failed.error is not None:
            raise failed.error
        if failed is not None and failed.finish.failure is not None:
            raise RequestFailedError(failed.finish.failure)

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
        """Give numbers to what is pending, as far as the delivery options let it go, and to at most
        `room` tokens of it; None: any number.
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
        """Whether there is an event to take from `seq` on."""
        return seq < self.next_seq or self._can_number()

    def check_from(self, seq: int) -> None:
        """Check that the events from `seq` on can be had.

        Raises:
            ResultGoneError: event `seq` is no longer kept, or lies behind the next one.
        """
        earliest = self._kept[0].seq if self._kept else self.next_seq
        if not earliest <= seq <= self.next_seq:
            raise ResultGoneError(self._request_id, seq, earliest, self.next_seq)

    def take_from(self, seq: int) -> list[NumberedEvent]:
        """Number what is pending and return the events from `seq` on. `seq` was checked."""
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
        # What has no tokens needs no credit.
        if not self._can_number():
            return False
        if self._prompt is not None or (self.ended and not self.untaken):
            return True
        return any(choice.is_ready and not choice.num_pending for choice in self._choices)

    def take_for_stream(self, limit: int) -> list[NumberedEvent]:
        """Take what the stream has not had yet, about `limit` bytes at most but one event where
        there is one that it may have, as far as its credit goes; forget what nobody may ask for
        again.
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
            return events
        if self.cursor == self.next_seq:  # nearly always
            self._kept = []
            self.size = 0
        else:
            self._drop_taken()
        return events

    def _affordable(self, events: list[NumberedEvent]) -> list[NumberedEvent]:
        """The first events, as far as the credit goes; none is cut."""
        left = self.credit or 0
        for index, numbered in enumerate(events):
            cost = num_tokens(numbered.event)
            if cost and left <= 0:
                return events[:index]
            left -= cost
        return events

    def move_to(self, seq: int, credit: int | None = None) -> None:
        """The events from `seq` on (which was checked) are the next to be taken, as far as this
        credit goes.
        """
        self.cursor = seq
        self.credit = credit
        self.untaken = self._untaken_from(seq)

    @property
    def _num_pending(self) -> int:
        return sum([choice.num_pending for choice in self._choices])

    def _untaken_from(self, seq: int) -> int:
        """Tokens of output in the events from `seq` on, and pending."""
        kept = [num_tokens(numbered.event) for numbered in self._kept if numbered.seq >= seq]
        return sum(kept) + self._num_pending

    def keep_all(self, keep: bool) -> None:
        """Whether events are kept after the reader took them, from now on: else those go that it
        has taken.
        """
        if self.keep and not keep:
            self._drop_taken()
        self.keep = keep

    def _drop_taken(self) -> None:
        self._kept = [numbered for numbered in self._kept if numbered.seq >= self.cursor]
        self.size = sum(numbered.event.held for numbered in self._kept)
