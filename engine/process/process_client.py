"""`EngineClient` over an engine in a separate process.

    event loop ── Call, for each verb ───▶ socket ──▶ engine.process.worker
    event loop ◀─ Step, Answer, … ──────── socket ◀──

The only channel to the process (`engine.process.child`) is a private socket pair. If the process
dies, the socket closes immediately. If it hangs, live requests get no steps, or an idle process
does not answer. In either case, every live request ends here with an error that says "try again",
and `start` may be called to start another process. Neither torch nor transformers is imported on
this side.

In the process, `engine.process.local_client` carries out the verbs. This side sends them, and keeps
track of those that affect whether steps are expected.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar, TypeVarTuple, Unpack

import msgspec

from engine.contract.adapters import AdapterLoad, AdapterLoaded, at_start
from engine.contract.config import ContinuousBatchingConfig, LoadConfig
from engine.contract.engine_client import (
    Admission,
    EngineClient,
    EngineVerbs,
    ModelInfo,
    ProgressSink,
    StepSink,
)
from engine.contract.errors import ConfigError, DuplicateRequestError, EngineUnavailableError
from engine.contract.outputs import RequestFailure, StepOutputs, end_of_lost
from engine.contract.request import GenerationRequest
from engine.contract.types import RequestId
from engine.logs.levels import merged
from engine.process import engine_messages as messages
from engine.process.child import PROGRAM, EngineProcess
from engine.process.exits import MENTIONS, describe_exit
from engine.process.verbs import VERBS, Verb, raw, sends_the_rest
from engine.process.wire import FrameReader, FrameWriter, frame

logger = logging.getLogger(__name__)

DEFAULT_HANG_TIMEOUT_S = 10.0
_HANG_FACTOR = 20
"""A step may take this many times as long as the slowest recent one."""
_RECENT_STEPS = 64
_WATCH_INTERVAL_S = 0.25
_BUSY_SHARE = 0.05
"""The fraction of one CPU, over `_WATCH_INTERVAL_S`, above which a process counts as computing."""
_REAP_S = 0.2
"""How long to wait for the exit code before live requests are ended."""
_LOST = "the engine failed before the request was complete; try again"

As = TypeVarTuple("As")
R = TypeVar("R")


@sends_the_rest
class ProcessEngineClient(EngineClient):
    """Runs the engine in a separate process. All methods run on one event loop. Verbs without a
    method here are sent to the process unchanged, and their answers awaited.
    """

    def __init__(
        self,
        model: str,
        config: ContinuousBatchingConfig | None = None,
        load_config: LoadConfig | None = None,
        *,
        log_level: str = "info",
        log_level_of: tuple[str, ...] = (),
        hang_timeout_s: float = DEFAULT_HANG_TIMEOUT_S,
    ) -> None:
        """Create the client; `start` starts the process.

        Args:
            model: a directory, or a hub id.
            config, load_config: as in LocalEngineClient.
            log_level: the process's log level.
            log_level_of: the log levels of modules; see `engine.logs.levels`.
            hang_timeout_s: how long the process may hang before it is ended. 0 means that it is
                never ended. If there are requests to compute, it hangs if it finishes no step for
                this long, or for 20 times the slowest recent step if that is longer. With a model
                on a CPU, it must also use no CPU time. Without such requests, it hangs if it does
                not answer for this long, and while it loads, if it is stopped for this long.

        Raises:
            ConfigError: an option cannot be sent to another process, or is out of bounds.
        """
        if not 0 <= hang_timeout_s <= 86_400:
            raise ConfigError(
                "hang_timeout", f"is {hang_timeout_s:g}; it must be between 0 (never) and 86400"
            )
        self._start_message = messages.Start(
            model,
            messages.options_of(config or ContinuousBatchingConfig()),
            messages.options_of(load_config or LoadConfig()),
            log_level,
            log_level_of,
        )
        # What a process that is started again loads: all that the one before had.
        loads = at_start(() if load_config is None else load_config.adapters)
        self._adapters = {one.name: one for one in loads}
        self._is_restartable = load_config is None or load_config.tensor_parallel == "none"
        self._hang_timeout_s = hang_timeout_s
        self._sink: StepSink | None = None
        self._program = PROGRAM
        self._launched: tuple[EngineProcess, socket.socket] | None = None
        self._process: EngineProcess | None = None
        self._writer: FrameWriter | None = None
        self._started: asyncio.Future[ModelInfo] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._calls: dict[int, tuple[Verb, asyncio.Future[Any]]] = {}
        self._call_ids = itertools.count(1)
        self._live: dict[RequestId, float] = {}
        self._admitted: set[RequestId] = set()  # of the live ones: only these make steps,
        self._held: set[RequestId] = set()  # but for these of them
        self._durations: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._last_step = self._last_heard = 0.0
        self._failure: Exception | None = None
        self._failed = asyncio.Event()
        self._closing = self._is_paused = self._computes_on_cpu = False

    # ---- life ----------------------------------------------------------------------------------

    def launch(self) -> None:
        """Start the process, which loads while the caller prepares for `start`. Call it in the main
        thread.
        """
        self._launched = _, ours = EngineProcess.spawn(self._program)
        with contextlib.suppress(ConnectionError):  # it has ended, which its socket's reader sees
            ours.sendall(b"".join(frame(self._starting(), msgspec.msgpack.Encoder())))

    def _starting(self) -> messages.Start:
        adapters = tuple(self._adapters.values())
        return msgspec.structs.replace(self._start_message, adapters=adapters)

    async def start(self, sink: StepSink, progress: ProgressSink) -> ModelInfo:
        """Start a process and load the model in it; see the protocol.

        This may be called again once the previous process has died.

        Raises:
            ModelRefusedError, InsufficientMemoryError, ConfigError: with the reason.
            EngineUnavailableError: the process died while loading.
        """
        if self._launched is None:
            await self._end_process()  # of the previous process
            progress("starting the engine's process")
        self._sink, self._failure, self._closing = sink, None, False
        self._is_paused = False
        self._failed.clear()
        self._durations.clear()
        loop = asyncio.get_running_loop()
        self._started = loop.create_future()
        is_told = self._launched is not None
        self._process, ours = self._launched or EngineProcess.spawn(self._program)
        self._launched = None
        reader, writer = await asyncio.open_connection(sock=ours)
        self._writer = FrameWriter(writer)
        if not is_told:
            self._writer.write(self._starting())
        frames = FrameReader(reader, msgspec.msgpack.Decoder(messages.Message))
        self._last_heard = time.monotonic()
        self._tasks = [
            loop.create_task(self._read(frames, progress)),
            loop.create_task(self._watch(self._process)),
        ]
        try:
            info = await self._started
        except BaseException:
            await self._end_process()
            raise
        self._adapters = {
            one.name: replace(self._adapters[one.name], digest=one.digest) for one in info.adapters
        }
        return info

    async def close(self) -> None:
        """Stop immediately; see the protocol."""
        self._closing = True
        if self._process is not None:
            self._fail("the engine was stopped before the request was complete; try again")
        await self._end_process()

    @property
    def is_restartable(self) -> bool:
        """Whether another process can be started. False if the model is split, because the other
        ranks have then ended, too.
        """
        return self._is_restartable

    @property
    def failure(self) -> Exception | None:
        """The reason why the engine is dead, or None if it is not."""
        return self._failure

    async def wait_failed(self) -> Exception:
        """Wait until the engine is dead; see the protocol."""
        await self._failed.wait()
        return self._failure or EngineUnavailableError("the engine has failed")

    @property
    def pid(self) -> int | None:
        """The process id, or None if no process was started."""
        return None if self._process is None else self._process.pid

    # ---- calls ---------------------------------------------------------------------------------

    async def submit(self, request: GenerationRequest) -> Admission:
        """Accept a request; see the protocol."""
        if request.request_id in self._live:
            raise DuplicateRequestError(request.request_id)
        now = time.monotonic()
        if not self._live:
            self._last_heard = now
        self._live[request.request_id] = now
        try:
            admission = await self._call(EngineVerbs.submit, request)
        except Exception:
            # But not if this is cancelled: the process may have the request, which is then
            # forgotten at `cancel`, at its end or when the process dies.
            self._forget(request.request_id)
            raise
        if request.request_id in self._live:  # else it has already ended
            if not self._makes_steps:
                self._last_step = time.monotonic()
            self._admitted.add(request.request_id)
        return admission

    async def cancel(self, request_id: RequestId) -> bool:
        """End a request; see the protocol."""
        if self._writer is None or self._failure is not None:
            return False
        was_live = await self._call(EngineVerbs.cancel, request_id)
        if not was_live and request_id not in self._admitted:
            self._forget(request_id)  # one that was accepted has ended, and its end is on its way
        return was_live

    async def finish(self, request_id: RequestId, num_tokens: int, choice: int = 0) -> None:
        """End a choice after its first `num_tokens` tokens; see the protocol."""
        if self._failure is None:
            self._tell(EngineVerbs.finish, request_id, num_tokens, choice)

    async def hold(self, request_id: RequestId) -> None:
        """Exclude a request from all steps; see the protocol."""
        if self._writer is not None and request_id in self._admitted:
            self._held.add(request_id)
            self._tell(EngineVerbs.hold, request_id)

    async def unhold(self, request_id: RequestId) -> None:
        """Let a held request continue; see the protocol."""
        if self._writer is not None and request_id in self._held:
            if not self._makes_steps:
                self._last_step = time.monotonic()
            self._held.discard(request_id)
            self._tell(EngineVerbs.unhold, request_id)

    async def pause(self) -> None:
        """Stop taking steps until `resume`; see the protocol."""
        await self._call(EngineVerbs.pause)
        self._is_paused = True

    async def resume(self) -> None:
        """End a pause; see the protocol."""
        await self._call(EngineVerbs.resume)
        self._is_paused = False
        self._last_step = time.monotonic()  # the pause itself does not count as a hang

    async def load_adapter(self, load: AdapterLoad) -> AdapterLoaded:
        """Load an adapter; see the protocol. Later processes load it, too."""
        loaded: AdapterLoaded = await self._call(EngineVerbs.load_adapter, load)
        self._adapters[load.name] = replace(load, digest=loaded.adapter.digest)
        for name in loaded.evicted:
            self._adapters.pop(name, None)
        return loaded

    async def unload_adapter(self, name: str, timeout_s: float | None) -> int:
        """Unload an adapter; see the protocol. Later processes do not load it."""
        requests: int = await self._call(EngineVerbs.unload_adapter, name, timeout_s)
        self._adapters.pop(name, None)
        return requests

    async def set_log_level(self, level: str, level_of: tuple[str, ...] = ()) -> None:
        """Set the log level of this process and of later ones; see the protocol."""
        start = self._start_message
        self._start_message = msgspec.structs.replace(
            start, log_level=level, log_level_of=merged(start.log_level_of, level_of)
        )
        if self._writer is not None and self._failure is None:
            with contextlib.suppress(EngineUnavailableError):  # dead: the next one has this level
                await self._call(EngineVerbs.set_log_level, level, level_of)

    async def _call(
        self, verb: Callable[[EngineVerbs, Unpack[As]], Awaitable[R]], *arguments: *As
    ) -> R:
        if self._failure is not None:
            raise EngineUnavailableError("the engine has failed and is being started again")
        if self._writer is None:
            raise EngineUnavailableError("the model is still loading; try again when it is ready")
        call_id = next(self._call_ids)
        answer: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = VERBS[verb], answer
        try:
            self._tell(verb, *arguments, call_id=call_id)
            return await answer
        finally:
            self._calls.pop(call_id, None)

    def _tell(
        self,
        verb: Callable[[EngineVerbs, Unpack[As]], Awaitable[object]],
        *arguments: *As,
        call_id: int = 0,
    ) -> None:
        """Send a verb. call_id: the id of the answer, or 0 if none is expected."""
        if self._writer is not None:
            self._writer.write(messages.Call(call_id, VERBS[verb].name, raw(arguments)))

    # ---- what the process says -----------------------------------------------------------------

    async def _read(self, frames: FrameReader[messages.Message], progress: ProgressSink) -> None:
        """Handle messages until the process is gone."""
        reason = "its process ended"
        try:
            while (message := await frames.read()) is not None:
                if isinstance(message, messages.Died):
                    reason = message.message
                    break
                self._take(message, progress)
        except (ValueError, msgspec.DecodeError):
            logger.exception("the engine's process sent data that is not a message")
            reason = "its process sent data that is not a message"
        except Exception:
            logger.exception("a message of the engine's process could not be handled")
            reason = "a message of its process could not be handled"
        if self._process is not None and not self._closing:
            with contextlib.suppress(TimeoutError):
                code = await asyncio.wait_for(self._process.exit_code(), _REAP_S)
                reason += f" ({describe_exit(code)})"
        failure = EngineUnavailableError(f"the engine has failed: {reason}").naming(*MENTIONS)
        self._fail(_LOST, failure)

    def _take(self, message: messages.Message, progress: ProgressSink) -> None:
        self._last_heard = time.monotonic()
        match message:
            case messages.Step():
                self._take_step(message.outputs)
            case messages.StartProgress():
                progress(message.text())
            case messages.Started():
                self._computes_on_cpu = message.info.device.startswith("cpu")
                if self._started is not None and not self._started.done():
                    self._started.set_result(message.info)
            case messages.Refused(0):
                if self._started is not None and not self._started.done():
                    self._started.set_exception(messages.from_wire(message.error))
            case messages.Refused() | messages.Answer() if message.call_id in self._calls:
                verb, answer = self._calls[message.call_id]
                if answer.done():
                    pass  # the caller no longer waits
                elif isinstance(message, messages.Refused):
                    answer.set_exception(messages.from_wire(message.error))
                else:
                    answer.set_result(verb.answer.decode(message.value))

    def _take_step(self, outputs: StepOutputs) -> None:
        self._last_step = time.monotonic()
        if outputs.step is not None:
            self._durations.append(outputs.step.duration_s)
        for output in outputs.outputs:
            if output.ends_request:
                self._forget(output.request_id)
        if self._sink is not None:
            self._sink(outputs)

    def _forget(self, request_id: RequestId) -> None:
        self._live.pop(request_id, None)
        self._admitted.discard(request_id)
        self._held.discard(request_id)

    @property
    def _makes_steps(self) -> bool:
        return len(self._admitted) > len(self._held)

    async def _watch(self, process: EngineProcess) -> None:
        """End the process if it hangs: if it has requests but takes no steps, or sends nothing at
        all.

        If no request needs a step (the process is idle, paused or compiling grammars, or all
        requests are held), it is sent a call that it can answer immediately.

        On a CPU, a step of a large model with a long prompt may take minutes, and no step has been
        measured before the first. So a process that uses CPU time does not count as hung, however
        long it takes. (A process that waits for a GPU may also use CPU time, so this does not apply
        there.) A process that is loading may be silent and wait for disks for minutes, so it counts
        as hung only if it is stopped.

        The process must look hung twice in a row, because after the whole machine has stood still
        there may be messages from the process that have not been read yet. The state of the process
        is read only when it is silent, because this takes up to 1 ms.
        """
        suspected = False
        used: float | None = None  # at the last look, if it was silent then
        while self._hang_timeout_s > 0:
            await asyncio.sleep(_WATCH_INTERVAL_S)
            limit = max(self._hang_timeout_s, _HANG_FACTOR * max(self._durations, default=0.0))
            waits_for_step = self._makes_steps and not self._is_paused
            if self._is_loading:
                if not process.look()[1]:
                    self._last_heard = time.monotonic()
            elif not waits_for_step:
                self._tell(EngineVerbs.stats, call_id=next(self._call_ids))
            last = self._last_step if waits_for_step else self._last_heard
            if time.monotonic() - last <= limit:
                suspected, used = False, None
                continue
            used_before = used
            used, _ = process.look()
            may_compute = self._computes_on_cpu and (
                used_before is None or used - used_before > _BUSY_SHARE * _WATCH_INTERVAL_S
            )
            if suspected and not may_compute:
                logger.error("the engine was silent for %.1f s; its process is ended", limit)
                process.kill()
                return
            suspected = not may_compute

    @property
    def _is_loading(self) -> bool:
        return self._started is not None and not self._started.done()

    # ---- ends ----------------------------------------------------------------------------------

    def _fail(self, what: str, failure: Exception | None = None) -> None:
        """Fail everything that waits for the process, which is gone or about to be. Only the first
        call has an effect.
        """
        if self._failure is not None:
            return
        self._failure = failure or EngineUnavailableError(what)
        if not self._closing:
            logger.error("%s", self._failure)
        error = EngineUnavailableError(what)
        for waiting in (self._started, *(answer for _, answer in self._calls.values())):
            if waiting is not None and not waiting.done():
                waiting.set_exception(self._failure if waiting is self._started else error)
        self._end_live(what)
        if not self._closing:
            self._failed.set()

    def _end_live(self, what: str) -> None:
        """End every live request. Both processes use the same monotonic clock."""
        now = time.monotonic()
        failure = RequestFailure(what, secrets.token_hex(6), retryable=True)
        outputs = tuple(
            end_of_lost(request_id, failure, arrival, now)
            for request_id, arrival in self._live.items()
        )
        self._live.clear()
        self._admitted.clear()
        self._held.clear()
        if outputs and self._sink is not None:
            self._sink(StepOutputs(now, outputs))

    async def _end_process(self) -> None:
        """Close the socket, which ends the process; kill the process if it does not end."""
        if self._launched is not None:
            (self._process, ours), self._launched = self._launched, None
            ours.close()
        process, self._process = self._process, None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        for _, answer in self._calls.values():
            if not answer.done():
                answer.set_exception(EngineUnavailableError(_LOST))
        if self._writer is not None:
            await self._writer.close()
            self._writer = None
        if process is not None:
            await process.end()
