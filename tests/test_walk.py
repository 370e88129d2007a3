"""`scripts/walk.py`: how often a reader who follows a request changes rooms."""

from __future__ import annotations

from scripts.walk import ROOT, VALUES, Call, cut, sizes, visits, walks

MOST_CHANGES = {
    "wire → inbox": 24,
    "inbox → sampler": 26,
    "decode step": 46,
    "token → wire": 13,
}
"""Lower these when a walk becomes shorter; where one becomes longer, hand over, do not ask."""
MOST_LINES = 3400
"""Of a room that a request walks through. Delivery and the door have the most; each is to be
divided before it grows further.
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


async def test_the_walks_of_a_request_are_short() -> None:
    found = await walks()
    assert found.keys() == MOST_CHANGES.keys()
    first, *_, last = visits(found["wire → inbox"])
    assert (first[0], last[1][-1]) == ("service/door", "Inbox.put")
    for name, calls in found.items():
        entered = visits(calls)
        told = "\n".join(f"{room}: {', '.join(functions)}" for room, functions in entered)
        assert len(entered) - 1 <= MOST_CHANGES[name], f"{name}\n{told}"
    lines = sizes()
    large = {call.room: lines[call.room] for call in found["wire → inbox"]}
    assert max(large.values()) <= MOST_LINES, large


def test_values_are_in_no_room() -> None:
    assert all((ROOT / file).is_file() for file in VALUES)


def test_a_walk_is_cut_at_its_marks() -> None:
    calls = [
        Call(f"engine/{file}.py", name)
        for file, name in (("a", "x"), ("b", "A.y"), ("c", "z"), ("b", "A.y"), ("a", "z"))
    ]
    assert cut(calls, "y", "z") == calls[1:3]
    assert (
        cut(
            calls,
            "engine/b.py",
            "engine/a.py",
        )
        == calls[1:]
    )
    assert cut(calls, "x", "y", "y") == calls[:4]
