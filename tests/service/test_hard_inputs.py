"""Inputs that end other engines' loops, over real gRPC against the real engine, each among eight
neighbours on one session that must run on undisturbed.

The neighbours are in the engine, each with a token or more, and the engine's thread is held in
front of its next step when a hard input comes; `neighbours` lets it go on afterwards, and compares
every neighbour's tokens with those of `model.generate`.
"""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
import torch
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_service_pb2 as rpc
from headrace.v1.generation_service_pb2_grpc import GenerationServiceStub
from transformers import PreTrainedModel

from engine.contract.config import ContinuousBatchingConfig, LoadConfig
from engine.process.local_client import LocalEngineClient
from service.config import ServiceConfig
from service.server import HeadraceServer
from tests.service.fake_engine import BOS, CHAT_TEMPLATE, EOS, VOCAB_SIZE, byte_tokenizer
from tests.service.helpers import (
    Harness,
    Session,
    check_course,
    details,
    ids_of,
    kinds,
    refused,
    spec,
    until,
)
from tests.tiny_models import CONTEXT, FAMILIES, greedy_reference, make_model, make_prompts

pytestmark = pytest.mark.asyncio(loop_scope="module")

WAIT_S = 30.0
NEIGHBOURS = make_prompts((1, 3, 7, 12, 20, 33, 40, 50))
NEW_TOKENS = 12
BLOCK = 8
UINT32 = 2**32 - 1
INVALID = code_pb2.INVALID_ARGUMENT
UNIMPLEMENTED = code_pb2.UNIMPLEMENTED


# ---- a tiny model behind a server ----------------------------------------------------------------


class Tiny:
    """A tiny model: in memory, to ask what is right, and as a directory, to be served."""

    def __init__(self, model: PreTrainedModel, path: Path) -> None:
        self.model, self.path = model, path
        self.right = [greedy_reference(model, prompt, NEW_TOKENS) for prompt in NEIGHBOURS]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    config = FAMILIES["llama"]()
    config.vocab_size, config.eos_token_id, config.bos_token_id = VOCAB_SIZE, EOS, BOS
    tiny = Tiny(make_model(config), tmp_path_factory.mktemp("models") / "tiny-llama")
    # Sampled unless a request says otherwise, so that temperature 0 says something.
    tiny.model.generation_config.do_sample = True
    tiny.model.generation_config.temperature = 0.9
    tiny.model.save_pretrained(tiny.path)
    byte_tokenizer()._backend.save(str(tiny.path / "tokenizer.json"))
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": CHAT_TEMPLATE}
    (tiny.path / "tokenizer_config.json").write_text(json.dumps(names))
    torch.set_num_threads(threads)
    return tiny


class Gate:
    """Stands before the engine's steps, on the engine's thread."""

    def __init__(self, runner: Any) -> None:
        self._execute = runner.launch
        runner.launch = self
        self._hold = (threading.Event(), 0)  # exchanged as one: the engine's thread reads it
        self.open()

    def close(self, quorum: int = 0) -> None:
        """Hold the next step; or let go on until one has so many requests that generated already,
        and hold that.
        """
        before, self._hold = self._hold, (threading.Event(), quorum)
        before[0].set()

    def open(self) -> None:
        """Let everything go on."""
        self._hold[0].set()

    def __call__(self, batch: Any) -> Any:
        ready = sum(part.request.num_output_tokens > 0 for part in batch.requests)
        gate, quorum = self._hold
        if ready >= quorum:
            assert gate.wait(WAIT_S)
        return self._execute(batch)


