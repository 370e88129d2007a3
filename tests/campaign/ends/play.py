"""One cell of the table of ends combined with a fault, and the checks afterwards.

The caller's result must be what the table says of the event or of the fault. In all cases, events
are numbered without gaps and end once, every token is the script's, usage matches what was
delivered, the block counts add up, and nothing is left of any request. The neighbours end normally,
or as the fault says if it affects all requests.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import grpc
from headrace.v1 import generation_service_pb2 as rpc

from service.delivery.states import State
from tests.campaign.ends.faults import ALL, DEATH, Fault
from tests.campaign.ends.stage import OTHERS_TOKENS, Stage, oracle, stage
from tests.engine.fake_runner import expected_tokens
from tests.service.ends import MAX_TOKENS, NAME, TABLE, Cell, Outcome, of_events
from tests.service.helpers import DEADLINE_S, Harness, spec, until

HANG_S = 1.0
"""The time after which a stopped engine counts as hung here."""
FIRST_DEADLINE_S = 0.4
LEFT_S = 10.0
"""The time limit for cleanup; anything still there afterwards counts as left over."""


def allowed(cell: Cell, fault: Fault) -> set[tuple[str, str]]:
    """Return how the request may end, according to the table's entries for the event and the
    fault.
    """
    found = {_documented(cell.kind, cell.event)}
    if fault.row:
        _, comma, more = cell.event.partition(", ")
        row = f"{fault.row}{comma}{more}"
        if TABLE.get((row, cell.kind), "—") == "—":
            row = fault.row
        found.add(_documented(cell.kind, row))
        if cell.event == "server stops":  # the fault's end came first, and then the RPC ended
            status, _ = _documented(cell.kind, cell.event)
            found.add((status, _documented(cell.kind, row)[1]))
    return found


ADDED = {event: cell != "—" for (event, kind), cell in TABLE.items() if kind == "AddRequest"}


def _documented(kind: str, row: str) -> tuple[str, str]:
    status, end = TABLE[row, kind].split(", ")
    return status, end


async def play(cell: Cell, fault: Fault, *, is_first: bool, folder: Path) -> list[str]:
    """Play one cell and return the violations. `is_first`: whether the fault precedes the event."""
    deadline_s = FIRST_DEADLINE_S if cell.event.startswith("RPC deadline") else None
    while True:
        wrong = await _try(cell, fault, is_first, folder, deadline_s)
        if wrong is not None:
            return wrong
        assert deadline_s is not None
        deadline_s *= 2  # a busy machine: the deadline was there before the state
        if deadline_s > DEADLINE_S:
            return ["the target never came into its state"]


async def _try(
    cell: Cell, fault: Fault, is_first: bool, folder: Path, deadline_s: float | None
) -> list[str] | None:
    hang_s = HANG_S if fault.name == "engine stopped" else 60.0
    with fault.around():
        async with stage(cell.kind, folder, process=fault.process, hang_timeout_s=hang_s) as there:
            if not await there.bring(cell.state, deadline_s=deadline_s, event=cell.event):
                return None
            if is_first:
                fault.strike(there, 0)
                await there.happen(cell.event)
            else:
                await there.happen(cell.event)
                fault.strike(there, 1)
            if cell.event != "server stops":  # else it might finish first, which is right as well
                there.gate.open()
            if cell.event == "half-close":
                outcome = await there.tasks.pop()
            else:
                outcome = await there.caller.outcome()
            there.gate.open()
            there.undo.close()
            return [
                *_check(outcome, cell, fault),
                *await _check_going_on(there, cell, fault, outcome),
                *await _check_others(there, cell, fault),
                *await _check_left(there, cell),
                *await _check_service(there, cell, fault),
            ]


def _check(outcome: Outcome, cell: Cell, fault: Fault) -> list[str]:
    wrong = []
    ways = allowed(cell, fault)
    ends = {"ended": "", "goes on": "", "no end": ""}
    if not any(
        outcome.status in status.split(" or ") and outcome.end == ends.get(end, end)
        for status, end in ways
    ):
        wrong.append(f"came as {outcome.status}, {outcome.end or 'no end'}; may be {sorted(ways)}")
    return wrong + _check_tokens(outcome, NAME, MAX_TOKENS)


def _check_tokens(outcome: Outcome, name: str, most: int) -> list[str]:
    right, wrong = oracle(name)[:most], []
    if list(outcome.ids) != right[: len(outcome.ids)]:
        wrong.append(f"{name}: wrong tokens {list(outcome.ids)}, not {right}")
    if outcome.end == "LENGTH" and list(outcome.ids) != right:
        wrong.append(f"{name}: {len(outcome.ids)} of {most} tokens at LENGTH")
    usage = outcome.usage
    if outcome.end and usage is not None and usage.completion_tokens != len(outcome.ids):
        wrong.append(
            f"{name}: usage says {usage.completion_tokens}, {len(outcome.ids)} were delivered"
        )
    return wrong


async def _check_going_on(there: Stage, cell: Cell, fault: Fault, outcome: Outcome) -> list[str]:
    """Check that a request that continues without its caller can be read from its first event."""
    ways = {end for status, end in allowed(cell, fault) if outcome.status in status.split(" or ")}
    if "goes on" not in ways or outcome.end:
        return []
    if cell.event == "server stops":
        return []
    rows = [row for row in (fault.row, cell.event.partition(",")[0]) if row]
    ends = {"LENGTH", *(_documented("AddRequest", row)[1] for row in rows if ADDED.get(row))}
    wrong = []
    if there.caller.other is not None:
        try:
            ids = list((await there.caller.other).choices[0].token_ids)
            if ids != oracle(NAME)[:MAX_TOKENS]:
                wrong.append(f"the other call got {ids}")
        except grpc.aio.AioRpcError as error:
            if fault.row == "" or error.code().name != _documented("Generate", fault.row)[0]:
                wrong.append(f"the other call ended with {error.code().name}: {error.details()}")
        return wrong
    try:
        answer = await there.h.generation.GetResult(
            rpc.GetResultRequest(request_id=NAME, until_done=True, wait={"seconds": 30})
        )
    except grpc.aio.AioRpcError as error:
        return [f"what should go on is not there: {error.code().name}"]
    found = of_events(list(answer.events), "OK")
    if found.end not in ends and not ("ended" in ways and found.end == "CANCELLED"):
        wrong.append(f"what goes on came to {found.end or 'no end'}, not one of {sorted(ends)}")
    return wrong + _check_tokens(found, NAME, MAX_TOKENS)


async def _check_others(there: Stage, cell: Cell, fault: Fault) -> list[str]:
    """Check that the neighbours have the right tokens, and that they end well unless the event or
    the fault may affect all requests.
    """
    wrong = []
    stops = cell.event == "server stops"
    ends = {("OK", "LENGTH")}
    if fault.hits == ALL:
        ends.add(_documented("AddRequest", fault.row))
    if cell.event == "engine dies":
        ends.add(_documented("AddRequest", DEATH))
    for name, ending in there.others.items():
        outcome = await ending
        if not stops and (outcome.status, outcome.end) not in ends:
            wrong.append(f"{name} came as {outcome.status}, {outcome.end or 'no end'}")
        wrong += _check_tokens(outcome, name, OTHERS_TOKENS)
    return wrong


async def _check_left(there: Stage, cell: Cell) -> list[str]:
    """Check that nothing of any request is left in the registry, the ledgers or the engine."""
    for task in there.tasks:
        await task
    registry = there.h.registry
    if cell.event != "server stops":
        # What is kept is had by nobody any more: let go of it, as its time does.
        await until(lambda: not registry.live and not registry.stats().streamed_requests)
        for request in list(registry.requests.values()):
            if request.state is State.KEPT:
                request.keep_no_more()
    return await left_at_last(there.h, there.engine)


async def left_at_last(h: Harness, engine: Any) -> list[str]:
    """Return what is left after the time allowed for cleanup."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LEFT_S):
            await until(lambda: not left_by(h, engine))
    return left_by(h, engine)


