"""This checkout beside an older one, turn by turn: what our own decoder gives and costs.

    python -m benchmarks decoder --baseline DIRECTORY --part families --minutes 8

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.decoder_shapes import FAMILIES, Family
from benchmarks.markdown import cpus, link, memory, span, table
from benchmarks.measures import figure, ratio_span
from benchmarks.models import find_model
from benchmarks.processes import ROOT, SystemFailure, tree
from benchmarks.records import Record, commit
from benchmarks.rig.bench import Bench, Case, Found, TimeLimit, limits_of, machine_process
from benchmarks.rig.measurement import MODELS, THREADS, Measurement, in_turns, option
from benchmarks.systems import SystemSpec
from benchmarks.usage import resident
from benchmarks.workloads import WORKLOADS, Lengths

OURS, BASELINE = "ours", "baseline"
LIBRARY = "generate-batch"
PARTS = (*FAMILIES, "shapes", "ready", "float32")
ENGINES = {OURS: "headrace_engine", BASELINE: "headrace_engine"}
"""The adapter of each system, by name."""
ROOM = 2.0
"""How many times the tokens that a system needs at most its cache has room for."""
_DECODED = Lengths(prompt=4 * 32 + 1, output=24)
"""The prefix cache holds only whole blocks of the prompt, and never its last token."""
_READY = "qwen3-0.6b"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell(Case):
    """A case, and a figure of each of its turns.

    Attributes:
        figure: which of a turn's results it is.
        aim: the target ratio; None if there is none.
    """

    figure: str = "output_rate"
    aim: float | None = None
    unit: str = "tok/s"


@dataclass(frozen=True, slots=True)
class Group:
    """What is measured on one model.

    Attributes:
        name: what `--family` calls it.
        make: returns the checkpoint in a cache folder, which is made if it does not exist.
        adapters: the adapter of each system.
    """

    name: str
    make: Callable[[Path], Path]
    cells: Sequence[Cell]
    adapters: Mapping[str, str]
    dtype: str = "bfloat16"


def groups(part: str) -> Iterator[Group]:
    """Yield what a part measures."""
    for name, family in FAMILIES.get(part, {}).items():
        cells = [
            Cell(
                name=f"{name}, {requests}",
                meaning=family.about,
                lengths=[_DECODED] * requests,
                is_repeated=True,
                figure="decode_rate",
                aim=family.aim,
            )
            for requests in (1, 16)
        ]
        yield Group(name, partial(_make_family, name, family), cells, ENGINES)
    if part == "shapes":
        for model, names in ((_READY, ("W1", "W3", "W4")), ("tiny", ("W1",))):
            cells = [_workload(f"{model} {name}", name, 0.98) for name in names]
            yield Group(model, partial(find_model, model), cells, ENGINES)
    if part == "ready":
        lengths = [Lengths(128, 8)]
        cells = [
            Cell(name=name, meaning=meaning, lengths=lengths, figure=name, unit=unit)
            for name, meaning, unit in (
                ("start", "until it is ready", "s"),
                ("most memory", "until it is ready", "MiB"),
                ("memory", "after a request", "MiB"),
            )
        ]
        servers = dict.fromkeys((OURS, BASELINE), "headrace_server")
        yield Group(_READY, partial(find_model, _READY), cells, servers)
    if part == "float32":
        adapters = {**ENGINES, LIBRARY: "transformers_batching"}
        cells = [_workload("demo W2", "W2", 2.5)]
        yield Group("demo", partial(find_model, "demo"), cells, adapters, "float32")


def _workload(name: str, workload: str, aim: float) -> Cell:
    found = WORKLOADS[workload]
    return Cell(name=name, meaning=found.meaning, lengths=found.lengths(), aim=aim)


def _make_family(name: str, family: Family, cache: Path) -> Path:
    return family.checkpoint(cache / "models" / f"decoder-{name}")


class Comparison:
    """Measures what is not in the record yet."""

    def __init__(self, options: argparse.Namespace, record: Record) -> None:
        """Create it. What the record's file has is kept."""
        record.go_on(threads=options.threads)
        record.data.setdefault("cases", {})
        self._record = record
        self._options = options
        self._roots = {BASELINE: options.baseline.resolve()}
        self._time = TimeLimit(60.0 * options.minutes)
        self._stamp = {
            **{name: record.data[name] for name in ("date", "commit")},
            "baseline": commit(self._roots[BASELINE]),
        }

    def measure(self, part: str) -> bool:
        """Measure a part. Returns whether there was time for all of it."""
        for group in groups(part):
            cells = [cell for cell in group.cells if not self._has(part, cell)]
            if not cells or (self._options.family and group.name not in self._options.family):
                continue
            if self._time.is_over():
                return False
            model = group.make(self._options.cache)
            print(f"{part}: {model.name}, {cells[0].meaning}", flush=True)
            try:
                with self._bench(model, group) as bench:
                    if part == "ready":
                        self._restart(bench, part, group)
                    else:
                        self._run(bench, part, group, cells)
            except SystemFailure as failure:
                for cell in cells:
                    if not self._has(part, cell):
                        self._fail(part, cell, failure)
        return True

    def _run(self, bench: Bench, part: str, group: Group, cells: Sequence[Cell]) -> None:
        """Load systems on a model, and measure the cells in order."""
        limits = limits_of(cells, ROOM)
        for spec in self._specs(group):
            bench.start(spec, limits)
        for cell in cells:
            found = Found.of(cell, [*group.adapters][::-1])
            bench.measure(found, self._options.turns)
            if any(cell.figure not in turn for turns in found.turns.values() for turn in turns):
                raise SystemFailure(f"{cell.name}: never did all requests decode at once")
            turns = {
                name: [turn[cell.figure] for turn in turns] for name, turns in found.turns.items()
            }
            self._add(part, cell, turns, found.machine[0])

    def _restart(self, bench: Bench, part: str, group: Group) -> None:
        """Restart the servers in each turn. The cells: the seconds until they are ready, their peak
        memory until then, and their memory after some tokens.
        """
        machine = {**bench.rates(), "load_average": os.getloadavg()[0]}
        limits = limits_of([Case(name="ready", lengths=[Lengths(1024, 64)])], ROOM)
        order = bench.order(group.cells[0], 1)
        specs = {spec.name: spec for spec in self._specs(group)}
        turns: list[dict[str, list[float]]] = [{} for _ in group.cells]
        for number, name in in_turns((BASELINE, OURS), self._options.turns):
            system = bench.start(specs[name], limits)
            most = system.peak_bytes
            bench.ask(name, order)
            held = sum(resident(one.pid)[0] for one in tree(system.ready["pid"]))
            bench.drop(name)
            values = (system.start_s, most / 2**20, held / 2**20)
            for own, value in zip(turns, values, strict=True) if number else ():
                own.setdefault(name, []).append(value)
        for cell, own in zip(group.cells, turns, strict=True):
            self._add(part, cell, own, machine)

    # ---- systems -------------------------------------------------------------------------------

    @contextmanager
    def _bench(self, model: Path, group: Group) -> Iterator[Bench]:
        options, logs = self._options, self._options.cache / "logs"
        with (
            machine_process(
                logs / "decoder-machine.log",
                _environment(ROOT),
                dtype="bfloat16",
                threads=options.threads,
            ) as machine,
            Bench(
                machine=machine,
                logs=logs,
                about={
                    "model": str(model),
                    "dtype": group.dtype,
                    "threads": options.threads,
                    "cache": str(options.cache),
                },
                vocab_size=json.loads((model / "config.json").read_text())["vocab_size"],
                time=TimeLimit(),  # what has begun goes on
                load_s=300.0,
                turn_s=600.0,
                log="decoder-",
            ) as bench,
        ):
            yield bench

    def _specs(self, group: Group) -> Iterator[SystemSpec]:
        """Yield the systems, each of the checkout that its name says."""
        for name, adapter in group.adapters.items():
            root = self._roots.get(name, ROOT)
            module, environment = f"benchmarks.adapters.{adapter}", _environment(root)
            yield SystemSpec(name, module, environment=environment, root=root)

    # ---- the record ----------------------------------------------------------------------------

    def _has(self, part: str, cell: Cell) -> bool:
        """Whether a cell is in the record, with enough turns."""
        cases = self._record.data["cases"].get(part, {})
        turns: dict[str, list[float]] = cases.get(cell.name, {}).get("turns", {})
        return bool(turns) and min(map(len, turns.values())) >= self._options.turns

    def _add(
        self,
        part: str,
        cell: Cell,
        turns: Mapping[str, Sequence[float]],
        machine: Mapping[str, float],
    ) -> None:
        rates = {name: rate for name, rate in machine.items() if name != "load_average"}
        machine = {**rates, "load": machine["load_average"]}
        self._put(part, cell, unit=cell.unit, aim=cell.aim, turns=turns, machine=machine)
        for name, found in turns.items():
            middle = figure(statistics.median(found))
            print(f"  {cell.name:16} {name:15} {middle} {cell.unit}", flush=True)

    def _fail(self, part: str, cell: Cell, failure: SystemFailure) -> None:
        """Record that a cell could not be measured."""
        print(f"  {cell.name} is left out: {failure}", flush=True)
        self._put(part, cell, failure=str(failure).splitlines()[0])

    def _put(self, part: str, cell: Cell, **found: Any) -> None:
        entry = {**self._stamp, "about": cell.meaning, **found}
        self._record.put(entry, "cases", part, cell.name)


