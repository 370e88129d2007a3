"""`scripts/run_tests.py`, on small suites whose tests fail always, once, or never."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from scripts.run_tests import MAX_AGAIN, MAX_FLAKY, check

ROOT = Path(__file__).resolve().parent.parent
PASSES = "def test_passes():\n    pass\n"
BROKEN = "def test_broken():\n    assert 'deep' == 'shallow'\n"
CRASHES = "def test_zz_crashes():\n    import os\n    os._exit(70)\n"
INTERRUPTED = "def test_zz_interrupted():\n    raise KeyboardInterrupt\n"
FLAKY = """
import pathlib
def test_flaky{number}():
    mark = pathlib.Path(__file__).with_name("ran{number}")
    if not mark.exists():
        mark.touch()
        raise RuntimeError("a race was lost: {number}")
"""


class Suite:
    """A folder with tests; `runs`: what was run in it, the tests' options left out.

    workers: the processes that share a target's tests; 0: pytest runs them itself.
    """

    def __init__(self, folder: Path, workers: int = 0) -> None:
        self.folder = folder
        self.workers = workers
        self.runs: list[str] = []
        # An installation's own options do not hold here, and the repository's modules are found.
        (folder / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT}\n")

    def run(self, command: Sequence[str]) -> int:
        """As the command runs a command."""
        self.runs.append(command[-1])
        arguments = [part for given in command for part in given.split()]
        environment = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        return subprocess.run(
            arguments, cwd=self.folder, check=False, timeout=60, env=environment
        ).returncode

    def check(self, *files: str, known: str = "") -> int:
        """Write files of tests, and run each as a target of its own."""
        commands = []
        for index, text in enumerate(files):
            (self.folder / f"test_{index}.py").write_text(text)
            options = f"{{plugin}} -p xdist -n{self.workers}"
            commands.append([sys.executable, "-m", "pytest", options, f"test_{index}.py"])
        return check(commands, self.run, known)


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    return Suite(tmp_path)


@pytest.fixture(params=[0, 2], ids=["one process", "two workers"])
def shared(tmp_path: Path, request: pytest.FixtureRequest) -> Suite:
    return Suite(tmp_path, request.param)


def test_what_passes_is_run_once(suite: Suite) -> None:
    assert suite.check(PASSES, PASSES) == 0
    assert suite.runs == ["test_0.py", "test_1.py"]


def test_what_fails_twice_is_red_and_nothing_follows_it(
    suite: Suite, capfd: pytest.CaptureFixture[str]
) -> None:
    assert suite.check(PASSES + BROKEN, PASSES) == 1
    assert suite.runs == ["test_0.py", "test_0.py::test_broken"]
    printed = capfd.readouterr().out
    assert "RED: failed twice" in printed
    assert "FLAKY" not in printed


def test_what_passes_alone_is_printed_as_flaky_with_its_first_failure(
    shared: Suite, capfd: pytest.CaptureFixture[str]
) -> None:
    assert shared.check(PASSES + FLAKY.format(number=1), PASSES) == 0
    assert shared.runs == ["test_0.py", "test_0.py::test_flaky1", "test_1.py"]
    told = capfd.readouterr().out.partition("FLAKY: test_0.py::test_flaky1 failed first")[2]
    assert "a race was lost: 1" in told
    assert "it is not in tests/FLAKY.md" in told


def test_a_flaky_test_that_is_known_is_told_as_such(
    suite: Suite, capfd: pytest.CaptureFixture[str]
) -> None:
    assert suite.check(FLAKY.format(number=1), known="| test_0.py::test_flaky1 | … |") == 0
    assert "what mended it then was not enough" in capfd.readouterr().out


def test_flaky_tests_of_all_targets_count_together(suite: Suite) -> None:
    few = "".join(FLAKY.format(number=number) for number in range(MAX_FLAKY))
    assert suite.check(few, PASSES) == 0
    for mark in suite.folder.glob("ran*"):
        mark.unlink()
    assert suite.check(few, FLAKY.format(number=MAX_FLAKY)) == 1


def test_many_failures_are_not_tried_again(suite: Suite) -> None:
    many = "".join(FLAKY.format(number=number) for number in range(MAX_AGAIN + 1))
    assert suite.check(many) == 1
    assert suite.runs == ["test_0.py"]


@pytest.mark.parametrize(
    "text",
    [
        FLAKY.format(number=1) + CRASHES,
        FLAKY.format(number=1) + INTERRUPTED,
        "import nothing_of_that_name\n",
        "",
    ],
    ids=["a crash", "an interrupt", "a broken file", "no test"],
)
def test_what_is_no_failed_test_is_red_at_once(shared: Suite, text: str) -> None:
    assert shared.check(text, PASSES) == 1
    assert shared.runs == ["test_0.py"]
