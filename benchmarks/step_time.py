"""What a target step time costs and gives: steadier streams, for prompts that take longer.

    python -m benchmarks.step_time --model qwen3-0.6b

    W2      32 mixed requests at once, with the default target, with none, and with others (a
            curve): throughput, time to the first token, gaps between tokens
    long    a prompt of 4,096 tokens comes while 8 streams are read: their worst gap until it is in

The engine runs in this thread, one step after the other, on one model; the pace changes from turn
to turn. Every target has its turn with the same prompts, in alternating order, since a machine's
speed drifts. Each is compared with the run without a target in the same turn. In W2 the pace of a
target continues to learn from turn to turn, and turn 0 warms up and does not count. In `long` each
turn begins with an untrained pace.

The record is written after every turn. `--resume` continues one that was interrupted.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.__main__ import CACHE, checkpoint
from benchmarks.adapters.loop import Turn, drive
from benchmarks.measures import figure, quantile, turn_figures
from benchmarks.models import DEMO, SHAPES
from benchmarks.processes import ROOT
from benchmarks.records import commit, machine_record, rounded
from benchmarks.workloads import FIRST_TOKEN, WORKLOADS, make_prompts
from engine.assembly import build_core
from engine.contract.config import CPU_TARGET_STEP_TIME, ContinuousBatchingConfig, LoadConfig
from engine.contract.request import GenerationRequest
from engine.contract.sampling_params import SamplingParams, StopParams
from engine.contract.types import RequestId, TokenId
from engine.core.engine_core import EngineCore
from engine.core.threads import call_on_own_thread
from engine.loading.loader import load_model
from engine.scheduler.pace import StepPace

_BLOCK = 32
_STREAMS = 8
_STREAM_PROMPT = 64
_BEFORE = 16
"""How many tokens each stream has had when the long prompt arrives."""
_NAMES = ("output_rate", "ttft_p50_s", "itl_p50_s", "itl_p99_s")


class CoreEngine:
    """An engine that is stepped; see `StepEngine`."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.turn = 0

    def begin(self, pace: StepPace | None) -> None:
        """Begin a turn. Nothing that an earlier turn computed is reused."""
        self.turn += 1
        self.core.scheduler.pace = pace

    def submit(self, index: int, prompt: list[int], max_tokens: int) -> None:
        """Accept a request."""
        spec = GenerationRequest(
            request_id=RequestId(f"{self.turn}/{index}"),
            prompt=tuple(map(TokenId, prompt)),
            sampling=SamplingParams(temperature=0.0),
            stop=StopParams(max_tokens=max_tokens),
        )
        self.core.add(spec, time.monotonic())

    def step(self) -> Iterator[tuple[int, list[int], bool]]:
        """Compute a step."""
        for output in self.core.step().outputs:
            if output.finish is not None and output.finish.failure is not None:
                raise RuntimeError(output.finish.failure.message)
            index = int(output.request_id.partition("/")[2])
            yield index, list(output.token_ids), output.ends_request


def load(arguments: argparse.Namespace) -> tuple[CoreEngine, int]:
    """Load the engine. Return it and the number of token ids."""
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
        num_blocks=-(-(2 * arguments.long + 10_000) // _BLOCK),
        max_requests_per_batch=32,
        scheduler_type=arguments.scheduler,
        allow_block_sharing=False,
    )
    verified = load_model(str(model), loading, print)
    core, _, _ = build_core(verified, config, print)
    core.runner.warmup()
    return CoreEngine(core), verified.vocab_size


def w2_turn(engine: CoreEngine, turn: int, vocab_size: int) -> dict[str, float]:
    """Run a turn of W2 and return its results."""
    lengths = WORKLOADS["W2"].lengths()
    prompts = make_prompts(lengths, vocab_size, seed=1000 + turn)
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


def long_turn(engine: CoreEngine, turn: int, vocab_size: int, length: int) -> dict[str, float]:
    """Return the gaps of the streams from the arrival of the long prompt until it is computed."""
    lengths = [_STREAM_PROMPT] * _STREAMS + [length]
    ids = itertools.cycle(range(FIRST_TOKEN + turn, vocab_size, 7))
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
    for index in range(len(lengths)):
        engine.core.cancel(RequestId(f"{engine.turn}/{index}"))
    engine.core.take_outputs()
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


