"""Checks that must pass before anything is measured. They take seconds and need only torch,
transformers and the repository. tests/gpu is more thorough, if pytest is available.

This is not a system of the comparison: the harness runs it once.
"""

from __future__ import annotations

import copy
import logging
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

import engine
from benchmarks.adapters.loop import Turn, main
from engine.api.offline import LoadedModel
from engine.contract.config import ContinuousBatchingConfig
from tests.tiny_models import FAMILIES as CONFIGS
from tests.tiny_models import greedy_reference, make_model, make_prompts

NEW = 24
LENGTHS = (1, 2, 31, 100, 150)
FAMILIES = ("llama", "qwen3", "gemma2", "gpt_oss")
"""In addition to the plain family: norms of queries and keys; softcap and window; experts, sinks
and window.
"""
NO_KERNELS = "the kernels for CUDA devices do not run here"


class _Warnings(logging.Handler):
    """Collects a logger's warnings."""

    def __init__(self, name: str) -> None:
        super().__init__(logging.WARNING)
        self._logger = logging.getLogger(name)
        self.texts: list[str] = []

    def __enter__(self) -> _Warnings:
        self._logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Collect one warning."""
        self.texts.append(record.getMessage())


class Checks:
    """The checks. A check that fails raises AssertionError or any other exception."""

    def load(self, order: dict[str, Any]) -> dict[str, Any]:
        torch.set_num_threads(order["threads"])
        self._device = order["device"]
        self._mine = slice(order["share"], None, order["count"])
        return {}

    def run(self, turn: Turn) -> list[dict[str, str]]:
        """Run a share of all checks; other processes run the others."""
        every: list[tuple[str, Callable[[], str]]] = [
            (f"greedy tokens equal model.generate's: {family}", partial(self._greedy, family))
            for family in FAMILIES
        ]
        every.append(("attention kernels against float64", self._kernels))
        return [
            {"key": name, "state": "left out", "detail": NO_KERNELS}
            if self._device == "cpu" and check == self._kernels
            else _outcome(name, check)
            for name, check in every[self._mine]
        ]

    def _greedy(self, family: str) -> str:
        """Check the engine in float32, in chunks, with and without graphs and overlap."""
        model = make_model(CONFIGS[family]())
        prompts = make_prompts(LENGTHS)
        expected = [greedy_reference(model, prompt, NEW) for prompt in prompts]
        loaded = engine.from_model(copy.deepcopy(model).to(self._device))
        eager = {"use_cuda_graph": False, "use_async_batching": False}
        ways: list[dict[str, Any]] = [eager, {"use_async_batching": True}]
        if self._device != "cpu":
            ways.append({"use_cuda_graph": True})
        with _Warnings("engine.runner.captured") as uncaptured:
            for way in ways:
                self._compare(loaded, way, prompts, expected)
        if uncaptured.texts:
            raise AssertionError(uncaptured.texts[0])
        return f"{len(prompts)} prompts, {len(ways)} ways"

    def _compare(
        self,
        loaded: LoadedModel,
        way: dict[str, Any],
        prompts: list[list[int]],
        expected: list[list[int]],
    ) -> None:
        config = ContinuousBatchingConfig(
            block_size=16, num_blocks=200, max_batch_tokens=40, max_requests_per_batch=6, **way
        )
        outputs = loaded.generate_batch(
            prompts,
            continuous_batching_config=config,
            max_new_tokens=NEW,
            progress_bar=False,
        )
        for prompt, want, output in zip(prompts, expected, outputs.values(), strict=True):
            if output.error is not None or output.generated_tokens != want:
                raise AssertionError(
                    f"{way}, a prompt of {len(prompt)}: {output.generated_tokens} instead of "
                    f"{want} {output.error or ''}"
                )

    def _kernels(self) -> str:
        """Check steps of layers of usual shapes, with NaN in all memory that must not be read."""
        from tests.gpu.attention_cases import TOLERANCES, Case, Layer, make_layout  # needs Triton

        count = 0
        for layer, dtype in (
            (Layer(32, 8, 128, 128), torch.bfloat16),
            (Layer(8, 4, 256, 256, window=512, softcap=50.0), torch.bfloat16),
            (Layer(16, 2, 64, 64, window=128, has_sinks=True), torch.float16),
            (Layer(4, 4, 96, 96), torch.float32),
        ):
            for seed in range(4):
                draw = np.random.default_rng(seed)
                parts = [(int(draw.integers(0, 3000)), 1) for _ in range(6)]
                parts += [(int(draw.integers(0, 2000)), int(draw.integers(2, 300)))] * (seed % 3)
                layout = make_layout(parts, 32, window=layer.window, seed=seed)
                case = Case(layout, layer, dtype, fill=float("nan"))
                output = case.run(torch.device(self._device)).double()
                torch.testing.assert_close(
                    output, case.reference(), rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype]
                )
                count += 1
        return f"{count} steps"


def _outcome(name: str, check: Callable[[], str]) -> dict[str, str]:
    try:
        return {"key": name, "state": "passed", "detail": check()}
    except Exception as error:  # whatever it is, the check has failed
        traceback.print_exc()
        text = " ".join(str(error).split())[:400]
        return {"key": name, "state": "failed", "detail": f"{type(error).__name__}: {text}"}


if __name__ == "__main__":
    main(Checks())
