"""Processes that are measured: started, waited for, read and ended."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.instructions import ENVIRONMENTS
from benchmarks.models import DEMO
from benchmarks.processes import ROOT, SystemFailure, free_port, tree
from benchmarks.usage import cpu_seconds, resident

WAIT_S = 300.0
"""The limit of each wait; whatever takes longer is stuck."""
END_S = 60.0
BIN = Path(sys.executable).parent
"""The folder of the commands that are installed with this interpreter."""
SERVER = (sys.executable, "-c", "from service.command.cli import main; main()")
"""The `headrace-server` command, even if it is not installed."""
_LIMIT = "from benchmarks.instructions import limit; limit({!r}); "


def has_welcomed(said: str) -> bool:
    """Whether a server has printed the last line of its start-up output."""
    return "Stop it with" in said


@dataclass(frozen=True, slots=True)
class Process:
    """A process that has started.

    Attributes:
        log: the file of its output.
        start_s: the seconds until it was ready.
        address: where it listens; empty if it has no single address.
    """

    popen: subprocess.Popen[bytes]
    log: Path
    start_s: float
    address: str = ""

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @property
    def is_alive(self) -> bool:
        return self.popen.poll() is None

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def check(self) -> None:
        """Raise SystemFailure, with the end of its output, if it has ended."""
        if not self.is_alive:
            raise SystemFailure(f"{self.log.stem} has ended:\n{self.said()[-2000:]}")

    def cpu_s(self) -> float:
        """Return its CPU time, without that of its children."""
        return cpu_seconds(self.pid)

    def resident_mib(self) -> float:
        """Return its resident memory in MiB."""
        return resident(self.pid)[0] / 2**20

    def peak_bytes(self) -> int:
        """Return its peak resident memory."""
        return resident(self.pid)[1]

    def memory(self) -> dict[str, int]:
        """Return the resident bytes of a server's front end and of its engine, its only child."""
        return {
            name: resident(pid)[0]
            for name, pid in zip(("front_end", "engine"), self.tree(), strict=True)
        }

    def tree(self) -> list[int]:
        """Return the process ids of it and its children."""
        return [one.pid for one in tree(self.pid)]


@contextmanager
def process(
    command: Sequence[str],
    log: Path,
    *,
    is_ready: Callable[[str], bool] = has_welcomed,
    address: str = "",
    environment: Mapping[str, str] | None = None,
    folder: Path = ROOT,
    ending: signal.Signals = signal.SIGTERM,
) -> Iterator[Process]:
    """Run a process during the block, from when it is ready.

    Args:
        command: its words.
        log: the file for its output.
        is_ready: says whether it is ready, given its output so far.
        address: where it listens.
        environment: its whole environment; None for this process's.
        folder: where it runs.
        ending: the signal that ends it. It is sent to its process group.

    Raises:
        SystemFailure: it cannot be started, ended, or was not ready in time.
    """
    began = time.perf_counter()
    try:
        with log.open("wb") as file:
            popen = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=file, stderr=file,
                start_new_session=True,
            )  # fmt: skip
    except OSError as error:
        raise SystemFailure(f"{command[0]} cannot be started: {error}") from error
    try:
        while not is_ready(log.read_text(errors="replace")):
            if popen.poll() is not None or time.perf_counter() - began > WAIT_S:
                said = log.read_text(errors="replace")[-2000:]
                raise SystemFailure(f"{command[0]} did not start:\n{said}")
            time.sleep(0.02)
        yield Process(popen, log, time.perf_counter() - began, address)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(popen.pid, ending)
        try:
            popen.wait(END_S)
        except subprocess.TimeoutExpired:
            os.killpg(popen.pid, signal.SIGKILL)
            popen.wait()


def serve(
    *flags: str,
    model: str | Path = DEMO,
    on_socket: bool = False,
    environment: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
    instructions: str | None = None,
) -> AbstractContextManager[Process]:
    """Run `headrace-server serve` during the block, from when it has loaded its model.

    Args:
        flags: its flags, without model and address.
        model: a model's directory.
        on_socket: whether it listens on a Unix socket instead of a port of 127.0.0.1.
        environment: its whole environment; None for this process's.
        prefix: words before the command, such as those of taskset.
        instructions: a smaller set than the processor's, one of `instructions.ENVIRONMENTS`; its
            engine is then in the server's own process.

    Raises:
        SystemFailure: it did not start.
    """
    python, option, program = SERVER
    if instructions is not None:
        program = _LIMIT.format(instructions) + program
        environment = {**(environment or os.environ), **ENVIRONMENTS[instructions]}
        flags = (*flags, "--in-process")
    command = (*prefix, python, option, program, "serve", "--model", str(model), *flags)
    return _listening(command, on_socket=on_socket, environment=environment)


def flags_of(options: argparse.Namespace, *more: str) -> tuple[str, ...]:
    """Return the flags of a server on CPUs that says little. options: dtype and threads. more:
    other flags.
    """
    flags = ("--dtype", options.dtype, "--device", "cpu", "--threads", str(options.threads))
    return (*flags, "--log-level", "warning", *more)


def scripted(
    script: str, *options: object, on_socket: bool = True, prefix: Sequence[str] = ()
) -> AbstractContextManager[Process]:
    """Run a server during the block whose engine computes nothing: see `benchmarks.scripted_engine`
    for its scripts and their options. on_socket, prefix: as in `serve`.
    """
    command = (*prefix, sys.executable, "-m", "benchmarks.scripted_engine", script)
    return _listening((*command, *map(str, options)), on_socket=on_socket)


@contextmanager
def _listening(
    command: Sequence[str],
    *,
    on_socket: bool,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Process]:
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name:
        folder = Path(name)
        address = f"unix:{folder}/s" if on_socket else f"127.0.0.1:{free_port()}"
        with process(
            (*command, "--listen", address),
            folder / "log",
            address=address,
            environment=environment,
        ) as found:
            yield found
