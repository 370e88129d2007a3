"""What streams that are held to tool calls cost the others of their batch.

    python -m benchmarks.held_calls

A batch has 128 streams. In one variant all of them are free; in the other, half of them are
constrained to tool calls (tool_choice REQUIRED, in the Hermes format). The steps of both are timed
alternately, since a machine's speed drifts, and each variant goes first in every other turn. The
free half is seeded: its tokens must be the same in both.

The engine runs in this thread, on one model. The seeds and prompts of a turn are shared only with
its pair.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.__main__ import CACHE, checkpoint
from benchmarks.measures import figure
from benchmarks.models import DEMO, SHAPES
from benchmarks.processes import ROOT
from benchmarks.records import commit, machine_record, rounded
from benchmarks.workloads import Lengths, make_prompts
from engine.assembly import build_core
from engine.contract.config import ContinuousBatchingConfig, LoadConfig
from engine.contract.request import GenerationRequest, MatcherFactory
from engine.contract.sampling_params import GrammarKind, GrammarParams, SamplingParams, StopParams
from engine.contract.types import RequestId, TokenId
from engine.core.engine_core import EngineCore
from engine.core.threads import call_on_own_thread
from engine.loading.loader import load_model
from engine.structured import GrammarCompiler
from engine.text import Tokenizer
from service.replies import FORMATS, ToolMode, ToolSchema

STREAMS = 64
"""The number of streams in each half of the batch."""
_PROMPT = 32
_STEPS = 96
_BLOCK = 32
_ROW = {
    "type": "object",
    "properties": {
        "place": {"type": "string"},
        "height": {"type": "number"},
        "unit": {"enum": ["m", "cm"]},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["place", "height", "unit", "tags"],
    "additionalProperties": False,
}
_SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {"rows": {"type": "array", "items": _ROW, "minItems": 100}},
    "required": ["rows"],
    "additionalProperties": False,
}
"""A schema whose arguments do not end within a turn."""


class Bench:
    """Runs turns on the engine."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        model = (
            checkpoint(arguments.model, arguments.cache)
            if arguments.model in SHAPES
            else DEMO
            if arguments.model == "demo"
            else arguments.model
        )
        loading = LoadConfig(dtype=arguments.dtype, device="cpu", threads=arguments.threads)
        config = ContinuousBatchingConfig(
            block_size=_BLOCK,
            num_blocks=2 * STREAMS * (2 + (_PROMPT + 2 * _STEPS) // _BLOCK),
            max_requests_per_batch=2 * STREAMS,
            allow_block_sharing=False,
            target_step_time=0.0,
        )
        verified = load_model(str(model), loading, print)
        self.core: EngineCore = build_core(verified, config, print)[0]
        self.core.runner.warmup()
        self.vocab_size = verified.vocab_size
        compiler = GrammarCompiler(
            Tokenizer.load(Path(model), verified.vocab_size), verified.vocab_size
        )
        form = FORMATS["hermes"].form
        if form is None:
            raise RuntimeError("hermes has no calls")
        tools = [ToolSchema(f"tool_{number}", _SCHEMA) for number in range(8)]
        text = form.structural_tag(ToolMode.REQUIRED, tools, parallel=True)
        self._params = GrammarParams(kind=GrammarKind.STRUCTURAL_TAG, text=text)
        begin = time.perf_counter()
        self._make_matcher: MatcherFactory = compiler.compile(self._params, frozenset())
        self.compile_s = time.perf_counter() - begin

    def turn(self, number: int, held: int) -> tuple[list[float], dict[int, list[TokenId]]]:
        """Run a turn in which the last `held` streams are constrained to calls. Returns the seconds
        of the steps in which all streams had a token, and each stream's tokens.
        """
        lengths = [Lengths(_PROMPT, _STEPS)] * (2 * STREAMS)
        prompts = make_prompts(lengths, self.vocab_size, seed=number)
        for index, prompt in enumerate(prompts):
            is_held = index >= 2 * STREAMS - held
            self.core.add(
                GenerationRequest(
                    request_id=RequestId(f"{number}/{held}/{index}"),
                    prompt=tuple(map(TokenId, prompt)),
                    sampling=SamplingParams(temperature=1.0, seed=1000 * number + index),
                    grammar=self._params if is_held else None,
                    stop=StopParams(max_tokens=2 * _STEPS, ignore_eos=True),
                ),
                time.monotonic(),
                self._make_matcher if is_held else None,
            )
        tokens: dict[int, list[TokenId]] = {index: [] for index in range(2 * STREAMS)}
        times: list[float] = []
        while len(times) < _STEPS:
            begin = time.perf_counter()
            outputs = self.core.step().outputs
            spent = time.perf_counter() - begin
            for output in outputs:
                if output.finish is not None:
                    raise RuntimeError(f"a stream ended: {output.finish}")
                tokens[int(output.request_id.rpartition("/")[2])] += output.token_ids
            if len(outputs) == 2 * STREAMS:
                times.append(spent)
        for index in tokens:
            self.core.cancel(RequestId(f"{number}/{held}/{index}"))
        self.core.take_outputs()
        return times, tokens

    def pair(self, number: int) -> dict[str, float]:
        """Run two turns with the same prompts and seeds, one of them with constrained streams."""
        mixes = (0, STREAMS) if number % 2 else (STREAMS, 0)
        found = {held: self.turn(number, held) for held in mixes}
        free, both = found[0], found[STREAMS]
        for index in range(STREAMS):
            count = min(len(free[1][index]), len(both[1][index]))
            if free[1][index][:count] != both[1][index][:count]:
                raise RuntimeError(f"turn {number}: stream {index} has other tokens beside forms")
        before, after = statistics.median(free[0]), statistics.median(both[0])
        return {"free_s": before, "held_s": after, "ratio": after / before}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure everything and return the record."""
    bench = Bench(arguments)
    record: dict[str, Any] = {
        "date": datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "model": arguments.model,
        "dtype": arguments.dtype,
        "threads": arguments.threads,
        "machine": machine_record(),
        "streams": STREAMS,
        "compile_s": round(bench.compile_s, 4),
        "turns": [],
    }
    bench.pair(0)  # warms up
    for number in range(1, arguments.turns + 1):
        figures = bench.pair(number)
        record["turns"].append(rounded({**figures, "load_average": os.getloadavg()[0]}))
        print(f"turn {number}: " + "  ".join(f"{k} {figure(v)}" for k, v in figures.items()))
    ratios = [turn["ratio"] for turn in record["turns"]]
    record["ratio"] = round(statistics.median(ratios), 3)
    return record


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", help="demo, a shape's name or a directory")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--turns", type=int, default=5, help="pairs that count")
    parser.add_argument("--cache", type=Path, default=CACHE, help=f"for models (default {CACHE})")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "benchmarks" / "results" / "held_calls.json"
    )
    arguments = parser.parse_args()
    # On a thread that ends, so that the CPUs have one team of OpenMP's threads.
    record = call_on_own_thread(lambda: measure(arguments), "held calls")
    arguments.output.write_text(json.dumps(record, indent=1) + "\n")
    print(
        f"a step of {STREAMS} free and {STREAMS} held streams takes {record['ratio']:.2f} times "
        f"that of {2 * STREAMS} free ones; written to {arguments.output}"
    )


if __name__ == "__main__":
    main()
