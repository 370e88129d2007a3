"""`headrace top`: a server's live statistics on a terminal, or as plain lines elsewhere.

The figures are those of the server's metrics (docs/operations.md), in the same units.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Annotated

import typer
from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import MessageToDict
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from headrace.cli import common
from headrace.cli.options import ServerOptions, grouped
from headrace.errors import CallCancelledError
from headrace.v1 import control_service_pb2 as pb

_BAR = 24  # characters
_CALLERS = 12  # rows of a terminal
_NAMED_ADAPTERS = 6  # likewise
_REASONS = 6  # of refusals, likewise
_ARRANGED = pb.EngineStatistics.OTHER_ADAPTERS_FIELD_NUMBER
"""The last of the engine's statistics that has a place of its own; later ones are shown by name."""
_STATES = "headrace.states."
"""How the names of the statistics of states begin, which have a row of their own."""
_ADAPTERS = "headrace.adapters"
"""The name of the number of adapters, and how the names of the others begin."""
_WITHOUT_STATE = "headrace.prefix_cache.without_state"
_DRAFTED, _ACCEPTED = "headrace.tokens.drafted.", "headrace.tokens.drafts_accepted."
"""How the names of the statistics by source begin, which are shown with the others of drafts."""


@common.tells_errors
@grouped
def top(
    context: typer.Context,
    *,
    interval: Annotated[
        float, typer.Option("--interval", "-i", help="Seconds between two looks; 0.1 to 3600.")
    ] = 1.0,
    count: Annotated[
        int | None, typer.Option("--count", "-c", min=1, help="End after so many looks.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a line, with all figures.")
    ] = False,
    server: ServerOptions,
) -> None:
    """Show a server's live statistics. Ends with the key q, with Ctrl-C, or when the server stops.

    If stdout is not a terminal, each update is one line. Needs the server's ControlService, which
    by default is served on loopback addresses and Unix sockets.
    """
    common.check_seconds(interval, "--interval", 0.1, 3600)
    is_live = sys.stdout.isatty() and not as_json
    is_over = threading.Event()
    with server.connection(context).open() as client:

        def end() -> None:
            is_over.set()
            client.close()  # which ends the watch

        looks = client.control.watch(interval)
        with (
            _quits(end) if is_live else _Nothing() as told,
            Live(auto_refresh=False, transient=False) if is_live else _Nothing() as live,
        ):
            try:
                for number, found in enumerate(looks, 1):
                    if live is not None:
                        keys = Text(told or "Ctrl-C quits", style="dim")
                        live.update(Group(keys, picture(found, client.target)), refresh=True)
                    elif as_json:
                        fields = MessageToDict(found, preserving_proto_field_name=True)
                        typer.echo(json.dumps(fields))
                    else:
                        typer.echo(line(found))
                    if number == count:
                        return
            except CallCancelledError:
                if not is_over.is_set():
                    raise


@contextmanager
def _quits(end: Callable[[], None]) -> Iterator[str | None]:
    """Calls `end`, in a thread, when q is pressed. Meanwhile, keys are unbuffered and not echoed.

    Nothing is read if the input is not a terminal or belongs to another job.

    Returns: a description of the keys; None if none are read.
    """
    try:
        import termios
        import tty
    except ImportError:  # Windows
        yield None
        return
    try:
        keyboard = sys.stdin.fileno()
        before = termios.tcgetattr(keyboard)
        is_ours = os.tcgetpgrp(keyboard) == os.getpgrp()
    except (OSError, ValueError, termios.error):
        is_ours = False
    if not is_ours:
        yield None
        return

    def read() -> None:
        while key := os.read(keyboard, 1):
            if key in b"qQ":
                end()
                return

    tty.setcbreak(keyboard)
    threading.Thread(target=read, name="keys", daemon=True).start()
    try:
        yield "q or Ctrl-C quits"
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


