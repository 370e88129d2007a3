"""This checkout beside an older one, turn by turn: what our own decoder gives and costs.

    python -m benchmarks.decoder --baseline DIRECTORY --part families --minutes 8

    families, experts, more   steps that decode 1 and 16 requests, by family (`decoder_shapes`)
    shapes                    W1, W3 and W4 of the 0.6B shape, and W1 of the tiny one, in bfloat16
    ready                     seconds until a server of the 0.6B shape is ready, and its memory
    float32                   W2 of the demo model in float32, beside transformers' generate_batch
    models                    makes the checkpoints, and measures nothing

The older checkout runs its own engine through its own adapters; both have the same options, threads
and checkpoints. They take turns within a minute, the first of a turn is by turns one or the other,
and who waits is stopped: what the machine does meanwhile is seen by both. A ratio is the median of
the turns' ratios, with the smallest and the largest. Turn 0 warms up and does not count.

To measure decoding alone, prompts are the same in all turns of a family: then the prefix cache has
them, and the figure is that of the time when all requests decode.

The record is written after each case, and a later call measures what is not in it yet: a part may
be cut in pieces by --minutes. --anew measures a part's cases again. The older checkout needs its
kernels: `python -m engine.native.build` there.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.__main__ import CACHE, checkpoint
from benchmarks.decoder_shapes import FAMILIES, folder_of
from benchmarks.decoder_table import BASELINE, KIND, LIBRARY, OURS, render
from benchmarks.measures import decode_figures, figure, turn_figures
from benchmarks.models import DEMO
from benchmarks.processes import ROOT, System, SystemFailure
from benchmarks.records import FORMAT, commit, machine_record, rounded
from benchmarks.workloads import WORKLOADS, Lengths, make_prompts

PARTS = (*FAMILIES, "shapes", "ready", "float32")
_OUTPUT = ROOT / "benchmarks" / "results" / "decoder.json"
_ENGINE, _SERVER, _LIBRARY, _MACHINE = (
    f"benchmarks.adapters.{name}"
    for name in ("headrace_engine", "headrace_server", "transformers_batching", "machine")
)
_LOAD_S, _TURN_S = 300.0, 600.0
_DECODED = Lengths(prompt=4 * 32 + 1, output=24)
"""The prefix cache holds only whole blocks of the prompt, and never its last token."""
_READY = "qwen3-0.6b"


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured in each turn.

    Attributes:
        part, name: where it is in the record.
        about: its description in the table.
        unit: the unit of the result.
        aim: the target ratio; None if there is none.
        lengths: the requests.
        is_decode: whether only decoding is measured; the prompts are then always the same.
        turns: the results so far, by system.
    """

    part: str
    name: str
    about: str
    unit: str
    aim: float | None
    lengths: list[Lengths] = field(default_factory=list)
    is_decode: bool = False
    turns: dict[str, list[float]] = field(default_factory=dict)

    def order(self, vocab_size: int, turn: int) -> dict[str, Any]:
        """Return a turn's requests, for an adapter."""
        seed = "decode" if self.is_decode else f"{self.name}, turn {turn}"
        return _order(self.lengths, vocab_size, seed)

    def figure(self, replies: list[dict[str, Any]]) -> float:
        """Return the tokens per second. Raises SystemFailure if the requests never all decoded at
        the same time.
        """
        prompts = [one.prompt for one in self.lengths]
        if not self.is_decode:
            return turn_figures(prompts, replies)["output_rate"]
        found = decode_figures(prompts, replies)
        if found is None:
            raise SystemFailure(f"{self.name}: never did all requests decode at once")
        return found["decode_rate"]


