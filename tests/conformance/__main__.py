"""`python -m tests.conformance`: builds the drivers, runs all vectors, and prints a table."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence

from scripts.client_languages import LANGUAGES, Language
from tests.conformance.driver import ROOT
from tests.conformance.suite import TRANSPORTS, Outcome, load_vectors, run_language


def main() -> int:
    """The command; 0: all that ran is met."""
    arguments = _arguments()
    logging.disable(logging.WARNING)  # what real servers tell their operators
    vectors = load_vectors(arguments.vector or ())
    transports = [arguments.transport] if arguments.transport else list(TRANSPORTS)
    chosen = [one for one in LANGUAGES if one.name in (arguments.language or [one.name])]
    if not vectors or not chosen:
        print("no such vector or language", file=sys.stderr)
        return 2
    print(f"{len(vectors)} vectors, --seed {arguments.seed}", flush=True)
    table: dict[str, list[Outcome]] = {}
    notes, failed = [], False
    for language in chosen:
        if missing := language.missing():
            notes.append(f"SKIPPED {language.name}: {', '.join(missing)} not found")
            failed = failed or arguments.require
            continue
        began = time.monotonic()
        if (problem := _build(language)) is not None:
            notes.append(f"FAILED {language.name}: it cannot be built: {problem}")
            failed = True
            continue
        print(f"{language.name}: built in {time.monotonic() - began:.1f} s", flush=True)
        table[language.name] = []
        for transport in transports:
            table[language.name] += asyncio.run(
                run_language(language, vectors, transport, seed=arguments.seed, told=_tell)
            )
    _print_table(table, [vector["name"] for vector in vectors])
    for note in notes:
        print(note)
    failed = failed or any(one.problem for outcomes in table.values() for one in outcomes)
    if failed:
        print(f"repeat with ARGS='--seed {arguments.seed} --vector NAME --language NAME'")
    return 1 if failed or not table else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.conformance", description=__doc__)
    parser.add_argument("--language", action="append", choices=[one.name for one in LANGUAGES])
    parser.add_argument("--vector", action="append", help="those whose names contain this")
    parser.add_argument("--transport", choices=TRANSPORTS)
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    parser.add_argument(
        "--require", action="store_true", help="a missing toolchain is a failure, not a skip"
    )
    return parser.parse_args()


def _build(language: Language) -> str | None:
    """Builds a driver; returns what went wrong."""
    for folder, command in language.build:
        done = subprocess.run(
            command,
            cwd=ROOT / folder,
            env={**os.environ, **language.environment},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            return f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return None


def _tell(outcome: Outcome) -> None:
    if outcome.problem:
        print(f"  {outcome.vector} over {outcome.transport}: {outcome.problem}", flush=True)


def _print_table(table: dict[str, list[Outcome]], names: Sequence[str]) -> None:
    width = max(len(name) for name in names) + 2
    print("\n" + " " * width + "  ".join(table))
    for name in names:
        cells = []
        for language, outcomes in table.items():
            own = [one for one in outcomes if one.vector == name]
            cells.append(_cell(own).ljust(len(language)))
        print(name.ljust(width) + "  ".join(cells))
    for language, outcomes in table.items():
        bad = {one.vector for one in outcomes if one.problem}
        skipped = {one.vector for one in outcomes if one.skipped}
        seconds = sum(one.seconds for one in outcomes)
        met = len({one.vector for one in outcomes} - bad - skipped)
        print(
            f"{language}: {met} met, {len(bad)} not, {len(skipped)} not applicable, {seconds:.0f} s"
        )


def _cell(outcomes: Sequence[Outcome]) -> str:
    if any(one.problem for one in outcomes):
        return "FAILS"
    if any(one.skipped for one in outcomes):
        return "n/a"
    return "ok" if outcomes else "-"


if __name__ == "__main__":
    sys.exit(main())
