"""The Rust library: its own tests and form, its generated code, its examples and its crate, and its
README's quick start in a fresh directory, against a real server around a fake engine.
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
    REPOSITORY,
    RUN_SECONDS,
    Addresses,
    run_program,
    running_server,
)
from tests.service.real_server import demo_server

RUST = REPOSITORY / "clients" / "rust"
BUILT = REPOSITORY / ".tools" / "rust"
QUESTION = "How high is the Danube in Ulm?"
DEMO_CALL = 'read_gauge {"place": "Ulm"}: Ulm: 3 m\n'
CALLS = f'{DEMO_CALL}read_gauge {{"place": "Köln"}}: Köln: 5 m\n'

# Builds may start from empty caches.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("cargo") is None, reason="cargo is not installed"),
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
def tool_addresses() -> Iterator[Addresses]:
    with running_server("tool_server") as running:
        yield running


@pytest.fixture(scope="module")
def examples() -> Path:
    run(["cargo", "build", "--locked", "--examples"], RUST)
    return BUILT / "debug" / "examples"


def run(command: Sequence[str], folder: Path, **environment: str) -> str:
    """What a command printed, which must succeed."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"CARGO_TARGET_DIR": str(BUILT)} | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}{done.stderr}"
    return done.stdout


def test_its_own_tests() -> None:
    told = run(["cargo", "test", "--locked", "--package", "headrace"], RUST)
    assert "README.md - ReadMe" in told or "src/lib.rs - ReadMe" in told


def test_what_only_rust_has(address: str) -> None:
    command = ["cargo", "test", "--locked", "--package", "headrace", "--test", "live"]
    told = run([*command, "--", "--ignored"], RUST, HEADRACE_TARGET=address)
    assert "a_dropped_handle_cancels_its_request ... ok" in told


def test_its_form() -> None:
    for tool in ("fmt", "clippy"):
        if subprocess.run(["cargo", tool, "--version"], capture_output=True).returncode:
            pytest.skip(f"cargo {tool} is not installed")
    run(["cargo", "fmt", "--check"], RUST)
    features = ["--features", "headrace/opentelemetry"]
    command = ["cargo", "clippy", "--locked", "--workspace", "--all-targets", *features]
    run([*command, "--", "-D", "warnings"], RUST)


def test_its_documentation() -> None:
    run(
        ["cargo", "doc", "--locked", "--no-deps", "--package", "headrace"],
        RUST,
        RUSTDOCFLAGS="-D warnings",
    )


def test_a_session(examples: Path, address: str) -> None:
    prompts = [f"Prompt {number}: é 😀" for number in range(64)]
    done = run_program([str(examples / "session")], address, "--max-tokens", "24", *prompts)

    assert (done.code, done.err) == (0, "")
    for number, prompt in enumerate(prompts, start=1):
        shifted = (prompt.encode()[1:] + prompt.encode()[:1]) * 2
        told = [x for x in done.out.split("\n") if x.startswith(f"[{number}] ")]
        text = "".join(re.sub(r'^\[\d+\] "|"$', "", one) for one in told[:-1])
        assert text.rstrip("\ufffd") == shifted[:24].decode(errors="ignore")
        assert told[-1] == f"[{number}] length, 24 tokens"


def test_a_refused_request_leaves_the_others_alone(examples: Path, address: str) -> None:
    done = run_program([str(examples / "session")], address, "--max-tokens", "2", "good", "")

    assert done.code == 1
    assert "[1] length, 2 tokens" in done.out
    assert done.err.startswith("[2] InvalidArgument (INVALID_FIELD): ")


def test_an_address_where_nothing_listens(examples: Path) -> None:
    done = run_program([str(examples / "session")], "unix:/nowhere/headrace.sock", "prompt")

    assert done.code == 1
    assert "Unavailable: " in done.err


def test_an_interrupt_cancels_what_runs(examples: Path, address: str) -> None:
    arguments = ["--target", address, "--max-tokens", "90000", "one", "two"]
    with subprocess.Popen(
        [str(examples / "session"), *arguments], stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline().startswith("[")
        running.send_signal(signal.SIGINT)
        out, _ = running.communicate(timeout=RUN_SECONDS)
    assert running.returncode == 0
    assert len(re.findall(r"^\[[12]\] cancelled, \d+ tokens$", out, re.M)) == 2


@pytest.mark.parametrize("where", ["tcp", "unix"])
@pytest.mark.parametrize("choice", [(), ("--tool-choice", "auto"), ("--tool-choice", "required")])
def test_a_question_is_answered_with_a_tool(
    examples: Path, tool_addresses: Addresses, where: str, choice: tuple[str, ...]
) -> None:
    told = run_program([str(examples / "tools")], getattr(tool_addresses, where), *choice, QUESTION)

    assert told.out == "I look.\nI heard Ulm: 3 m; Köln: 5 m; \n"
    assert (told.code, told.err) == (0, CALLS)


@pytest.mark.answers
def test_the_demo_model_answers_with_the_tool(examples: Path) -> None:
    told = run_program([str(examples / "tools")], demo_server().addresses[0], QUESTION)

    assert (told.code, told.err) == (0, DEMO_CALL)
    assert "3 m" in told.out


def test_a_reply_that_was_cut_calls_nothing(examples: Path, tool_addresses: Addresses) -> None:
    told = run_program([str(examples / "tools")], tool_addresses.tcp, "cut short")

    assert (told.code, told.out) == (1, "I look.\n")
    assert "its calls may not be whole" in told.err
    assert "read_gauge {" not in told.err


def test_a_call_that_the_model_broke_off_is_told_to_it(
    examples: Path, tool_addresses: Addresses
) -> None:
    told = run_program([str(examples / "tools")], tool_addresses.tcp, "broken")

    assert told.code == 0
    assert "I heard that the arguments are no JSON object" in told.out
    assert 'read_gauge {"place": "Ulm"}' in told.err, "the whole one was run"


def test_the_quick_start_from_the_crate(addresses: Addresses, tmp_path: Path) -> None:
    """By the README's own commands, in a fresh directory. What the crate requires comes from
    cargo's cache, or is downloaded.
    """
    run(["scripts/packages-rust.sh", str(tmp_path)], REPOSITORY)
    readme = (RUST / "README.md").read_text(encoding="utf-8")
    [manifest] = re.findall(r"^```toml\n(.*?)^```", readme, re.S | re.M)
    program = re.search(r"^```rust,no_run\n(.*?)^```", readme, re.S | re.M)
    commands = re.findall(r"^\$ (.*)$", readme, re.M)
    assert program is not None
    assert [command.split()[0] for command in commands] == ["tar", "cargo"]
    own = '[package]\nname = "start"\nedition = "2024"\n\n'
    others = re.sub(r"^headrace = .*\n", "", manifest, flags=re.M)
    (tmp_path / "Cargo.toml").write_text(own + others, encoding="utf-8")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "main.rs").write_text(program[1], encoding="utf-8")

    for command in commands:
        run(command.split(), tmp_path)
    out = run(["cargo", "run", "--quiet"], tmp_path, HEADRACE_TARGET=addresses.tcp)

    assert out == "nce upon a timeOnce upon a timeO\n"
