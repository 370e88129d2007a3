"""grpcurl, which knows nothing but reflection, against the real server; and lines of documents."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from tests.clients.go_ts.tool_server import ask_then_tell
from tests.service.certificates import make_certificate, needs_openssl
from tests.service.door.callers_file import entry, replace
from tests.service.fake_engine import VOCAB_SIZE, FakeEngine, model_info
from tests.service.helpers import serving
from tests.service.readme import shell_commands
from tests.service.real_server import ROOT, WAIT_S, RealServer, real_server
from tests.service.replies.templates import tokenizer

GRPCURL = shutil.which("grpcurl")
pytestmark = pytest.mark.skipif(GRPCURL is None, reason="needs grpcurl on the PATH")
DEFAULT = "127.0.0.1:50051"
SESSION = """
{"command_id": 1, "add": {"spec": {"request_id": "a", "text": {"text": "The river"},
  "sampling": {"temperature": 0}, "stop": {"max_tokens": 8, "ignore_eos": true}}}}
{"command_id": 2, "add": {"spec": {"request_id": "b", "text": {"text": "Once upon a time"},
  "sampling": {"temperature": 0}, "stop": {"max_tokens": 8, "ignore_eos": true}}}}
"""


def grpcurl(demo: RealServer, *arguments: str, data: str | None = None) -> str:
    """What grpcurl prints; `data` goes to its stdin."""
    options = ["-plaintext", *(["-d", "@"] if data is not None else [])]
    done = subprocess.run(
        [GRPCURL or "", *options, demo.addresses[0], *arguments],
        input=data,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def messages(printed: str) -> list[dict[str, Any]]:
    """The JSON messages that grpcurl prints one after another."""
    decoder, found = json.JSONDecoder(), []
    printed = printed.strip()
    while printed:
        message, end = decoder.raw_decode(printed)
        found.append(message)
        printed = printed[end:].strip()
    return found


def events(printed: str) -> list[dict[str, Any]]:
    return [event for message in messages(printed) for event in message.get("events", ())]


def test_list_and_describe(demo: RealServer) -> None:
    assert grpcurl(demo, "list").split() == [
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
        "headrace.v1.ControlService",
        "headrace.v1.GenerationService",
        "headrace.v1.ModelService",
    ]
    described = grpcurl(demo, "describe", "headrace.v1.GenerationService.StreamResult")
    assert (
        "rpc StreamResult ( stream .headrace.v1.StreamResultRequest ) "
        "returns ( stream .headrace.v1.StreamResultResponse );" in described
    )
    assert "oneof input" in grpcurl(demo, "describe", "headrace.v1.GenerationSpec")
    for unknown in ("headrace.v1.GenerationService.Nothing", "headrace.v1.Nothing.Add", "nothing"):
        with pytest.raises(AssertionError, match="Symbol not found"):
            grpcurl(demo, "describe", unknown)


def test_generate(demo: RealServer) -> None:
    spec = '{"spec": {"text": {"text": "The river"}, "stop": {"max_tokens": 8}}}'
    [answer] = messages(grpcurl(demo, "headrace.v1.GenerationService/Generate", data=spec))
    [choice] = answer["choices"]
    assert choice["finished"]["reason"] in ("FINISH_REASON_LENGTH", "FINISH_REASON_STOP")
    assert 1 <= len(choice["token_ids"]) <= 8
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"])


def test_two_requests_from_stdin_on_one_session(demo: RealServer) -> None:
    printed = grpcurl(demo, "headrace.v1.GenerationService/StreamResult", data=SESSION)
    for name, command_id in (("a", "1"), ("b", "2")):
        found = events(printed)
        [number] = [
            event["request_number"]
            for event in found
            if event.get("accepted", {}).get("request_id") == name
        ]
        own = [event for event in found if event["request_number"] == number]
        assert [int(event["seq"]) for event in own] == list(range(1, len(own) + 1))
        assert own[0]["accepted"]["command_id"] == command_id
        assert own[-1]["finished"]["reason"] == "FINISH_REASON_LENGTH"
        ids = [i for event in own if "delta" in event for i in event["delta"]["token_ids"]]
        assert len(ids) == 8


def test_health(demo: RealServer) -> None:
    services = ("GenerationService", "ModelService", "ControlService")
    for service in ("", *(f"headrace.v1.{name}" for name in services)):
        data = json.dumps({"service": service})
        [answer] = messages(grpcurl(demo, "grpc.health.v1.Health/Check", data=data))
        assert answer == {"status": "SERVING"}


@needs_openssl
async def test_who_calls(tmp_path: Path) -> None:
    """The lines of docs/operations.md: a token, and a certificate, over TLS."""
    server = await asyncio.to_thread(make_certificate, tmp_path)
    own = await asyncio.to_thread(make_certificate, tmp_path, "own-", subject="ops.example")
    callers = tmp_path / "callers.toml"
    text = entry("a", '["ModelService", "ServerReflection"]', "a secret")
    replace(callers, text + entry("operators", '"*"', None, "ops.example"))
    options = {"auth_file": str(callers), "tls_cert": str(server[0]), "tls_key": str(server[1])}

    async def called(target: str, *arguments: str) -> tuple[int, str]:
        flags = ["-cacert", str(server[0]), *arguments]
        method = "headrace.v1.ModelService/GetModel"
        done = await asyncio.to_thread(
            subprocess.run,
            [GRPCURL or "", *flags, target, method],
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )
        return done.returncode, done.stdout + done.stderr

    token = ["-H", "authorization: Bearer a secret"]
    certificate = ["-cert", str(own[0]), "-key", str(own[1])]
    async with serving(**options) as h:
        assert await called(h.server.addresses[0], *token) == (0, ANY)
        code, said = await called(h.server.addresses[0])
        assert code != 0
        assert "authorization is missing" in said
        assert (await called(h.server.addresses[0], *certificate))[0] != 0
    async with serving(**options, tls_client_ca=str(own[0])) as h:
        assert await called(h.server.addresses[0], *certificate) == (0, ANY)
        assert (await called(h.server.addresses[0], *token))[0] != 0
        assert await called(h.server.addresses[0], *token, *certificate) == (0, ANY)


async def test_the_lines_about_tools() -> None:
    """Those of docs/chat.md."""
    lines = shell_commands("grpcurl ", ROOT / "docs" / "chat.md")
    engine = FakeEngine(script=ask_then_tell, info=model_info(vocab_size=VOCAB_SIZE + 16))
    said = []
    async with serving(engine, tokenizer=tokenizer()) as h:
        for line in lines:
            assert DEFAULT in line
            if "jq" in line and shutil.which("jq") is None:
                continue
            done = await asyncio.to_thread(
                subprocess.run,
                ["bash", "-c", line.replace(DEFAULT, h.server.addresses[0])],
                capture_output=True,
                text=True,
                timeout=WAIT_S,
            )
            assert (done.returncode, done.stderr) == (0, "")
            said.append(done.stdout)
    [forced], [answered] = messages(said[0]), messages(said[1])
    [choice] = forced["choices"]
    assert choice["finished"]["reason"] == "FINISH_REASON_TOOL_CALLS"
    assert [call["name"] for call in choice["tool_calls"]] == ["read_gauge"] * 2
    assert json.loads(choice["tool_calls"][0]["arguments_json"]) == {"place": "Ulm"}
    assert answered["choices"][0]["text"].startswith("What is this?")  # one call, not two
    assert "tool\n3 m\n" in answered["choices"][0]["text"]
    assert len(lines) == 3
    assert said[2:] in ([], ['{"place": "Ulm"}{"place": "Köln"}'])


def test_the_operators_lines() -> None:
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    lines = re.findall(r"^grpcurl .*ControlService/.*$", text, re.M)
    methods = [line.rpartition("/")[2] for line in lines]
    assert methods == [
        "GetStatistics",
        "WatchStatistics",
        "ListRequests",
        "CancelRequests",
        "Pause",
        "ResetPrefixCache",
        "Resume",
        "SetLogLevel",
        "Drain",
    ]
    said: dict[str, str] = {}
    with real_server("--listen", "127.0.0.1:0") as server:
        server.wait_until_ready()
        for method, line in zip(methods, lines, strict=True):
            assert DEFAULT in line
            if method == "WatchStatistics":  # without an end of its own
                line = line.replace("grpcurl ", "grpcurl -max-time 2 ")
            done = subprocess.run(
                ["bash", "-c", line.replace(DEFAULT, server.addresses[0])],
                capture_output=True,
                text=True,
                timeout=WAIT_S,
            )
            assert done.returncode == 0 or method == "WatchStatistics", done.stderr
            said[method] = done.stdout
        assert server.ended() == 0
    [watched] = messages(said["WatchStatistics"])  # the first, at once
    assert watched["statistics"]["engine"]["blocks_total"] != "0"
    assert '"status": "CANCEL_STATUS_NOT_FOUND"' in said["CancelRequests"]
    assert '"was_paused": true' in said["Resume"]
    assert "draining, at most 60 s: a new version" in server.said
