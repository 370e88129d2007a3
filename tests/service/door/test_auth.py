"""Who may call: tokens, services, identities that do not see each other, the file that changes."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from headrace.v1 import generation_service_pb2 as rpc
from headrace.v1 import model_service_pb2 as model
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from typer.testing import CliRunner

from engine.contract.errors import ConfigError, HeadraceError
from service.admission.phases import Phase
from service.command import cli
from service.config import ServiceConfig
from service.door.auth import Authenticator
from service.door.callers_file import SERVICES, parse_callers
from service.errors.call_errors import NotGrantedError, UnknownCallerError
from service.server import HeadraceServer
from service.telemetry import setup as telemetry
from service.telemetry.request_spans import Spans
from tests.service.door.callers_file import (
    CALLERS,
    TOKENS,
    UNAUTHENTICATED,
    add_request,
    bearer,
    entry,
    guarded,
    replace,
)
from tests.service.fake_engine import FakeEngine, says
from tests.service.helpers import Harness, Refused, Session, check_course, refused, serving, spec
from tests.service.helpers import until as until_true
from tests.service.readme import ROOT

GENERATE = "/headrace.v1.GenerationService/Generate"


def get_result(h: Harness, who: str, request_id: str) -> Any:
    message = rpc.GetResultRequest(request_id=request_id, until_done=True, wait={"seconds": 10})
    return h.generation.GetResult(message, metadata=bearer(who))


async def generate_with(h: Harness, *metadata: tuple[str, str | bytes]) -> Refused:
    message = rpc.GenerateRequest(spec=spec())
    error = await refused(h.generation.Generate(message, metadata=metadata))
    for token in TOKENS.values():
        assert token not in error.message
        assert token.encode() not in error.status.SerializeToString()
    return error


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ([], "TOKEN_MISSING"),
        ([("authorization-bin", b"Bearer alice's secret")], "TOKEN_MISSING"),
        ([("authorization", "")], "TOKEN_INVALID"),
        ([("authorization", "Bearer")], "TOKEN_INVALID"),
        ([("authorization", "Bearer ")], "TOKEN_INVALID"),
        ([("authorization", "Bearer wrong")], "TOKEN_INVALID"),
        ([("authorization", "Bearer alice's secre")], "TOKEN_INVALID"),
        ([("authorization", "Bearer alice's secret x")], "TOKEN_INVALID"),
        ([("authorization", "alice's secret")], "TOKEN_INVALID"),
        ([("authorization", "Basic alice's secret")], "TOKEN_INVALID"),
        ([("authorization", hashlib.sha256(b"alice's secret").hexdigest())], "TOKEN_INVALID"),
        ([*bearer("alice"), *bearer("alice")], "TOKEN_INVALID"),
        ([*bearer("alice"), ("authorization", "Bearer wrong")], "TOKEN_INVALID"),
    ],
)
async def test_who_is_not_known_is_refused(
    callers: Path, metadata: list[tuple[str, str | bytes]], reason: str
) -> None:
    async with guarded(callers) as h:
        error = await generate_with(h, *metadata)
        assert (error.code, error.reason) == (UNAUTHENTICATED, reason)
        assert not h.engine.num_live


async def test_every_kind_of_rpc_is_refused_and_reads_nothing(callers: Path) -> None:
    async with guarded(callers) as h:
        add = rpc.AddRequestRequest(spec=spec())
        for call in (
            h.generation.AddRequest(add),
            h.generation.GenerateStream(rpc.GenerateStreamRequest(spec=spec())).read(),
            h.generation.StreamResult().read(),
            h.models.GetModel(model.GetModelRequest()),
            # What would be refused otherwise is not even looked at; nor is a large message.
            h.channel.unary_unary(GENERATE)(b"\xff not protobuf"),
            h.channel.unary_unary(GENERATE)(bytes(3 << 20)),
            h.channel.unary_unary("/headrace.v1.GenerationService/Nothing")(b""),
            h.channel.unary_unary("/nothing.Nothing/Nothing")(b""),
        ):
            error = await refused(call)
            assert (error.code, error.reason) == (UNAUTHENTICATED, "TOKEN_MISSING")
        assert not h.registry.streams


async def test_the_right_token_and_the_wrong_service(callers: Path) -> None:
    async with guarded(callers, FakeEngine(script=says("x"))) as h:
        lower = [("authorization", f"bearer {TOKENS['alice']}")]
        message = rpc.GenerateRequest(spec=spec())
        result = await h.generation.Generate(message, metadata=lower)
        assert result.choices[0].text == "x"
        assert await h.models.GetModel(model.GetModelRequest(), metadata=bearer("probe"))
        error = await generate_with(h, *bearer("probe"))
        assert (error.code, error.reason) == (
            grpc.StatusCode.PERMISSION_DENIED,
            "SERVICE_NOT_GRANTED",
        )
        assert "'probe' may not call" in error.message
        # What is not there is nobody's to be granted; one ends like what probe may call.
        for unknown in ("/headrace.v1.GenerationService/Nothing", "/evil.ModelService/GetModel"):
            for who in ("alice", "probe"):
                call = h.channel.unary_unary(unknown)(b"", metadata=bearer(who))
                assert (await refused(call)).code is grpc.StatusCode.UNIMPLEMENTED


async def test_health_is_everybodys_and_reflection_is_not(callers: Path) -> None:
    async with guarded(callers) as h:
        health = health_pb2_grpc.HealthStub(h.channel)
        serves = health_pb2.HealthCheckResponse.SERVING
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == serves
        watch = health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == serves
        watch.cancel()
        for version in ("v1", "v1alpha"):
            reflect = h.channel.stream_stream(
                f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
                request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
                response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
            )
            asked = [reflection_pb2.ServerReflectionRequest(list_services="")]
            for metadata, code in (
                ((), "UNAUTHENTICATED"),
                (bearer("probe"), "PERMISSION_DENIED"),
            ):
                error = await refused(reflect(iter(asked), metadata=metadata).read())
                assert error.code.name == code
            answer = await reflect(iter(asked), metadata=bearer("alice")).read()
            assert answer.list_services_response.service


async def test_every_service_can_be_granted(callers: Path) -> None:
    async with guarded(callers) as h:
        listed = await health_pb2_grpc.HealthStub(h.channel).List(health_pb2.HealthListRequest())
        assert {name for name in listed.statuses if name} <= set(SERVICES)


async def test_spans_of_refused_calls(callers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    made = telemetry.ServerTelemetry(Spans(provider))
    monkeypatch.setattr(telemetry, "set_up", lambda *_: made)
    async with guarded(callers, FakeEngine(script=says("x"))) as h:
        await generate_with(h)
        await generate_with(h, *bearer("probe"))
        await h.generation.Generate(rpc.GenerateRequest(spec=spec()), metadata=bearer("alice"))
        message = rpc.GenerateStreamRequest(spec=spec())
        events = h.generation.GenerateStream(message, metadata=bearer("alice"))
        assert [_ async for _ in events]
        await until_true(lambda: len(exporter.get_finished_spans()) == 6)
    spans = exporter.get_finished_spans()
    told = [span.attributes or {} for span in spans if span.kind is SpanKind.SERVER]
    codes = [attributes["rpc.grpc.status_code"] for attributes in told]
    assert codes == [16, 7, 0, 0]
    assert [span.status.status_code for span in spans] == [StatusCode.UNSET] * 6
    said = "".join(span.to_json() for span in spans)
    assert not any(token in said for token in TOKENS.values())


async def test_control_must_be_granted(callers: Path) -> None:
    async with guarded(callers) as h:
        for who, code in ((None, "UNAUTHENTICATED"), ("alice", "PERMISSION_DENIED"), ("bob", "")):
            call = h.channel.unary_unary("/headrace.v1.ControlService/Drain")(
                b"", metadata=bearer(who) if who is not None else ()
            )
            if code:
                assert (await refused(call)).code.name == code
                assert h.server.state.phase is Phase.READY
            else:
                await call
                assert h.server.state.phase is Phase.DRAINING


async def test_nobody_is_asked_without_a_file() -> None:
    async with serving(FakeEngine(script=says("x"))) as h:
        message = rpc.GenerateRequest(spec=spec())
        for metadata in ((), (("authorization", "Basic x"),)):
            assert await h.generation.Generate(message, metadata=metadata)


async def test_identities_do_not_see_each_others_requests(callers: Path) -> None:
    engine = FakeEngine(script=says("abc"), auto=False)
    async with guarded(callers, engine) as h:
        for who in ("alice", "bob"):  # the same name, twice
            await add_request(h, who, text=who, request_id="a")
        await add_request(h, "alice", request_id="b")
        error = await refused(add_request(h, "alice", request_id="a"))
        assert error.code is grpc.StatusCode.ALREADY_EXISTS

        error = await refused(get_result(h, "bob", "b"))
        assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "REQUEST_NOT_FOUND")
        cancel = rpc.CancelRequest(request_ids=["b"])
        [answer] = (await h.generation.Cancel(cancel, metadata=bearer("bob"))).results
        assert answer.status == rpc.CANCEL_STATUS_NOT_FOUND

        session = Session(h.generation.StreamResult(metadata=bearer("bob")))
        await session.send(1, attach=rpc.AttachCommand(request_id="b"))
        await session.send(2, cancel=rpc.CancelCommand(request_id="b"))
        await session.send(3, attach=rpc.AttachCommand(request_id="a"))
        await session.add(spec(request_id="b"), 4)
        await session.read_until(lambda _: "b" in session.events())
        [rejection] = [r for message in session.messages for r in message.rejections]
        assert rejection.command_id == 1
        assert rejection.status.code == grpc.StatusCode.NOT_FOUND.value[0]
        [cancelled] = [c for message in session.messages for c in message.cancelled]
        assert cancelled.status == rpc.CANCEL_STATUS_NOT_FOUND
        assert not engine.cancelled
        engine.run()
        await session.end()
        check_course(session.events()["a"])
        check_course(session.events()["b"])
        owned = {who: await get_result(h, who, "a") for who in ("alice", "bob")}
        for answer in owned.values():
            check_course(list(answer.events))
        [answer] = (await h.generation.Cancel(cancel, metadata=bearer("alice"))).results
        assert answer.status == rpc.CANCEL_STATUS_ALREADY_FINISHED


async def test_identities_share_no_cached_prefixes(callers: Path) -> None:
    async with guarded(callers, FakeEngine(script=says("x"))) as h:
        cached = {}
        for who in ("alice", "bob", "alice"):
            message = rpc.GenerateRequest(spec=spec("the same prompt, twice and thrice"))
            result = await h.generation.Generate(message, metadata=bearer(who))
            cached.setdefault(who, []).append(result.usage.cached_tokens > 0)
        assert cached == {"alice": [False, True], "bob": [False]}


async def test_requests_per_identity(callers: Path) -> None:
    engine = FakeEngine(script=says("abc"), auto=False)
    async with guarded(callers, engine, max_requests_per_identity=2) as h:
        await add_request(h, "alice", request_id="a")
        session = Session(h.generation.StreamResult(metadata=bearer("alice")))
        await session.add(spec(request_id="b"), 1)
        await session.read()
        error = await refused(add_request(h, "alice", request_id="c"))
        assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.reason == "TOO_MANY_REQUESTS_OF_IDENTITY"
        assert error.details["ErrorInfo"].metadata["max_requests_per_identity"] == "2"
        assert error.details["RetryInfo"].retry_delay.ToMilliseconds() == 250
        assert error.trailers["grpc-retry-pushback-ms"] == "250"
        await session.add(spec(request_id="c"), 2)
        message = await session.read_until(lambda message: message.rejections)
        assert message.rejections[0].status.code == error.code.value[0]
        await add_request(h, "bob", request_id="c")  # has a place of their own
        engine.run()
        await session.end()
        await add_request(h, "alice", request_id="c")
        engine.run()
        await until_true(lambda: not h.registry.live)
        await until_true(lambda: h.registry.admission.is_empty)


async def test_the_file_is_read_again(callers: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def outcomes(h: Harness) -> list[str]:
        found = []
        for who in TOKENS:
            call = h.models.GetModel(model.GetModelRequest(), metadata=bearer(who))
            try:
                await call
                found.append("OK")
            except grpc.aio.AioRpcError as error:
                found.append(error.code().name)
        return found

    async with guarded(callers, FakeEngine(script=says("abc"), auto=False)) as h:
        assert await outcomes(h) == ["OK", "OK", "OK"]
        session = Session(h.generation.StreamResult(metadata=bearer("alice")))
        await session.send(1, open=rpc.OpenCommand())
        await session.read()
        replace(callers, entry("bob", '["GenerationService"]', TOKENS["bob"]))
        only_bob = ["UNAUTHENTICATED", "PERMISSION_DENIED", "UNAUTHENTICATED"]
        assert await outcomes(h) == only_bob
        await session.add(spec(request_id="a"))  # what is open is asked again (test_revoked.py)
        assert (await session.read()).rejections
        for broken in ("callers = 1", "\0", "[[callers]]", entry("bob", '["Nothing"]', "x")):
            replace(callers, broken)
            caplog.clear()
            assert await outcomes(h) == only_bob
            assert caplog.text.count("callers stay as they were") == 1
        os.unlink(callers)
        caplog.clear()
        assert await outcomes(h) == only_bob
        assert caplog.text.count("callers stay as they were") == 1
        replace(callers, CALLERS)
        assert await outcomes(h) == ["OK", "OK", "OK"]
    assert not any(token in caplog.text for token in TOKENS.values())


async def test_refusals_are_logged_but_not_all(
    callers: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with guarded(callers) as h:
        for _ in range(20):
            await generate_with(h, ("authorization", "Bearer alice's secret?"))
    lines = [line for line in caplog.text.splitlines() if "refused '" in line]
    assert 1 <= len(lines) < 20
    assert GENERATE in lines[0]
    assert "alice" not in caplog.text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must have"),
        ("x = [", "is not TOML"),
        ("callers = 1", "must have"),
        ("callers = [1]", "is no table"),
        ("[[callers]]\nidentiy = 'a'", "unknown keys: identiy"),
        ("[[callers]]", "identity must be"),
        (entry("a b", '"*"', "x"), "identity must be"),
        (entry("a" * 65, '"*"', "x"), "identity must be"),
        (entry("anonymous", '"*"', "x"), "is taken"),
        (entry("a", "[]", "x"), "services must name"),
        (entry("a", "1", "x"), "a string or a list"),
        (entry("a", '["Health"]', "x"), "services must name"),
        (entry("a", '"*"'), "needs token_sha256 or certificate"),
        (entry("a", '"*"', "x") + "certificate = ['']", "must not be empty"),
        (entry("a", '"*"') + "token_sha256 = 'secret'", "64 hexadecimal digits"),
        (entry("a", '"*"', ""), "empty token"),
        (entry("a", '"*"', "x") + entry("b", '"*"', "x"), "a token is there twice"),
        (entry("a", '"*"', None, "n") + entry("b", '"*"', None, "n"), "is there twice"),
        ("x = " + "9" * 5000, "is not TOML: "),
        ("x = " + "[" * 100_000, "nested too deeply"),
        ("x = " + "{a = " * 100_000, "nested too deeply"),
        (
            entry("a", '"*"')
            + f"token_sha256 = {[f'{number:064x}' for number in range(1025)]}".replace("'", '"'),
            "at most 1024",
        ),
        ("#\n" * (300 << 10), "more than 512 KiB"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "callers.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        Authenticator(str(path))
    assert caught.value.option == "auth_file"


@pytest.mark.parametrize("text", ["x = " + "9" * 5000, "x = " + "[" * 100_000])
async def test_a_file_that_python_cannot_read_leaves_the_last_one_in_force(
    callers: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    async with guarded(callers) as h:
        replace(callers, text)
        for _ in range(2):
            assert await h.models.GetModel(model.GetModelRequest(), metadata=bearer("alice"))
        assert caplog.text.count("callers stay as they were: auth_file: ") == 1
        replace(callers, entry("probe", '"*"', TOKENS["probe"]))
        assert await h.models.GetModel(model.GetModelRequest(), metadata=bearer("probe"))
        error = await generate_with(h, *bearer("alice"))
        assert error.code is UNAUTHENTICATED


async def test_the_server_does_not_start_without_its_file(tmp_path: Path) -> None:
    config = ServiceConfig(listen=("127.0.0.1:0",), auth_file=str(tmp_path / "none"))
    server = HeadraceServer(config, FakeEngine())
    with pytest.raises(ConfigError, match="cannot be read"):
        await server.start()
    await server.stop()


@pytest.mark.parametrize(("mode", "warned"), [(0o640, False), (0o644, True), (0o642, True)])
def test_permissions_of_the_file(
    callers: Path, caplog: pytest.LogCaptureFixture, mode: int, warned: bool
) -> None:
    callers.chmod(mode)
    Authenticator(str(callers))
    assert ("every user of this machine" in caplog.text) is warned


def test_certificates_that_nobody_is_asked_for(
    callers: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callers.write_text(entry("a", '"*"', None, "a.example"))
    Authenticator(str(callers), client_certificates=True)
    assert not [record for record in caplog.records if "certificates" in record.message]
    Authenticator(str(callers))
    assert "set tls_client_ca" in caplog.text


def test_names_of_certificates(callers: Path) -> None:
    callers.write_text(
        entry("a", '["ModelService"]', None, "a.example")
        + entry("a", '["ControlService"]', None, "ops.a.example")
        + entry("b", '"*"', "token", "b.example")
    )
    found = Authenticator(str(callers), client_certificates=True)
    get_model = "/headrace.v1.ModelService/GetModel"
    assert found.by_certificate(get_model, ["other", "a.example"]).caller.identity == "a"
    with pytest.raises(NotGrantedError):
        found.by_certificate(GENERATE, ["a.example"])
    for names in ([], ["other"], ["A.example"], ["a.example", "b.example"]):
        with pytest.raises(UnknownCallerError):
            found.by_certificate(get_model, names)
    # Names in two entries of one identity: it may do what either grants, and no more.
    both = ["a.example", "ops.a.example"]
    for method in (get_model, "/headrace.v1.ControlService/Drain"):
        assert found.by_certificate(method, both).caller.identity == "a"
    with pytest.raises(NotGrantedError):
        found.by_certificate(GENERATE, both)
    with pytest.raises(UnknownCallerError):
        found.by_certificate(get_model, [*both, "b.example"])
    assert found.by_token(get_model, []) is None
    with pytest.raises(UnknownCallerError):  # a wrong token is not made good by a certificate
        found.by_token(get_model, [("authorization", "Bearer wrong")])


@given(
    metadata=st.lists(
        st.tuples(
            st.sampled_from(["authorization", "authorization-bin", "x"]),
            st.one_of(
                st.text(),
                st.binary(),
                st.binary().map(lambda raw: b"Bearer " + raw),
                st.just("Bearer alice's secret"),
            ),
        ),
        max_size=3,
    ),
    method=st.one_of(st.just(GENERATE), st.text()),
)
def test_metadata_of_any_kind(tmp_path_factory: Any, metadata: Any, method: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.toml"
    if not path.exists():
        replace(path, CALLERS)
    right = [v for k, v in metadata if k == "authorization"] == ["Bearer alice's secret"]
    expected = "alice" if method == GENERATE else "NotGrantedError"
    try:
        permit = Authenticator(str(path)).by_token(method, metadata)
        outcome = permit.caller.identity if permit is not None else ""
    except HeadraceError as error:
        outcome = type(error).__name__
    assert outcome == (expected if right else "UnknownCallerError")


async def _raw_call(port: int, authorization: bytes) -> None:
    """Call with a header that no gRPC client would send, and wait for whatever comes of it."""

    def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        head = len(payload).to_bytes(3) + bytes([kind, flags]) + struct.pack(">I", stream)
        return head + payload

    def header(name: bytes, value: bytes) -> bytes:  # HPACK: literal, not indexed, not Huffman
        return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value

    block = b"".join(
        header(name, value)
        for name, value in (
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", GENERATE.encode()),
            (b":authority", b"localhost"),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            (b"authorization", authorization),
        )
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b""))
    writer.write(frame(1, 4, 1, block) + frame(0, 1, 1, bytes(5)))
    async with asyncio.timeout(10):
        kind = 4
        while kind not in (1, 3, 7):  # HEADERS, RST_STREAM, GOAWAY
            head = await reader.readexactly(9)
            kind = head[3]
            await reader.readexactly(int.from_bytes(head[:3]))
    writer.close()
    await writer.wait_closed()


async def test_bytes_of_any_kind_in_the_header(callers: Path) -> None:
    engine = FakeEngine(script=says("x"))
    async with guarded(callers, engine) as h:
        port = int(h.server.addresses[0].rpartition(":")[2])
        values = [b"", b"Bearer \xff\xfe", b"\x00", b"Bearer \r\nx: y", bytes(range(120)), b"\x7f"]
        for value in [*values, *(bytes([byte]) * 100 for byte in range(0, 256, 17))]:
            await _raw_call(port, value)
        assert not engine.num_live
        message = rpc.GenerateRequest(spec=spec())
        assert await h.generation.Generate(message, metadata=bearer("alice"))


def test_the_example_of_the_documentation() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    [example] = re.findall(r"^```toml\n(.*?)^```$", text, re.S | re.M)
    table = parse_callers(example)
    assert [caller.identity for _, caller in table.tokens] == ["search"]
    assert [caller.identity for caller in table.certificates.values()] == ["operators"]


@pytest.mark.parametrize("source", ["docs", "help"])
def test_an_error_does_not_end_in_the_callers_file(tmp_path: Path, source: str) -> None:
    if source == "docs":
        text = (ROOT / "docs" / "operations.md").read_text()
        [command] = re.findall(
            r"^(TOKEN=\$\(headrace-server token .*?)^headrace ", text, re.S | re.M
        )
    else:
        shown = CliRunner().invoke(cli.app, ["token", "--help"], env={"COLUMNS": "80"}).stdout
        [command] = re.findall(r"headrace-server token .*callers\.toml", shown)
    program = tmp_path / "headrace-server"
    main = "from service.command.cli import main; main()"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{main}" "$@"\n')
    program.chmod(0o700)
    path = tmp_path / "callers.toml"
    for identity, count in (("search", 1), ("other", 2), ("a/b", 2)):
        script = command.replace("--identity search", f"--identity {identity}")
        done = subprocess.run(
            ["sh", "-c", script],
            cwd=tmp_path,
            env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert len(parse_callers(path.read_text()).tokens) == count
        assert "identity must be" not in path.read_text()
        if source == "docs":
            assert ("identity must be" in done.stdout) is (identity == "a/b")


def test_the_command_that_makes_tokens() -> None:
    runner = CliRunner()
    made = runner.invoke(cli.app, ["token", "--identity", "search", "--service", "ModelService"])
    assert made.exit_code == 0
    token = made.stdout.strip()
    assert len(token) >= 43
    found = parse_callers(made.stderr).by_digest(hashlib.sha256(token.encode()).digest())
    assert found is not None
    assert (found.identity, found.services) == ("search", frozenset({"ModelService"}))
    assert token not in made.stderr
    assert runner.invoke(cli.app, ["token"]).stdout != made.stdout
    wrong = runner.invoke(cli.app, ["token", "--identity", "a b"])
    assert (wrong.exit_code, wrong.stdout) == (2, "")
    assert "identity must be" in wrong.stderr
