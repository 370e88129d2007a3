from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import headrace
import pytest
from headrace import Client, FinishReason, Request, Result

from tests.clients.python.scripted import WAIT, ScriptedServer


def test_64_requests(client: Client) -> None:
    with client.session() as session:
        handles = [session.submit(f"number {i}") for i in range(64)]
        assert [handle.result(WAIT).text for handle in handles] == [
            f"number {i}" for i in range(64)
        ]
        assert session.live == 0


def test_submitting_from_threads(client: Client) -> None:
    with client.session() as session, ThreadPoolExecutor(8) as pool:
        prompts = [f"thread {i} speaks" for i in range(80)]
        results = list(pool.map(lambda p: session.submit(p).result(WAIT), prompts))
    assert [result.text for result in results] == prompts
    assert len({result.request_id for result in results}) == 80


def test_chunks_come_as_they_are_and_may_be_read_again(
    client: Client, server: ScriptedServer
) -> None:
    with client.session() as session:
        handle = session.submit("hold on")
        chunks = iter(handle)
        assert next(chunks).text == "hold"
        assert not handle.done
        server.release(handle.request_id)
        assert list(chunks) == []
        assert [chunk.text for chunk in handle] == ["hold"]
        assert handle.accepted().prompt_tokens == 2


def test_an_error_is_its_requests_own(client: Client) -> None:
    with client.session() as session:
        good, refused, failed, gap, other = [
            session.submit(prompt) for prompt in ("a b", "refuse", "fail", "gap b c", "c d")
        ]
        assert good.result(WAIT).text == "a b"
        with pytest.raises(headrace.InvalidArgumentError) as caught:
            refused.result(WAIT)
        assert caught.value.request_id == refused.request_id
        with pytest.raises(headrace.InternalError):
            list(failed)
        with pytest.raises(headrace.ProtocolError):
            gap.result(WAIT)
        assert other.result(WAIT).text == "c d"
        assert session.submit("still here").result(WAIT).text == "still here"


def test_cancel(client: Client, server: ScriptedServer) -> None:
    with client.session() as session:
        handle = session.submit("hold on")
        with pytest.raises(headrace.DeadlineExceededError):
            handle.result(timeout=0.0)
        with pytest.raises(headrace.AlreadyExistsError):
            session.submit("x", request_id=handle.request_id)
        handle.cancel()
        result = handle.result(WAIT)
    assert (result.text, result.finish_reason) == ("hold", FinishReason.CANCELLED)
    assert server.cancelled == [handle.request_id]


def test_leaving_waits_and_leaving_by_an_exception_cancels(
    client: Client, server: ScriptedServer
) -> None:
    with client.session() as session:
        handle = session.submit("hold on")
        server.wait_for(lambda: bool(server.live))
        threading.Timer(0.05, server.release, [handle.request_id]).start()
    assert handle.result().finish_reason is FinishReason.STOP
    session = client.session()

    def leave() -> None:
        with session:
            handles.append(session.submit("hold on"))
            raise KeyboardInterrupt

    handles: list[headrace.RequestHandle] = []
    with pytest.raises(KeyboardInterrupt):
        leave()
    assert handles[0].result().finish_reason is FinishReason.CANCELLED
    with pytest.raises(headrace.UnavailableError):
        session.submit("late")
    session.close()


def test_a_lost_connection_ends_all(client: Client, server: ScriptedServer) -> None:
    with client.session() as session:
        handles = [session.submit("hold on") for _ in range(5)]
        server.wait_for(lambda: len(server.live) == 5)
        server.stop()
        for handle in handles:
            with pytest.raises(headrace.UnavailableError) as caught:
                handle.result(WAIT)
            assert caught.value.request_id == handle.request_id
        with pytest.raises(headrace.UnavailableError):
            session.submit("more")


def test_a_session_that_the_server_ends(client: Client) -> None:
    with client.session() as session:
        held = session.submit("hold on")
        session.submit("drop")
        with pytest.raises(headrace.UnavailableError) as caught:
            held.result(WAIT)
        assert caught.value.reason == "DRAINING"


def test_a_session_has_the_load_that_the_server_told(
    client: Client, server: ScriptedServer
) -> None:
    with client.session(load_interval=0.5) as session:
        session.submit("one").result(WAIT)
        assert session.load == headrace.ServerLoad(running=3, waiting=2, kv_cache_usage=0.5)
        [command] = [one for one in server.commands if one.HasField("open")]
        assert command.open.load_interval.nanos == 500_000_000
    with client.session() as session:
        session.submit("two").result(WAIT)
        assert session.load is None