class Book:
    """The record as it grows."""

    def __init__(self, path: Path, baseline: Path, threads: int) -> None:
        self._path = path
        self.record: dict[str, Any] = {"format": FORMAT, "kind": KIND, "cases": {}}
        if path.is_file():
            self.record = json.loads(path.read_text())
        self.record |= {"machine": machine_record(), "threads": threads}
        self._stamp = {
            "date": datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
            "commit": commit(),
            "baseline": _commit_of(baseline),
        }

    def has(self, part: str, name: str, turns: int) -> bool:
        """Whether a case was measured in at least this many turns."""
        found = self.record["cases"].get(part, {}).get(name, {}).get("turns", {})
        return bool(found) and min(map(len, found.values())) >= turns

    def forget(self, part: str) -> None:
        """Remove a part, which is to be measured again."""
        self.record["cases"].pop(part, None)

    def add(self, case: Case, rates: Mapping[str, float]) -> None:
        """Add a case to the record."""
        self._write(
            case,
            {
                **self._stamp,
                "about": case.about,
                "unit": case.unit,
                "aim": case.aim,
                "turns": case.turns,
                "machine": dict(rates),
            },
        )
        for name, found in case.turns.items():
            print(
                f"  {case.name:16} {name:15} {figure(statistics.median(found))} {case.unit}",
                flush=True,
            )

    def fail(self, case: Case, failure: SystemFailure) -> None:
        """Record that a case could not be measured."""
        why = str(failure).splitlines()[0]
        print(f"  {case.name} is left out: {failure}", flush=True)
        self._write(case, {**self._stamp, "about": case.about, "failure": why})

    def _write(self, case: Case, entry: dict[str, Any]) -> None:
        self.record["cases"].setdefault(case.part, {})[case.name] = rounded(entry)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self.record, indent=1) + "\n")


class Bench:
    """Starts systems and runs their turns alternately."""

    def __init__(self, arguments: argparse.Namespace, book: Book) -> None:
        self._baseline: Path = arguments.baseline.resolve()
        self._cache: Path = arguments.cache
        self._threads: int = arguments.threads
        self._until = time.monotonic() + 60 * arguments.minutes
        self._book = book
        self.turns: int = arguments.turns
        self._logs = self._cache / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)

    def is_late(self) -> bool:
        """Whether it is too late to begin anything."""
        return time.monotonic() > self._until

    def has(self, part: str, *names: str) -> bool:
        """Whether these cases are in the record."""
        return all(self._book.has(part, name, self.turns) for name in names)

    @contextmanager
    def machine(self) -> Iterator[Callable[[], dict[str, float]]]:
        """Yield a function that measures the machine's rates."""
        helper = self._start("machine", _MACHINE, ROOT)
        try:
            helper.load({"model": "", "dtype": "bfloat16", "threads": self._threads}, _LOAD_S)
            helper.park()
            yield lambda: {**helper.run({"requests": []}, _TURN_S), "load": os.getloadavg()[0]}
        finally:
            helper.end()

    def measure(
        self,
        cases: list[Case],
        model: Path,
        dtype: str,
        systems: Mapping[str, tuple[str, dict[str, Any]]],
    ) -> None:
        """Load systems on a model and measure the cases in order.

        systems: the adapter of each system and its options, by name.
        """
        print(f"{cases[0].part}: {model.name}, {cases[0].about}", flush=True)
        vocab_size = read_vocab_size(model)
        with ExitStack() as ending:
            rates = ending.enter_context(self.machine())()
            running: dict[str, System] = {}
            try:
                for name, (adapter, options) in systems.items():
                    running[name] = self._start(name, adapter, self._root(name))
                    ending.callback(running[name].end)
                    running[name].load(self._load(model, dtype, options, cases), _LOAD_S)
                    running[name].park()
                for case in cases:
                    self._turns(case, running, vocab_size)
                    self._book.add(case, rates)
            except SystemFailure as failure:
                for case in cases:
                    if not self.has(case.part, case.name):
                        self._book.fail(case, failure)

    def measure_ready(self, cases: list[Case], model: Path) -> None:
        """Restart the servers in each turn. cases: the seconds until they are ready, their peak
        memory until then, and their memory after some tokens.
        """
        order = _order([Lengths(128, 8)], read_vocab_size(model), "ready")
        with self.machine() as rates:
            found_rates = rates()
        try:
            for turn in range(self.turns + 1):
                for name in _in_order(turn, (OURS, BASELINE)):
                    system = self._start(name, _SERVER, self._root(name))
                    try:
                        system.load(self._load(model, "bfloat16", {}, cases), _LOAD_S)
                        most = system.peak_bytes
                        system.run(order, _TURN_S)
                        held = _resident(system.ready["pid"])
                    finally:
                        system.end()
                    if turn:
                        for case, value in zip(
                            cases, (system.start_s, most / 2**20, held / 2**20), strict=True
                        ):
                            case.turns.setdefault(name, []).append(value)
        except SystemFailure as failure:
            for case in cases:
                self._book.fail(case, failure)
        else:
            for case in cases:
                self._book.add(case, found_rates)

    def _turns(self, case: Case, systems: Mapping[str, System], vocab_size: int) -> None:
        for turn in range(self.turns + 1):
            order = case.order(vocab_size, turn)
            for name in _in_order(turn, tuple(systems)):
                found = case.figure(systems[name].run(order, _TURN_S))
                if turn:
                    case.turns.setdefault(name, []).append(found)

    def _root(self, name: str) -> Path:
        return self._baseline if name == BASELINE else ROOT

    def _start(self, name: str, adapter: str, root: Path) -> System:
        path = os.pathsep.join(map(str, (root, root / "clients" / "python" / "src")))
        log = self._logs / f"decoder-{name}.log"
        return System(name, adapter, sys.executable, log, {"PYTHONPATH": path}, root)

    def _load(
        self, model: Path, dtype: str, options: dict[str, Any], cases: list[Case]
    ) -> dict[str, Any]:
        """Return an adapter's order to load a model."""
        every = [one for case in cases for one in case.lengths] or [Lengths(1024, 64)]
        tokens = 2 * max(sum(one.total for one in case.lengths or every) for case in cases)
        return {
            "model": str(model),
            "dtype": dtype,
            "threads": self._threads,
            "cache": str(self._cache),
            "options": options,
            "limits": {
                "kv_tokens": tokens,
                "max_requests": max(len(case.lengths or every) for case in cases),
                "max_request_tokens": max(one.total for one in every),
                "max_prompt_tokens": max(one.prompt for one in every),
            },
        }


