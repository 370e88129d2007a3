"""Part `door`: attacks on `headrace openai`, beside a witness of the server and an HTTP caller.

part
  ├── server     headrace-server serve, with a file of callers
  ├── door       headrace openai, in front of it
  ├── witness    tests.campaign.witness: a caller of the server itself
  ├── neighbour  a caller of the door, by streams
  └── attacker   one of `attacks`, a process for each
"""

from __future__ import annotations

import contextlib
import http.client
import time
from contextlib import closing

from benchmarks.rig.gateways import stream_chat
from benchmarks.rig.serving import Process
from tests.campaign.calm import Beside, beside
from tests.campaign.door.attacks import ATTACKS, CHAT, Neighbour, attacked, open_door
from tests.campaign.hostile.server import ATTACKER, WITNESS
from tests.campaign.parts import Course, Part, Tried

SECONDS, CUT_SECONDS = 10.0, 2.0
CALM_S = 3.0
STREAM_S = 0.5
"""The longest allowed wait of the neighbour at the door for a stream's next event."""
DOOR_BYTES = 256_000_000
"""Allowed resident memory of the door's process."""
ANSWER_S = 10.0
"""The time within which the door must answer again after an attack."""


def run(course: Course) -> None:
    """Run each attack. Waits are judged only in the full campaign, not in the cut."""
    names = [name for name in ATTACKS if course.is_wanted(name)]
    if not names:
        return
    with (
        beside(course.either(CALM_S, 1.0), tokens=300) as there,
        open_door(there.server.target, course.folder) as door,
        closing(Neighbour(door.port, there.server.token(WITNESS))) as neighbour,
    ):
        neighbour.start()
        for name in names:
            course.add(_try(course, name, there, door, neighbour))


def _try(course: Course, name: str, there: Beside, door: Process, neighbour: Neighbour) -> Tried:
    server = there.server
    seconds = course.seconds or course.either(SECONDS, CUT_SECONDS)
    neighbour.begin()
    answers = there.during(lambda: attacked(name, door.port, seconds, server.token(ATTACKER)))
    waited, peak = neighbour.worst_s, door.peak_bytes()
    wrong = [f"the door was {peak / 1e6:.0f} MB"] if peak > DOOR_BYTES else []
    if not course.is_cut:
        wrong += there.slow()
        if waited > STREAM_S:
            wrong.append(f"a stream waited {waited:.3f} s, above {STREAM_S}")
    wrong += [f"a neighbour got {one}" for one in neighbour.wrong]
    wrong += [f"{count} × {answer}" for answer, count in answers.items() if answer == "500"]
    wrong += there.faults()
    wrong += [f"the door said: {line}" for line in door.said().splitlines()[1:]]
    if any(server.token(one) in door.said() for one in (WITNESS, ATTACKER)):
        wrong.append("the door's log has a token")
    if not door.is_alive or not _answers(door, server.token(ATTACKER)):
        wrong.append(f"it did not answer within {ANSWER_S:g} s afterwards")
    told = ", ".join(f"{count:,} {answer}" for answer, count in sorted(answers.items()))
    return Tried(
        name=name,
        what=(ATTACKS[name].__doc__ or "").strip(),
        promises=(3, 7),
        count=sum(answers.values()),
        worst=f"{there.gap}, stream {waited * 1e3:.0f} ms; "
        f"door {peak / 1e6:.0f} MB at most so far; {told}",
        wrong=wrong,
    )


def _answers(door: Process, token: str) -> bool:
    ends = time.monotonic() + ANSWER_S
    while time.monotonic() < ends:
        with contextlib.suppress(OSError, http.client.HTTPException, RuntimeError):
            return bool(list(stream_chat(door.port, CHAT | {"max_tokens": 1}, token)))
        time.sleep(0.1)
    return False


DOOR = Part(
    name="door",
    meaning="attacks on the HTTP door, beside a witness and a neighbour's stream",
    run=run,
    has_calm=False,
)
