"""This checkout beside an older one, turn by turn: what our own decoder gives and costs.

    python -m benchmarks.decoder --baseline DIRECTORY --part families --minutes 8

    families, experts, more, recurrent
                              steps that decode 1 and 16 requests, by family (`decoder_shapes`)
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
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.decoder_shapes import FAMILIES
from benchmarks.markdown import cpus, link, memory, table
from benchmarks.measures import decode_figures, figure, ratio_span, turn_figures
from benchmarks.models import DEMO, checkpoint, make_random
from benchmarks.processes import ROOT, System, SystemFailure, resident, tree
from benchmarks.records import Record
from benchmarks.rig.measurement import MODELS, THREADS, Measurement, in_turns, option
from benchmarks.rig.systems import Systems, turn_order
from benchmarks.workloads import WORKLOADS, Lengths, make_prompts

OURS, BASELINE = "ours", "baseline"
LIBRARY = "generate-batch"
PARTS = (*FAMILIES, "shapes", "ready", "float32")
_ENGINE, _SERVER, _LIBRARY = (
    f"benchmarks.adapters.{name}"
    for name in ("headrace_engine", "headrace_server", "transformers_batching")
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
        return order_of(self.lengths, vocab_size, seed)

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


class Bench:
    """Starts systems, runs their turns alternately, and puts the cases in the record."""

    def __init__(self, options: argparse.Namespace, record: Record) -> None:
        """Create it. What the record's file has is kept."""
        now = record.data
        record.resume(())
        record.data |= {**now, "threads": options.threads}
        record.data.setdefault("cases", {})
        self.record = record
        self.cache: Path = options.cache
        self.only: Sequence[str] = options.family
        self.turns: int = options.turns
        self._baseline: Path = options.baseline.resolve()
        self._threads: int = options.threads
        self._until: float = time.monotonic() + 60 * options.minutes
        self._stamp = {
            **{name: record.data[name] for name in ("date", "commit")},
            "baseline": _commit_of(self._baseline),
        }

    def is_late(self) -> bool:
        """Whether it is too late to begin anything."""
        return time.monotonic() > self._until

    def wants(self, name: str) -> bool:
        """Whether a family or shape was asked for, and there is time."""
        is_chosen = not self.only or name in self.only
        return is_chosen and not self.is_late()

    def has(self, part: str, *names: str) -> bool:
        """Whether these cases are in the record, with enough turns."""
        cases = self.record.data["cases"].get(part, {})
        found: list[dict[str, list[float]]] = [
            cases.get(name, {}).get("turns", {}) for name in names
        ]
        return all(one and min(map(len, one.values())) >= self.turns for one in found)

    def add(self, case: Case, rates: Mapping[str, float]) -> None:
        """Add a case to the record."""
        about = {"about": case.about, "unit": case.unit, "aim": case.aim}
        entry = {**self._stamp, **about, "turns": case.turns, "machine": dict(rates)}
        self.record.put(entry, "cases", case.part, case.name)
        for name, found in case.turns.items():
            middle = figure(statistics.median(found))
            print(f"  {case.name:16} {name:15} {middle} {case.unit}", flush=True)

    def fail(self, case: Case, failure: SystemFailure) -> None:
        """Record that a case could not be measured."""
        why = str(failure).splitlines()[0]
        print(f"  {case.name} is left out: {failure}", flush=True)
        entry = {**self._stamp, "about": case.about, "failure": why}
        self.record.put(entry, "cases", case.part, case.name)

    @contextmanager
    def systems(self) -> Iterator[tuple[Systems, dict[str, float]]]:
        """Yield systems, and the machine's rates."""
        with Systems(self.cache / "logs") as systems:
            systems.start_machine(
                log="decoder-machine",
                environment=_environment(ROOT),
                dtype="bfloat16",
                threads=self._threads,
            )
            yield systems, {**systems.rates(), "load": os.getloadavg()[0]}

    def start(
        self,
        systems: Systems,
        name: str,
        module: str,
        order: Mapping[str, Any],
    ) -> System:
        """Load a system of the checkout that its name says."""
        root = self._baseline if name == BASELINE else ROOT
        return systems.start(
            name, module, order, _LOAD_S, log=f"decoder-{name}", environment=_environment(root),
            root=root,
        )  # fmt: skip

    def measure(
        self,
        cases: list[Case],
        model: Path,
        dtype: str,
        kinds: Mapping[str, tuple[str, dict[str, Any]]],
    ) -> None:
        """Load systems on a model and measure the cases in order.

        kinds: the adapter of each system and its options, by name.
        """
        print(f"{cases[0].part}: {model.name}, {cases[0].about}", flush=True)
        vocab_size = read_vocab_size(model)
        try:
            with self.systems() as (systems, rates):
                running = {
                    name: self.start(
                        systems, name, module, self.load_order(model, dtype, options, cases)
                    )
                    for name, (module, options) in kinds.items()
                }
                for case in cases:
                    for turn, name in in_turns(tuple(reversed(running)), self.turns):
                        replies = running[name].run(case.order(vocab_size, turn), _TURN_S)
                        found = case.figure(replies)
                        if turn:
                            case.turns.setdefault(name, []).append(found)
                    self.add(case, rates)
        except SystemFailure as failure:
            for case in cases:
                if not self.has(case.part, case.name):
                    self.fail(case, failure)

    def measure_ready(self, cases: list[Case], model: Path) -> None:
        """Restart the servers in each turn. cases: the seconds until they are ready, their peak
        memory until then, and their memory after some tokens.
        """
        order = order_of([Lengths(128, 8)], read_vocab_size(model), "ready")
        load = self.load_order(model, "bfloat16", {}, cases)
        try:
            with self.systems() as (systems, rates):
                for turn, name in in_turns((BASELINE, OURS), self.turns):
                    system = self.start(systems, name, _SERVER, load)
                    most = system.peak_bytes
                    system.run(order, _TURN_S)
                    held = sum(resident(one.pid)[0] for one in tree(system.ready["pid"]))
                    systems.drop(system)
                    values = (system.start_s, most / 2**20, held / 2**20)
                    for case, value in zip(cases, values, strict=True) if turn else ():
                        case.turns.setdefault(name, []).append(value)
                for case in cases:
                    self.add(case, rates)
        except SystemFailure as failure:
            for case in cases:
                self.fail(case, failure)

    def load_order(
        self, model: Path, dtype: str, options: dict[str, Any], cases: list[Case]
    ) -> dict[str, Any]:
        """Return an adapter's order to load a model."""
        every = [one for case in cases for one in case.lengths] or [Lengths(1024, 64)]
        tokens = 2 * max(sum(one.total for one in case.lengths or every) for case in cases)
        return {
            "model": str(model),
            "dtype": dtype,
            "threads": self._threads,
            "cache": str(self.cache),
            "options": options,
            "limits": {
                "kv_tokens": tokens,
                "max_requests": max(len(case.lengths or every) for case in cases),
                "max_request_tokens": max(one.total for one in every),
                "max_prompt_tokens": max(one.prompt for one in every),
            },
        }


