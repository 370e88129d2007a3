"""What a target step time costs and gives: steadier streams, for prompts that take longer.

    python -m benchmarks step_time --model qwen3-0.6b

    W2      32 mixed requests at once, with the default target, with none, and with others (a
            curve): throughput, time to the first token, gaps between tokens
    long    a prompt of 4,096 tokens comes while 8 streams are read: their worst gap until it is in

The engine runs in this thread, one step after the other, on one model; the pace changes from turn
to turn. Every target has its turn with the same prompts, and each turn begins with another one,
since a machine's speed drifts. Each is compared with the run without a target in the same turn. In
W2 the pace of a target continues to learn from turn to turn, and turn 0 warms up and does not
count. In `long` each turn begins with an untrained pace.

The record is written after every turn. `--resume` continues one that was interrupted.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from benchmarks.adapters.loop import Turn, drive
from benchmarks.markdown import milliseconds, table
from benchmarks.measures import figure, medians, quantile, ratio_span, turn_figures
from benchmarks.records import Record
from benchmarks.rig.measurement import (
    MODELS,
    NAMED_MODEL,
    THREADS,
    Measurement,
    option,
    rotated,
)
from benchmarks.rig.stepping import BLOCK, SteppedEngine
from benchmarks.workloads import FIRST_TOKEN, WORKLOADS, make_prompts
from engine.contract.config import CPU_TARGET_STEP_TIME
from engine.scheduler.pace import StepPace

_STREAMS = 8
_STREAM_PROMPT = 64
_BEFORE = 16
"""How many tokens each stream has had when the long prompt arrives."""
_NAMES = ("output_rate", "ttft_p50_s", "itl_p50_s", "itl_p99_s")


def w2_turn(engine: SteppedEngine, turn: int) -> dict[str, float]:
    lengths = WORKLOADS["W2"].lengths()
    prompts = make_prompts(lengths, engine.model.vocab_size, seed=1000 + turn)
    requests = [
        {"prompt": prompt, "max_tokens": one.output if turn else 8, "at": 0.0}
        for prompt, one in zip(prompts, lengths, strict=True)
    ]
    running = Turn(requests)
    before = engine.core.stats()
    drive(engine, running)
    after = engine.core.stats()
    found = turn_figures([one.prompt for one in lengths], running.reply())
    decode_steps = after.steps_with_decodes - before.steps_with_decodes
    return {
        **{name: found[name] for name in (*_NAMES, "ttft_p99_s")},
        "steps": after.steps - before.steps,
        "over_target": (after.steps_over_target - before.steps_over_target) / decode_steps,
    }


def long_turn(engine: SteppedEngine, turn: int, length: int) -> dict[str, float]:
    """Return the gaps of the streams from the arrival of the long prompt until it is computed."""
    lengths = [_STREAM_PROMPT] * _STREAMS + [length]
    ids = itertools.cycle(range(FIRST_TOKEN + turn, engine.model.vocab_size, 7))
    prompts = [list(itertools.islice(ids, count)) for count in lengths]
    for index in range(_STREAMS):
        engine.submit(index, prompts[index], length)  # longer than it takes
    times: list[list[float]] = [[] for _ in lengths]
    came = 0.0
    while not times[-1]:
        if not came and all(len(own) >= _BEFORE for own in times[:_STREAMS]):
            came = time.perf_counter()
            engine.submit(_STREAMS, prompts[-1], 2)
        for index, tokens, _ in engine.step():
            times[index] += [time.perf_counter()] * len(tokens)
    engine.cancel(len(lengths))
    gaps = [
        later - earlier
        for own in times[:_STREAMS]
        for earlier, later in itertools.pairwise(own)
        if later > came
    ]
    return {
        "worst_gap_s": max(gaps),
        "gap_p50_s": quantile(gaps, 50),
        "long_ttft_s": times[-1][0] - came,
    }


def measure(options: argparse.Namespace, record: Record) -> None:
    """Run what is not in the record yet."""
    engine = SteppedEngine(
        options,
        num_blocks=-(-(2 * options.long + 10_000) // BLOCK),
        max_requests_per_batch=32,
        scheduler_type=options.scheduler,
        allow_block_sharing=False,
    )
    for part in ("W2", "long"):
        record.data.setdefault(part, {})

    def run(
        part: str, target: float, turn: int, pace: StepPace | None, work: Callable[[], Any]
    ) -> None:
        if str(turn) in record.data[part].get(f"{target:g}", {}):
            return
        engine.turn += 1  # nothing that an earlier turn computed is reused
        engine.core.scheduler.pace = pace
        figures = work()
        text = "  ".join(f"{name} {figure(value)}" for name, value in figures.items())
        print(f"{part} turn {turn}, target {target:g} s: {text}", flush=True)
        if turn:
            entry = {**figures, "load_average": os.getloadavg()[0]}
            record.put(entry, part, f"{target:g}", str(turn))

    others = [float(text) for text in options.curve.split(",") if text]
    paces: dict[float, StepPace | None] = {0.0: None}
    paces |= {target: StepPace(target, BLOCK) for target in (options.target, *others)}
    for turn in range(options.turns + 1):
        targets = [0.0, options.target]
        targets += others if turn <= options.curve_turns else []
        for target in rotated(targets, turn):
            run("W2", target, turn, paces[target], partial(w2_turn, engine, turn))
    for turn in range(1, options.long_turns + 1):
        for target in (0.0, options.target):
            pace = StepPace(target, BLOCK) if target else None
            run("long", target, turn, pace, partial(long_turn, engine, turn, options.long))


def tables(record: Mapping[str, Any]) -> str:
    options, rows = record["options"], []
    none = record["W2"]["0"]
    for target in sorted(record["W2"], key=float):
        turns = record["W2"][target]
        pairs = [(entry, none[turn]) for turn, entry in turns.items() if turn in none]

        def ratio(name: str, beside: str, pairs: Any = pairs) -> str:
            found = [own[name] / other[beside] for own, other in pairs]
            return ratio_span(found, ".2f") if len(found) > 1 else f"{found[0]:.2f}"

        middle = medians(list(turns.values()))
        over = "" if target == "0" else f"{middle['over_target']:.0%}"
        itl = milliseconds(middle, "itl_p50_s", "itl_p99_s")
        rows.append(
            [
                "none" if target == "0" else target,
                str(len(turns)),
                *(figure(middle["output_rate"]), ratio("output_rate", "output_rate")),
                *(figure(middle["ttft_p50_s"]), ratio("ttft_p50_s", "ttft_p50_s")),
                *(itl, ratio("itl_p99_s", "itl_p50_s"), over),
            ]
        )
    columns = "target s | turns | output tok/s | of none | TTFT p50 s | of none | ITL p50, p99 ms"
    columns += " | p99 / p50 of none | steps over"
    lines, rows = table(columns, rows), []
    for target in sorted(record["long"], key=float):
        turns = list(record["long"][target].values())
        worst = [entry["worst_gap_s"] for entry in turns]
        middle = medians(turns)
        of_target = "" if target == "0" else f"{max(worst) / float(target):.2f}"
        rows.append(
            [
                "none" if target == "0" else target,
                str(len(turns)),
                ", ".join(figure(1e3 * one) for one in worst),
                *(of_target, milliseconds(middle, "gap_p50_s"), figure(middle["long_ttft_s"])),
            ]
        )
    columns = f"a prompt of {options['long']:,} among {_STREAMS} streams, target s | turns"
    columns += " | worst gap ms, of each turn | in targets | gap p50 ms | its first token after s"
    head = (
        f"{record['date'][:10]}, model `{options['model']}` in {options['dtype']}, "
        f"{options['threads']} threads; commit {record['commit']}."
    )
    return "\n".join([head, "", *lines, "", *table(columns, rows)])


MEASUREMENT = Measurement(
    measure=measure,
    table=tables,
    options=(
        option("model", "qwen3-0.6b", NAMED_MODEL.more["help"]),
        option("dtype", "bfloat16", choices=["float32", "bfloat16"]),
        *(THREADS, MODELS),
        option("scheduler", "fifo", "a policy"),
        option("target", CPU_TARGET_STEP_TIME, "seconds"),
        option("turns", 5, "of W2, with the target and with none"),
        option("curve", "0.15,0.2,0.35,0.5", "other targets, seconds"),
        option("curve_turns", 2, "of W2, with those"),
        option("long", 4096, "tokens of the long prompt"),
        option("long_turns", 3, "of the long prompt"),
    ),
    resumes=("commit", "model", "dtype", "threads", "scheduler", "target", "long"),
)
