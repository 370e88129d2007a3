"""Records: JSON objects that say what was measured, when, where and of what."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil

from benchmarks.markdown import outline
from benchmarks.processes import ROOT, SystemFailure


class Record:
    """A record as it grows: a JSON object that is saved whenever something is put in it.

    Attributes:
        path: its file; None if it is not written.
        is_told: whether what is put in it is printed, too.
    """

    def __init__(
        self, path: Path | None, kind: str, about: Mapping[str, Any], *, is_told: bool = False
    ) -> None:
        """Create a record. about: when, where and of what it is. Raises SystemFailure if the path
        is that of a device: a file would take its place.
        """
        if path is not None and path.exists() and not (path.is_file() or path.is_dir()):
            raise SystemFailure(f"{path} is there and is no file; name another for the record")
        self.path = path
        self.is_told = is_told
        self.data: dict[str, Any] = {"format": FORMAT, "kind": kind, **about}

    def resume(self, same: Iterable[str]) -> bool:
        """Take over what its file has, if there is one. Returns whether it is of the same: the
        options of these names, and the commit. Raises SystemFailure if it has another format.
        """
        found = self._read()
        if found is not None:
            old, new = ({**one, **one.get("options", {})} for one in (found, self.data))
            if any(old[name] != new[name] for name in same):
                return False
            self.data = found
        return True

    def go_on(self, **about: Any) -> None:
        """Take over what its file has besides what this run says of itself. about: more of that.
        Raises SystemFailure if it has another format.
        """
        self.data = {**(self._read() or {}), **self.data, **about}

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

    def _read(self) -> dict[str, Any] | None:
        try:
            return None if self.path is None else read_record(self.path)
        except ValueError as error:
            raise SystemFailure(str(error)) from error


def now() -> str:
    return datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds")


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


def commit(checkout: Path = ROOT) -> str | None:
    """Return a checkout's commit, with "+" if files differ from it; None outside a repository."""
    try:
        found = [
            subprocess.run(
                ["git", *words], cwd=checkout, capture_output=True, text=True, check=True
            )
            for words in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "-uno"])
        ]
    except (OSError, subprocess.CalledProcessError):
        return None
    return found[0].stdout.strip() + ("+" if found[1].stdout.strip() else "")


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
