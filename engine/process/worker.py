"""The engine's process: its `main` is started by `ProcessEngineClient`, with the socket FD.

It drives a `LocalEngineClient` for whoever holds the other end of the socket FD, and ends when that
end is closed, or the process that started it dies: an engine never outlives its front end. What it
logs goes to its stderr, a pipe that the front end reads (`engine.logs`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable
from typing import NoReturn

import msgspec

from engine.client import Admission
from engine.config import LoadConfig
from engine.errors import EngineUnavailableError, HeadraceError
from engine.local_client import LocalEngineClient
from engine.logs import hooks, records
from engine.logs.queue import LogQueue
from engine.outputs import StepOutputs
from engine.process.messages import (
    Admitted,
    Cancel,
    Cancelled,
    Command,
    Died,
    Done,
    Finish,
    GetStats,
    Hold,
    Pause,
    Progress,
    Refused,
    ResetPrefixCache,
    Resume,
    SetLogLevel,
    Start,
    Started,
    Stats,
    Step,
    Submit,
    Unhold,
    batching_config,
    to_wire,
)
from engine.process.wire import FrameReader, FrameWriter
from engine.types import RequestId

logger = logging.getLogger(__name__)

_MAX_UNSENT_BYTES = 64 * 1024 * 1024
"""So much is kept for a front end that does not read; then it is taken for dead."""

_STDERR = 2
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h

_END_WAIT_S = 3.0
"""How long a step that runs may keep the ranks of a divided model from being told to end."""


class Worker:
    """One engine, and the front end that it works for."""

    def __init__(self, reader: FrameReader[Command], writer: FrameWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._engine: LocalEngineClient | None = None
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._submitting: dict[RequestId, asyncio.Task[Admission]] = {}

    async def run(self) -> None:
        """Load what the first message says, then serve until the front end goes away."""
        start = await self._reader.read()
        if not isinstance(start, Start):
            return
        logging.getLogger().setLevel(start.log_level.upper())
        working = asyncio.ensure_future(self._work(start))
        reading = asyncio.ensure_future(self._read())
        done, _ = await asyncio.wait({working, reading}, return_when=asyncio.FIRST_COMPLETED)
        for future in done:
            future.result()
        if self._engine is not None and start.load_config.get("tensor_parallel") == "auto":
            # Other processes wait for this one; they end well if they are told to.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._engine.close(), _END_WAIT_S)

    async def _work(self, start: Start) -> None:
        """Load; then wait for the engine's death, which ends this process."""
        try:
            engine = LocalEngineClient(
                start.model,
                batching_config(start.config),
                LoadConfig(**start.load_config),
                owns_process=True,
            )
            info = await engine.start(self._on_step, self._on_progress)
        except HeadraceError as error:
            self._writer.write(Refused(0, to_wire(error)))
        else:
            self._engine = engine
            self._writer.write(Started(info))
            self._writer.write(Died(str(await engine.wait_failed())))
        await self._writer.flush()

    async def _read(self) -> None:
        while (command := await self._reader.read()) is not None:
            task = asyncio.create_task(self._carry_out(command))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry_out(self, command: Command) -> None:
        match command:
            case Submit():
                await self._answer(command.call, self._submit(command))
            case Cancel():
                await self._answer(command.call, self._cancel(command))
            case GetStats():
                await self._answer(command.call, self._stats(command))
            case Pause() | Resume() | ResetPrefixCache() | SetLogLevel():
                await self._answer(command.call, self._control(command))
            case Finish() | Hold() | Unhold():
                if self._engine is not None:
                    await self._tell(self._engine, command)
            case Start():
                logger.error("told twice what to load; the second time is ignored")

    async def _tell(self, engine: LocalEngineClient, command: Finish | Hold | Unhold) -> None:
        """Carry out what is not answered."""
        match command:
            case Finish():
                await engine.finish(command.request_id, command.num_tokens, command.choice)
            case Hold():
                await engine.hold(command.request_id)
            case Unhold():
                await engine.unhold(command.request_id)

    async def _answer(self, call: int, answer: Awaitable[msgspec.Struct]) -> None:
        """Send a call's answer, or why there is none."""
        try:
            self._writer.write(await answer)
        except HeadraceError as error:
            self._writer.write(Refused(call, to_wire(error)))
        except Exception:
            logger.exception("a call of the front end failed")
            unknown = EngineUnavailableError("the engine could not carry this out; see its log")
            self._writer.write(Refused(call, to_wire(unknown)))

    async def _submit(self, command: Submit) -> Admitted:
        name = command.request.request_id
        submitting = asyncio.ensure_future(self._running().submit(command.request))
        self._submitting[name] = submitting
        try:
            admission = await submitting
        except asyncio.CancelledError:
            raise EngineUnavailableError("it was cancelled before it was taken in") from None
        finally:
            self._submitting.pop(name, None)
        return Admitted(command.call, admission.queue_position, admission.arrival)

    async def _cancel(self, command: Cancel) -> Cancelled:
        submitting = self._submitting.get(command.request_id)
        if submitting is not None and submitting.cancel():
            # Its form is being compiled: the engine does not have it, and never will.
            return Cancelled(command.call, was_live=False)
        return Cancelled(command.call, await self._running().cancel(command.request_id))

    async def _stats(self, command: GetStats) -> Stats:
        return Stats(command.call, await self._running().stats())

    async def _control(self, command: Pause | Resume | ResetPrefixCache | SetLogLevel) -> Done:
        match command:
            case Pause():
                await self._running().pause()
            case Resume():
                await self._running().resume()
            case ResetPrefixCache():
                await self._running().reset_prefix_cache()
            case SetLogLevel():
                logging.getLogger().setLevel(command.level.upper())
        return Done(command.call)

    def _running(self) -> LocalEngineClient:
        if self._engine is None:
            raise EngineUnavailableError("the model is still loading; try again when it is ready")
        return self._engine

    def _on_step(self, outputs: StepOutputs) -> None:
        self._writer.write(Step(outputs))
        if self._writer.pending_bytes > _MAX_UNSENT_BYTES:
            logger.error("the front end does not read; the engine's process ends")
            _exit(1)

    def _on_progress(self, line: str) -> None:
        """Called from any thread."""
        self._loop.call_soon_threadsafe(self._writer.write, Progress(line))


