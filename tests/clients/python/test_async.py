from __future__ import annotations

import asyncio
import gc
import threading
import types
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import headrace
import pytest
from headrace import AsyncClient, AsyncSession, FinishReason, Result, UnavailableError
from headrace._async_streams import AsyncOneStream

from tests.clients.python.scripted import WAIT, ScriptedServer


async def until(server: ScriptedServer, condition: object) -> None:
    await asyncio.to_thread(server.wait_for, condition)  # type: ignore[arg-type]


async def test_generate(aclient: AsyncClient, server: ScriptedServer) -> None:
    assert (await aclient.generate("to be or not", max_tokens=2)).text == "to be"
    with pytest.raises(headrace.InvalidArgumentError) as caught:
        await aclient.generate("refuse")
    assert caught.value.reason == "BAD_FIELD"
    server.unavailable_left = 1
    assert (await aclient.generate("busy now")).text == "busy now"


async def test_a_cancelled_task_cancels_its_request(
    aclient: AsyncClient, server: ScriptedServer
) -> None:
    task = asyncio.create_task(aclient.generate("hold on", request_id="g"))
    await until(server, lambda: "g" in server.live)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(server, lambda: server.cancelled == ["g"])


async def test_stream(aclient: AsyncClient, server: ScriptedServer) -> None:
    async with aclient.stream("one two three") as stream:
        assert [chunk.text async for chunk in stream] == ["one", " two", " three"]
    assert (await stream.result()).text == "one two three"
    await until(server, lambda: not server.live)
    assert server.cancelled == []


async def test_breaking_out_cancels(aclient: AsyncClient, server: ScriptedServer) -> None:
    async with aclient.stream("hold on") as stream:
        async for chunk in stream:
            assert chunk.text == "hold"
            break
    await until(server, lambda: server.cancelled == [stream.request_id])
    assert (await stream.result()).text == "hold"


async def test_a_stream_that_is_forgotten_cancels(
    aclient: AsyncClient, server: ScriptedServer
) -> None:
    async for _ in aclient.stream("hold on", request_id="lost"):
        break
    gc.collect()
    await until(server, lambda: server.cancelled == ["lost"])


async def test_a_stream_that_has_ended_needs_no_status() -> None:
    class WithoutStatus(ScriptedServer):
        def GenerateStream(self, request: Any, context: Any) -> Iterator[Any]:
            yield from super().GenerateStream(request, context)
            over.wait(WAIT)

    over = threading.Event()
    server = WithoutStatus()
    try:
        async with AsyncClient(server.target) as client:
            stream = client.stream("one two")
            waiting = asyncio.create_task(stream.result())
            async with asyncio.timeout(WAIT):
                while not stream._fold.done:  # noqa: ASYNC110 - it has no event
                    await asyncio.sleep(0.001)
            assert not waiting.done()
        assert (await waiting).text == "one two"
    finally:
        over.set()
        server.stop()


async def test_cancelling_a_stream(aclient: AsyncClient) -> None:
    async with aclient.stream("hold on") as stream:
        await anext(stream)
        await stream.cancel()
        assert (await stream.result()).finish_reason is FinishReason.CANCELLED
    with pytest.raises(headrace.ProtocolError):
        await aclient.stream("gap b c").result()
    with pytest.raises(headrace.InternalError):
        await aclient.stream("fail").result()


async def test_a_task_cancelled_in_a_stream(aclient: AsyncClient, server: ScriptedServer) -> None:
    async def read() -> None:
        async with aclient.stream("hold on", request_id="t") as stream:
            async for _ in stream:
                pass

    task = asyncio.create_task(read())
    await until(server, lambda: "t" in server.live)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(server, lambda: server.cancelled == ["t"])


async def test_64_requests(aclient: AsyncClient) -> None:
    async with aclient.session() as session:
        results = await asyncio.gather(*(session.submit(f"number {i}") for i in range(64)))
        assert [result.text for result in results] == [f"number {i}" for i in range(64)]