def test_lease_attach_and_resume(client: Client, server: ScriptedServer) -> None:
    accepted = client.add_request("one two")
    with client.session(lease=5) as session:
        handle = session.attach(accepted.request_id)
        assert handle.result(WAIT).text == "one two"
        assert session.lease == 5.0
        broken = client.stream("gap b c")
        with pytest.raises(headrace.ProtocolError):
            broken.result()
    with client.session() as session:
        part = session.attach(accepted.request_id, from_seq=4, n=1)
        assert part.result(WAIT).text == " two"


def test_attaching_learns_how_many_choices_there_are(
    client: Client, server: ScriptedServer
) -> None:
    client.add_request("hold on", request_id="a", n=2)
    with client.session() as session:
        handle = session.attach("a")
        assert handle.accepted(WAIT).prompt_tokens == 2
        server.release("a")
        result = handle.result(WAIT)
        assert [choice.text for choice in result.choices] == ["hold", ""]
        assert {choice.finish_reason for choice in result.choices} == {FinishReason.STOP}
        assert session.attach("a", n=1).result(WAIT) == result  # the server knows better
        rest = session.attach("a", from_seq=4, n=2).result(WAIT)
        assert [choice.finish_reason for choice in rest.choices] == [FinishReason.STOP] * 2
        for wrong in ({"from_seq": 4}, {"n": 0}):
            with pytest.raises(headrace.InvalidArgumentError) as caught:
                session.attach("a", **wrong)
            assert [violation.field for violation in caught.value.fields] == ["n"]
    assert client.get_result("a").choices == result.choices


def test_what_was_only_attached_is_not_cancelled(client: Client, server: ScriptedServer) -> None:
    client.add_request("hold on", request_id="a")
    with client.session() as session:
        handle = session.attach("a")
        assert next(iter(handle)).text == "hold"
        with server.changed:
            server.live["a"].seq += 1
            server.live["a"].send(prompt={})
        with pytest.raises(headrace.ProtocolError):
            handle.result(WAIT)
        assert session.submit("still here").result(WAIT).text == "still here"
        server.release("a")
    assert not [command for command in server.commands if command.HasField("cancel")]
    assert server.cancelled == []


def test_what_had_ended_is_resumed_without_the_server(
    client: Client, server: ScriptedServer
) -> None:
    with client.session(lease=5) as session:
        good, failed, several = [
            session.submit(prompt, n=n) for prompt, n in (("one two", 1), ("fail", 1), ("a b", 2))
        ]
        whole = [good.result(WAIT), several.result(WAIT)]
        with pytest.raises(headrace.InternalError):
            failed.result(WAIT)
    commands = len(server.commands)
    with client.session() as session:
        resumed = session.resume(good)
        assert resumed.done
        assert (resumed.result(WAIT), session.resume(several).result(WAIT)) == tuple(whole)
        assert [chunk.text for chunk in session.resume(resumed)] == ["one", " two"]
        assert resumed.accepted(WAIT) == good.accepted(WAIT)
        with pytest.raises(headrace.InternalError) as caught:
            session.resume(failed).result(WAIT)
        assert caught.value.error_id == "e-1"
        resumed.cancel()
        assert session.live == 0
    assert len(server.commands) == commands
    with pytest.raises(headrace.UnavailableError):
        session.resume(good)


def test_credits_are_paid_as_chunks_are_read(client: Client, server: ScriptedServer) -> None:
    with client.session(initial_credit=8) as session:
        handle = session.submit("hold on")
        server.wait_for(lambda: bool(server.live))
        assert server.credits == []
        assert next(iter(handle)).token_ids == (4,)
        server.wait_for(lambda: server.credits == [1])
        handle.cancel()


def test_many_credits_are_paid_in_parts(client: Client, server: ScriptedServer) -> None:
    with client.session(initial_credit=160) as session:
        assert len(session.submit("on " * 64).result(WAIT).token_ids) == 64
        assert all(paid >= 10 for paid in server.credits)
        handle = session.submit("hold on")
        server.wait_for(lambda: bool(server.live))
        handle.cancel()