def order_of(lengths: list[Lengths], vocab_size: int, seed: str) -> dict[str, Any]:
    """Return an adapter's order to run a turn."""
    return turn_order(make_prompts(lengths, vocab_size, seed), lengths)


def read_vocab_size(model: Path) -> int:
    """Return how many token ids a checkpoint has."""
    found: int = json.loads((model / "config.json").read_text())["vocab_size"]
    return found


def _environment(root: Path) -> dict[str, str]:
    """Return the variables of a process that runs a checkout's own adapters."""
    paths = map(str, (root, root / "clients" / "python" / "src"))
    return {"PYTHONPATH": os.pathsep.join(paths)}


def _commit_of(checkout: Path) -> str:
    words = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, cwd=checkout, capture_output=True, text=True, check=True).stdout[
        :-1
    ]


BOTH: dict[str, tuple[str, dict[str, Any]]] = {OURS: (_ENGINE, {}), BASELINE: (_ENGINE, {})}


def make_family(name: str, cache: Path) -> Path:
    """Return the folder of a family's checkpoint, which is made if it does not exist."""
    [family] = [part[name] for part in FAMILIES.values() if name in part]
    return make_random(cache / "models" / f"decoder-{name}", family.model_type, family.config())


def measure_families(bench: Bench, part: str) -> None:
    """Measure the families, with a table for each."""
    for name, family in FAMILIES[part].items():
        names = [f"{name}, {requests}" for requests in (1, 16)]
        if bench.has(part, *names) or not bench.wants(name):
            continue
        cases = [
            Case(part, one, family.about, "tok/s", family.aim, [_DECODED] * count, is_decode=True)
            for one, count in zip(names, (1, 16), strict=True)
        ]
        bench.measure(cases, make_family(name, bench.cache), "bfloat16", BOTH)


