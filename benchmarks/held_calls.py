"""What streams that are held to tool calls cost the others of their batch.

    python -m benchmarks held_calls

A batch has 128 streams. In one variant all of them are free; in the other, half of them are
constrained to tool calls (tool_choice REQUIRED, in the Hermes format). The steps of both are timed
alternately, since a machine's speed drifts, and each variant goes first in every other turn. The
free half is seeded: its tokens must be the same in both.

The engine runs in this thread, on one model. The seeds and prompts of a turn are shared only with
its pair.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.models import find_model
from benchmarks.records import Record
from benchmarks.rig.measurement import (
    DTYPE,
    MODELS,
    NAMED_MODEL,
    THREADS,
    Measurement,
    option,
    paired,
    rotated,
)
from benchmarks.rig.stepping import BLOCK, SteppedEngine
from benchmarks.workloads import Lengths, make_prompts
from engine.contract.sampling_params import GrammarKind, GrammarParams, SamplingParams
from engine.structured import GrammarCompiler
from engine.text import Tokenizer
from service.replies import FORMATS, ToolMode, ToolSchema

STREAMS = 64
"""The number of streams in each half of the batch."""
_PROMPT = 32
_STEPS = 96
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

    def __init__(self, options: argparse.Namespace) -> None:
        self._engine = SteppedEngine(
            options,
            num_blocks=2 * STREAMS * (2 + (_PROMPT + 2 * _STEPS) // BLOCK),
            max_requests_per_batch=2 * STREAMS,
            allow_block_sharing=False,
            target_step_time=0.0,
        )
        vocab_size = self._engine.model.vocab_size
        tokenizer = Tokenizer.load(find_model(options.model, options.cache), vocab_size)
        form = FORMATS["hermes"].form
        if form is None:
            raise RuntimeError("hermes has no calls")
        tools = [ToolSchema(f"tool_{number}", _SCHEMA) for number in range(8)]
        text = form.structural_tag(ToolMode.REQUIRED, tools, parallel=True)
        params = GrammarParams(kind=GrammarKind.STRUCTURAL_TAG, text=text)
        begin = time.perf_counter()
        matcher = GrammarCompiler(tokenizer, vocab_size).compile(params, frozenset())
        self.compile_s = time.perf_counter() - begin
        self._grammar = params, matcher

    def turn(self, number: int, held: int) -> tuple[list[float], dict[int, list[int]]]:
        """Run a turn in which the last `held` streams are constrained to calls. Returns the seconds
        of the steps in which all streams had a token, and each stream's tokens.
        """
        engine = self._engine
        lengths = [Lengths(_PROMPT, _STEPS)] * (2 * STREAMS)
        engine.turn += 1
        for index, prompt in enumerate(make_prompts(lengths, engine.model.vocab_size, number)):
            sampling = SamplingParams(temperature=1.0, seed=1000 * number + index)
            grammar = self._grammar if index >= 2 * STREAMS - held else None
            engine.submit(index, prompt, 2 * _STEPS, sampling, grammar)
        tokens: dict[int, list[int]] = {index: [] for index in range(2 * STREAMS)}
        times: list[float] = []
        while len(times) < _STEPS:
            begin = time.perf_counter()
            outputs = list(engine.step())
            spent = time.perf_counter() - begin
            for index, new, has_ended in outputs:
                if has_ended:
                    raise RuntimeError(f"stream {index} ended")
                tokens[index] += new
            if len(outputs) == 2 * STREAMS:
                times.append(spent)
        engine.cancel(2 * STREAMS)
        return times, tokens

    def pair(self, number: int) -> dict[str, float]:
        """Run two turns with the same prompts and seeds, one of them with constrained streams."""
        found = {held: self.turn(number, held) for held in rotated((0, STREAMS), number)}
        free, both = found[0], found[STREAMS]
        for index in range(STREAMS):
            count = min(len(free[1][index]), len(both[1][index]))
            if free[1][index][:count] != both[1][index][:count]:
                raise RuntimeError(f"turn {number}: stream {index} has other tokens beside forms")
        before, after = statistics.median(free[0]), statistics.median(both[0])
        return {"free_s": before, "held_s": after, "ratio": after / before}


def measure(options: argparse.Namespace, record: Record) -> None:
    bench = Bench(options)
    record.data |= {"streams": STREAMS, "compile_s": bench.compile_s}
    numbers = itertools.count()
    turns = paired(
        ("pair",),
        options.turns,
        lambda name: {**bench.pair(next(numbers)), "load_average": os.getloadavg()[0]},
        lambda turns: record.put(turns["pair"], "turns"),
    )
    record.put(statistics.median(turn["ratio"] for turn in turns["pair"]), "ratio")


def table(record: Mapping[str, Any]) -> str:
    return (
        f"a step of {STREAMS} free and {STREAMS} held streams takes {record['ratio']:.2f} times "
        f"that of {2 * STREAMS} free ones"
    )


MEASUREMENT = Measurement(
    measure=measure,
    table=table,
    options=(NAMED_MODEL, DTYPE, THREADS, MODELS, option("turns", 5, "pairs that count")),
)
