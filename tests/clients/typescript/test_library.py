"""The TypeScript library: its own tests, its examples and its package, and its README's quick start
in a fresh directory, against a real server around a fake engine.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.clients.go_ts.programs import (
    REPOSITORY,
    RUN_SECONDS,
    TYPESCRIPT,
    Addresses,
    build_typescript,
    run_program,
    running_server,
    typescript_command,
)

# Builds may start from empty caches.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    build_typescript()


@pytest.fixture(scope="module")
def addresses() -> Iterator[Addresses]:
    with running_server("service_server") as running:
        yield running


@pytest.fixture(params=["tcp", "unix"])
def address(request: pytest.FixtureRequest, addresses: Addresses) -> str:
    found: str = getattr(addresses, request.param)
    return found


def run(command: Sequence[str], folder: Path, **environment: str) -> str:
    """What a command printed, which must succeed."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        encoding="utf-8",
        timeout=3 * RUN_SECONDS,
    )
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}{done.stderr}"
    return done.stdout


def test_its_own_tests() -> None:
    told = run(["node", "--test", "build/test/"], TYPESCRIPT)
    assert "# fail 0\n" in told
    assert "# pass 0\n" not in told


def test_its_form() -> None:
    run(["npm", "run", "format-check"], TYPESCRIPT)


def test_a_session(address: str) -> None:
    prompts = [f"Prompt {number}: é 😀" for number in range(64)]
    done = run_program(typescript_command("session"), address, "--max-tokens", "24", *prompts)

    assert (done.code, done.err) == (0, "")
    for number, prompt in enumerate(prompts, start=1):
        shifted = (prompt.encode()[1:] + prompt.encode()[:1]) * 2
        told = [x for x in done.out.split("\n") if x.startswith(f"[{number}] ")]
        text = "".join(re.sub(r'^\[\d+\] "|"$', "", one) for one in told[:-1])
        assert text.rstrip("\ufffd") == shifted[:24].decode(errors="ignore")
        assert told[-1] == f"[{number}] length, 24 tokens"


def test_a_refused_request_leaves_the_others_alone(address: str) -> None:
    done = run_program(typescript_command("session"), address, "--max-tokens", "2", "good", "")

    assert done.code == 1
    assert "[1] length, 2 tokens" in done.out
    assert done.err.startswith("[2] INVALID_ARGUMENT: ")


def test_an_address_where_nothing_listens() -> None:
    done = run_program(typescript_command("session"), "unix:/nowhere/headrace.sock", "prompt")

    assert done.code == 1
    assert done.err.startswith("[1] UNAVAILABLE: ")


def test_the_quick_start_from_the_package(addresses: Addresses, tmp_path: Path) -> None:
    run(["scripts/packages-typescript.sh", str(tmp_path)], REPOSITORY)
    [tarball] = tmp_path.glob("headrace-client-*.tgz")
    readme = (TYPESCRIPT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"```js\n(.*?)```", readme, flags=re.DOTALL)
    assert found is not None
    code = found[1].replace("localhost:50051", addresses.tcp)
    assert code != found[1]
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    (fresh / "start.mjs").write_text(code, encoding="utf-8")

    run(["npm", "install", "--no-audit", "--no-fund", "--prefer-offline", str(tarball)], fresh)
    told = run(["node", "start.mjs"], fresh)

    # As a TypeScript program, with each of the settings that the README tells of.
    (fresh / "start.mts").write_text(code, encoding="utf-8")
    types = str(TYPESCRIPT / "node_modules" / "@types")
    tsc = [str(TYPESCRIPT / "node_modules/.bin/tsc"), "--strict", "--noEmit", "--target", "es2023"]
    tsc += ["--module", "nodenext", "--types", "node", "--typeRoots", types]
    for lib, more in (("es2023,esnext.disposable", ["--skipLibCheck"]), ("es2023,dom", [])):
        run([*tsc, "--lib", lib, *more, "start.mts"], fresh)

    assert told.startswith("nce upon a timeOnce upon a timeO length 32\n")
    assert told.endswith("neOneOne\nwoTwoTwo\nhreeThre\n")
