"""The languages of the client libraries: a row for each, which says how its conformance driver is
built and started, and what it lacks. Its load program (`benchmarks.languages`) is built likewise.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

_CPP_BUILD = ROOT / ".tools" / "cpp"
_CPP_OPTIONS = ("-DCMAKE_BUILD_TYPE=Release",)
_PYTHON = {"PYTHONPATH": f"{ROOT}:{ROOT / 'clients' / 'python' / 'src'}"}
_RUST_BUILD = ROOT / ".tools" / "rust"
_RUST_DRIVER = "headrace-conformance"
_GO_DRIVER = ROOT / ".tools" / "bin" / "conformance-go"

_JAVA_TARGET = "clients/java/target"
_JAVA_PATH = ":".join(f"{_JAVA_TARGET}/{folder}" for folder in ("test-classes", "classes", "lib/*"))
_JAVA_GOALS = ("test-compile", "dependency:copy-dependencies")

_INSTALLED = "test node_modules/.package-lock.json -nt package-lock.json"  # npm writes it last


@dataclass(frozen=True)
class Language:
    """One row.

    Attributes:
        name: for the command line and the table.
        command: what starts the driver, in the repository's root.
        needs: programs without which it cannot be built or run.
        build: commands that build it, each with the folder in which it runs.
        environment: variables for the build and the driver.
        lacks: commands that the driver does not have, each with the reason.
        only: the vectors that it is run with, where it is an example and no library; empty: all.
    """

    name: str
    command: tuple[str, ...]
    needs: tuple[str, ...] = ()
    build: tuple[tuple[str, tuple[str, ...]], ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    lacks: Mapping[str, str] = field(default_factory=dict)
    only: frozenset[str] = frozenset()

    def missing(self) -> list[str]:
        """The programs that are not here."""
        return [program for program in self.needs if shutil.which(program) is None]


LANGUAGES = (
    Language(
        "python",
        (sys.executable, "-m", "tests.conformance.drivers.python_threads"),
        environment=_PYTHON,
        lacks={"abandon": "a call that blocks its thread is given up by an exception alone"},
    ),
    Language(
        "python-asyncio",
        (sys.executable, "-m", "tests.conformance.drivers.python_asyncio"),
        environment=_PYTHON,
    ),
    Language(
        "go",
        (str(_GO_DRIVER),),
        needs=("go",),
        build=(("clients/go", ("go", "build", "-o", str(_GO_DRIVER), "./cmd/conformance")),),
        environment={"CGO_ENABLED": "0"},
    ),
    Language(
        "typescript",
        ("node", "clients/typescript/build/conformance/driver.js"),
        needs=("node", "npm"),
        build=(
            ("clients/typescript", ("sh", "-c", f"{_INSTALLED} || npm ci --no-audit --no-fund")),
            ("clients/typescript", ("npm", "run", "build-all")),
        ),
    ),
    Language(
        "rust",
        (str(_RUST_BUILD / "debug" / _RUST_DRIVER),),
        needs=("cargo",),
        build=(
            (
                "clients/rust",
                ("cargo", "build", "--locked", "--package", _RUST_DRIVER, "--bin", _RUST_DRIVER),
            ),
        ),
        environment={"CARGO_TARGET_DIR": str(_RUST_BUILD)},
    ),
    Language(
        "java",
        ("java", "-cp", _JAVA_PATH, "dev.headrace.conformance.Driver"),
        needs=("java", "javac", "mvn"),
        build=(("clients/java", ("mvn", "-q", "-B", "-ntp", *_JAVA_GOALS)),),
    ),
    Language(
        "cpp",
        (str(_CPP_BUILD / "conformance"),),
        needs=("cmake", "g++", "protoc", "grpc_cpp_plugin"),
        build=(
            ("clients/cpp", ("cmake", "-S", ".", "-B", str(_CPP_BUILD), *_CPP_OPTIONS)),
            ("clients/cpp", ("cmake", "--build", str(_CPP_BUILD), "--parallel", "2")),
        ),
        only=frozenset(
            {
                "session",
                "two-sessions",
                "line-separators",
                "tokens-without-text",
                "text-without-tokens",
                "cancel-before-first-token",
                "cancel-after-first-token",
                "cancel-after-the-end",
                "burst-of-64",
                "half-close-drain",
                "slow-consumer",
                "empty-prompt",
                "failed-request",
                "missing-event",
                "repeated-event",
                "lost-without-a-lease",
                "session-reset",
                "session-go-away",
                "session-ended-by-a-defect",
                "drain",
                "real-adapter-unloaded-in-use",
                "real-adapter-refusals",
            }
        ),
    ),
)