class Place(Harness):
    """A server around a tiny model."""

    def __init__(self, tiny: Tiny, server: HeadraceServer, engine: Any, channel: Any) -> None:
        super().__init__(server, engine, channel)
        self.tiny = tiny
        self.manager: Any = engine._engine
        self.core: Any = self.manager._core
        self.runner: Any = self.core.runner
        self.gate = Gate(self.runner)

    @property
    def running(self) -> int:
        return int(self.manager.stats().running)

    async def check_idle(self) -> None:
        """Nothing is left: no request, no block, no log."""
        await until(lambda: not self.core.has_work and not self.registry.live)
        kv_cache = self.core.scheduler.kv_cache
        kv_cache.check_integrity()
        assert kv_cache.num_used_blocks == 0
        assert not self.registry.requests
        assert self.manager.is_running()

    async def is_serving(self) -> bool:
        stub = health_pb2_grpc.HealthStub(self.channel)
        request = health_pb2.HealthCheckRequest(service="headrace.v1.GenerationService")
        return bool((await stub.Check(request)).status == health_pb2.HealthCheckResponse.SERVING)


@asynccontextmanager
async def serving(tiny: Tiny, **options: Any) -> AsyncIterator[Place]:
    batching = ContinuousBatchingConfig(
        **{
            "block_size": BLOCK,
            "num_blocks": 128,
            "max_batch_tokens": 64,
            "max_requests_per_batch": 16,
            "max_queue_size": 64,
            "per_request_processors": True,
            "scheduler_type": "fair",  # as the server has it
            **options,
        }
    )
    engine = LocalEngineClient(str(tiny.path), batching, LoadConfig(device="cpu", threads=1))
    config = ServiceConfig(listen=("127.0.0.1:0",), max_queue_size=batching.max_queue_size)
    server = HeadraceServer(config, engine, progress=lambda line: None)
    await server.start()
    place = None
    try:
        await server.ready()
        async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
            place = Place(tiny, server, engine, channel)
            yield place
    finally:
        if place is not None:
            place.gate.open()
        await server.stop()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def place(tiny: Tiny) -> AsyncIterator[Place]:
    """One server for all tests that need no options of their own."""
    async with serving(tiny) as place:
        yield place


def tokens(prompt: list[int], name: str = "", max_tokens: int = NEW_TOKENS) -> pb.GenerationSpec:
    return spec(
        request_id=name,
        tokens={"ids": prompt},
        sampling={"temperature": 0},
        stop={"max_tokens": max_tokens},
    )


@asynccontextmanager
async def neighbours(place: Place) -> AsyncIterator[Session]:
    """Eight requests that run; the engine is held while the body begins (`place.gate.open` lets it
    go on there), and all eight end as they should.
    """
    session = place.session()
    place.gate.close()
    for index, prompt in enumerate(NEIGHBOURS):
        await session.add(tokens(prompt, f"n{index}"))
    await session.read_until(lambda _: len(session.events()) == len(NEIGHBOURS))
    place.gate.close(quorum=len(NEIGHBOURS))
    await session.read_until(
        lambda _: all("delta" in kinds(events) for events in session.events().values())
    )
    assert not any(session.events()[f"n{i}"][-1].HasField("finished") for i in range(8))
    try:
        yield session
        place.gate.open()
        await session.end()
    finally:
        place.gate.open()
        session.call.cancel()
        await place.check_idle()
    check_neighbours(place, session)


def check_neighbours(place: Place, session: Session) -> None:
    events = session.events()
    for index, right in enumerate(place.tiny.right):
        own = events[f"n{index}"]
        check_course(own)
        assert ids_of(own) == right
        assert own[-1].finished.reason in (pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_STOP)


# ---- what is refused at once ---------------------------------------------------------------------

