"""What a request holds: that admission counts it as what it is, refuses what is too much before any
work is done for it, and counts nothing that is not there any more.
"""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from typing import Any, cast

import grpc
import msgspec
import pytest
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_service_pb2 as rpc
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contract.engine_client import Admission
from engine.contract.errors import QueueFullError
from engine.contract.outputs import RequestFailure, RequestOutput, TokenLogprobs
from engine.contract.request import GenerationRequest, Request
from engine.contract.sampling_params import SamplingParams, StopParams
from engine.contract.token_ids import TokenIds, TokenValues
from engine.contract.types import RequestId, TokenId
from engine.fairness.shares import RESERVE_PART
from engine.text import TextStream
from service.admission.accounts import account_of
from service.admission.admission_control import AdmissionBounds, AdmissionControl, Charge, Holding
from service.admission.footprint import Footprint
from service.convert.weight import message_footprint
from service.delivery.events import Accepted, DeliveryOptions
from service.delivery.log import EventLog
from service.errors.call_errors import FieldError, LimitReachedError
from tests.engine.crowd import Clock
from tests.service.admission.refusals import check_advice, limit_of, no_jitter
from tests.service.fake_engine import FakeEngine, byte_tokenizer, model_info
from tests.service.helpers import DEADLINE_S, Harness, details, refused, serving, spec, until

MIB = 1 << 20
VOCAB = 30_000


def part(size: int, field: str = "a") -> Footprint:
    return Footprint(size, field)


def hold(holding: Holding, footprint: Footprint) -> None:
    holding.take(Charge(size=footprint.size), footprint.field)


# ---- by itself ---------------------------------------------------------------------------------


def test_bytes_are_bounded_and_come_free_again() -> None:
    clock = Clock()
    control = AdmissionControl(AdmissionBounds(max_open=9, max_live_bytes=1000), clock, no_jitter)
    one, two = control.holding(account_of("a")), control.holding(account_of("a"))
    hold(one, part(300))
    hold(one, part(400))
    hold(two, part(250))
    with control.holding(account_of("a")) as first:  # rates are measured from the first that leaves
        hold(first, part(10))
        first.release(served=True)
    error = limit_of(lambda: hold(two, part(51)))
    assert (error.reason, error.option) == ("TOO_MANY_LIVE_BYTES", "max_live_bytes")
    assert (error.limit, error.present, two.taken.size) == (1000, 950, 250)
    one.drop(part(300))
    hold(two, part(51))
    clock.now += 4
    one.release(served=True)
    one.release(served=True)  # harmless
    one.drop(part(400))
    assert control.live_bytes == two.taken.size == 301
    # 400 left in 4 seconds, and this one is 60 too many.
    error = limit_of(lambda: hold(control.holding(account_of("a")), part(759)))
    assert error.retry_after_s == pytest.approx(0.6, rel=0.2)
    two.release(served=False)
    assert (control.live_bytes, control.is_empty) == (0, True)


def test_what_alone_is_too_much_is_wrong_and_not_early() -> None:
    control = AdmissionControl(AdmissionBounds(max_open=9, max_live_bytes=1000))
    holding = control.holding(account_of("a"))
    hold(holding, part(600, "text.text"))
    with pytest.raises(FieldError, match=r"at most 1000 .*\(max_live_bytes\)") as caught:
        hold(holding, part(401, "sampling.logit_bias"))
    assert caught.value.path == "sampling.logit_bias"
    assert control.live_bytes == 600


def test_what_was_not_taken_over_is_released() -> None:
    control = AdmissionControl(AdmissionBounds(max_open=9))
    with control.holding(account_of("a")) as holding:
        hold(holding, part(600))
    assert control.live_bytes == 0
    with control.holding(account_of("a")) as holding:
        hold(holding, part(600))
        holding.is_taken_over = True
    assert control.live_bytes == 600


STEPS = st.lists(
    st.tuples(st.sampled_from(["begin", "add", "drop", "end"]), st.integers(0, 400)), max_size=60
)


