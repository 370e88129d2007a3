"""Conversations with tools that are functions, against a real server: both clients."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import headrace
import pytest
from headrace import (
    Chunk,
    FinishReason,
    ToolAnswer,
    ToolArgumentsError,
    ToolCall,
    ToolChoice,
    ToolDeclinedError,
    ToolError,
    ToolFailedError,
    ToolRunEnd,
    ToolTurn,
    UnknownToolError,
)
from headrace._tool_loop import ToolLoop
from headrace.v1 import generation_pb2 as pb

from tests.clients.python.talking import ENDLESS, call, prompts, talking
from tests.service.helpers import Harness, until

MESSAGES: Any = [{"role": "user", "content": "How high is it?"}]
WAIT_S = 20.0


class Unit(StrEnum):
    METRES = "m"


def gauge(place: str, unit: Unit = Unit.METRES) -> dict[str, Any]:
    """How high the river is."""
    return {"place": place, "metres": len(place), "unit": unit}


def broken(place: str) -> str:
    raise LookupError(f"no {place}")


async def wait(place: str) -> str:
    await asyncio.sleep(0)
    return f"{place} waited"


ULM, PASSAU = call("gauge", '{"place": "Ulm"}'), call("gauge", '{"unit": "m", "place": "Passau"}')
TWO = f"<think>\nBoth.\n</think>\n\nI look.\n{ULM}\n{PASSAU}"
SAID_ULM = '{"place": "Ulm", "metres": 3, "unit": "m"}'
SAID_PASSAU = '{"place": "Passau", "metres": 6, "unit": "m"}'


async def in_thread(harness: Harness, work: Callable[[headrace.Client], Any]) -> Any:
    """What the sync client does, while the server runs here."""

    def whole() -> Any:
        with headrace.Client(harness.server.addresses[0]) as client:
            return work(client)

    async with asyncio.timeout(WAIT_S):
        return await asyncio.to_thread(whole)


async def run_sync(harness: Harness, tools: Any, **options: Any) -> headrace.ToolRun:
    """A run that the sync client has read to its end."""

    def work(client: headrace.Client) -> headrace.ToolRun:
        run = client.run_tools(MESSAGES, tools, max_tokens=500, **options)
        run.result()
        return run

    made: headrace.ToolRun = await in_thread(harness, work)
    return made


async def run_async(harness: Harness, tools: Any, **options: Any) -> headrace.AsyncToolRun:
    async with (
        headrace.AsyncClient(harness.server.addresses[0]) as client,
        asyncio.timeout(WAIT_S),
    ):
        run = client.run_tools(MESSAGES, tools, max_tokens=500, **options)
        await run.result()
        return run


@pytest.fixture(params=[run_sync, run_async], ids=["sync", "asyncio"])
def run(request: pytest.FixtureRequest) -> Any:
    """Runs to the end, by either client."""
    return request.param


async def test_calls_are_run_in_order_and_their_answers_sent_back(run: Any) -> None:
    async with talking(TWO, "Three and six.") as h:
        done = await run(h, [gauge])
    assert done.end is ToolRunEnd.ANSWERED
    first, last = done.turns
    assert [answer.content for answer in first.answers] == [SAID_ULM, SAID_PASSAU]
    assert [answer.value["place"] for answer in first.answers] == ["Ulm", "Passau"]
    assert [answer.error for answer in first.answers] == [None, None]
    assert first.result.finish_reason is FinishReason.TOOL_CALLS
    assert (last.result.text, last.answers) == ("Three and six.", ())
    ids = [one.id for one in first.result.tool_calls]
    assert done.messages == [
        *MESSAGES,
        first.result.message,
        {"role": "tool", "tool_call_id": ids[0], "name": "gauge", "content": SAID_ULM},
        {"role": "tool", "tool_call_id": ids[1], "name": "gauge", "content": SAID_PASSAU},
        {"role": "assistant", "content": "Three and six."},
    ]
    assert len(MESSAGES) == 1
    assert prompts(h)[1] == (
        "<|im_start|>user\nHow high is it?<|im_end|>\n"
        f"<|im_start|>assistant\n{TWO}<|im_end|>\n"
        f"<|im_start|>tool\n{SAID_ULM}<|im_end|>\n<|im_start|>tool\n{SAID_PASSAU}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def folded(events: list[Any]) -> list[str]:
    """Kinds of events, repeated ones once."""
    kinds = [type(event).__name__ for event in events]
    return [kind for i, kind in enumerate(kinds) if kind != "Chunk" or kinds[i - 1] != "Chunk"]


async def test_events_come_as_they_happen() -> None:
    async with talking(TWO, "Done.", TWO, "Done.") as h:
        found = await in_thread(
            h, lambda client: list(client.run_tools(MESSAGES, [gauge], max_tokens=500).events())
        )
        async with headrace.AsyncClient(h.server.addresses[0]) as client:
            run = client.run_tools(MESSAGES, [gauge], max_tokens=500)
            too = [event async for event in run.events()]
    for events in (found, too):
        assert folded(events) == [
            "Chunk", "ToolAnswer", "ToolAnswer", "ToolTurn", "Chunk", "ToolTurn",
        ]  # fmt: skip
        chunks = [event for event in events if isinstance(event, Chunk)]
        assert "".join(chunk.text for chunk in chunks) == "I look.Done."
        assert "".join(chunk.reasoning for chunk in chunks) == "Both."
        answers = [event for event in events if isinstance(event, ToolAnswer)]
        assert [answer.content for answer in answers] == [SAID_ULM, SAID_PASSAU]
        turns = [event for event in events if isinstance(event, ToolTurn)]
        assert list(turns[0].answers) == answers
        assert turns[1].result.text == "Done."


FAULTS = [
    (call("nothing", "{}"), UnknownToolError, "no tool 'nothing'; there are gauge, broken"),
    (call("gauge", '{"place": oops}'), ToolArgumentsError, "the arguments are no JSON object: "),
    (call("gauge", '{"place": 5}'), ToolArgumentsError, "do not fit: place: 5 is not a string"),
    (call("gauge", "{}"), ToolArgumentsError, "do not fit: 'place' is missing"),
    (call("gauge", '{"place": "a", "unit": "km"}'), ToolArgumentsError, "is not one of 'm'"),
    (call("gauge", '{"place": "a", "place": "b"}'), ToolArgumentsError, "named twice"),
    (call("broken", '{"place": "Ulm"}'), ToolFailedError, "LookupError: no Ulm"),
]  # fmt: skip


@pytest.mark.parametrize(("reply", "kind", "said"), FAULTS)
async def test_the_model_is_told_what_went_wrong(
    run: Any, reply: str, kind: type[ToolError], said: str
) -> None:
    async with talking(f"{ULM}\n{reply}", "I see.") as h:
        done = await run(h, [gauge, broken])
    good, bad = done.turns[0].answers
    assert good.content == SAID_ULM
    assert type(bad.error) is kind
    assert said in str(bad.error)
    assert bad.content == f"error: {bad.error}"
    assert bad.error.call == bad.call == done.turns[0].result.tool_calls[1]
    assert f"<|im_start|>tool\n{bad.content}<|im_end|>" in prompts(h)[1]
    assert done.result  # the server took the conversation back
    assert done.end is ToolRunEnd.ANSWERED


@pytest.mark.parametrize(("reply", "kind", "said"), FAULTS)
async def test_what_went_wrong_is_raised_where_that_is_asked_for(
    run: Any, reply: str, kind: type[ToolError], said: str
) -> None:
    async with talking(reply) as h:
        with pytest.raises(kind, match=re.escape(said)) as caught:
            await run(h, [gauge, broken], on_error="raise")
    assert isinstance(caught.value.__cause__, LookupError) == (kind is ToolFailedError)


async def test_what_the_model_is_told_is_the_callers_choice(run: Any) -> None:
    def tell(error: ToolError) -> str:
        return f"{error.call.name}, alas"

    async with talking(call("nothing", "{}"), "I see.") as h:
        done = await run(h, [gauge], on_error=tell)
    assert [answer.content for answer in done.turns[0].answers] == ["nothing, alas"]


async def test_a_call_may_be_declined(run: Any) -> None:
    asked: list[ToolCall] = []

    def approve(one: ToolCall) -> bool | str:
        asked.append(one)
        return {"Ulm": True, "Passau": False}.get(one.arguments["place"], "too far")  # type: ignore[index]

    linz, bad = call("gauge", '{"place": "Linz"}'), call("gauge", "{}")
    async with talking(f"{bad}{PASSAU}{ULM}{linz}", "I see.") as h:
        done = await run(h, [gauge], approve=approve)
    assert [one.arguments for one in asked] == [  # what cannot run is not asked about
        {"unit": "m", "place": "Passau"}, {"place": "Ulm"}, {"place": "Linz"},
    ]  # fmt: skip
    _, declined, ran, reasoned = done.turns[0].answers
    assert type(declined.error) is ToolDeclinedError
    assert declined.content == "error: this call was declined"
    assert ran.content == SAID_ULM
    assert reasoned.content == "error: this call was declined: too far"


async def test_turns_are_bounded(run: Any) -> None:
    ran: list[str] = []

    def count(place: str) -> None:
        ran.append(place)

    reply = call("count", '{"place": "Ulm"}')
    async with talking(reply, reply, reply) as h:
        done = await run(h, [count], max_turns=3)
    assert done.end is ToolRunEnd.MAX_TURNS
    assert ran == ["Ulm", "Ulm"]
    assert [len(turn.answers) for turn in done.turns] == [1, 1, 0]
    assert done.messages[-1]["role"] == "tool"  # no call stands there without its answer
    assert done.messages[-1]["content"] == "null"


@pytest.mark.parametrize(
    "options", [{"max_tokens": len(ULM) - 30}, {"stop": "Ulm"}], ids=["length", "stop"]
)
async def test_calls_of_a_reply_that_was_cut_are_not_run(options: dict[str, Any]) -> None:
    def never(place: str) -> None:
        raise AssertionError

    def work(client: headrace.Client) -> headrace.ToolRun:
        run = client.run_tools(MESSAGES, [headrace.tool(name="gauge")(never)], **options)
        run.result()
        return run

    async with talking(f"{ULM}{ULM}{ENDLESS}") as h:
        done = await in_thread(h, work)
    [turn] = done.turns
    assert done.end is ToolRunEnd.CUT
    assert turn.result.tool_calls
    assert turn.answers == ()
    assert done.messages == MESSAGES


async def test_a_text_that_was_cut_is_kept(run: Any) -> None:
    async with talking("hm" * 500) as h:
        done = await run(h, [gauge])
    assert done.end is ToolRunEnd.CUT
    assert done.messages[-1] == {"role": "assistant", "content": "hm" * 250}


async def test_a_server_that_cannot_tell_calls_apart_is_refused_by_name(run: Any) -> None:
    async with talking(ULM, reply_parser="none") as h:
        with pytest.raises(headrace.NotSupportedError, match="typed_replies"):
            await run(h, [gauge])


async def test_an_interrupted_run_is_where_it_was() -> None:
    def interrupted(place: str) -> None:
        raise KeyboardInterrupt

    def work(client: headrace.Client) -> headrace.ToolRun:
        run = client.run_tools(MESSAGES, [gauge, interrupted], max_tokens=500)
        with pytest.raises(KeyboardInterrupt):
            run.result()
        return run

    async with talking(ULM, ULM + call("interrupted", '{"place": "Ulm"}')) as h:
        done = await in_thread(h, work)
    assert len(done.turns) == 1
    assert done.end is None
    assert done.messages[-1]["content"] == SAID_ULM


async def one_piece(harness: Harness, requests: int) -> None:
    """Generates a piece of text for the last of so many requests."""
    await until(lambda: len(harness.engine.submitted) == requests)
    for _ in range(4):
        harness.engine.step()


async def test_leaving_the_events_cancels_the_request() -> None:
    def work(client: headrace.Client) -> None:
        events = client.run_tools(MESSAGES, [gauge], max_tokens=500).events()
        assert isinstance(next(events), Chunk)
        events.close()  # type: ignore[attr-defined]  # it is a generator

    async with talking(f"Long{ENDLESS}", f"Long{ENDLESS}", auto=False) as h:
        await asyncio.gather(one_piece(h, 1), in_thread(h, work))
        await until(lambda: len(h.engine.cancelled) == 1)
        async with headrace.AsyncClient(h.server.addresses[0]) as client:
            run = client.run_tools(MESSAGES, [gauge], max_tokens=500)
            async with contextlib.aclosing(run.events()) as events:  # type: ignore[type-var]
                await asyncio.gather(one_piece(h, 2), anext(events))
            await until(lambda: len(h.engine.cancelled) == 2)
            assert run.messages == MESSAGES


# ---- asyncio alone -------------------------------------------------------------------------------


async def test_calls_run_at_the_same_time() -> None:
    together, threads = asyncio.Barrier(2), threading.Barrier(3)
    loop = asyncio.get_running_loop()

    async def meet(place: str) -> str:
        """Returns once another is here."""
        await together.wait()
        assert asyncio.get_running_loop() is loop
        return place

    def meet_thread(place: str) -> str:
        threads.wait(WAIT_S)
        return place

    replies = [call("meet", f'{{"place": "{i}"}}') for i in range(2)]
    replies += [call("meet_thread", f'{{"place": "{i}"}}') for i in range(2, 5)]
    async with talking("\n".join(replies), "Met.") as h:
        done = await run_async(h, [meet, meet_thread])
    assert [answer.content for answer in done.turns[0].answers] == ["0", "1", "2", "3", "4"]


async def test_a_cancelled_run_cancels_its_functions() -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def hang(place: str) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with (
        talking(call("hang", '{"place": "Ulm"}')) as h,
        headrace.AsyncClient(h.server.addresses[0]) as client,
    ):
        run = client.run_tools(MESSAGES, [hang], max_tokens=500)
        task = asyncio.ensure_future(run.result())
        async with asyncio.timeout(WAIT_S):
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert ended.is_set()
        assert (run.messages, run.turns, run.end) == (MESSAGES, (), None)


async def test_a_call_that_is_raised_cancels_the_others() -> None:
    ended = asyncio.Event()

    async def hang(place: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    reply = call("hang", '{"place": "a"}') + call("broken", '{"place": "b"}')
    async with talking(reply) as h:
        with pytest.raises(ToolFailedError, match="no b"):
            await run_async(h, [hang, broken], on_error="raise")
    assert ended.is_set()


async def test_approval_may_be_awaited_and_comes_one_by_one() -> None:
    asking = 0

    async def approve(_: ToolCall) -> bool:
        nonlocal asking
        asking += 1
        assert asking == 1
        await asyncio.sleep(0)
        asking -= 1
        return False

    async with talking(TWO, "I see.") as h:
        done = await run_async(h, [gauge], approve=approve)
    assert [type(answer.error) for answer in done.turns[0].answers] == [ToolDeclinedError] * 2


async def test_coroutine_functions_are_run_by_asyncio_alone() -> None:
    async with talking(call("wait", '{"place": "Ulm"}'), "Done.") as h:
        with pytest.raises(
            TypeError, match=r"wait is a coroutine function; AsyncClient\.run_tools"
        ):
            await run_sync(h, [wait])
        done = await run_async(h, [wait])
    assert done.turns[0].answers[0].content == "Ulm waited"


# ---- what is asked -------------------------------------------------------------------------------


def result(*calls: ToolCall) -> headrace.Result:
    choice = headrace.Choice(0, "", (), FinishReason.TOOL_CALLS, tool_calls=calls)
    return headrace.Result("a", (choice,), choice.usage)


@pytest.mark.parametrize(
    ("choice", "first", "then"),
    [
        (None, None, None),
        ("auto", None, None),
        ("required", {"mode": 3}, {"mode": 1}),
        ("none", {"mode": 2}, {"mode": 2}),
        (
            {"type": "function", "function": {"name": "gauge"}},
            {"mode": 3, "tool_names": ["gauge"]},
            {"mode": 1},
        ),
        (
            ToolChoice("required", ("gauge", "broken"), parallel_calls=False),
            {"mode": 3, "tool_names": ["gauge", "broken"], "parallel_calls": False},
            {"mode": 1, "tool_names": ["gauge", "broken"], "parallel_calls": False},
        ),
    ],
)
def test_a_call_that_is_required_is_so_once(choice: Any, first: Any, then: Any) -> None:
    options: Any = {"tool_choice": choice}
    loop = ToolLoop(MESSAGES, [gauge, broken], max_turns=9, on_error="tell", options=options)
    for wanted in (first, then, then):
        chat = loop.spec().chat
        assert [one.name for one in chat.tools] == ["gauge", "broken"]
        assert chat.HasField("tool_choice") == (wanted is not None)
        assert chat.tool_choice == pb.ToolChoice(**(wanted or {}))
        reply = result(ToolCall("1", "gauge", '{"place": "Ulm"}'))
        [pending] = loop.take(reply)
        assert not isinstance(pending, ToolError)
        loop.close(reply, [loop.settle(loop.call(pending))])


@pytest.mark.parametrize(
    ("messages", "options", "kind", "said"),
    [
        (MESSAGES, {"n": 2}, TypeError, "no such option of a run of tools: n"),
        (MESSAGES, {"request_id": "a", "raw_text": True}, TypeError, "raw_text, request_id"),
        (MESSAGES, {"colour": 1}, TypeError, "colour"),
        (MESSAGES, {"max_turns": 0}, headrace.InvalidArgumentError, "at least 1"),
        (MESSAGES, {"on_error": "ignore"}, headrace.InvalidArgumentError, "'ignore'"),
        (MESSAGES, {"temperature": "hot"}, headrace.InvalidArgumentError, "temperature"),
        ("hi", {}, TypeError, "messages"),
        ([1, 2], {}, headrace.InvalidArgumentError, "belongs to a prompt of messages"),
        ([], {}, headrace.InvalidArgumentError, "empty"),
    ],
)
def test_what_is_no_run_is_refused_at_once(
    messages: Any, options: Any, kind: type[Exception], said: str
) -> None:
    with (
        headrace.Client("127.0.0.1:1") as client,
        pytest.raises(kind, match=said),
    ):
        client.run_tools(messages, [gauge], **options)