REFUSED = [
    ({"tokens": {"ids": [5] * (CONTEXT + 1)}}, INVALID, "tokens.ids", "513 tokens; at most 511"),
    ({"tokens": {"ids": [5] * CONTEXT}}, INVALID, "tokens.ids", "512 tokens; at most 511"),
    ({"text": {"text": "x" * 2000}}, INVALID, "text.text", "2000 tokens; at most 511"),
    ({"text": {"text": "x" * 9000}}, INVALID, "text.text", "9000 characters; at most 2560"),
    ({"tokens": {}}, INVALID, "tokens.ids", "no token at all"),
    ({"text": {"text": ""}}, INVALID, "text.text", "no token at all"),
    ({"tokens": {"ids": [5, 6, VOCAB_SIZE]}}, INVALID, "tokens.ids[2]", "is 258"),
    ({"tokens": {"ids": [5, UINT32]}}, INVALID, "tokens.ids[1]", f"is {UINT32}"),
    ({"stop": {"stop_token_ids": [UINT32]}}, INVALID, "stop.stop_token_ids[0]", ""),
    ({"stop": {"eos_token_ids": [3, VOCAB_SIZE]}}, INVALID, "stop.eos_token_ids[1]", ""),
    ({"stop": {"min_tokens": UINT32}}, INVALID, "stop.min_tokens", ""),
    ({"stop": {"stop_strings": ["x" * 257]}}, INVALID, "stop.stop_strings[0]", "257 bytes"),
    ({"stop": {"stop_strings": ["x" * (1 << 19)]}}, INVALID, "stop.stop_strings[0]", ""),
    ({"stop": {"stop_strings": ["x"] * 1000}}, INVALID, "stop.stop_strings", "at most 16"),
    ({"output": {"logprobs": UINT32}}, INVALID, "output.logprobs", "128"),
    ({"sampling": {"temperature": math.nan}}, INVALID, "sampling.temperature", "nan"),
    ({"sampling": {"temperature": math.inf}}, INVALID, "sampling.temperature", "inf"),
    ({"sampling": {"temperature": -0.5}}, INVALID, "sampling.temperature", ""),
    ({"sampling": {"top_p": math.nan}}, INVALID, "sampling.top_p", ""),
    ({"sampling": {"top_p": 0.0}}, INVALID, "sampling.top_p", ""),
    ({"sampling": {"min_p": -math.inf}}, INVALID, "sampling.min_p", ""),
    ({"sampling": {"repetition_penalty": -1.0}}, INVALID, "sampling.repetition_penalty", ""),
    ({"sampling": {"repetition_penalty": 1e30}}, INVALID, "sampling.repetition_penalty", ""),
    ({"sampling": {"presence_penalty": -2.1}}, INVALID, "sampling.presence_penalty", ""),
    ({"sampling": {"frequency_penalty": math.nan}}, INVALID, "sampling.frequency_penalty", ""),
    ({"sampling": {"logit_bias": {VOCAB_SIZE: 1.0}}}, INVALID, "sampling.logit_bias[258]", ""),
    ({"sampling": {"logit_bias": {UINT32: 1.0}}}, INVALID, f"sampling.logit_bias[{UINT32}]", ""),
    ({"sampling": {"logit_bias": {7: 100.5}}}, INVALID, "sampling.logit_bias[7]", ""),
    ({"sampling": {"logit_bias": {7: math.nan}}}, INVALID, "sampling.logit_bias[7]", ""),
    ({"scheduling": {"time_limit": {"seconds": -1}}}, INVALID, "scheduling.time_limit", ""),
    ({"n": 0}, INVALID, "n", "between 1 and 16"),
    ({"n": UINT32}, INVALID, "n", "between 1 and 16"),
    ({"adapter": "lora"}, UNIMPLEMENTED, "adapter", ""),
    ({"structured_output": {}}, INVALID, "structured_output", "no format"),
    (
        {"structured_output": {"grammar": "x" * ((1 << 18) + 1)}},
        INVALID,
        "structured_output.grammar",
        "at most 262144",
    ),
    ({"sampling": {"typical_p": math.nan}}, INVALID, "sampling.typical_p", ""),
    (
        {"sampling": {"no_repeat_ngram_size": UINT32}},
        INVALID,
        "sampling.no_repeat_ngram_size",
        "",
    ),
    (
        {"sampling": {"allowed_token_ids": [1, UINT32]}},
        INVALID,
        "sampling.allowed_token_ids[1]",
        "",
    ),
    (
        {"sampling": {"banned_token_ids": list(range(VOCAB_SIZE))}},
        INVALID,
        "sampling.banned_token_ids",
        "whole vocabulary",
    ),
    ({"output": {"prompt_logprobs": UINT32}}, INVALID, "output.prompt_logprobs", ""),
    ({"output": {"logprob_token_ids": [UINT32]}}, INVALID, "output.logprob_token_ids[0]", ""),
    ({"scheduling": {"priority": -(2**31)}}, INVALID, "scheduling.priority", ""),
    ({"cache": {"salt": "\u00e9" * 65}}, INVALID, "cache.salt", "128 bytes"),
]


