"""Which server a request goes to: keys, orders, bounds; and what a client knows of its servers."""

from __future__ import annotations

import heapq
import random
from collections import Counter, OrderedDict
from contextlib import suppress
from types import SimpleNamespace

import headrace
import pytest
from grpc_health.v1 import health_pb2
from headrace import Message, ServerLoad, build_spec
from headrace._attempts import Attempts, OwnerTries
from headrace._fleet import FleetState, MemberState, RetryBudget, Server
from headrace._health import questions
from headrace._placement import BOUND, Candidate, Placement, PrefixKeys, order, prefix_keys
from headrace._targets import Address, Name, parse_targets
from headrace.errors import error_from_status
from headrace.v1 import model_service_pb2

from tests.clients.python.scripted import make_status

LONG = "You answer questions about rivers, and about nothing else. " * 40


def keys_of(prompt: object, **options: object) -> PrefixKeys | None:
    return prefix_keys(build_spec(prompt, options))  # type: ignore[arg-type]


def test_prompts_that_begin_alike_have_one_key() -> None:
    assert keys_of(LONG + "one") == keys_of(LONG + "two") != keys_of("x" + LONG)
    assert keys_of(LONG[:1024]) == keys_of(LONG)
    assert keys_of([*range(256), 1]) == keys_of([*range(256), 2]) != keys_of([7, *range(256)])
    assert keys_of(LONG, cache_salt="a") != keys_of(LONG)
    assert keys_of("Once upon a time") is keys_of(list(range(10))) is None
    assert keys_of(LONG, bypass_prefix_cache=True) is None


def test_conversations_share_instructions_and_have_a_key_of_their_own() -> None:
    def chat(*texts: str, system: str = LONG) -> PrefixKeys:
        found = keys_of([Message.system(system), *map(Message.user, texts)])
        assert found is not None
        return found

    one, later, other = chat("one"), chat("one", "more"), chat("two")
    assert one == later
    assert one.shared == other.shared
    assert one.own != other.own
    brief = chat("one", system="Be brief.")
    assert brief.shared == brief.own != chat("two", system="Be brief.").shared


def test_vectors_for_clients_in_other_languages() -> None:
    """Those of docs/fleet.md."""
    text = keys_of("a" * 2000)
    tokens = keys_of(list(range(300)))
    chat = keys_of([Message.system("s" * 300), Message.user("hi")])
    assert text is not None
    assert tokens is not None
    assert chat is not None
    assert text.shared.hex() == "e57e1cdbf524ce1c"
    assert tokens.shared.hex() == "844d4a050671a7ca"
    assert (chat.shared.hex(), chat.own.hex()) == ("923bf3b05a357e08", "9acc8f49988cc8c1")
    assert order(text.shared, ["a", "b", "c"]) == ["a", "b", "c"]


def test_a_server_that_goes_moves_its_own_keys_alone() -> None:
    keys = [bytes([i, j]) for i in range(40) for j in range(10)]
    before = {key: order(key, "abcd") for key in keys}
    assert all(count > 70 for count in Counter(one[0] for one in before.values()).values())
    for key in keys:
        assert order(key, "abc") == [name for name in before[key] if name != "d"]


class Simulation:
    """Servers that take requests for a random time, each with a cache of some prefixes."""

    def __init__(
        self, *, seed: int, in_flight: int, cached: int, speeds: tuple[float, ...]
    ) -> None:
        self._random = random.Random(seed)
        self._in_flight = in_flight
        self._cached = cached
        self._speeds = dict(zip("abcdefg", speeds, strict=False))
        self.counts = Counter[str]()
        self.hits = 0
        self.hits_of_one = 0
        self.most_above = 0.0

    def run(self, prefixes: int, requests: int) -> None:
        placement, running, now = Placement(), list[tuple[float, str]](), 0.0
        load = dict.fromkeys(self._speeds, 0)
        caches = {name: OrderedDict[int, None]() for name in self._speeds}
        of_one = OrderedDict[int, None]()
        for _ in range(requests):
            while len(running) >= self._in_flight:
                now, name = heapq.heappop(running)
                load[name] -= 1
            prefix = self._random.randrange(prefixes)
            key = prefix.to_bytes(8, "big")
            candidates = [Candidate(name, load[name], 1000) for name in load]
            chosen = placement.choose(PrefixKeys(key, key), candidates)
            load[chosen] += 1
            share = sum(load.values()) / len(load)
            self.most_above = max(self.most_above, load[chosen] - BOUND * share)
            took = self._random.uniform(0.5, 1.5) * self._speeds[chosen]
            heapq.heappush(running, (now + took, chosen))
            self.counts[chosen] += 1
            self.hits += _hit(caches[chosen], prefix, self._cached)
            self.hits_of_one += _hit(of_one, prefix, self._cached * len(load))


