"""The command; see the package."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from typing import Any

import benchmarks.languages
from benchmarks.languages.document import render
from benchmarks.languages.rows import ROWS
from benchmarks.languages.turns import CASES, measure_case
from benchmarks.processes import SystemFailure
from benchmarks.records import Record
from benchmarks.rig.measurement import Measurement, option

_LANGUAGES = [row.name for row in ROWS]
_CASES = [case.name for case in CASES]


def measure(options: argparse.Namespace, record: Record) -> None:
    """Build the load programs and run the cases."""
    if shutil.which("taskset") is None or len(os.sched_getaffinity(0)) < 2:
        raise SystemFailure("needs taskset and two CPUs: the server has one, the client the other")
    rows = []
    for row in ROWS:
        if row.name not in options.language:
            continue
        if missing := row.missing():
            sys.stderr.write(f"{row.title} is left out: {', '.join(missing)} is not here\n")
            continue
        row.make()
        rows.append(row)
    cases: list[dict[str, Any]] = []
    for case in CASES:
        if case.name in options.case:
            cases.append(measure_case(case, rows, options.turns))
            record.put(cases, "cases")


MEASUREMENT = Measurement(
    name="languages",
    about=benchmarks.languages.__doc__ or "",
    measure=measure,
    table=lambda record: render(record, "languages.json"),
    options=(
        option("language", _LANGUAGES, nargs="+", choices=_LANGUAGES),
        option("case", _CASES, nargs="+", choices=_CASES),
        option("turns", None, "that count, of each case", type=int),
    ),
    is_kept=False,
)

if __name__ == "__main__":
    MEASUREMENT.run()
