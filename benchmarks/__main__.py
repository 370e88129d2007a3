"""The command: `python -m benchmarks NAME` for a measurement, `report`, `model`, or `--list`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.models import CACHE, DEMO, SHAPES, checkpoint
from benchmarks.processes import ROOT
from benchmarks.report import update
from benchmarks.rig.measurement import MODULES, module_of
from benchmarks.systems import SYSTEMS
from benchmarks.workloads import WORKLOADS

DOCUMENTS = [
    ROOT / "docs" / f"{name}.md"
    for name in ("performance", "promises", "clients", "proxies", "speculation")
]


def measurements() -> list[str]:
    """Return the names of all measurements: the modules here that define one, and packages."""
    own = Path(__file__).parent.glob("*.py")
    return sorted([*MODULES, *(one.stem for one in own if "\nMEASUREMENT = " in one.read_text())])


def main() -> None:
    if (name := next(iter(sys.argv[1:]), "")) in measurements():
        sys.argv[:2] = [f"python -m benchmarks {name}"]
        module_of(name).MEASUREMENT.run()
        return
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=f"A measurement ({', '.join(measurements())}), or one of the commands below.",
    )
    parser.add_argument(
        "--list", action="store_true", help="list workloads, loads, models and systems"
    )
    commands = parser.add_subparsers(dest="command")
    model = commands.add_parser("model", help="make a checkpoint with random weights")
    model.add_argument("name", choices=sorted(SHAPES))
    model.add_argument("--cache", type=Path, default=CACHE, help=f"where to (default {CACHE})")
    report = commands.add_parser("report", help="write the tables of documents from records")
    report.add_argument("documents", type=Path, nargs="*", default=DOCUMENTS)
    report.add_argument("--check", action="store_true", help="only say whether they are right")
    arguments = parser.parse_args()
    if arguments.list:
        _list()
    elif arguments.command == "model":
        print(checkpoint(arguments.name, arguments.cache))
    elif arguments.command == "report":
        _report(arguments)
    else:
        parser.print_help()


def _report(arguments: argparse.Namespace) -> None:
    for document in arguments.documents:
        try:
            is_right = update(document, ROOT, check=arguments.check)
        except (OSError, ValueError) as error:
            sys.exit(f"benchmarks: {error}")
        if arguments.check and not is_right:
            sys.exit(f"{document} differs from its records: run `make bench-report`")
        print(f"{document}: {'as it should be' if is_right else 'written'}")


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
    for name, shape in SHAPES.items():
        print(
            f"  {name:20} random weights: {shape['num_hidden_layers']} layers of "
            f"{shape['hidden_size']}, vocabulary {shape['vocab_size']}"
        )
    print("systems (--systems)")
    for spec in SYSTEMS.values():
        print(f"  {spec.name:20} {spec.meaning}{' (needs --peer)' if spec.is_peer else ''}")


if __name__ == "__main__":
    main()
