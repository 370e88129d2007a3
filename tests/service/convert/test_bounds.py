"""What is long in a message is measured before it is walked: a refused message costs no more steps
than a bound says, however long it is.

Steps are counted, by the interpreter's own profile of calls: a walk that touches each element makes
at least one call for each.
"""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from headrace.v1 import control_service_pb2 as control
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_service_pb2 as rpc
from headrace.v1 import model_service_pb2 as model

from engine.contract.errors import InvalidRequestError
from engine.contract.sampling_params import GrammarKind, GrammarParams, check_stop_strings
from engine.contract.token_ids import TokenIds
from service.convert.incoming import MAX_PARTS, IncomingCheck
from service.convert.sampling import MAX_CHOICE_STRINGS
from service.convert.values import check_ids
from service.errors.call_errors import FieldError
from tests.service.fake_engine import VOCAB_SIZE, FakeEngine, model_info
from tests.service.helpers import refused, serving, spec

MANY = 200_000
UNKNOWN = b"\xf8\x7f\x01"  # field 2047, of no message here


def steps(work: Callable[[], Any], raises: type[Exception]) -> tuple[int, Exception]:
    """How many calls a piece of work makes before it raises, and what."""
    count = 0

    def on_event(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(on_event)
    try:
        work()
    except raises as error:
        sys.setprofile(None)
        return count, error
    finally:
        sys.setprofile(None)
    raise AssertionError("it was not refused")


def chat(**fields: Any) -> rpc.GenerateRequest:
    return rpc.GenerateRequest(spec=pb.GenerationSpec(chat=pb.ChatInput(**fields)))


LONG: list[tuple[str, Callable[[], Message]]] = [
    ("spec.chat.messages", lambda: chat(messages=[pb.ChatMessage()] * MANY)),
    ("spec.chat.tools", lambda: chat(tools=[pb.Tool()] * MANY)),
    (
        "spec.chat.messages.tool_calls",
        lambda: chat(messages=[pb.ChatMessage(tool_calls=[pb.ToolCall()] * MANY)]),
    ),
    (
        "spec.chat.messages.content_parts.parts",
        lambda: chat(messages=[pb.ChatMessage(content_parts={"parts": [pb.ContentPart()] * MANY})]),
    ),
    (
        "spec.sampling.logit_bias",
        lambda: rpc.GenerateRequest(
            spec=pb.GenerationSpec(sampling={"logit_bias": dict.fromkeys(range(MANY), 1.0)})
        ),
    ),
    (
        "requests",
        lambda: control.CancelRequestsRequest(requests=[control.RequestName()] * MANY),
    ),
]


@pytest.mark.parametrize(("path", "make"), LONG, ids=[path for path, _ in LONG])
def test_long_lists_are_measured_before_they_are_entered(
    path: str, make: Callable[[], Message]
) -> None:
    request = make()
    count, error = steps(lambda: IncomingCheck().check(request), FieldError)
    assert isinstance(error, FieldError)
    assert error.path == path
    assert str(MANY) in str(error)
    assert str(MAX_PARTS) in str(error)
    assert count < 200


def test_parts_are_counted_together() -> None:
    """Lists of which none is too long alone; the walk ends where the sum does."""
    rows = [pb.ChatMessage(tool_calls=[pb.ToolCall()] * 100) for _ in range(2000)]
    request = chat(messages=rows)
    count, error = steps(lambda: IncomingCheck().check(request), FieldError)
    assert isinstance(error, FieldError)
    assert error.path == "spec.chat.messages.tool_calls"
    assert count < 10 * MAX_PARTS


def test_what_may_be_passes() -> None:
    IncomingCheck().check(chat(messages=[pb.ChatMessage()] * (MAX_PARTS - 2)))
    with pytest.raises(FieldError):
        IncomingCheck().check(chat(messages=[pb.ChatMessage()] * (MAX_PARTS - 1)))


def test_many_unknown_fields_are_measured_and_not_walked() -> None:
    request = rpc.GenerateRequest.FromString(UNKNOWN * MANY)
    check = IncomingCheck()

    def work() -> None:
        check.check(request)
        raise FieldError("", "")

    count, _ = steps(work, FieldError)
    assert check.unknown == 1
    assert count < 200


def test_ids_are_counted_before_they_are_looked_at() -> None:
    ids = pb.TokenInput(ids=[2**32 - 1] * MANY).ids
    count, error = steps(lambda: check_ids(ids, "ids", 1000), FieldError)
    assert f"has {MANY} token ids; at most 1000" in str(error)
    assert count < 20
    with pytest.raises(FieldError, match=r"ids\[12\]: is 4294967295"):
        check_ids(ids, "ids", 1000, most=MANY, kept=slice(12, 17))


def test_ids_become_no_objects() -> None:
    """Lists as long as the vocabulary are taken in on the event loop."""
    size = 100_000
    sampling = pb.SamplingOptions(allowed_token_ids=range(size))
    tracemalloc.start()
    try:
        taken = check_ids(sampling.allowed_token_ids, "ids", size)
        listed = TokenIds.set_of(taken)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 24 * size  # a list of them alone takes 36
    assert listed == taken
    assert list(taken[:3]) == [0, 1, 2]


def test_long_texts_are_measured_before_their_characters_are() -> None:
    for work in (
        lambda: check_stop_strings(("x" * MANY,)),
        lambda: GrammarParams(kind=GrammarKind.REGEX, text="x" * 2 * MANY),
    ):
        count, _ = steps(work, InvalidRequestError)
        assert count < 50


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("spec.stop.stop_strings", {"stop": {"stop_strings": [""] * MANY}}),
        ("spec.stop.stop_token_ids", {"stop": {"stop_token_ids": [1] * MANY}}),
        ("spec.stop.eos_token_ids", {"stop": {"eos_token_ids": [1] * MANY}}),
        ("spec.output.logprob_token_ids", {"output": {"logprob_token_ids": [1] * MANY}}),
        ("spec.sampling.banned_token_ids", {"sampling": {"banned_token_ids": [1] * MANY}}),
        ("spec.sampling.allowed_token_ids", {"sampling": {"allowed_token_ids": [1] * MANY}}),
        ("spec.tokens.ids", {"tokens": {"ids": [1] * MANY}}),
        (
            "spec.structured_output.choice",
            {"structured_output": {"choice": {"choices": ["a"] * (MAX_CHOICE_STRINGS + 1)}}},
        ),
    ],
)
async def test_lists_have_bounds_that_are_named(field: str, fields: dict[str, Any]) -> None:
    async with serving() as h:
        error = await refused(h.generate(spec(**fields)))
        assert not h.engine.submitted
    assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
    [listed] = [value for part in fields.values() for value in part.values()]
    length = len(listed["choices"]) if isinstance(listed, dict) else len(listed)
    assert str(length) in error.message


