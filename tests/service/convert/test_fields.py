"""The fields of a request reach the engine as they were asked for, are echoed with their effective
values, and what the engine answers comes back where the contract says."""

from __future__ import annotations

import grpc
import pytest
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import model_service_pb2 as model

from engine.contract.sampling_params import (
    GrammarKind,
    GrammarParams,
    LogprobParams,
    SamplingParams,
)
from engine.contract.types import TokenId
from service.convert.converter import cache_salt
from tests.service.fake_engine import FakeEngine, model_info, says, token_logprobs
from tests.service.helpers import Names, refused, serving, spec

ONE = {"max_tokens": 1}


async def test_sampling_fields_act_and_are_echoed() -> None:
    default = SamplingParams(
        temperature=0.7, typical_p=0.9, no_repeat_ngram_size=4, banned_token_ids=(TokenId(9),)
    )
    async with serving(FakeEngine(info=model_info(default_sampling=default))) as h:
        given = await h.generate(
            spec(
                stop=ONE,
                sampling={
                    "typical_p": 0.25,
                    "no_repeat_ngram_size": 0,
                    "allowed_token_ids": [97, 5] * 100,
                    "banned_token_ids": [5] * 200,
                },
            )
        )
        absent = await h.generate(spec(stop=ONE))
        card = (await h.models.GetModel(model.GetModelRequest())).model
    first, second = (request.sampling for request in h.engine.submitted)
    assert first.typical_p == pytest.approx(0.25)
    assert (first.no_repeat_ngram_size, first.allowed_token_ids) == (0, (5, 97))
    assert first.banned_token_ids == (5,)
    assert len(first.allowed_token_ids.packed) == 8  # as sets, without repeats
    assert (second.typical_p, second.no_repeat_ngram_size) == (0.9, 4)
    assert (second.allowed_token_ids, second.banned_token_ids) == ((), (9,))
    echoed = given.accepted.sampling
    assert echoed.typical_p == pytest.approx(0.25)
    assert echoed.HasField("no_repeat_ngram_size")
    assert (list(echoed.allowed_token_ids), list(echoed.banned_token_ids)) == ([5, 97], [5])
    assert absent.accepted.sampling.no_repeat_ngram_size == 4
    assert list(absent.accepted.sampling.banned_token_ids) == [9]
    assert card.default_sampling.typical_p == pytest.approx(0.9)
    assert card.limits.max_choices == 16
    assert {"structured_output", "priorities"} <= set(card.capabilities.names)
    assert card.capabilities.scheduling.prefix_cache


@pytest.mark.parametrize(
    ("output", "grammar"),
    [
        ({"json_schema": "{}"}, GrammarParams(kind=GrammarKind.JSON_SCHEMA, text="{}")),
        ({"json_object": {}}, GrammarParams(kind=GrammarKind.JSON_OBJECT)),
        (
            {"json_object": {}, "flexible_whitespace": True},
            GrammarParams(kind=GrammarKind.JSON_OBJECT, flexible_whitespace=True),
        ),
        ({"regex": "a+"}, GrammarParams(kind=GrammarKind.REGEX, text="a+")),
        ({"grammar": "start: x"}, GrammarParams(kind=GrammarKind.LARK, text="start: x")),
        (
            {"choice": {"choices": ["yes", "no"]}},
            GrammarParams(kind=GrammarKind.CHOICE, choices=("yes", "no")),
        ),
    ],
)
async def test_forms_reach_the_engine(output: dict[str, object], grammar: GrammarParams) -> None:
    async with serving() as h:
        await h.generate(spec(structured_output=output, stop=ONE))
        await h.generate(spec(stop=ONE))
    assert [request.grammar for request in h.engine.submitted] == [grammar, None]


async def test_a_form_that_the_engine_refuses_names_its_field() -> None:
    async with serving() as h:
        error = await refused(h.generate(spec(structured_output={"json_schema": "no json"})))
        assert not h.registry.requests
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert error.field == "spec.structured_output.json_schema"
    assert "is not JSON" in error.message


async def test_priorities_run_first() -> None:
    engine = FakeEngine(script=says("x"), auto=False, info=model_info(max_running_requests=1))
    async with serving(engine) as h:
        session = h.session()
        for name, priority in (("a", 0), ("low", -100), ("high", 100), ("b", 0)):
            await session.add(spec(request_id=name, scheduling={"priority": priority}))
        await session.read_until(lambda _: len(session.events()) == 4)
        engine.run()
        messages = await session.end()
    names = Names()
    events = [named for message in messages for named in names.take(message)]
    order = [name for name, event in events if event.HasField("finished")]
    assert order == ["a", "high", "b", "low"]
    assert [request.priority for request in engine.submitted] == [0, -100, 100, 0]