def fields_of(status: status_pb2.Status) -> list[str]:
    violations = details(status)["BadRequest"].field_violations
    return [violation.field for violation in violations]


@pytest.mark.parametrize(
    ("fields", "code", "field", "said"), REFUSED, ids=[f"{row[2]}-{row[3]}" for row in REFUSED]
)
async def test_refused_at_once_and_by_name(
    place: Place, fields: dict[str, Any], code: int, field: str, said: str
) -> None:
    wrong = spec(**fields) if {"text", "tokens"}.isdisjoint(fields) else pb.GenerationSpec(**fields)
    wrong.request_id = "wrong"
    async with neighbours(place) as session:
        await session.add(wrong, 99)
        message = await session.read_until(lambda message: message.rejections)
        [rejection] = message.rejections
        assert (rejection.command_id, rejection.request_id) == (99, "wrong")
        assert (rejection.status.code, fields_of(rejection.status)) == (code, [f"add.spec.{field}"])
        assert said in rejection.status.message
        error = await refused(place.generate(wrong))
        assert (error.code.value[0], error.field) == (code, f"spec.{field}")
        assert place.running == len(NEIGHBOURS)


async def test_unknown_fields(place: Place) -> None:
    """They are ignored, unless the message says that it needs what the server lacks."""
    newer = spec(stop={"max_tokens": 1})
    newer.sampling.MergeFromString(b"\xf8\x07\x01" * 10_000)  # field 127, a varint
    async with neighbours(place) as session:
        await session.add(newer, 2)
        await session.read_until(lambda m: any(e.accepted.command_id == 2 for e in m.events))
        add = rpc.AddCommand(spec=newer)
        await session.send(1, add=add, required_capabilities=["time_travel"])
        message = await session.read_until(lambda message: message.rejections)
        assert message.rejections[0].status.code == grpc.StatusCode.UNIMPLEMENTED.value[0]
        assert fields_of(message.rejections[0].status) == ["required_capabilities"]


async def test_a_message_that_is_no_protobuf(place: Place) -> None:
    raw = place.channel.unary_unary("/headrace.v1.GenerationService/Generate")
    async with neighbours(place):
        assert (await refused(raw(b"\xff\xff\xff"))).reason == "MALFORMED_MESSAGE"


async def test_a_duplicate_of_a_live_request(place: Place) -> None:
    async with neighbours(place) as session:
        await session.add(tokens([5], "n0"), 7)
        message = await session.read_until(lambda message: message.rejections)
        assert message.rejections[0].command_id == 7
        assert message.rejections[0].status.code == code_pb2.ALREADY_EXISTS
        error = await refused(place.generate(tokens([5], "n1")))
        assert (error.code, error.reason) == (
            grpc.StatusCode.ALREADY_EXISTS,
            "DUPLICATE_REQUEST_ID",
        )


# ---- what is done, and done right ----------------------------------------------------------------


async def test_output_up_to_the_models_context(place: Place) -> None:
    prompt = make_prompts((CONTEXT - 9,), seed=5)[0]
    right = greedy_reference(place.tiny.model, prompt, 9)
    async with neighbours(place) as session:
        await session.add(tokens(prompt, "long", max_tokens=UINT32))
        place.gate.open()
    events = session.events()["long"]
    check_course(events)
    assert events[-1].finished.reason == pb.FINISH_REASON_CONTEXT
    assert ids_of(events) == right


