"""The command: `python -m tests.campaign.witness TARGET`. Reports are lines of JSON on stdout."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from tests.campaign.witness.probes import Observer, Plan, observing
from tests.campaign.witness.report import WitnessError


def main() -> int:
    """Run the command and return the exit code.

    The code is 0 on success, 1 if the server cannot be witnessed, and 2 for an invalid option.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaign.witness",
        description="Stream greedy tokens, tokenize and ask health until Ctrl-C, and report what "
        "was seen, as a line of JSON: waits, wrong and lost tokens, the servers' memory.",
    )
    parser.add_argument("target", help="the server: host:port or unix:/path, without TLS")
    parser.add_argument("--health-target", help="where to ask health (default: the server)")
    parser.add_argument("--token-file", type=Path, help="a file with a bearer token")
    parser.add_argument(
        "--pid",
        action="append",
        default=[],
        type=_process,
        metavar="NAME=NUMBER",
        help="a process whose memory is watched; may be given several times",
    )
    parser.add_argument("--prompt", default=Plan.__dataclass_fields__["prompt"].default)
    parser.add_argument("--tokens", type=int, default=500, help="of each request (default 500)")
    parser.add_argument("--seconds", type=float, help="how long (default: until Ctrl-C)")
    parser.add_argument("--every", type=float, help="also report every so many seconds")
    parser.add_argument(
        "--ready", type=float, default=60.0, help="seconds to wait for the server (default 60)"
    )
    parser.add_argument(
        "--driven",
        action="store_true",
        help='obey orders, lines of JSON on stdin: {"report": {}} asks for one, {"begin": {}} '
        "begins a new window; ends with stdin",
    )
    arguments = parser.parse_args()
    if arguments.tokens < 2:
        parser.error("--tokens must be at least 2: there is no gap without two")
    try:
        token = arguments.token_file and arguments.token_file.read_text().strip()
        plan = Plan(
            target=arguments.target,
            health_target=arguments.health_target,
            token=token,
            prompt=arguments.prompt,
            tokens=arguments.tokens,
            pids=dict(arguments.pid),
            ready_s=arguments.ready,
        )
        asyncio.run(_run(plan, arguments))
    except (WitnessError, OSError) as error:
        print(f"witness: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _process(text: str) -> tuple[str, int]:
    name, equals, number = text.partition("=")
    if not equals or not number.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=NUMBER, such as engine=123")
    return name, int(number)


async def _run(plan: Plan, arguments: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    async with observing(plan) as observer:
        over = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, over.set)
        if arguments.driven:
            threading.Thread(
                target=_obey, args=(loop.call_soon_threadsafe, observer, over.set), daemon=True
            ).start()
        left = arguments.seconds
        while not over.is_set() and (left is None or left > 0):
            wait = min(t for t in (left, arguments.every, 3600.0) if t is not None)
            try:
                async with asyncio.timeout(wait):
                    await over.wait()
            except TimeoutError:
                left = None if left is None else left - wait
                if arguments.every is not None and (left is None or left > 0):
                    _say(observer.report().as_json())
        if not arguments.driven:
            _say(observer.report().as_json())


def _obey(call: Callable[..., object], observer: Observer, end: Callable[[], None]) -> None:
    """Read commands from stdin in a thread and run them on the event loop."""
    for line in sys.stdin:
        call(_carry_out, line.strip(), observer)
    call(end)


def _carry_out(order: str, observer: Observer) -> None:
    match json.loads(order):
        case {"load": _}:
            _say({"ready": {}})
        case {"report": _}:
            _say({"report": observer.report().as_json()})
        case {"begin": _}:
            observer.begin()
            _say({"began": True})
        case _:
            _say({"failed": f"{order} is no order; load, report and begin are"})


def _say(what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    sys.exit(main())
