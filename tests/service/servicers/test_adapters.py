"""Adapters that operators load and unload, and that callers may use: with a fake engine."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import grpc
import pytest
from headrace.v1 import control_service_pb2 as pb
from headrace.v1 import generation_pb2
from headrace.v1 import generation_service_pb2 as rpc
from headrace.v1 import model_service_pb2 as models

from engine.contract.adapters import AdapterInfo
from engine.contract.errors import AdapterRefusedError, ConfigError
from engine.contract.loaded_adapters import AdapterBounds
from service.admission.served_adapters import MAX_AGE_S
from service.door.callers_file import parse_callers
from tests.service.fake_engine import FakeEngine, model_info, says
from tests.service.helpers import (
    DEADLINE_S,
    Harness,
    finished_of,
    kinds,
    refused,
    serving,
    spec,
    until,
)

pytestmark = pytest.mark.asyncio


def engine(**options: Any) -> FakeEngine:
    return FakeEngine(info=model_info(serves_adapters=True), **options)


async def load(h: Harness, name: str, source: str = "s", **more: Any) -> pb.LoadAdapterResponse:
    request = pb.LoadAdapterRequest(name=name, source=source, **more)
    found: pb.LoadAdapterResponse = await h.control.LoadAdapter(request, timeout=DEADLINE_S)
    return found


async def unload(h: Harness, name: str, timeout_s: int | None = None) -> int:
    request = pb.UnloadAdapterRequest(name=name)
    if timeout_s is not None:
        request.timeout.FromSeconds(timeout_s)
    answer = await h.control.UnloadAdapter(request, timeout=DEADLINE_S)
    return int(answer.live_requests)


async def listed(h: Harness, **options: Any) -> list[models.Adapter]:
    answer = await h.models.ListAdapters(models.ListAdaptersRequest(), **options)
    assert answer.total_size == len(answer.adapters)
    return list(answer.adapters)


def digest_of(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()


async def test_from_its_load_to_its_unload() -> None:
    async with serving(engine(script=says("x", eos=False), auto=False)) as h:
        assert await listed(h) == []
        found = await load(h, "team/a", "v1", pinned=True)
        assert found.adapter == models.Adapter(
            name="team/a", digest=digest_of("v1"), rank=8, size_bytes=1000, modules=14,
            state=models.ADAPTER_STATE_LOADED, pinned=True, base_model="base",
        )  # fmt: skip
        assert await listed(h) == [found.adapter]
        session = h.session()
        await session.add(spec(request_id="a", adapter="team/a"))
        await session.add(spec(request_id="b", model="team/a"))
        await session.add(spec(request_id="c"))
        await session.read_until(lambda _: len(session.events()) == 3)
        digests = {
            name: events[0].accepted.adapter_digest for name, events in session.events().items()
        }
        assert digests == {"a": digest_of("v1"), "b": digest_of("v1"), "c": ""}
        live = await h.control.ListRequests(pb.ListRequestsRequest())
        assert [one.adapter for one in live.requests] == ["team/a", "team/a", ""]
        await load(h, "team/a", "v2", replace=True)
        states = [(one.digest, one.state, one.live_requests) for one in await listed(h)]
        assert sorted(states) == sorted([
            (digest_of("v1"), models.ADAPTER_STATE_UNLOADING, 2),
            (digest_of("v2"), models.ADAPTER_STATE_LOADED, 0),
        ])  # fmt: skip
        assert await unload(h, "team/a") == 2
        error = await refused(h.generate(spec(adapter="team/a")))
        assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "ADAPTER_NOT_LOADED")
        await h.control.CancelRequests(
            pb.CancelRequestsRequest(
                requests=[pb.RequestName(identity="anonymous", request_id=one) for one in "abc"]
            )
        )
        h.engine.run()
        await session.end()
        await asyncio.sleep(MAX_AGE_S)
        assert await listed(h) == []


async def test_requests_that_have_it_end_cancelled_after_the_timeout() -> None:
    async with serving(engine(script=says("x", eos=False), auto=False)) as h:
        await load(h, "a")
        session = h.session()
        await session.add(spec(request_id="a", adapter="a"))
        await session.add(spec(request_id="b"))
        await session.read_until(lambda _: len(session.events()) == 2)
        assert await unload(h, "a", 0) == 1
        h.engine.step()
        await until(lambda: h.registry.live == 1)
        await h.control.CancelRequests(
            pb.CancelRequestsRequest(
                requests=[pb.RequestName(identity="anonymous", request_id="b")]
            )
        )
        h.engine.run()
        await session.end()
        assert finished_of(session.events()["a"]).reason == generation_pb2.FINISH_REASON_CANCELLED


async def test_kept_results_stay_when_their_adapter_has_gone() -> None:
    async with serving(engine(script=says("abc"))) as h:
        await load(h, "a", "v1")
        request = rpc.AddRequestRequest(spec=spec(request_id="kept", adapter="a"))
        await h.generation.AddRequest(request)
        await until(lambda: h.registry.live == 0)
        assert await unload(h, "a") == 0
        result = await h.generation.GetResult(rpc.GetResultRequest(request_id="kept"))
        assert result.events[0].accepted.adapter_digest == digest_of("v1")
        again = await h.generation.AddRequest(request)  # a retry is answered as before
        assert again.accepted.adapter_digest == digest_of("v1")


# ---- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["", "a" * 129, "a b", "a\n", "\0", "é", "-a", "../a", "fake", "other", "\u202e"]
)
async def test_names_that_no_adapter_may_have(name: str) -> None:
    async with serving(engine(), served_alias=("other",)) as h:
        call = h.control.LoadAdapter(pb.LoadAdapterRequest(name=name, source="s"))
        error = await refused(call)
        assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "name")
        assert not await listed(h)


async def test_a_start_with_an_adapter_that_is_named_like_the_model() -> None:
    fake = FakeEngine(
        info=model_info(serves_adapters=True, adapters=(AdapterInfo(name="fake", digest="00"),))
    )
    with pytest.raises(ConfigError, match="'fake', a name of the served model"):
        async with serving(fake):
            pass


async def test_refusals_have_their_codes() -> None:
    fake = engine(adapter_bounds=AdapterBounds(2500, 100))
    async with serving(fake) as h:
        await load(h, "a", pinned=True)
        error = await refused(load(h, "a"))
        assert (error.code, error.reason) == (grpc.StatusCode.ALREADY_EXISTS, "ADAPTER_LOADED")
        await load(h, "b", "t", pinned=True)
        error = await refused(load(h, "c", "u"))
        assert (error.code, error.reason) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED, "ADAPTERS_FULL",
        )  # fmt: skip
        assert error.details["ErrorInfo"].metadata["missing_bytes"] == "500"
        await load(h, "b", "t", replace=True)  # no longer pinned
        assert list((await load(h, "c", "u")).evicted) == ["b"]
        error = await refused(h.generate(spec(adapter="b")))
        assert error.code is grpc.StatusCode.NOT_FOUND
        error = await refused(unload(h, "b"))
        assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "ADAPTER_NOT_LOADED")
        error = await refused(h.control.LoadAdapter(pb.LoadAdapterRequest(name="d")))
        assert error.field == "source"
        for seconds in (-1, 90_000):
            error = await refused(unload(h, "c", seconds))
            assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "timeout")

        async def damaged(load: object) -> None:
            raise AdapterRefusedError("it is damaged")

        fake.load_adapter = damaged  # type: ignore[method-assign, assignment]
        error = await refused(load(h, "e"))
        assert (error.code, error.reason) == (
            grpc.StatusCode.FAILED_PRECONDITION, "ADAPTER_REFUSED",
        )  # fmt: skip
        assert error.message == "it is damaged"


async def test_while_the_engine_is_gone_and_while_the_server_drains() -> None:
    fake = engine(
        restartable=True, load_gate=asyncio.Event(), script=says("x", eos=False), auto=False
    )
    assert fake.load_gate is not None
    fake.load_gate.set()
    async with serving(fake) as h:
        await load(h, "a")
        fake.load_gate.clear()
        fake.die(RuntimeError("gone"))
        await until(lambda: h.server.state.phase.value == "restarting")
        calls = [
            load(h, "b"), unload(h, "a"), listed(h), h.generate(spec(adapter="a")),
            h.generate(spec(model="a")),
        ]  # fmt: skip
        for call in calls:
            error = await refused(call)
            assert error.code is grpc.StatusCode.UNAVAILABLE, error.message
        fake.info = model_info(serves_adapters=True, adapters=fake.adapters.told())
        fake.load_gate.set()
        await until(lambda: h.server.state.phase.value == "ready")
        session = h.session()
        await session.add(spec(request_id="r", adapter="a"))
        await session.read()
        await h.control.Drain(pb.DrainRequest())
        error = await refused(load(h, "b"))
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        assert await unload(h, "a", 0) == 1  # which ends what the drain waits for


async def test_an_engine_that_is_paused_loads_and_unloads() -> None:
    async with serving(engine()) as h:
        await h.control.Pause(pb.PauseRequest())
        await load(h, "a")
        assert await unload(h, "a") == 0


async def test_a_load_whose_caller_has_gone_is_completed() -> None:
    fake, gate = engine(), asyncio.Event()
    plain = fake.load_adapter

    async def slow(load: Any) -> Any:
        await gate.wait()
        return await plain(load)

    fake.load_adapter = slow  # type: ignore[method-assign]
    async with serving(fake) as h:
        call = h.control.LoadAdapter(pb.LoadAdapterRequest(name="a", source="s"))
        await until(lambda: h.server.control.tasks)
        call.cancel()
        gate.set()
        await until(lambda: not h.server.control.tasks)
        assert (await h.generate(spec(adapter="a"))).accepted.adapter_digest == digest_of("s")


async def test_without_adapters_the_list_is_empty() -> None:
    async with serving(FakeEngine()) as h:
        assert await listed(h) == []
        error = await refused(h.generate(spec(adapter="a")))
        assert error.code is grpc.StatusCode.UNIMPLEMENTED


# ---- pages -----------------------------------------------------------------------------------


async def test_pages_do_not_repeat_or_skip_what_stays() -> None:
    async with serving(engine()) as h:
        for index in range(7):
            await load(h, f"n{index}", f"s{index}")
        request, found = models.ListAdaptersRequest(page_size=2), []
        while True:
            answer = await h.models.ListAdapters(request)
            found += [one.name for one in answer.adapters]
            if not answer.next_page_token:
                break
            if len(found) == 2:
                await unload(h, "n1")  # the last one of this page
                await unload(h, "n4")
                await load(h, "n00", "s")
            request.page_token = answer.next_page_token
        assert found == ["n0", "n1", "n2", "n3", "n5", "n6"]
        whole = await h.models.ListAdapters(models.ListAdaptersRequest(page_size=2**32 - 1))
        assert (len(whole.adapters), whole.next_page_token) == (6, "")


async def test_a_page_may_end_between_two_contents_of_a_name() -> None:
    async with serving(engine(script=says("x", eos=False), auto=False)) as h:
        await load(h, "a", "v1")
        session = h.session()
        await session.add(spec(request_id="r", adapter="a"))
        await session.read()
        await load(h, "a", "v2", replace=True)
        found, token = [], ""
        for _ in range(2):
            request = models.ListAdaptersRequest(page_size=1, page_token=token)
            answer = await h.models.ListAdapters(request)
            found += [one.digest for one in answer.adapters]
            token = answer.next_page_token
        assert (found, token) == (sorted(map(digest_of, ("v1", "v2"))), "")


@pytest.mark.parametrize("token", ["r7", "/", "00/", "g/a", "\n", "/" * 200])
async def test_tokens_that_are_of_no_page(token: str) -> None:
    async with serving(engine()) as h:
        request = models.ListAdaptersRequest(page_token=token)
        error = await refused(h.models.ListAdapters(request))
        assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "page_token")


async def test_many_lists_are_one_question() -> None:
    fake = engine()
    async with serving(fake) as h:
        await asyncio.gather(*(listed(h) for _ in range(50)))
        before = fake.listings
        assert before < 25
        await load(h, "a")
        assert len(await listed(h)) == 1  # what was asked before the change answers nothing


# ---- who may ---------------------------------------------------------------------------------


def callers(path: Path, **adapters: str | None) -> str:
    """A file of callers, whose tokens are their names."""
    path.write_text(
        "".join(
            f'[[callers]]\nidentity = "{name}"\nservices = "*"\n'
            f'token_sha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\n'
            + ("" if allowed is None else f"adapters = {allowed}\n")
            for name, allowed in adapters.items()
        )
    )
    path.chmod(0o640)
    return str(path)


async def test_a_caller_sees_what_it_may_use_and_nothing_else(tmp_path: Path) -> None:
    file = callers(
        tmp_path / "callers.toml", all=None, none="[]", some='["a", "team-*"]', ops='["*"]'
    )
    async with serving(engine(), auth_file=file) as h:

        def who(name: str) -> dict[str, Any]:
            return {"metadata": (("authorization", f"Bearer {name}"),), "timeout": DEADLINE_S}

        for name in ("a", "b", "team-1", "team"):
            request = pb.LoadAdapterRequest(name=name, source=name)
            await h.control.LoadAdapter(request, **who("ops"))
        for name, seen in (
            ("all", ["a", "b", "team", "team-1"]), ("none", []), ("some", ["a", "team-1"]),
        ):  # fmt: skip
            found = await listed(h, **who(name))
            assert [one.name for one in found] == seen
            for adapter in ("a", "b", "team", "team-1", "nobody"):
                for field in ("adapter", "model"):
                    message = rpc.GenerateRequest(spec=spec(**{field: adapter}))
                    call = h.generation.Generate(message, **who(name))
                    if adapter in seen:
                        assert (await call).accepted.adapter_digest == digest_of(adapter)
                        continue
                    error = await refused(call)
                    nobody = rpc.GenerateRequest(spec=spec(**{field: "zzzz"}))
                    other = await refused(h.generation.Generate(nobody, **who(name)))
                    told = error.message.replace(repr(adapter), "'zzzz'")
                    assert (error.code, error.reason) == (other.code, other.reason)
                    assert other.code is grpc.StatusCode.NOT_FOUND
                    assert told == other.message, "its words tell that it exists"


async def test_a_session_follows_the_file(tmp_path: Path) -> None:
    file = callers(tmp_path / "callers.toml", some='["a"]')
    options = {"metadata": (("authorization", "Bearer some"),)}
    async with serving(engine(script=says("abc")), auth_file=file) as h:
        await h.control.LoadAdapter(pb.LoadAdapterRequest(name="a", source="s"), **options)
        session = h.session(**options)
        await session.add(spec(request_id="one", adapter="a"))
        await session.read_until(lambda _: "finished" in kinds(session.events()["one"]))
        callers(tmp_path / "callers.toml", some='["b-*"]')
        await session.add(spec(request_id="two", adapter="a"), 7)
        messages = await session.end()
        [rejection] = [one for message in messages for one in message.rejections]
        assert rejection.command_id == 7
        assert "no adapter with the name 'a'" in rejection.status.message


@pytest.mark.parametrize("value", ['["a*b"]', '[""]', '["team-**"]', "[1]", "5", str(["a"] * 257)])
async def test_entries_that_name_no_adapters(value: str) -> None:
    text = f'[[callers]]\nidentity = "a"\nservices = "*"\ncertificate = "a"\nadapters = {value}\n'
    with pytest.raises(ConfigError, match=r"callers\[0\].adapters"):
        parse_callers(text)


async def test_a_certificate_of_several_entries_may_use_what_any_of_them_may() -> None:
    table = parse_callers(
        "".join(
            f'[[callers]]\nidentity = "one"\nservices = "*"\ncertificate = "{name}"\n'
            f"adapters = {allowed}\n"
            for name, allowed in (("x", '["a"]'), ("y", '["b-*"]'))
        )
    )
    [caller] = table.by_names(["x", "y"])
    assert [caller.may_use(name) for name in ("a", "b-1", "b", "c")] == [True, True, False, False]