async def test_session(aclient: AsyncClient, server: ScriptedServer) -> None:
    async with aclient.session(lease=3, load_interval=1) as session:
        held, refused, good = (session.submit(p) for p in ("hold on", "refuse", "a b"))
        with pytest.raises(headrace.InvalidArgumentError):
            await refused
        assert [chunk.text async for chunk in good] == ["a", " b"]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await held
        held.cancel()
        assert (await held).finish_reason is FinishReason.CANCELLED
        assert (await good.accepted()).prompt_tokens == 2
        assert session.lease == 3.0
        assert session.load == headrace.ServerLoad(running=3, waiting=2, kv_cache_usage=0.5)
        again = session.attach(good.request_id, from_seq=4, n=1)
        assert (await again).text == " b"
    with pytest.raises(headrace.UnavailableError):
        session.submit("late")


async def test_what_had_ended_is_resumed_without_the_server(
    aclient: AsyncClient, server: ScriptedServer
) -> None:
    async with aclient.session(lease=5) as session:
        good, failed = session.submit("one two"), session.submit("fail")
        whole = await good
        with pytest.raises(headrace.InternalError):
            await failed
    commands = len(server.commands)
    async with aclient.session() as session:
        resumed = session.resume(good)
        assert resumed.done
        async with asyncio.timeout(WAIT):
            assert await resumed == whole
            assert [chunk.text async for chunk in session.resume(resumed)] == ["one", " two"]
            with pytest.raises(headrace.InternalError) as caught:
                await session.resume(failed)
        assert caught.value.error_id == "e-1"
        resumed.cancel()
        assert session.live == 0
    assert len(server.commands) == commands


async def test_a_waiter_that_gave_up_leaves_nothing(aclient: AsyncClient) -> None:
    async with aclient.session() as session:
        handle = session.submit("hold on")
        assert await handle.accepted()
        async for _ in handle:
            break  # its last event before the end is here
        for wait in [handle.result, handle.result, handle.accepted, handle.result]:
            waiter = asyncio.create_task(wait())  # type: ignore[operator]
            await asyncio.sleep(0)
            waiter.cancel()
            await asyncio.wait([waiter])
        assert not handle._waiting
        waiters = [asyncio.create_task(handle.result()) for _ in range(3)]
        handle.cancel()
        assert {result.text for result in await asyncio.gather(*waiters)} == {"hold"}
        assert not handle._waiting


async def test_closing_pays_takes_nothing_more_and_still_cancels(
    aclient: AsyncClient, server: ScriptedServer
) -> None:
    async with aclient.session(initial_credit=8) as session:
        held, unwanted = session.submit("hold on"), session.submit("hold up")
        closing = [asyncio.create_task(session.close()) for _ in range(2)]
        await until(server, lambda: server.credits == [1, 1])
        for call in (session.submit, session.attach):
            with pytest.raises(headrace.UnavailableError, match="being closed"):
                call("late")
        with pytest.raises(headrace.UnavailableError, match="being closed"):
            session.resume(held)
        unwanted.cancel()
        async with asyncio.timeout(WAIT):
            assert (await unwanted).finish_reason is FinishReason.CANCELLED
            assert not any(task.done() for task in closing)
            server.release(held.request_id)
            await asyncio.gather(*closing)
    assert (await held).finish_reason is FinishReason.STOP
    assert server.cancelled == [unwanted.request_id]
    with pytest.raises(headrace.UnavailableError, match="has ended"):
        session.submit("late")


async def test_a_close_that_waits_is_cut_short(
    aclient: AsyncClient, server: ScriptedServer
) -> None:
    async with aclient.session(initial_credit=8) as session:
        cancelled = session.submit("hold on")
        closing = asyncio.create_task(session.close())
        await until(server, lambda: server.credits == [1])
        async with asyncio.timeout(WAIT):
            await session.close(cancel=True)
            await closing
        assert (await cancelled).finish_reason is FinishReason.CANCELLED
    async with aclient.session(initial_credit=8) as session:
        lost = session.submit("hold on")
        closing = asyncio.create_task(session.close())
        await until(server, lambda: server.credits == [1, 1])
        await asyncio.to_thread(server.stop)
        async with asyncio.timeout(WAIT):
            await closing
        with pytest.raises(headrace.UnavailableError):
            await lost


async def test_leaving_by_an_exception_cancels(
    aclient: AsyncClient, server: ScriptedServer
) -> None:
    handles = []

    async def leave() -> None:
        async with aclient.session() as session:
            handles.append(session.submit("hold on"))
            raise KeyError

    with pytest.raises(KeyError):
        await leave()
    assert (await handles[0]).finish_reason is FinishReason.CANCELLED