def _hit(cache: OrderedDict[int, None], prefix: int, size: int) -> bool:
    found = prefix in cache
    cache[prefix] = None
    cache.move_to_end(prefix)
    if len(cache) > size:
        cache.popitem(last=False)
    return found


@pytest.mark.parametrize("in_flight", [12, 24, 48, 96])
def test_sixty_prefixes_are_spread_evenly_and_found_again(in_flight: int) -> None:
    for seed in range(4):
        run = Simulation(seed=seed, in_flight=in_flight, cached=30, speeds=(1, 1, 1))
        run.run(60, 6000)
        assert all(abs(count / 2000 - 1) <= 0.1 for count in run.counts.values())
        assert run.hits >= 0.9 * run.hits_of_one
        assert run.most_above <= 2  # the bound, rounded up, and one


def test_a_prefix_that_everybody_has_does_not_pile_up() -> None:
    run = Simulation(seed=1, in_flight=60, cached=1, speeds=(1, 1, 1))
    run.run(1, 3000)
    assert all(count > 700 for count in run.counts.values())
    assert run.most_above <= 2


def test_faster_servers_get_more() -> None:
    run = Simulation(seed=1, in_flight=60, cached=30, speeds=(1, 3))
    run.run(10_000, 4000)  # nothing is ever found: placement alone
    assert 1.5 <= run.counts["a"] / run.counts["b"] <= 3.5


def test_a_prefix_is_not_worth_a_wait() -> None:
    key = b"x" * 8
    first, second = order(key, "ab")
    free = [Candidate(first, 8, 8), Candidate(second, 7, 8)]
    assert Placement().choose(PrefixKeys(key, key), free) == second
    all_busy = [Candidate(first, 8, 8), Candidate(second, 8, 8)]
    assert Placement().choose(PrefixKeys(key, key), all_busy) == first


def test_the_least_loaded_gets_what_has_no_prefix() -> None:
    placement = Placement()
    sizes = [Candidate("small", 2, 4, 1), Candidate("large", 9, 32, 2)]
    assert placement.choose(None, sizes) == "large"
    equal = [Candidate("a", 1, 8, 7), Candidate("b", 1, 8, 3)]
    assert placement.choose(None, equal) == "b"  # in turn


# ---- what is known of the servers ----------------------------------------------------------------


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def fleet_of(count: int) -> tuple[FleetState, list[Server], Clock]:
    clock = Clock()
    state = FleetState(clock, lambda: 0.5)
    servers = state.listed(Address(f"127.0.0.1:{i}") for i in range(count))
    for i, server in enumerate(servers):
        state.joined(server, f"i{i}", 8)
    return state, servers, clock


def test_reported_load_counts_and_grows_old() -> None:
    state, (one, other), clock = fleet_of(2)
    for _ in range(3):
        state.begun(one)
    one.take_load(ServerLoad(10, 2, 0.5), clock.now)  # nine of them are other clients'
    assert one.load(clock.now) == 12
    state.over(one)
    assert one.load(clock.now) == 11
    assert state.choose(None) is other
    clock.now += 6
    assert one.load(clock.now) == 2


def test_addresses_come_and_go() -> None:
    state, (one, other), clock = fleet_of(2)
    state.begun(one)
    [new] = state.listed([other.address, Address("127.0.0.1:9")])
    assert (one.state, new.state) == (MemberState.LEAVING, MemberState.JOINING)
    assert state.choose(None) is other
    state.joined(new, "i9", 8)
    assert {state.choose(None, avoid=[other]), state.choose(None, avoid=[new])} == {new, other}
    clock.now += 1000
    assert state.left() == []  # it has a request
    state.over(one)
    assert state.by_instance("i0") == [one]
    clock.now += 61
    assert state.left() == [one]
    assert state.by_instance("i0") == []


