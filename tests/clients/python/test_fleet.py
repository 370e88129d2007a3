"""One client with several servers: where requests go, and what happens when servers drain, die,
come and go.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import headrace
import pytest
from headrace import CancelStatus, FinishReason
from headrace.cli.app import app
from typer.testing import CliRunner

from tests.clients.python.farm import WAIT_S, Farm, Member, silent_server
from tests.service.fake_engine import FakeEngine


@pytest.fixture
def farm() -> Iterator[Farm]:
    opened = Farm()
    yield opened
    opened.close()


def client_of(*members: Member) -> headrace.Client:
    """A client that knows all of these servers to be ready."""
    client = headrace.Client([member.target for member in members])
    wait_for(client, len(members))
    return client


def wait_for(client: headrace.Client, ready: int) -> None:
    """Waits until so many servers are ready for the client."""
    fleet = client._servers
    assert hasattr(fleet, "state")
    fleet.begin()
    with fleet.changed:
        assert fleet.changed.wait_for(
            lambda: (
                sum(one.state.value == "ready" for one in fleet.state.servers.values()) == ready
            ),
            WAIT_S,
        )


def test_unary_calls_go_to_the_least_loaded(farm: Farm) -> None:
    members = [farm.start(auto=False) for _ in range(3)]
    with client_of(*members) as client:
        threads = [
            threading.Thread(target=client.generate, args=["hi"], kwargs={"max_tokens": 3})
            for _ in range(9)
        ]
        for thread in threads:
            thread.start()
        farm.until(lambda: sum(member.count for member in members) == 9)
        assert [member.count for member in members] == [3, 3, 3]
        for member in members:
            member.go_on()
        for thread in threads:
            thread.join(WAIT_S)


def test_a_session_spreads_over_all_servers(farm: Farm) -> None:
    members = [farm.start(auto=False) for _ in range(3)]
    with client_of(*members) as client, client.session() as session:
        handles = [session.submit(f"{i}", max_tokens=5) for i in range(30)]
        farm.until(lambda: sum(member.count for member in members) == 30)
        for member in members:
            member.go_on()
        results = [handle.result(WAIT_S) for handle in handles]
    assert all(len(one.token_ids) == 5 for one in results)
    assert [member.count for member in members] == [10, 10, 10]


def test_a_batch_spreads_over_all_servers(farm: Farm) -> None:
    members = [farm.start() for _ in range(3)]
    with client_of(*members) as client:
        outcomes = dict(client.batch([f"{i}" for i in range(60)], max_tokens=4, max_in_flight=12))
    assert sorted(outcomes) == list(range(60))
    assert all(isinstance(one, headrace.Result) for one in outcomes.values())
    assert all(member.count >= 10 for member in members)


def test_ids_are_found_where_they_are(farm: Farm) -> None:
    members = [farm.start() for _ in range(3)]
    with client_of(*members) as client, client_of(*members) as stranger:
        ids = [client.add_request("hi", max_tokens=4).request_id for _ in range(20)]
        assert sum(member.count > 0 for member in members) == 3
        for other in (client, stranger):
            assert all(len(other.get_result(one).token_ids) == 4 for one in ids)
            with other.attach(ids[0]) as stream:
                assert len([token for chunk in stream for token in chunk.token_ids]) == 4
        assert set(stranger.cancel([*ids, "nobody"]).values()) == {
            CancelStatus.ALREADY_FINISHED,
            CancelStatus.NOT_FOUND,
        }
        with pytest.raises(headrace.NotFoundError):
            stranger.get_result("nobody")
        with stranger.session() as session:
            handles = [session.attach(one) for one in ids]
            assert all(len(one.result(WAIT_S).token_ids) == 4 for one in handles)
            with pytest.raises(headrace.NotFoundError):
                session.attach("nobody").result(WAIT_S)


def test_a_drained_server_gets_nothing_new(farm: Farm) -> None:
    one, other = farm.start(auto=False), farm.start()
    with client_of(one, other) as client, client.session() as session:
        handles = [session.submit(f"{i}", max_tokens=3) for i in range(4)]
        farm.until(lambda: one.count == 2)
        one.drain()
        for i in range(10):
            assert len(session.submit(f"new {i}", max_tokens=2).result(WAIT_S).token_ids) == 2
        assert len(client.generate("unary", max_tokens=2).token_ids) == 2
        assert one.count == 2
        one.go_on()  # what it has is finished there
        assert all(len(handle.result(WAIT_S).token_ids) == 3 for handle in handles)
    assert other.count == 13


@pytest.mark.parametrize("moment", ["before it was accepted", "accepted"])
def test_what_a_dead_server_had_not_delivered_is_sent_elsewhere(farm: Farm, moment: str) -> None:
    doomed, other = farm.start(auto=False), farm.start()
    if moment == "before it was accepted":
        farm.call(lambda: _close_gate(doomed))
    with client_of(doomed, other) as client, client.session() as session:
        handles = [session.submit(f"{i}", max_tokens=3) for i in range(6)]
        if moment == "accepted":
            farm.until(lambda: doomed.count == 3)
            taken = [handle for handle in handles if handle.request_id in _ids(doomed)]
            assert len(taken) == 3
            for handle in taken:
                handle.accepted(WAIT_S)
        farm.until(lambda: other.count == 3)
        doomed.kill()
        assert [len(handle.result(WAIT_S).token_ids) for handle in handles] == [3] * 6
    assert other.count == 6


def test_what_had_begun_fails_with_what_was_delivered(farm: Farm) -> None:
    doomed, other = farm.start(auto=False), farm.start(auto=False)
    with client_of(doomed, other) as client, client.session() as session:
        handles = [session.submit(f"{i}", max_tokens=5) for i in range(2)]
        farm.until(lambda: doomed.count == other.count == 1)
        doomed.step(2)
        [begun] = [one for one in handles if one.request_id in _ids(doomed)]
        [waiting] = [one for one in handles if one is not begun]
        chunks = iter(begun)
        received = len(next(chunks).token_ids)
        while received < 2:
            received += len(next(chunks).token_ids)
        doomed.kill()
        with pytest.raises(headrace.UnavailableError) as caught:
            begun.result(WAIT_S)
        assert caught.value.partial is not None
        assert len(caught.value.partial.token_ids) == 2
        other.go_on()
        assert len(waiting.result(WAIT_S).token_ids) == 5
    assert other.count == 1


def test_a_batch_begins_again_elsewhere(farm: Farm) -> None:
    doomed, other = farm.start(auto=False), farm.start()
    with client_of(doomed, other) as client:
        batch = client.batch([f"{i}" for i in range(12)], max_tokens=5, max_in_flight=6)
        first = next(batch)
        farm.until(lambda: doomed.count >= 3)
        doomed.step(2)  # tokens that its caller never saw
        doomed.kill()
        outcomes = dict([first, *batch])
    assert sorted(outcomes) == list(range(12))
    assert all(
        isinstance(one, headrace.Result) and len(one.token_ids) == 5 for one in outcomes.values()
    )


def test_begun_requests_are_attached_again_where_they_live(farm: Farm) -> None:
    one, other = farm.start(auto=False), farm.start(auto=False)
    with client_of(one, other) as client, client.session(lease=60) as session:
        handles = [session.submit(f"{i}", max_tokens=6) for i in range(2)]
        farm.until(lambda: one.count == other.count == 1)
        one.step(2)
        [begun] = [h for h in handles if h.request_id in _ids(one)]
        next(iter(begun))
        one.cut()
        one.go_on()
        other.go_on()
        assert [len(handle.result(WAIT_S).token_ids) for handle in handles] == [6, 6]
        ids = [token for chunk in begun for token in chunk.token_ids]
        assert tuple(ids) == begun.result().token_ids
    assert one.count == other.count == 1


def test_what_was_sent_elsewhere_and_comes_back_finds_its_work(farm: Farm) -> None:
    one, other = farm.start(auto=False), farm.start(auto=False)
    with client_of(one, other) as client, client.session(lease=60) as session:
        handles = [session.submit(f"{i}", max_tokens=6) for i in range(4)]
        farm.until(lambda: one.count == other.count == 2)
        for handle in handles:
            handle.accepted(WAIT_S)
        one.cut()  # nothing was delivered: its requests go to the other
        farm.until(lambda: other.count == 4)
        wait_for(client, 2)
        session.submit("opens a stream there again", max_tokens=1)
        farm.until(lambda: one.count == 3)
        other.kill()  # and come back
        one.go_on()
        results = [handle.result(WAIT_S) for handle in handles]
        assert {result.finish_reason for result in results} == {FinishReason.LENGTH}
    assert one.count == 5  # two of them were still there


def test_what_was_sent_elsewhere_does_not_run_on_for_nobody(farm: Farm) -> None:
    one, other = farm.start(auto=False), farm.start()
    with client_of(one, other) as client, client.session(lease=60) as session:
        handles = [session.submit(f"{i}", max_tokens=6) for i in range(4)]
        farm.until(lambda: one.count == 2)
        one.cut()
        for handle in handles:
            handle.result(WAIT_S)
        wait_for(client, 2)
        again = session.submit("opens a stream there again", max_tokens=1)
        farm.until(lambda: len(one.engine.cancelled) == 2)
        one.go_on()
        again.result(WAIT_S)


def test_a_replaced_server_does_not_have_what_was_begun(farm: Farm) -> None:
    one, other = farm.start(auto=False), farm.start()
    with client_of(one, other) as client, client.session(lease=2) as session:
        handles = [session.submit(f"{i}", max_tokens=6) for i in range(2)]
        farm.until(lambda: one.count == 1)
        [handle] = [h for h in handles if h.request_id in _ids(one)]
        one.step(1)
        next(iter(handle))
        one.kill()
        with pytest.raises(headrace.UnavailableError) as caught:
            handle.result(WAIT_S)
        assert caught.value.partial is not None
        assert len(caught.value.partial.token_ids) == 1


def test_unary_calls_survive_a_death(farm: Farm) -> None:
    doomed, other = farm.start(auto=False), farm.start()
    found: list[headrace.Result] = []
    with client_of(doomed, other) as client:

        def generate() -> None:
            found.append(client.generate("hi", max_tokens=4))

        threads = [threading.Thread(target=generate) for _ in range(6)]
        for thread in threads:
            thread.start()
        farm.until(lambda: doomed.count >= 1)
        doomed.step(2)
        doomed.kill()
        for thread in threads:
            thread.join(WAIT_S)
    assert [len(one.token_ids) for one in found] == [4] * 6


def test_a_stream_goes_elsewhere_before_its_first_token_alone(farm: Farm) -> None:
    doomed, other = farm.start(auto=False), farm.start(auto=False)
    with client_of(doomed, other) as client:
        streams = [client.stream("hi", max_tokens=3) for _ in range(2)]
        for stream in streams:
            stream.__enter__()
        farm.until(lambda: doomed.count + other.count == 0)  # they begin with their first reading
        results: list[headrace.Result] = []
        threads = [
            threading.Thread(target=lambda s=stream: results.append(s.result()))  # type: ignore[misc]
            for stream in streams
        ]
        for thread in threads:
            thread.start()
        farm.until(lambda: doomed.count == other.count == 1)
        doomed.kill()
        farm.until(lambda: other.count == 2)
        other.go_on()
        for thread in threads:
            thread.join(WAIT_S)
        assert [len(one.token_ids) for one in results] == [3, 3]


def test_an_engine_that_stops_is_a_server_that_is_lost(farm: Farm) -> None:
    doomed, other = farm.start(auto=False), farm.start()
    with client_of(doomed, other) as client, client.session() as session:
        handles = [session.submit(f"{i}", max_tokens=3) for i in range(6)]
        farm.until(lambda: doomed.count == 3)
        farm.call(lambda: doomed.engine.die(RuntimeError("the engine broke")))
        assert [len(handle.result(WAIT_S).token_ids) for handle in handles] == [3] * 6


def test_a_full_server_is_left_alone(farm: Farm) -> None:
    full = farm.start(auto=False, info={"max_running_requests": 1, "max_queue_size": 1})
    other = farm.start(info={"max_running_requests": 1})
    with client_of(full, other) as client, client.session() as session:
        handles = [session.submit(f"{i}", max_tokens=3) for i in range(12)]
        done = Counter[bool]()
        farm.until(lambda: other.count == 10)
        full.go_on()
        for handle in handles:
            done[handle.result(WAIT_S).finish_reason is FinishReason.LENGTH] += 1
    assert done == {True: 12}
    assert full.count == 2


def test_nobody_there(farm: Farm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace._attempts.PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr("headrace._fleet_session.PATIENCE_SECONDS", 0.2)
    gone = [farm.start(), farm.start()]
    for member in gone:
        member.kill()
    with headrace.Client([member.target for member in gone]) as client:
        with pytest.raises(headrace.UnavailableError, match="none of 2 servers is ready"):
            client.generate("hi", max_tokens=1)
        with client.session() as session:
            handle = session.submit("hi", max_tokens=1)
            with pytest.raises(headrace.UnavailableError, match="none of 2 servers is ready"):
                handle.result(WAIT_S)


def test_a_server_that_never_answers_delays_nothing(
    farm: Farm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.fleet.CHECK_SECONDS", 60.0)
    member = farm.start()
    with (
        silent_server() as silent,
        headrace.Client([silent.target, member.target]) as client,
        client.session() as session,
    ):
        handle = session.submit("hi", max_tokens=3)
        assert len(client.generate("hi", max_tokens=3).token_ids) == 3
        assert len(handle.result(WAIT_S).token_ids) == 3


def test_two_addresses_of_one_server_are_one(farm: Farm) -> None:
    member = farm.start(listen=("127.0.0.1:0", "[::1]:0"), behind_proxy=False)
    with headrace.Client(list(member.server.addresses)) as client:
        wait_for(client, 1)
        assert len(client.generate("hi", max_tokens=3).token_ids) == 3
        assert client.health() is headrace.HealthStatus.SERVING


def test_a_client_that_is_closed_leaves_nobody_waiting(farm: Farm) -> None:
    members = [farm.start(auto=False) for _ in range(2)]
    with client_of(*members) as client:
        session = client.session()
        handles = [session.submit(f"{i}", max_tokens=5) for i in range(4)]
        farm.until(lambda: sum(member.count for member in members) == 4)
        client.close()
        for handle in handles:
            with pytest.raises(headrace.UnavailableError):
                handle.result(WAIT_S)
        session.close()
        with pytest.raises(headrace.UnavailableError, match="closed"):
            client.generate("hi")


def test_the_command_spreads_a_batch(farm: Farm, tmp_path: Path) -> None:
    members = [farm.start() for _ in range(2)]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"{i}"}) + "\n" for i in range(20)))
    target = ",".join(member.target for member in members)
    words = ["--target", target, "batch", str(source), str(output), "--max-tokens", "3"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert len(output.read_text().splitlines()) == 20
    assert [member.count > 5 for member in members] == [True, True]
    refused = CliRunner().invoke(app, ["--target", target, "control", "stats"])
    assert "control is of one" in refused.output


def test_control_is_of_one_server(farm: Farm) -> None:
    member = farm.start()
    both = headrace.Client([member.target, "127.0.0.1:1"])
    with both, pytest.raises(headrace.InvalidArgumentError, match="control is of one"):
        both.control  # noqa: B018
    with headrace.Client([member.target]) as client:
        assert client.control.statistics().instance_id == member.instance_id


def _ids(member: Member) -> list[str]:
    return member.names


def _close_gate(member: Member) -> None:
    member.engine.submit_gate = asyncio.Event()


def test_addresses_of_a_name_come_and_go(farm: Farm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.fleet.RESOLVE_SECONDS", 0.02)
    monkeypatch.setattr("headrace.fleet.RESOLVE_AGAIN_SECONDS", 0.0)
    port = _free_port()
    one, other = (farm.start(address=f"127.0.0.{i}:{port}", behind_proxy=False) for i in (1, 2))
    answers = ["127.0.0.1"]

    def look_up(host: str, port: int, **_: object) -> list[object]:
        assert host == "headrace.test"
        if not answers:
            raise socket.gaierror("no such name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in answers]

    monkeypatch.setattr("headrace._targets.socket.getaddrinfo", look_up)
    with headrace.Client(f"dns:///headrace.test:{port}") as client:
        wait_for(client, 1)
        for _ in range(4):
            client.generate("hi", max_tokens=1)
        answers.append("127.0.0.2")
        wait_for(client, 2)
        with client.session() as session:
            handles = [session.submit("hi", max_tokens=1) for _ in range(8)]
            for handle in handles:
                handle.result(WAIT_S)
        assert other.count >= 2
        kept = client.add_request("hi", max_tokens=2).request_id
        while kept not in _ids(one):
            kept = client.add_request("hi", max_tokens=2).request_id
        answers.remove("127.0.0.1")
        wait_for(client, 1)
        before = one.count
        for _ in range(4):
            client.generate("hi", max_tokens=1)
        assert one.count == before
        assert len(client.get_result(kept).token_ids) == 2  # what it has is still found there
        answers.clear()  # a resolver that fails takes nothing away
        for _ in range(4):
            client.generate("hi", max_tokens=1)


def test_a_server_is_replaced_at_its_address(farm: Farm) -> None:
    address = f"127.0.0.1:{_free_port()}"
    one = farm.start(address=address, behind_proxy=False)
    other = farm.start()
    with client_of(one, other) as client, client.session() as session:
        lost = client.add_request("hi", max_tokens=2).request_id
        while lost not in _ids(one):
            lost = client.add_request("hi", max_tokens=2).request_id
        one.kill()
        handles = [session.submit("hi", max_tokens=1) for _ in range(8)]
        for handle in handles:  # those that went there go elsewhere
            handle.result(WAIT_S)
        wait_for(client, 1)
        again = farm.start(address=address, behind_proxy=False)
        wait_for(client, 2)
        with pytest.raises(headrace.UnavailableError, match="is gone"):
            client.get_result(lost)  # the process that had it is
        handles = [session.submit("hi", max_tokens=1) for _ in range(8)]
        for handle in handles:
            handle.result(WAIT_S)
    assert again.count >= 2


def test_an_address_that_has_another_process_is_followed_once(farm: Farm) -> None:
    one, other = farm.start(), farm.start()
    with headrace.Client([one.target, one.second_target()]) as client:
        wait_for(client, 1)
        ids = [client.add_request("hi", max_tokens=3).request_id for _ in range(2)]
        fleet = client._servers
        assert hasattr(fleet, "state")
        with fleet.changed:  # both are known to be that process
            assert fleet.changed.wait_for(
                lambda: len(fleet.state.by_instance(one.instance_id)) == 2, WAIT_S
            )
            used = fleet.state.by_instance(one.instance_id)[0].address.target
        one.give_address_to(other, used)
        assert len(client.get_result(ids[0]).token_ids) == 3
        with client.session() as session:
            assert len(session.attach(ids[1]).result(WAIT_S).token_ids) == 3
    assert other.count == 0


def test_cancel_finds_requests_wherever_they_are(farm: Farm) -> None:
    members = [farm.start(auto=False) for _ in range(2)]
    with client_of(*members) as client, client.session() as session:
        handles = [session.submit(f"{i}", max_tokens=9) for i in range(4)]
        farm.until(lambda: [member.count for member in members] == [2, 2])
        for handle in handles:
            handle.accepted(WAIT_S)
        handles[0].cancel()
        found = client.cancel([handle.request_id for handle in handles[1:]])
        assert set(found.values()) == {CancelStatus.CANCELLED}
        farm.until(lambda: sum(len(member.engine.cancelled) for member in members) == 4)
        for member in members:
            member.go_on()
        reasons = {handle.result(WAIT_S).finish_reason for handle in handles}
        assert reasons == {FinishReason.CANCELLED}


def test_what_is_cancelled_before_any_server_had_it_has_a_result() -> None:
    with silent_server() as silent, headrace.Client(silent.target) as client:
        with client.session(lease=5) as session:
            handles = [session.submit("hi", n=2) for _ in range(2)]
            handles[0].cancel()
            result = handles[0].result(WAIT_S)
            assert [choice.finish_reason for choice in result.choices] == [
                FinishReason.CANCELLED,
                FinishReason.CANCELLED,
            ]
            assert result.text == ""
            assert not handles[1].done
            session.close(cancel=True)
        assert handles[1].result().finish_reason is FinishReason.CANCELLED


def test_credits_hold_wherever_a_request_is(farm: Farm) -> None:
    members = [farm.start() for _ in range(2)]
    with client_of(*members) as client, client.session(initial_credit=4) as session:
        handles = [session.submit(f"{i}", max_tokens=20) for i in range(4)]
        for handle in handles:
            assert sum(len(chunk.token_ids) for chunk in handle) == 20
        assert session.live == 0
        assert session.lease is not None


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_a_stream_that_is_left_while_it_waits_for_a_server_is_not_sent(farm: Farm) -> None:
    gate = asyncio.Event()
    members = [farm.start(engine=FakeEngine(load_gate=gate)) for _ in range(2)]
    with (
        headrace.Client([member.target for member in members]) as client,
        ThreadPoolExecutor(1) as threads,
    ):
        stream = client.stream("left")
        waiting = threads.submit(stream.result)
        farm.until(lambda: stream._events is not None)
        stream.close()
        farm.call(gate.set)
        assert len(client.generate("hi", max_tokens=1).token_ids) == 1
        with pytest.raises(headrace.CallCancelledError, match="closed"):
            waiting.result(WAIT_S)
    assert sum(member.count for member in members) == 1
