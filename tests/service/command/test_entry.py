"""The command's first moments, and its life as process 1 of a container: in a namespace of its own,
which only root can make.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.service.real_server import ROOT, WAIT_S, clean_environment, real_server

MODULE, _, FUNCTION = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
    "scripts"
]["headrace-server"].partition(":")
PROGRAM = (sys.executable, "-c", f"from {MODULE} import {FUNCTION}; {FUNCTION}()")
SERVE = (*PROGRAM, "serve", "--device=cpu", "--threads=1", "--listen=127.0.0.1:0")
NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child=KILL")
MOMENTS_S = (0.0, 0.3, 1.0, 2.0, 5.0)


def has_namespaces() -> bool:
    """Whether this machine lets the test make process 1."""
    try:
        return (
            subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode == 0
        )
    except FileNotFoundError:
        return False


as_first = pytest.mark.skipif(not has_namespaces(), reason="process namespaces need root")


def children(pid: int) -> list[int]:
    """The ids of a process's children, as seen from here."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii")
    return [int(one) for one in found.split()]


def heeds(pid: int, number: signal.Signals) -> bool:
    """Whether a process handles a signal or waits for it."""
    lines = Path(f"/proc/{pid}/status").read_text("ascii").splitlines()
    masks = dict(line.split(":\t") for line in lines if line.startswith(("SigBlk", "SigCgt")))
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks.values())


def wait_for(holds: Callable[[], object]) -> None:
    """Wait until something holds."""
    until = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.005)


@contextmanager
def started(*before: str, command: Sequence[str] = SERVE) -> Iterator[subprocess.Popen[bytes]]:
    """A process, killed at the end."""
    process = subprocess.Popen(
        [*before, *command], cwd=ROOT, env=clean_environment(), stderr=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(WAIT_S)


def first_of(process: subprocess.Popen[bytes]) -> int:
    """Process 1 of the namespace, once it runs Python."""
    wait_for(lambda: children(process.pid))
    [first] = children(process.pid)
    wait_for(lambda: os.readlink(f"/proc/{first}/exe") == os.path.realpath(sys.executable))
    return first


@as_first
@pytest.mark.parametrize("moment_s", MOMENTS_S)
@pytest.mark.timeout(150)
def test_process_1_heeds_a_signal_at_any_moment_of_the_start(moment_s: float) -> None:
    with started(*NAMESPACE) as process:
        first = first_of(process)
        wait_for(lambda: heeds(first, signal.SIGTERM))
        assert "numpy" not in mapped(first)
        time.sleep(moment_s)
        os.kill(first, signal.SIGTERM)
        assert process.wait(WAIT_S) == 0


def mapped(pid: int) -> str:
    """The files that a process has mapped."""
    try:
        return Path(f"/proc/{pid}/maps").read_text("utf-8")
    except OSError:
        return ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_the_first_moment_ends_the_server_in_order(number: signal.Signals) -> None:
    with started() as process:
        wait_for(lambda: heeds(process.pid, signal.SIGTERM))
        assert "numpy" not in mapped(process.pid)
        process.send_signal(signal.SIGHUP)
        process.send_signal(number)
        assert process.wait(WAIT_S) == 0


@as_first
@pytest.mark.timeout(150)
def test_process_1_reaps_orphans_and_ends_as_the_server_ends() -> None:
    with real_server("--listen", "127.0.0.1:0", command=PROGRAM, before=NAMESPACE) as server:
        server.wait_until_ready()
        [first] = children(server.process.pid)
        [own] = children(first)
        inside = ("nsenter", f"--target={first}", "--pid", "--mount", "sh", "-c")
        for _ in range(5):
            orphaned = subprocess.run(
                [*inside, "sleep 0.05 & echo $!"], capture_output=True, text=True, check=True
            )
            assert orphaned.stdout.strip().isdigit()
        wait_for(lambda: children(first) == [own])
        os.kill(first, signal.SIGTERM)
        assert server.ended() == 0
        assert "Stopped." in server.said


@as_first
@pytest.mark.parametrize(
    ("arguments", "code"), [(("serve", "--max-queue-size=0"), 2), (("--version",), 0)]
)
def test_process_1_has_the_command_s_exit_code(arguments: tuple[str, ...], code: int) -> None:
    with started(*NAMESPACE, command=(*PROGRAM, *arguments)) as process:
        assert process.wait(WAIT_S) == code


@as_first
@pytest.mark.timeout(150)
def test_process_1_tells_that_the_server_was_killed() -> None:
    with started(*NAMESPACE) as process:
        first = first_of(process)
        wait_for(lambda: children(first))
        os.kill(children(first)[0], signal.SIGKILL)
        assert process.wait(WAIT_S) == 128 + signal.SIGKILL
