"""The engine's process. `ProcessEngineClient` starts its `main` with the file descriptor of a
socket.

It drives a `LocalEngineClient` for the process at the other end of the socket. It ends when that
end is closed or the process that started it dies, so an engine never outlives its front end. Its
log goes to stderr, a pipe that the front end reads (`engine.logs`).
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
from collections.abc import Awaitable, Callable
from typing import NoReturn

import msgspec

from engine.contract.config import LoadConfig
from engine.contract.engine_client import Admission, EngineClient
from engine.contract.errors import EngineUnavailableError, HeadraceError
from engine.contract.outputs import StepOutputs
from engine.contract.request import GenerationRequest
from engine.contract.types import RequestId
from engine.logs import hooks, records
from engine.logs.levels import set_levels
from engine.logs.queue import LogQueue
from engine.process.engine_messages import (
    Answer,
    Call,
    Command,
    Died,
    Refused,
    Start,
    Started,
    StartProgress,
    Step,
    batching_config,
    to_wire,
)
from engine.process.local_client import LocalEngineClient
from engine.process.verbs import VERBS, Verb, raw
from engine.process.wire import FrameReader, FrameWriter

logger = logging.getLogger(__name__)

_MAX_UNSENT_BYTES = 64 * 1024 * 1024
"""The maximum amount of data buffered for a front end that does not read. If there is more, the
front end counts as dead.
"""

_STDERR = 2
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h

_END_WAIT_S = 3.0
"""How long to wait for a running step before the ranks of a split model are told to end."""

Method = Callable[..., Awaitable[object]]


class Worker:
    """One engine, and the front end that it serves."""

    def __init__(
        self, engine: EngineClient, reader: FrameReader[Command], writer: FrameWriter
    ) -> None:
        self._engine = engine
        self._reader = reader
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._submitting: dict[RequestId, asyncio.Task[Admission]] = {}
        self._has_loaded = False
        ours: dict[str, Method] = {"submit": self._submit, "cancel": self._cancel}
        self._verbs: dict[str, tuple[Verb, Method]] = {
            verb.name: (verb, ours.get(verb.name) or getattr(engine, verb.name))
            for verb in VERBS.values()
        }

    async def run(self, *, close: bool) -> None:
        """Load the model, then serve until the front end goes away.

        close: whether to close the engine at the end, if it has loaded.
        """
        working = asyncio.ensure_future(self._work())
        reading = asyncio.ensure_future(self._read())
        done, _ = await asyncio.wait({working, reading}, return_when=asyncio.FIRST_COMPLETED)
        for future in done:
            future.result()
        if close and self._has_loaded:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._engine.close(), _END_WAIT_S)

    async def _work(self) -> None:
        """Load the model, then wait for the engine to die, which ends this process."""
        try:
            info = await self._engine.start(self._on_step, self._on_progress)
        except HeadraceError as error:
            self._writer.write(Refused(0, to_wire(error)))
        else:
            self._has_loaded = True
            self._writer.write(Started(info))
            self._writer.write(Died(str(await self._engine.wait_failed())))
        await self._writer.flush()

    async def _read(self) -> None:
        """Carry out each call in a task. The tasks start in the order of the calls.

        Raises:
            ValueError: a message is not a call of a verb.
        """
        while (command := await self._reader.read()) is not None:
            if isinstance(command, Start):
                logger.error("received a second Start message; it is ignored")
                continue
            if command.verb not in self._verbs:
                raise ValueError(f"{command.verb!r} is not a verb of the engine")
            verb, method = self._verbs[command.verb]
            result = method(*verb.arguments.decode(command.arguments))
            task = asyncio.create_task(self._answer(command, result))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, call: Call, result: Awaitable[object]) -> None:
        reply: Answer | Refused
        try:
            reply = Answer(call.call_id, raw(await result))
        except HeadraceError as error:
            reply = Refused(call.call_id, to_wire(error))
        except Exception:
            logger.exception("a call of the front end failed")
            unknown = EngineUnavailableError("the engine could not carry this out; see its log")
            reply = Refused(call.call_id, to_wire(unknown))
        if call.call_id:
            self._writer.write(reply)

    async def _submit(self, request: GenerationRequest) -> Admission:
        submitting = asyncio.ensure_future(self._engine.submit(request))
        self._submitting[request.request_id] = submitting
        try:
            return await submitting
        except asyncio.CancelledError:
            raise EngineUnavailableError("it was cancelled before it was accepted") from None
        finally:
            self._submitting.pop(request.request_id, None)

    async def _cancel(self, request_id: RequestId) -> bool:
        submitting = self._submitting.get(request_id)
        if submitting is not None and submitting.cancel():
            # Its grammar is being compiled: the engine does not have the request, and never will.
            return False
        return await self._engine.cancel(request_id)

    def _on_step(self, outputs: StepOutputs) -> None:
        self._writer.write(Step(outputs))
        if self._writer.pending_bytes > _MAX_UNSENT_BYTES:
            logger.error("the front end does not read; the engine's process ends")
            _exit(1)

    def _on_progress(self, line: str) -> None:
        """Send a line of progress. Called from any thread."""
        self._loop.call_soon_threadsafe(self._writer.write, StartProgress.of(line))


async def serve(connection: socket.socket) -> None:
    """Serve the process at the other end of a socket until it is closed.

    The first message says what to load.
    """
    stream, writer = await asyncio.open_connection(sock=connection)
    frames, answers = FrameReader(stream, msgspec.msgpack.Decoder(Command)), FrameWriter(writer)
    start = await frames.read()
    if not isinstance(start, Start):
        return
    logging.getLogger().setLevel(start.log_level.upper())
    set_levels(start.log_level_of)
    try:
        config, load_config = batching_config(start.config), LoadConfig(**start.load_config)
    except HeadraceError as error:
        answers.write(Refused(0, to_wire(error)))
        await answers.flush()
        return
    engine = LocalEngineClient(
        start.model, config, load_config, owns_process=True, adapters=start.adapters
    )
    # Other ranks may wait for this one; they end cleanly if they are told to.
    await Worker(engine, frames, answers).run(close=load_config.tensor_parallel == "auto")


def _exit(code: int) -> NoReturn:
    """End the process immediately, because a thread that loads or computes cannot be
    interrupted.
    """
    for handler in logging.getLogger().handlers:
        handler.flush()
    os._exit(code)


def main() -> NoReturn:
    """Run the process.

    Its arguments are the file descriptor of an inherited, connected socket, and the id of the
    process that started it.
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
    """Ask the kernel to kill this process when its parent ends.

    This works even if this process is stopped and cannot see its socket close. Strictly speaking,
    the kernel kills it when the thread that started it ends, which is the front end's main thread.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_PDEATHSIG")
    if os.getppid() != parent:  # the parent has already ended
        os._exit(1)


def _log_to_stderr() -> None:
    faulthandler.enable(_STDERR)
    queue = LogQueue(_STDERR, lambda count: records.encode(records.dropped(count)))
    logging.getLogger().addHandler(records.RecordHandler(queue))
    hooks.install(queue.put)
    sys.stdout = sys.stderr  # nobody reads an engine's output


if __name__ == "__main__":
    main()