@given(STEPS)
@settings(deadline=None)
def test_the_count_is_the_sum_of_what_is_held(steps: list[tuple[str, int]]) -> None:
    control = AdmissionControl(AdmissionBounds(max_open=9, max_live_bytes=1000))
    held: list[tuple[str, Holding, list[int]]] = []
    for action, number in steps:
        if action == "begin" or not held:
            held.append((f"c{number % 3}", control.holding(account_of(f"c{number % 3}")), []))
            continue
        name, holding, parts = held[number % len(held)]
        if action == "add":
            try:
                hold(holding, part(number))
                parts.append(number)
            except (LimitReachedError, FieldError):
                assert control.live_bytes + number > 1000 or len({name for name, *_ in held}) > 1
        elif action == "drop" and parts:
            holding.drop(part(parts.pop()))
        elif action == "end":
            holding.release(served=bool(number % 2))
            held.remove((name, holding, parts))
        expected = sum(sum(parts) for _, _, parts in held)
        assert control.live_bytes == expected <= 1000 + 1000 // RESERVE_PART
        of_each = {name: 0 for name, _, parts in held if sum(parts)}
        for name, _, parts in held:
            if name in of_each:
                of_each[name] += sum(parts)
        shares = control._bytes
        assert {name: shares.held_by(account_of(name)) for name in of_each} == of_each


# ---- as it is ----------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "choices": {"n": 16},
    "prompt": {"tokens": {"ids": [number % VOCAB for number in range(60_000)]}},
    "prompt_choices": {"tokens": {"ids": [n % VOCAB for n in range(20_000)]}, "n": 16},
    "lists": {"sampling": {"allowed_token_ids": range(VOCAB), "banned_token_ids": range(1, VOCAB)}},
    "biases": {"sampling": {"logit_bias": dict.fromkeys(range(1024), 1.5)}, "n": 4},
    "stop_strings": {
        "n": 4,
        "stop": {"stop_strings": [f"{number:03}" + "x" * 250 for number in range(16)]},
    },
    "endings": {
        "stop": {
            "stop_token_ids": range(1000, 1256),
            "eos_token_ids": range(5000, 5256),
            "max_tokens": 1,
        }
    },
    "echo": {"text": {"text": "x" * 100_000}, "output": {"echo": True}},
}


def make(request_id: str, fields: dict[str, Any]) -> pb.GenerationSpec:
    if "tokens" in fields or "text" in fields:
        return pb.GenerationSpec(request_id=request_id, **fields)
    return spec(request_id=request_id, **fields)


async def add(h: Harness, request_id: str, **fields: Any) -> Any:
    message = rpc.AddRequestRequest(spec=make(request_id, fields))
    return await h.generation.AddRequest(message, timeout=DEADLINE_S)


class Records(FakeEngine):
    """Takes requests in as the engine's process does, and does nothing with them."""

    def __init__(self) -> None:
        super().__init__(info=model_info(vocab_size=VOCAB, max_context_tokens=1 << 17))
        self._message = msgspec.msgpack.Decoder(GenerationRequest)
        self._records: list[Request] = []

    async def submit(self, request: GenerationRequest) -> Admission:
        spec = self._message.decode(msgspec.msgpack.encode(request))
        endings = spec.stop.ending_token_ids
        self._records += [
            Request(spec=spec, arrival=0.0, max_total_tokens=9, ending_token_ids=endings)
            for _ in range(spec.n)
        ]
        return Admission(0, 0.0)


def start_tracing() -> None:
    """Garbage of other tests is collected before: its ends may allocate, too."""
    gc.collect()
    tracemalloc.start()


def allocated() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


@pytest.mark.parametrize("kind", KINDS)
async def test_it_is_counted_as_what_it_takes(kind: str) -> None:
    """In the front end, whose objects these are; and in the engine, whose records are made here as
    its process makes them.
    """
    engine = Records()
    count = 10
    async with serving(engine, max_live_bytes=0) as h:
        control = h.registry.admission
        for number in range(3):
            await add(h, f"warm-{number}", **KINDS[kind])
        counted = control.live_bytes
        start_tracing()
        try:
            before = allocated()
            for number in range(count):
                await add(h, f"r-{number}", **KINDS[kind])
            taken = (allocated() - before) / count
        finally:
            tracemalloc.stop()
        counted = (control.live_bytes - counted) // count
    assert taken == pytest.approx(counted, rel=0.25), (taken, counted)


def test_ids_of_a_prediction_are_counted_like_those_of_a_prompt() -> None:
    ids = [7] * 100_000
    prompt = message_footprint(pb.GenerationSpec(tokens={"ids": ids}))
    predicted = message_footprint(pb.GenerationSpec(prediction={"tokens": {"ids": ids}}))
    assert predicted.size == pytest.approx(prompt.size, rel=0.01)