def test_one_server_behind_two_addresses_is_used_once() -> None:
    state, (one, _), clock = fleet_of(2)
    [twin] = state.listed([*state.servers, Address("[::1]:1")])
    state.joined(twin, "i0", 8)
    assert twin.state is MemberState.JOINING
    state.set_aside(one, headrace.UnavailableError("lost"))
    clock.now += 5
    assert twin in state.to_ask()
    state.joined(twin, "i0", 8)
    assert state.by_instance("i0")[0] is twin
    assert twin.state is MemberState.READY


@pytest.mark.parametrize("last", ["ready", "not ready", "silent"])
def test_who_answers_first_waits_a_moment_for_the_others(last: str) -> None:
    clock = Clock()
    state = FleetState(clock, lambda: 0.5)
    one, other = state.listed(Address(f"127.0.0.1:{i}") for i in range(2))
    assert state.next_in() == 0.0
    assert state.to_ask() == [one, other]
    assert state.next_in() is None
    state.found(one, "i0", 8)
    assert (state.tell(), state.choose(None)) == (False, None)
    assert state.next_in() == pytest.approx(0.1)
    if last == "ready":
        state.found(other, "i1", 8)
    elif last == "not ready":
        state.not_joined(other, headrace.UnavailableError("loading"))
    else:
        clock.now += 0.1
    assert state.next_in() == 0.0
    assert (state.tell(), state.tell()) == (True, False)
    assert state.choose(None, avoid=[other]) is one
    assert (state.choose(None, avoid=[one]) is other) == (last == "ready")
    assert state.to_ask() == []  # what did not answer yet is not asked again


def test_a_server_is_asked_for_its_health_then_who_it_is() -> None:
    def asked_of(*answers: object) -> Server:
        """The server when its questions have had these answers."""
        state = FleetState(Clock())
        [server] = state.listed([Address("127.0.0.1:1")])
        server.link = SimpleNamespace(
            target="here",
            health=SimpleNamespace(Check="health"),
            models=SimpleNamespace(GetModel="model"),
        )
        assert state.to_ask() == [server]
        asking = questions(state, server)
        question, wanted = next(asking), ["health", "model"]
        for number, answer in enumerate(answers):
            assert question.pick(server.link) == wanted[number]
            with suppress(StopIteration):
                if isinstance(answer, headrace.HeadraceError):
                    question = asking.throw(answer)
                else:
                    question = asking.send(answer)
        assert not asking.gi_running
        assert asking.gi_frame is None  # there is no further question
        state.tell()
        return server

    check, model = health_pb2.HealthCheckResponse, model_service_pb2.GetModelResponse
    serving, card = check(status=check.SERVING), model()
    card.model.instance_id, card.model.limits.max_running_requests = "i", 8
    gone = headrace.UnavailableError("gone")
    found = asked_of(serving, card)
    assert (found.state, found.instance_id, found.capacity) == (MemberState.READY, "i", 8)
    found = asked_of(serving, headrace.PermissionDeniedError("not for you"))
    assert (found.state, found.instance_id, found.capacity) == (MemberState.READY, "", 1)
    for answers in [(check(status=check.NOT_SERVING),), (gone,), (serving, gone)]:
        found = asked_of(*answers)
        assert (found.state, found.is_known, found.is_asked) == (MemberState.JOINING, True, False)
        assert isinstance(found.problem, headrace.UnavailableError)


