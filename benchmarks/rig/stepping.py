"""An engine in this process, one step after the other, on one model."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.models import find_model
from engine.assembly import build_core
from engine.contract.config import ContinuousBatchingConfig, LoadConfig
from engine.contract.request import GenerationRequest, MatcherFactory
from engine.contract.sampling_params import GrammarParams, SamplingParams, StopParams
from engine.contract.token_ids import TokenIds
from engine.contract.types import RequestId
from engine.core.engine_core import EngineCore
from engine.core.threads import call_on_own_thread
from engine.loading.loader import load_model
from engine.loading.verified import VerifiedModel

BLOCK = 32
"""Tokens per block of the KV cache."""


class SteppedEngine:
    """A core and its model. Implements `adapters.loop.StepEngine`.

    Attributes:
        turn: the number of the turn, which is in the requests' names: 1, 2, …
    """

    def __init__(self, options: argparse.Namespace, **config: Any) -> None:
        """Load the engine. options: model, dtype, threads and perhaps cache. config: fields of
        `ContinuousBatchingConfig`.
        """

        def load() -> tuple[VerifiedModel, EngineCore]:
            loading = LoadConfig(dtype=options.dtype, device="cpu", threads=options.threads)
            folder = find_model(options.model, getattr(options, "cache", None))
            model = load_model(str(folder), loading, print)
            settings = ContinuousBatchingConfig(block_size=BLOCK, speculation="off", **config)
            core, _, _ = build_core(model, settings, print)
            core.runner.warmup()
            return model, core

        # On a thread that ends, so that the CPUs have one team of OpenMP's threads.
        self.model, self.core = call_on_own_thread(load, "load")
        self.turn = 0

    def submit(
        self,
        index: int,
        prompt: Sequence[int],
        max_tokens: int,
        sampling: SamplingParams = SamplingParams(temperature=0.0),  # noqa: B008 - it is frozen
        grammar: tuple[GrammarParams, MatcherFactory] | None = None,
    ) -> None:
        """Accept a request of this turn."""
        params, matcher = grammar or (None, None)
        request = GenerationRequest(
            request_id=RequestId(f"{self.turn}/{index}"),
            prompt=TokenIds.of(prompt, "prompt"),
            sampling=sampling,
            grammar=params,
            stop=StopParams(max_tokens=max_tokens, ignore_eos=True),
        )
        self.core.add(request, time.monotonic(), matcher)

    def step(self) -> Iterator[tuple[int, list[int], bool]]:
        """Compute a step. Raises RuntimeError if a request failed."""
        for output in self.core.step().outputs:
            if output.finish is not None and output.finish.failure is not None:
                raise RuntimeError(output.finish.failure.message)
            index = int(output.request_id.partition("/")[2])
            yield index, list(output.token_ids), output.ends_request

    def cancel(self, count: int) -> None:
        """End the first requests of this turn."""
        for index in range(count):
            self.core.cancel(RequestId(f"{self.turn}/{index}"))
        self.core.take_outputs()
