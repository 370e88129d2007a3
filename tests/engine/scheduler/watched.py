"""A core and its ledger; and one whose batches are written down."""

from __future__ import annotations

from engine.contract.request import GenerationRequest
from engine.core.engine_core import EngineCore
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.scheduler.scheduled_batch import ScheduledBatch
from tests.engine.fake_runner import Clock, FakeRunner, make_core
from tests.engine.ledger import Ledger, drain


class CoreRig:
    """A core, and what came out of it."""

    def __init__(self, **options: object) -> None:
        self.clock = Clock()
        self.core: EngineCore
        self.runner: FakeRunner
        self.kv_cache: KVCacheManager
        self.core, self.runner, self.kv_cache = make_core(
            clock=self.clock,
            **options,  # type: ignore[arg-type]
        )
        self.ledger = Ledger()


class Watched(CoreRig):
    """A core whose batches are written down: the ids and numbers of tokens of each step."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self.steps: list[dict[str, int]] = []
        self.seconds = 0.0
        self.runner.hook = self._note

    def _note(self, batch: ScheduledBatch) -> None:
        self.steps.append({part.request.request_id: part.num_tokens for part in batch.requests})
        self.clock.now += self.seconds

    def add(self, *specs: GenerationRequest) -> None:
        for spec in specs:
            self.ledger.add(spec)
            self.core.add(spec, self.clock())
            self.clock.now += 0.001

    def step(self) -> dict[str, int]:
        """The batch of the next step."""
        count = len(self.steps)
        self.ledger.take(self.core.step())
        return self.steps[-1] if len(self.steps) > count else {}

    def drain(self) -> None:
        drain(self.core, self.ledger)
        self.ledger.check(self.core.max_context_tokens)
