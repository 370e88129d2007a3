"""The Go library: its own tests, its form, and its README's quick start against a server."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.go_ts.programs import GO, Addresses, running_server

# Builds may start from empty caches.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("go") is None, reason="go is not installed"),
]


@pytest.fixture(scope="module")
def addresses() -> Iterator[Addresses]:
    with running_server("service_server") as running:
        yield running


def run(*command: str, folder: Path, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=folder, env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}{done.stderr}"
    return done.stdout


def test_its_own_tests() -> None:
    run("go", "test", "./...", folder=GO)


def test_its_form() -> None:
    assert run("gofmt", "-l", ".", folder=GO) == ""
    run("go", "vet", "./...", folder=GO)


@pytest.mark.parametrize("where", ["tcp", "unix"])
def test_the_quick_start(addresses: Addresses, tmp_path: Path, where: str) -> None:
    program = re.search(
        r"^```go\n(package main.*?)^```", (GO / "README.md").read_text(), re.S | re.M
    )
    assert program is not None
    (tmp_path / "main.go").write_text(program[1])

    out = run(
        "go", "run", str(tmp_path / "main.go"),
        folder=GO, HEADRACE_TARGET=getattr(addresses, where), CGO_ENABLED="0",
    )  # fmt: skip

    assert out == "nce upon a timeOnce upon a timeO\n"
