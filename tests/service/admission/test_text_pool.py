"""Long texts are worked on off the event loop: in whose turn, how much of them may wait, and what
becomes of work whose caller has gone.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_service_pb2 as rpc
from headrace.v1 import model_service_pb2 as model

from engine.fairness.shares import RESERVE_PART
from engine.text import Tokenizer
from service.admission.accounts import account_of
from service.admission.text_pool import (
    INLINE_ANSWER_BYTES,
    MAX_WAITING,
    MAX_WAITING_BYTES,
    SHORT_BYTES,
    TextPool,
)
from service.convert.inputs import MIN_MOST_TEXT_BYTES
from service.errors.call_errors import LimitReachedError, NotReadyError
from tests.service.admission.hands import Hands, settle
from tests.service.door.callers_file import TOKENS, bearer, entry, replace
from tests.service.fake_engine import CHAT_TEMPLATE, FakeEngine, byte_tokenizer, model_info
from tests.service.helpers import DEADLINE_S, Harness, refused, serving, spec, until

LONG = SHORT_BYTES + 1


def begin(pool: TextPool, identity: str, size: int, name: str) -> asyncio.Task[str]:
    return asyncio.ensure_future(pool.run(account_of(identity), size, lambda: name))


async def test_callers_have_their_turns_whatever_others_have_waiting() -> None:
    hands = Hands()
    pool = TextPool(hands)
    tasks = [begin(pool, "many", LONG, f"many-{i}") for i in range(50)]
    await settle()
    tasks += [begin(pool, "few", LONG, f"few-{i}") for i in range(2)]
    await settle()
    done = [await hands.finish() for _ in range(6)]
    assert done == ["many-0", "many-1", "few-0", "many-2", "few-1", "many-3"]
    while hands.begun:
        done.append(await hands.finish())
    assert sorted(done) == sorted(await asyncio.gather(*tasks))
    assert pool.waiting == 0


async def test_turns_are_counted_in_bytes() -> None:
    hands = Hands()
    pool = TextPool(hands)
    first = begin(pool, "other", LONG, "first")
    await settle()
    tasks = [begin(pool, "large", 10 * LONG, f"large-{i}") for i in range(2)]
    tasks += [begin(pool, "small", LONG, f"small-{i}") for i in range(9)]
    await settle()
    done = [await hands.finish() for _ in range(12)]
    assert done[:3] == ["first", "large-0", "small-0"]
    assert done.index("large-1") > done.index("small-7")
    await asyncio.gather(first, *tasks)


async def test_what_is_short_does_not_wait_for_what_is_long() -> None:
    hands = Hands()
    pool = TextPool(hands)
    tasks = [begin(pool, "a", LONG, f"long-{i}") for i in range(3)]
    tasks += [begin(pool, "a", SHORT_BYTES, f"short-{i}") for i in range(2)]
    await settle()
    assert len(hands.begun) == 2
    long_one = hands.begun.pop(0)
    assert [await hands.finish(), await hands.finish()] == ["short-0", "short-1"]
    hands.begun.append(long_one)
    assert [await hands.finish() for _ in range(3)] == ["long-0", "long-1", "long-2"]
    await asyncio.gather(*tasks)


async def test_work_whose_caller_goes_is_dropped_before_it_begins() -> None:
    hands = Hands()
    pool = TextPool(hands)
    tasks = [begin(pool, "a", LONG, f"{i}") for i in range(4)]
    await settle()
    for gone in (0, 2):  # the first has begun: it cannot be interrupted
        tasks[gone].cancel()
    await settle()
    assert pool.waiting == 2
    assert [await hands.finish() for _ in range(3)] == ["0", "1", "3"]
    assert not hands.begun
    assert pool.waiting == 0
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(outcome, str) for outcome in outcomes] == [False, True, False, True]


async def test_texts_of_nothing_are_counted_too() -> None:
    pool = TextPool(hands := Hands())
    tasks = [begin(pool, "a", 0, f"{i}") for i in range(4)]
    await settle()
    assert pool.waiting == 3
    for _ in range(4):
        await hands.finish()
    assert await asyncio.gather(*tasks) == ["0", "1", "2", "3"]


async def test_an_error_is_the_caller_s_alone() -> None:
    pool = TextPool(hands := Hands())

    def fail() -> str:
        raise ValueError("no")

    failing = asyncio.ensure_future(pool.run(account_of("a"), LONG, fail))
    working = begin(pool, "a", LONG, "yes")
    await settle()
    await hands.finish()
    await hands.finish()
    with pytest.raises(ValueError, match="no"):
        await failing
    assert await working == "yes"


@pytest.mark.parametrize(
    ("size", "number", "reason", "limit"),
    [
        (9, MAX_WAITING, "TOO_MANY_TEXTS", MAX_WAITING),
        (1 << 20, MAX_WAITING_BYTES >> 20, "TOO_MUCH_TEXT", MAX_WAITING_BYTES),
    ],
)
async def test_how_much_of_a_caller_may_wait(
    size: int, number: int, reason: str, limit: int
) -> None:
    pool = TextPool(hands := Hands())
    tasks = [begin(pool, "a", size, f"{i}") for i in range(number + 1)]  # one of them runs
    await settle()
    assert pool.waiting == number
    with pytest.raises(LimitReachedError) as caught:
        await pool.run(account_of("a"), size, str)
    assert (caught.value.reason, caught.value.limit) == (reason, limit)
    assert caught.value.retry_after_s > 0
    other = begin(pool, "b", size, "other")
    await settle()
    assert pool.waiting == number + 1
    for task in (*tasks, other):
        task.cancel()
    await settle()
    assert pool.waiting == 0
    await hands.finish()


@pytest.mark.parametrize(
    ("size", "reason"), [(SHORT_BYTES // 8, "TOO_MANY_TEXTS"), (1 << 20, "TOO_MUCH_TEXT")]
)
async def test_how_much_of_all_may_wait(size: int, reason: str) -> None:
    pool = TextPool(hands := Hands())
    tasks = [begin(pool, "first", size, "first")]
    await settle()
    number = min(MAX_WAITING, MAX_WAITING_BYTES // size)
    number += number // RESERVE_PART  # all of them come new
    tasks += [begin(pool, f"caller-{i}", size, f"{i}") for i in range(number)]
    await settle()
    assert pool.waiting == number
    with pytest.raises(LimitReachedError) as caught:
        await pool.run(account_of("another"), size, str)
    assert caught.value.reason == reason
    for task in tasks:
        task.cancel()
    await settle()
    # One text is taken in any case, however long.
    alone = begin(pool, "another", 2 * MAX_WAITING_BYTES, "alone")
    await settle()
    while hands.begun:
        await hands.finish()
    assert await alone == "alone"


async def test_answers_are_not_refused_and_wait_for_no_text() -> None:
    pool = TextPool(hands := Hands())
    tasks = [begin(pool, "a", MAX_WAITING_BYTES // 2, f"{i}") for i in range(3)]
    await settle()
    with pytest.raises(LimitReachedError):
        await pool.run(account_of("a"), 8 << 20, str)
    assert await pool.answer(account_of("a"), INLINE_ANSWER_BYTES, lambda: "at once") == "at once"
    answers = [
        asyncio.ensure_future(
            pool.answer(account_of("a"), INLINE_ANSWER_BYTES + 1, partial(str, i))
        )
        for i in range(3)
    ]
    await settle()
    text = hands.begun.pop(0)
    answers[1].cancel()
    await settle()
    assert [await hands.finish() for _ in range(2)] == ["0", "2"]
    assert not hands.begun
    hands.begun.append(text)
    assert [await hands.finish() for _ in range(3)] == ["0", "1", "2"]
    assert await asyncio.gather(answers[0], answers[2], *tasks) == ["0", "2", "0", "1", "2"]


async def test_a_closed_pool_refuses_what_waits_and_what_comes() -> None:
    pool = TextPool(hands := Hands())
    tasks = [begin(pool, "a", LONG, f"{i}") for i in range(3)]
    await settle()
    pool.close()
    assert await hands.finish() == "0"
    assert not hands.begun
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert outcomes[0] == "0"
    assert [type(outcome) for outcome in outcomes[1:]] == [NotReadyError, NotReadyError]
    with pytest.raises(NotReadyError):
        await pool.run(account_of("a"), 1, str)


async def test_threads_that_are_closed_meanwhile_end_nothing_twice() -> None:
    """As at a shutdown: what was handed to the threads and not begun is cancelled there."""
    threads = ThreadPoolExecutor(1)
    pool = TextPool(threads)
    go = threading.Event()
    running = asyncio.ensure_future(pool.run(account_of("a"), LONG, go.wait))
    queued = asyncio.ensure_future(pool.run(account_of("a"), 1, lambda: True))
    await settle()
    pool.close()
    threads.shutdown(wait=False, cancel_futures=True)
    go.set()
    outcomes = await asyncio.gather(running, queued, return_exceptions=True)
    assert outcomes[0] is True
    assert isinstance(outcomes[1], asyncio.CancelledError)


# ---- in the server -------------------------------------------------------------------------------


class Gate:
    """A tokenizer that waits for the test within each long text, and counts them."""

    def __init__(self, chat_template: str = CHAT_TEMPLATE) -> None:
        self.tokenizer = byte_tokenizer(chat_template=chat_template)
        self.open = threading.Event()
        self.texts: list[str] = []
        encode = self.tokenizer.encode

        def wait(text: str, *, add_special_tokens: bool = True) -> list[int]:
            if threading.current_thread() is not threading.main_thread():
                self.texts.append(text)
                assert self.open.wait(DEADLINE_S)
            return encode(text, add_special_tokens=add_special_tokens)

        vars(self.tokenizer)["encode"] = wait


@asynccontextmanager
async def gated(**options: Any) -> AsyncIterator[tuple[Harness, Gate]]:
    gate = Gate()
    engine = FakeEngine(info=model_info(max_context_tokens=1 << 20))
    async with serving(engine, tokenizer=gate.tokenizer, **options) as h:
        try:
            yield h, gate
        finally:
            gate.open.set()


def tokenize(h: Harness, text: str, **more: Any) -> Any:
    request = model.TokenizeRequest(text=pb.TextInput(text=text))
    return h.models.Tokenize(request, timeout=DEADLINE_S, **more)


async def test_everybody_else_is_served_while_a_long_text_is_tokenized() -> None:
    async with gated() as (h, gate):
        long = asyncio.ensure_future(h.generate(spec("x" * 100_000, stop={"max_tokens": 1})))
        await until(lambda: gate.texts)
        health = health_pb2_grpc.HealthStub(h.channel)
        for _ in range(20):
            answer = await health.Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            assert len((await tokenize(h, "short")).token_ids) == 5
            await h.generate(spec(stop={"max_tokens": 2}))
        assert not long.done()
        gate.open.set()
        assert (await long).usage.prompt_tokens == 100_000


@pytest.mark.parametrize("call", ["Tokenize", "Generate", "StreamResult"])
async def test_too_many_texts_are_refused_with_a_time(call: str) -> None:
    text = "x" * 1_000_000
    async with gated() as (h, gate):
        most = MAX_WAITING_BYTES // len(text)
        waiting = [asyncio.ensure_future(tokenize(h, text)) for _ in range(most + 1)]
        await until(lambda: h.server.text_pool.waiting == most)
        if call == "StreamResult":
            session = h.session()
            await session.add(spec(text), 7)
            message = await session.read_until(lambda message: message.rejections)
            assert message.rejections[0].command_id == 7
            assert message.rejections[0].status.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        else:
            again = tokenize(h, text) if call == "Tokenize" else h.generate(spec(text))
            error = await refused(again)
            assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert error.reason == "TOO_MUCH_TEXT"
            assert error.details["RetryInfo"].retry_delay.ToMilliseconds() > 0
            assert "grpc-retry-pushback-ms" in error.trailers
        assert len(gate.texts) == 1
        for one in waiting[1:]:
            one.cancel()
        await until(lambda: h.server.text_pool.waiting <= 1)
        gate.open.set()
        await asyncio.wait(waiting)


async def test_texts_of_callers_that_go_are_not_tokenized() -> None:
    async with gated() as (h, gate):
        calls = [tokenize(h, "0" * 100_000)]
        await until(lambda: gate.texts)
        calls += [tokenize(h, f"{i}" * 100_000) for i in range(1, 4)]
        session = h.session()
        await session.add(spec("s" * 100_000))
        await until(lambda: h.server.text_pool.waiting == 4)
        for call in calls[1:]:
            call.cancel()
        session.call.cancel()
        await until(lambda: h.server.text_pool.waiting == 0)
        gate.open.set()
        assert len((await calls[0]).token_ids) == 100_000
        assert [text[0] for text in gate.texts] == ["0"]


async def test_a_session_is_read_no_further_with_some_megabytes_waiting() -> None:
    async with gated() as (h, _):
        session = h.session()

        async def send() -> None:
            for i in range(9):
                await session.add(spec("x" * 1_000_000, request_id=f"{i}"), i)

        sending = asyncio.ensure_future(send())
        await until(lambda: h.server.text_pool.waiting == 4)
        for _ in range(20):
            await tokenize(h, "short")
        assert h.server.text_pool.waiting == 4  # and one is worked on
        session.call.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await until(lambda: h.server.text_pool.waiting == 0)


async def test_a_command_with_too_many_parts_does_not_wait_for_the_one_before() -> None:
    parts = pb.ChatInput(messages=[pb.ChatMessage()] * 20_000)
    async with gated() as (h, gate):
        session = h.session()
        await session.add(spec("x" * 100_000, request_id="a", stop={"max_tokens": 1}), 1)
        await until(lambda: gate.texts)
        await session.add(pb.GenerationSpec(request_id="a", chat=parts), 2)
        message = await session.read_until(lambda message: message.rejections)
        assert [rejection.command_id for rejection in message.rejections] == [2]
        assert "20000 entries" in message.rejections[0].status.message
        gate.open.set()
        await session.end()
        assert len(session.events()["a"]) > 1


async def test_a_caller_s_texts_wait_for_nobody_else_s(tmp_path: Path) -> None:
    path = tmp_path / "callers.toml"
    services = '["GenerationService", "ModelService"]'
    replace(path, entry("alice", services, TOKENS["alice"]) + entry("bob", services, TOKENS["bob"]))
    async with gated(auth_file=str(path)) as (h, gate):
        first = [tokenize(h, "m" * 100_000, metadata=bearer("alice")) for _ in range(9)]
        await until(lambda: h.server.text_pool.waiting == 8)
        later = tokenize(h, "f" * 100_000, metadata=bearer("bob"))
        await until(lambda: h.server.text_pool.waiting == 9)
        gate.open.set()
        await later
        await asyncio.gather(*first)
    assert [text[0] for text in gate.texts].index("f") == 2


async def test_a_text_that_cannot_fit_is_not_tokenized() -> None:
    gate = Gate()
    async with serving(tokenizer=gate.tokenizer) as h:
        gate.open.set()
        context = h.engine.info.max_context_tokens
        most = context * len("<eos>")
        text = "x" * (most + 1)
        error = await refused(h.generate(spec(text)))
        assert error.field == "spec.text.text"
        assert f"{most + 1} characters; at most {most}" in error.message
        chat = {"messages": [{"role": pb.CHAT_ROLE_USER, "content": text}]}
        error = await refused(h.generate(spec(chat=chat)))
        assert error.field == "spec.chat.messages"
        assert not gate.texts
        # To be cut, or only to be tokenized, it may be longer.
        await h.generate(spec(text, truncation={"max_prompt_tokens": 9}, stop={"max_tokens": 1}))
        assert len((await tokenize(h, text)).token_ids) == most + 1
        assert len(gate.texts) == 2


async def test_a_text_that_a_template_makes_is_no_longer_than_a_message_may_be() -> None:
    said = pb.ChatMessage(role=pb.CHAT_ROLE_ASSISTANT, content="x" * 9)
    cut = {"max_prompt_tokens": 9}
    async with serving(max_receive_bytes=64 << 10) as h:
        chat = pb.ChatInput(messages=[said] * 4096)
        error = await refused(h.generate(pb.GenerationSpec(chat=chat, truncation=cut)))
        assert error.field == "spec.chat.messages"
        assert f"{20 * 4096 + 11} bytes; at most {64 << 10}" in error.message
        chat = pb.ChatInput(messages=[said] * 3000)
        await h.generate(pb.GenerationSpec(chat=chat, truncation=cut, stop={"max_tokens": 1}))


class Counting(Tokenizer):
    """A tokenizer that knows how many characters it was given at once, to be tokenized."""

    lengths: list[int]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.lengths.append(len(text))
        return super().encode(text, add_special_tokens=add_special_tokens)


def counting(tokenizer: Tokenizer) -> Counting:
    tokenizer.__class__ = Counting
    assert isinstance(tokenizer, Counting)
    tokenizer.lengths = []
    return tokenizer


@pytest.mark.parametrize(("letter", "size"), [("x", 1), ("\u20ac", 3)])
async def test_a_text_has_a_bound_in_bytes_whatever_it_is_for(letter: str, size: int) -> None:
    """The model's context gives it, though messages may be larger."""
    tokenizer = counting(byte_tokenizer())
    async with serving(tokenizer=tokenizer) as h:  # a context of 2,048 tokens
        most = MIN_MOST_TEXT_BYTES
        text = letter * (most // size + 1)
        told = f"comes to {size * len(text)} bytes; at most {most}"
        error = await refused(tokenize(h, text))
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT
        assert error.field == "text.text"
        assert told in error.message
        cut = {"max_prompt_tokens": 9}
        error = await refused(h.generate(spec(text, truncation=cut)))
        assert error.field == "spec.text.text"
        assert told in error.message
        chat = {"messages": [{"role": pb.CHAT_ROLE_USER, "content": text}]}
        error = await refused(h.generate(spec(chat=chat, truncation=cut)))
        assert error.field == "spec.chat.messages"
        assert not tokenizer.lengths
        assert len((await tokenize(h, text[1:])).token_ids) == size * (len(text) - 1)


async def test_what_comes_to_far_too_many_tokens_is_never_tokenized_as_a_whole() -> None:
    tokenizer = counting(byte_tokenizer())
    engine = FakeEngine(info=model_info(max_context_tokens=1 << 17))
    async with serving(engine, tokenizer=tokenizer, max_receive_bytes=1 << 20) as h:
        most = 2 << 17
        text = "x" * (most + 1)
        told = f"comes to more than {most} tokens"
        error = await refused(tokenize(h, text))
        assert error.field == "text.text"
        assert told in error.message
        error = await refused(h.generate(spec(text)))
        assert error.field == "spec.text.text"
        assert told in error.message
        assert not tokenizer.lengths
        # What has as many bytes and fewer tokens is tokenized in one piece.
        text = "<eos>" * 50_000 + "x" * 50_000
        assert len((await tokenize(h, text)).token_ids) == 100_000
        assert tokenizer.lengths == [len(text)]


async def test_a_long_text_of_a_short_conversation_waits_among_the_long_ones() -> None:
    template = "{{ 'y' * 20000 }}"
    gate = Gate(template)
    engine = FakeEngine(info=model_info(max_context_tokens=1 << 20))
    async with serving(engine, tokenizer=gate.tokenizer) as h:
        try:
            first = asyncio.ensure_future(tokenize(h, "x" * 100_000))
            await until(lambda: gate.texts)
            chat = pb.ChatInput(messages=[pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="a")])
            second = h.models.Tokenize(model.TokenizeRequest(chat=chat), timeout=DEADLINE_S)
            await until(lambda: h.server.text_pool.waiting == 1)
            await tokenize(h, "short")
            assert [text[0] for text in gate.texts] == ["x"]
            gate.open.set()
            assert len((await first).token_ids) == 100_000
            assert len((await second).token_ids) == 20_000
        finally:
            gate.open.set()


