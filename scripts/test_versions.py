"""Runs the tests that depend most on torch and transformers at both ends of the versions that
pyproject.toml admits: `make test-versions`, by hand and before a release.

    lowest   the lowest versions that it names, as far as they fit together
    newest   the newest that the package index has

Each end has a separate environment, .venv-versions/NAME, which is always recreated. The .venv of
the repository is not touched. uv makes the environment, from its cache if the packages are there;
otherwise torch and its dependencies are downloaded, some gigabytes for each end. The second end is
run even if the first has failed. The exit code is 1 if any has failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.install import uv_settings  # noqa: E402 - after the path is set

FOLDER = ROOT / ".venv-versions"
ENDS = {"lowest": "lowest-direct", "newest": "highest"}
"""How uv chooses versions, by name."""
TESTS = (
    "tests/engine/loading",
    "tests/engine/models",
    "tests/engine/attention",
    "tests/engine/sampling",
    "tests/engine/test_families.py",
)
TOLD = ("torch", "transformers", "triton", "tokenizers", "safetensors", "numpy", "accelerate")
NEEDED_BYTES = 8 << 30
"""The disk space that an end needs, with uv's cache if that is empty."""

Run = Callable[[Sequence[str], Mapping[str, str]], int]
"""Runs a command in ROOT with additional environment variables, and returns its exit code."""


def check(ends: Sequence[str], run: Run, settings: Mapping[str, str], tests: Sequence[str]) -> int:
    """Run the tests at these ends and return the exit code.

    Args:
        ends: names in ENDS.
        run: see Run.
        settings: uv's settings, as environment variables.
        tests: pytest's arguments.
    """
    failed: dict[str, str] = {}
    for name in ends:
        _say(f"{name}: making {FOLDER.name}/{name} (its first time downloads gigabytes)")
        began = time.monotonic()
        if run(_install(name), settings):
            failed[name] = "the environment could not be made; uv has said why"
            continue
        python = _python(name)
        told = "import importlib.metadata as m; print('   ', *(f'{n} {m.version(n)}' for n in %r))"
        run([python, "-c", told % (TOLD,)], {})
        _say(f"{name}: made in {time.monotonic() - began:.0f} s; running the tests")
        if run([python, "-m", "pytest", "-p", "no:cacheprovider", *tests], {}):
            failed[name] = "tests failed, or pytest did not come to its end"
    sys.stdout.write("\n")  # a process may have ended within a line
    for name in ends:
        _say(f"{name}: {failed.get(name, 'passed')}")
    return 1 if failed else 0


def _install(name: str) -> list[str]:
    """Return a single sh command that recreates an environment with everything in it."""
    uv = f"'{sys.executable}' -m uv"
    place = f"'{FOLDER / name}'"
    made = f"{uv} venv --quiet --clear --python '{sys.executable}' {place}"
    filled = (
        f"{uv} pip install --quiet --system-certs --python '{_python(name)}' "
        f"--resolution {ENDS[name]} -e clients/python -e '.[dev]'"
    )
    return ["sh", "-c", f"{made} && {filled}"]


def _python(name: str) -> str:
    return str(FOLDER / name / "bin" / "python")


def _run(command: Sequence[str], more: Mapping[str, str]) -> int:
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **more}, check=False).returncode


def _say(line: str) -> None:
    sys.stdout.write(f"==> {line}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    parser = argparse.ArgumentParser(
        description="Run tests at the lowest and the newest versions of torch and transformers.",
        epilog=f"Tests: those not marked slow of {', '.join(TESTS)}. Other options go to pytest.",
    )
    parser.add_argument("--only", choices=ENDS, help="at this end alone")
    parser.add_argument("--workers", default="auto", help="processes that run tests (default auto)")
    given, more = parser.parse_known_args(arguments)
    free = shutil.disk_usage(ROOT).free
    if free < NEEDED_BYTES:
        parser.error(
            f"{free >> 30} GiB are free on the disk, and an end takes {NEEDED_BYTES >> 30}: "
            f"make room, `rm -rf {FOLDER.name}` and `uv cache prune` perhaps"
        )
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"]
    listed = subprocess.run(pip, capture_output=True, text=True, check=True)
    settings = uv_settings(listed.stdout)
    if settings is None:
        parser.error("pip has a setting that uv does not know; see scripts/install.py")
    options = ["-n", given.workers, "--dist", "loadfile", "-q", "-m", "not slow", *TESTS, *more]
    return check([given.only] if given.only else list(ENDS), _run, settings, options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