def test_what_guesses_tokens_is_counted_where_it_may_be() -> None:
    """For each choice and its output, for the prompt, and for what is expected."""
    request = GenerationRequest(
        request_id=RequestId("a"),
        prompt=TokenIds.of(range(1000)),
        sampling=SamplingParams(),
        stop=StopParams(max_tokens=500),
        n=3,
        prediction=TokenIds.of(range(100)),
    )

    def size(*, speculates: bool) -> int:
        return Footprint.of_request(
            request,
            input_field="tokens.ids",
            output_tokens=500,
            token_bytes=0,
            stop_strings=(),
            echo="",
            labels={},
            speculates=speculates,
        ).size

    more = size(speculates=True) - size(speculates=False)
    assert more > 3 * (8_000 + 30 * 500) + 30 * 1000 + 30 * 100


MANY = 15_000
JSON_TEXTS = {
    "integers": '{"a":[' + ",".join(["1000000"] * MANY) + "]}",
    "numbers": '{"a":[' + ",".join(["0.5"] * MANY) + "]}",
    "strings": '{"a":[' + ",".join(f'"s{n}"' for n in range(MANY)) + "]}",
    "wide_strings": '{"a":[' + ",".join(['"水"'] * MANY) + "]}",
    "members": "{" + ",".join(f'"k{n}":1000' for n in range(MANY)) + "}",
    "lists": '{"a":[' + ",".join(["[1]"] * (MANY // 2)) + "]}",
    "deep_lists": '{"a":[' + ",".join(["[" * 50 + "]" * 50] * (MANY // 51)) + "]}",
    "objects": '{"a":[' + ",".join(['{"b":1}'] * (MANY // 2)) + "]}",
    "deep_objects": '{"a":[' + ",".join(['{"a":' * 50 + "1" + "}" * 50] * (MANY // 51)) + "]}",
    "a_string": '{"a":"' + "x" * 250_000 + '"}',
    "a_wide_string": '{"a":"' + "x" * 250_000 + '😀"}',
}
_ASSISTANT = pb.CHAT_ROLE_ASSISTANT
CHATS: dict[str, pb.ChatInput] = {
    **{
        name: pb.ChatInput(messages=[{"role": 2, "content": "x"}], template_arguments_json=text)
        for name, text in JSON_TEXTS.items()
    },
    "tool": pb.ChatInput(
        messages=[{"role": 2, "content": "x"}], tools=[{"definition_json": JSON_TEXTS["members"]}]
    ),
    "calls": pb.ChatInput(
        messages=[{"role": _ASSISTANT, "tool_calls": [{"name": "f", "id": "1"}] * 4000}]
    ),
    "calls_with_arguments": pb.ChatInput(
        messages=[
            {"role": _ASSISTANT, "tool_calls": [{"name": "f", "arguments_json": '{"a":1}'}] * 4000}
        ]
    ),
    "tools": pb.ChatInput(
        messages=[{"role": 2, "content": "x"}],
        tools=[{"name": f"f{n}", "description": "d", "parameters_json": "{}"} for n in range(4000)],
    ),
    "messages": pb.ChatInput(messages=[{"role": 2, "content": "x"}] * 4000),
    "parts": pb.ChatInput(
        messages=[{"role": 2, "content_parts": {"parts": [{"text": "x"}] * 4000}}]
    ),
}


@pytest.mark.parametrize("kind", CHATS)
async def test_a_conversation_is_counted_as_what_it_takes_while_it_is_converted(kind: str) -> None:
    """Never as much less; as more where what is counted is cheap, or what it may become is not."""
    raw = pb.GenerationSpec(chat=CHATS[kind]).SerializeToString()
    account = account_of("a")
    async with serving(tokenizer=byte_tokenizer(chat_template="x")) as h:
        encoder = h.server.state.front.encoder
        assert encoder is not None
        await encoder.encode_chat(account, pb.GenerationSpec.FromString(raw).chat)
        message = pb.GenerationSpec.FromString(raw)
        start_tracing()
        try:
            before = allocated()
            tracemalloc.reset_peak()
            await encoder.encode_chat(account, message.chat)
            taken = tracemalloc.get_traced_memory()[1] - before
        finally:
            tracemalloc.stop()
    counted = message_footprint(message).size
    assert 0.95 * taken <= counted <= 4 * taken, counted / taken


# ---- in a server -------------------------------------------------------------------------------

LONG = {"tokens": {"ids": [5] * 50_000}, "stop": {"max_tokens": 100}}
"""Takes 400 KB in the engine, and while its message is there 500 KB more."""


def long_engine(**more: Any) -> FakeEngine:
    return FakeEngine(auto=False, info=model_info(max_context_tokens=1 << 17), **more)


async def test_too_many_bytes_are_refused_before_work_is_done_and_admitted_after_an_end() -> None:
    clock = Clock()
    engine = long_engine()
    async with serving(engine, clock=clock, max_live_bytes=1_250_000) as h:
        control = h.registry.admission
        await add(h, "a", **LONG)
        held = control.live_bytes
        assert 400_000 < held < 420_000  # without its message
        await add(h, "b", **{**LONG, "tokens": {"ids": [5] * 45_000}})
        shorter = {**LONG, "tokens": {"ids": [5] * 30_000}}
        both = control.live_bytes
        clock.now += 2
        error = await refused(add(h, "c", **LONG))
        assert error.reason == "TOO_MANY_LIVE_BYTES"
        assert error.details["ErrorInfo"].metadata["limit"] == "max_live_bytes"
        assert error.details["ErrorInfo"].metadata["max_live_bytes"] == "1250000"
        assert error.details["ErrorInfo"].metadata["present"] == str(both)
        check_advice(error, error.details["RetryInfo"].retry_delay.ToMilliseconds() / 1000)
        assert control.live_bytes == both
        # The same in-band, and for a call of its own.
        session = h.session()
        await session.add(make("d", LONG), 1)
        message = await session.read_until(lambda m: m.rejections)
        assert details(message.rejections[0].status)["ErrorInfo"].reason == "TOO_MANY_LIVE_BYTES"
        await session.end()
        assert (await refused(h.generate(make("e", LONG)))).reason == "TOO_MANY_LIVE_BYTES"
        engine.time_out(engine.submitted[0].request_id)
        engine.step()
        await until(lambda: control.live_bytes == both - held)
        await add(h, "c", **shorter)
        assert len(engine.submitted) == 3
        engine.run()
        await until(lambda: not h.registry.live)
        assert (control.live_bytes, control.is_empty) == (0, True)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        (LONG, "tokens.ids"),
        ({"sampling": {"no_repeat_ngram_size": 3}, "n": 16, "stop": {"max_tokens": 2000}},
         "sampling.no_repeat_ngram_size"),
        ({"stop": {"stop_strings": [f"{n}" + "x" * 250 for n in range(16)]}}, "stop.stop_strings"),
        ({"output": {"prompt_logprobs": 100}, "tokens": {"ids": [5] * 100}},
         "output.prompt_logprobs"),
        ({"structured_output": {"regex": "ab" * 100_000}}, "structured_output"),
    ],
)  # fmt: skip
async def test_a_request_that_alone_is_too_large_names_what_is(
    fields: dict[str, Any], field: str
) -> None:
    async with serving(long_engine(), max_live_bytes=MIB) as h:
        # As small a bound as the largest of them needs, which is no option's business.
        control = AdmissionControl(AdmissionBounds(max_open=9, max_live_bytes=600_000))
        h.registry.admission = control
        error = await refused(add(h, "a", **fields))
        assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, f"spec.{field}")
        assert "(max_live_bytes)" in error.message
        assert (control.live_bytes, control.is_empty) == (0, True)


async def test_it_counts_while_it_is_tokenized_and_while_the_engine_decides() -> None:
    engine = long_engine()
    async with serving(engine) as h:
        control = h.registry.admission
        asked, decided = asyncio.Event(), asyncio.Event()
        submit = engine.submit

        async def slow(request: GenerationRequest) -> Admission:
            asked.set()
            await decided.wait()
            return await submit(request)

        engine.submit = slow  # type: ignore[method-assign]
        adding = asyncio.create_task(add(h, "a", **LONG))
        await asyncio.wait_for(asked.wait(), DEADLINE_S)
        with_message = control.live_bytes
        assert with_message > 500_000
        decided.set()
        await adding
        assert 400_000 < control.live_bytes < 420_000 < with_message
        # A call of its own: gRPC keeps its message.
        call = h.generation.Generate(rpc.GenerateRequest(spec=make("b", LONG)))
        await until(lambda: len(engine.submitted) == 2)
        assert control.live_bytes == pytest.approx(420_000 + with_message, rel=0.05)
        h.registry.cancel("anonymous", "b")
        await until(lambda: engine.cancelled)
        engine.step()
        await call
        assert 400_000 < control.live_bytes < 420_000


async def test_nothing_stays_counted_whatever_the_end() -> None:
    engine = long_engine()
    async with serving(engine) as h:
        control = h.registry.admission

        def nothing() -> bool:
            return (control.live_bytes, control.is_empty) == (0, True)

        # Refused: by its fields, by the engine, for its name.
        await refused(add(h, "a", stop={"stop_strings": [""]}))
        assert nothing()
        engine.refuse_next.append(QueueFullError(3, 0.25))
        await refused(add(h, "a"))
        assert nothing()
        await add(h, "a")
        one = control.live_bytes
        await refused(add(h, "a", stop={"max_tokens": 1}))
        assert control.live_bytes == one
        await add(h, "a")  # a retry
        assert control.live_bytes == one
        # Cancelled, failed, timed out, finished.
        for name in ("b", "c", "d"):
            await add(h, name)
        assert control.live_bytes == 4 * one
        h.registry.cancel("anonymous", "a")
        await until(lambda: engine.cancelled)
        engine.fail(engine.submitted[1].request_id, RequestFailure("it broke", "an-id"))
        engine.time_out(engine.submitted[2].request_id)
        engine.run()
        await until(lambda: not h.registry.live)
        assert nothing()
        # A lost stream, and one whose results are not read yet.
        session = h.session()
        await session.add(spec(request_id="e"))
        await session.read()
        session.call.cancel()
        await until(lambda: len(engine.cancelled) == 2)
        engine.step()
        await until(nothing)
        await add(h, "f")
        engine.run()
        await until(nothing)
        assert h.registry.stats().kept_results > 0


async def test_nothing_stays_counted_of_an_engine_that_died() -> None:
    engine = long_engine()
    async with serving(engine) as h:
        control = h.registry.admission
        for name in ("a", "b"):
            await add(h, name, **LONG)
        assert control.live_bytes > 800_000
        engine.die(RuntimeError("it is gone"))
        await until(lambda: not h.registry.live)
        assert (control.live_bytes, control.is_empty) == (0, True)


# ---- results -----------------------------------------------------------------------------------


class Words:
    """Text as a tokenizer makes it: a piece of some characters for each token."""

    stop = None

    def __init__(self) -> None:
        self._count = 0

    def push(self, ids: tuple[int, ...], *, ends_with_stop_token: bool) -> str:
        self._count += 1
        return f" w{self._count:03}"


def logprobs_of(number: int, candidates: int) -> TokenLogprobs:
    pairs = [(5000 + 7 * number + i, -0.1 * i - number) for i in range(candidates)]
    return TokenLogprobs(-1.5 - number, 300 + number, TokenValues.of(pairs))


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("candidates", [None, 0, 1, 20])
@pytest.mark.parametrize("has_text", [pytest.param(False, marks=pytest.mark.slow), True])
def test_what_is_not_read_is_counted_as_what_it_takes(
    candidates: int | None, has_text: bool, taken: bool
) -> None:
    count = 600
    options = DeliveryOptions(candidates=candidates, token_details=candidates is not None)
    log = EventLog(
        "r",
        options=options,
        text_streams=[cast(TextStream, Words()) if has_text else None],
        ending_ids=frozenset(),
        prompt=TokenIds.of([1, 2]),
        now=0.0,
    )
    log.keep = True
    log.accept(ACCEPTED, 0.0)
    messages = [
        msgspec.msgpack.encode(
            RequestOutput(
                RequestId("i/r#1"),
                token_ids=(TokenId(1000 + number),),
                logprobs=None if candidates is None else (logprobs_of(number, candidates),),
            )
        )
        for number in range(count)
    ]
    decode = msgspec.msgpack.Decoder(RequestOutput).decode
    start_tracing()
    try:
        before, counted = allocated(), log.held_size
        for message in messages:
            log.push(decode(message), 1.0)
        if taken:
            log.take_from(1)
        grown, counted = allocated() - before, log.held_size - counted
    finally:
        tracemalloc.stop()
    assert grown == pytest.approx(counted, rel=0.25), (grown / count, counted / count)


ACCEPTED = Accepted(
    sampling=SamplingParams(),
    stop=StopParams(max_tokens=9),
    stop_strings=(),
    include_stop=False,
    max_reasoning_tokens=None,
    prompt_tokens=2,
    queue_position=0,
    command_id=0,
    accepted_at=0.0,
    request_id="a",
)