def left_by(h: Harness, engine: Any) -> list[str]:
    """Return what is left in a service and its engine although no request needs it any more."""
    registry, server = h.registry, h.server
    admission = server.limits.admission
    counts = {
        "requests": len(registry.requests),
        "live requests": registry.live,
        "requests on streams": registry.stats().streamed_requests,
        "streams": len(registry.streams),
        "calls to the engine": registry.under_way,
        "kept results": registry.kept.count,
        "kept bytes": registry.kept.size,
        "places": admission.open_requests,
        "reserved tokens": admission.reserved_tokens,
        "live bytes": admission.live_bytes,
        "sessions": server.limits.sessions.taken,
        "waiting texts": server.text_pool.waiting,
    }
    wrong = [f"{count} {what} are left" for what, count in counts.items() if count]
    if not admission.is_empty:
        wrong.append("a caller still has something of a limit")
    return wrong + [f"the engine has {what}" for what in engine.left()]


async def _check_service(there: Stage, cell: Cell, fault: Fault) -> list[str]:
    """Check that the service, if it still runs, serves as before."""
    if cell.event in ("server stops", "server drains"):
        return []
    if there.in_process and there.engine.failure is not None:
        return [] if cell.event == "engine dies" else ["the engine is dead"]
    there.gate.break_target(False)
    state = there.h.server.state
    await until(lambda: state.phase.value == "ready")
    text = "what comes after"
    answer = await there.h.generate(spec(text, stop={"max_tokens": 3, "ignore_eos": True}))
    ids = list(answer.choices[0].token_ids)
    right = expected_tokens(list(text.encode()), 3)
    return [] if ids == right else [f"afterwards it says {ids}, not {right}"]
