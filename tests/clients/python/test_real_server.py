"""The client against the service itself, with an engine whose tokens are known beforehand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import headrace
import pytest
from headrace import AsyncClient, CancelStatus, FinishReason, HealthStatus, Message

from engine.contract.outputs import RequestFailure
from service.config import ServiceConfig
from service.server import HeadraceServer
from tests.service.fake_engine import EOS, FakeEngine, byte_tokenizer, says
from tests.service.fault_proxy import fault_proxy
from tests.service.helpers import until


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(script=lambda _request, _choice: [*b"once upon a time", EOS])


@pytest.fixture
async def real(engine: FakeEngine) -> AsyncIterator[HeadraceServer]:
    config = ServiceConfig(listen=("127.0.0.1:0",))
    server = HeadraceServer(config, engine, tokenizer_loader=lambda info: byte_tokenizer())
    await server.start()
    await server.ready()
    yield server
    await server.stop()


@pytest.fixture
async def aclient(real: HeadraceServer) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(real.addresses[0]) as opened:
        yield opened


async def test_one_request(aclient: AsyncClient) -> None:
    await aclient.wait_until_ready()
    assert await aclient.health() is HealthStatus.SERVING
    result = await aclient.generate("hi", max_tokens=9)
    assert (result.text, result.finish_reason) == ("once upon", FinishReason.LENGTH)
    result = await aclient.generate([Message.user("hi")], stop=" a ")
    assert (result.text, result.stop_string) == ("once upon", " a ")
    async with aclient.stream("hi", max_tokens=9) as stream:
        assert "".join([chunk.text async for chunk in stream]) == "once upon"
    assert (await stream.result()).token_ids == tuple(b"once upon")


async def test_refusals(aclient: AsyncClient) -> None:
    with pytest.raises(headrace.InvalidArgumentError) as caught:
        await aclient.generate("hi", top_p=3)
    assert "top_p" in caught.value.fields[0].field
    async with aclient.session() as session:
        with pytest.raises(headrace.InvalidArgumentError):
            await session.submit("hi", temperature=-1)
        assert (await session.submit("hi", max_tokens=4)).text == "once"


async def test_session_and_batch(aclient: AsyncClient) -> None:
    async with aclient.session(lease=10) as session:
        results = await asyncio.gather(
            *(session.submit(f"number {i}", max_tokens=1 + i % 9) for i in range(64))
        )
        assert [len(result.token_ids) for result in results] == [1 + i % 9 for i in range(64)]
        assert session.lease == 10.0
    outcomes = [pair async for pair in aclient.batch(["x"] * 200, max_tokens=4, ordered=True)]
    assert [index for index, _ in outcomes] == list(range(200))
    assert {str(outcome) for _, outcome in outcomes} == {"once"}


async def test_leaving_a_session_with_credits(
    engine: FakeEngine, real: HeadraceServer, aclient: AsyncClient
) -> None:
    def use_threads() -> int:
        with headrace.Client(real.addresses[0]) as client:
            with client.session(initial_credit=8) as session:
                handle = session.submit("hi", max_tokens=200, ignore_eos=True)
            return len(handle.result().token_ids)

    async with asyncio.timeout(30):  # what is out of credit is sent without after a minute
        async with aclient.session(initial_credit=8) as session:
            handle = session.submit("hi", max_tokens=200, ignore_eos=True)
        assert len((await handle).token_ids) == 200
        assert await asyncio.to_thread(use_threads) == 200
        engine.hold_at = engine.steps + 20
        async with aclient.session(initial_credit=8) as session:
            handle = session.submit("hi", max_tokens=200, ignore_eos=True)
            assert await handle.accepted()
            closing = asyncio.create_task(session.close())
            await asyncio.sleep(0)  # it has begun
            handle.cancel()
            await until(lambda: engine.cancelled)
            engine.go_on()
            await closing
        assert (await handle).finish_reason is FinishReason.CANCELLED


async def test_requests_that_run_by_themselves(aclient: AsyncClient) -> None:
    async with aclient.session() as session:
        await session.submit("hi", max_tokens=1)
        accepted = await aclient.add_request("hi", request_id="mine")
        assert (await aclient.get_result(accepted.request_id)).text == "once upon a time"
        statuses = await aclient.cancel(["mine", "nobody"])
        assert statuses == {
            "mine": CancelStatus.ALREADY_FINISHED,
            "nobody": CancelStatus.NOT_FOUND,
        }
        async with aclient.attach("mine") as stream:
            assert (await stream.result()).text == "once upon a time"
        again = session.attach("mine", from_seq=3, n=1)
        assert (await again).text == "once upon a time"


async def test_a_large_result_is_read_whole(engine: FakeEngine, aclient: AsyncClient) -> None:
    await aclient.add_request(
        "hi", request_id="a", n=4, max_tokens=2000, logprobs=20, ignore_eos=True
    )
    whole = await aclient.get_result("a", timeout=30)
    assert [len(choice.token_ids) for choice in whole.choices] == [2000] * 4
    assert await aclient.get_result("a", timeout=0) == whole


async def test_the_sync_client(real: HeadraceServer) -> None:
    def run() -> None:
        with headrace.Client(real.addresses[0]) as client:
            assert client.model().vocab_size == 258
            assert client.tokenize("ab").token_ids[-2:] == (97, 98)
            assert client.detokenize([97]) == "a"
            with client.stream("hi", logprobs=0, max_tokens=2) as stream:
                texts = [chunk.text for chunk in stream]
            assert "".join(texts) == "on"
            with client.session() as session:
                handles = [session.submit("hi") for _ in range(20)]
                assert {handle.result(10).text for handle in handles} == {"once upon a time"}

    await asyncio.to_thread(run)


async def test_a_lost_session_is_resumed(engine: FakeEngine, aclient: AsyncClient) -> None:
    whole = (await aclient.generate("hi", max_tokens=100)).text
    engine.hold_at = engine.steps + 3  # the stream is lost while the request runs
    async with aclient.session(lease=20) as session:
        handle = session.submit("hi", max_tokens=100)
        chunks = aiter(handle)
        first = await anext(chunks)
        streams: Any = session._streams
        [link] = streams.core.links
        link.wire._call.cancel()
        engine.go_on()
        async with asyncio.timeout(30):
            assert first.text + "".join([chunk.text async for chunk in chunks]) == whole
            assert (await handle).text == whole
    assert engine.cancelled == []


async def test_a_request_is_resumed_by_hand_after_its_client_was_closed(
    engine: FakeEngine, real: HeadraceServer, aclient: AsyncClient
) -> None:
    whole = (await aclient.generate("hi", max_tokens=100)).text
    engine.hold_at = engine.steps + 3
    async with AsyncClient(real.addresses[0]) as closed:
        session = await closed.session(lease=20).__aenter__()
        handle = session.submit("hi", max_tokens=100)
        await anext(aiter(handle))
    with pytest.raises(headrace.UnavailableError):
        await handle
    engine.go_on()
    async with aclient.session() as other:
        resumed = other.resume(handle)
        assert "".join([chunk.text async for chunk in resumed]) == whole
        assert (await resumed).text == whole


# ---- several choices, and what else a request may ask for ----------------------------------------


async def test_choices_everywhere(engine: FakeEngine, aclient: AsyncClient) -> None:
    engine.script = says("one", "second", "three!!")
    texts = ["one", "second", "three!!"]
    result = await aclient.generate("hi", n=3)
    assert [choice.text for choice in result.choices] == texts
    assert (result.text, result.usage.completion_tokens) == ("one", 19)
    async with aclient.stream("hi", n=3) as stream:
        pieces = {0: "", 1: "", 2: ""}
        async for chunk in stream:
            pieces[chunk.choice_index] += chunk.text
        streamed = await stream.result()
    assert list(pieces.values()) == texts
    assert [choice.text for choice in streamed.choices] == texts
    assert streamed.usage.completion_tokens == 19
    async with aclient.session() as session:
        submitted = await session.submit("hi", n=3, stop="o")
    assert [choice.text for choice in submitted.choices] == ["", "sec", "three!!"]
    assert [choice.stop_string for choice in submitted.choices] == ["o", "o", None]
    name = (await aclient.add_request("hi", n=3)).request_id
    assert [c.text for c in (await aclient.get_result(name, timeout=10)).choices] == texts
    async with aclient.attach(name) as attached:
        assert [choice.text for choice in (await attached.result()).choices] == texts


async def test_attaching_to_several_choices(engine: FakeEngine, aclient: AsyncClient) -> None:
    engine.script = says("abc", "abcdefgh")
    engine.hold_at = 1
    await aclient.add_request("hi", request_id="a", n=2)
    async with aclient.session() as session:
        handle = session.attach("a")
        assert await handle.accepted()
        engine.go_on()
        async with asyncio.timeout(30):
            result = await handle
    assert [choice.text for choice in result.choices] == ["abc", "abcdefgh"]
    assert engine.cancelled == []


async def test_another_session_takes_a_request_over(
    engine: FakeEngine, aclient: AsyncClient
) -> None:
    engine.hold_at = 4
    async with aclient.session(lease=60) as first, aclient.session(lease=60) as second:
        handle = first.submit("hi", request_id="a")
        async for _ in handle:
            break
        taken = second.attach("a")
        async with asyncio.timeout(30):
            with pytest.raises(headrace.HeadraceError) as caught:
                await handle
        assert (caught.value.code, caught.value.reason) == (
            grpc.StatusCode.ABORTED,
            "REQUEST_MOVED",
        )
        assert caught.value.partial is not None
        engine.go_on()
        assert (await taken).text == "once upon a time"
        assert (await first.submit("hi", max_tokens=4)).text == "once"
        assert engine.cancelled == []


@pytest.mark.parametrize("call", ["add_request", "generate"])
async def test_a_call_whose_connection_is_lost_is_tried_again(
    engine: FakeEngine, real: HeadraceServer, call: str
) -> None:
    """While the engine is yet to answer; and (Generate) while the request runs."""
    engine.submit_gate = asyncio.Event()
    engine.hold_at = 0
    registry = real.registry

    def waiting() -> int:
        return sum(request.waiting for request in registry.requests.values())

    async with (
        fault_proxy(real.addresses[0]) as proxy,
        AsyncClient(proxy.target) as client,
    ):
        answer = asyncio.ensure_future(getattr(client, call)("hi", max_tokens=9))
        await until(waiting)
        [name] = registry.requests
        proxy.cut()
        await until(lambda: not waiting())
        await until(waiting)
        assert list(registry.requests) == [name]
        engine.submit_gate.set()
        await until(lambda: engine.num_live == 1)
        if call == "generate":
            proxy.cut()
            await until(lambda: len(engine.cancelled) == 2)
            engine.step()
            await until(lambda: engine.num_live == 1 and len(engine.submitted) == 2)
        engine.run()
        async with asyncio.timeout(30):
            result = await answer
        assert result.request_id == name[1]
        assert len(engine.submitted) == (1 if call == "add_request" else 2)
        assert (await client.get_result(name[1])).text == "once upon"
        assert len(engine.submitted) == (1 if call == "add_request" else 2)


async def test_the_same_call_again(engine: FakeEngine, aclient: AsyncClient) -> None:
    first = await aclient.generate("hi", request_id="a", max_tokens=4)
    assert await aclient.generate("hi", request_id="a", max_tokens=4) == first
    accepted = await aclient.add_request("hi", request_id="b", max_tokens=4)
    assert await aclient.add_request("hi", request_id="b", max_tokens=4) == accepted
    assert len(engine.submitted) == 2
    for call in (aclient.generate, aclient.add_request):
        with pytest.raises(headrace.AlreadyExistsError, match="other content"):
            await call("hi", request_id="a", max_tokens=5)


async def test_a_failure_after_a_choice_finished(engine: FakeEngine, aclient: AsyncClient) -> None:
    engine.script = says("a", "endless " * 100)
    engine.hold_at = 3
    async with aclient.session() as session:
        handle = session.submit("hi", n=2)
        async for chunk in handle:
            if chunk.choice_index == 1 and chunk.token_offset + len(chunk.token_ids) == 3:
                break
        engine.fail(engine.submitted[0].request_id, RequestFailure("it broke", "id"))
        engine.go_on()
        with pytest.raises(headrace.InternalError, match="it broke") as caught:
            await handle
    assert caught.value.partial is not None
    assert [choice.text for choice in caught.value.partial.choices] == ["a", "end"]
    assert caught.value.partial.finish_reason is FinishReason.STOP


async def test_all_options_reach_the_engine(engine: FakeEngine, aclient: AsyncClient) -> None:
    result = await aclient.generate(
        "hey",
        typical_p=0.5,
        no_repeat_ngram_size=3,
        allowed_token_ids=[1, 2],
        banned_token_ids=[2],
        prompt_logprobs=1,
        logprobs=1,
        logprob_token_ids=[7],
        echo=True,
        json_schema={"type": "object"},
        priority=9,
        cache_salt="s",
        max_tokens=2,
    )
    [request] = engine.submitted
    assert request.sampling.typical_p == 0.5
    assert request.sampling.no_repeat_ngram_size == 3
    assert request.sampling.allowed_token_ids == (1, 2)
    assert request.sampling.banned_token_ids == (2,)
    assert (request.priority, request.prompt_logprobs) == (9, 1)
    assert request.grammar is not None
    assert request.grammar.text == '{"type": "object"}'
    assert result.text == "heyon"
    assert result.prompt is not None
    assert [token.text for token in result.prompt.tokens] == ["h", "e", "y"]
    assert result.prompt.tokens[0].logprob is None
    assert result.prompt.tokens[1].candidates[0].id == ord("e")
    assert [one.id for one in result.tokens[0].candidates] == [ord("o"), 7]
    again = await aclient.generate("hey", cache_salt="s", max_tokens=1)
    assert again.usage.cached_tokens == 2
    bypassed = await aclient.generate(
        "hey", cache_salt="s", bypass_prefix_cache=True, json_object=True, max_tokens=1
    )
    assert bypassed.usage.cached_tokens == 0


async def test_a_wrong_form_names_its_field(aclient: AsyncClient) -> None:
    with pytest.raises(headrace.InvalidArgumentError) as caught:
        await aclient.generate("hi", json_schema="no json")
    assert caught.value.fields[0].field == "spec.structured_output.json_schema"


@pytest.fixture
async def small() -> AsyncIterator[tuple[HeadraceServer, FakeEngine]]:
    """A server that takes two requests at a time, whose engine goes on when it is told to."""
    engine = FakeEngine(script=lambda _request, _choice: [*b"once", EOS], auto=False)
    config = ServiceConfig(listen=("127.0.0.1:0",), max_open_requests=2)
    server = HeadraceServer(config, engine, tokenizer_loader=lambda info: byte_tokenizer())
    await server.start()
    await server.ready()
    yield server, engine
    await server.stop()


async def test_a_session_waits_for_room(small: tuple[HeadraceServer, FakeEngine]) -> None:
    server, engine = small
    async with AsyncClient(server.addresses[0]) as client, client.session() as session:
        handles = [session.submit("hi") for _ in range(6)]
        waiting = [asyncio.ensure_future(handle.result()) for handle in handles]
        while not all(one.done() for one in waiting):
            engine.run()
            await asyncio.sleep(0.01)
        assert [(await one).text for one in waiting] == ["once"] * 6


async def test_a_session_need_not_wait_for_room(small: tuple[HeadraceServer, FakeEngine]) -> None:
    server, engine = small
    async with (
        AsyncClient(server.addresses[0]) as client,
        client.session(room_timeout=0) as session,
    ):
        handles = [session.submit("hi") for _ in range(3)]
        with pytest.raises(headrace.ResourceExhaustedError):
            await handles[2]
        engine.run()
        assert [(await handle).text for handle in handles[:2]] == ["once"] * 2


async def test_who_waits_for_room_can_be_cancelled(
    small: tuple[HeadraceServer, FakeEngine],
) -> None:
    server, engine = small
    async with AsyncClient(server.addresses[0]) as client, client.session() as session:
        handles = [session.submit("hi") for _ in range(3)]
        await until(lambda: session._core.records[handles[2].request_id].spec is not None)
        await until(lambda: len(engine.submitted) == 2)
        handles[2].cancel()
        with pytest.raises(headrace.CallCancelledError):
            await handles[2]
        engine.run()
        assert [(await handle).text for handle in handles[:2]] == ["once"] * 2


async def test_a_session_of_threads_waits_for_room(
    small: tuple[HeadraceServer, FakeEngine],
) -> None:
    server, engine = small

    def work() -> list[str]:
        with headrace.Client(server.addresses[0]) as client, client.session() as session:
            handles = [session.submit("hi") for _ in range(6)]
            return [handle.result().text for handle in handles]

    done = asyncio.ensure_future(asyncio.to_thread(work))
    while not done.done():
        engine.run()
        await asyncio.sleep(0.01)
    assert await done == ["once"] * 6
