"""A load program's process."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from benchmarks.processes import ROOT, resident

_TURN_S = 120.0
_END_S = 10.0


class Program:
    """A running load program; see `benchmarks.languages` for its protocol.

    Attributes:
        name: its name in messages and of its log.
    """

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        """Create a program; use `started` instead."""
        self.name = log.stem
        self._process = process
        self._log = log

    @classmethod
    @contextmanager
    def started(
        cls, command: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> Iterator[Self]:
        """Start the program and end it with the block."""
        with (
            log.open("wb") as file,
            subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
            ) as process,
        ):
            try:
                yield cls(process, log)
                assert process.stdin is not None
                process.stdin.close()
                process.wait(_END_S)
            finally:
                process.kill()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def peak_bytes(self) -> int:
        """The high-water mark of its resident memory."""
        return resident(self.pid)[1]

    def play(self) -> int:
        """Run a turn. Returns how many tokens the program reports. Raises RuntimeError if it
        failed.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        watch = threading.Timer(_TURN_S, self._process.kill)
        watch.start()
        try:
            os.write(self._process.stdin.fileno(), b"\n")
            line = self._process.stdout.readline()
            return int(json.loads(line)["tokens"])
        except (OSError, ValueError, KeyError):
            said = self._log.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"{self.name} failed, or took {_TURN_S:.0f} s:\n{said}") from None
        finally:
            watch.cancel()
