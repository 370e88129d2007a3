"""For whom a call counts: the address of a caller whom nobody knows, whom a gateway names, and what
the callers' file says of weights and priorities.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from headrace.v1 import generation_service_pb2 as rpc
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.errors import ConfigError
from engine.contract.request import MAX_CALLER_CHARS, MAX_WEIGHT, MIN_WEIGHT
from service.admission.accounts import (
    MAX_NAME,
    ON_BEHALF_OF,
    Account,
    account_at,
    account_of,
    name_in,
    origin_of,
)
from service.door import callers_file as callers_file
from service.door.callers_file import parse_callers
from service.errors.call_errors import CallerNameError
from tests.service.door.callers_file import TOKENS, add_request, bearer, entry, guarded, replace
from tests.service.fake_engine import FakeEngine
from tests.service.helpers import DEADLINE_S, Harness, Refused, Session, details, refused, serving
from tests.service.helpers import spec as spec_of

GATEWAY = entry("alice", '["GenerationService"]', TOKENS["alice"])
OTHERS = entry("bob", '["GenerationService"]', TOKENS["bob"])


# ---- who is not known --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("peer", "origin"),
    [
        ("ipv4:192.0.2.7:51234", "192.0.2.7"),
        ("ipv4:192.0.2.7:1", "192.0.2.7"),
        # As gRPC writes it now, and as it did.
        ("ipv6:%5B2001:db8::1%5D:51234", "2001:db8::/64"),
        ("ipv6:[2001:db8::1]:51234", "2001:db8::/64"),
        ("ipv6:%5b2001%3Adb8%3A%3A2%5d%3A443", "2001:db8::/64"),
        ("ipv6:[2001:DB8:0:0:ffff:1:2:3]:9", "2001:db8::/64"),
        ("ipv6:[2001:db8:0:1::1]:9", "2001:db8:0:1::/64"),
        ("ipv6:%5B::1%5D:54592", "::1"),
        # IPv4 that came through a socket of both kinds.
        ("ipv6:%5B::ffff:192.0.2.7%5D:51234", "192.0.2.7"),
        ("ipv6:[::ffff:c000:207]:51234", "192.0.2.7"),
        # All of a link are in one network; the link belongs to the address.
        ("ipv6:%5Bfe80::1%25eth0%5D:1", "fe80::1%eth0"),
        ("ipv6:[fe80::2%25eth0]:1", "fe80::2%eth0"),
        ("unix:", "unix"),
        ("unix:/run/a.sock", "unix"),
        ("unix:/run/b.sock", "unix"),
        ("unix-abstract:a", "unix-abstract"),
        ("", "unknown"),
        ("ipv4:nonsense", "ipv4"),
        ("ipv6:[nonsense]:1", "ipv6"),
    ],
)
def test_an_address_is_without_its_port_and_a_network_of_ipv6_is_one(
    peer: str, origin: str
) -> None:
    assert origin_of(peer) == origin
    account = account_at("anonymous", peer)
    assert account == Account("anonymous", account.key, origin, 1.0)
    assert account.key == origin


@given(st.text(max_size=300))
def test_no_peer_is_too_strange(peer: str) -> None:
    assert 1 <= len(origin_of(peer)) <= 200
    assert 1 <= len(origin_of("ipv6:" + peer)) <= 200


async def test_more_connections_of_an_address_are_one_caller() -> None:
    engine = FakeEngine(auto=False)
    async with serving(engine, listen=("127.0.0.1:0", "[::1]:0")) as h:
        for index in range(4):
            options = [("grpc.use_local_subchannel_pool", 1)]
            target = h.server.addresses[index % 2]
            async with grpc.aio.insecure_channel(target, options=options) as channel:
                other = Harness(h.server, engine, channel)
                await other.generation.AddRequest(
                    rpc.AddRequestRequest(spec=spec_of()), timeout=DEADLINE_S
                )
    callers = [request.caller for request in engine.submitted]
    assert callers == ["127.0.0.1", "::1"] * 2


async def test_all_on_unix_sockets_are_one_caller(tmp_path: Path) -> None:
    engine = FakeEngine(auto=False)
    paths = tuple(f"unix:{tmp_path}/{name}.sock" for name in "ab")
    async with serving(engine, listen=paths) as h:
        for target in h.server.addresses:
            async with grpc.aio.insecure_channel(target) as channel:
                await Harness(h.server, engine, channel).generation.AddRequest(
                    rpc.AddRequestRequest(spec=spec_of()), timeout=DEADLINE_S
                )
    assert [request.caller for request in engine.submitted] == ["unix", "unix"]


async def test_nobody_is_named_where_nobody_is_known() -> None:
    async with serving() as h:
        error = await refused(
            h.generation.Generate(
                rpc.GenerateRequest(spec=spec_of()), metadata=((ON_BEHALF_OF, "carol"),)
            )
        )
        assert (error.code, error.reason) == (
            grpc.StatusCode.PERMISSION_DENIED,
            "ON_BEHALF_OF_NOT_GRANTED",
        )
        assert "auth_file" in error.message


# ---- whom a gateway names ----------------------------------------------------------------------


@asynccontextmanager
async def a_gateway(tmp_path: Path, *lines: str, engine: FakeEngine | None = None) -> Any:
    """A server where alice may name others, and bob may not."""
    path = tmp_path / "callers.toml"
    more = "\n".join(("may_call_for_others = true", *lines)) + "\n"
    replace(path, GATEWAY + more + OTHERS)
    async with guarded(path, engine or FakeEngine(auto=False)) as h:
        h.callers = path
        yield h


def add_for(h: Harness, who: str, *names: str | bytes, **fields: Any) -> Any:
    metadata = (*bearer(who), *((ON_BEHALF_OF, name) for name in names))
    return h.generation.AddRequest(
        rpc.AddRequestRequest(spec=spec_of(**fields)), metadata=metadata, timeout=DEADLINE_S
    )


async def test_a_gateway_names_for_whom_it_calls_and_owns_all_of_it(tmp_path: Path) -> None:
    async with a_gateway(tmp_path, "weight = 3") as h:
        await add_for(h, "alice", "carol@example.org", request_id="a")
        await add_for(h, "alice", "x" * MAX_NAME, request_id="b")
        await add_for(h, "alice", request_id="c")
        await add_for(h, "alice", "bob", request_id="d")
        await add_request(h, "bob", request_id="e")
        assert [request.caller for request in h.engine.submitted] == [
            "alice/carol@example.org",
            "alice/" + "x" * MAX_NAME,
            "alice",
            "alice/bob",
            "bob",
        ]
        message = rpc.CancelRequest(request_ids=["a", "b", "c", "d", "e"])
        metadata = (*bearer("alice"), (ON_BEHALF_OF, "dave"))
        answer = await h.generation.Cancel(message, metadata=metadata)
        statuses = [result.status for result in answer.results]
        assert statuses == [rpc.CANCEL_STATUS_CANCELLED] * 4 + [rpc.CANCEL_STATUS_NOT_FOUND]


@pytest.mark.parametrize(
    "names", [("",), ("x" * (MAX_NAME + 1),), ("a/b",), ("a b",), ("carol", "dave"), ("a\n",)]
)
def test_a_name_is_checked(names: tuple[str, ...]) -> None:
    with pytest.raises(CallerNameError, match=f"{ON_BEHALF_OF} must be given once, as 1 to 64"):
        name_in([("authorization", "x"), *((ON_BEHALF_OF, name) for name in names)])


def test_a_name_of_bytes_is_none() -> None:
    with pytest.raises(CallerNameError):
        name_in([(ON_BEHALF_OF, b"\xff")])
    assert name_in([("authorization", "x")]) is None
    assert name_in([(ON_BEHALF_OF, "a.b_c@d-1")]) == "a.b_c@d-1"


async def test_who_may_not_name_anybody_is_refused_and_so_is_what_is_no_name(
    tmp_path: Path,
) -> None:
    async with a_gateway(tmp_path) as h:
        error = await refused(add_for(h, "bob", "carol"))
        assert (error.code, error.reason) == (
            grpc.StatusCode.PERMISSION_DENIED,
            "ON_BEHALF_OF_NOT_GRANTED",
        )
        assert "'bob' may not send headrace-on-behalf-of" in error.message
        for names in (("a/b",), ("carol", "carol"), ("",)):
            error = await refused(add_for(h, "alice", *names))
            assert (error.code, error.reason) == (
                grpc.StatusCode.INVALID_ARGUMENT,
                "CALLER_NAME_INVALID",
            )
        assert not h.engine.submitted


async def test_a_session_whose_gateway_may_name_nobody_any_more_ends(tmp_path: Path) -> None:
    async with a_gateway(tmp_path) as h:
        metadata = (*bearer("alice"), (ON_BEHALF_OF, "carol"))
        session = Session(h.generation.StreamResult(metadata=metadata))
        await session.add(spec_of(request_id="a"))
        await session.read_until(lambda m: m.events)
        replace(h.callers, GATEWAY + OTHERS)
        await session.add(spec_of(request_id="b"), 2)
        message = await session.read_until(lambda m: m.rejections)
        found = details(message.rejections[0].status)["ErrorInfo"]
        assert found.reason == "ON_BEHALF_OF_NOT_GRANTED"
        assert [request.caller for request in h.engine.submitted] == ["alice/carol"]


# ---- weights and priorities --------------------------------------------------------------------


async def test_a_weight_that_changes_counts_for_what_comes_then(tmp_path: Path) -> None:
    path = tmp_path / "callers.toml"
    replace(path, GATEWAY + "weight = 4.5\n" + OTHERS)
    engine = FakeEngine(auto=False)
    async with guarded(path, engine) as h:
        session = Session(h.generation.StreamResult(metadata=bearer("alice")))
        await session.add(spec_of(request_id="a"))
        await session.read_until(lambda m: m.events)
        await add_request(h, "bob")
        replace(path, GATEWAY + "weight = 0.5\n" + OTHERS + "weight = 2\n")
        h.server.reload()
        await add_request(h, "bob")
        await session.add(spec_of(request_id="b"))
        await session.read_until(lambda _: "b" in session.events())
    assert [(request.caller, request.weight) for request in engine.submitted] == [
        ("alice", 4.5),
        ("bob", 1.0),
        ("bob", 2.0),
        ("alice", 0.5),
    ]


async def test_a_small_weight_that_many_share_is_one_that_the_engine_takes(tmp_path: Path) -> None:
    async with a_gateway(tmp_path, "weight = 0.01") as h:
        for number in range(12):
            await add_for(h, "alice", f"user-{number}")
        weights = [request.weight for request in h.engine.submitted]
        assert weights == pytest.approx([max(0.01 / number, MIN_WEIGHT) for number in range(1, 13)])


async def test_the_file_bounds_a_caller_s_priority(tmp_path: Path) -> None:
    path = tmp_path / "callers.toml"
    replace(path, GATEWAY + "max_priority = 10\n" + OTHERS)
    async with guarded(path, FakeEngine(auto=False)) as h:
        await add_request(h, "alice", scheduling={"priority": 10})
        await add_request(h, "alice", scheduling={"priority": -100})
        await add_request(h, "bob", scheduling={"priority": 100})
        error: Refused = await refused(add_request(h, "alice", scheduling={"priority": 11}))
        assert (error.code, error.field) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "spec.scheduling.priority",
        )
        assert "is 11; at most 10 is allowed to this caller (max_priority" in error.message


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("weight = 0", "weight must be a number from 0.01 to 1000"),
        ("weight = -1.0", "weight must be"),
        ("weight = nan", "weight must be"),
        ("weight = inf", "weight must be"),
        ("weight = 1001", "weight must be"),
        ("weight = true", "weight must be"),
        ('weight = "2"', "weight must be"),
        ("max_priority = 101", "max_priority must be a whole number from -100 to 100"),
        ("max_priority = 1.0", "max_priority must be"),
        ("max_priority = false", "max_priority must be"),
        ("may_call_for_others = 1", "may_call_for_others must be true or false"),
    ],
)
def test_what_is_wrong_in_an_entry_is_named(line: str, wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"callers\[1\]\." + wrong):
        parse_callers(OTHERS + GATEWAY + line + "\n")


def test_entries_of_an_identity_say_the_same_of_it_or_nothing() -> None:
    second = entry("alice", '["ModelService"]', "another secret", certificate="alice.example")
    third = entry("alice", '["GenerationService"]', certificate="gateway.example")
    table = parse_callers(
        GATEWAY
        + "weight = 2\n"
        + second
        + "max_priority = 5\n"
        + third
        + "may_call_for_others = true\nweight = 2.0\n"
        + OTHERS
    )
    callers = {**dict(table.tokens), **table.certificates}.values()
    for caller in callers:
        weight, priority = (2.0, 5) if caller.identity == "alice" else (1.0, 100)
        assert (caller.weight, caller.max_priority) == (weight, priority)
    # What is granted is an entry's; a certificate with the names of two has both.
    assert [c.may_call_for_others for c in table.certificates.values()] == [False, True]
    [both] = table.by_names(["alice.example", "gateway.example"])
    assert both.may_call_for_others
    assert both.services == {"ModelService", "GenerationService"}
    for lines in ("weight = 3\n", "max_priority = 4\n"):
        with pytest.raises(ConfigError, match="another entry of 'alice' says"):
            parse_callers(GATEWAY + "weight = 2\nmax_priority = 5\n" + second + lines)


def test_what_the_file_may_say_the_engine_takes() -> None:
    assert MIN_WEIGHT <= callers_file.MIN_WEIGHT < MAX_WEIGHT
    longest = account_of("i" * 64, "n" * MAX_NAME)
    assert len(longest.key) <= MAX_CALLER_CHARS
