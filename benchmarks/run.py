"""Headrace beside other systems on a CPU: `python -m benchmarks run`.

Systems are loaded once, then take turns on each case: a workload, and how its requests arrive. A
system that fails is left out of its case, and the record says so. At the end some of the tokens are
judged by transformers in float32.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.floors import Rates, Shape, ideal, read_shape
from benchmarks.instructions import ENVIRONMENTS
from benchmarks.markdown import cpus, link, memory, milliseconds, span, table
from benchmarks.measures import compared, figure, medians
from benchmarks.models import find_model
from benchmarks.plot import draw
from benchmarks.processes import SystemFailure
from benchmarks.records import Record
from benchmarks.rig.bench import (
    Bench,
    Case,
    Found,
    OutOfTime,
    TimeLimit,
    limits_of,
    machine_process,
)
from benchmarks.rig.measurement import (
    MODELS,
    NAMED_MODEL,
    RESULTS,
    THREADS,
    Measurement,
    option,
)
from benchmarks.systems import MAX_REQUESTS, SYSTEMS, SystemSpec
from benchmarks.workloads import WORKLOADS, Load, Workload, parse_load

LOCAL = RESULTS / "local"
LOAD_S = 900.0
ROOM = 1.25
"""How many times the tokens that a system needs at most its cache has room for."""

# ---- what is asked for ---------------------------------------------------------------------------


def chosen_cases(options: argparse.Namespace) -> list[Case]:
    """Return the cases that the options ask for. Raises ValueError."""
    loads = [parse_load(text) for text in options.load.split(",")]
    names = _chosen("workload", options.workload, WORKLOADS)
    return [case_of(WORKLOADS[name], load) for name in names for load in loads]


def case_of(workload: Workload, load: Load) -> Case:
    """Return the case of a workload whose requests arrive so."""
    lengths = workload.lengths(load.count(workload))
    return Case(
        name=f"{workload.name} {load.name}",
        meaning=workload.meaning,
        lengths=lengths,
        load=load,
        at_once=min(MAX_REQUESTS, load.concurrency or len(lengths)),
    )


def chosen_systems(options: argparse.Namespace) -> list[SystemSpec]:
    """Return the systems that the options ask for. Raises ValueError if there is no such system, or
    it cannot be measured so.
    """
    known = {**SYSTEMS, **dict(map(_variant, options.variant))}
    names = _chosen("system", options.systems, known)
    for name in names if options.instructions else ():
        if known[name].module == "benchmarks.adapters.headrace_server":
            raise ValueError(f"--instructions: {name} is a server and takes the processor's best")
    peers = {}
    for text in options.peer:
        name, _, directory = text.partition("=")
        if name not in known or not known[name].is_peer or not directory:
            raise ValueError(f"--peer {text}: NAME=DIRECTORY is wanted, NAME one of the peers")
        peers[name] = Path(directory).resolve()
    for name in names:
        if known[name].is_peer and name not in peers:
            raise ValueError(
                f"{name} has an environment of its own: make it with benchmarks/peers/setup.sh "
                f"{name} DIRECTORY, then give --peer {name}=DIRECTORY"
            )
    return [dataclasses.replace(known[name], peer=peers.get(name)) for name in names]


def _variant(text: str) -> tuple[str, SystemSpec]:
    """Return a system under another name, with additional options. Raises ValueError."""
    name, _, rest = text.partition("=")
    system, _, options = rest.partition(":")
    try:
        found = json.loads(options)
    except ValueError:
        found = None
    if not name or name in SYSTEMS or system not in SYSTEMS or not isinstance(found, dict):
        raise ValueError(f"--variant {text}: NAME=SYSTEM:JSON is wanted, JSON an object of options")
    spec = SYSTEMS[system]
    return name, dataclasses.replace(spec, name=name, options={**spec.options, **found})


def _chosen(kind: str, text: str, known: Mapping[str, object]) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in known:
            raise ValueError(f"{name!r} is no {kind}; there are {', '.join(known)}")
    return list(dict.fromkeys(names))


# ---- measuring -----------------------------------------------------------------------------------


def measure(options: argparse.Namespace, record: Record) -> None:
    """Run the command. Raises SystemFailure if the options are wrong, or the first system does not
    start.
    """
    try:
        systems = chosen_systems(options)
        model = find_model(options.model, options.cache)
        cases = chosen_cases(options)
    except ValueError as error:
        raise SystemFailure(str(error)) from error
    now = datetime.datetime.now(tz=datetime.UTC).strftime("%Y%m%d-%H%M%S")
    record.path = record.path or LOCAL / f"{model.name}-{options.dtype}-{now}.json"
    compare(options, record, model, cases, systems)
    record.path.with_suffix(".svg").write_text(draw(record.data))


def compare(
    options: argparse.Namespace,
    record: Record,
    model: Path,
    cases: Sequence[Case],
    systems: Sequence[SystemSpec],
) -> None:
    """Measure systems on a checkpoint, and put what is found in the record; the others are compared
    with the first. Raises SystemFailure if the first system, or all others, cannot start.
    """
    shape, reference = read_shape(model), systems[0].name
    fitting = [case for case in cases if max(one.total for one in case.lengths) <= shape.max_tokens]
    for case in cases:
        if case not in fitting:
            print(f"{case.name} is left out: longer than the model's context")
    told = {"dtype": options.dtype, "threads": options.threads}
    about = {"model": str(model), "instructions": options.instructions, **told}
    environment = ENVIRONMENTS.get(options.instructions or "", {})
    logs = options.cache / "logs"
    with (
        machine_process(logs / "machine.log", environment, **about) as machine,
        Bench(
            machine=machine,
            logs=logs,
            about={**about, "cache": str(options.cache)},
            vocab_size=shape.vocab_size,
            time=TimeLimit(math.inf if options.minutes is None else 60.0 * options.minutes),
            load_s=LOAD_S,
            turn_s=options.turn_seconds,
            environment=environment,
        ) as bench,
    ):
        record.data["machine"] |= {
            "instructions": machine.ready.get("settings", {}).get("instructions"),
            "instructions_chosen": options.instructions is not None,
        }
        record.data |= {
            "model": model.name,
            **told,
            "weight_bytes": shape.weight_bytes(options.dtype),
            "kv_bytes_per_token": shape.kv_bytes(options.dtype),
            "reference": reference,
            "left_out": _start(bench, systems, fitting, shape),
        }
        if reference not in bench.running:
            raise SystemFailure(f"{reference} does not start; see above")
        found = []
        for case in fitting:
            if (came := _measure(bench, case, systems, options.turns)).machine:
                found.append(came)
                record.put([_told(one, shape, record.data) for one in found], "cases")
        if not found:
            raise SystemFailure("nothing was measured")
        record.put(
            {
                name: {
                    "start_s": system.start_s,
                    "peak_rss_bytes": system.peak_bytes,
                    "settings": system.ready.get("settings", {}),
                    "versions": system.ready.get("versions", {}),
                    "python": system.ready.get("python"),
                }
                for name, system in bench.running.items()
            },
            "systems",
        )
        bench.close()
        if options.check:
            bench.say("checking the tokens against transformers in float32")
            for case_record, came in zip(record.data["cases"], found, strict=True):
                case_record["check"] = {
                    name: bench.judge(turn, options.check) for name, turn in came.last.items()
                }


def _start(
    bench: Bench, systems: Sequence[SystemSpec], cases: Sequence[Case], shape: Shape
) -> dict[str, str]:
    """Start the systems. Returns why some are left out."""
    left_out: dict[str, str] = {}
    limits = limits_of(cases, ROOM)
    limits["kv_bytes"] = limits["kv_tokens"] * shape.kv_bytes(bench.about["dtype"])
    processors = sorted(psutil.Process().cpu_affinity() or [])
    for spec in systems:
        try:
            bench.start(spec.on(processors), limits)
        except (OSError, SystemFailure) as failure:
            bench.say(f"  {spec.name} is left out: {failure}")
            left_out[spec.name] = str(failure).splitlines()[0]
    return left_out


def _measure(bench: Bench, case: Case, systems: Sequence[SystemSpec], turns: int) -> Found:
    """Let the systems that run take their turns on a case."""
    found = Found.of(case, [spec.name for spec in systems if spec.name in bench.running])
    for spec in systems:
        if case.load.rate is not None and not spec.is_online and spec.name in found.turns:
            del found.turns[spec.name]
            found.failures[spec.name] = "takes no requests while it runs"
    bench.say(f"{case.name}: {case.meaning}; {len(case.lengths)} requests")
    try:
        bench.measure(found, turns, rates_each_turn=True, leaves_out=True)
    except OutOfTime:
        bench.say("  out of time: no more turns")
    return found


def _told(found: Found, shape: Shape, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return a case in the record's format. about: the record so far."""
    case, reference = found.case, about["reference"]
    turns = {name: figures for name, figures in found.turns.items() if figures}
    rates = medians(found.machine)
    floor = None
    if case.load.rate is None:
        limits = Rates(rates["bandwidth"], rates["matrix"])
        best = ideal(case.lengths, case.load.concurrency, shape, about["dtype"], limits)
        floor = {
            "prefill_s": best.prefill_s,
            "decode_s": best.decode_s,
            "steps": best.steps,
            "output_rate": sum(one.output for one in case.lengths) / best.total_s,
        }
    median = {name: medians(figures) for name, figures in turns.items()}
    workload, load = case.name.split()
    return {
        "workload": workload,
        "meaning": case.meaning,
        "load": load,
        "requests": len(case.lengths),
        "prompt_tokens": sum(one.prompt for one in case.lengths),
        "output_tokens": sum(one.output for one in case.lengths),
        "machine": found.machine,
        "floor": floor,
        "turns": turns,
        "median": median,
        "ratio": {
            name: compared(turns[reference], figures, "output_rate")["median"]
            for name, figures in turns.items()
            if reference in turns
        },
        "of_floor": {
            name: figures["output_rate"] / floor["output_rate"]
            for name, figures in median.items()
            if floor is not None
        },
        "check": {},
        "failures": found.failures,
    }