class Describing(Tokenizer):
    """A tokenizer that knows in which threads tokens were described."""

    in_main: list[bool]

    def token_bytes(self, token_id: int) -> bytes:
        self.in_main.append(threading.current_thread() is threading.main_thread())
        return super().token_bytes(token_id)


def describing() -> Describing:
    tokenizer = byte_tokenizer()
    tokenizer.__class__ = Describing
    assert isinstance(tokenizer, Describing)
    tokenizer.in_main = []
    return tokenizer


async def test_details_of_many_tokens_come_from_a_thread_and_have_a_bound() -> None:
    tokenizer = describing()
    async with serving(tokenizer=tokenizer) as h:
        text = pb.TextInput(text="ab" * 5000)
        answer = await h.models.Tokenize(model.TokenizeRequest(text=text, token_details=True))
        assert [token.text for token in answer.tokens] == list("ab" * 5000)
        assert not any(tokenizer.in_main)
        text = pb.TextInput(text="x" * ((1 << 14) + 1))
        request = model.TokenizeRequest(text=text, token_details=True)
        error = await refused(h.models.Tokenize(request))
        assert error.field == "token_details"
        assert str(1 << 14) in error.message


@pytest.mark.parametrize("call", ["Generate", "GenerateStream", "StreamResult", "GetResult"])
async def test_long_answers_are_made_in_a_thread(call: str) -> None:
    """Of a prompt whose tokens are described one by one, in one event."""
    tokenizer = describing()
    ids = [97] * 2000
    scored = spec(
        tokens={"ids": ids},
        request_id="r",
        stop={"max_tokens": 1},
        output={"prompt_logprobs": 2},
    )
    async with serving(tokenizer=tokenizer) as h:
        if call == "Generate":
            prompt = (await h.generate(scored)).prompt
        elif call == "GetResult":
            await h.generation.AddRequest(rpc.AddRequestRequest(spec=scored))
            result = await h.generation.GetResult(
                rpc.GetResultRequest(request_id="r", until_done=True, wait={"seconds": 30})
            )
            [prompt] = [event.prompt for event in result.events if event.HasField("prompt")]
        else:
            if call == "GenerateStream":
                messages: Any = await h.stream(scored)
            else:
                session = h.session()
                await session.add(scored)
                messages = await session.end()
            events = [event for message in messages for event in message.events]
            assert [event.seq for event in events] == list(range(1, len(events) + 1))
            [prompt] = [event.prompt for event in events if event.HasField("prompt")]
    assert [token.id for token in prompt.tokens] == ids
    assert len(tokenizer.in_main) >= 2 * len(ids)
    assert sum(tokenizer.in_main) < 100


async def test_an_answer_far_too_large_is_not_made() -> None:
    tokenizer = describing()
    engine = FakeEngine(info=model_info(max_context_tokens=1 << 21))
    limits = {"max_send_bytes": 4 << 20, "max_receive_bytes": 4 << 20}
    async with serving(engine, tokenizer=tokenizer, **limits) as h:
        tokenizer.in_main.clear()  # of the special tokens, when it was loaded
        large = spec("x" * 1_100_000, n=16, stop={"max_tokens": 3}, output={"echo": True})
        error = await refused(h.generate(large))
        assert error.reason == "ANSWER_TOO_LARGE"
        assert not tokenizer.in_main
