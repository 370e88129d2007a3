"""The command: `python -m benchmarks.trust`, or `make trust`."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

from benchmarks.processes import ROOT, SystemFailure
from benchmarks.trust.campaign import Campaign, Plan
from benchmarks.trust.document import DOCUMENT, update
from benchmarks.trust.registry import PARTS
from benchmarks.witness.report import WitnessError

RESULTS = ROOT / "benchmarks" / "results"
CUT_RESULTS = ROOT / "build" / "trust"
MINUTES = 180.0


def main() -> int:
    """Run the command and return the exit code.

    The code is 0 on success, 1 if a promise was not kept or nothing could be run, 2 for an invalid
    option, and 130 for Ctrl-C.
    """
    arguments = _arguments()
    if arguments.list:
        for part in PARTS.values():
            cut = "" if part.in_cut else " (not in the cut)"
            print(f"{part.name:10} about {part.minutes:3.0f} min  {part.meaning}{cut}")
        return 0
    if arguments.report:
        return _report(check=arguments.check)
    chosen = arguments.part or [
        one.name for one in PARTS.values() if one.in_cut or not arguments.cut
    ]
    plan = Plan(
        parts=[part for name, part in PARTS.items() if name in chosen],
        seed=arguments.seed,
        is_cut=arguments.cut,
        again=arguments.again,
        folder=arguments.output or (CUT_RESULTS if arguments.cut else RESULTS),
        minutes=arguments.minutes,
        seconds=arguments.seconds,
        only=arguments.only,
        calm_seconds=arguments.calm_seconds,
    )
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, lambda number, frame: sys.exit(128 + number))
    campaign = Campaign(plan, _say)
    try:
        campaign.run()
    except (SystemFailure, WitnessError, ValueError, OSError) as error:
        print(f"trust: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            "\ninterrupted; what was tried is recorded, the same command goes on", file=sys.stderr
        )
        return 130
    if campaign.left:
        print(f"no time was left for {', '.join(campaign.left)}; the same command tries them")
    for name, found in campaign.wrong.items():
        print(f"not as promised: {name}: {found}")
    print(f"the records are in {plan.folder}")
    return 1 if campaign.wrong else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.trust",
        description="Attack what docs/promises.md promises, and write records.",
    )
    parser.add_argument("--list", action="store_true", help="list the parts")
    parser.add_argument(
        "--part", action="append", choices=list(PARTS), help="only this one; may be repeated"
    )
    parser.add_argument("--seed", type=int, default=1, help="of everything drawn (default 1)")
    parser.add_argument("--cut", action="store_true", help="the few minutes of it that CI runs")
    parser.add_argument(
        "--again", action="store_true", help="also what is recorded with this seed and commit"
    )
    parser.add_argument("--only", default="", help="only rows whose names contain this")
    parser.add_argument(
        "--seconds", type=float, help="of each thing whose time can be chosen, such as a target"
    )
    parser.add_argument(
        "--calm-seconds", type=float, help="how long a calm server is looked at (default 60)"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=MINUTES,
        help=f"begin no part after so many (default {MINUTES:.0f})",
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="folder of the records (default benchmarks/results; of the cut build/trust)",
    )
    parser.add_argument(
        "--report", action="store_true", help="write docs/trust.md, and run nothing"
    )
    parser.add_argument("--check", action="store_true", help="with --report: only compare")
    return parser.parse_args()


def _report(*, check: bool) -> int:
    is_right = update(RESULTS, list(PARTS.values()), check=check)
    if check and not is_right:
        print(f"{DOCUMENT} differs from the records: run `make trust-report`", file=sys.stderr)
        return 1
    print(f"{DOCUMENT}: {'as it should be' if is_right else 'written'}")
    return 0


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
