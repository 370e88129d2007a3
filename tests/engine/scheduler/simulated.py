"""A core whose scripted runner takes as long as a machine of known costs would, by a clock that is
moved by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.contract.request import GenerationRequest
from engine.core.engine_core import EngineCore
from engine.scheduler.pace import shape_of
from engine.scheduler.runner_protocol import PendingStep, SampledTokens
from engine.scheduler.scheduled_batch import ScheduledBatch
from engine.scheduler.step_cost import StepCosts
from tests.engine.fake_runner import Clock, FakeRunner, make_core
from tests.engine.ledger import Ledger, drain

CPU = StepCosts(0.026, 0.004, 0.0022, 2e-7, 0.0012, 2.5e-6)
"""About a 0.6B model on two cores."""
CUDA = StepCosts(0.005, 0.02, 30e-6, 1e-9, 20e-6, 3e-9)


@dataclass(slots=True)
class Part:
    """What a step computed of a request."""

    start: int
    num_tokens: int
    is_prompt_left: bool
    """Whether it was cut."""
    is_decode: bool


@dataclass(slots=True)
class Step:
    """One step. `seconds`: how long the machine took for it. `num_rows`: each part's, with those of
    drafts.
    """

    parts: dict[str, Part]
    seconds: float
    num_rows: dict[str, int] = field(default_factory=dict)

    @property
    def decodes(self) -> bool:
        return any(part.is_decode for part in self.parts.values())

    @property
    def num_prompt_tokens(self) -> int:
        return sum(part.num_tokens for part in self.parts.values() if not part.is_decode)


class _Timed:
    """A step whose result is there when the machine is done with it."""

    def __init__(self, step: PendingStep, clock: Clock, end: float) -> None:
        self._step, self._clock, self._end = step, clock, end

    def sample(self) -> None:
        self._step.sample()

    def result(self) -> SampledTokens:
        self._clock.now = max(self._clock.now, self._end)
        return self._step.result()


class Simulation:
    """See the module.

    Attributes:
        delay: what a step takes longer than by the machine, by its number; 1: no longer.
    """

    def __init__(
        self, machine: StepCosts, target: float, *, block_size: int = 32, **options: object
    ) -> None:
        self.machine = machine
        self.clock = Clock()
        self.delay: Callable[[int], float] = lambda number: 1.0
        self.steps: list[Step] = []
        self.core: EngineCore
        self.core, self.runner, _ = make_core(
            **{  # type: ignore[arg-type]
                "num_blocks": 2000,
                "block_size": block_size,
                "max_batch_tokens": 1024,
                "max_requests": 16,
                "clock": self.clock,
                "target_step_time": target,
                "verify": False,
                **options,
            }
        )
        self.ledger = Ledger()
        self._device_free = 0.0
        self._launch = FakeRunner.launch
        self.runner.launch = self._timed  # type: ignore[method-assign]

    def _timed(self, batch: ScheduledBatch) -> PendingStep:
        self.steps.append(Step({}, 0.0))
        step = self.steps[-1]
        for part in batch.requests:
            request, start, num_tokens, _, num_sampled, _ = part
            step.num_rows[request.request_id] = part.num_rows
            is_decode = num_tokens == 1 and start >= request.num_prompt_tokens
            step.parts[request.request_id] = Part(start, num_tokens, not num_sampled, is_decode)
        step.seconds = self.machine.of_step(shape_of(batch)) * self.delay(len(self.steps))
        self._device_free = max(self._device_free, self.clock.now) + step.seconds
        return _Timed(self._launch(self.runner, batch), self.clock, self._device_free)  # type: ignore[return-value]

    def add(self, *specs: GenerationRequest) -> None:
        for spec in specs:
            self.ledger.add(spec)
            self.core.add(spec, self.clock())

    def run(self, count: int) -> list[Step]:
        """The next steps."""
        before = len(self.steps)
        for _ in range(count):
            self.ledger.take(self.core.step())
        return self.steps[before:]

    def run_until_begun(self, name: str, most: int = 1000) -> list[Step]:
        """The steps until a request has its first token."""
        before = len(self.steps)
        while not self.ledger.tokens[self.ledger.specs[name].request_id, 0]:
            assert len(self.steps) - before < most, f"{name} waits for ever"
            self.ledger.take(self.core.step())
        return self.steps[before:]

    def drain(self) -> None:
        drain(self.core, self.ledger)
        self.ledger.check(self.core.max_context_tokens)