async def serve(connection: socket.socket) -> None:
    """Work for whoever holds the other end of a socket, until it is closed."""
    reader, writer = await asyncio.open_connection(sock=connection)
    frames = FrameReader(reader, msgspec.msgpack.Decoder(Command))
    await Worker(frames, FrameWriter(writer)).run()


def _exit(code: int) -> NoReturn:
    """End without waiting for anything: a thread that loads or computes cannot be interrupted."""
    for handler in logging.getLogger().handlers:
        handler.flush()
    os._exit(code)


def main() -> NoReturn:
    """Run the process. Its arguments are the number of an inherited, connected socket, and the id
    of the process that started it.
    """
    _, connection, parent = sys.argv
    _die_with(int(parent))
    _log_to_stderr()
    # The front end decides when this process ends: it closes the socket.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    code = 0
    try:
        asyncio.run(serve(socket.socket(fileno=int(connection))))
    except Exception:
        logger.exception("the engine's process failed")
        code = 1
    _exit(code)


def _die_with(parent: int) -> None:
    """Be killed when the process that started this one ends, even while this one is stopped and
    could not see its socket close. (Strictly, when the thread ends that started it: the front end's
    main thread.)
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_PDEATHSIG")
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


def _log_to_stderr() -> None:
    faulthandler.enable(_STDERR)
    queue = LogQueue(_STDERR, lambda count: records.encode(records.dropped(count)))
    logging.getLogger().addHandler(records.RecordHandler(queue))
    hooks.install(queue.put)
    sys.stdout = sys.stderr  # nobody reads an engine's output


if __name__ == "__main__":
    main()