def _order(lengths: list[Lengths], vocab_size: int, seed: str) -> dict[str, Any]:
    """Return an adapter's order to run a turn."""
    prompts = make_prompts(lengths, vocab_size, seed)
    return {
        "requests": [
            {"prompt": prompt, "max_tokens": one.output, "at": 0.0}
            for prompt, one in zip(prompts, lengths, strict=True)
        ]
    }


def _in_order(turn: int, names: tuple[str, ...]) -> tuple[str, ...]:
    """Alternate which system runs first from turn to turn."""
    return names if turn % 2 else names[::-1]


def read_vocab_size(model: Path) -> int:
    """Return how many token ids a checkpoint has."""
    found: int = json.loads((model / "config.json").read_text())["vocab_size"]
    return found


def _resident(pid: int) -> int:
    """Return the resident memory of a process and its children, in bytes."""
    root = psutil.Process(pid)
    return sum(one.memory_info().rss for one in (root, *root.children(recursive=True)))


def _commit_of(checkout: Path) -> str:
    words = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, cwd=checkout, capture_output=True, text=True, check=True).stdout[
        :-1
    ]


BOTH = {OURS: (_ENGINE, {}), BASELINE: (_ENGINE, {})}


def measure_families(bench: Bench, part: str, cache: Path, only: list[str]) -> None:
    """Measure the families, with a table for each."""
    for name, family in FAMILIES[part].items():
        names = [f"{name}, {requests}" for requests in (1, 16)]
        if bench.is_late() or bench.has(part, *names) or (only and name not in only):
            continue
        cases = [
            Case(part, one, family.about, "tok/s", family.aim, [_DECODED] * count, is_decode=True)
            for one, count in zip(names, (1, 16), strict=True)
        ]
        bench.measure(cases, make_family(name, cache), "bfloat16", BOTH)


