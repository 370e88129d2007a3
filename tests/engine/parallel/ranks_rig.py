"""Processes that share a model, for tests: by torchrun, or one by one so that each can be ended."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[3]
BIN = Path(sys.executable).parent
WAIT_S = 100.0
"""No launch takes longer: what does is stuck."""
SIZE = 2


def environment(**more: str) -> dict[str, str]:
    """This process's environment, without accelerators or what a launcher may have left in it."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HEADRACE_", "OTEL_", "TORCHELASTIC_"))
        and name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    }
    path = os.pathsep.join([str(ROOT), kept.get("PYTHONPATH", "")])
    quiet = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    return {**kept, **quiet, **more}


class Launched:
    """A process that was started, and what it says on stdout and stderr together."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-ranks-")
        self._output = Path(self._folder.name) / "said"
        with self._output.open("ab") as output:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT
            )

    @property
    def said(self) -> str:
        """So far."""
        return self._output.read_text(errors="replace")

    def wait_for(self, mark: str) -> None:
        """Wait until it has said this."""
        deadline = time.monotonic() + WAIT_S
        while mark not in self.said:
            assert self.process.poll() is None, f"it ended: {self.said}"
            assert time.monotonic() < deadline, f"no {mark!r} within {WAIT_S} s: {self.said}"
            time.sleep(0.05)

    def family(self) -> list[psutil.Process]:
        """It and the processes under it."""
        try:
            parent = psutil.Process(self.process.pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def ended(self, timeout: float = WAIT_S) -> int:
        """Its exit code, once it has ended."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end: {self.said}") from None

    def close(self) -> None:
        """End it and what it has started, whatever they do."""
        for process in self.family():
            process.kill()
        self.process.wait(WAIT_S)
        self._folder.cleanup()


@contextmanager
def launched(command: Sequence[str], **more: str) -> Iterator[Launched]:
    """A process, killed at the end with what it has started."""
    process = Launched(command, environment(**more))
    try:
        yield process
    finally:
        process.close()


def torchrun(*command: str) -> list[str]:
    """A command line that starts SIZE ranks."""
    return [str(BIN / "torchrun"), "--standalone", f"--nproc-per-node={SIZE}", *command]


@contextmanager
def ranks(script: Path, *arguments: str) -> Iterator[list[Launched]]:
    """SIZE ranks without a launcher, so that nobody ends one of them when another does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    started: list[Launched] = []
    try:
        for rank in range(SIZE):
            place = {"RANK": str(rank), "WORLD_SIZE": str(SIZE), "LOCAL_RANK": str(rank)}
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            env = environment(**place, **meeting)
            started.append(Launched([sys.executable, str(script), *arguments], env))
        yield started
    finally:
        for process in started:
            process.close()


def needs_ranks() -> None:
    """Skip a test where models cannot be divided."""
    pytest.importorskip("accelerate", reason="transformers divides models with it")