def test_salts_of_two_identities_are_never_the_same() -> None:
    pairs = [("a", ""), ("", "a"), ("a", "b"), ("ab", ""), ("", "ab"), ("a", "ba"), ("ab", "a")]
    assert len({cache_salt(identity, salt) for identity, salt in pairs}) == len(pairs)
    assert cache_salt("a", "b") == cache_salt("a", "b")


async def test_cached_prefixes_are_shared_by_salt_and_counted() -> None:
    async with serving(FakeEngine(script=says("x"))) as h:

        async def cached(text: str, **cache: object) -> tuple[int, int]:
            result = await h.generate(spec(text, n=2, cache=cache))
            assert result.prompt.cached_tokens == result.usage.cached_tokens
            return result.prompt.cached_tokens, result.usage.prompt_tokens

        assert await cached("abcdef") == (0, 6)
        assert await cached("abcxyz") == (3, 6)
        assert await cached("abcdef") == (5, 6)
        assert await cached("abcdef", salt="s") == (0, 6)
        assert await cached("abcdef", salt="s") == (5, 6)
        assert await cached("abcdef", bypass_prefix_cache=True) == (0, 6)


async def test_prompt_logprobs_come_with_the_prompt() -> None:
    async with serving(FakeEngine(script=says("x"))) as h:
        result = await h.generate(spec("hey", output={"prompt_logprobs": 2}, stop=ONE))
        bare = await h.generate(spec("hey", output={"prompt_logprobs": 0}, stop={"max_tokens": 0}))
        none = await h.generate(spec("hey", stop=ONE))
    first, *rest = result.prompt.tokens
    assert (first.id, first.text, first.bytes) == (ord("h"), "h", b"h")
    assert not first.HasField("logprob")
    assert not first.candidates
    assert [token.id for token in rest] == list(b"ey")
    for position, token in enumerate(rest, 1):
        want = token_logprobs(position, token.id, 2)
        assert (token.logprob, token.rank) == (want.logprob, want.rank)
        assert [(one.id, one.logprob) for one in token.candidates] == list(want.candidates)
    assert [len(token.candidates) for token in bare.prompt.tokens] == [0, 0, 0]
    assert bare.prompt.tokens[2].HasField("logprob")
    assert not none.prompt.tokens
    assert not result.choices[0].tokens  # of the prompt only


async def test_requested_ids_follow_the_candidates() -> None:
    async with serving(FakeEngine(script=says("ab"))) as h:
        both = await h.generate(spec(output={"logprobs": 2, "logprob_token_ids": [3, 97]}))
        alone = await h.generate(spec(output={"logprob_token_ids": [7]}))
    want = token_logprobs(0, ord("a"), 2, (TokenId(3), TokenId(97)))
    found = [(one.id, one.logprob) for one in both.choices[0].tokens[0].candidates]
    assert found == [*want.candidates, *want.requested]
    assert both.choices[0].tokens[0].candidates[2].bytes == b"\x03"
    assert [[one.id for one in token.candidates] for token in alone.choices[0].tokens] == [[7]] * 3
    assert alone.choices[0].tokens[0].logprob == want.logprob
    assert h.engine.submitted[1].logprobs == LogprobParams(top_n=0, token_ids=(TokenId(7),))


async def test_every_choice_begins_with_the_echo_which_no_stop_string_matches() -> None:
    async with serving(FakeEngine(script=says("one. two", "three"))) as h:
        result = await h.generate(
            spec("stop. here", n=2, output={"echo": True}, stop={"stop_strings": [". "]})
        )
    assert [choice.text for choice in result.choices] == ["stop. hereone", "stop. herethree"]
    assert list(result.choices[0].token_ids) == list(b"one. ")  # the output's alone
    assert result.choices[0].finished.stop_string == ". "


async def test_several_choices_with_details_and_times() -> None:
    async with serving(FakeEngine(script=says("ab", "c"))) as h:
        result = await h.generate(spec(n=2, output={"logprobs": 1, "record_timestamps": True}))
    assert [[token.text for token in choice.tokens] for choice in result.choices] == [
        ["a", "b", "<eos>"],
        ["c", "<eos>"],
    ]
    for choice in result.choices:
        for position, token in enumerate(choice.tokens):
            assert token.logprob == token_logprobs(position, token.id, 1).logprob
            assert token.HasField("elapsed_duration")
    assert result.choices[1].finished.reason == pb.FINISH_REASON_STOP