# ---- the tables ----------------------------------------------------------------------------------


def render(record: Mapping[str, Any], name: str) -> str:
    """Return the text of one record: what was run and where, a table for each case, the systems,
    and the checks.
    """
    plot = name.removesuffix(".json") + ".svg"
    parts = [_heading(record, name), f"![Output tokens per second](../{plot})"]
    parts += [_case(record, case) for case in record["cases"]]
    parts.append(_systems(record))
    return "\n\n".join(parts) + "\n"


def _heading(record: Mapping[str, Any], name: str) -> str:
    machine = record["machine"]
    rates = [rate for case in record["cases"] for rate in case["machine"]]
    bandwidths = [rate["bandwidth"] / 1e9 for rate in rates]
    matrix = [rate["matrix"] / 1e12 for rate in rates]
    loads = [rate["load_average"] for rate in rates]
    found = machine.get("instructions")
    by_hand = " chosen by hand" if machine.get("instructions_chosen") else ""
    instructions = f", {found}{by_hand}" if found else ""
    return (
        f"{record['date'][:10]}, model `{record['model']}` in {record['dtype']}, "
        f"{record['threads']} threads; {cpus(record, instructions)}, {memory(record)}, "
        f"{machine['system']}; memory read at {span(bandwidths, '.1f')} GB/s, matrices multiplied "
        f"at {span(matrix, '.2f')} TFLOP/s, load average {span(loads, '.1f')} before the turns. "
        f"Commit {record['commit']}. {link(name)}"
    )


