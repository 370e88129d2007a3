"""Compile every Triton kernel for an H100, for all sizes, block sizes and types, and that of
experts for smaller devices too, and say what comes out (`make kernels`). Ends with 1 if a kernel is
not as it should be.

A case is compiled by one of several processes. Triton's cache on disk keeps what was compiled, by
source and constants, so what cases have in common is compiled once, and in the next run only what
has changed. A case that does not compile is told like any other fault, and the rest go on.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.engine.cuda.kernel_cases import Case, every_case, faults
from tests.engine.cuda.kernels import Found, compile_all

Result = tuple[list[tuple[Found, list[str]]], str | None]
"""A case's kernels, each with what is wrong with it; and why not all were compiled, or None."""


def compile_case(case: Case) -> Result:
    """Compile a case, here."""
    try:
        return [
            (found, faults(case, found)) for found in compile_all(case.run, case.properties)
        ], None
    except Exception as error:
        return [], f"{type(error).__name__}: {error}"


def compile_named(name: str) -> Result:
    """The same in a process of a pool, to which cases cannot be sent."""
    [case] = [one for one in every_case() if one.name == name]
    return compile_case(case)


def describe(name: str, result: Result) -> tuple[list[str], int]:
    """A case in lines, and how many of them tell of a fault."""
    kernels, failure = result
    lines, wrong = [], 0
    for found, wrongs in kernels:
        lines.append(
            f"{name}: {found.kernel}, {found.shared} bytes shared, {found.spilled} spilled, "
            f"products {found.products}, copies {found.copies}"
            + "".join(f"; WRONG: {one}" for one in wrongs)
        )
        wrong += bool(wrongs)
    if failure is not None:
        lines.append(f"{name}: WRONG: it does not compile: {failure}")
        wrong += 1
    return lines, wrong


def main(arguments: Sequence[str] | None = None) -> bool:
    """Whether all are as they should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--jobs",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="how many are compiled at a time (default: the processors that there are)",
    )
    parser.add_argument(
        "--only", default="", help="a regular expression: only cases in whose names it is found"
    )
    options = parser.parse_args(arguments)
    names = [case.name for case in every_case() if re.search(options.only, case.name)]
    begin, wrong = time.monotonic(), 0
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        tasks = {pool.submit(compile_named, name): name for name in names}
        for done, task in enumerate(as_completed(tasks), 1):
            lines, more = describe(tasks[task], task.result())
            wrong += more
            place = f"[{done}/{len(names)}, {time.monotonic() - begin:.0f} s] "
            sys.stdout.write("".join(f"{place}{line}\n" for line in lines))
            sys.stdout.flush()
    sys.stdout.write(
        f"{len(names)} cases in {time.monotonic() - begin:.0f} s; "
        f"{wrong or 'no'} kernels are not as they should be\n"
    )
    return not wrong and bool(names)


if __name__ == "__main__":
    sys.exit(not main())
