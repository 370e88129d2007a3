"""The front end's client of the engine's process, and what works there, over a socket pair: moments
that a real process passes too quickly to be met.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from headrace.v1 import generation_service_pb2 as rpc

from engine.contract.engine_client import ModelInfo, ProgressSink, StepSink
from engine.contract.errors import EngineUnavailableError
from engine.contract.outputs import StepOutputs
from engine.process import engine_messages as messages
from engine.process.process_client import ProcessEngineClient
from engine.process.wire import FrameReader, FrameWriter
from engine.process.worker import Worker
from tests.service.fake_engine import FakeEngine
from tests.service.helpers import DEADLINE_S, Harness, serving, spec, until

pytestmark = pytest.mark.asyncio


class Client(ProcessEngineClient):
    """Its process is a worker of this one."""

    def __init__(self, connection: socket.socket, engine: FakeEngine) -> None:
        super().__init__("nowhere")
        self._connection = connection
        self._fake = engine

    async def start(self, sink: StepSink, progress: ProgressSink) -> ModelInfo:
        """There is nothing to load."""
        self._sink = sink
        reader, writer = await asyncio.open_connection(sock=self._connection)
        self._writer = FrameWriter(writer)
        frames = FrameReader(reader, msgspec.msgpack.Decoder(messages.Message))
        self._tasks = [asyncio.create_task(self._read(frames, progress))]
        return self._fake.info


class Noting(FrameReader[messages.Command]):
    """Remembers which call was for which verb."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        super().__init__(reader, msgspec.msgpack.Decoder(messages.Command))
        self.asked: dict[int, str] = {}

    async def read(self) -> messages.Command | None:
        """The next message."""
        message = await super().read()
        if isinstance(message, messages.Call):
            self.asked[message.call_id] = message.verb
        return message


class Dropping(FrameWriter):
    """The answers to some verbs never arrive."""

    verbs: tuple[str, ...] = ()

    def __init__(self, writer: asyncio.StreamWriter, reader: Noting) -> None:
        super().__init__(writer)
        self._asked = reader.asked

    def write(self, message: msgspec.Struct) -> None:
        """Send a message, or not."""
        if isinstance(message, messages.Answer) and self._asked[message.call_id] in self.verbs:
            return
        super().write(message)


class Scene:
    """A server, its engine, and the worker between them."""

    def __init__(self, h: Harness, client: Client, worker: Worker, writer: Dropping) -> None:
        self.h = h
        self.client = client
        self.worker = worker
        self.writer = writer

    async def begin(self) -> Any:
        """A request, until it has reached the worker."""
        call = self.h.generation.GenerateStream(rpc.GenerateStreamRequest(spec=spec()))
        await until(lambda: self.worker._submitting or self.client._fake.num_live)
        return call


@asynccontextmanager
async def scene(engine: FakeEngine) -> AsyncIterator[Scene]:
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=theirs)
    calls = Noting(reader)
    answers = Dropping(writer, calls)
    worker = Worker(engine, calls, answers)
    await engine.start(worker._on_step, print)
    reading = asyncio.create_task(worker._read())
    client = Client(ours, engine)
    async with serving(client) as h:  # type: ignore[arg-type]
        yield Scene(h, client, worker, answers)
    await asyncio.wait_for(reading, 30)  # the front end has closed its side
    await answers.close()


async def test_a_request_that_is_cancelled_while_its_form_is_compiled_never_runs() -> None:
    engine = FakeEngine(auto=False, submit_gate=asyncio.Event())
    async with scene(engine) as there:
        call = await there.begin()
        call.cancel()
        await until(lambda: there.h.registry.live == 0)
        assert engine.submit_gate is not None
        engine.submit_gate.set()
        await until(lambda: not there.worker._submitting)
        assert not engine.submitted
        assert not there.client._live


async def test_the_process_ends_before_a_request_that_nobody_wants_has() -> None:
    """Its caller gave up before the process answered, and its end never comes."""
    engine = FakeEngine(auto=False)
    async with scene(engine) as there:
        there.writer.verbs = ("submit",)
        call = await there.begin()
        await until(lambda: engine.num_live)
        call.cancel()
        await until(lambda: engine.cancelled)
        await there.writer.close()
        await until(lambda: there.client.failure is not None)
        await until(lambda: there.h.registry.live == 0)
        assert not there.client._live


async def test_calls_that_were_not_answered_end_with_the_process() -> None:
    async with scene(FakeEngine(auto=False)) as there:
        there.writer.verbs = ("stats",)
        asking = asyncio.ensure_future(there.client.stats())
        await until(lambda: there.client._calls)
        await there.client._end_process()
        with pytest.raises(EngineUnavailableError):
            await asyncio.wait_for(asking, DEADLINE_S)


async def test_an_end_that_cannot_be_taken_is_the_engines_failure() -> None:
    """What is wrong in the front end itself ends no reader silently."""
    engine = FakeEngine(auto=False)
    async with scene(engine) as there:
        await there.begin()
        await until(lambda: engine.num_live)
        sink = there.client._sink

        def fail(step: StepOutputs) -> None:
            there.client._sink = sink
            raise KeyError(len(step.outputs))

        there.client._sink = fail
        engine.step()
        await until(lambda: there.client.failure is not None)
        assert "could not be handled" in str(there.client.failure)
