"""Where metrics go: OTLP by gRPC and by HTTP, and Prometheus' page, as real receivers get them."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from headrace.v1 import control_service_pb2 as control
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_service_pb2 as rpc

from engine.contract.errors import ConfigError, QueueFullError
from engine.contract.stats import AdapterStats, EngineStats
from service.telemetry import page
from service.telemetry.page import PLACES
from service.telemetry.telemetry_config import TelemetryConfig
from tests.service.fake_engine import FakeEngine, model_info, says
from tests.service.helpers import DEADLINE_S, refused, serving, spec, until
from tests.service.receivers import (
    PAGE,
    RECEIVERS,
    attributes_of,
    page_of,
    samples,
    scrape,
    scraped,
    value,
)


class Busy(FakeEngine):
    """An engine with figures."""

    async def stats(self) -> EngineStats:
        return EngineStats(
            running=3, waiting=2, blocks_total=40, blocks_used=10, steps=5, prompt_tokens=6,
            generated_tokens=7, requests_accepted=8, requests_finished=9, preemptions=10,
            last_step_s=0.5, prefix_queries=16, prefix_hits=4, block_size=16,
        )  # fmt: skip


async def test_prometheus_scrapes_what_happened() -> None:
    engine = Busy(script=says("abc"))
    async with serving(engine, telemetry=PAGE, served_name="mine") as h:
        for _ in range(3):
            await h.generate(spec())
        engine.refuse_next.append(QueueFullError(5, 1.0))
        await refused(h.generate(spec()))
        session = h.session()
        await session.add(spec(adapter="x"))
        await session.read()
        text = await scraped(h.server)
        while ("headrace_steps_total", frozenset()) not in samples(text):
            text = await scraped(h.server)  # the engine is asked once a second
        picker = await scraped(h.server, "/picker")
        await session.end()
    assert value(text, "gen_ai_server_request_duration_seconds_count") == 3
    assert value(text, "headrace_kv_cache_usage") == 0.25
    assert value(text, "headrace_requests_waiting") == 2
    method = "headrace.v1.GenerationService/Generate"
    count = "rpc_server_call_duration_seconds_count"
    assert value(text, count, rpc_method=method, rpc_response_status_code="OK") == 3
    assert value(text, count, rpc_response_status_code="RESOURCE_EXHAUSTED") == 1
    refusals = "headrace_refusals_total"
    assert value(text, refusals, headrace_refusal_reason="QUEUE_FULL", rpc_method=method) == 1
    in_session = {"rpc_method": "headrace.v1.GenerationService/StreamResult"}
    assert value(text, refusals, headrace_refusal_reason="UNSUPPORTED_FIELD", **in_session) == 1
    assert value(text, "headrace_server_phase", headrace_server_phase="ready") == 1
    assert value(text, "headrace_server_phase", headrace_server_phase="loading") == 0
    startup = "headrace_startup_duration_seconds"
    assert value(text, startup, headrace_startup_phase="weights") == 3.5  # of the fake engine
    assert value(text, startup, headrace_startup_phase="process") == 0
    assert value(text, startup, headrace_startup_phase="front_end") >= 0
    assert value(text, "target_info", service_name="headrace") == 1
    # What the endpoint picker of the Gateway API Inference Extension reads.
    model = {"model_name": "mine"}
    assert value(picker, "vllm:num_requests_waiting", **model) == 2
    assert value(picker, "vllm:num_requests_running", **model) == 3
    assert value(picker, "vllm:kv_cache_usage_perc", **model) == 0.25
    assert value(picker, "vllm:cache_config_info", block_size="16", num_gpu_blocks="40") == 1


async def test_pages_tell_of_adapters() -> None:
    """They are told as they are loaded, unloaded and used."""

    class Engine(FakeEngine):
        async def stats(self) -> EngineStats:
            told = self.adapters.figures() | {"max_adapters": 70}
            rows = (AdapterStats("b", 1, 0, 20, 30), AdapterStats("gone", 0, 2, 4, 5))
            return EngineStats(**told, by_adapter=rows, other_adapters=AdapterStats("", 0, 0, 1, 2))

    async with serving(
        Engine(info=model_info(serves_adapters=True), script=says("abc")), telemetry=PAGE
    ) as h:

        async def load(name: str) -> None:
            await h.control.LoadAdapter(control.LoadAdapterRequest(name=name, source=name))

        before = time.time()
        for name in ("b", "a"):
            await load(name)
        text = await scraped(h.server)
        while not samples(text).get(("headrace_adapters", frozenset())):
            text = await scraped(h.server)  # the engine is asked once a second
        picker = await scraped(h.server, "/picker")
        await h.control.UnloadAdapter(control.UnloadAdapterRequest(name="b"))
        later = await scraped(h.server, "/picker")
    for name, of_b, of_others in (("running", 1, 0), ("tokens_prompt_total", 20, 1)):
        assert value(text, f"headrace_adapters_{name}", headrace_adapter="b") == of_b
        assert value(text, f"headrace_adapters_{name}", headrace_adapters="other") == of_others
    assert value(text, "headrace_adapters_load_duration_seconds_count") == 2
    info = "vllm:lora_requests_info"
    labels = {"max_lora": "70", "waiting_lora_adapters": "gone"}
    assert before <= value(picker, info, running_lora_adapters="a,b", **labels) <= time.time()
    assert value(later, info, running_lora_adapters="a", **labels) >= before


async def test_a_server_without_adapters_tells_a_picker_of_none() -> None:
    async with serving(Busy(script=says("abc")), telemetry=PAGE) as h:
        picker = await scraped(h.server, "/picker")
        while "vllm:cache_config_info" not in picker:
            picker = await scraped(h.server, "/picker")
    assert "lora" not in picker


async def test_conversations_are_told_apart() -> None:
    engine = FakeEngine(script=says("abc"))
    asked = pb.GenerationSpec(chat={"messages": [{"role": pb.CHAT_ROLE_USER, "content": "hi"}]})
    async with serving(engine, telemetry=PAGE) as h:
        for _ in range(2):
            await h.generate(asked)
        await h.generate(spec())
        engine.refuse_next.append(QueueFullError(5, 1.0))
        await refused(h.generate(asked))
        await refused(h.generate(pb.GenerationSpec(chat={})))
        text = await scraped(h.server)
        assert h.server._telemetry.metrics is not None
        assert not h.server._telemetry.metrics._chats
    for name in ("request_duration", "time_to_first_token", "time_per_output_token"):
        count = f"gen_ai_server_{name}_seconds_count"
        assert value(text, count, gen_ai_operation_name="chat") == 2
        assert value(text, count, gen_ai_operation_name="text_completion") == 1


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
async def test_promtool_passes_the_page() -> None:
    async with serving(Busy(script=says("abc")), telemetry=PAGE) as h:
        await h.generate(spec())
        text = await scraped(h.server)
        while "headrace_steps_total" not in text:
            text = await scraped(h.server)
    done = await asyncio.to_thread(
        subprocess.run,
        ["promtool", "check", "metrics"],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


async def test_calls_are_counted_by_how_they_ended() -> None:
    engine = FakeEngine(script=says("abc"), auto=False)
    async with serving(engine, telemetry=PAGE) as h:
        call = h.generation.GenerateStream(rpc.GenerateStreamRequest(spec=spec()))
        await call.read()
        call.cancel()
        await refused(h.generation.Generate(rpc.GenerateRequest(spec=spec()), timeout=0.2))

        async def codes() -> dict[str, float]:
            return {
                dict(labels)["rpc_response_status_code"]: number
                for (name, labels), number in samples(await scraped(h.server)).items()
                if name == "rpc_server_call_duration_seconds_count"
            }

        async with asyncio.timeout(DEADLINE_S):
            while len(await codes()) < 2:
                pass
        assert await codes() == {"CANCELLED": 1, "DEADLINE_EXCEEDED": 1}


async def test_all_methods_that_there_are_not_are_one(tmp_path: Path) -> None:
    callers = tmp_path / "callers.toml"
    digest = hashlib.sha256(b"secret").hexdigest()
    callers.write_text(
        f'[[callers]]\nidentity = "a"\nservices = ["*"]\ntoken_sha256 = "{digest}"\n'
    )
    async with serving(telemetry=PAGE, auth_file=str(callers)) as h:
        known = (("authorization", "Bearer secret"),)
        for i in range(30):
            call = h.channel.unary_unary(f"/nobody.Has{i}/This{i}")
            assert (await refused(call(b"", metadata=known))).code is grpc.StatusCode.UNIMPLEMENTED
        stranger = await refused(h.channel.unary_unary("/nobody.Has/This")(b""))
        assert stranger.code is grpc.StatusCode.UNAUTHENTICATED

        async def counts() -> dict[tuple[str, str], float]:
            return {
                (has["rpc_method"], has["rpc_response_status_code"]): number
                for (name, labels), number in samples(await scraped(h.server)).items()
                if name == "rpc_server_call_duration_seconds_count" and (has := dict(labels))
            }

        async with asyncio.timeout(DEADLINE_S):
            while sum((await counts()).values()) < 31:
                pass
        assert await counts() == {("_OTHER", "UNIMPLEMENTED"): 30, ("_OTHER", "UNAUTHENTICATED"): 1}
    assert "nobody" not in str(h.server.state.refusals.counts())


async def test_openmetrics_is_spoken_too_and_other_paths_are_not_found() -> None:
    async with serving(telemetry=PAGE) as h:
        kind, text = await asyncio.to_thread(
            scrape, page_of(h.server), "application/openmetrics-text; version=1.0.0"
        )
        assert kind.startswith("application/openmetrics-text")
        assert text.endswith("# EOF\n")
        url = page_of(h.server).removesuffix("/metrics") + "/etc/passwd"
        with pytest.raises(OSError, match="404"):
            await asyncio.to_thread(scrape, url)


async def test_strangers_cannot_make_the_page_hold_more_than_its_places() -> None:
    async with serving(telemetry=PAGE) as h:
        host, _, port = page_of(h.server).removeprefix("http://").partition("/")[0].partition(":")
        silent = [
            await asyncio.to_thread(socket.create_connection, (host, int(port)))
            for _ in range(PLACES)
        ]
        one_more = await asyncio.to_thread(socket.create_connection, (host, int(port)))
        one_more.settimeout(DEADLINE_S)
        assert await asyncio.to_thread(one_more.recv, 1) == b""  # closed
        for connection in (*silent, one_more):
            connection.close()

        async def is_served() -> bool:
            try:
                return "target_info" in await scraped(h.server)
            except OSError:
                return False

        async with asyncio.timeout(DEADLINE_S):
            while not await is_served():
                pass


async def test_who_sends_a_byte_now_and_then_keeps_no_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page, "PATIENCE_S", 1.0)
    async with serving(telemetry=PAGE) as h:
        host, _, port = page_of(h.server).removeprefix("http://").partition("/")[0].partition(":")
        slow = [socket.create_connection((host, int(port))) for _ in range(PLACES)]

        def feed() -> bool:
            """Until the server has ended each of them; whether it has."""
            ends, left = time.monotonic() + 10, list(slow)
            while left and time.monotonic() < ends:
                for connection in list(left):
                    try:
                        connection.sendall(b"G")
                    except OSError:
                        left.remove(connection)
                time.sleep(0.05)
            for connection in slow:
                connection.close()
            return not left

        assert await asyncio.to_thread(feed)
        assert "target_info" in await scraped(h.server)


async def test_a_thread_that_cannot_be_started_takes_no_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving(telemetry=PAGE) as h:
        host, _, port = page_of(h.server).removeprefix("http://").partition("/")[0].partition(":")

        def refuse(*_: object) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as refusing:
            refusing.setattr(page.ThreadingHTTPServer, "process_request", refuse)
            for _ in range(PLACES + 1):
                with socket.create_connection((host, int(port)), DEADLINE_S) as connection:
                    assert await asyncio.to_thread(connection.recv, 1) == b""
        assert "target_info" in await scraped(h.server)


async def test_a_page_whose_port_is_taken_is_refused_at_the_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = TelemetryConfig(
            metrics=("prometheus",), prometheus_host="127.0.0.1", prometheus_port=port
        )
        with pytest.raises(ConfigError, match=f"is {port}.*choose another"):
            async with serving(telemetry=config):
                pass


@pytest.mark.parametrize("protocol", list(RECEIVERS))
async def test_a_receiver_and_the_page_are_told_the_same(
    protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RECEIVERS[protocol]() as received:
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": received.endpoint,
            "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
            "OTEL_EXPORTER_OTLP_HEADERS": "x-key=s3cret",
            "OTEL_TRACES_EXPORTER": "none",
            "OTEL_METRICS_EXPORTER": "otlp,prometheus",
            "OTEL_METRIC_EXPORT_INTERVAL": "50",
            "OTEL_EXPORTER_PROMETHEUS_PORT": "0",
            "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test",
        }
        for name, text in environment.items():
            monkeypatch.setenv(name, text)
        config = TelemetryConfig.read(environment)
        async with serving(FakeEngine(script=says("abc")), telemetry=config) as h:
            for _ in range(5):
                await h.generate(spec())
            name = "gen_ai.server.request.duration"
            await until(lambda: sum(point.count for point in received.last(name)) == 5)
            page = await scraped(h.server)
        [point] = received.last(name)  # the last export, at the end
        assert received.headers["x-key"] == "s3cret"
        resource = attributes_of(received.metrics[-1].resource_metrics[0].resource)
        assert (resource["service.name"], resource["deployment.environment.name"]) == (
            "headrace",
            "test",
        )
        prefix = "gen_ai_server_request_duration_seconds"
        assert value(page, f"{prefix}_count") == point.count
        assert value(page, f"{prefix}_sum") == pytest.approx(point.sum)
        assert value(page, "target_info", deployment_environment_name="test") == 1
        told = attributes_of(point)
        assert told["gen_ai.response.finish_reasons"] == "stop"


async def test_what_callers_send_makes_no_series() -> None:
    """Of distinct models, labels and ids not one is in the metrics."""
    async with serving(FakeEngine(script=says("a")), telemetry=PAGE, served_name="mine") as h:

        def strange(i: int) -> Any:
            return spec(request_id=f"id-{i}", model=f"m-{i}", labels={f"l-{i}": f"v-{i}"})

        def known(i: int) -> Any:
            return spec(request_id=f"id-{i}", model="mine", labels={f"l-{i}": f"v-{i}"})

        async def both(i: int) -> None:
            assert (await refused(h.generate(strange(i)))).code is grpc.StatusCode.NOT_FOUND
            await h.generate(known(i))

        async def all_of(numbers: range) -> set[Any]:
            for first in numbers[::50]:
                await asyncio.gather(*(both(i) for i in range(first, first + 50)))
            return set(samples(await scraped(h.server)))

        before = await all_of(range(0, 100))
        async with asyncio.timeout(DEADLINE_S):
            while not any(name.startswith("headrace_steps") for name, _ in before):
                before = set(samples(await scraped(h.server)))
        assert await all_of(range(100, 400)) == before