async def test_tokens_that_truncation_leaves_out_are_not_looked_at() -> None:
    wrong = [VOCAB_SIZE] * MANY
    async with serving() as h:
        await h.generate(spec(tokens={"ids": [*wrong, 7, 8]}, truncation={"max_prompt_tokens": 2}))
        right = {"max_prompt_tokens": 2, "side": pb.TRUNCATION_SIDE_RIGHT}
        await h.generate(spec(tokens={"ids": [5, 6, *wrong]}, truncation=right))
        error = await refused(
            h.generate(
                spec(tokens={"ids": [7, 8, VOCAB_SIZE]}, truncation={"max_prompt_tokens": 2})
            )
        )
        long = await refused(
            h.generate(spec(tokens={"ids": wrong}, truncation={"max_prompt_tokens": MANY - 1}))
        )
    assert [sent.prompt for sent in h.engine.submitted] == [(7, 8), (5, 6)]
    assert error.field == "spec.tokens.ids[2]"
    assert long.field == "spec.tokens.ids"
    assert f"comes to {MANY - 1} tokens" in long.message


async def test_as_many_ids_are_detokenized_as_the_context_has() -> None:
    most = MANY - 1
    engine = FakeEngine(info=model_info(max_context_tokens=most))
    async with serving(engine) as h:
        ids = [97] * most
        answer = await h.models.Detokenize(model.DetokenizeRequest(token_ids=ids))
        assert answer.text == "a" * most
        error = await refused(h.models.Detokenize(model.DetokenizeRequest(token_ids=[*ids, 97])))
    assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "token_ids")
    assert str(most) in error.message
