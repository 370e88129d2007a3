"""What the image is made of: the lock, and what leaves the build's context."""

from __future__ import annotations

import fnmatch
import re
import subprocess
import sys

import pytest

from tests.service.readme import ROOT

SCRIPT = ROOT / "deploy" / "dependencies.py"
LOCK = ROOT / "deploy" / "requirements.lock"
COPIED = re.findall(r"^COPY (?!--)(.*) \S+$", (ROOT / "Dockerfile").read_text("utf-8"), re.M)
ENTRY = re.compile(r"^([a-z0-9.-]+)(?:\[[a-z,]+\])?==([^\s;]+)", re.M)


def said(*arguments: object) -> str:
    """What deploy/dependencies.py prints."""
    run = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(run, check=True, capture_output=True, text=True).stdout


def canonical(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned(text: str) -> dict[str, str]:
    """Names and versions."""
    return {canonical(name): version for name, version in ENTRY.findall(text)}


def test_the_lock_has_every_dependency_in_the_version_that_is_tested() -> None:
    locked = pinned(LOCK.read_text(encoding="utf-8"))
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    tested = {
        canonical(name): version
        for name, version in re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", constraints, re.M)
    }
    wanted = said("names", ROOT / "pyproject.toml", ROOT / "clients" / "python" / "pyproject.toml")
    for line in wanted.splitlines():
        assert canonical(re.split(r"[^A-Za-z0-9._-]", line)[0]) in locked
    both = locked.keys() & tested.keys()
    assert {name: locked[name] for name in both} == {name: tested[name] for name in both}


def test_every_entry_of_the_lock_has_hashes() -> None:
    entries = re.split(r"^(?=\S)", LOCK.read_text(encoding="utf-8"), flags=re.M)[1:]
    assert entries
    for entry in entries:
        assert "--hash=sha256:" in entry


def test_without_torch_nothing_of_cuda_is_left_and_all_else_is() -> None:
    everything, rest = pinned(said("locked", LOCK)), pinned(said("locked", LOCK, "--no-torch"))
    assert everything == pinned(LOCK.read_text(encoding="utf-8"))
    gone = everything.keys() - rest.keys()
    assert {"torch", "triton", "nvidia-cublas", "cuda-toolkit"} <= gone
    assert all(re.match(r"torch$|triton$|nvidia-|cuda-", name) for name in gone)
    assert {"transformers", "numpy", "setuptools"} <= rest.keys()


@pytest.mark.parametrize("copied", COPIED)
def test_the_context_has_what_is_copied(copied: str) -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for path in copied.split():
        assert (ROOT / path).exists()
        kept = False
        for line in lines:
            pattern = line.removeprefix("!")
            parts = path.split("/")
            above = ["/".join(parts[: i + 1]) for i in range(len(parts))]
            if any(fnmatch.fnmatchcase(one, pattern) for one in above):
                kept = line.startswith("!")
        assert kept, path
