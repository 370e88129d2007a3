"""The record of a part: a JSON file that is written after each row.

A run that is stopped loses only the current row.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.records import FORMAT, commit, machine_record, read_record, rounded
from benchmarks.report import KIND_TRUST
from benchmarks.trust.parts import Tried

RUNS_KEPT = 2
"""The number of runs kept for each part: the last one, and the last one with another seed."""
PACKAGES = ("torch", "transformers", "grpcio", "protobuf", "llguidance", "headrace-server")


class Record:
    """The record of one part, to which one run is being written.

    Attributes:
        path: the file.
        run: the run that is being written.
    """

    def __init__(self, path: Path, part: str, *, seed: int, is_cut: bool, again: bool) -> None:
        """Begin a run, or resume the recorded one.

        Args:
            path: the file.
            part: the part's name.
            seed, is_cut: the run's settings.
            again: whether to start over even if a run is recorded.

        Raises:
            ValueError: the file has another format or is for another part.
        """
        self.path = path
        found = read_record(path)
        if found is not None and (found.get("kind"), found["part"]) != (KIND_TRUST, part):
            raise ValueError(f"{path} is no record of the campaign's part {part}")
        self._part = part
        runs: list[dict[str, Any]] = found["runs"] if found else []
        now = commit()
        is_same = [
            (one["seed"], one["is_cut"], one["commit"]) == (seed, is_cut, now) for one in runs
        ]
        self.run: dict[str, Any]
        if not again and True in is_same:
            self.run = runs[is_same.index(True)]
        else:
            self.run = {
                "seed": seed,
                "is_cut": is_cut,
                "date": _now(),
                "commit": now,
                "seconds": 0.0,
                "is_whole": False,
                "machine": machine_record(),
                "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
                "calm": None,
                "rows": {},
            }
        others = [one for one in runs if one is not self.run and one["seed"] != seed]
        self._runs = [self.run, *others][:RUNS_KEPT]

    @property
    def known(self) -> set[str]:
        """The names of the recorded rows."""
        return set(self.run["rows"])

    def add(self, tried: Tried) -> None:
        """Record a row."""
        row = asdict(tried)
        del row["name"]
        self.run["rows"][tried.name] = row
        self.write()

    def took(self, seconds: float) -> None:
        """Add to the time spent on the run."""
        self.run["seconds"] += seconds
        self.write()

    def is_whole(self) -> None:
        """Record that everything was tried."""
        self.run["is_whole"] = True
        self.write()

    def calm(self, seen: Mapping[str, Any]) -> None:
        """Record what a witness saw before anything was tried."""
        self.run["calm"] = dict(seen)
        self.write()

    def write(self) -> None:
        """Write the whole record to its file."""
        data = {"format": FORMAT, "kind": KIND_TRUST, "part": self._part, "runs": self._runs}
        self.run["date"] = _now()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(rounded(data), indent=1) + "\n")
        partial.replace(self.path)


def _now() -> str:
    return datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds")
