"""Headrace's engine in this process: what `engine.load(path).generate_batch` uses, kept running.

`generate_batch` itself is not used, because it gives all prompts the same number of tokens and
takes them all at the same time. Options are fields of LoadConfig and of ContinuousBatchingConfig,
"model", a directory or GGUF file that is loaded instead of the order's, such as the same weights in
another form, and "loras", how many LoRA adapters there are: requests take them by turns.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

import engine
from benchmarks.adapters import profiling
from benchmarks.adapters.loop import Turn, main, versions
from benchmarks.adapters.managers import serve_turn
from benchmarks.instructions import limit
from benchmarks.low_rank import adapter_folders
from benchmarks.models import built_model
from engine.api.offline import LoadedModel
from engine.contract.config import CPU_BLOCK_SIZE, CUDA_BLOCK_SIZE, LoadConfig
from engine.core.threads import call_on_own_thread
from engine.loading.loader import prepare_model

LOAD_OPTIONS = {field.name for field in dataclasses.fields(LoadConfig)}

logger = logging.getLogger(__name__)


class HeadraceEngine:
    """The engine through the offline API's manager."""

    _loras: tuple[str, ...] = ()
    """The adapters that requests name."""

    def load(self, order: dict[str, Any]) -> dict[str, Any]:
        logging.basicConfig(level=logging.INFO, stream=sys.stderr)
        if order.get("instructions"):
            limit(order["instructions"])
        limits, options = order["limits"], dict(order["options"])
        order["model"] = options.pop("model", order["model"])
        loras = adapter_folders(Path(order["model"]), order["cache"], options.pop("loras", 0))
        self._loras = tuple(loras)
        if loras:
            options["adapters"] = tuple(f"{name}={folder}" for name, folder in loras.items())
        loading = {
            "dtype": order["dtype"],
            "device": order.get("device", "cpu"),
            "threads": order["threads"],
            **{name: options.pop(name) for name in LOAD_OPTIONS & options.keys()},
        }
        on_cuda = loading["device"].startswith("cuda")
        block_size = options.get("block_size", CUDA_BLOCK_SIZE if on_cuda else CPU_BLOCK_SIZE)
        if isinstance(options.get("use_cuda_graph"), list):  # a pair, as JSON has it
            options["use_cuda_graph"] = tuple(options["use_cuda_graph"])
        settings = {
            "block_size": block_size,
            "num_blocks": -(-limits["kv_tokens"] // block_size) + limits["max_requests"],
            "max_requests_per_batch": limits["max_requests"],
            **options,
        }
        model = _load(order, loading)
        self._manager = model.init_continuous_batching(
            GenerationConfig(
                do_sample=False, max_new_tokens=limits["max_request_tokens"], eos_token_id=-1
            ),
            continuous_batching_config=engine.ContinuousBatchingConfig(**settings),
        )
        self._manager.warmup()
        self._manager.start()
        return {
            "settings": {"model": Path(order["model"]).name, **loading, **settings},
            "versions": versions("headrace-server", "torch", "transformers"),
        }

    def run(self, turn: Turn) -> dict[str, Any] | None:
        for request, name in zip(turn.requests, itertools.cycle(self._loras), strict=False):
            request["sampling"] = {**(request.get("sampling") or {}), "adapter": name}
        if turn.profile_steps:
            return self._profile(turn)
        serve_turn(self._manager, turn)
        return None

    def _profile(self, turn: Turn) -> dict[str, Any]:
        """Profile the device during some decode steps after the last request's first token, when
        all prompts are computed. The turn's requests are then cancelled.
        """
        profiling.set_up()
        names = [
            self._manager.add_request(
                request["prompt"],
                max_new_tokens=request["max_tokens"],
                streaming=is_last,
                record_timestamps=is_last,
                **(request.get("sampling") or {}),
            )
            for request, is_last in (
                (request, request is turn.requests[-1]) for request in turn.requests
            )
        ]
        outputs = self._manager.request_id_iter(names[-1])
        next(outputs)

        def steps() -> int:
            began = time.monotonic()
            # Not those that came while the profiler started.
            found = (one for one in outputs if one.timestamps and one.timestamps[-1] >= began)
            return sum(1 for _ in zip(range(turn.profile_steps), found, strict=False))

        try:
            return profiling.profile_device(steps)
        finally:
            for name in names:
                self._manager.cancel_request(name)
            list(outputs)
            for name in names[:-1]:
                self._manager.get_result(name)


def _load(order: dict[str, Any], loading: dict[str, Any]) -> LoadedModel:
    """Load the order's model from its directory, or make it and then treat it like a loaded one."""
    made = built_model(order)
    if made is None:
        return engine.load(order["model"], **loading)
    torch.set_num_threads(order["threads"])
    verified = call_on_own_thread(
        lambda: prepare_model(made, Path(), LoadConfig(**loading), logger.info), "headrace-load"
    )
    return LoadedModel(verified)


if __name__ == "__main__":
    main(HeadraceEngine())