def _case(record: Mapping[str, Any], case: Mapping[str, Any]) -> str:
    reference = record["reference"]
    turns = len(case["machine"])
    title = f"**{case['workload']}, {_load(case['load'])}**: "
    if case["requests"] == 1:
        title += case["meaning"]
    else:
        title += f"{case['requests']} requests ({case['meaning']})"
    title += f"; {turns} turn{'s' if turns > 1 else ''}."
    floor = case["floor"]
    if floor is not None:
        seconds = floor["prefill_s"] + floor["decode_s"]
        title += (
            f" Floor: {floor['output_rate']:,.0f} tok/s ({figure(seconds)} s, of which prefill "
            f"{floor['prefill_s'] / seconds:.0%})."
        )
    rows = [_row(case, name) for name in case["median"]]
    rows += [[name, why, *[""] * 7] for name, why in case["failures"].items()]
    columns = f"system | output tok/s | total tok/s | of the floor | {reference} / it"
    columns += " | TTFT p50, p99 ms | TPOT ms | ITL p50, p90, p99 ms | greedy tokens"
    return "\n".join([title, "", *table(columns, rows)])


def _row(case: Mapping[str, Any], name: str) -> list[str]:
    median = case["median"][name]
    share = case["of_floor"].get(name)
    ratio = case["ratio"].get(name)
    return [
        name,
        figure(median["output_rate"]),
        figure(median["total_rate"]),
        "" if share is None else f"{share:.0%}",
        "" if ratio is None else f"{ratio:.2f}",
        milliseconds(median, "ttft_p50_s", "ttft_p99_s"),
        milliseconds(median, "tpot_s"),
        milliseconds(median, "itl_p50_s", "itl_p90_s", "itl_p99_s"),
        _verdict(case["check"].get(name)),
    ]


