"""Every bound has a share: whatever one caller holds, another finds room; over gRPC, with callers
who have tokens, and with a gateway that names for whom it calls.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from headrace.v1 import generation_service_pb2 as rpc

from engine.contract.config import ContinuousBatchingConfig, LoadConfig
from engine.process.local_client import LocalEngineClient
from service.admission.accounts import ON_BEHALF_OF, Account, account_of
from service.admission.text_pool import SHORT_BYTES, TextPool
from service.config import ServiceConfig
from service.delivery.events import DeliveryOptions
from service.server import HeadraceServer
from tests.engine.crowd import Clock
from tests.service.admission.hands import Hands, settle
from tests.service.door.callers_file import TOKENS, bearer, entry, guarded, replace
from tests.service.fake_engine import FakeEngine, model_info, says
from tests.service.helpers import DEADLINE_S, Harness, Refused, Session, refused, step, until
from tests.service.helpers import spec as spec_of
from tests.service.real_server import ROOT

DEMO = ROOT / "models" / "demo"


def add(h: Harness, who: str, request_id: str = "", name: str = "", **fields: Any) -> Any:
    metadata = (*bearer(who), *(((ON_BEHALF_OF, name),) if name else ()))
    message = rpc.AddRequestRequest(spec=spec_of(request_id=request_id, **fields))
    return h.generation.AddRequest(message, metadata=metadata, timeout=DEADLINE_S)


async def fill(h: Harness, who: str, **fields: Any) -> tuple[int, Refused]:
    """Add requests until one is refused; how many were taken in, and why no more."""
    number = 0
    while True:
        try:
            await add(h, who, **fields)
        except Exception as error:
            return number, Refused(error)  # type: ignore[arg-type]
        number += 1


def share_of(error: Refused) -> dict[str, str]:
    metadata = error.details["ErrorInfo"].metadata
    return {key: metadata[key] for key in ("held", "share") if key in metadata}


async def test_who_does_not_read_shuts_nobody_else_out(callers: Path) -> None:
    """300 requests that nobody reads, with 128 log-probabilities a token."""
    engine = FakeEngine(auto=False, info=model_info(max_context_tokens=1 << 16))
    most = 16 << 20
    async with guarded(callers, engine, max_undelivered_bytes=most) as h:
        wide = {"logprobs": 16, "logprob_token_ids": range(112)}
        session = Session(h.generation.StreamResult(metadata=bearer("alice")))
        await session.send(open=rpc.OpenCommand(initial_credit=1))
        for index in range(300):
            await session.add(
                spec_of(request_id=f"a{index}", output=wide, stop={"max_tokens": 200})
            )
        await until(lambda: h.registry.live == 300)
        admission = h.registry.admission
        while engine.num_holds < 300:
            await step(h)
        error = await refused(add(h, "alice"))
        assert error.reason == "TOO_MANY_UNDELIVERED_BYTES"
        assert share_of(error) == {}  # nobody else has anything
        for index in range(20):  # bob is served, whatever alice leaves unread
            await add(h, "bob", f"b{index}", stop={"max_tokens": 100})
        await step(h, 40)
        token_bytes = DeliveryOptions(token_details=True, candidates=128).unread_per_token
        # A request may bring something in three steps until it is held.
        assert admission.unread_bytes <= most + most // 8 + 300 * 3 * token_bytes
        await add(h, "bob")
        error = await refused(add(h, "alice"))
        assert share_of(error)["share"] == str(most // 2)
        assert "others want theirs, and this caller has" in error.message
        session.call.cancel()


@pytest.mark.parametrize(
    ("options", "fields", "reason", "most", "reserve"),
    [
        ({"max_open_requests": 64}, {}, "TOO_MANY_OPEN_REQUESTS", 64, 8),
        (
            {"max_reserved_tokens": 6400},
            {"text": "hi", "stop": {"max_tokens": 98}},
            "TOO_MANY_TOKENS",
            64,
            8,
        ),
    ],
)
async def test_one_caller_fills_a_bound_and_another_gets_its_share(
    callers: Path,
    options: dict[str, int],
    fields: dict[str, Any],
    reason: str,
    most: int,
    reserve: int,
) -> None:
    engine = FakeEngine(auto=False)
    async with guarded(callers, engine, default_max_tokens=90, **options) as h:
        taken, error = await fill(h, "alice", **fields)
        assert (taken, error.reason, share_of(error)) == (most, reason, {})
        # Bob comes new, and finds what no other can have taken.
        taken, error = await fill(h, "bob", **fields)
        assert (taken, error.reason) == (reserve // 2, reason)
        # What ends is for bob, though alice asks more often, until he has his share.
        held = {"alice": most, "bob": taken}
        for request in list(engine.submitted[:most]):
            engine.time_out(request.request_id)
            before = h.registry.live
            engine.step()
            await until(lambda before=before: h.registry.live == before - 1)
            held["alice"] -= 1
            error = await refused(add(h, "alice", **fields))
            assert error.reason == reason
            assert "others want theirs" in error.message
            assert int(share_of(error)["share"]) * 2 == int(
                error.details["ErrorInfo"].metadata[error.details["ErrorInfo"].metadata["limit"]]
            )
            more, _ = await fill(h, "bob", **fields)
            held["bob"] += more
            if held["alice"] == most // 2:
                break
        assert held["bob"] >= most // 2


async def test_the_engine_s_queue_has_shares_too(callers: Path) -> None:
    batching = ContinuousBatchingConfig(
        block_size=16, num_blocks=256, max_requests_per_batch=2, max_queue_size=16
    )
    engine: Any = LocalEngineClient(str(DEMO), batching, LoadConfig(device="cpu", threads=1))
    config = ServiceConfig(listen=("127.0.0.1:0",), auth_file=str(callers), max_queue_size=16)
    server = HeadraceServer(config, engine, progress=lambda line: None)
    await server.start()
    try:
        await server.ready()
        async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
            h = Harness(server, engine, channel)
            await engine.pause()  # so that all wait
            fields: dict[str, Any] = {"stop": {"max_tokens": 2}}
            taken, error = await fill(h, "alice", **fields)
            assert (taken, error.reason, share_of(error)) == (16, "QUEUE_FULL", {})
            await add(h, "bob", **fields)
            error = await refused(add(h, "alice", **fields))
            assert error.reason == "QUEUE_FULL"
            assert share_of(error) == {"share": "8", "held": "16"}
            assert "others want theirs" in error.message
            await engine.resume()
            await until(lambda: not h.registry.live)
            await add(h, "alice", **fields)
    finally:
        await server.stop()


async def test_a_session_is_kept_for_who_has_none(callers: Path) -> None:
    async with guarded(callers, max_sessions=16) as h:

        async def session(who: str) -> Any:
            call = h.generation.StreamResult(metadata=bearer(who))
            await call.write(rpc.StreamResultRequest(open=rpc.OpenCommand()))
            await call.read()
            return call

        async def no_session(who: str) -> None:
            # Refused before its first message, which is not written: see tests/FLAKY.md.
            await h.generation.StreamResult(metadata=bearer(who)).read()

        calls = [await session("alice") for _ in range(16)]
        assert (await refused(no_session("alice"))).reason == "TOO_MANY_SESSIONS"
        calls.append(await session("bob"))
        error = await refused(no_session("alice"))
        assert share_of(error) == {"share": "8", "held": "16"}
        for call in calls:
            call.cancel()
        await until(lambda: not h.server.limits.sessions.taken)


async def test_nobody_is_told_to_stand_behind_another_s_refused_calls(callers: Path) -> None:
    clock = Clock()
    engine = FakeEngine(auto=False, script=says("x" * 50))
    async with guarded(callers, engine, clock=clock, max_open_requests=32) as h:
        await fill(h, "alice")
        for index in range(8):  # two a second end, and others come
            clock.now += 0.5
            engine.time_out(engine.submitted[index].request_id)
            engine.step()
            await until(lambda: h.registry.live == 31)
            await add(h, "alice")
        for _ in range(200):
            alice = await refused(add(h, "alice"))
        _, bob = await fill(h, "bob")

        def told(error: Refused) -> float:
            return error.details["RetryInfo"].retry_delay.ToTimedelta().total_seconds()

        assert told(alice) > 60
        assert told(bob) < 10


# ---- a gateway ---------------------------------------------------------------------------------


async def test_whom_a_gateway_names_share_its_weight_and_its_room(tmp_path: Path) -> None:
    path = tmp_path / "callers.toml"
    services = '["GenerationService"]'
    gateway = entry("alice", services, TOKENS["alice"]) + "may_call_for_others = true\nweight = 3\n"
    replace(path, gateway + entry("bob", services, TOKENS["bob"]))
    engine = FakeEngine(auto=False)
    async with guarded(path, engine, max_open_requests=64) as h:
        for name in ("x", "y", "z", "x"):
            await add(h, "alice", name=name)
        weights = [(request.caller, request.weight) for request in engine.submitted]
        assert weights == [
            ("alice/x", 3.0),
            ("alice/y", 1.5),
            ("alice/z", 1.0),
            ("alice/x", 1.0),
        ]
        # As many as it likes to name are one before the bound.
        added = [add(h, "alice", name=f"n{number}") for number in range(200)]
        ends = await asyncio.gather(*added, return_exceptions=True)
        assert 4 + sum(not isinstance(end, Exception) for end in ends) == 64 + 8 // 4
        taken, error = await fill(h, "bob")
        assert taken == 8 // 2 - 8 // 4
        assert error.reason == "TOO_MANY_OPEN_REQUESTS"
        assert share_of(error) == {}  # he is within his: there is nothing free


async def test_one_of_a_gateway_s_callers_does_not_shut_out_another(tmp_path: Path) -> None:
    path = tmp_path / "callers.toml"
    replace(
        path,
        entry("alice", '"*"', TOKENS["alice"]) + "may_call_for_others = true\n",
    )
    async with guarded(path, FakeEngine(auto=False), max_open_requests=64) as h:
        taken, _ = await fill(h, "alice", name="heavy")
        assert taken == 64
        await add(h, "alice", name="light")
        error = await refused(add(h, "alice", name="heavy"))
        assert share_of(error) == {"share": "32", "held": "64"}


# ---- tokenizing --------------------------------------------------------------------------------


async def test_turns_to_tokenize_go_by_weight_and_a_group_has_one() -> None:
    hands = Hands()
    pool = TextPool(hands)
    size = SHORT_BYTES * 2
    accounts: list[Account] = [
        account_of("plain"),
        account_of("double", None, 2.0),
        account_of("gateway", "x", 2.0),
        account_of("gateway", "y", 2.0),
    ]
    tasks = [asyncio.ensure_future(pool.run(account_of("first"), size, lambda: "first"))]
    await settle()
    for account in accounts:
        for _ in range(40):
            tasks.append(
                asyncio.ensure_future(pool.run(account, size, lambda key=account.key: key))
            )
    await settle()
    done = [await hands.finish() for _ in range(61)][1:]
    served = {account.key: done.count(account.key) for account in accounts}
    assert served == {"plain": 12, "double": 24, "gateway/x": 12, "gateway/y": 12}
    while hands.begun:
        await hands.finish()
    await asyncio.gather(*tasks)
