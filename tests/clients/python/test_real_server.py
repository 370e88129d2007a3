"""The client against the service itself, with an engine whose tokens are known beforehand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import headrace
import pytest
from headrace import AsyncClient, CancelStatus, FinishReason, HealthStatus, Message

from service.config import ServiceConfig
from service.server import HeadraceServer
from tests.service.fake_engine import EOS, FakeEngine, byte_tokenizer


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
    assert "top_p" in caught.value.field_violations[0].field
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
        again = session.attach("mine", from_seq=3)
        assert (await again).text == "once upon a time"


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
    async with aclient.session(lease=20) as lost:
        handle = lost.submit("hi", max_tokens=100)
        seen = []
        async for chunk in handle:
            seen.append(chunk.text)
            break
        assert lost._call is not None
        lost._call.cancel()
        with pytest.raises(headrace.UnavailableError):
            await handle
    engine.go_on()
    async with aclient.session() as session:
        resumed = session.resume(handle)
        assert "".join([chunk.text async for chunk in resumed]) == whole
        assert (await resumed).text == whole