async def test_nothing_to_generate(place: Place) -> None:
    async with neighbours(place) as session:
        await session.add(tokens([5, 6, 7], "none", max_tokens=0))
        await session.add(tokens([5] * CONTEXT, "full", max_tokens=0))
        place.gate.open()
    for name, length in (("none", 3), ("full", CONTEXT)):
        events = session.events()[name]
        assert kinds(events) == ["accepted", "prompt", "finished"]
        assert events[1].prompt.prompt_tokens == length
        finished = events[2].finished
        assert finished.reason == pb.FINISH_REASON_LENGTH
        assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (length, 0)


async def test_one_token_beyond_the_context_with_nothing_to_generate(place: Place) -> None:
    async with neighbours(place):
        error = await refused(place.generate(tokens([5] * (CONTEXT + 1), max_tokens=0)))
        assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "spec.tokens.ids")
        assert "513 tokens; at most 512" in error.message


async def test_temperature_zero_is_greedy(place: Place) -> None:
    default = pb.SamplingOptions()
    async with neighbours(place) as session:
        await session.add(tokens(NEIGHBOURS[3], "greedy"))
        plain = tokens(NEIGHBOURS[3], "sampled")
        plain.sampling.CopyFrom(default)
        await session.add(plain)
        place.gate.open()
    assert ids_of(session.events()["greedy"]) == place.tiny.right[3]
    assert session.events()["sampled"][0].accepted.sampling.temperature == pytest.approx(0.9)


async def test_top_k_above_the_vocabulary(place: Place) -> None:
    async with neighbours(place) as session:
        for top_k in (VOCAB_SIZE, VOCAB_SIZE + 1, UINT32):
            wide = tokens(NEIGHBOURS[4], f"k{top_k}")
            wide.sampling.CopyFrom(pb.SamplingOptions(temperature=1, top_k=top_k, seed=2**63 - 1))
            await session.add(wide)
        place.gate.open()
    found = [
        ids_of(session.events()[f"k{top_k}"]) for top_k in (VOCAB_SIZE, VOCAB_SIZE + 1, UINT32)
    ]
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == NEW_TOKENS or found[0][-1] == EOS


async def test_values_at_their_bounds(place: Place) -> None:
    extreme = tokens(NEIGHBOURS[5], "extreme")
    extreme.sampling.MergeFrom(
        pb.SamplingOptions(
            repetition_penalty=10,
            presence_penalty=-2,
            frequency_penalty=2,
            logit_bias=dict.fromkeys(range(VOCAB_SIZE), -100.0),
        )
    )
    extreme.output.min_tokens_per_delta = UINT32
    extreme.output.logprobs = 128
    extreme.truncation.max_prompt_tokens = UINT32
    extreme.stop.stop_strings.extend(["\U0010ffff" * 64] * 16)
    async with neighbours(place) as session:
        await session.add(extreme)
        for name, temperature in (("cold", 1e-30), ("hot", 100.0)):
            odd = tokens(NEIGHBOURS[5], name)
            odd.sampling.temperature = temperature
            await session.add(odd)
        place.gate.open()
    events = session.events()
    for name in ("extreme", "cold", "hot"):
        check_course(events[name])
        assert kinds(events[name])[-1] == "finished"
    assert ids_of(events["cold"]) == place.tiny.right[5]
    assert all(
        len(token.candidates) == 128 and math.isfinite(token.logprob)
        for event in events["extreme"]
        for token in event.delta.tokens
    )


async def test_a_time_limit_that_has_passed(place: Place) -> None:
    async with neighbours(place) as session:
        late = tokens([5], "late")
        late.scheduling.time_limit.nanos = 1
        await session.add(late)
        await session.read_until(lambda _: "late" in session.events())
        place.gate.open()
    events = session.events()["late"]
    check_course(events)
    assert events[-1].finished.reason == pb.FINISH_REASON_TIME_LIMIT


