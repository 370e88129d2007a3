"""What becomes of requests when clients leave, ask twice, name models, or their server is gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from headrace.openai import door as door_module
from headrace.openai.replies import dumps, dumps_in_pieces
from headrace.v1 import control_service_pb2 as control_pb
from headrace.v1 import generation_service_pb2 as rpc

from service.config import ServiceConfig
from service.server import HeadraceServer
from tests.openai.doors import USER, OpenDoor, data_of, open_door
from tests.service.fake_engine import FakeEngine, byte_tokenizer, model_info, says
from tests.service.helpers import DEADLINE_S, Harness, serving, spec, until

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODY: dict[str, Any] = {"messages": USER}


@asynccontextmanager
async def place(
    engine: FakeEngine | None = None, **options: Any
) -> AsyncIterator[tuple[Harness, OpenDoor]]:
    """A server, and a door before it."""
    async with serving(engine, **options) as h, open_door(h.server.addresses[0]) as door:
        yield h, door


# ---- clients that leave --------------------------------------------------------------------------


async def connect(door: OpenDoor, path: str, body: dict[str, Any]) -> tuple[Any, Any]:
    """A connection of its own on which a body was sent."""
    url = door.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    data = json.dumps(body).encode()
    writer.write(
        b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%s" % (path.encode(), len(data), data)
    )
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_leaves_ends_its_requests_before_the_next_step(
    path: str, is_stream: bool
) -> None:
    engine = FakeEngine(auto=False, script=says("abcdefghij" * 9))
    async with place(engine) as (h, door):
        body: dict[str, Any] = BODY if path == CHAT else {"prompt": ["a", "b"], "max_tokens": 50}
        reader, writer = await connect(door, path, body | {"stream": is_stream})
        count = 1 if path == CHAT else 2
        await until(lambda: engine.num_live == count)
        engine.step()
        engine.step()
        if is_stream:
            await reader.readuntil(b'":"a')
        writer.close()
        await writer.wait_closed()
        await until(lambda: len(engine.cancelled) == count)
        generated = engine.generated
        engine.step()  # which brings their ends alone
        assert engine.generated == generated
        assert engine.num_live == 0
        await until(lambda: not h.registry.live)
        page = (await door.get("/metrics")).text
        assert f'headrace_openai_requests_total{{route="{path}",status="499"}} 1' in page


async def test_a_stream_that_waits_says_so_to_whoever_is_on_the_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(door_module, "COMMENT_SECONDS", 0.05)
    engine = FakeEngine(auto=False, script=says("abc"))
    async with place(engine) as (_, door):
        reader, writer = await connect(door, CHAT, BODY | {"stream": True})
        for _ in range(2):
            await reader.readuntil(b": waiting\n\n")
        await until(lambda: engine.num_live == 1)
        engine.run()
        await reader.readuntil(b"data: [DONE]\n\n")
        writer.close()


async def test_what_a_stream_has_no_place_for_is_refused() -> None:
    async with place() as (_, door):
        error = await door.fails(CHAT, BODY | {"stream": True, "prompt_logprobs": 1})
    assert (error["status"], error["param"]) == (400, "prompt_logprobs")


async def test_one_prompt_is_tokenized_at_a_time() -> None:
    async with place() as (_, door):
        error = await door.fails("/tokenize", {"prompt": ["a", "b"]})
    assert (error["status"], error["param"]) == (400, "prompt")


async def test_a_client_that_leaves_takes_no_other_with_it() -> None:
    engine = FakeEngine(auto=False, script=says("abc"))
    async with place(engine) as (_, door):
        _, leaver = await connect(door, CHAT, BODY | {"stream": True})
        stays = asyncio.create_task(door.ask(CHAT, BODY))
        await until(lambda: engine.num_live == 2)
        leaver.close()
        await leaver.wait_closed()
        await until(lambda: engine.cancelled)
        engine.run()
        assert (await stays)["choices"][0]["message"]["content"] == "abc"


# ---- a request asked twice -----------------------------------------------------------------------


@pytest.mark.parametrize("first", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("second", [False, True], ids=["whole", "stream"])
async def test_a_key_sent_twice_is_computed_once(first: bool, second: bool) -> None:
    async with place(FakeEngine(script=says("once only"))) as (h, door):
        answers = []
        for is_stream in (first, second):
            body = BODY | {"stream": is_stream, "n": 2, "return_token_ids": True}
            answer = await door.post(CHAT, json=body, headers={"idempotency-key": "key 1"})
            assert answer.status_code == 200, answer.text
            answers.append(_texts(answer.content, is_stream))
        assert answers[0] == answers[1]
        assert answers[0][1] == ["once only", "once only"]
        assert len(h.engine.submitted) == 1
        other = await door.fails(CHAT, BODY | {"seed": 5}, idempotency_key="key 1")
        assert (other["status"], other["type"]) == (409, "invalid_request_error")
        await door.ask(CHAT, BODY, idempotency_key="key 2")
        assert len(h.engine.submitted) == 2


def _texts(content: bytes, is_stream: bool) -> tuple[str, list[str]]:
    """The answer's id, and the text of each choice."""
    if not is_stream:
        whole = json.loads(content)
        return whole["id"], [choice["message"]["content"] for choice in whole["choices"]]
    *events, done = data_of(content)
    assert done == "[DONE]"
    found: dict[int, str] = {}
    for event in map(json.loads, events):
        for choice in event["choices"]:
            text = choice["delta"].get("content") or ""
            found[choice["index"]] = found.get(choice["index"], "") + text
    return json.loads(events[0])["id"], [found[index] for index in sorted(found)]