def _environment(root: Path) -> dict[str, str]:
    """Return the variables of a process that runs a checkout's own adapters."""
    paths = map(str, (root, root / "clients" / "python" / "src"))
    return {"PYTHONPATH": os.pathsep.join(paths)}


def measure(options: argparse.Namespace, record: Record) -> None:
    if not list((options.baseline / "engine" / "native").glob("libheadrace.*")):
        raise SystemFailure(
            f"{options.baseline}: build its kernels: python -m engine.native.build, there"
        )
    parts = options.part or list(PARTS)
    if "models" in parts:
        for group in (group for part in PARTS for group in groups(part)):
            if not options.family or group.name in options.family:
                group.make(options.cache)
        parts.remove("models")
    comparison = Comparison(options, record)
    for part in parts:
        if options.anew:
            record.data["cases"].pop(part, None)
        if not comparison.measure(part):
            print("out of time: the same command goes on with what is missing")
            break


# ---- the tables ----------------------------------------------------------------------------------

_TITLES = {
    "families": "**Decoding by family**, true widths at reduced depth, output tokens a second.",
    "experts": "**Decoding by mixtures of experts**, as above.",
    "more": "**Decoding by other families**, as above.",
    "recurrent": "**Decoding by families with recurrent layers**, whole shapes, as above.",
    "shapes": "**Workloads** in bfloat16, output tokens a second.",
    "ready": "**A server of the 0.6B shape**, started anew in each turn.",
    "float32": "**The demo model in float32**, output tokens a second.",
}