async def test_a_lost_connection_ends_all(aclient: AsyncClient, server: ScriptedServer) -> None:
    async with aclient.session() as session:
        handles = [session.submit("hold on") for _ in range(5)]
        await until(server, lambda: len(server.live) == 5)
        await asyncio.to_thread(server.stop)
        for handle in handles:
            with pytest.raises(headrace.UnavailableError):
                await handle
    with pytest.raises(headrace.UnavailableError):
        await aclient.generate("x")


async def test_a_session_that_ended_while_it_was_written_to_is_no_internal_error() -> None:
    link = types.SimpleNamespace(generation=Broken(), target="nowhere")
    async with AsyncSession(AsyncOneStream(lambda: link, ())) as session:
        with pytest.raises(UnavailableError, match="closed or lost"):
            await session.submit("hi")


class Broken:
    """A call that was being written to when it ended, by a status that nobody learns."""

    def StreamResult(self, commands: AsyncIterator[Any], metadata: Any) -> Broken:
        self.commands = commands
        return self

    async def __aiter__(self) -> AsyncIterator[Any]:
        await anext(self.commands)
        raise grpc.aio.AioRpcError(
            grpc.StatusCode.INTERNAL,
            grpc.aio.Metadata(),
            grpc.aio.Metadata(),
            "Internal error from Core",
        )
        yield

    def cancel(self) -> None:
        """It is over."""


async def test_batch(aclient: AsyncClient, server: ScriptedServer) -> None:
    server.finish_at, server.total = 8, 50
    prompts = [f"number {index}" for index in range(50)]
    outcomes = {index: o async for index, o in aclient.batch(prompts, max_in_flight=8)}
    assert [outcomes[i].text for i in range(50)] == prompts  # type: ignore[union-attr]
    assert server.peak == 8


async def test_leaving_a_batch_cancels(aclient: AsyncClient, server: ScriptedServer) -> None:
    async with aclosing(aclient.batch(["busy a", "hold c"])) as outcomes:  # type: ignore[type-var]
        async for index, outcome in outcomes:
            assert index == 0
            assert isinstance(outcome, Result)
            break
    await until(server, lambda: len(server.cancelled) == 1)


async def test_requests_that_run_by_themselves(
    aclient: AsyncClient, server: ScriptedServer
) -> None:
    accepted = await aclient.add_request("hold on")
    async with aclient.attach(accepted.request_id) as stream:
        assert (await anext(stream)).text == "hold"
        await aclient.cancel(accepted.request_id)
        assert (await stream.result()).finish_reason is FinishReason.CANCELLED
    assert (await aclient.get_result(accepted.request_id)).text == "hold"


async def test_a_result_of_several_answers_is_read_whole(
    aclient: AsyncClient, server: ScriptedServer
) -> None:
    server.answer_bytes = 200_000
    words = [letter * 90_000 for letter in "abcdefgh"]
    await aclient.add_request(" ".join(words), request_id="a")
    assert (await aclient.get_result("a", timeout=0)).text == " ".join(words)
    assert len(server.polls) > 3
    await aclient.add_request("hold on", request_id="b")
    server.on_poll = lambda: server.live["b"].send(delta={"text": " on"})
    with pytest.raises(headrace.DeadlineExceededError):
        await aclient.get_result("b", timeout=0)


async def test_the_model_and_the_server(aclient: AsyncClient) -> None:
    assert (await aclient.model()).name == "scripted"
    assert len(await aclient.tokenize("a b c")) == 3
    assert await aclient.detokenize([1]) == "x"
    await aclient.wait_until_ready()


async def test_a_closed_client(server: ScriptedServer) -> None:
    client = AsyncClient(server.target)
    assert (await client.generate("x")).text == "x"
    await client.close()
    with pytest.raises(headrace.UnavailableError, match="closed"):
        await client.generate("x")


async def test_a_token_file_is_read_again(server: ScriptedServer, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("first")
    async with headrace.AsyncClient(server.target, token_file=path) as client:
        await client.generate("a")
        path.write_text("second")
        await client.generate("a")
        path.unlink()
        with pytest.raises(headrace.InvalidArgumentError, match="token_file"):
            await client.generate("a")
    assert server.token_metadata == ["Bearer first", "Bearer second"]
