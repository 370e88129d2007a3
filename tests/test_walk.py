"""`scripts/walk.py`: how often a reader who follows a request to the engine changes rooms."""

from __future__ import annotations

from collections import Counter

from scripts.walk import Call, sizes, visits, walk

MOST_CHANGES = 25
"""Lower it when the walk becomes shorter; where it becomes longer, hand over instead of asking."""
MOST_LINES = 2800
"""Of a room that the request walks through. Conversion and delivery have the most; each is to be
divided before it grows further, as delivery was, whose plain data are a room of their own.
"""


def test_modules_that_do_one_thing_together_are_one_room() -> None:
    calls = [
        Call("service/delivery/registry.py", "a"),
        Call("service/delivery/log.py", "b"),
        Call("engine/local_client.py", "c"),
        Call("engine/inbox.py", "d"),
        Call("service/admission.py", "e"),
    ]
    assert visits(calls) == [
        ("service/delivery", ["a", "b"]),
        ("engine/loop.py", ["c", "d"]),
        ("service/admission.py", ["e"]),
    ]


async def test_the_walk_of_an_add_is_short() -> None:
    calls = await walk()
    entered = visits(calls)
    assert entered[0][0] == "service/interceptors.py"
    assert entered[-1][1][-1] == "Inbox.put"
    told = "\n".join(f"{room}: {', '.join(functions)}" for room, functions in entered)
    assert len(entered) - 1 <= MOST_CHANGES, told
    lines = sizes()
    large = {room: lines[room] for room in Counter(room for room, _ in entered)}
    assert max(large.values()) <= MOST_LINES, large