def refusal(code: int, reason: str, retry_after: float | None = None, **metadata: str) -> object:
    from google.protobuf.duration_pb2 import Duration
    from google.rpc import error_details_pb2

    details = []
    if retry_after is not None:
        delay = Duration(nanos=int(retry_after * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return error_from_status(make_status(code, reason, reason, *details, **metadata))


def test_a_full_fleet_is_asked_no_earlier_than_it_said() -> None:
    state, (one, other), clock = fleet_of(2)
    attempts = Attempts(state, None, retries=3)
    busy = refusal(8, "QUEUE_FULL", 0.7)
    assert isinstance(busy, headrace.ResourceExhaustedError)
    assert attempts.next() is one
    state.begun(one)
    state.over(one)
    assert attempts.failed(one, busy) == 0.0
    assert attempts.next() is other
    assert attempts.failed(other, busy) == pytest.approx(0.7)
    another = Attempts(state, None, retries=3)
    assert another.next() == pytest.approx(0.7)  # a new request waits as well
    clock.now += 0.7
    assert attempts.next() in (one, other)
    assert attempts.failed(one, busy) == 0.0
    with pytest.raises(headrace.ResourceExhaustedError):
        attempts.failed(other, busy)


def test_the_budget_ends_retries_at_once() -> None:
    budget = RetryBudget(tokens=10)
    assert [budget.failed() for _ in range(6)] == [True] * 4 + [False] * 2
    for _ in range(21):
        budget.succeeded()
    assert budget.failed()
    state, servers, _ = fleet_of(3)
    while state.budget.failed():
        pass
    attempts = Attempts(state, None, retries=3)
    busy = refusal(8, "QUEUE_FULL", 0.2)
    assert isinstance(busy, headrace.HeadraceError)
    assert attempts.failed(servers[0], busy) == pytest.approx(0.2)


def test_a_server_without_the_adapter_is_asked_once() -> None:
    state, (one, other, third), clock = fleet_of(3)
    attempts = Attempts(state, None, retries=0, sticks=True)
    lacks, busy = refusal(5, "ADAPTER_NOT_LOADED"), refusal(8, "QUEUE_FULL", 0.7)
    assert isinstance(lacks, headrace.NotFoundError)
    assert isinstance(busy, headrace.ResourceExhaustedError)
    assert attempts.next() is one
    assert attempts.failed(one, lacks) == 0.0
    assert attempts.next() is other
    assert attempts.failed(other, lacks) == 0.0
    state.full(third, 0.7)
    assert attempts.next() == pytest.approx(0.7)  # neither of those without it
    clock.now += 0.7
    assert attempts.next() is third
    with pytest.raises(headrace.NotFoundError, match="ADAPTER_NOT_LOADED"):
        attempts.failed(third, lacks)
    assert state.budget.failed()  # it has paid for nothing
    assert Attempts(state, None, retries=0).next() is one  # others' requests may go there


def test_a_call_that_may_have_arrived_asks_the_same_server_first() -> None:
    state, (one, other), _ = fleet_of(2)
    attempts = Attempts(state, None, retries=3, sticks=True)
    assert attempts.next() is one
    lost = headrace.UnavailableError("connection lost")
    assert attempts.failed(one, lost) == 0.0
    assert attempts.next() is one
    assert attempts.failed(one, lost) == 0.0
    assert attempts.next() is other


def test_a_wrong_server_is_followed_once() -> None:
    state, (one, other), _ = fleet_of(2)
    state.note_owner("x", "i0")
    wrong = refusal(5, "WRONG_INSTANCE", owner_instance_id="i0", instance_id="i7")
    assert isinstance(wrong, headrace.NotFoundError)
    moved = OwnerTries(state, "x", retries=3)
    assert moved.next() is one
    other.instance_id = "i0"  # the process listens elsewhere now
    assert moved.failed(one, wrong) == 0.0
    assert one.instance_id == "i7"
    assert moved.next() is other
    with pytest.raises(headrace.UnavailableError, match="is gone"):
        moved.failed(other, wrong)
    gone = OwnerTries(state, "x", retries=3)
    with pytest.raises(headrace.UnavailableError, match="is gone"):
        gone.next()


def test_targets() -> None:
    assert parse_targets("a:1, b:2,a:1") == (Address("a:1"), Address("b:2"))
    assert parse_targets(["/run/a", "unix:/run/b"]) == (
        Address("unix:/run/a"),
        Address("unix:/run/b"),
    )
    assert parse_targets("dns:///headrace") == (Name("headrace", 50051),)
    for wrong in ("", "a,,b", "dns:///:1"):
        with pytest.raises(ValueError, match=r"target|name and a port"):
            parse_targets(wrong)
    with pytest.raises(ValueError, match="takes one target"):
        headrace.Client("a:1,b:2", load_balancing="round_robin")
