"""The promises under random courses: exactly one terminal event, numbers without gaps, and the
texts that the oracle works out from the script alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import grpc
import pytest
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_service_pb2 as rpc
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contract.outputs import (
    Finish,
    FinishReason,
    RequestFailure,
    RequestOutput,
    Timings,
    Usage,
)
from engine.contract.request import GenerationRequest
from engine.contract.sampling_params import SamplingParams, StopParams
from engine.contract.types import RequestId, TokenId
from engine.text import TextStream
from service.delivery.events import (
    Accepted,
    DeliveryOptions,
    Delta,
    Failed,
    Finished,
    NumberedEvent,
    num_tokens,
)
from service.delivery.log import EventLog
from tests.service.fake_engine import EOS, FakeEngine, byte_tokenizer
from tests.service.helpers import (
    Harness,
    Names,
    check_course,
    finished_of,
    ids_of,
    serving,
    spec,
    text_of,
    until,
)

TOKENIZER = byte_tokenizer()
ENGINE_ID = RequestId("i/r#1")
TEXTS = st.text(alphabet="abcé€😀 ", max_size=40)


def expected(text: str, stop: str) -> tuple[str, int]:
    """The text before a stop string, and the number of byte tokens up to its end."""
    place = text.find(stop) if stop else -1
    if place < 0:
        return text, len(text.encode())
    return text[:place], len(text[: place + len(stop)].encode())


def make_log(stop: str, options: DeliveryOptions, *, n: int = 1) -> EventLog:
    """A log that was accepted."""
    log = EventLog(
        "r",
        options=options,
        text_streams=[TextStream(TOKENIZER, stop_strings=[stop] if stop else []) for _ in range(n)],
        ending_ids=frozenset((TokenId(EOS),)),
        prompt=(TokenId(1),) * 3,
        now=0.0,
    )
    log.accept(
        Accepted(
            sampling=SamplingParams(),
            stop=StopParams(max_tokens=100),
            stop_strings=(),
            include_stop=False,
            max_reasoning_tokens=None,
            prompt_tokens=3,
            queue_position=0,
            command_id=0,
            accepted_at=0.0,
            request_id="a",
            n=n,
        ),
        0.0,
    )
    return log


@settings(max_examples=400, deadline=None)
@given(
    text=TEXTS,
    stop=st.sampled_from(["", "a", "b ", "é€", "cab", "😀"]),
    steps=st.lists(st.integers(1, 7), max_size=60),
    takes=st.lists(st.booleans(), max_size=60),
    keep=st.booleans(),
    at_least=st.integers(1, 5),
    final=st.booleans(),
    rewinds=st.lists(st.integers(1, 30), max_size=5),
    credits=st.none() | st.lists(st.integers(0, 9), max_size=60),
)
def test_a_log_under_any_steps_and_takes(
    text: str,
    stop: str,
    steps: list[int],
    takes: list[bool],
    keep: bool,
    at_least: int,
    final: bool,
    rewinds: list[int],
    credits: list[int] | None,
) -> None:
    """`credits`: what is granted before each take; None: there are no credits."""
    ids = [TokenId(byte) for byte in text.encode()]
    stopped: dict[int, int] = {}
    log = make_log(stop, DeliveryOptions(final=final, min_tokens_per_delta=at_least))
    log.keep = keep
    taken: list[NumberedEvent] = []
    place = 0
    choice, grants = iter(takes), iter(credits or ())
    for number, size in enumerate([*steps, len(ids) + 1]):
        part = tuple(ids[place : place + size])
        place += size
        over = place >= len(ids)
        finish = None
        if over:
            usage = Usage(3, 0, len(ids))
            finish = Finish(FinishReason.LENGTH, usage, Timings(0, 0, 0, 1, 1, 0))
        output = RequestOutput(
            ENGINE_ID,
            token_ids=part,
            prompt_done=0 if number == 0 else None,
            finish=finish,
            ends_request=over,
        )
        if (stopped_by := log.push(output, 1.0)) is not None:
            stopped[0] = stopped_by.num_tokens
        if next(choice, False):
            if credits is not None:
                log.credit = (log.credit or 0) + next(grants, 0)
            allowed, is_takeable = log.credit, log.is_takeable
            had = log.take_for_stream(1 << 20)
            assert bool(had) is is_takeable
            assert not log.is_takeable
            if allowed is not None:
                assert sum(num_tokens(event.event) for event in had) <= allowed
            taken += had
            in_events = sum(num_tokens(event.event) for event in taken)
            assert log.untaken == log.output_tokens - in_events
        if over:
            break
    log.credit = None
    log.push(RequestOutput(ENGINE_ID, token_ids=(TokenId(97),)), 2.0)  # too late: nothing happens
    taken += log.take_for_stream(1 << 20)
    assert log.delivered
    assert log.take_for_stream(1 << 20) == []
    want_text, want_tokens = expected(text, stop)
    assert [event.seq for event in taken] == list(range(1, len(taken) + 1))
    deltas = [event.event for event in taken if isinstance(event.event, Delta)]
    assert "".join(delta.text for delta in deltas) == want_text
    assert [t for delta in deltas for t in delta.token_ids] == ids[:want_tokens]
    assert sum(isinstance(event.event, Finished) for event in taken) == 1
    end = taken[-1].event
    assert isinstance(end, Finished)
    found = want_text != text
    assert end.reason is (FinishReason.STOP if found else FinishReason.LENGTH)
    assert end.usage.completion_tokens == want_tokens
    assert stopped in ({}, {0: want_tokens})
    if credits is None:
        if final:
            assert len(deltas) <= 1
        assert all(len(delta.token_ids) >= at_least for delta in deltas[:-2])
    if keep:
        for seq in rewinds:
            if seq <= len(taken) + 1:
                log.check_from(seq)
                assert log.take_from(seq) == taken[seq - 1 :]


def chaos_script(request: GenerationRequest, choice: int) -> Sequence[int]:
    """What the oracle knows: 1 to 24 characters that depend on prompt and choice, then the end."""
    prompt = bytes(request.prompt).decode()
    return [*chaos_text(prompt if choice == 0 else f"{prompt}#{choice}").encode(), EOS]


def chaos_text(prompt: str) -> str:
    """The output for a prompt."""
    source = random.Random(prompt)
    return "".join(source.choice("abcdé€ ") for _ in range(source.randint(1, 24)))


@settings(max_examples=300, deadline=None)
@given(
    texts=st.lists(TEXTS, min_size=1, max_size=4),
    stop=st.sampled_from(["", "a", "b ", "é€", "😀"]),
    moves=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.booleans()), max_size=60),
    keep=st.booleans(),
    at_least=st.integers(1, 4),
    final=st.booleans(),
    fails=st.booleans(),
)
def test_a_log_of_several_choices_under_any_steps_and_takes(
    texts: list[str],
    stop: str,
    moves: list[tuple[int, int, bool]],
    keep: bool,
    at_least: int,
    final: bool,
    fails: bool,
) -> None:
    """Each choice goes on by itself, in any order, whenever somebody takes; then the rest ends, or
    the whole request fails.
    """
    stopped: dict[int, int] = {}
    options = DeliveryOptions(final=final, min_tokens_per_delta=at_least)
    log = make_log(stop, options, n=len(texts))
    log.keep = keep
    left = {i: [TokenId(byte) for byte in text.encode()] for i, text in enumerate(texts)}
    lengths = {i: len(ids) for i, ids in left.items()}
    taken: list[NumberedEvent] = []

    def push(choice: int, size: int, *, end: bool) -> None:
        ids, left[choice] = tuple(left[choice][:size]), left[choice][size:]
        finish = None
        if end:
            usage = Usage(3, 0, lengths[choice])
            finish = Finish(FinishReason.LENGTH, usage, Timings(0, 0, 0, 1, 1, 0))
            del left[choice]
        stopped_by = log.push(
            RequestOutput(ENGINE_ID, choice, token_ids=ids, finish=finish, ends_request=not left),
            1.0,
        )
        if stopped_by is not None:
            stopped[choice] = stopped_by.num_tokens

    for choice, size, take in moves:
        if choice in left:
            push(choice, size, end=size >= len(left[choice]))
        if take:
            taken += log.take_for_stream(1 << 20)
    failed = fails and bool(left)
    if failed:
        failure = RequestFailure("broken", "id")
        finish = Finish(
            FinishReason.ERROR, Usage(3, 0, 0), Timings(0, 0, 0, 1, 1, 0), failure=failure
        )
        log.push(RequestOutput(ENGINE_ID, min(left), finish=finish, ends_request=True), 1.0)
    else:
        for choice in list(left):
            push(choice, 1000, end=True)
    taken += log.take_for_stream(1 << 20)
    assert log.ended
    assert log.delivered
    assert [event.seq for event in taken] == list(range(1, len(taken) + 1))
    if keep:
        assert log.take_from(1) == taken
    ends = [event.event for event in taken if isinstance(event.event, Finished | Failed)]
    assert taken[-1].event is ends[-1]
    if isinstance(ends[-1], Failed):
        assert failed
    else:
        assert sorted(end.choice for end in ends if isinstance(end, Finished)) == [
            *range(len(texts))
        ]
    for index, text in enumerate(texts):
        want_text, want_tokens = expected(text, stop)
        deltas = [
            event.event
            for event in taken
            if isinstance(event.event, Delta) and event.event.choice == index
        ]
        ids = [token_id for delta in deltas for token_id in delta.token_ids]
        got = "".join(delta.text for delta in deltas)
        assert ids == list(text.encode())[: len(ids)]
        if any(isinstance(end, Finished) and end.choice == index for end in ends):
            assert (got, len(ids)) == (want_text, want_tokens)
            assert stopped.get(index, want_tokens) == want_tokens
        else:
            # A character that was cut shows as U+FFFD. What was held back as the start of a stop
            # string is text after all, when a failure keeps it from being completed.
            assert text.startswith(got.rstrip("\N{REPLACEMENT CHARACTER}"))
            assert not stop or stop not in got
        if final:
            assert len(deltas) <= 1


class Client:
    """One session that starts many requests and cancels some of them at random moments."""

    def __init__(self, harness: Harness, number: int, requests: int) -> None:
        self.session = harness.session()
        self.source = random.Random(number)
        self.names = [f"c{number}-{i}" for i in range(requests)]
        self.stops = {name: self.source.choice(["", "", "a", "b€", " "]) for name in self.names}
        self.n = {name: self.source.choice([1, 1, 1, 2, 3]) for name in self.names}
        self.cancelled: set[str] = set()

    async def run(self) -> None:
        reading = asyncio.ensure_future(self.session.rest())
        for name in self.names:
            stop = {"stop_strings": [self.stops[name]]} if self.stops[name] else {}
            await self.session.add(spec(name, request_id=name, n=self.n[name], stop=stop))
            if self.source.random() < 0.2:
                victim = self.source.choice(self.names[max(0, self.names.index(name) - 20) :])
                self.cancelled.add(victim)
                await self.session.send(cancel=rpc.CancelCommand(request_id=victim))
        await self.session.call.done_writing()
        await reading

    def check(self) -> int:
        """Check all courses; returns how many were cancelled."""
        assert not any(message.rejections for message in self.session.messages)
        events = self.session.events()
        assert sorted(events) == sorted(self.names)
        cancelled = 0
        for name, run in events.items():
            check_course(run, n=self.n[name])
            cancelled += sum(self.check_choice(name, run, i) for i in range(self.n[name])) > 0
        return cancelled

    def check_choice(self, name: str, run: list[pb.ResultEvent], choice: int) -> bool:
        """Check one choice; returns whether it was cancelled."""
        said = chaos_text(name if choice == 0 else f"{name}#{choice}")
        text, tokens = expected(said, self.stops[name])
        finished = finished_of(run, choice)
        ids = ids_of(run, choice)
        assert finished.usage.completion_tokens == len(ids)
        if finished.reason == pb.FINISH_REASON_CANCELLED:
            assert name in self.cancelled
            # A character that was cut shows as U+FFFD; held back text is sent.
            assert said.startswith(text_of(run, choice).rstrip("\N{REPLACEMENT CHARACTER}"))
            return True
        assert finished.reason == pb.FINISH_REASON_STOP
        assert text_of(run, choice) == text
        found = finished.WhichOneof("matched") == "stop_string"
        assert found == (text != said)
        assert len(ids) == (tokens if found else tokens + 1)  # with the EOS
        return False


@pytest.mark.parametrize("count", [100, pytest.param(400, marks=pytest.mark.slow)])
async def test_thousands_of_requests_with_cancels_and_stop_strings(count: int) -> None:
    engine = FakeEngine(script=chaos_script)
    async with serving(engine) as h:
        clients = [Client(h, number, count) for number in range(6)]
        await asyncio.gather(*(client.run() for client in clients))
        cancelled = [client.check() for client in clients]
        assert h.registry.live == 0
        assert h.registry.stats().streamed_requests == 0
        assert not h.registry.requests
        assert engine.num_live == 0
    assert len(engine.submitted) == engine.ended == 6 * count
    assert sum(cancelled) > 0


async def test_lost_streams_resume_without_loss_or_repetition() -> None:
    """Each client loses its stream again and again in the middle, and attaches from what it has."""
    engine = FakeEngine(script=chaos_script)
    async with serving(engine) as h:
        total = 0
        for seed in range(40):
            source = random.Random(seed)
            names = [f"s{seed}-{i}" for i in range(10)]
            events: dict[str, list[pb.ResultEvent]] = {name: [] for name in names}
            numbers = Names()
            session = h.session()
            await session.send(open=rpc.OpenCommand(lease={"seconds": 60}))
            counts = {name: source.choice([1, 1, 3]) for name in names}
            for name in names:
                await session.add(spec(name, request_id=name, n=counts[name]))
            while not all(events[n] for n in names):
                collect(events, numbers, await session.read())
            while any(not over(run) for run in events.values()):
                session.call.cancel()
                session, numbers = h.session(), Names()
                await session.send(open=rpc.OpenCommand(lease={"seconds": 60}))
                for name, run in events.items():
                    if not over(run):
                        await session.send(
                            attach=rpc.AttachCommand(request_id=name, from_seq=len(run) + 1)
                        )
                for _ in range(source.randint(2, 6)):
                    message = await session.call.read()
                    if message is grpc.aio.EOF:
                        break
                    assert not message.rejections
                    collect(events, numbers, message)
                    if all(over(run) for run in events.values()):
                        break
            session.call.cancel()
            for name, run in events.items():
                check_course(run, n=counts[name])
                for choice in range(counts[name]):
                    said = chaos_text(name if choice == 0 else f"{name}#{choice}")
                    assert text_of(run, choice) == said
                total += 1
        await until(lambda: not h.registry.streams)
        assert not engine.cancelled
        assert h.registry.stats().streamed_requests == 0
    assert total == 400


def collect(
    events: dict[str, list[pb.ResultEvent]], names: Names, message: rpc.StreamResultResponse
) -> None:
    """Append events, which must follow on what is there."""
    for name, event in names.take(message):
        assert event.seq == len(events[name]) + 1
        events[name].append(event)


def over(run: list[pb.ResultEvent]) -> bool:
    """Whether the last terminal event is there."""
    return bool(run) and (
        run[-1].HasField("failed")
        or sum(event.HasField("finished") for event in run) == run[0].accepted.n
    )
