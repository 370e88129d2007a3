"""A manager around a scripted runner whose steps a test can hold back, one by one."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from engine.api.manager import ContinuousBatchingManager
from engine.api.results import GenerationOutput
from engine.contract.outputs import StepOutputs
from engine.core.admission import AdmissionLimits
from engine.core.engine_core import EngineCore
from engine.core.loop import EngineLoop
from engine.scheduler.scheduled_batch import ScheduledBatch
from tests.engine.fake_runner import VOCAB, make_core

WAIT = 20.0
"""Seconds after which a test gives up; nothing waits that long unless it hangs."""


class LoopRig:
    """An engine's loop, and a gate in front of each step."""

    def __init__(self, **options: Any) -> None:
        core_options = {
            name: options.pop(name)
            for name in (
                "num_blocks",
                "max_requests",
                "max_batch_tokens",
                "block_size",
                "overlap",
                "late",
                "clock",
            )
            if name in options
        }
        core, runner, kv_cache = make_core(
            **{"num_blocks": 256, "clock": time.monotonic, **core_options}
        )
        self.core, self.runner, self.kv_cache = core, runner, kv_cache
        context = core.max_context_tokens
        limits = AdmissionLimits(vocab_size=VOCAB, model_context=context, cache_context=context)
        self.loop = self._wire(core, limits, options)
        self.entered = threading.Semaphore(0)
        self._gate = threading.Semaphore(0)
        self._held = False

    def _wire(
        self, core: EngineCore, limits: AdmissionLimits, options: dict[str, Any]
    ) -> EngineLoop:
        return EngineLoop(core, limits, **options)

    def hold(self) -> None:
        """From now on each step waits for `let`."""
        self._held = True
        self.runner.hook = self._wait

    def _wait(self, batch: ScheduledBatch) -> None:
        self.entered.release()
        if self._held:
            assert self._gate.acquire(timeout=WAIT)

    def wait_for_step(self) -> None:
        assert self.entered.acquire(timeout=WAIT)

    def let(self, steps: int | None = None) -> None:
        """Let some steps, or all, go on."""
        if steps is None:
            self._held = False
            steps = 1000
        for _ in range(steps):
            self._gate.release()


class Sink:
    def __init__(self) -> None:
        self.steps: list[StepOutputs] = []
        self.done = threading.Event()

    def __call__(self, step: StepOutputs) -> None:
        self.steps.append(step)
        if any(output.ends_request for output in step.outputs):
            self.done.set()


class Rig(LoopRig):
    """The same with a manager."""

    manager: ContinuousBatchingManager

    def _wire(
        self, core: EngineCore, limits: AdmissionLimits, options: dict[str, Any]
    ) -> EngineLoop:
        self.manager = ContinuousBatchingManager(core, limits, **options)
        return self.manager._loop


def result(manager: ContinuousBatchingManager, name: str | None = None) -> GenerationOutput:
    output = manager.get_result(name, timeout=WAIT)
    assert output is not None
    return output


def count_calls(action: Callable[[], None]) -> int:
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count
