"""What a decode step costs besides the model's forward pass: the engine's own part of it.

    python -m benchmarks step_cost --model $(python -m benchmarks model tiny) --requests 16

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

from benchmarks.records import Record
from benchmarks.rig.measurement import DTYPE, MODEL, Measurement, option
from benchmarks.rig.stepping import SteppedEngine
from engine.contract.sampling_params import SamplingParams

_PROMPT = 128
_WARM_STEPS = 20
"""The steps of prefill and the first decodes, which do not count."""


def steps_of(options: argparse.Namespace) -> list[tuple[float, float]]:
    """Return the model's and the engine's seconds of each decode step."""
    engine = SteppedEngine(options, max_requests_per_batch=options.requests)
    core = engine.core
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
    for index in range(options.requests):
        ids = torch.randint(3, engine.model.vocab_size, (_PROMPT,), generator=generator)
        sampling = SamplingParams(temperature=options.temperature, seed=index)
        engine.submit(index, ids.tolist(), options.steps + 2 * _WARM_STEPS, sampling)

    steps = []
    while core.has_work:
        clocks.clear()
        began = time.perf_counter()
        outputs = core.step()
        wall = time.perf_counter() - began
        record = outputs.step
        if record is None or record.num_decode_tokens != options.requests:
            continue  # no step in which each of them decodes
        steps.append((clocks[1] - clocks[0], wall - (clocks[1] - clocks[0])))
    return steps[_WARM_STEPS : _WARM_STEPS + options.steps]


def measure(options: argparse.Namespace, record: Record) -> None:
    steps = steps_of(options)
    for name, seconds in zip(("the model", "the engine"), zip(*steps, strict=True), strict=True):
        tenth, *_, ninetieth = statistics.quantiles(seconds, n=10)
        found = {"median_s": statistics.median(seconds), "p10_s": tenth, "p90_s": ninetieth}
        record.put({"steps": len(seconds), **found}, name)


MEASUREMENT = Measurement(
    measure=measure,
    options=(
        *(MODEL, DTYPE),
        option("requests", 16),
        option("steps", 300),
        option("temperature", 0.0, "0: greedy"),
        option("threads", None, type=int),
    ),
)
