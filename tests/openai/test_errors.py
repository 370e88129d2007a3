"""What is wrong is said in OpenAI's form: a status, the member in the body's own words, a code."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import httpx2
import pytest

from engine.contract.errors import QueueFullError
from engine.contract.outputs import RequestFailure
from tests.openai.doors import USER, data_of, open_door
from tests.service.door.callers_file import TOKENS, entry, replace
from tests.service.fake_engine import FakeEngine, says
from tests.service.helpers import serving, until

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TOOL = {"type": "function", "function": {"name": "f"}}


def said(*more: Any) -> dict[str, Any]:
    """A conversation that ends with these messages."""
    return {"messages": [*USER, *more]}


BAD: list[tuple[str, dict[str, Any], int, str | None, str]] = [
    (CHAT, {}, 400, "messages", "missing_field"),
    (CHAT, {"messages": []}, 400, "messages", "invalid_field"),
    (CHAT, {"messages": "hi"}, 400, "messages", "invalid_type"),
    (CHAT, said("x"), 400, "messages[1]", "invalid_type"),
    (CHAT, said({"content": "x"}), 400, "messages[1].role", "missing_field"),
    (CHAT, said({"role": "robot", "content": "x"}), 400, "messages[1].role", "invalid_field"),
    (CHAT, said({"role": "user", "content": 5}), 400, "messages[1].content", "invalid_type"),
    (
        CHAT,
        said({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}),
        400, "messages[1].content", "invalid_field",
    ),
    (CHAT, said({"role": "user", "content": "x", "blah": 1}), 400, "messages[1]", "invalid_field"),
    (CHAT, said() | {"temperature": "hot"}, 400, "temperature", "invalid_type"),
    (CHAT, said() | {"temperature": -1}, 400, "temperature", "invalid_field"),
    (CHAT, said() | {"top_p": 3}, 400, "top_p", "invalid_field"),
    (CHAT, said() | {"n": 0}, 400, "n", "invalid_field"),
    (CHAT, said() | {"n": 500}, 400, "n", "invalid_field"),
    (CHAT, said() | {"max_tokens": -1}, 400, "max_tokens", "invalid_field"),
    (CHAT, said() | {"max_tokens": 2**40}, 400, "max_tokens", "invalid_field"),
    (
        CHAT,
        said() | {"max_completion_tokens": 2**40},
        400, "max_completion_tokens", "invalid_field",
    ),
    (
        CHAT,
        said() | {"max_completion_tokens": 5, "max_tokens": 6},
        400, "max_tokens", "invalid_field",
    ),
    (CHAT, said() | {"stop": ""}, 400, "stop[0]", "invalid_field"),
    (CHAT, said() | {"stop": ["a", ""]}, 400, "stop[1]", "invalid_field"),
    (CHAT, said() | {"stop": ["a", 5]}, 400, "stop[1]", "invalid_type"),
    (CHAT, said() | {"logit_bias": {"a": 1}}, 400, "logit_bias", "invalid_field"),
    (CHAT, said() | {"logit_bias": {"1": "x"}}, 400, "logit_bias.1", "invalid_type"),
    (CHAT, said() | {"logit_bias": {"99999": 1}}, 400, "logit_bias[99999]", "invalid_field"),
    (CHAT, said() | {"top_logprobs": 2}, 400, "top_logprobs", "invalid_field"),
    (
        CHAT,
        said() | {"logprobs": True, "top_logprobs": 10**6},
        400, "top_logprobs", "invalid_field",
    ),
    (CHAT, said() | {"stream_options": {"x": True}}, 400, "stream_options", "invalid_field"),
    (
        CHAT,
        said() | {"stream": True, "stream_options": {"x": 1}},
        400, "stream_options.x", "unknown_field",
    ),
    (CHAT, said() | {"tools": [{"type": "custom"}]}, 400, "tools[0]", "invalid_field"),
    (CHAT, said() | {"tool_choice": "required"}, 400, "tool_choice", "invalid_field"),
    (CHAT, said() | {"tools": [TOOL], "tool_choice": "x"}, 400, "tool_choice", "invalid_field"),
    (
        CHAT,
        said() | {"response_format": {"type": "xml"}},
        400, "response_format.type", "invalid_field",
    ),
    (
        CHAT,
        said() | {"structured_outputs": {"regex": 5}},
        400, "structured_outputs.regex", "invalid_field",
    ),
    (
        CHAT,
        said() | {"structured_outputs": {"json": "{"}},
        400, "structured_outputs.json", "invalid_field",
    ),
    (CHAT, said() | {"modalities": ["audio"]}, 400, "modalities", "unsupported_value"),
    (CHAT, said() | {"functions": [{"name": "f"}]}, 400, "functions", "unsupported_field"),
    (CHAT, said() | {"temprature": 1}, 400, "temprature", "unknown_field"),
    (CHAT, said() | {"model": "other"}, 404, "model", "model_not_found"),
    (CHAT, said() | {"priority": 1000}, 400, "priority", "invalid_field"),
    (CHAT, said() | {"truncate_prompt_tokens": -1}, 400, "truncate_prompt_tokens", "invalid_field"),
    (
        CHAT,
        said({"role": "user", "content": "x" * 5000}),
        400, "messages", "context_length_exceeded",
    ),
    (
        CHAT,
        said({"role": "user", "content": "x" * 500_000}),
        400, "messages", "context_length_exceeded",
    ),
    (TEXT, {}, 400, "prompt", "missing_field"),
    (TEXT, {"prompt": []}, 400, "prompt", "invalid_field"),
    (TEXT, {"prompt": ["a", 5]}, 400, "prompt[1]", "invalid_field"),
    (TEXT, {"prompt": [-1]}, 400, "prompt", "invalid_field"),
    (TEXT, {"prompt": "a", "logprobs": True}, 400, "logprobs", "invalid_type"),
    (TEXT, {"prompt": "a", "logprobs": 10**6}, 400, "logprobs", "invalid_field"),
    (TEXT, {"prompt": "a", "best_of": 2}, 400, "best_of", "unsupported_field"),
    (TEXT, {"prompt": "x" * 5000}, 400, "prompt", "context_length_exceeded"),
]  # fmt: skip


async def test_bad_bodies_are_refused_by_name() -> None:
    async with serving() as h, open_door(h.server.addresses[0]) as door:
        differ = {}
        for path, body, *right in BAD:
            for how in ({}, {"stream": True}) if "stream_options" not in body else ({},):
                answer = await door.post(path, json=body | how)
                error = answer.json()["error"] if answer.status_code != 200 else {}
                found = [answer.status_code, error.get("param"), error.get("code")]
                if found != right or not error["message"] or "spec." in error["message"]:
                    differ[json.dumps(body | how)[:200]] = (found, error, right)
        assert not differ
        assert not h.engine.submitted
        assert (await door.ask(CHAT, said()))["choices"]


JSON = {"content-type": "application/json"}
RAW: list[tuple[str, str, dict[str, str], bytes, int, str]] = [
    ("POST", CHAT, JSON, b"", 400, "json"),
    ("POST", CHAT, JSON, b"{", 400, "json"),
    ("POST", CHAT, JSON, b"[]", 400, "json"),
    ("POST", CHAT, JSON, b"5", 400, "json"),
    ("POST", CHAT, JSON, b'"\xff"', 400, "json"),
    ("POST", CHAT, JSON, b'{"a": NaN}', 400, "json"),
    ("POST", CHAT, JSON, b'{"a": 1, "a": 2}', 400, "json"),
    ("POST", CHAT, JSON, b'{"a": "\\ud800"}', 400, "json"),
    ("POST", CHAT, JSON, b"[" * 100_000, 400, "json"),
    ("POST", CHAT, JSON, b"[" * 400_000, 413, "body_too_large"),
    ("POST", CHAT, JSON, b'"' + b"x" * (9 << 20), 413, "body_too_large"),
    ("POST", CHAT, {"content-type": "text/plain"}, b"{}", 415, "media_type"),
    ("POST", CHAT, {}, b"{}", 415, "media_type"),
    ("GET", CHAT, {}, b"", 405, "method_not_allowed"),
    ("DELETE", "/v1/models", {}, b"", 405, "method_not_allowed"),
    ("POST", "/v1/embeddings", JSON, b"{}", 404, "no_such_route"),
    ("POST", "/v1/responses", JSON, b"{}", 404, "no_such_route"),
    ("POST", "/v1/messages", JSON, b"{}", 404, "no_such_route"),
    ("POST", "/api/chat", JSON, b"{}", 404, "no_such_route"),
    ("GET", "/", {}, b"", 404, "no_such_route"),
    ("GET", "/v1/models/other", {}, b"", 404, "model_not_found"),
    ("POST", CHAT + "?api_key=x", JSON, b"{}", 400, "token_in_url"),
    ("POST", CHAT, JSON | {"host": "evil.example"}, b"{}", 421, "host_not_allowed"),
    ("POST", CHAT, JSON | {"origin": "http://evil.example"}, b"{}", 403, "origin_not_allowed"),
]


async def test_what_is_no_request_of_the_api_is_an_error_of_it() -> None:
    async with serving() as h, open_door(h.server.addresses[0]) as door:
        differ = {}
        for method, path, headers, body, *right in RAW:
            answer = await door.request(method, path, headers=headers, content=body)
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            if [answer.status_code, error["code"]] != right:
                differ[method, path, body[:40]] = (answer.status_code, error)
        assert not differ
        answer = await door.get(CHAT)
        assert answer.headers["allow"] == "POST"
        message = (await door.fails("/v1/embeddings", {}))["message"]
        assert "/v1/embeddings" in message
        assert "/v1/chat/completions" in message


async def test_a_full_server_says_when_to_come_again() -> None:
    async with serving() as h, open_door(h.server.addresses[0]) as door:
        h.engine.refuse_next.append(QueueFullError(4, 2.5))
        answer = await door.post(CHAT, json=said())
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (429, "rate_limit_error")
        assert error["code"] == "queue_full"
        assert int(answer.headers["retry-after"]) >= 1
        assert (await door.ask(CHAT, said()))["choices"]


async def test_callers_are_told_what_their_token_may(tmp_path: Any) -> None:
    path = tmp_path / "callers.toml"
    replace(
        path,
        entry("alice", '["GenerationService", "ModelService"]', TOKENS["alice"])
        + entry("probe", '["ModelService"]', TOKENS["probe"]),
    )
    async with (
        serving(FakeEngine(), auth_file=str(path)) as h,
        open_door(h.server.addresses[0]) as door,
    ):
        for token in (None, "Bearer wrong"):
            headers = {} if token is None else {"authorization": token}
            answer = await door.post(CHAT, json=said(), headers=headers)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (401, "invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"
        error = await door.fails(CHAT, said(), authorization=f"Bearer {TOKENS['probe']}")
        assert (error["status"], error["type"]) == (403, "permission_error")
        bearer = {"authorization": f"Bearer {TOKENS['alice']}"}
        assert (await door.ask(CHAT, said(), **bearer))["choices"]
        [request] = h.engine.submitted
        assert request.caller == "alice"
        listed = await door.get("/v1/models", headers=bearer)
        assert [one["id"] for one in listed.json()["data"]] == ["fake"]


async def test_a_failure_is_a_status_or_an_event_of_the_stream() -> None:
    async with (
        serving(FakeEngine(auto=False, script=says("abc"))) as h,
        open_door(h.server.addresses[0]) as door,
    ):
        for is_stream in (False, True):
            task = asyncio.create_task(door.post(CHAT, json=said() | {"stream": is_stream}))
            await until(lambda: h.engine.num_live)
            h.engine.step()
            request = h.engine.submitted[-1]
            h.engine.fail(request.request_id, RequestFailure("a defect", "e1"))
            h.engine.run()
            answer = await task
            if not is_stream:
                error = answer.json()["error"]
                assert (answer.status_code, error["type"]) == (500, "server_error")
                continue
            assert answer.status_code == 200
            assert b"[DONE]" not in answer.content
            *_, last = data_of(answer.content)
            assert json.loads(last)["error"]["type"] == "server_error"
            assert answer.content.count(b"event: error\n") == 1


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_server_that_loads_or_drains_or_is_gone_is_503(is_stream: bool) -> None:
    gate = asyncio.Event()
    body = said() | {"stream": is_stream}

    def check(answer: httpx2.Response) -> None:
        assert answer.status_code == 503, answer.text
        assert answer.json()["error"]["type"] == "server_error"
        assert int(answer.headers["retry-after"]) >= 1

    async with serving(FakeEngine(load_gate=gate), ready=False) as h:  # noqa: SIM117
        async with open_door(h.server.addresses[0]) as door:
            check(await door.post(CHAT, json=body))
            check(await door.get("/ready"))
            assert (await door.get("/health")).status_code == 200
            gate.set()
            await h.server.ready()
            answer = await door.post(CHAT, json=body)
            assert answer.status_code == 200, answer.text
            assert (await door.get("/ready")).status_code == 200
            h.server.begin_drain()
            check(await door.post(CHAT, json=body))
    async with open_door(h.server.addresses[0]) as door:
        check(await door.post(CHAT, json=body))
        check(await door.get("/v1/models"))
        check(await door.get("/ready"))


def test_each_code_of_the_contract_has_a_status() -> None:
    from headrace.openai.errors import STATUSES

    others = {grpc.StatusCode.OK, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN,
              grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS}  # fmt: skip
    assert set(grpc.StatusCode) == set(STATUSES) | others
