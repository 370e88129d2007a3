"""The states of a request: the table in docs/sessions.md is the code's, and there is no other way.

What each transition does is tried by the tests of ends, sessions, results and flow.
"""

from __future__ import annotations

import inspect
from pathlib import Path

from headrace.v1 import generation_service_pb2 as rpc

from service.delivery import request
from service.delivery.states import TRANSITIONS, State
from tests.service.fake_engine import FakeEngine
from tests.service.helpers import serving, spec, until

DOCS = Path(__file__).resolve().parents[2] / "docs" / "sessions.md"


def rows() -> list[list[str]]:
    """The table's cells, as the docs show them."""
    text = DOCS.read_text()
    text = text[text.index("<!-- states -->") : text.index("<!-- /states -->")]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_docs_show_the_states_and_transitions() -> None:
    expected = [
        [state.name, state.value, "<br>".join(f"{to.name}: {when}" for to, when in ways.items())]
        for state, ways in TRANSITIONS.items()
    ]
    assert rows() == [[name, what, ways or "—"] for name, what, ways in expected]


def test_every_state_can_be_come_to_and_left() -> None:
    assert list(TRANSITIONS) == list(State)
    reached = {to for ways in TRANSITIONS.values() for to in ways}
    assert reached == set(State) - {State.ADMITTING}
    assert [state for state, ways in TRANSITIONS.items() if not ways] == [State.GONE]
    # What has ended lives no more.
    for state, ways in TRANSITIONS.items():
        assert state.is_live or not any(to.is_live for to in ways)


def test_one_method_alone_sets_the_state() -> None:
    root = Path(inspect.getfile(request)).parents[1]
    set_in = [
        (path.name, line.strip())
        for path in sorted(root.rglob("*.py"))
        for line in path.read_text().splitlines()
        if "request.state =" in line or (path.parent.name == "delivery" and "self.state =" in line)
    ]
    assert set_in == [
        ("request.py", "self.state = State.ADMITTING"),
        ("request.py", "self.state = state"),
    ]


async def test_a_course_with_a_lease() -> None:
    """A lost stream, another one that attaches, the end, and the retention's end."""
    engine = FakeEngine(auto=False)
    async with serving(engine, result_retention_s=0.2) as h:
        first = h.session()
        await first.send(open=rpc.OpenCommand(lease={"seconds": 60}))
        await first.add(spec(request_id="a", stop={"max_tokens": 2}))
        await first.read_until(lambda m: m.events)
        one = h.registry.find("anonymous", "a")
        assert one.state is State.LIVE
        first.call.cancel()
        await until(lambda: one.state is State.LEASED)
        second = h.session()
        await second.send(open=rpc.OpenCommand(lease={"seconds": 60}))
        await second.send(attach=rpc.AttachCommand(request_id="a"))
        await until(lambda: one.state is State.LIVE)
        while engine.num_live:
            engine.step()
        assert one.state is State.KEPT
        await second.end()
        await until(lambda: one.state is State.GONE)


async def test_a_course_without_a_lease() -> None:
    engine = FakeEngine(auto=False)
    async with serving(engine) as h:
        session = h.session()
        for name, tokens in (("read", 2), ("lost", 9)):
            await session.add(spec(request_id=name, stop={"max_tokens": tokens}))
        await session.read_until(lambda _: len(session.events()) == 2)
        read, lost = (h.registry.find("anonymous", name) for name in ("read", "lost"))
        engine.step()
        engine.step()
        assert (read.state, lost.state) == (State.ENDED, State.LIVE)
        await until(lambda: read.state is State.GONE)  # the stream took its end
        session.call.cancel()
        await until(lambda: lost.state is State.ABANDONED)
        engine.step()
        await until(lambda: lost.state is State.GONE)
        assert not h.registry.requests