def _systems(record: Mapping[str, Any]) -> str:
    rows = []
    for name, system in record["systems"].items():
        versions = ", ".join(f"{key} {value}" for key, value in system["versions"].items())
        figures = [f"{system['start_s']:.1f}", f"{system['peak_rss_bytes'] / 2**30:.2f}"]
        rows.append([name, *figures, f"{versions}, Python {system['python']}"])
    rows += [[name, why, "", ""] for name, why in record["left_out"].items()]
    return "\n".join(table("system | start s | peak RSS GiB | versions", rows))


def _verdict(check: dict[str, Any] | None) -> str:
    if check is None:
        return "not checked"
    mark = "" if check["is_right"] else "**below**: "
    if "equal_requests" in check:
        return f"{mark}{check['equal_requests']} of {check['requests']} requests equal"
    return (
        f"{mark}{check['best']:.1%} best, {check['near']:.1%} near, worst {check['worst_gap']:.3f}"
    )


def _load(name: str) -> str:
    kind, _, number = name.partition(":")
    if kind == "closed":
        return f"{number} at a time"
    return f"{number} requests/s (Poisson)" if kind == "poisson" else "all at once"


MEASUREMENT = Measurement(
    measure=measure,
    render=render,
    options=(
        option("workload", "W1", "names from --list, with commas"),
        option("load", "all", "all, closed:N, poisson:RATE, with commas; each workload so"),
        NAMED_MODEL,
        option(
            "systems",
            "headrace,headrace-session,generate,generate-batch",
            "names from --list, with commas; the others are compared with the first",
        ),
        option("dtype", "bfloat16", choices=["float32", "bfloat16"]),
        THREADS,
        option(
            "instructions",
            None,
            "a smaller set than the processor's, for all processes: as on an older one. Servers "
            "take the best there is, and cannot be measured so",
            choices=list(ENVIRONMENTS),
        ),
        option("turns", 3, "turns that count (default 3)"),
        option(
            "peer",
            [],
            "a peer's environment, as benchmarks/peers/setup.sh makes it",
            action="append",
            metavar="NAME=DIRECTORY",
        ),
        option(
            "variant",
            [],
            "one more name for --systems: a system with options of its adapter, such as "
            """'torch=headrace:{"attention": "torch"}' """
            """or 'unshared=headrace-session:{"flags": ["--no-prefix-cache"]}'""",
            action="append",
            metavar="NAME=SYSTEM:JSON",
        ),
        option("check", 4, "requests of each case and system whose tokens are checked (0: none)"),
        option("minutes", None, "begin no turn after so many minutes", type=float),
        option("turn_seconds", 600.0, "a longer turn is a failure (default 600)"),
        MODELS,
        option(
            "output", None, "the record's file (default: in benchmarks/results/local)", type=Path
        ),
    ),
)
