"""OpenVINO GenAI's continuous batching, stepped.

Runs in a separate environment (benchmarks/peers/setup.sh openvino-genai). The checkpoint is
exported once to the cache folder; the start-up time does not include that. For bfloat16, the
weights are exported as fp16 and computed in bf16, and the KV cache is bf16 instead of the default 8
bits. On a processor without instructions for bfloat16, OpenVINO refuses that type. It then computes
in float32, and its KV cache is float32.

Options: "weights" is "int4" for symmetric weights of 4 bits in groups of 128, with the output layer
and the embedding in 8 bits; "dynamic_quantization" is false to compute their products without
rounding the inputs to 8 bits; "compute" is the type of the computation, such as "f32", instead of
the order's. Others are settings of its scheduler.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.adapters.loop import drive, main, versions

PRECISIONS = {"bfloat16": ("fp16", "bf16"), "float32": ("fp32", "f32")}
"""The precisions of the exported weights, and of the computation and the KV cache."""
INT4 = ("--sym", "--group-size", "128", "--ratio", "1.0")
"""How weights of 4 bits are exported: all of them but those of the output layer and embedding."""
BLOCK_SIZE = 32
"""Tokens per block of its KV cache on a CPU."""


class OpenVino:
    """A StepEngine over ContinuousBatchingPipeline."""

    def load(self, order: dict[str, Any]) -> dict[str, Any]:
        weights, compute = PRECISIONS[order["dtype"]]
        options = dict(order["options"])
        weights, compute = options.pop("weights", weights), options.pop("compute", compute)
        model = Path(order["model"])
        exported = Path(order["cache"]) / "openvino" / f"{model.name}-{weights}"
        began = time.perf_counter()
        if not exported.is_dir():
            _export(model, exported, weights)
        prepared_s = time.perf_counter() - began

        import openvino
        import openvino_genai

        limits = order["limits"]
        if compute == "bf16" and not _has_bfloat16(openvino.Core()):
            compute = "f32"
        properties = {
            "INFERENCE_PRECISION_HINT": compute,
            "KV_CACHE_PRECISION": compute,
            "INFERENCE_NUM_THREADS": order["threads"],
        }
        if not options.pop("dynamic_quantization", True):
            properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 0
        scheduler = openvino_genai.SchedulerConfig()
        settings = {
            "num_kv_blocks": -(-limits["kv_tokens"] // BLOCK_SIZE) + limits["max_requests"],
            "max_num_seqs": limits["max_requests"],
            "max_num_batched_tokens": 1024,
            "enable_prefix_caching": True,
            **options,
        }
        for name, value in settings.items():
            setattr(scheduler, name, value)
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(exported), scheduler, "CPU", properties
        )
        self._tensor = openvino.Tensor
        self._config = openvino_genai.GenerationConfig
        self._count = 0
        self._handles: dict[int, tuple[Any, int]] = {}  # index -> its handle, tokens to come
        return {
            "prepared_s": prepared_s,
            "settings": {**settings, **properties, "weights": weights},
            "versions": versions("openvino", "openvino-genai"),
        }

    run = drive

    def submit(self, index: int, prompt: list[int], max_tokens: int) -> None:
        import numpy

        config = self._config()
        config.max_new_tokens = max_tokens
        config.ignore_eos = True
        config.do_sample = False
        self._count += 1
        ids = self._tensor(numpy.array([prompt], dtype=numpy.int64))  # [1, prompt]
        handle = self._pipeline.add_request(self._count, ids, config)
        self._handles[index] = (handle, max_tokens)

    def step(self) -> Iterable[tuple[int, list[int], bool]]:
        self._pipeline.step()
        for index, (handle, left) in list(self._handles.items()):
            tokens: list[int] = []
            while handle.can_read():
                for output in handle.read().values():
                    tokens.extend(output.generated_ids)
            if tokens:
                self._handles[index] = (handle, left - len(tokens))
                if left == len(tokens):
                    del self._handles[index]
                yield index, tokens, left == len(tokens)


def _has_bfloat16(core: Any) -> bool:
    """Whether OpenVINO computes in bfloat16 on this processor."""
    return "BF16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def _export(model: Path, folder: Path, weights: str) -> None:
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    subprocess.run(
        [
            str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino",
            "--model", str(model), "--task", "text-generation-with-past",
            "--weight-format", weights, *(INT4 if weights == "int4" else ()), str(partial),
        ],
        check=True,
        stdout=sys.stderr,
    )  # fmt: skip
    partial.rename(folder)


if __name__ == "__main__":
    main(OpenVino())
