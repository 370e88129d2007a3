"""The record of one device. Each part stores how it was run; the record is saved after every row.

    {"format", "kind": "gpu", "device": {…}, "machine": {…},
     "parts": {name: {"model", "dtype", "date", "commit", "versions", "state", "left_out",
                      "rows": [{"key", …}, …]}}}

A part that is run again replaces the old one. With `resume` it keeps its rows if they come from the
same sources and versions. A killed run loses only the row that was being measured.
"""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import records
from benchmarks.records import machine_record

RUNNING = "running"
COMPLETE = "complete"
OUT_OF_TIME = "out of time"
FAILED = "failed"
LEFT_OUT = "left out"
QUICK = "quick"
"""The state of the checks if those that always run have passed and the others were not requested.
"""


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where results come from. commit: the commit of the sources; None if unknown. versions: the
    versions of packages.
    """

    commit: str | None
    versions: dict[str, str]


class Record(records.Record):
    """The record of a device, and its file."""

    def __init__(self, folder: Path, device: dict[str, Any], provenance: Provenance) -> None:
        """Open the record of a device in a folder, or create one.

        Raises:
            ValueError: the file has another format.
        """
        super().__init__(folder / record_name(device), "gpu", {"parts": {}})
        self.provenance = provenance
        self.resume(())
        self.data |= {"device": device, "machine": machine_record()}

    def begin(self, name: str, about: dict[str, Any], *, resume: bool) -> Part:
        """Return a new part, or the existing one with its rows."""
        before = self.data["parts"].get(name)
        rows = before["rows"] if resume and before and self.is_current(name, about) else []
        self.data["parts"][name] = {
            **about,
            "date": datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
            "commit": self.provenance.commit,
            "versions": self.provenance.versions,
            "state": RUNNING,
            "left_out": [],
            "rows": rows,
        }
        self.save()
        return Part(self, name)

    def is_current(self, name: str, about: dict[str, Any] | None = None) -> bool:
        """Whether a part exists and has exactly these sources, versions and sizes."""
        part = self.data["parts"].get(name)
        return (
            part is not None
            and self.provenance.commit is not None
            and not self.provenance.commit.endswith("+")
            and part["commit"] == self.provenance.commit
            and part["versions"] == self.provenance.versions
            and all(part.get(key) == value for key, value in (about or {}).items())
        )

    def state(self, name: str) -> str | None:
        """Return the state of a part; None if there is none."""
        part = self.data["parts"].get(name)
        return None if part is None else part["state"]


class Part:
    """One part of a record, while it is running."""

    def __init__(self, record: Record, name: str) -> None:
        self._record = record
        self.name = name
        self.data: dict[str, Any] = record.data["parts"][name]

    def has(self, key: str) -> bool:
        """Whether a row exists and is complete."""
        return any(row["key"] == key and not row.get("partial") for row in self.data["rows"])

    def put(self, row: dict[str, Any]) -> None:
        """Add a row, replacing the one with its key, and save."""
        rows = [other for other in self.data["rows"] if other["key"] != row["key"]]
        self.data["rows"] = [*rows, row]
        self._record.save()

    def leave_out(self, what: str, why: str) -> None:
        """Record what is not measured."""
        self.data["left_out"].append(f"{what}: {why}")
        self._record.save()

    def end(self, state: str) -> None:
        """Record how the part ended."""
        self.data["state"] = state
        self._record.save()


def record_name(device: dict[str, Any]) -> str:
    """Return the file name of a device. The name of a run on a CPU says so, because it is no
    measurement of a GPU.
    """
    if device["type"] != "cuda":
        return "gpu-command-on-a-cpu.json"
    return f"gpu-{re.sub('[^a-z0-9]+', '-', device['name'].lower()).strip('-')}.json"