class Measurement:
    """The record as it grows."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._path: Path = arguments.output
        self.record: dict[str, Any] = {
            "date": datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
            "commit": commit(),
            "model": arguments.model,
            "dtype": arguments.dtype,
            "threads": arguments.threads,
            "scheduler": arguments.scheduler,
            "machine": machine_record(),
            "target": arguments.target,
            "long_tokens": arguments.long,
            "W2": {},
            "long": {},
        }
        if arguments.resume and self._path.is_file():
            found = json.loads(self._path.read_text())
            same = ("commit", "model", "dtype", "threads", "scheduler", "target", "long_tokens")
            if any(found[name] != self.record[name] for name in same):
                raise SystemExit(f"{self._path} is of another commit, or of other options")
            self.record = found

    def has(self, part: str, target: float, turn: int) -> bool:
        """Whether a turn was measured."""
        return str(turn) in self.record[part].get(f"{target:g}", {})

    def add(self, part: str, target: float, turn: int, figures: dict[str, float]) -> None:
        """Add a turn to the record."""
        entry = {**figures, "load_average": os.getloadavg()[0]}
        self.record[part].setdefault(f"{target:g}", {})[str(turn)] = rounded(entry)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self.record, indent=1) + "\n")
        text = "  ".join(f"{name} {figure(value)}" for name, value in figures.items())
        print(f"{part} turn {turn}, target {target:g} s: {text}", flush=True)


def measure(arguments: argparse.Namespace, measurement: Measurement) -> None:
    """Run what is not in the record yet."""
    # On a thread that ends, so that the CPUs have one team of OpenMP's threads.
    engine, vocab_size = call_on_own_thread(lambda: load(arguments), "load")
    others = [float(text) for text in arguments.curve.split(",") if text]
    paces: dict[float, StepPace | None] = {0.0: None}
    for target in (arguments.target, *others):
        paces[target] = StepPace(target, _BLOCK)
    for turn in range(arguments.turns + 1):
        targets = [0.0, arguments.target]
        targets += others if turn <= arguments.curve_turns else []
        for target in targets[:: 1 if turn % 2 else -1]:
            if measurement.has("W2", target, turn):
                continue
            engine.begin(paces[target])
            figures = w2_turn(engine, turn, vocab_size)
            if turn:
                measurement.add("W2", target, turn, figures)
            else:
                print(f"W2 with a target of {target:g} s is warm", flush=True)
    for turn in range(1, arguments.long_turns + 1):
        for target in (0.0, arguments.target):
            if not measurement.has("long", target, turn):
                engine.begin(StepPace(target, _BLOCK) if target else None)
                figures = long_turn(engine, turn, vocab_size, arguments.long)
                measurement.add("long", target, turn, figures)


def tables(record: dict[str, Any]) -> str:
    """Return the record as Markdown."""
    lines = [
        f"{record['date'][:10]}, model `{record['model']}` in {record['dtype']}, "
        f"{record['threads']} threads; commit {record['commit']}.",
        "",
        "| target s | turns | output tok/s | of none | TTFT p50 s | of none | ITL p50, p99 ms "
        "| p99 / p50 of none | steps over |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    none = record["W2"]["0"]
    for target in sorted(record["W2"], key=float):
        turns = record["W2"][target]
        pairs = [(entry, none[turn]) for turn, entry in turns.items() if turn in none]

        def ratio(name: str, beside: str, pairs: Any = pairs) -> str:
            found = sorted(own[name] / other[beside] for own, other in pairs)
            spread = f" ({found[0]:.2f}–{found[-1]:.2f})" if len(found) > 1 else ""
            return f"{statistics.median(found):.2f}{spread}"

        middle = {
            name: statistics.median(entry[name] for entry in turns.values())
            for name in (*_NAMES, "over_target")
        }
        over = "" if target == "0" else f"{middle['over_target']:.0%}"
        lines.append(
            f"| {'none' if target == '0' else target} | {len(turns)} "
            f"| {figure(middle['output_rate'])} | {ratio('output_rate', 'output_rate')} "
            f"| {figure(middle['ttft_p50_s'])} | {ratio('ttft_p50_s', 'ttft_p50_s')} "
            f"| {figure(1e3 * middle['itl_p50_s'])}, {figure(1e3 * middle['itl_p99_s'])} "
            f"| {ratio('itl_p99_s', 'itl_p50_s')} | {over} |"
        )
    lines += [
        "",
        f"| a prompt of {record['long_tokens']:,} among {_STREAMS} streams, target s | turns "
        "| worst gap ms, of each turn | in targets | gap p50 ms | its first token after s |",
        "|---|---|---|---|---|---|",
    ]
    for target in sorted(record["long"], key=float):
        turns = list(record["long"][target].values())
        worst = [entry["worst_gap_s"] for entry in turns]
        gap, first = (
            statistics.median(entry[name] for entry in turns)
            for name in ("gap_p50_s", "long_ttft_s")
        )
        of_target = "" if target == "0" else f"{max(worst) / float(target):.2f}"
        lines.append(
            f"| {'none' if target == '0' else target} | {len(turns)} "
            f"| {', '.join(figure(1e3 * one) for one in worst)} | {of_target} "
            f"| {figure(1e3 * gap)} | {figure(first)} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-0.6b", help="demo, a shape's name or a directory")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--scheduler", default="fifo", help="a policy")
    parser.add_argument("--target", type=float, default=CPU_TARGET_STEP_TIME, help="seconds")
    parser.add_argument("--turns", type=int, default=5, help="of W2, with the target and with none")
    parser.add_argument("--curve", default="0.15,0.2,0.35,0.5", help="other targets, seconds")
    parser.add_argument("--curve-turns", type=int, default=2, help="of W2, with those")
    parser.add_argument("--long", type=int, default=4096, help="tokens of the long prompt")
    parser.add_argument("--long-turns", type=int, default=3, help="of the long prompt")
    parser.add_argument("--cache", type=Path, default=CACHE, help=f"for models (default {CACHE})")
    parser.add_argument("--resume", action="store_true", help="go on with the record")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "benchmarks" / "results" / "step_time.json"
    )
    arguments = parser.parse_args()
    began = time.monotonic()
    measurement = Measurement(arguments)
    measure(arguments, measurement)
    print(f"\n{tables(measurement.record)}\n")
    print(f"written to {arguments.output}; {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