def measure_shapes(bench: Bench, cache: Path, only: list[str]) -> None:
    """Measure the workloads of the 0.6B shape, and one of the tiny shape."""
    for model, workloads in ((_READY, ("W1", "W3", "W4")), ("tiny", ("W1",))):
        cases = [
            Case("shapes", f"{model} {name}", WORKLOADS[name].meaning, "tok/s", 0.98,
                 WORKLOADS[name].lengths())
            for name in workloads
            if not bench.has("shapes", f"{model} {name}")
        ]  # fmt: skip
        if cases and not bench.is_late() and (not only or model in only):
            bench.measure(cases, checkpoint(model, cache), "bfloat16", BOTH)


def measure_ready(bench: Bench, cache: Path) -> None:
    """Measure how long loading takes and how much memory it needs."""
    cases = [
        Case("ready", "start", "until it is ready", "s", None),
        Case("ready", "most memory", "until it is ready", "MiB", None),
        Case("ready", "memory", "after a request", "MiB", None),
    ]
    if not bench.has("ready", *(case.name for case in cases)):
        bench.measure_ready(cases, checkpoint(_READY, cache))


def measure_float32(bench: Bench) -> None:
    """Measure the demo model in float32."""
    workload = WORKLOADS["W2"]
    case = Case("float32", "demo W2", workload.meaning, "tok/s", 2.5, workload.lengths())
    if not bench.has("float32", case.name):
        bench.measure([case], DEMO, "float32", {**BOTH, LIBRARY: (_LIBRARY, {})})


def make_family(name: str, cache: Path) -> Path:
    """Make a family's checkpoint if it does not exist. A separate process makes it, because torch
    takes much memory.
    """
    folder = folder_of(name, cache)
    if not (folder / "config.json").is_file():
        print(f"making {folder}", flush=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        code = (
            "import sys; from pathlib import Path; from benchmarks.decoder_shapes import *; "
            "families = {k: v for part in FAMILIES.values() for k, v in part.items()}; "
            "make(families[sys.argv[1]], Path(sys.argv[2]))"
        )
        subprocess.run([sys.executable, "-c", code, name, str(folder)], cwd=ROOT, check=True)
    return folder


def make_models(cache: Path, only: list[str]) -> None:
    """Make all checkpoints."""
    for name in (name for part in FAMILIES.values() for name in part):
        if not only or name in only:
            make_family(name, cache)
    for shape in (_READY, "tiny"):
        checkpoint(shape, cache)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decoder",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--baseline", type=Path, required=True, help="the older checkout")
    parser.add_argument("--part", choices=(*PARTS, "models"), action="append", help="default: all")
    parser.add_argument(
        "--family", action="append", default=[], help="only this one, or this shape; several"
    )
    parser.add_argument("--turns", type=int, default=7, help="that count (default 7)")
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no case after so many")
    parser.add_argument("--anew", action="store_true", help="measure what is in the record too")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--cache", type=Path, default=CACHE, help=f"for models (default {CACHE})")
    parser.add_argument("--output", type=Path, default=_OUTPUT, help="the record")
    arguments = parser.parse_args()
    if not list((arguments.baseline / "engine" / "native").glob("libheadrace.*")):
        sys.exit(f"{arguments.baseline}: build its kernels: python -m engine.native.build, there")
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, lambda number, frame: sys.exit(128 + number))  # ends the systems
    parts = arguments.part or list(PARTS)
    if "models" in parts:
        make_models(arguments.cache, arguments.family)
        parts.remove("models")
    book = Book(arguments.output, arguments.baseline, arguments.threads)
    bench = Bench(arguments, book)
    for part in parts:
        if arguments.anew:
            book.forget(part)
        if part in FAMILIES:
            measure_families(bench, part, arguments.cache, arguments.family)
        elif not bench.is_late():
            _WAYS[part](bench, arguments.cache, arguments.family)
    if book.record["cases"]:
        print(f"\n{render(book.record, arguments.output.name)}\nwritten to {arguments.output}")
    if bench.is_late():
        print("out of time: the same command goes on with what is missing")


_WAYS: dict[str, Callable[[Bench, Path, list[str]], None]] = {
    "shapes": measure_shapes,
    "ready": lambda bench, cache, only: measure_ready(bench, cache),
    "float32": lambda bench, cache, only: measure_float32(bench),
}


if __name__ == "__main__":
    main()
