"""The plan of a run, and its record: a JSON object, with a plot next to it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.floors import Rates, Shape, ideal
from benchmarks.markdown import outline
from benchmarks.measures import medians, paired_ratio
from benchmarks.plot import draw
from benchmarks.processes import ROOT
from benchmarks.systems import MAX_REQUESTS, SystemSpec
from benchmarks.workloads import Lengths, Load, Workload


@dataclass(frozen=True, slots=True)
class Case:
    """A workload, and how its requests arrive."""

    workload: Workload
    load: Load

    @property
    def name(self) -> str:
        """The names of the workload and the load."""
        return f"{self.workload.name} {self.load.name}"

    def lengths(self) -> list[Lengths]:
        """Return the lengths of its requests."""
        return self.workload.lengths(self.load.count(self.workload))

    def most_at_once(self) -> int:
        """The most requests that a system may have to run at the same time."""
        return min(MAX_REQUESTS, self.load.concurrency or len(self.lengths()))


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run measures.

    Attributes:
        model_name, model: a checkpoint's name and directory.
        systems: the systems; the others are compared with the first.
        pythons: the interpreter of each system.
        peers: the environments of peers.
        instructions: one of `instructions.ENVIRONMENTS`, used in every process; None for the
            processor's own.
        check: how many requests of each system are judged in each case.
        minutes: no turn is begun after this many minutes.
        turn_s: the longest turn, in seconds.
        folder: the folder for logs, and for what adapters make from the model.
    """

    model_name: str
    model: Path
    dtype: str
    threads: int
    instructions: str | None
    cases: list[Case]
    systems: list[SystemSpec]
    pythons: dict[str, str]
    peers: dict[str, Path]
    turns: int
    check: int
    minutes: float | None
    turn_s: float
    folder: Path


@dataclass(slots=True)
class Found:
    """The results of a case so far."""

    case: Case
    lengths: list[Lengths]
    turns: dict[str, list[dict[str, float]]]
    failures: dict[str, str] = field(default_factory=dict)
    machine: list[dict[str, float]] = field(default_factory=list)
    last: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    prompts: list[list[int]] = field(default_factory=list)


def case_record(
    found: Found, plan: Plan, shape: Shape, check: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Return a case in the record's format."""
    load = found.case.load
    reference = plan.systems[0].name
    turns = {name: figures for name, figures in found.turns.items() if figures}
    rates = medians(found.machine)
    floor = None
    if load.rate is None:
        best = ideal(
            found.lengths,
            load.concurrency,
            shape,
            plan.dtype,
            Rates(rates["bandwidth"], rates["matrix"]),
        )
        output = sum(one.output for one in found.lengths)
        floor = {
            "prefill_s": best.prefill_s,
            "decode_s": best.decode_s,
            "steps": best.steps,
            "output_rate": output / best.total_s,
        }
    median = {name: medians(figures) for name, figures in turns.items()}
    return {
        "workload": found.case.workload.name,
        "meaning": found.case.workload.meaning,
        "load": load.name,
        "requests": len(found.lengths),
        "prompt_tokens": sum(one.prompt for one in found.lengths),
        "output_tokens": sum(one.output for one in found.lengths),
        "machine": found.machine,
        "floor": floor,
        "turns": turns,
        "median": median,
        "ratio": {
            name: paired_ratio(
                [turn["output_rate"] for turn in turns[reference]][: len(figures)],
                [turn["output_rate"] for turn in figures],
            )
            for name, figures in turns.items()
            if reference in turns
        },
        "of_floor": {}
        if floor is None
        else {
            name: figures["output_rate"] / floor["output_rate"] for name, figures in median.items()
        },
        "check": check,
        "failures": found.failures,
    }


class Record:
    """A record as it grows: a JSON object that is saved whenever something is put in it.

    Attributes:
        path: its file; None if it is not written.
        data: its content.
        is_told: whether what is put in it is printed, too.
    """

    def __init__(
        self, path: Path | None, kind: str, about: Mapping[str, Any], *, is_told: bool = False
    ) -> None:
        """Create a record. about: when, where and of what it is."""
        self.path = path
        self.is_told = is_told
        self.data: dict[str, Any] = {"format": FORMAT, "kind": kind, **about}

    def resume(self, same: Iterable[str]) -> bool:
        """Take over what its file has, if there is one. Returns whether it is of the same: the
        options of these names, and the commit.

        Raises:
            ValueError: the file has another format.
        """
        found = None if self.path is None else read_record(self.path)
        if found is None:
            return True
        old, new = ({**one, **one.get("options", {})} for one in (found, self.data))
        if any(old[name] != new[name] for name in same):
            return False
        self.data = found
        return True

    def put(self, value: Any, *keys: str) -> None:
        """Put a value in the object that these keys lead to, under the last of them, and save."""
        place = self.data
        for key in keys[:-1]:
            place = place.setdefault(key, {})
        place[keys[-1]] = rounded(value)
        self.save()
        if self.is_told:
            print(*outline({" ".join(keys): value}), sep="\n", flush=True)

    def save(self) -> None:
        """Write the file atomically."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial = self.path.with_suffix(".partial")
            partial.write_text(json.dumps(rounded(self.data), indent=1) + "\n")
            partial.replace(self.path)


def machine_record() -> dict[str, Any]:
    """Return the machine's processor, memory and system."""
    return {
        "cpu": cpu_name(),
        "cpus": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
    }


def cpu_name() -> str:
    """Return the processor's name, if the system reports it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


def commit() -> str | None:
    """Return the repository's commit, with "+" if files differ from it; None outside a
    repository.
    """
    try:
        found = [
            subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
            for words in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "-uno"])
        ]
    except (OSError, subprocess.CalledProcessError):
        return None
    return found[0].stdout.strip() + ("+" if found[1].stdout.strip() else "")


def write_record(record: dict[str, Any], path: Path) -> None:
    """Write a record as JSON, and its plot next to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rounded(record), indent=1) + "\n")
    path.with_suffix(".svg").write_text(draw(record))


def rounded(value: Any) -> Any:
    """Return a value with its floats rounded to six significant digits; more would be noise."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(entry) for entry in value]
    return value


def read_record(path: Path) -> dict[str, Any] | None:
    """Read a record; None if there is no such file. Raises ValueError if its format is
    different.
    """
    if not path.exists():
        return None
    record: dict[str, Any] = json.loads(path.read_text())
    if record.get("format") != FORMAT:
        raise ValueError(f"{path} is of format {record.get('format')}, {FORMAT} is wanted")
    return record


FORMAT = 1
"""The format of records. It changes whenever old readers would misread new records."""
