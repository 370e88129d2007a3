"""The Go programs and the TypeScript examples: how they are built and run, and the servers that
they run against.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
GO = REPOSITORY / "clients" / "go"
TYPESCRIPT = REPOSITORY / "clients" / "typescript"
RUN_SECONDS = 60  # a program that takes longer hangs


def go_command(name: str, folder: Path) -> list[str]:
    """The command that runs a Go program, which is built into the folder."""
    if shutil.which("go") is None:
        pytest.skip("go is not installed")
    program = folder / name
    _build(["go", "build", "-o", str(program), f"./cmd/{name}"], GO, CGO_ENABLED="0")
    return [str(program)]


def typescript_command(name: str) -> list[str]:
    """The command that runs an example of the TypeScript library, which is built in its place."""
    build_typescript()
    return ["node", str(TYPESCRIPT / "build" / "examples" / f"{name}.js")]


def build_typescript() -> None:
    """Builds the TypeScript library, its tests and its examples."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node is not installed (or npm)")
    lock = TYPESCRIPT / "package-lock.json"
    installed = TYPESCRIPT / "node_modules" / ".package-lock.json"  # npm writes it last
    if not installed.exists() or installed.stat().st_mtime < lock.stat().st_mtime:
        _build(["npm", "ci", "--no-audit", "--no-fund"], TYPESCRIPT)
    _build(["npm", "run", "build-all"], TYPESCRIPT)


def _build(command: Sequence[str], folder: Path, **environment: str) -> None:
    done = subprocess.run(
        command, cwd=folder, env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}{done.stderr}"


@dataclass(frozen=True)
class Addresses:
    """Where one server listens."""

    tcp: str
    unix: str


@contextmanager
def running_server(module: str) -> Iterator[Addresses]:
    """A server program of this folder, while the context lasts."""
    # Not under tmp_path: the path of a Unix socket has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
        socket = Path(folder, "headrace.sock")
        with subprocess.Popen(
            [sys.executable, "-m", f"tests.clients.go_ts.{module}", str(socket)],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as server:
            assert server.stdout is not None
            port = server.stdout.readline().strip()
            assert port, f"{module} did not start"
            yield Addresses(tcp=f"localhost:{port}", unix=f"unix:{socket}")
            server.communicate()  # ends its input, and so the server
        assert server.returncode == 0


@dataclass(frozen=True)
class Run:
    """What a program did."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The lines of --json. Split at newlines alone: the text may have other separators."""
        return [json.loads(line) for line in self.out.split("\n") if line]


def run_program(program: Sequence[str], address: str, *arguments: str, lines: str = "") -> Run:
    done = subprocess.run(
        [*program, "--target", address, *arguments],
        input=lines,
        capture_output=True,
        encoding="utf-8",
        timeout=RUN_SECONDS,
    )
    return Run(done.returncode, done.stdout, done.stderr)