# ---- ends that somebody else brings --------------------------------------------------------------


def endless(name: str = "") -> pb.GenerationSpec:
    """As long as the context allows."""
    request = tokens([5, 6], name, max_tokens=UINT32)
    request.stop.ignore_eos = True
    return request


async def test_cancel_and_the_same_id_again(place: Place) -> None:
    async with neighbours(place) as session:
        await session.add(endless("again"))
        await session.send(5, cancel=rpc.CancelCommand(request_id="again"))
        place.gate.open()
        await session.read_until(lambda _: "finished" in kinds(session.events().get("again", ())))
        answers = [answer for message in session.messages for answer in message.cancelled]
        assert [(a.command_id, a.request_id, a.status) for a in answers] == [
            (5, "again", rpc.CANCEL_STATUS_CANCELLED)
        ]
        first = session.events()["again"]
        await session.add(tokens(NEIGHBOURS[2], "again"))
    check_course(first)
    assert first[-1].finished.reason == pb.FINISH_REASON_CANCELLED
    second = session.events()["again"][len(first) :]
    check_course(second)
    assert ids_of(second) == place.tiny.right[2]


async def test_clients_that_vanish(place: Place) -> None:
    target = place.server.addresses[0]
    async with neighbours(place):
        place.gate.open()
        async with grpc.aio.insecure_channel(target) as other:
            stub: Any = GenerationServiceStub(other)
            stream = stub.GenerateStream(rpc.GenerateStreamRequest(spec=endless("gone-1")))
            unary = stub.Generate(rpc.GenerateRequest(spec=endless("gone-2")))
            session = Session(stub.StreamResult())
            await session.add(endless("gone-3"))
            await session.read()
            await stream.read()
            await until(lambda: ("anonymous", "gone-2") in place.registry.requests)
        # The channel is closed, with all three calls on it.
        unary.cancel()
        await until(lambda: not any("gone" in name for _, name in place.registry.requests))
        await until(lambda: not any("gone" in name for name in place.manager._live))


# ---- failures of the model -----------------------------------------------------------------------


def model_failure(status: status_pb2.Status) -> str:
    """The error id of a failure of the model; nothing of its inside may show."""
    assert status.code == code_pb2.INTERNAL
    assert "the model failed" in status.message
    assert "secret" not in str(status)
    info: error_details_pb2.ErrorInfo = details(status)["ErrorInfo"]
    assert info.reason == "REQUEST_FAILED"
    error_id = info.metadata["error_id"]
    assert error_id
    assert error_id in status.message
    return str(error_id)


