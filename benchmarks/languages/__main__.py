"""The command; see the package."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import benchmarks.languages
from benchmarks.languages.document import KIND, update
from benchmarks.languages.rows import ROWS
from benchmarks.languages.turns import CASES, measure
from benchmarks.processes import ROOT
from benchmarks.records import FORMAT, commit, machine_record, read_record, rounded

RECORD = ROOT / "benchmarks" / "results" / "languages.json"
DOCUMENT = ROOT / "docs" / "clients.md"


def main() -> int:
    """Measure, or write the document. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=(benchmarks.languages.__doc__ or "").split("\n")[0]
    )
    names = [row.name for row in ROWS]
    parser.add_argument("--language", nargs="+", choices=names, default=names)
    cases = [case.name for case in CASES]
    parser.add_argument("--case", nargs="+", choices=cases, default=cases)
    parser.add_argument("--turns", type=int, help="that count, of each case")
    parser.add_argument("--output", type=Path, help="the record; default: not written")
    parser.add_argument("--report", action="store_true", help=f"only write {DOCUMENT.name}")
    parser.add_argument("--check", action="store_true", help="with --report: only look")
    arguments = parser.parse_args()
    if arguments.report:
        is_right = update(DOCUMENT, read_record(RECORD), check=arguments.check)
        return int(arguments.check and not is_right)
    return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    if shutil.which("taskset") is None or len(os.sched_getaffinity(0)) < 2:
        sys.stderr.write("needs taskset and two CPUs: the server has one, the client the other\n")
        return 2
    rows = []
    for row in ROWS:
        if row.name not in arguments.language:
            continue
        if missing := row.missing():
            sys.stderr.write(f"{row.title} is left out: {', '.join(missing)} is not here\n")
            continue
        row.make()
        rows.append(row)
    record: dict[str, Any] = {
        "format": FORMAT,
        "kind": KIND,
        "date": datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine_record(),
        "load_average": os.getloadavg(),
        "cases": [],
    }
    for case in CASES:
        if case.name not in arguments.case:
            continue
        record["cases"].append(measure(case, rows, arguments.turns))
        _tell(record["cases"][-1])
        if arguments.output is not None:  # after each case: what is measured is kept
            arguments.output.write_text(json.dumps(rounded(record), indent=1) + "\n")
    return 0


def _tell(case: dict[str, Any]) -> None:
    sys.stdout.write(
        f"\n{case['meaning']}\n{'':18}{'tokens/s':>10}{'of fastest':>12}{'client µs':>11}"
        f"{'server µs':>11}{'peak MiB':>10}\n"
    )
    for name, one in case["languages"].items():
        sys.stdout.write(
            f"{name:18}{one['tokens_per_s']:>10,.0f}{one['of_fastest']:>12.2f}"
            f"{one['client_us_per_token']:>11.1f}{one['server_us_per_token']:>11.1f}"
            f"{one['peak_bytes'] / 2**20:>10.0f}\n"
        )
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
