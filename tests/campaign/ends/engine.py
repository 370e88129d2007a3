"""The campaign's scripted engine: everything is real except the model, and a gate precedes each
step.
"""

from __future__ import annotations

import mmap
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.processes import ROOT
from engine.contract.engine_client import ModelInfo, ProgressSink
from engine.core.admission import AdmissionLimits
from engine.core.engine_core import EngineCore
from engine.core.loop import EngineLoop
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.process.local_client import LocalEngineClient
from engine.process.process_client import ProcessEngineClient
from engine.scheduler.scheduled_batch import ScheduledBatch
from tests.engine.fake_runner import FakeRunner, make_core
from tests.service.fake_engine import VOCAB_SIZE, model_info

CONTEXT = 200
NUM_BLOCKS, BLOCK_SIZE, BATCH_TOKENS = 80, 4, 16
_FOREVER = 1 << 60
_POLL_S = 0.0005


class Gate:
    """Limits how many steps may pass. Its state is in a file that two processes can share."""

    def __init__(self, path: Path) -> None:
        """Map the file, which is created if necessary. All steps may pass initially."""
        self.path = path
        if not path.exists():
            path.write_bytes(array("q", [_FOREVER, 0, 0, 0]).tobytes())
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._fields = memoryview(self._map).cast("q")

    @property
    def begun(self) -> int:
        """The number of steps that have reached the gate."""
        return self._fields[1]

    def shut(self) -> None:
        self._fields[0] = self._fields[1]

    def let(self, steps: int) -> None:
        self._fields[0] += steps

    def open(self) -> None:
        self._fields[0] = _FOREVER

    @property
    def ahead_s(self) -> int:
        """How far the engine's clock is ahead of the true one, in seconds."""
        return self._fields[2]

    @ahead_s.setter
    def ahead_s(self, seconds: int) -> None:
        self._fields[2] = seconds

    def break_target(self, request_is_broken: bool) -> None:
        self._fields[3] = request_is_broken

    @property
    def is_target_broken(self) -> bool:
        return bool(self._fields[3])

    def pass_through(self) -> int:
        """Block a step until it may pass, and return its number."""
        self._fields[1] += 1
        number = self._fields[1]
        while self._fields[0] < number:
            time.sleep(_POLL_S)
        return number

    def clock(self) -> float:
        """Return the engine's monotonic time in seconds."""
        return time.monotonic() + self._fields[2]


class ScriptedEngine(LocalEngineClient):
    """The real engine client around a scripted runner.

    Attributes:
        at_step: actions by step number, run when that step passes; an action may raise.
        core, runner, kv_cache: the engine's objects, once it has started.
    """

    core: EngineCore
    runner: FakeRunner
    kv_cache: KVCacheManager

    def __init__(
        self, gate: Gate, *, target: str = "", overlap: bool = False, max_requests: int = 2
    ) -> None:
        """`target`: the name of the request for which the gate can make sampling fail."""
        super().__init__("scripted")
        self.gate = gate
        self.at_step: dict[int, Callable[[], None]] = {}
        self._target = target
        self._overlap = overlap
        self._max_requests = max_requests

    def _build(self, bridge: Any, stage: ProgressSink) -> tuple[EngineLoop, ModelInfo]:
        stage("a scripted engine")
        self.core, self.runner, self.kv_cache = make_core(
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_batch_tokens=BATCH_TOKENS,
            max_requests=self._max_requests,
            max_context=CONTEXT,
            clock=self.gate.clock,
            policy="fair",
            overlap=self._overlap,
            late=self._overlap,
            share_blocks=True,
            host_blocks=8,
        )
        self.runner.hook = self._before_step
        limits = AdmissionLimits(
            vocab_size=VOCAB_SIZE, model_context=CONTEXT, cache_context=self.core.max_context_tokens
        )
        loop = EngineLoop(self.core, limits, sink=bridge.deliver, max_queue_size=1024)
        info = model_info(
            max_context_tokens=limits.max_context_tokens, max_running_requests=self._max_requests
        )
        return loop, info

    def _before_step(self, batch: ScheduledBatch) -> None:
        number = self.gate.pass_through()
        if self.gate.is_target_broken:
            for part in batch.requests:
                if f"/{self._target}#" in part.request.request_id:
                    self.runner.invalid.add(part.request.request_id)
        if (event := self.at_step.pop(number, None)) is not None:
            event()

    def holds(self, name: str) -> bool:
        loop = self._engine
        return loop is not None and any(f"/{name}#" in one for one in tuple(loop._live))

    def left(self) -> list[str]:
        """Return what the engine still holds although no request is live."""
        loop, core = self._engine, self.core
        assert loop is not None
        found = {
            "live requests of the loop": loop._live,
            "queued requests of the loop": loop._queued,
            "places in the queue": loop._room._entered,
            "live requests of the core": core._live.by_id,
            "waiting requests": core.scheduler.waiting,
            "running requests": core.scheduler.running,
            "histories of the runner": self.runner.histories,
            "steps in flight": self.runner.in_flight,
        }
        wrong = [f"{len(one)} {what}" for what, one in found.items() if one]
        if used := self.kv_cache.num_used_blocks:
            wrong.append(f"{used} used blocks")
        try:
            self.kv_cache.check_integrity()
        except ValueError as error:
            wrong.append(str(error))
        return wrong


class ScriptedProcess(ProcessEngineClient):
    """A scripted engine in a separate process, behind the real pipe and worker."""

    def __init__(self, gate: Gate, *, target: str = "", hang_timeout_s: float = 60.0) -> None:
        super().__init__("scripted", log_level="error", hang_timeout_s=hang_timeout_s)
        self.gate = gate
        self._program = (
            f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
            "from pathlib import Path\n"
            "from engine.process import worker\n"
            "from tests.campaign.ends.engine import Gate, ScriptedEngine\n"
            "worker.LocalEngineClient = lambda *_, **__: "
            f"ScriptedEngine(Gate(Path({str(gate.path)!r})), target={target!r})\n"
            "worker.main()"
        )

    def holds(self, name: str) -> bool:
        """Whether a live request with this name has been accepted."""
        return any(f"/{name}#" in one for one in self._admitted)

    def left(self) -> list[str]:
        """Return what this side of the pipe still holds although no request is live."""
        found = {
            "live requests of the client": self._live,
            "accepted requests of the client": self._admitted,
            "held requests of the client": self._held,
            "open calls": self._calls,
        }
        return [f"{len(one)} {what}" for what, one in found.items() if one]
