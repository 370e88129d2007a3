"""Runs test targets of the Makefile, and says of a red run what it means.

    make test ──▶ all passed ─────────────────────────────────────────▶ green
              └─▶ some failed ──▶ each once more, in a process of its own
                                   ├─ fails again ────────────────────▶ red: it is broken
                                   └─ passes: it is flaky, and printed with its first failure
                                      ├─ at most MAX_FLAKY in all ────▶ green
                                      └─ more ────────────────────────▶ red

Anything but failed tests (a crash, of a worker as well, an error while collecting, no test at all)
is red at once. The tests that are known to have been flaky, with the cause and what mended it,
stand in `tests/FLAKY.md`; one that is not there is to be mended and added before other work is
begun.

The failures are told by a plugin, which is this same module (`-p scripts.run_tests`): pytest's own
reports for machines do not hold the ids by which tests can be run again.
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
"""With more flaky tests in a run, the run is red: something is wrong with what they share."""
MAX_AGAIN = 10
"""With more failures nothing is tried again: they would be red even if all were flaky."""

Run = Callable[[Sequence[str]], int]


@dataclass(frozen=True, slots=True)
class Failure:
    """One test's first failure. `test`: its id, as pytest takes it. `text`: as pytest shows it."""

    test: str
    text: str


def check(commands: Sequence[Sequence[str]], run: Run, known: str) -> int:
    """Run the commands, one after the other, until one is red; returns the exit code.

    Args:
        commands: each runs pytest (perhaps through make), and takes `{plugin}` for where the
            plugin's options go.
        run: runs a command, its output going where ours goes; returns its exit code.
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
    """The first failure of each test, as the plugin told them, and pytest's own exit code; None:
    it did not come to its end, and make's code does not tell that from failed tests.
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
    """Run the targets that are named; returns the exit code."""
    targets = sys.argv[1:]
    if not targets or any(target.startswith("-") for target in targets):
        print("usage: python scripts/run_tests.py TARGET ...   (of the Makefile, as in: test)")
        return 2
    commands = [["make", target, "ARGS={plugin}"] for target in targets]
    return check(commands, _run, FLAKY_LIST.read_text())


# The plugin


def pytest_addoption(parser: pytest.Parser) -> None:
    """Say where failures are told."""
    parser.addoption("--failed-tests", metavar="FILE", help="append each failure to a file")


def pytest_configure(config: pytest.Config) -> None:
    """Tell failures, if it is said where; of workers it is their controller that tells."""
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
        """pytest counts the worker's test as failed; it may have been another's fault, or none's
        if the worker ended between two.
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
