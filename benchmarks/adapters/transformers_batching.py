"""transformers' own continuous batching: what its `generate_batch` uses, kept running.

On a CPU it uses pages of 32 tokens and a cache that fits the workload, because it is slower with
the defaults. On a GPU the page size and the tokens per step are the library's defaults.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from benchmarks.adapters.loop import Turn, main, versions
from benchmarks.adapters.managers import serve_turn
from benchmarks.models import built_model

PAGE_SIZE = 32
SILENCE_S = 300.0


class TransformersBatching:
    """The library's continuous batching manager."""

    def load(self, order: dict[str, Any]) -> dict[str, Any]:
        torch.set_num_threads(order["threads"])
        limits, options = order["limits"], dict(order["options"])
        device = order.get("device", "cpu")
        attention = options.pop("attention", "sdpa")
        model = built_model(order)
        if model is None:
            dtype = getattr(torch, order["dtype"])
            model = AutoModelForCausalLM.from_pretrained(order["model"], dtype=dtype).eval()
            model = model.to(device)
        model.set_attn_implementation(attention)
        settings: dict[str, Any] = {
            "page_size": PAGE_SIZE,
            "num_blocks": max(64, -(-limits["kv_tokens"] // PAGE_SIZE) + limits["max_requests"]),
            "max_batch_tokens": 1024,
            **options,
        }
        if "page_size" not in {
            field.name for field in dataclasses.fields(ContinuousBatchingConfig)
        }:
            settings["block_size"] = settings.pop("page_size")  # its name before
        self._manager = model.init_continuous_batching(
            generation_config=GenerationConfig(
                do_sample=False,
                max_new_tokens=limits["max_request_tokens"],
                eos_token_id=-1,
                pad_token_id=0,
            ),
            continuous_batching_config=ContinuousBatchingConfig(**settings),
        )
        if device != "cpu":
            self._manager.warmup()
        self._manager.start()
        return {
            "settings": {**settings, "attention": model.config._attn_implementation},
            "versions": versions("torch", "transformers"),
        }

    def run(self, turn: Turn) -> None:
        serve_turn(self._manager, turn, SILENCE_S)


if __name__ == "__main__":
    main(TransformersBatching())
