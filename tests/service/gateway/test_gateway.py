"""What the gateways' protocol tells of the server, its model and its tokenizer; and who may call
it.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import random
import zipfile
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from service.gateway.servicer import VllmEngineServicer
from service.gateway.throughput import Throughput
from service.gateway.tokenizer_archive import make_archive
from tests.service.door.callers_file import TOKENS, bearer, entry, replace
from tests.service.fake_engine import EOS, FakeEngine, model_info
from tests.service.gateway_stub import (
    NAME,
    asks,
    common,
    failed,
    gateway,
    pb,
)
from tests.service.helpers import refused, until


async def test_reflection_and_health_have_it() -> None:
    async with gateway() as (h, stub):
        health = health_pb2_grpc.HealthStub(h.channel)
        status = await health.Check(health_pb2.HealthCheckRequest(service=NAME))
        assert status.status == health_pb2.HealthCheckResponse.SERVING
        assert (await stub.HealthCheck(pb.HealthCheckRequest())).healthy
        reflect = h.channel.stream_stream(
            "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        asked = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=f"{NAME}.Generate"),
        ]
        call = reflect(iter(asked))
        listed = (await call.read()).list_services_response.service
        assert NAME in [service.name for service in listed]
        assert (await call.read()).file_descriptor_response.file_descriptor_proto


async def test_health_says_when_not_to_send() -> None:
    gate = asyncio.Event()
    async with gateway(FakeEngine(auto=False, load_gate=gate), ready=False) as (h, stub):
        error = await refused(stub.HealthCheck(pb.HealthCheckRequest()))
        assert error.reason == "LOADING"
        gate.set()
        await h.server.ready()
        assert (await stub.HealthCheck(pb.HealthCheckRequest())).healthy
        call = stub.Generate(asks(request_id="mine", stream=True))
        await until(lambda: h.engine.submitted)
        h.server.begin_drain()
        error = await refused(stub.HealthCheck(pb.HealthCheckRequest()))
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        assert (await failed(stub, asks())).reason == "DRAINING"
        assert (await stub.GetLoads(pb.GetLoadsRequest())).loads[0].num_running_reqs == 0
        await stub.Abort(pb.AbortRequest(request_ids=["mine"]))  # still there
        h.engine.run()
        [*_, last] = [answer async for answer in call]
        assert last.complete.finish_reason == "abort"


@pytest.mark.parametrize(
    ("method", "request_type"),
    [
        ("Embed", "EmbedRequest"),
        ("FlushCache", "FlushCacheRequest"),
        ("StartProfile", "StartProfileRequest"),
        ("StopProfile", "StopProfileRequest"),
        ("SubscribeKvEvents", "SubscribeKvEventsRequest"),
    ],
)
async def test_what_is_not_served_is_named(method: str, request_type: str) -> None:
    async with gateway() as (_, stub):
        make = getattr(pb, request_type, None) or getattr(common, request_type)
        call = getattr(stub, method)(make())
        error = await refused(call.read() if method == "SubscribeKvEvents" else call)
        assert (error.code, error.reason) == (
            grpc.StatusCode.UNIMPLEMENTED,
            "METHOD_NOT_SERVED",
        )
        assert f"{NAME}/{method} is not served here: " in error.message


async def test_the_model_and_the_server_are_described() -> None:
    async with gateway(FakeEngine(auto=False, blocks=(10, 40)), served_name="nice") as (h, stub):
        info = await stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (info.served_model_name, info.model_path) == ("nice", "nice")
        assert info.tokenizer_path == "/dev/null"  # what a gateway would look for at the hub
        assert info.is_generation
        assert not info.supports_vision
        assert (info.max_context_length, info.max_req_input_len, info.vocab_size) == (
            2048, 2047, 258,
        )  # fmt: skip
        assert list(info.architectures) == ["FakeForCausalLM"]
        assert list(info.eos_token_ids) == [EOS]
        assert info.bos_token_id == 257
        calls = [stub.Generate(asks(stream=True)) for _ in range(3)]
        await until(lambda: h.engine.num_live == 3)
        server = await stub.GetServerInfo(pb.GetServerInfoRequest())
        assert (server.active_requests, server.is_paused) == (3, False)
        assert (server.data_parallel_size, server.max_num_seqs) == (1, 64)
        assert server.constrained_decoding_start == "first_token"
        await h.server.control.pause("")
        assert (await stub.GetServerInfo(pb.GetServerInfoRequest())).is_paused
        await h.server.control.resume()
        h.engine.step()
        loads = await stub.GetLoads(pb.GetLoadsRequest(include=["core"]))
        assert loads.dp_rank_count == 1
        [load] = loads.loads
        assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (3, 0, 3)
        assert (load.token_usage, load.max_running_requests) == (0.25, 64)
        for call in calls:
            call.cancel()


async def test_those_who_ask_at_once_share_one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    asked = callers = 0
    stats, snapshot = engine.stats, VllmEngineServicer._snapshot

    async def note(servicer: VllmEngineServicer) -> Any:
        nonlocal callers
        callers += 1
        return await snapshot(servicer)

    async def count() -> Any:
        nonlocal asked
        asked += 1
        await until(lambda: callers == 8)
        return await stats()

    monkeypatch.setattr(VllmEngineServicer, "_snapshot", note)

    async with gateway(engine) as (_, stub):
        engine.stats = count  # type: ignore[method-assign]
        calls = [stub.GetLoads(pb.GetLoadsRequest()) for _ in range(8)]
        for call in calls:
            assert (await call).loads
    assert asked == 1


async def test_an_engine_that_does_not_answer_has_no_load() -> None:
    async with gateway() as (h, stub):
        h.engine.die(RuntimeError("gone"))
        error = await refused(stub.GetLoads(pb.GetLoadsRequest()))
        assert error.code is grpc.StatusCode.UNAVAILABLE


def test_throughput_is_over_two_seconds_or_more() -> None:
    rate = Throughput()
    readings = [(0.0, 100), (1.0, 150), (2.0, 200), (2.5, 900), (6.0, 600), (8.0, 640), (18.0, 640)]
    told = [rate.of(moment, tokens) for moment, tokens in readings]
    assert told == [0.0, 0.0, 50.0, 50.0, 100.0, 20.0, 0.0]
    assert rate.of(18.1, 5) == 0.0  # the engine was started again
    assert rate.of(20.1, 25) == 10.0


async def test_the_tokenizers_files_come_in_parts(tmp_path: Path) -> None:
    files = {
        "tokenizer.json": random.Random(1).randbytes(200_000),
        "tokenizer_config.json": b"{}",
        "chat_template.jinja": b"{{ messages }}",
        "config.json": b'{"model_type": "fake"}',
    }
    for name, content in {**files, "model.safetensors": b"secret", "notes.txt": b"mine"}.items():
        (tmp_path / name).write_bytes(content)
    async with gateway(FakeEngine(info=model_info(path=str(tmp_path)))) as (_, stub):
        for _ in range(2):
            call = stub.GetTokenizer(common.GetTokenizerRequest())
            parts = [part async for part in call]
            data = b"".join(part.data for part in parts)
            assert len(parts) > 3
            assert max(len(part.data) for part in parts) <= 64 << 10
            assert [part.sha256 for part in parts[:-1]] == [""] * (len(parts) - 1)
            assert parts[-1].sha256 == hashlib.sha256(data).hexdigest()
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                assert {name: archive.read(name) for name in archive.namelist()} == files


def test_the_same_files_make_the_same_archive(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text("{}")
    (tmp_path / "two" / "notes.txt").write_text("not of the tokenizer")
    assert make_archive(tmp_path / "one") == make_archive(tmp_path / "two")


async def test_callers_need_the_permission_and_keep_their_own(tmp_path: Path) -> None:
    path = tmp_path / "callers.toml"
    gateways = '["VllmEngine"]\nweight = 3\nmay_call_for_others = true'
    replace(
        path,
        entry("alice", gateways, TOKENS["alice"])
        + entry("bob", '["VllmEngine"]', TOKENS["bob"])
        + entry("probe", '["GenerationService"]', TOKENS["probe"]),
    )
    async with gateway(FakeEngine(auto=False), auth_file=str(path)) as (h, stub):
        error = await refused(stub.HealthCheck(pb.HealthCheckRequest()))
        assert error.code is grpc.StatusCode.UNAUTHENTICATED
        error = await failed(stub, asks(), metadata=bearer("probe"))
        assert error.code is grpc.StatusCode.PERMISSION_DENIED
        named = (*bearer("alice"), ("headrace-on-behalf-of", "carol"))
        call = stub.Generate(asks(request_id="hers", stream=True), metadata=named)
        await until(lambda: h.engine.num_live)
        [request] = h.engine.submitted
        assert (request.caller, request.caller_group, request.weight) == ("alice/carol", "alice", 3)
        await stub.Abort(pb.AbortRequest(request_ids=["hers"]), metadata=bearer("bob"))
        assert not h.engine.cancelled
        await stub.Abort(pb.AbortRequest(request_ids=["hers"]), metadata=bearer("alice"))
        h.engine.run()
        assert [answer async for answer in call][-1].complete.finish_reason == "abort"