async def test_an_exception_in_forward_fails_its_batch_alone(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # No room for a ninth request in the batch: it waits, and the failure is not its own.
    async with serving(tiny, max_requests_per_batch=len(NEIGHBOURS)) as place:
        place.gate.close()
        session = place.session()
        for index, prompt in enumerate(NEIGHBOURS):
            await session.add(tokens(prompt, f"n{index}"))
        await session.read_until(lambda _: len(session.events()) == len(NEIGHBOURS))
        place.gate.close(quorum=len(NEIGHBOURS))
        await session.read_until(
            lambda _: all("delta" in kinds(events) for events in session.events().values())
        )
        alone = asyncio.ensure_future(place.generate(tokens(NEIGHBOURS[6])))
        await until(lambda: place.registry.live == len(NEIGHBOURS) + 1)
        [model] = set(place.runner._forward._models.values())
        failures = [torch.OutOfMemoryError("1234 GiB of /secret/path")]

        def failing(*arguments: Any, **options: Any) -> Any:
            if failures:
                raise failures.pop()
            return model(*arguments, **options)

        for path in place.runner._forward._models:
            monkeypatch.setitem(place.runner._forward._models, path, failing)
        place.gate.open()
        await session.end()
        ids = set()
        for index, right in enumerate(tiny.right):
            events = session.events()[f"n{index}"]
            check_course(events)
            ids.add(model_failure(events[-1].failed.status))
            sent = ids_of(events)
            assert 0 < len(sent) < len(right)
            assert sent == right[: len(sent)]
        assert len(ids) == 1
        assert ids.pop() in caplog.text
        assert "secret" in caplog.text
        assert list((await alone).choices[0].token_ids) == tiny.right[6]
        assert await place.is_serving()
        async with neighbours(place):
            pass

        failures.append(torch.OutOfMemoryError("/secret/path"))
        error = await refused(place.generate(tokens([5])))
        model_failure(error.status)
        failures.append(torch.OutOfMemoryError("/secret/path"))
        call = place.generation.GenerateStream(rpc.GenerateStreamRequest(spec=tokens([5])))
        got: list[pb.ResultEvent] = []

        async def read() -> None:
            async for message in call:
                got.extend(message.events)

        model_failure((await refused(read())).status)
        check_course(got)
        model_failure(got[-1].failed.status)
        async with neighbours(place):
            pass


# ---- too much ------------------------------------------------------------------------------------


async def test_500_for_a_queue_of_64(tiny: Tiny) -> None:
    async with (
        serving(tiny, max_requests_per_batch=len(NEIGHBOURS)) as place,
        neighbours(place) as session,
    ):
        for index in range(500):
            await session.add(tokens([3 + index % 100], f"q{index}", max_tokens=1), 1000 + index)
        await session.read_until(
            lambda _: (
                len(session.events())
                - len(NEIGHBOURS)
                + sum(len(message.rejections) for message in session.messages)
                == 500
            )
        )
        rejections = [one for message in session.messages for one in message.rejections]
        accepted = [name for name in session.events() if name.startswith("q")]
        assert len(accepted) == 64
        assert len(rejections) == 500 - 64
        assert {one.request_id for one in rejections}.isdisjoint(accepted)
        for one in rejections:
            assert one.status.code == code_pb2.RESOURCE_EXHAUSTED
            assert "max_queue_size" in one.status.message
            assert details(one.status)["RetryInfo"].retry_delay.ToMilliseconds() > 0
        error = await refused(place.generate(tokens([5])))
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert int(error.trailers["grpc-retry-pushback-ms"]) > 0
        place.gate.open()
        await session.end()
        for name in accepted:
            check_course(session.events()[name])
            assert len(ids_of(session.events()[name])) == 1


async def test_a_cache_that_is_too_small_for_all(tiny: Tiny) -> None:
    """Requests preempt one another, and all tokens come out right; the cache bounds a request."""
    async with serving(tiny, num_blocks=16) as place:
        context = place.manager._limits.cache_context
        assert context < CONTEXT
        prompt = make_prompts((context - 5,), seed=6)[0]
        right = greedy_reference(tiny.model, prompt, 5)
        session = place.session()
        place.gate.close()  # all are there before the first step: else few ever run together
        for index, neighbour in enumerate(NEIGHBOURS):
            await session.add(tokens(neighbour, f"n{index}"))
        await session.add(tokens([5] * context, "beyond"), 3)
        await session.add(tokens(prompt, "long", max_tokens=100))
        await until(lambda: place.registry.live == len(NEIGHBOURS) + 1)
        place.gate.open()
        await session.end()
        check_neighbours(place, session)
        [rejection] = [one for message in session.messages for one in message.rejections]
        assert (rejection.command_id, rejection.status.code) == (3, INVALID)
        assert f"{context} tokens; at most {context - 1}" in rejection.status.message
        events = session.events()
        check_course(events["long"])
        assert events["long"][-1].finished.reason == pb.FINISH_REASON_CONTEXT
        assert ids_of(events["long"]) == right
        counts = [own[-1].finished.timings.preemptions for own in events.values()]
        assert sum(counts) == place.manager.stats().preemptions > 0
        await place.check_idle()
