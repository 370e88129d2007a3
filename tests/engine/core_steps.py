"""A core around a real model, which takes one step at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from engine.api.offline import LoadedModel
from engine.assembly import build_core
from engine.contract.config import ContinuousBatchingConfig
from engine.contract.request import GenerationRequest, Request, TokenMatcher
from engine.contract.types import RequestId
from engine.core.engine_core import EngineCore
from tests.engine.ledger import Ledger
from tests.engine.mode_sweep import BLOCK
from tests.engine.runner.steps import make_request
from tests.tiny_models import greedy_reference

NEW_TOKENS = 2 * BLOCK + 3


class Steps:
    """The core, and what came out of it."""

    def __init__(self, both: tuple[PreTrainedModel, LoadedModel], **options: Any) -> None:
        self.model, loaded = both
        config = ContinuousBatchingConfig(
            **{"block_size": BLOCK, "num_blocks": 512, "max_batch_tokens": 64, **options}
        )
        self.core: EngineCore = build_core(loaded._verified, config, lambda line: None)[0]
        self.ledger = Ledger()
        self.kv_cache = self.core.scheduler.kv_cache

    def add(
        self,
        name: str,
        prompt: list[int],
        count: int = NEW_TOKENS,
        *,
        matcher: Callable[[], TokenMatcher] | None = None,
        **options: Any,
    ) -> None:
        """Add a request. matcher: of its form, which is among the options then."""
        spec: GenerationRequest = make_request(name, prompt, count, **options)
        self.ledger.add(spec)
        self.core.add(spec, 0.0, matcher)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.ledger.take(self.core.step())
            self.kv_cache.check_integrity()

    def finish(self) -> None:
        for _ in range(1000):
            if not self.core.has_work:
                break
            self.steps(1)
        assert not self.ledger.live

    def serve(self, name: str, prompt: list[int], count: int = NEW_TOKENS, **more: Any) -> int:
        """Serve a request, check its tokens, and return how many of its prompt's it found."""
        before = self.core.stats().prefix_hits
        self.add(name, prompt, count, **more)
        self.finish()
        self.check(name, prompt, count)
        return self.core.stats().prefix_hits - before

    def check(self, name: str, prompt: list[int], count: int = NEW_TOKENS) -> None:
        assert self.ledger.text(name) == greedy_reference(self.model, prompt, count), name

    @property
    def states(self) -> list[torch.Tensor]:
        runner: Any = self.core.runner
        return list(runner.kv.states.values())

    def request(self, name: str) -> Request:
        running = self.core.scheduler.running.values()
        (found,) = [one for one in running if one.request_id == RequestId(name)]
        return found

    def slot(self, name: str) -> int:
        return int(self.kv_cache.tables(self.request(name).key)[-1].blocks[0])
