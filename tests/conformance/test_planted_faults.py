"""The conformance suite finds what it is there for: a driver with a planted fault fails the vector
that is about it, and says why; the true drivers meet every vector.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from scripts.client_languages import LANGUAGES, Language
from tests.conformance import driver, scenario
from tests.conformance.driver import ROOT
from tests.conformance.faulty_driver import CHANGES, DRIVERS
from tests.conformance.suite import END, Outcome, load_vectors, run_language

PYTHON, ASYNCIO, GO = LANGUAGES[:3]
FAULTS = {
    "drops-a-delta": ("stream", "elements"),
    "splits-a-character": ("characters-split-anywhere", "is right"),
    "swallows-an-error": ("failed-request", "no error, but"),
    "foreign-errors": ("failed-request", "not of the library's"),
    "answers-from-the-file": ("generate", ".text is '$w, $w'"),
    "leaks-a-stream": ("two-sessions", "left calls open"),
    "does-not-end": (END, "did not end"),
    "sends-twice": ("cancel-after-first-token", "unexpected cancel"),
    "resumes-late": ("resumed-by-itself", "attaches from event 5; 4 is right"),
    "retries-early": ("refused-then-taken", "it was told"),
    "pays-for-all": ("credits", "credit was given"),
    "forgets-the-adapter": ("adapter-in-requests", ".adapter is ''"),
    "asks-again": ("fleet-adapter-at-a-full-server", "it came to server"),
}
NEVER = {
    "leaks-a-stream": (scenario, "CLEAR_SECONDS"),
    "does-not-end": (driver, "END_SECONDS"),
}
"""How long the suite waits for what does not come because of a fault."""

_GO = (
    "drops-a-delta", "splits-a-character", "swallows-an-error", "foreign-errors",
    "answers-from-the-file", "leaks-a-stream", "forgets-the-adapter",
)  # fmt: skip
GO_FAULTS = {
    **{name: FAULTS[name] for name in _GO},
    "resumes-late": ("resumed-after-close", "attaches from event 5; 4 is right"),
}
"""Those of clients/go/cmd/conformance/planted.go."""


def vectors_of(name: str) -> list[dict[str, Any]]:
    return [one for one in load_vectors() if one["name"] == name]


async def run(language: Language, name: str) -> list[Outcome]:
    wanted = vectors_of("generate" if name == END else name)
    assert wanted
    return await run_language(language, wanted, "unix", seed=11)


def test_each_fault_is_looked_for() -> None:
    assert FAULTS.keys() == DRIVERS.keys() | CHANGES.keys()


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault in NEVER:
        monkeypatch.setattr(*NEVER[fault], 0.5)
    name, problem = FAULTS[fault]
    command = (sys.executable, "-m", "tests.conformance.faulty_driver", fault)
    outcomes = await run(replace(PYTHON, command=command), name)
    found = {one.vector: one.problem for one in outcomes}
    assert problem in found[name]


@pytest.fixture(scope="module")
def planted_go(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The Go driver with the faults in it; the command line names one."""
    if shutil.which("go") is None:
        pytest.skip("go is not installed")
    driver = str(tmp_path_factory.mktemp("go") / "conformance-planted")
    command = ("go", "build", "-tags", "planted", "-o", driver, "./cmd/conformance")
    environment = {**os.environ, **GO.environment}
    folder = ROOT / "clients" / "go"
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return driver


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", GO_FAULTS)
async def test_a_fault_in_the_go_driver_is_found(planted_go: str, fault: str) -> None:
    name, problem = GO_FAULTS[fault]
    [outcome] = await run(replace(GO, command=(planted_go, fault)), name)
    assert problem in outcome.problem


async def test_the_true_driver_has_none_of_them() -> None:
    names = {name for name, _ in FAULTS.values()}
    wanted = [one for one in load_vectors() if one["name"] in names]
    outcomes = await run_language(PYTHON, wanted, "unix", seed=11)
    assert not [one for one in outcomes if one.problem]


@pytest.mark.parametrize("language", [PYTHON, ASYNCIO], ids=lambda one: one.name)
async def test_python_meets_all_scripted_vectors(language: Language) -> None:
    vectors = [one for one in load_vectors() if "real" not in one]
    outcomes = await run_language(language, vectors, "unix", seed=12)
    assert not [one for one in outcomes if one.problem]
    lacking = [one.vector for one in outcomes if one.skipped]
    assert len(lacking) == (2 if language is PYTHON else 0)


async def test_what_a_driver_lacks_is_in_the_registry() -> None:
    unsaid = replace(PYTHON, lacks={})
    [outcome] = await run(unsaid, "abandon-generate")
    assert "the registry does not say so" in outcome.problem


# ---- the vectors ---------------------------------------------------------------------------------


def test_the_vectors_are_many_and_say_what_they_mean() -> None:
    vectors = load_vectors()
    assert len(vectors) >= 40
    known = {
        "name", "meaning", "steps", "session", "connect", "servers", "scripts", "dribble", "token",
        "lease_seconds", "transports", "real", "tls",
    }  # fmt: skip
    for vector in vectors:
        assert vector["meaning"].endswith("."), vector["name"]
        assert vector.keys() <= known, vector["name"]


def test_a_name_is_used_once(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = {"name": "a", "meaning": "x.", "steps": []}
    (tmp_path / "a.json").write_text(json.dumps([one, one]))
    monkeypatch.setattr("tests.conformance.suite.VECTORS", tmp_path)
    with pytest.raises(ValueError, match="two vectors have the name a"):
        load_vectors()
