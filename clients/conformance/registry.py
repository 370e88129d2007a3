"""The languages: a row for each, which says how its driver is built and started, and what it
lacks.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from clients.conformance.driver import ROOT

_PYTHON = {"PYTHONPATH": f"{ROOT}:{ROOT / 'clients' / 'python' / 'src'}"}
_GO_DRIVER = ROOT / ".tools" / "bin" / "conformance-go"

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
    """

    name: str
    command: tuple[str, ...]
    needs: tuple[str, ...] = ()
    build: tuple[tuple[str, tuple[str, ...]], ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    lacks: Mapping[str, str] = field(default_factory=dict)

    def missing(self) -> list[str]:
        """The programs that are not here."""
        return [program for program in self.needs if shutil.which(program) is None]


LANGUAGES = (
    Language(
        "python",
        (sys.executable, "-m", "clients.conformance.drivers.python_threads"),
        environment=_PYTHON,
        lacks={"abandon": "a call that blocks its thread is given up by an exception alone"},
    ),
    Language(
        "python-asyncio",
        (sys.executable, "-m", "clients.conformance.drivers.python_asyncio"),
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
)