class _Nothing:
    """A stand-in context manager for when there is no live display."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


def phase_of(found: pb.Statistics) -> str:
    """Describes the server's phase in a word or two."""
    name = pb.ServerPhase.Name(found.phase).removeprefix("SERVER_PHASE_").lower()
    return f"{name}, paused" if found.HasField("pause") else name


def line(found: pb.Statistics) -> str:
    """Formats the statistics as one line with fixed labels."""
    engine, rates = found.engine, found.rates
    words = [
        found.sample_time.ToDatetime().isoformat(timespec="seconds") + "Z",
        phase_of(found).replace(", ", "+"),
        f"live={found.front_end.live_requests}",
    ]
    if found.HasField("engine"):
        words += [
            f"running={engine.running}",
            f"waiting={engine.waiting}",
            f"blocks={engine.blocks_used}/{engine.blocks_total}",
            f"callers={len(_with_requests(engine))}",
        ]
        if engine.steps_over_target:
            words.append(f"over-target={_over_target(engine):.1%}")
        words += [f"held={engine.held}", f"kv={_usage(engine):.1%}"]
        if states := engine.others.get(_STATES + "limit", 0):
            words.append(f"states={engine.others.get(_STATES + 'used', 0):g}/{states:g}")
        if engine.prefix_queries:
            words.append(f"prefix-hits={engine.prefix_hits / engine.prefix_queries:.1%}")
    words.append(f"refused={sum(one.count for one in found.front_end.refusals)}")
    if found.HasField("rates"):
        words += [
            f"generated/s={rates.generated_tokens:.1f}",
            f"prompt/s={rates.prompt_tokens:.1f}",
            f"finished/s={rates.requests_finished:.2f}",
            f"preemptions/s={rates.preemptions:.2f}",
        ]
    return " ".join(words)


def picture(found: pb.Statistics, target: str) -> Group:
    """Formats the statistics for a terminal."""
    # Names and reasons are shown as they are: nothing in them is markup.
    head = Text(f"{found.model or '(loading)'} at {target}  {phase_of(found)}", style="bold")
    uptime = timedelta(seconds=found.uptime_duration.seconds)
    parts = [
        head,
        Text(
            f"{found.instance_id}, version {found.server_version}, up {uptime}, "
            f"engine restarts {found.engine_restarts}",
            style="dim",
        ),
    ]
    if found.startup_phases:
        times = {one.name: _seconds(one.duration) for one in found.startup_phases}
        told = [f"{name} {took:.1f}" for name, took in times.items() if took >= 0.05]
        parts.append(Text(f"started in {sum(times.values()):.1f} s: {', '.join(told)}", "dim"))
    for name, state in (("pause", found.pause), ("drain", found.drain)):
        if found.HasField(name):  # type: ignore[arg-type]  # one of two literals
            since = state.start_time.ToDatetime().isoformat(timespec="seconds")
            parts.append(Text(f"{name} since {since}Z: {state.reason or '(no reason)'}"))
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")  # of a long name nothing is cut
    front = found.front_end
    table.add_row(
        "requests",
        f"{front.live_requests} live ({front.live_request_bytes / 2**20:.1f} MiB), "
        f"{front.open_sessions} sessions, {front.open_streams} streams, {front.kept_results} kept "
        f"({front.kept_result_bytes / 2**20:.1f} MiB)",
    )
    if found.HasField("engine"):
        _engine_rows(table, found)
    else:
        table.add_row("engine", "cannot be asked now")
    _refusal_row(table, front)
    if front.unknown_field_messages:
        table.add_row("unknown", f"{front.unknown_field_messages} messages with unknown fields")
    if found.HasField("engine"):
        _caller_rows(table, found.engine)
        _named_adapter_rows(table, found.engine)
    return Group(*parts, table)