def measure_shapes(bench: Bench) -> None:
    """Measure the workloads of the 0.6B shape, and one of the tiny shape."""
    for model, workloads in ((_READY, ("W1", "W3", "W4")), ("tiny", ("W1",))):
        cases = [
            Case("shapes", f"{model} {name}", WORKLOADS[name].meaning, "tok/s", 0.98,
                 WORKLOADS[name].lengths())
            for name in workloads
            if not bench.has("shapes", f"{model} {name}")
        ]  # fmt: skip
        if cases and bench.wants(model):
            bench.measure(cases, checkpoint(model, bench.cache), "bfloat16", BOTH)


def measure_ready(bench: Bench) -> None:
    """Measure how long loading takes and how much memory it needs."""
    cases = [
        Case("ready", "start", "until it is ready", "s", None),
        Case("ready", "most memory", "until it is ready", "MiB", None),
        Case("ready", "memory", "after a request", "MiB", None),
    ]
    if not bench.has("ready", *(case.name for case in cases)):
        bench.measure_ready(cases, checkpoint(_READY, bench.cache))


def measure_float32(bench: Bench) -> None:
    """Measure the demo model in float32."""
    workload = WORKLOADS["W2"]
    case = Case("float32", "demo W2", workload.meaning, "tok/s", 2.5, workload.lengths())
    if not bench.has("float32", case.name):
        bench.measure([case], DEMO, "float32", {**BOTH, LIBRARY: (_LIBRARY, {})})


def make_models(cache: Path, only: Sequence[str]) -> None:
    """Make all checkpoints."""
    for name in (name for part in FAMILIES.values() for name in part):
        if not only or name in only:
            make_family(name, cache)
    for shape in (_READY, "tiny"):
        checkpoint(shape, cache)


_WAYS: dict[str, Callable[[Bench], None]] = {
    "shapes": measure_shapes,
    "ready": measure_ready,
    "float32": measure_float32,
}


def measure(options: argparse.Namespace, record: Record) -> None:
    """Measure what is not in the record yet."""
    if not list((options.baseline / "engine" / "native").glob("libheadrace.*")):
        raise SystemFailure(
            f"{options.baseline}: build its kernels: python -m engine.native.build, there"
        )
    parts = options.part or list(PARTS)
    if "models" in parts:
        make_models(options.cache, options.family)
        parts.remove("models")
    bench = Bench(options, record)
    for part in parts:
        if options.anew:
            record.data["cases"].pop(part, None)
        if part in FAMILIES:
            measure_families(bench, part)
        elif not bench.is_late():
            _WAYS[part](bench)
    if bench.is_late():
        print("out of time: the same command goes on with what is missing")


# ---- the tables ----------------------------------------------------------------------------------

_TITLES = {
    "families": "**Decoding by family**, true widths at reduced depth, output tokens a second.",
    "experts": "**Decoding by mixtures of experts**, as above.",
    "more": "**Decoding by other families**, as above.",
    "recurrent": "**Decoding by families with recurrent layers**, whole shapes, as above.",
}


def render(record: Mapping[str, Any], name: str) -> str:
    """Return the record as text for a document. name: the name of its file."""
    cases = record["cases"]
    parts = [_heading(record, name)]
    for part, title in _TITLES.items():
        if part in cases:
            parts.append(_families(title, cases[part]))
    if "shapes" in cases:
        title = "**Workloads** in bfloat16, output tokens a second."
        parts.append(_rows(title, cases["shapes"], BASELINE, (OURS,)))
    if "ready" in cases:
        title = "**A server of the 0.6B shape**, started anew in each turn."
        parts.append(_rows(title, cases["ready"], BASELINE, (OURS,)))
    if "float32" in cases:
        title = "**The demo model in float32**, output tokens a second."
        parts.append(_rows(title, cases["float32"], LIBRARY, (OURS, BASELINE)))
    return "\n\n".join(parts) + "\n"


