"""The command: `python -m benchmarks run|gpu|report|model`, or `--list`."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks import models
from benchmarks.gpu import command as gpu
from benchmarks.instructions import ENVIRONMENTS
from benchmarks.models import CACHE, DEMO, SHAPES, checkpoint, find_model
from benchmarks.processes import ROOT, SystemFailure
from benchmarks.records import Case, Plan, write_record
from benchmarks.report import render, update
from benchmarks.rig.measurement import (
    MODELS,
    NAMED_MODEL,
    THREADS,
    add_options,
    end_by_signals,
    option,
)
from benchmarks.runner import Runner
from benchmarks.systems import SYSTEMS, SystemSpec
from benchmarks.workloads import WORKLOADS, Load, parse_load

DOCUMENTS = [
    ROOT / "docs" / f"{name}.md"
    for name in ("performance", "promises", "clients", "proxies", "speculation")
]
LOCAL = ROOT / "benchmarks" / "results" / "local"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure Headrace beside other systems."
    )
    parser.add_argument(
        "--list", action="store_true", help="list workloads, loads, models and systems"
    )
    commands = parser.add_subparsers(dest="command")
    for name, options, meaning in (
        ("run", RUN, "measure on a CPU, and write a record and a plot"),
        ("gpu", gpu.OPTIONS, "check, then measure on a CUDA device; write a record"),
    ):
        add_options(commands.add_parser(name, help=meaning), options)
    model = commands.add_parser("model", help="make a checkpoint with random weights")
    model.add_argument("name", choices=sorted(SHAPES))
    model.add_argument("--cache", type=Path, default=CACHE, help=f"where to (default {CACHE})")
    report = commands.add_parser("report", help="write the tables of documents from records")
    report.add_argument("documents", type=Path, nargs="*", default=DOCUMENTS)
    report.add_argument("--check", action="store_true", help="only say whether they are right")
    arguments = parser.parse_args()
    if arguments.list:
        _list()
    elif arguments.command == "run":
        _run(arguments)
    elif arguments.command == "gpu":
        gpu.run(arguments)
    elif arguments.command == "model":
        print(checkpoint(arguments.name, arguments.cache))
    elif arguments.command == "report":
        _report(arguments)
    else:
        parser.print_help()


RUN = (
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
        "a smaller set than the processor's, for all processes: as on an older one. Servers take "
        "the best there is, and cannot be measured so",
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
    option("output", None, "the record's file (default: in benchmarks/results/local)", type=Path),
)
"""The options of `run`."""


def _run(arguments: argparse.Namespace) -> None:
    try:
        plan = _plan(arguments)
    except ValueError as error:
        sys.exit(f"benchmarks: {error}")
    end_by_signals()
    try:
        record = Runner(plan, lambda line: print(line, flush=True)).run()
    except SystemFailure as failure:
        sys.exit(f"benchmarks: {failure}")
    now = datetime.datetime.now(tz=datetime.UTC).strftime("%Y%m%d-%H%M%S")
    output = arguments.output or LOCAL / f"{plan.model_name}-{plan.dtype}-{now}.json"
    write_record(record, output)
    print(f"\n{render(record, output.name)}\nwritten to {output} and {output.with_suffix('.svg')}")


def _report(arguments: argparse.Namespace) -> None:
    for document in arguments.documents:
        try:
            is_right = update(document, ROOT, check=arguments.check)
        except (OSError, ValueError) as error:
            sys.exit(f"benchmarks: {error}")
        if arguments.check and not is_right:
            sys.exit(f"{document} differs from its records: run `make bench-report`")
        print(f"{document}: {'as it should be' if is_right else 'written'}")


def _plan(arguments: argparse.Namespace) -> Plan:
    """Return the plan that the arguments ask for. Raises ValueError."""
    systems = {**SYSTEMS, **dict(map(_variant, arguments.variant))}
    names = _chosen("system", arguments.systems, systems)
    for name in names if arguments.instructions else ():
        if systems[name].module == "benchmarks.adapters.headrace_server":
            raise ValueError(f"--instructions: {name} is a server and takes the processor's best")
    peers = {}
    for text in arguments.peer:
        name, _, directory = text.partition("=")
        if name not in systems or not systems[name].is_peer or not directory:
            raise ValueError(f"--peer {text}: NAME=DIRECTORY is wanted, NAME one of the peers")
        peers[name] = Path(directory).resolve()
    for name in names:
        if systems[name].is_peer and name not in peers:
            raise ValueError(
                f"{name} has an environment of its own: make it with benchmarks/peers/setup.sh "
                f"{name} DIRECTORY, then give --peer {name}=DIRECTORY"
            )
    model = find_model(arguments.model, arguments.cache)
    loads: list[Load] = [parse_load(text) for text in arguments.load.split(",")]
    return Plan(
        model_name=model.name,
        model=model,
        dtype=arguments.dtype,
        threads=arguments.threads,
        instructions=arguments.instructions,
        cases=[
            Case(WORKLOADS[workload], load)
            for workload in _chosen("workload", arguments.workload, WORKLOADS)
            for load in loads
        ],
        systems=[systems[name] for name in names],
        pythons={
            name: str(peers[name] / "bin" / "python") if name in peers else sys.executable
            for name in names
        },
        peers=peers,
        turns=arguments.turns,
        check=arguments.check,
        minutes=arguments.minutes,
        turn_s=arguments.turn_seconds,
        folder=arguments.cache,
    )


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


def _list() -> None:
    print("workloads (--workload)")
    for workload in WORKLOADS.values():
        print(f"  {workload.name:20} {workload.meaning}")
    print("loads (--load)")
    print("  all                  all requests at the start")
    print("  closed:N             N at a time, the next as one ends")
    print("  poisson:RATE         so many requests a second, at random")
    print("models (--model)")
    print(f"  demo                 {DEMO.relative_to(ROOT)}")
    for name, shape in models.SHAPES.items():
        print(
            f"  {name:20} random weights: {shape['num_hidden_layers']} layers of "
            f"{shape['hidden_size']}, vocabulary {shape['vocab_size']}"
        )
    print("systems (--systems)")
    for spec in SYSTEMS.values():
        print(f"  {spec.name:20} {spec.meaning}{' (needs --peer)' if spec.is_peer else ''}")


if __name__ == "__main__":
    main()
