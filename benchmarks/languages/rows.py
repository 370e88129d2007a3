"""The languages: a row for each, which says how to build and start its load program."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.processes import ROOT
from scripts.client_languages import LANGUAGES, Language

_TOOLS = ROOT / ".tools" / "bin"
_CARGO = "cargo build --locked --release"
Build = tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True)
class Row:
    """A language.

    Attributes:
        name: the name of its row in `scripts.client_languages`, which lists its requirements.
        command: what starts its load program, in the repository's root.
        build: commands that build it, each with the folder in which it runs.
        aim: the target share of the fastest language's throughput.
        environment: variables for the build and the program.
    """

    name: str
    title: str
    command: tuple[str, ...]
    build: Build
    aim: float
    environment: Mapping[str, str] = field(default_factory=dict)

    def missing(self) -> list[str]:
        """Return the programs that are not installed."""
        return _registered(self.name).missing()

    def make(self) -> None:
        """Build the load program. Raises CalledProcessError."""
        for folder, command in self.build:
            subprocess.run(
                command,
                cwd=ROOT / folder,
                env={**os.environ, **self.environment},
                check=True,
                stdout=sys.stderr,
            )


def _registered(name: str) -> Language:
    return next(language for language in LANGUAGES if language.name == name)


def _python(name: str, title: str, module: str) -> Row:
    environment = _registered(name).environment
    return Row(name, title, (sys.executable, "-m", module), (), 0.75, environment)


ROWS = (
    _python("python", "Python", "benchmarks.languages.load_threads"),
    _python("python-asyncio", "Python, asyncio", "benchmarks.languages.load_asyncio"),
    Row(
        "go",
        "Go",
        (str(_TOOLS / "load-go"),),
        (("clients/go", ("go", "build", "-o", str(_TOOLS / "load-go"), "./cmd/load")),),
        0.9,
        {"CGO_ENABLED": "0"},
    ),
    Row(
        "java",
        "Java",
        (*_registered("java").command[:-1], "dev.headrace.conformance.Load"),
        _registered("java").build,
        0.9,
    ),
    Row(
        "rust",
        "Rust",
        (str(ROOT / ".tools" / "rust" / "release" / "load"),),
        (("clients/rust", tuple(f"{_CARGO} --package headrace-conformance --bin load".split())),),
        0.9,
        _registered("rust").environment,
    ),
    Row(
        "typescript",
        "TypeScript (Node)",
        ("node", "clients/typescript/build/conformance/load.js"),
        _registered("typescript").build,
        0.75,
    ),
)