def _heading(record: Mapping[str, Any], name: str) -> str:
    cases = [case for part in record["cases"].values() for case in part.values()]
    found = [case["machine"] for case in cases if "machine" in case]
    text = (
        f"{_several(case['date'][:10] for case in cases)}, {record['threads']} threads; "
        f"{cpus(record)}, {memory(record)}, {record['machine']['system']}"
    )
    if found:
        bandwidths, loads = (sorted(one[key] for one in found) for key in ("bandwidth", "load"))
        text += (
            f"; memory read at {bandwidths[0] / 1e9:.1f} to {bandwidths[-1] / 1e9:.1f} GB/s, load "
            f"average {loads[0]:.1f} to {loads[-1]:.1f} before the cases"
        )
    return (
        f"{text}. Commit {_several(case['commit'] for case in cases)}, baseline "
        f"{_several(case['baseline'] for case in cases)}. {link(name)}"
    )


def _several(values: Any) -> str:
    return ", ".join(sorted({str(value) for value in values}))


def _families(title: str, cases: Mapping[str, Any]) -> str:
    rows = []
    for family in dict.fromkeys(name.partition(",")[0] for name in cases):
        both = [cases.get(f"{family}, {requests}") for requests in (1, 16)]
        about = next(case["about"] for case in both if case)
        aims = {f"{case['aim']:g}" for case in both if case and "aim" in case}
        cells = [cell for case in both for cell in _pair(case, OURS, BASELINE)]
        rows.append([family, about, *cells, ", ".join(aims)])
    columns = "family | shape | 1 request: ours, baseline | ratio | 16 requests: ours, baseline"
    return "\n".join([title, "", *table(f"{columns} | ratio | wanted", rows)])


def _rows(title: str, cases: Mapping[str, Any], reference: str, systems: Sequence[str]) -> str:
    """Return a table. systems: those that are compared with the reference; each has a row per
    case.
    """
    rows = []
    for name, case in cases.items():
        unit = case.get("unit", "")
        for system in systems:
            aim = case.get("aim")
            wanted = "" if aim is None or system == BASELINE else f"{aim:g}"
            figures, ratio = _pair(case, system, reference)
            if "failure" in case and system != systems[0]:
                continue  # it is told once
            what = f"{name}, {unit}" if unit else name
            rows.append([what, case["about"], f"{system}: {figures}", ratio, wanted])
    lines = table(f"what |  | system: it, {reference} | ratio | wanted", rows)
    return "\n".join([f"{title} Beside {reference}.", "", *lines])


def _pair(case: Mapping[str, Any] | None, system: str, reference: str) -> tuple[str, str]:
    """Return the medians of two systems, and their ratio, in bold if it misses the target."""
    if case is None:
        return "", ""
    if "failure" in case:
        return case["failure"].replace("|", "/"), ""
    ours, others = case["turns"][system], case["turns"][reference]
    ratios = [one / other for one, other in zip(ours, others, strict=True)]
    ratio = f"{ratio_span(ratios, '.2f').removesuffix(')')}, {len(ours)} turns)"
    has_aim = case["aim"] is not None and system != BASELINE
    is_below = has_aim and statistics.median(ratios) < case["aim"]
    return (
        f"{figure(statistics.median(ours))}, {figure(statistics.median(others))}",
        f"**{ratio}**" if is_below else ratio,
    )


MEASUREMENT = Measurement(
    name="decoder",
    about=__doc__,
    measure=measure,
    table=lambda record: render(record, "decoder.json"),
    options=(
        option("baseline", None, "the older checkout", type=Path, required=True),
        option("part", [], "default: all", choices=(*PARTS, "models"), action="append"),
        option("family", [], "only this one, or this shape; several", action="append"),
        option("turns", 7, "that count (default 7)"),
        option("minutes", 600.0, "begin no case after so many"),
        option("anew", False, "measure what is in the record too"),
        *(THREADS, MODELS),
    ),
)

if __name__ == "__main__":
    MEASUREMENT.run()
