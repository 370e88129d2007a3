"""The record of the campaign: a JSON file that is written after each row.

A run that is stopped loses only the current row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import records
from benchmarks.adapters.loop import versions
from benchmarks.records import commit, machine_record, now
from tests.campaign.parts import Tried

RUNS_KEPT = 2
"""The number of runs kept for each part: the last one, and the last one with another seed."""
PACKAGES = ("torch", "transformers", "grpcio", "protobuf", "llguidance", "headrace-server")

Run = dict[str, Any]
"""One run of a part: its settings, machine and versions, whether it `is_whole`, how many `seconds`
it took, what a witness saw of a `calm` server before it, and its `rows` by name.
"""


class Record:
    """The runs of all parts.

    Attributes:
        parts: each part's runs, the last one first.
    """

    def __init__(self, path: Path) -> None:
        """Read the file, if there is one. Raises SystemFailure if its format is different."""
        self._record = records.Record(path, "trust", {})
        self._record.go_on()
        self.parts: dict[str, list[Run]] = self._record.data.setdefault("parts", {})

    def begin(self, part: str, *, seed: int, is_cut: bool, again: bool) -> Run:
        """Begin a run of a part, or resume the recorded one. `again`: try all of it once more."""
        sources, runs = commit(), self.parts.get(part, [])
        same = (seed, is_cut, sources)
        known = [one for one in runs if (one["seed"], one["is_cut"], one["commit"]) == same]
        if known and not again:
            run = known[0]
        else:
            run = {
                "seed": seed,
                "is_cut": is_cut,
                "date": "",
                "commit": sources,
                "seconds": 0.0,
                "is_whole": False,
                "machine": machine_record(),
                "versions": versions(*PACKAGES),
                "calm": None,
                "rows": {},
            }
        others = [one for one in runs if one["seed"] != seed]
        self.parts[part] = [run, *others][:RUNS_KEPT]
        return run

    def add(self, run: Run, tried: Tried) -> None:
        row = asdict(tried)
        run["rows"][row.pop("name")] = row
        self.write(run)

    def write(self, run: Run) -> None:
        """Write the file, of which a run has changed."""
        run["date"] = now()
        self._record.save()


def is_wrong(row: Mapping[str, Any]) -> bool:
    return bool(row["wrong"]) and not row["not_judged"]