def _engine_rows(table: Table, found: pb.Statistics) -> None:
    engine, rates = found.engine, found.rates
    held = " (not read)" if engine.held else ""
    table.add_row(
        "batch", f"{engine.running} running, {engine.waiting} waiting, {engine.held} held{held}"
    )
    table.add_row("KV cache", _bar(engine.blocks_used, engine.blocks_cached, engine.blocks_total))
    if engine.host_blocks_total:
        table.add_row("on the host", _bar(engine.host_blocks_used, 0, engine.host_blocks_total))
    if engine.prefix_queries:
        share = engine.prefix_hits / engine.prefix_queries
        table.add_row(
            "prefix cache",
            f"{share:.0%}: {engine.prefix_hits} of {engine.prefix_queries} prompt tokens found",
        )
    table.add_row(
        "so far",
        f"{engine.requests_accepted} requests accepted, {engine.requests_finished} finished, "
        f"{engine.steps} steps, {engine.prompt_tokens} tokens of prompts, "
        f"{engine.generated_tokens} generated",
    )
    table.add_row(
        "given up",
        f"{engine.preemptions} preemptions, {engine.offloads} offloads, "
        f"{engine.restores} restores, {engine.holds} holds",
    )
    if found.HasField("rates"):
        table.add_row(
            "a second",
            f"{rates.generated_tokens:.1f} tokens generated, {rates.prompt_tokens:.1f} of prompts, "
            f"{rates.steps:.1f} steps, {rates.requests_finished:.2f} requests, "
            f"{rates.preemptions:.2f} preemptions",
        )
    table.add_row("last step", f"{_seconds(engine.last_step_duration) * 1e3:.1f} ms")
    table.add_row(
        "over target",
        f"{_over_target(engine):.1%}: {engine.steps_over_target} of {engine.steps_with_decodes} "
        "steps with decodes",
    )
    others = {name: value for name, value in engine.others.items() if value}
    _state_row(table, others)
    _adapter_row(table, others)
    if engine.draft_tokens:
        table.add_row(
            "guessed",
            f"{engine.accepted_draft_tokens} of {engine.draft_tokens} tokens were right, "
            f"{engine.drafts} times in {engine.steps_with_drafts} steps with drafts"
            + "".join(_by_source(others)),
        )
    later: dict[str, float] = {
        field.name.replace("_", " "): value
        for field, value in engine.ListFields()
        if _ARRANGED < field.number < pb.EngineStatistics.OTHERS_FIELD_NUMBER
    }
    later |= others
    if later:
        table.add_row("more", ", ".join(f"{value:g} {name}" for name, value in later.items()))


def _state_row(table: Table, others: dict[str, float]) -> None:
    """Takes the numbers of recurrent layers' states out of `others`, and adds their row."""
    names = ("limit", "used", "kept", "copies", "evictions")
    total, used, kept, copies, evicted = (int(others.pop(_STATES + one, 0)) for one in names)
    missed = int(others.pop(_WITHOUT_STATE, 0))
    if total:
        table.add_row(
            "states",
            f"{_bar(used, kept, total, 'states')}; {copies} were kept, {evicted} gave way; "
            f"{missed} prompt tokens found no state",
        )


def _adapter_row(table: Table, others: dict[str, float]) -> None:
    """The same for the numbers of adapters."""
    names = ("", ".limit", ".memory", ".memory.limit", ".loads", ".evictions")
    count, most, size, most_bytes, loads, evicted = (
        int(others.pop(_ADAPTERS + one, 0)) for one in names
    )
    if most:
        table.add_row(
            "adapters",
            f"{count} of {most} loaded ({size / 2**20:.1f} of {most_bytes / 2**20:.1f} MiB); "
            f"{loads} loads, {evicted} gave way to others",
        )


def _refusal_row(table: Table, front: pb.FrontEndStatistics) -> None:
    """Adds a row of refusals by reason, most frequent first, with the rest as one sum."""
    reasons: Counter[str] = Counter()
    for one in front.refusals:
        reasons[one.reason or one.status_code] += one.count
    told = [f"{count} {reason}" for reason, count in reasons.most_common(_REASONS)]
    if len(reasons) > _REASONS:
        rest = sum(count for _, count in reasons.most_common()[_REASONS:])
        told.append(f"{rest} for other reasons")
    table.add_row("refused", Text(", ".join(told) or "0"))


