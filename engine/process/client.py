"""`EngineClient` over an engine in a process of its own.

    event loop ── Call, for each verb ───▶ socket ──▶ engine.process.worker
    event loop ◀─ Step, Answer, … ──────── socket ◀──

The process is started by exec, with one end of a private socket pair as its only channel. Its
death shows at once (the socket closes); a hang shows because live requests get no step, or because
an idle process does not answer. Either way every live request ends here with an error that says
"try again", and `start` may be called for another process. Its stderr is a pipe that is read here:
what it logs becomes records of this process' log, and what it wrote before it crashed is not lost.
Neither torch nor transformers is imported on this side.

What a verb does is `engine.local_client`'s affair, in the process. Here it is sent, and noted where
it changes whether steps are to be expected.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
import socket
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple, Unpack

import msgspec

import engine
from engine.client import Admission, EngineClient, EngineVerbs, ModelInfo, ProgressSink, StepSink
from engine.config import ContinuousBatchingConfig, LoadConfig, engine_environ
from engine.errors import ConfigError, DuplicateRequestError, EngineUnavailableError
from engine.logs import records
from engine.logs.lines import LineReader, open_pipe
from engine.outputs import RequestFailure, StepOutputs, end_of_lost
from engine.process import messages
from engine.process.verbs import VERBS, Verb, raw, sends_the_rest
from engine.process.wire import FrameReader, FrameWriter
from engine.request import GenerationRequest
from engine.types import RequestId

logger = logging.getLogger(__name__)

DEFAULT_HANG_TIMEOUT_S = 10.0
_HANG_FACTOR = 20
"""A step may take so many times the slowest of the recent ones."""
_RECENT_STEPS = 64
_WATCH_INTERVAL_S = 0.25
_BUSY_SHARE = 0.05
"""Of one CPU, over `_WATCH_INTERVAL_S`: a process that used more of it computes."""
_EXIT_GRACE_S = 5.0
_LAST_WORDS_S = 0.5
"""How long the end of an ended process' stderr is waited for: its children may have it too."""
_REAP_S = 0.2
"""How long the exit code is waited for, before live requests are told."""
_LOST = "the engine failed before the request was complete; try again"

_PROGRAM = (
    f"import sys; sys.path.insert(0, {str(Path(engine.__file__).parents[1])!r}); "
    "from engine.process.worker import main; main()"
)
"""Whatever the new process would find by itself, it runs the code of this one."""

As = TypeVarTuple("As")
R = TypeVar("R")