async def test_a_named_request_goes_on_when_its_client_leaves_and_is_fetched_later() -> None:
    engine = FakeEngine(auto=False, script=says("abc"))
    async with place(engine) as (_, door):
        key = {"idempotency-key": "k"}
        task = asyncio.create_task(door.post(CHAT, json=BODY, headers=key))
        await until(lambda: engine.num_live)
        engine.step()
        task.cancel()
        await asyncio.wait([task])
        engine.run()
        answer = await door.ask(CHAT, BODY, idempotency_key="k")
        assert answer["choices"][0]["message"]["content"] == "abc"
        assert (len(engine.submitted), engine.cancelled) == (1, [])


# ---- servers -------------------------------------------------------------------------------------


async def test_adapters_are_models() -> None:
    """Those that the caller may use, with one server and with several."""
    async with AsyncExitStack() as stack:
        servers = []
        for name in ("one", "two"):
            engine = FakeEngine(
                info=model_info(name=name, serves_adapters=name == "two"), script=says(name)
            )
            servers.append(await stack.enter_async_context(serving(engine, served_name=name)))
        for adapter in ("team/a", "b"):
            await servers[1].control.LoadAdapter(
                control_pb.LoadAdapterRequest(name=adapter, source="s"), timeout=DEADLINE_S
            )
        [first, second] = [one.server.addresses[0] for one in servers]
        for targets, names in (((second,), []), ((first, second), ["one"])):
            async with open_door(*targets) as door:
                listed = (await door.get("/v1/models")).json()["data"]
                assert [one["id"] for one in listed] == [*names, "two", "b", "team/a"]
                assert [one.get("parent") for one in listed] == [None] * len(targets) + ["two"] * 2
                assert (await door.get("/v1/models/team/a")).json() == listed[-1]
                for adapter in ("team/a", "b"):
                    answer = await door.ask(CHAT, BODY | {"model": adapter})
                    assert answer["model"] == adapter
                    assert servers[1].engine.submitted[-1].adapter == adapter
                error = await door.fails(CHAT, BODY | {"model": "c"})
                assert (error["status"], error["code"]) == (404, "model_not_found")
        fake = servers[1].engine
        await fake.pause()
        await servers[1].generation.AddRequest(rpc.AddRequestRequest(spec=spec(adapter="b")))
        await servers[1].control.UnloadAdapter(control_pb.UnloadAdapterRequest(name="b"))
        async with open_door(second) as door:  # a request has it, others cannot name it
            assert {one.state for one in fake.adapters.told()} == {"loaded", "unloading"}
            listed = (await door.get("/v1/models")).json()["data"]
            assert [one["id"] for one in listed] == ["two", "team/a"]
        await fake.resume()


async def test_models_of_several_servers_are_chosen_by_name() -> None:
    async with AsyncExitStack() as stack:
        servers = {}
        for name in ("one", "two"):
            engine = FakeEngine(info=model_info(name=name), script=says(f"of {name}"))
            served = {"served_name": name, "served_alias": (f"{name}-alias",)}
            servers[name] = await stack.enter_async_context(serving(engine, **served))
        targets = [one.server.addresses[0] for one in servers.values()]
        door = await stack.enter_async_context(open_door(*targets))
        listed = (await door.get("/v1/models")).json()
        assert listed["object"] == "list"
        assert [one["id"] for one in listed["data"]] == ["one", "one-alias", "two", "two-alias"]
        for one in listed["data"]:
            assert (await door.get(f"/v1/models/{one['id']}")).json() == one
            answer = await door.ask(CHAT, BODY | {"model": one["id"]})
            assert answer["model"] == one["id"]
            assert answer["choices"][0]["message"]["content"] == f"of {one['root']}"
        error = await door.fails(CHAT, BODY | {"model": "three"})
        assert (error["status"], error["param"], error["code"]) == (404, "model", "model_not_found")
        assert "one, two" in error["message"]
        error = await door.fails(CHAT, BODY)
        assert (error["status"], error["param"], error["code"]) == (400, "model", "missing_field")
        await servers["one"].server.stop()
        answer = await door.ask(CHAT, BODY | {"model": "two"})
        assert answer["choices"][0]["message"]["content"] == "of two"
        assert (await door.fails(CHAT, BODY | {"model": "one"}))["status"] == 503
        assert (await door.get("/ready")).status_code == 200


