"""Headrace's engine in this process: what `engine.load(path).generate_batch` uses, kept running.

Not `generate_batch` itself, which gives all prompts the same number of tokens and takes them all at
once. Options are fields of LoadConfig and of ContinuousBatchingConfig.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
import sys
from typing import Any

from transformers import GenerationConfig

import engine
from benchmarks.adapters.loop import Turn, main
from engine.config import LoadConfig

BLOCK_SIZE = 32
LOAD_OPTIONS = {field.name for field in dataclasses.fields(LoadConfig)}


class HeadraceEngine:
    """The offline API's manager."""

    def load(self, order: dict[str, Any]) -> dict[str, Any]:
        logging.basicConfig(level=logging.INFO, stream=sys.stderr)
        limits, options = order["limits"], dict(order["options"])
        loading = {
            "dtype": order["dtype"],
            "device": "cpu",
            "threads": order["threads"],
            **{name: options.pop(name) for name in LOAD_OPTIONS & options.keys()},
        }
        block_size = options.get("block_size", BLOCK_SIZE)
        settings = {
            "block_size": block_size,
            "num_blocks": -(-limits["kv_tokens"] // block_size) + limits["max_requests"],
            "max_requests_per_batch": limits["max_requests"],
            **options,
        }
        model = engine.load(order["model"], **loading)
        self._manager = model.init_continuous_batching(
            GenerationConfig(
                do_sample=False, max_new_tokens=limits["max_request_tokens"], eos_token_id=-1
            ),
            continuous_batching_config=engine.ContinuousBatchingConfig(**settings),
        )
        self._manager.warmup()
        self._manager.start()
        return {
            "settings": {**loading, **settings},
            "versions": {
                name: importlib.metadata.version(name)
                for name in ("headrace-server", "torch", "transformers")
            },
        }

    def run(self, turn: Turn) -> None:
        names: dict[str, int] = {}
        while not turn.is_over:
            for index in turn.due():
                request = turn.requests[index]
                name = self._manager.add_request(
                    request["prompt"],
                    max_new_tokens=request["max_tokens"],
                    record_timestamps=True,
                )
                names[name] = index
            wait = turn.wait_s()
            output = self._manager.get_result(timeout=wait)
            if output is None:
                if wait is None:
                    raise RuntimeError("the engine has ended")
                continue
            if output.error is not None:
                raise RuntimeError(output.error)
            index = names[output.request_id]
            turn.add(index, output.generated_tokens, output.timestamps)
            turn.finish(index)


if __name__ == "__main__":
    main(HeadraceEngine())
