"""`scripts/walk.py`: how often a reader who follows a request to the engine changes rooms."""

from __future__ import annotations

from collections import Counter

from scripts.walk import Call, sizes, visits, walk

MOST_CHANGES = 21
"""Lower it when the walk becomes shorter; where it becomes longer, hand over instead of asking."""
MOST_LINES = 3100
"""Of a room that the request walks through. The door and conversion have the most; each is to be
divided before it grows further, as delivery was, whose plain data are a room of their own.
"""


def test_a_room_is_a_folder_or_a_module_beside_folders() -> None:
    calls = [
        Call("service/delivery/registry.py", "a"),
        Call("service/delivery/log.py", "b"),
        Call("service/state.py", "c"),
        Call("engine/core/inbox.py", "d"),
    ]
    assert visits(calls) == [
        ("service/delivery", ["a", "b"]),
        ("service/state.py", ["c"]),
        ("engine/core", ["d"]),
    ]


async def test_the_walk_of_an_add_is_short() -> None:
    calls = await walk()
    entered = visits(calls)
    assert entered[0][0] == "service/door"
    assert entered[-1][1][-1] == "Inbox.put"
    told = "\n".join(f"{room}: {', '.join(functions)}" for room, functions in entered)
    assert len(entered) - 1 <= MOST_CHANGES, told
    lines = sizes()
    large = {room: lines[room] for room in Counter(room for room, _ in entered)}
    assert max(large.values()) <= MOST_LINES, large
