"""What a decode step costs besides the model's forward pass: the engine's own part of it.

    python -m benchmarks.step_cost --model $(python -m benchmarks model tiny) --requests 16

The engine runs in this thread, one step after the other. The duration of the model's forward pass
is the model's time; the rest is the engine's: scheduling, laying the step out, block tables,
sampling, returning tokens, outputs. The rest includes reading the clock.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

from engine.assembly import build_core
from engine.contract.config import ContinuousBatchingConfig, LoadConfig
from engine.contract.request import GenerationRequest
from engine.contract.sampling_params import SamplingParams, StopParams
from engine.contract.types import RequestId, TokenId
from engine.core.engine_core import EngineCore
from engine.core.threads import call_on_own_thread
from engine.loading.loader import load_model
from engine.loading.verified import VerifiedModel

_PROMPT = 128
_WARM_STEPS = 20
"""The steps of prefill and the first decodes, which do not count."""


def _load(arguments: argparse.Namespace) -> tuple[VerifiedModel, EngineCore]:
    loading = LoadConfig(dtype=arguments.dtype, device="cpu", threads=arguments.threads)
    verified = load_model(arguments.model, loading, print)
    config = ContinuousBatchingConfig(block_size=32, max_requests_per_batch=arguments.requests)
    core, _, _ = build_core(verified, config, print)
    core.runner.warmup()
    return verified, core


def measure(arguments: argparse.Namespace) -> list[tuple[float, float]]:
    """Return the model's and the engine's seconds of each decode step."""
    # On a thread that ends, so that the CPUs have one team of OpenMP's threads.
    verified, core = call_on_own_thread(lambda: _load(arguments), "load")
    clocks: list[float] = []
    forward: Any = core.runner._forward
    compute = forward._call

    def timed(*inputs: object) -> object:
        clocks.append(time.perf_counter())
        output = compute(*inputs)
        clocks.append(time.perf_counter())
        return output

    forward._call = timed
    generator = torch.Generator().manual_seed(0)
    for index in range(arguments.requests):
        ids = torch.randint(3, verified.vocab_size, (_PROMPT,), generator=generator)
        spec = GenerationRequest(
            request_id=RequestId(f"request-{index}"),
            prompt=tuple(TokenId(token) for token in ids.tolist()),
            sampling=SamplingParams(temperature=arguments.temperature, seed=index),
            stop=StopParams(max_tokens=arguments.steps + 2 * _WARM_STEPS),
        )
        core.add(spec, time.monotonic())

    steps = []
    while core.has_work:
        clocks.clear()
        began = time.perf_counter()
        outputs = core.step()
        wall = time.perf_counter() - began
        record = outputs.step
        if record is None or record.num_decode_tokens != arguments.requests:
            continue  # no step in which each of them decodes
        steps.append((clocks[1] - clocks[0], wall - (clocks[1] - clocks[0])))
    return steps[_WARM_STEPS : _WARM_STEPS + arguments.steps]


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="models/demo", help="a directory")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args()
    steps = measure(arguments)
    for name, seconds in zip(("the model", "the engine"), zip(*steps, strict=True), strict=True):
        tenth, *_, ninetieth = statistics.quantiles(seconds, n=10)
        print(
            f"{name}: {statistics.median(seconds) * 1e3:.3f} ms a step "
            f"(p10 {tenth * 1e3:.3f}, p90 {ninetieth * 1e3:.3f}; {len(seconds)} steps)"
        )


if __name__ == "__main__":
    main()
