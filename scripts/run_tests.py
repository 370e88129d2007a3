"""Runs test targets of the Makefile and classifies failed runs.

    make test ──▶ all passed ─────────────────────────────────────────▶ green
              └─▶ some failed ──▶ each once more, in a process of its own
                                   ├─ fails again ────────────────────▶ red: it is broken
                                   └─ passes: it is flaky, and printed with its first failure
                                      ├─ at most MAX_FLAKY in all ────▶ green
                                      └─ more ────────────────────────▶ red

Anything other than failed tests (a crash, also of a worker, an error while collecting, no tests at
all) is red immediately. `tests/FLAKY.md` lists the tests that are known to have been flaky, with
the cause and the fix. A flaky test that is not listed must be fixed and added before other work
starts.

This module is also the pytest plugin that reports the failures (`-p scripts.run_tests`). pytest's
own machine-readable reports do not contain the ids that are needed to run tests again.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLAKY_LIST = ROOT / "tests" / "FLAKY.md"
MAX_FLAKY = 3
"""With more flaky tests than this, the run is red, because something that they share is broken."""
MAX_AGAIN = 10
"""With more failures than this, no test is retried: the run would be red even if all were flaky."""

Run = Callable[[Sequence[str]], int]


@dataclass(frozen=True, slots=True)
class Failure:
    """One test's first failure. `test` is its id for pytest; `text` is the failure as pytest shows
    it.
    """

    test: str
    text: str


def check(commands: Sequence[Sequence[str]], run: Run, known: str) -> int:
    """Run the commands in order until one is red, and return the exit code.

    Args:
        commands: each runs pytest (perhaps through make) and contains `{plugin}`, which is replaced
            by the plugin's options.
        run: runs a command with our output streams and returns its exit code.
        known: the text that lists known flaky tests.
    """
    flaky: list[Failure] = []
    for command in commands:
        with tempfile.TemporaryDirectory() as folder:
            told = Path(folder) / "failed.jsonl"
            options = f"-p scripts.run_tests --failed-tests={told}"
            code = run([part.replace("{plugin}", options) for part in command])
            failures, ended = _read(told)
        if code == 0 and ended == pytest.ExitCode.OK:
            continue
        if not failures or ended != pytest.ExitCode.TESTS_FAILED:
            _say(
                f"RED: `{' '.join(command[:2])}` ended with {code}, and not for failed tests alone"
            )
            return 1
        if len(failures) > MAX_AGAIN:
            _say(f"RED: {len(failures)} tests failed; above {MAX_AGAIN} none is tried again")
            return 1
        if broken := [one for one in failures if _fails_again(one, run)]:
            _say("RED: failed twice, the second time in a process of its own:")
            for one in broken:
                _say(f"  {one.test}")
            return 1
        flaky += failures
    return _conclude(flaky, known)


def _fails_again(failure: Failure, run: Run) -> bool:
    _say(f"once more, by itself: {failure.test}")
    return run([sys.executable, "-m", "pytest", failure.test]) != 0


def _conclude(flaky: Sequence[Failure], known: str) -> int:
    for one in flaky:
        _say(f"FLAKY: {one.test} failed first, then passed by itself. Its first failure:")
        print(one.text, flush=True)
        name = one.test.split("[")[0]
        _say(
            "it is in tests/FLAKY.md: what mended it then was not enough"
            if name in known
            else "it is not in tests/FLAKY.md: find its cause, mend it, and add it there"
        )
    if len(flaky) > MAX_FLAKY:
        _say(f"RED: {len(flaky)} flaky tests in one run; at most {MAX_FLAKY} are let pass")
        return 1
    return 0


def _read(path: Path) -> tuple[list[Failure], int | None]:
    """Return the first failure of each test and pytest's own exit code, as reported by the plugin.
    The code is None if pytest did not finish, because make's exit code cannot distinguish that from
    failed tests.
    """
    failures: dict[str, Failure] = {}
    ended: int | None = None
    for line in path.read_text().splitlines() if path.exists() else ():
        told = json.loads(line)
        if "ended" in told:
            ended = told["ended"]
        else:
            failures.setdefault(told["test"], Failure(**told))
    return list(failures.values()), ended


def _say(line: str) -> None:
    print(f"==> {line}", flush=True)


def _run(command: Sequence[str]) -> int:
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def main() -> int:
    """Run the named targets and return the exit code."""
    targets = sys.argv[1:]
    if not targets or any(target.startswith("-") for target in targets):
        print("usage: python scripts/run_tests.py TARGET ...   (of the Makefile, as in: test)")
        return 2
    commands = [["make", target, "ARGS={plugin}"] for target in targets]
    return check(commands, _run, FLAKY_LIST.read_text())


# The plugin


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for the file where failures are reported."""
    parser.addoption("--failed-tests", metavar="FILE", help="append each failure to a file")


def pytest_configure(config: pytest.Config) -> None:
    """Report failures if the option is set. For workers, their controller reports."""
    path = config.getoption("--failed-tests")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Teller(Path(path)))


class _Teller:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._lost_a_worker = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._tell({"test": report.nodeid, "text": f"{report.when}:\n{report.longreprtext}"})

    @pytest.hookimpl(optionalhook=True)  # pytest-xdist's
    def pytest_testnodedown(self, node: object, error: object | None) -> None:
        """Handle a crashed worker. pytest counts its test as failed, but the fault may be another
        test's, or no test's if the worker ended between two tests.
        """
        self._lost_a_worker |= error is not None

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        code = pytest.ExitCode.INTERNAL_ERROR if self._lost_a_worker else exitstatus
        self._tell({"ended": int(code)})

    def _tell(self, what: dict[str, object]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(what) + "\n")


if __name__ == "__main__":
    sys.exit(main())
