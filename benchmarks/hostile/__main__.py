"""The command: `python -m benchmarks.hostile`, or `make hostile`."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.hostile.campaign import Campaign, Plan
from benchmarks.hostile.inputs import GROUPS, INPUTS
from benchmarks.hostile.inputs.kinds import BOTH
from benchmarks.hostile.long_model import long_model
from benchmarks.hostile.record import Record
from benchmarks.models import DEMO
from benchmarks.processes import ROOT, SystemFailure
from benchmarks.witness.report import WitnessError

RESULTS = ROOT / "benchmarks" / "results"
CACHE = Path(tempfile.gettempdir()) / "headrace-hostile"


def main() -> int:
    """Run it; the exit code: 0, 1 where an input failed or nothing could be run, 2 for a wrong
    option, 130 for Ctrl-C.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hostile",
        description="Try hostile inputs on a server beside a witness, and write a record.",
    )
    parser.add_argument("--list", action="store_true", help="list the inputs")
    parser.add_argument(
        "--model", choices=[*BOTH, "both"], default="both", help="on what (default both)"
    )
    parser.add_argument(
        "--input",
        action="append",
        choices=sorted(INPUTS),
        metavar="NAME",
        help="only this one, again if it is recorded; may be given several times",
    )
    parser.add_argument(
        "--resume", action="store_true", help="leave out what the record has already"
    )
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="how long each input is sent (default 4)"
    )
    parser.add_argument(
        "--calm-seconds",
        type=float,
        default=60.0,
        help="how long the witness looks before, once for each server (default 60)",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        help="begin no input of a model after so many (default: 1.5 times the estimate, and 2)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=RESULTS,
        help="folder of the records hostile-demo.json and hostile-long.json (default "
        "benchmarks/results)",
    )
    parser.add_argument("--tokens", type=int, default=600, help="of the witness' requests")
    parser.add_argument("--threads", type=int, help="of the model (default: the server's own)")
    parser.add_argument(
        "--cache", type=Path, default=CACHE, help=f"for the long model (default {CACHE})"
    )
    arguments = parser.parse_args()
    if arguments.list:
        _list()
        return 0
    if min(arguments.seconds, arguments.calm_seconds) <= 0:
        parser.error("--seconds and --calm-seconds must be above 0")
    try:
        failed = [
            name
            for model in (BOTH if arguments.model == "both" else [arguments.model])
            for name in _run(model, arguments)
        ]
    except (SystemFailure, WitnessError, ValueError, OSError) as error:
        print(f"hostile: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; what was recorded is kept, --resume goes on", file=sys.stderr)
        return 130
    if failed:
        print(f"beyond the criterion: {', '.join(failed)}")
    return 1 if failed else 0


def _run(model: str, arguments: argparse.Namespace) -> list[str]:
    """One model's campaign; the inputs that failed."""
    path = arguments.output / f"hostile-{model}.json"
    keep = arguments.resume or arguments.input is not None
    record = Record(path, model, keep=keep)
    names = {name for name, one in INPUTS.items() if model in one.models}
    if arguments.input is not None:
        names &= set(arguments.input)
    if arguments.resume:
        names -= record.names
    if not names:
        print(f"{model}: nothing is left to try")
        return []
    plan = Plan(
        model_name=model,
        model=DEMO if model == "demo" else long_model(arguments.cache),
        names=frozenset(names),
        seconds=arguments.seconds,
        calm_seconds=arguments.calm_seconds,
        tokens=arguments.tokens,
        threads=arguments.threads,
        minutes=arguments.minutes,
    )
    _say(
        f"{model}: {len(names)} inputs on {len(plan.groups())} servers, about "
        f"{plan.estimate_s / 60:.0f} minutes; none is begun after {plan.bound_s / 60:.0f}"
    )
    campaign = Campaign(plan, record, _say)
    left = campaign.run()
    print(f"{model}: written to {path}")
    if left:
        print(f"{model}: no time was left for {', '.join(left)}; --resume tries them")
    return [f"{name} ({model})" for name in dict.fromkeys(campaign.failed)]


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def _list() -> None:
    for group in GROUPS:
        print(group.name)
        for one in group.inputs:
            told = " (not judged)" if one.informational else ""
            print(f"  {one.name:24} {one.meaning}{told}")


if __name__ == "__main__":
    sys.exit(main())