def render(record: Mapping[str, Any], name: str) -> str:
    cases = record["cases"]
    parts = [_heading(record, name)]
    for part, title in _TITLES.items():
        if part in cases:
            parts.append((_families if part in FAMILIES else _rows)(title, cases[part]))
    return "\n\n".join(parts) + "\n"


def _heading(record: Mapping[str, Any], name: str) -> str:
    cases = [case for part in record["cases"].values() for case in part.values()]
    found = [case["machine"] for case in cases if "machine" in case]
    text = (
        f"{_several(case['date'][:10] for case in cases)}, {record['threads']} threads; "
        f"{cpus(record)}, {memory(record)}, {record['machine']['system']}"
    )
    if found:
        bandwidths = span((one["bandwidth"] / 1e9 for one in found), ".1f")
        loads = span((one["load"] for one in found), ".1f")
        text += f"; memory read at {bandwidths} GB/s, load average {loads} before the cases"
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


def _rows(title: str, cases: Mapping[str, Any]) -> str:
    """Return a table with a row for each case and system, beside the library where it was measured,
    otherwise beside the baseline.
    """
    has_library = any(LIBRARY in case.get("turns", {}) for case in cases.values())
    systems, reference = ((OURS, BASELINE), LIBRARY) if has_library else ((OURS,), BASELINE)
    rows = []
    for name, case in cases.items():
        what = ", ".join(filter(None, (name, case.get("unit"))))
        for system in systems:
            if "failure" in case and system != systems[0]:
                continue  # it is told once
            figures, ratio = _pair(case, system, reference)
            wanted = "" if system == BASELINE or case.get("aim") is None else f"{case['aim']:g}"
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
    measure=measure,
    render=render,
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