@sends_the_rest
class ProcessEngineClient(EngineClient):
    """See the module and `engine.client.EngineClient`. All methods run on one event loop. The verbs
    that are not here are sent as they are, and their answers awaited.
    """

    def __init__(
        self,
        model: str,
        config: ContinuousBatchingConfig | None = None,
        load_config: LoadConfig | None = None,
        *,
        log_level: str = "info",
        hang_timeout_s: float = DEFAULT_HANG_TIMEOUT_S,
    ) -> None:
        """Prepare; nothing is started before `start`.

        Args:
            model: a directory, or a hub id.
            config, load_config: as in LocalEngineClient.
            log_level: of the process.
            hang_timeout_s: the process is ended if, with requests to compute, no step is done for
                this long or 20 times the slowest recent step, whichever is longer; with a model on
                a CPU only if it does not compute meanwhile. Without such requests: if it answers
                nothing for as long; while it loads: if it is stopped for as long. 0: never.

        Raises:
            ConfigError: an option cannot be sent to another process, or is out of its bounds.
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
        )
        self._is_restartable = load_config is None or load_config.tensor_parallel == "none"
        self._hang_timeout_s = hang_timeout_s
        self._sink: StepSink | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._stderr: LineReader | None = None
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

    async def start(self, sink: StepSink, progress: ProgressSink) -> ModelInfo:
        """Start a process and load the model in it; see the protocol. May be called again once the
        process before has died.

        Raises:
            ModelRefusedError, InsufficientMemoryError, ConfigError: with the reason.
            EngineUnavailableError: the process died while it loaded.
        """
        await self._end_process()  # of the one before
        progress("starting the engine's process")
        self._sink, self._failure, self._closing = sink, None, False
        self._is_paused = False
        self._failed.clear()
        self._durations.clear()
        loop = asyncio.get_running_loop()
        self._started = loop.create_future()
        ours = await self._spawn()
        reader, writer = await asyncio.open_connection(sock=ours)
        self._writer = FrameWriter(writer)
        self._writer.write(self._start_message)
        frames = FrameReader(reader, msgspec.msgpack.Decoder(messages.Message))
        self._last_heard = time.monotonic()
        self._tasks = [
            loop.create_task(self._read(frames, progress)),
            loop.create_task(self._watch()),
        ]
        try:
            return await self._started
        except BaseException:
            await self._end_process()
            raise

    async def _spawn(self) -> socket.socket:
        """Start the process; returns this side's end of the socket pair."""
        reading, stderr = open_pipe()
        self._stderr = LineReader(reading, _log)  # ends when nobody has the other end any more
        try:
            ours, theirs = socket.socketpair()
            with theirs:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-P",  # nothing is imported from the working directory
                    "-c",
                    _PROGRAM,
                    str(theirs.fileno()),
                    str(os.getpid()),
                    env=engine_environ(),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=stderr,
                    stderr=stderr,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,  # a terminal's Ctrl-C is the front end's affair
                )
        finally:
            os.close(stderr)
        ours.setblocking(False)
        return ours

    async def close(self) -> None:
        """Stop at once; see the protocol."""
        self._closing = True
        if self._process is not None:
            self._fail("the engine was stopped before the request was complete; try again")
        await self._end_process()

    @property
    def is_restartable(self) -> bool:
        """Whether another process can be started: not if the model is divided, since then the
        other ranks have ended too.
        """
        return self._is_restartable

    @property
    def failure(self) -> Exception | None:
        """Why the engine is dead, if it is."""
        return self._failure

    async def wait_failed(self) -> Exception:
        """Wait until the engine is dead; see the protocol."""
        await self._failed.wait()
        return self._failure or EngineUnavailableError("the engine has failed")

    @property
    def pid(self) -> int | None:
        """The process's id, None if none was started."""
        return None if self._process is None else self._process.pid

    # ---- calls ---------------------------------------------------------------------------------

    async def submit(self, request: GenerationRequest) -> Admission:
        """Take a request in; see the protocol."""
        if request.request_id in self._live:
            raise DuplicateRequestError(request.request_id)
        now = time.monotonic()
        if not self._live:
            self._last_heard = now
        self._live[request.request_id] = now
        try:
            admission = await self._call(EngineVerbs.submit, request)
        except Exception:
            # Not where this is cancelled: the process may have the request then, and `cancel`, its
            # end or the process's death forgets it.
            self._forget(request.request_id)
            raise
        if request.request_id in self._live:  # else it has ended already
            if not self._makes_steps:
                self._last_step = time.monotonic()
            self._admitted.add(request.request_id)
        return admission

    async def cancel(self, request_id: RequestId) -> bool:
        """End a request; see the protocol."""
        if self._writer is None or self._failure is not None:
            return False
        was_live = await self._call(EngineVerbs.cancel, request_id)
        if not was_live:
            self._forget(request_id)
        return was_live

    async def finish(self, request_id: RequestId, num_tokens: int, choice: int = 0) -> None:
        """End a choice as of its first tokens; see the protocol."""
        if self._failure is None:
            self._tell(EngineVerbs.finish, request_id, num_tokens, choice)

    async def hold(self, request_id: RequestId) -> None:
        """Take no step for a request; see the protocol."""
        if self._writer is not None and request_id in self._admitted:
            self._held.add(request_id)
            self._tell(EngineVerbs.hold, request_id)

    async def unhold(self, request_id: RequestId) -> None:
        """Let a held request go on; see the protocol."""
        if self._writer is not None and request_id in self._held:
            if not self._makes_steps:
                self._last_step = time.monotonic()
            self._held.discard(request_id)
            self._tell(EngineVerbs.unhold, request_id)

    async def pause(self) -> None:
        """Take no further step until `resume`; see the protocol."""
        await self._call(EngineVerbs.pause)
        self._is_paused = True

    async def resume(self) -> None:
        """End a pause; see the protocol."""
        await self._call(EngineVerbs.resume)
        self._is_paused = False
        self._last_step = time.monotonic()  # the time of the pause does not count as a hang

    async def set_log_level(self, level: str) -> None:
        """Set what the process logs, and those after it; see the protocol."""
        self._start_message = msgspec.structs.replace(self._start_message, log_level=level)
        if self._writer is not None and self._failure is None:
            with contextlib.suppress(EngineUnavailableError):  # it has died: the next one knows
                await self._call(EngineVerbs.set_log_level, level)

    async def _call(
        self, verb: Callable[[EngineVerbs, Unpack[As]], Awaitable[R]], *arguments: *As
    ) -> R:
        """Have a verb carried out, and wait for its answer."""
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
        """Have a verb carried out; call_id: of the answer, 0 if there is to be none."""
        if self._writer is not None:
            self._writer.write(messages.Call(call_id, VERBS[verb].name, raw(arguments)))

    # ---- what the process says -----------------------------------------------------------------

    async def _read(self, frames: FrameReader[messages.Message], progress: ProgressSink) -> None:
        """Take messages until the process is gone."""
        reason = "its process ended"
        try:
            while (message := await frames.read()) is not None:
                if isinstance(message, messages.Died):
                    reason = message.message
                    break
                self._take(message, progress)
        except (ValueError, msgspec.DecodeError):
            logger.exception("the engine's process sent what is no message")
            reason = "its process sent what is no message"
        except Exception:
            logger.exception("a message of the engine's process could not be taken")
            reason = "a message of its process could not be taken"
        if self._process is not None and not self._closing:
            with contextlib.suppress(TimeoutError):
                code = await asyncio.wait_for(self._process.wait(), _REAP_S)
                reason += f" (exit code {code})"
        self._fail(_LOST, EngineUnavailableError(f"the engine has failed: {reason}"))

    def _take(self, message: messages.Message, progress: ProgressSink) -> None:
        self._last_heard = time.monotonic()
        match message:
            case messages.Step():
                self._take_step(message.outputs)
            case messages.Progress():
                progress(message.line)
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
                    pass  # who asked waits no more
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
        """Whether there are requests that the engine has to compute."""
        return len(self._admitted) > len(self._held)

    async def _watch(self) -> None:
        """End the process if it hangs: if it has taken requests in and makes no step of them, or
        says nothing at all. While nothing waits for a step (it is idle, or compiles forms, or is
        paused, or all its requests are held), it is asked for something that it has at hand.

        On a CPU a step of a large model and a long prompt may take minutes, and the first one comes
        before any was measured: there a process that computes does not hang, however long it takes.
        (Who waits for a GPU may look busy, so this says nothing there.) While it loads it may say
        nothing for minutes, and wait for disks meanwhile: then it hangs only if it is stopped.

        It is looked at twice, so that a machine that stood still does not make it look hung before
        what it sent meanwhile was read; and only once it is silent, for a look takes up to 1 ms.
        """
        suspected = False
        used: float | None = None  # at the last look, if it was silent then
        while self._hang_timeout_s > 0:
            await asyncio.sleep(_WATCH_INTERVAL_S)
            limit = max(self._hang_timeout_s, _HANG_FACTOR * max(self._durations, default=0.0))
            waits_for_step = self._makes_steps and not self._is_paused
            if self._is_loading:
                if not self._look()[1]:
                    self._last_heard = time.monotonic()
            elif not waits_for_step:
                self._tell(EngineVerbs.stats, call_id=next(self._call_ids))
            last = self._last_step if waits_for_step else self._last_heard
            if time.monotonic() - last <= limit:
                suspected, used = False, None
                continue
            used_before = used
            used, _ = self._look()
            may_compute = self._computes_on_cpu and (
                used_before is None or used - used_before > _BUSY_SHARE * _WATCH_INTERVAL_S
            )
            if suspected and not may_compute and self._process is not None:
                logger.error("the engine was silent for %.1f s; its process is ended", limit)
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                return
            suspected = not may_compute

    @property
    def _is_loading(self) -> bool:
        return self._started is not None and not self._started.done()

    def _look(self) -> tuple[float, bool]:
        """CPU seconds that the process has used, and whether it is stopped (as by SIGSTOP); 0 and
        False if that cannot be known.
        """
        try:
            status = Path(f"/proc/{self.pid}/stat").read_text(errors="replace")
        except OSError:
            return 0.0, False
        state, *fields = status.rpartition(")")[2].split()
        user, system = fields[10:12]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK"), state == "T"

    # ---- ends ----------------------------------------------------------------------------------

    def _fail(self, what: str, failure: Exception | None = None) -> None:
        """The process is gone, or will be: everything that waits for it ends, once."""
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
        """Give every live request its end. Times are of the machine's one monotonic clock."""
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
        """Close the socket, which ends the process; kill it if that does not help."""
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
        if process is None:
            return
        try:
            await asyncio.wait_for(process.wait(), _EXIT_GRACE_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if self._stderr is not None:
            await asyncio.to_thread(self._stderr.join, _LAST_WORDS_S)
            self._stderr = None


def _log(line: str) -> None:
    """Log what the process wrote: it has judged already whether it is to be logged."""
    record = records.decode(line, "engine")
    logging.getLogger(record.name).handle(record)
