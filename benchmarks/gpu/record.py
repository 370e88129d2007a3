"""The record of one device. Each part stores how it was run; the record is saved after every row.

    {"format", "kind": "gpu", "device": {…}, "machine": {…},
     "parts": {name: {"model", "dtype", "date", "commit", "versions", "state", "left_out",
                      "rows": [{"key", …}, …]}}}

A part that is run again replaces the old one. With `resume` it keeps its rows if they come from the
same sources and versions. A killed run loses only the row that was being measured.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from benchmarks.records import Record

RUNNING = "running"
COMPLETE = "complete"
OUT_OF_TIME = "out of time"
FAILED = "failed"
LEFT_OUT = "left out"
QUICK = "quick"
"""The state of the checks if those that always run have passed and the others were not requested.
"""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a record.

    Attributes:
        about: where its results come from: the sources' commit and the packages' versions, its
            model and sizes.
    """

    record: Record
    name: str
    about: dict[str, Any]

    @property
    def data(self) -> dict[str, Any]:
        """What the record has of it."""
        found: dict[str, Any] = self.record.data["parts"].get(self.name, {})
        return found

    def is_current(self) -> bool:
        """Whether the record has it, of exactly these sources, versions and sizes."""
        commit: str | None = self.about["commit"]
        is_known = commit is not None and not commit.endswith("+")
        return is_known and all(self.data.get(key) == value for key, value in self.about.items())

    def begin(self, *, resume: bool) -> None:
        """Begin it anew, or go on with the rows that it has."""
        rows = self.data["rows"] if resume and self.is_current() else []
        self.record.data["parts"][self.name] = {
            **self.about,
            "date": self.record.data["date"],
            "state": RUNNING,
            "left_out": [],
            "rows": rows,
        }
        self.record.save()

    def has(self, key: str) -> bool:
        """Whether a row exists and is complete."""
        return any(row["key"] == key and not row.get("partial") for row in self.data["rows"])

    def put(self, row: dict[str, Any]) -> None:
        """Add a row, replacing the one with its key, and save."""
        rows = [other for other in self.data["rows"] if other["key"] != row["key"]]
        self.data["rows"] = [*rows, row]
        self.record.save()

    def leave_out(self, what: str, why: str) -> None:
        self.data["left_out"].append(f"{what}: {why}")
        self.record.save()

    def end(self, state: str) -> None:
        self.data["state"] = state
        self.record.save()


def record_name(device: dict[str, Any]) -> str:
    """Return the file name of a device. The name of a run on a CPU says so, because it is no
    measurement of a GPU.
    """
    if device["type"] != "cuda":
        return "gpu-command-on-a-cpu.json"
    return f"gpu-{re.sub('[^a-z0-9]+', '-', device['name'].lower()).strip('-')}.json"