async def test_a_fleet_behind_the_door_goes_on_without_one_of_its_servers() -> None:
    async with AsyncExitStack() as stack:
        fleet = [
            await stack.enter_async_context(serving(FakeEngine(script=says("abc"))))
            for _ in range(2)
        ]
        target = ",".join(one.server.addresses[0] for one in fleet)
        door = await stack.enter_async_context(open_door(target))
        await asyncio.gather(*(door.ask(CHAT, BODY) for _ in range(16)))
        assert all(one.engine.submitted for one in fleet)
        await fleet[0].server.stop()
        for is_stream in (False, True) * 4:
            answer = await door.post(CHAT, json=BODY | {"stream": is_stream})
            assert answer.status_code == 200, answer.text
            assert _texts(answer.content, is_stream)[1] == ["abc"]


async def test_the_door_goes_on_when_its_server_was_started_again() -> None:
    def server(listen: str) -> HeadraceServer:
        return HeadraceServer(
            ServiceConfig(listen=(listen,)), FakeEngine(script=says("abc")),
            tokenizer_loader=lambda _info: byte_tokenizer(),
        )  # fmt: skip

    first = server("127.0.0.1:0")
    await first.start()
    await first.ready()
    address = first.addresses[0]
    async with open_door(address) as door:
        await door.ask(CHAT, BODY)
        await first.stop()
        error = await door.fails(CHAT, BODY)
        assert error["status"] == 503
        second = server(address)
        await second.start()
        try:
            await second.ready()

            async def asked() -> bool:
                answer = await door.post(CHAT, json=BODY)
                assert answer.status_code in (200, 503)
                return answer.status_code == 200

            async with asyncio.timeout(30):  # gRPC waits before it connects again
                while not await asked():  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert len(await door.events(CHAT, BODY)) >= 2
        finally:
            await second.stop()


# ---- browsers, names, labels ---------------------------------------------------------------------


async def test_pages_of_an_origin_that_was_given_may_ask() -> None:
    async with (
        serving() as h,
        open_door(h.server.addresses[0], origins=["https://app.example"], hosts=["door"]) as door,
    ):
        page = {"origin": "https://app.example", "host": "door:80"}
        asked = {"access-control-request-method": "POST", "access-control-request-headers": "x-a"}
        before = await door.options(CHAT, headers=page | asked)
        assert before.status_code == 204
        assert before.headers["access-control-allow-origin"] == "https://app.example"
        assert before.headers["access-control-allow-headers"] == "x-a"
        answer = await door.post(CHAT, json=BODY, headers=page)
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        other = await door.post(CHAT, json=BODY, headers={"origin": "https://other.example"})
        assert other.status_code == 403
        assert "access-control-allow-origin" not in other.headers
        bare = await door.post(CHAT, json=BODY)
        assert "access-control-allow-origin" not in bare.headers


async def test_ids_of_requests_come_back() -> None:
    async with place() as (_, door):
        answer = await door.post(CHAT, json=BODY, headers={"x-request-id": "mine-1"})
        assert answer.headers["x-request-id"] == "mine-1"
        drawn = (await door.post(CHAT, json=BODY)).headers["x-request-id"]
        assert drawn.startswith("req-")


async def test_single_models_are_counted_as_one_route() -> None:
    async with place() as (_, door):
        for name in ("a", "b/c"):
            assert (await door.get(f"/v1/models/{name}")).status_code == 404
        page = (await door.get("/metrics")).text
    assert 'headrace_openai_requests_total{route="/v1/models",status="404"} 2' in page


@pytest.mark.parametrize(
    "value",
    [
        {}, [], None, "a\u00fc\n", [[]], {"a": {}, "b": [], "c": [None, 1.5, "x"]},
        {"a": [{"b": [{"c": [{"d": [{"e": [1, {"f": 2}]}, []]}]}]}], "g": "\u2028"},
    ],
)  # fmt: skip
def test_an_answer_in_pieces_is_the_same_text(value: Any) -> None:
    assert dumps_in_pieces(value) == dumps(value)


async def test_members_that_are_unknown_are_passed_over_if_so_started() -> None:
    async with serving() as h, open_door(h.server.addresses[0], ignore_unknown=True) as door:
        assert (await door.ask(CHAT, BODY | {"no_such": 1}))["choices"]