def _caller_rows(table: Table, engine: pb.EngineStatistics) -> None:
    """Adds a row for each caller, those with the most requests first, and one row for the rest."""
    callers = sorted(engine.callers, key=lambda one: (-one.waiting - one.running, -one.service))
    total = sum(one.service for one in callers) + engine.other_callers.service
    for number, one in enumerate(callers[:_CALLERS]):
        name = one.caller if one.caller.isprintable() else repr(one.caller)
        weight = "" if one.weight == 1 else f", weight {one.weight:g}"
        table.add_row(
            "" if number else "callers",
            Text(f"{name or '(not named)'}: {_has(one, total)}{weight}"),
        )
    rest = [*callers[_CALLERS:]]
    if engine.HasField("other_callers"):
        rest.append(engine.other_callers)
    if rest:
        others = pb.CallerStatistics(
            running=sum(one.running for one in rest),
            waiting=sum(one.waiting for one in rest),
            service=sum(one.service for one in rest),
        )
        table.add_row("", f"all others: {_has(others, total)}")


def _named_adapter_rows(table: Table, engine: pb.EngineStatistics) -> None:
    """Adds a row for each adapter, those with the most requests first, and one row for the rest."""
    found = sorted(
        engine.by_adapter, key=lambda one: (-one.waiting - one.running, -one.generated_tokens)
    )
    rest = [*found[_NAMED_ADAPTERS:]]
    if engine.HasField("other_adapters"):
        rest.append(engine.other_adapters)
    rows = [(one.name, [one]) for one in found[:_NAMED_ADAPTERS]]
    for number, (name, those) in enumerate([*rows, ("all other adapters", rest)] if rest else rows):
        running, waiting, prompts, generated = (
            sum(getattr(one, field) for one in those)
            for field in ("running", "waiting", "prompt_tokens", "generated_tokens")
        )
        table.add_row(
            "" if number else "by adapter",
            Text(
                f"{name}: {running} running, {waiting} waiting, {prompts} tokens of prompts, "
                f"{generated} generated"
            ),
        )


def _has(one: pb.CallerStatistics, total: int) -> str:
    """Describes a caller's requests and its share of the service."""
    share = one.service / total if total else 0.0
    given = f"{share:.0%} of the service ({one.service})"
    return f"{one.running} running, {one.waiting} waiting, {given}"


def _with_requests(engine: pb.EngineStatistics) -> list[pb.CallerStatistics]:
    return [one for one in engine.callers if one.running or one.waiting]


def _by_source(others: dict[str, float]) -> Iterator[str]:
    """Takes the numbers of guesses by source out of `others`, and yields them as text."""
    for name in [name for name in others if name.startswith(_DRAFTED)]:
        source, count = name.removeprefix(_DRAFTED), others.pop(name)
        yield f", {source} {others.pop(_ACCEPTED + source, 0):g} of {count:g}"


def _over_target(engine: pb.EngineStatistics) -> float:
    """The share of steps with decodes that took longer than the target."""
    return engine.steps_over_target / max(engine.steps_with_decodes, 1)


def _bar(used: int, cached: int, total: int, unit: str = "blocks") -> str:
    """Draws a usage bar: `#` is held, `.` is freed when needed."""
    if not total:
        return "none"
    full = round(_BAR * used / total)
    soft = min(round(_BAR * cached / total), _BAR - full)
    kept = f", {cached} keep a prefix" if cached else ""
    bar = f"{'#' * full}{'.' * soft}{' ' * (_BAR - full - soft)}"
    return f"{bar}| {used / total:.0%}: {used} of {total} {unit}{kept}"


def _usage(engine: pb.EngineStatistics) -> float:
    """The share of the KV cache held by requests, or of the states if no layer attends."""
    if engine.blocks_total:
        return engine.blocks_used / engine.blocks_total
    return engine.others.get(_STATES + "used", 0) / max(engine.others.get(_STATES + "limit", 0), 1)


def _seconds(duration: Duration) -> float:
    return duration.ToNanoseconds() / 1e9
