"""The Go library: its own tests and form, its programs, and its module: the README's quick start in
a fresh directory, from a proxy of files, against a real server around a fake engine.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.clients.go_ts.programs import (
    GO,
    REPOSITORY,
    RUN_SECONDS,
    Addresses,
    go_command,
    run_program,
    running_server,
)

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


@pytest.fixture(params=["tcp", "unix"])
def address(request: pytest.FixtureRequest, addresses: Addresses) -> str:
    found: str = getattr(addresses, request.param)
    return found


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return go_command("session", tmp_path_factory.mktemp("go"))


def run(command: Sequence[str], folder: Path, **environment: str) -> str:
    """What a command printed, which must succeed."""
    done = subprocess.run(
        command, cwd=folder, env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}{done.stderr}"
    return done.stdout


def test_its_own_tests() -> None:
    run(["go", "test", "./..."], GO)


def test_its_form() -> None:
    assert run(["gofmt", "-l", "."], GO) == ""
    run(["go", "vet", "./..."], GO)
    run(["go", "vet", "-tags", "planted", "./cmd/conformance"], GO)


@pytest.mark.skipif(
    shutil.which("staticcheck") is None,
    reason="staticcheck is not installed (go install honnef.co/go/tools/cmd/staticcheck@v0.8.2)",
)
def test_what_staticcheck_says() -> None:
    run(["staticcheck", "-tags", "planted", "./..."], GO)


def test_a_session(session: list[str], address: str) -> None:
    prompts = [f"Prompt {number}: é 😀 \u2028 <&>" for number in range(64)]
    done = run_program(session, address, "--max-tokens", "24", *prompts)

    assert (done.code, done.err) == (0, "")
    for number, prompt in enumerate(prompts, start=1):
        shifted = (prompt.encode()[1:] + prompt.encode()[:1]) * 2
        told = [x for x in done.out.split("\n") if x.startswith(f"[{number}] ")]
        text = "".join(re.sub(r'^\[\d+\] "|"$', "", one) for one in told[:-1])
        text = text.replace("\\u2028", "\u2028")
        assert text.rstrip("\ufffd") == shifted[:24].decode(errors="ignore")
        assert told[-1] == f"[{number}] length, 24 tokens"


def test_prompts_of_the_standard_input(session: list[str], address: str) -> None:
    done = run_program(session, address, "--max-tokens", "2", lines="one\ntwo\n")

    assert (done.code, done.err) == (0, "")
    assert "[2] length, 2 tokens\n" in done.out


def test_a_refused_request_leaves_the_others_alone(session: list[str], address: str) -> None:
    done = run_program(session, address, "--max-tokens", "2", "good", "")

    assert done.code == 1
    assert "[1] length, 2 tokens\n" in done.out
    assert done.err.startswith("[2] headrace: InvalidArgument (INVALID_FIELD): ")
    assert "\n    add.spec.text.text: " in done.err


def test_an_address_where_nothing_listens(session: list[str]) -> None:
    done = run_program(session, "unix:/nowhere/headrace.sock", "prompt")

    assert done.code == 1
    assert done.err.startswith("[1] headrace: Unavailable: cannot reach a Headrace server")


def test_an_interrupt_cancels_what_runs(session: list[str], address: str) -> None:
    with subprocess.Popen(
        [*session, "--target", address, "--max-tokens", "90000", "one", "two"],
        stdout=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline().startswith("[")
        running.send_signal(signal.SIGINT)
        out, _ = running.communicate(timeout=RUN_SECONDS)
    assert running.returncode == 0
    assert len(re.findall(r"^\[[12]\] cancelled, \d+ tokens$", out, re.M)) == 2


def test_the_quick_start_from_the_module(addresses: Addresses, tmp_path: Path) -> None:
    """Nothing but the module's own files is taken from the repository. What it requires comes from
    Go's cache, or is downloaded.
    """
    run(["scripts/packages-go.sh", str(tmp_path / "packages")], REPOSITORY)
    readme = (GO / "README.md").read_text(encoding="utf-8")
    program = re.search(r"^```go\n(package main.*?)^```", readme, re.S | re.M)
    getting = re.search(r"^\$ (go get \S+)$", readme, re.M)
    assert program is not None
    assert getting is not None
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    (fresh / "main.go").write_text(program[1], encoding="utf-8")
    cache = run(["go", "env", "GOMODCACHE"], fresh).strip()
    proxies = [f"file://{tmp_path}/packages/go", f"file://{cache}/cache/download"]
    environment = {
        "GOPROXY": ",".join([*proxies, run(["go", "env", "GOPROXY"], fresh).strip()]),
        "GOMODCACHE": str(tmp_path / "cache"),  # the version is the same after each change
        "GOSUMDB": "off",
        "GOFLAGS": "-modcacherw",
        "CGO_ENABLED": "0",
        "HEADRACE_TARGET": addresses.tcp,
    }

    run(["go", "mod", "init", "example.com/start"], fresh, **environment)
    run(getting[1].split(), fresh, **environment)
    out = run(["go", "run", "."], fresh, **environment)

    assert out == "nce upon a timeOnce upon a timeO\n"
