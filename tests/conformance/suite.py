"""Runs vectors with a language's driver, over each transport; a driver's process lasts for many."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.client_languages import Language
from tests.conformance.driver import Driver, DriverFault
from tests.conformance.scenario import NotApplicable, Scenario
from tests.conformance.stage import Unmet

VECTORS = Path(__file__).parent / "vectors"
TRANSPORTS = ("tcp", "unix")
END = "(the driver's end)"
"""The name under which a process that does not end rightly is told."""


@dataclass(frozen=True)
class Outcome:
    """What came of one vector. `problem`: empty where it is met."""

    vector: str
    transport: str
    problem: str = ""
    skipped: str = ""
    """Why the language has no means for it."""
    seconds: float = 0.0


def load_vectors(only: Sequence[str] = ()) -> list[dict[str, Any]]:
    """All vectors, or those whose names contain one of these texts.

    Raises:
        ValueError: two have the same name.
    """
    found: list[dict[str, Any]] = []
    for path in sorted(VECTORS.glob("*.json")):
        found += json.loads(path.read_text(encoding="utf-8"))
    names = [vector["name"] for vector in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two vectors have the name {', '.join(twice)}")
    return [one for one in found if not only or any(text in one["name"] for text in only)]


async def run_language(
    language: Language,
    vectors: Sequence[dict[str, Any]],
    transport: str,
    *,
    seed: int,
    told: Callable[[Outcome], None] = lambda _outcome: None,
) -> list[Outcome]:
    """Runs vectors with one language over one transport."""
    outcomes: list[Outcome] = []
    driver: Driver | None = None

    def note(outcome: Outcome) -> None:
        outcomes.append(outcome)
        told(outcome)

    for vector in vectors:
        name, began = vector["name"], time.monotonic()
        if transport not in vector.get("transports", TRANSPORTS):
            continue
        if language.only and name not in language.only:
            continue
        try:
            if driver is None:
                driver = await Driver.start(language.command, language.environment)
            # Not under a long path: that of a Unix socket has at most 107 bytes.
            with tempfile.TemporaryDirectory(prefix="hrc-") as folder:
                is_unix = transport == "unix"
                scenario = Scenario(vector, driver, Path(folder), unix=is_unix, seed=seed)
                await scenario.run()
        except NotApplicable as lack:
            op = str(lack).partition(":")[0]
            problem = "" if op in language.lacks else f"the registry does not say so: {lack}"
            note(Outcome(name, transport, problem, language.lacks.get(op, "")))
        except (Unmet, DriverFault) as fault:
            said = driver.said() if driver is not None else ""
            shown = f"{fault}\n    the driver said: {said}" if said else str(fault)
            note(Outcome(name, transport, shown, seconds=time.monotonic() - began))
            if driver is not None:
                await driver.kill()
                driver = None
        else:
            note(Outcome(name, transport, seconds=time.monotonic() - began))
    if driver is not None and (problem := await driver.end()) is not None:
        note(Outcome(END, transport, problem))
    return outcomes
