"""The states of a request: the table in docs/sessions.md is the code's, and there is no other way.

What each transition does is tried by the tests of ends, sessions, results and flow.
"""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Any

import pytest
from headrace.v1 import generation_service_pb2 as rpc
from headrace.v1.generation_pb2 import FINISH_REASON_CANCELLED

from engine.contract.engine_client import Admission
from engine.contract.request import GenerationRequest
from service.delivery import served_request as request
from service.delivery.states import TRANSITIONS, State
from tests.service.fake_engine import FakeEngine
from tests.service.helpers import check_course, finished_of, serving, spec, until

LEASE: Any = {"seconds": 60}
DOCS = Path(__file__).resolve().parents[3] / "docs" / "sessions.md"


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
        ("served_request.py", "self.state = State.ADMITTING"),
        ("served_request.py", "self.state = state"),
    ]


async def test_a_course_with_a_lease() -> None:
    """A lost stream, another one that attaches, the end, and the retention's end."""
    engine = FakeEngine(auto=False)
    async with serving(engine, result_retention_s=0.2) as h:
        first = h.session()
        await first.send(open=rpc.OpenCommand(lease=LEASE))
        await first.add(spec(request_id="a", stop={"max_tokens": 2}))
        await first.read_until(lambda m: m.events)
        one = h.registry.find("anonymous", "a")
        assert one.state is State.LIVE
        first.call.cancel()
        await until(lambda: one.state is State.LEASED)
        second = h.session()
        await second.send(open=rpc.OpenCommand(lease=LEASE))
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


async def test_who_comes_before_the_end_of_what_nobody_wants_gets_it() -> None:
    engine = FakeEngine(auto=False)
    async with serving(engine) as h:
        first, second = h.session(), h.session()
        await first.add(spec(request_id="a"))
        await first.read_until(lambda m: m.events)
        one = h.registry.find("anonymous", "a")
        first.call.cancel()
        await until(lambda: one.state is State.ABANDONED)
        await second.send(attach=rpc.AttachCommand(request_id="a", from_seq=2))
        await second.read_until(lambda m: m.attached)
        assert one.state is State.LIVE
        await until(lambda: engine.cancelled)
        engine.step()
        await second.end()
        [end] = second.events()["a"]
        assert (end.seq, finished_of([end]).reason) == (2, FINISH_REASON_CANCELLED)
        assert one.state is State.GONE


async def test_what_runs_when_the_server_stops_is_gone() -> None:
    async with serving(FakeEngine(auto=False)) as h:
        session = h.session()
        await session.send(open=rpc.OpenCommand(lease=LEASE))
        await session.add(spec(request_id="a"))
        await h.generation.AddRequest(rpc.AddRequestRequest(spec=spec(request_id="b")))
        await session.read_until(lambda m: m.events)
        leased, durable = (h.registry.find("anonymous", name) for name in "ab")
        session.call.cancel()
        await until(lambda: leased.state is State.LEASED)
        assert durable.state is State.LIVE
        await h.server.stop()
        assert leased.state is durable.state is State.GONE


@pytest.mark.parametrize("lease", [False, True])
@pytest.mark.parametrize("max_kept", [0, 10])
@pytest.mark.parametrize("is_lost", [False, True])
async def test_an_end_before_the_engine_s_answer(lease: bool, max_kept: int, is_lost: bool) -> None:
    """The request's whole output comes before it is known to be taken in: none of it is lost."""
    engine, answered = FakeEngine(auto=False), asyncio.Event()
    submit = engine.submit

    async def late(request: GenerationRequest) -> Admission:
        admission = await submit(request)
        while engine.num_live:
            engine.step()
        await answered.wait()
        return admission

    engine.submit = late  # type: ignore[method-assign]
    async with serving(engine, max_kept_results=max_kept, result_retention_s=0.1) as h:
        session = h.session()
        if lease:
            await session.send(open=rpc.OpenCommand(lease=LEASE))
        await session.add(spec(request_id="a", stop={"max_tokens": 3}))
        await until(lambda: engine.submitted and not engine.num_live)
        if is_lost:
            session.call.cancel()
            await until(lambda: not h.registry.streams)
            answered.set()
        else:
            answered.set()
            await session.end()
            check_course(session.events()["a"])
        await until(lambda: not h.registry.requests)
        assert h.registry.live == h.registry.stats().streamed_requests == 0
        assert h.registry.admission.is_empty