def test_closing_pays_takes_nothing_more_and_still_cancels(
    client: Client, server: ScriptedServer
) -> None:
    session = client.session(initial_credit=8)
    held, unwanted = session.submit("hold on"), session.submit("hold up")
    server.wait_for(lambda: len(server.live) == 2)
    with ThreadPoolExecutor(2) as pool:
        closing = pool.submit(session.close)
        server.wait_for(lambda: server.credits == [1, 1])
        again = pool.submit(session.close)
        refused: list[Callable[[], object]] = [
            lambda: session.submit("late"),
            lambda: session.attach("any"),
            lambda: session.resume(held),
        ]
        for call in refused:
            with pytest.raises(headrace.UnavailableError, match="being closed"):
                call()
        unwanted.cancel()
        assert unwanted.result(WAIT).finish_reason is FinishReason.CANCELLED
        assert not closing.done()
        server.release(held.request_id)
        closing.result(WAIT)
        again.result(WAIT)
    assert held.result().finish_reason is FinishReason.STOP
    assert server.cancelled == [unwanted.request_id]
    session.close()
    with pytest.raises(headrace.UnavailableError, match="has ended"):
        session.submit("late")


def test_a_close_that_waits_is_cut_short(client: Client, server: ScriptedServer) -> None:
    with ThreadPoolExecutor(2) as pool:
        session = client.session(initial_credit=8)
        cancelled = session.submit("hold on")
        closing = pool.submit(session.close)
        server.wait_for(lambda: server.credits == [1])
        session.close(cancel=True)
        closing.result(WAIT)
        assert cancelled.result().finish_reason is FinishReason.CANCELLED
        session = client.session(initial_credit=8)
        lost = session.submit("hold on")
        closing = pool.submit(session.close)
        server.wait_for(lambda: server.credits == [1, 1])
        server.stop()
        closing.result(WAIT)
        with pytest.raises(headrace.UnavailableError):
            lost.result()


def test_batch_keeps_to_its_window(client: Client, server: ScriptedServer) -> None:
    server.finish_at, server.total = 8, 100
    read = 0

    def prompts() -> object:
        nonlocal read
        for index in range(100):
            read += 1
            assert read - finished <= 8 + 1
            yield f"number {index}"

    finished = 0
    outcomes: dict[int, str] = {}
    for index, outcome in client.batch(prompts(), max_in_flight=8):  # type: ignore[arg-type]
        finished = len(outcomes) + 1
        assert isinstance(outcome, Result)
        outcomes[index] = outcome.text
    assert outcomes == {index: f"number {index}" for index in range(100)}
    assert server.peak == 8


def test_batch_orders_retries_and_hands_back_errors(client: Client, server: ScriptedServer) -> None:
    items: list[Any] = ["a", "busy b", "refuse", Request("c d e", max_tokens=2), "busy d", [-1]]
    outcomes = list(client.batch(items, ordered=True, max_tokens=5, progress=True))
    assert [index for index, _ in outcomes] == list(range(6))
    texts = [o.text if isinstance(o, Result) else o.code.name for _, o in outcomes]
    assert texts == ["a", "busy b", "INVALID_ARGUMENT", "c d", "busy d", "INVALID_ARGUMENT"]
    assert server.busy_left == 0
    with pytest.raises(ValueError, match="max_in_flight"):
        client.batch(["a"], max_in_flight=0)
    with pytest.raises(TypeError):
        client.batch(["a"], temprature=1)  # type: ignore[call-arg]


def test_leaving_a_batch_cancels(client: Client, server: ScriptedServer) -> None:
    outcomes = client.batch(["hold a", "b", "hold c"])
    assert next(outcomes)[0] == 1
    outcomes.close()  # type: ignore[attr-defined]
    assert len(server.cancelled) == 2
    assert not server.live


def test_a_batch_whose_connection_is_lost(client: Client, server: ScriptedServer) -> None:
    seen = []

    def run() -> None:
        for index, outcome in client.batch(["drop", "b", *["hold"] * 500], max_in_flight=2):
            seen.append(index)
            assert index == 1 or isinstance(outcome, headrace.UnavailableError)

    with pytest.raises(headrace.UnavailableError):
        run()
    assert len(seen) < 10


def test_closing_the_client_ends_its_sessions(server: ScriptedServer) -> None:
    client = Client(server.target)
    session = client.session()
    handle = session.submit("hold on")
    next(iter(handle))
    client.close()
    with pytest.raises(headrace.UnavailableError) as caught:
        handle.result(WAIT)
    assert caught.value.partial
    assert caught.value.partial.text == "hold"
