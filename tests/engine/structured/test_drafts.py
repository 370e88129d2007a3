"""Drafts of outputs that a grammar holds to: masks for rows that follow them, and forced text."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from engine.contract.request import Request, TokenMatcher
from engine.contract.sampling_params import GrammarKind, GrammarParams, ReasoningParams
from engine.contract.types import RequestKey, TokenId
from engine.sampling.edits import LogitEdits
from engine.sampling.sampling_rows import Row
from engine.structured import GrammarCompiler
from engine.text import Tokenizer
from tests.engine.structured.conftest import V, form
from tests.engine.structured.following import allowed

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "identifier": {"type": "integer"},
            "certainty": {"enum": ["certainly", "hardly"]},
        },
        "required": ["identifier", "certainty"],
        "additionalProperties": False,
    }
)
JSON = form(GrammarKind.JSON_SCHEMA, SCHEMA)
THOUGHT = GrammarParams(
    kind=GrammarKind.JSON_SCHEMA,
    text=SCHEMA,
    reasoning=ReasoningParams(opening="<think>", closing="</think>", is_open=True, max_tokens=20),
)


def drawn(matcher: TokenMatcher, seed: int, count: int) -> list[TokenId]:
    """Tokens that a copy of the matcher takes."""
    ahead, draw = matcher.copy(), random.Random(seed)
    tokens: list[TokenId] = []
    while len(tokens) < count and not ahead.is_complete:
        ids = sorted(allowed(ahead, V))
        token = TokenId(draw.choice(ids[:80]))
        if not ahead.accept(token):
            break
        tokens.append(token)
    return tokens


def masks_of(matcher: TokenMatcher, drafts: list[TokenId]) -> list[set[int]]:
    """The masks of a request's rows: of its own, and of those that follow drafts."""
    fake: Any = SimpleNamespace(
        matcher=matcher,
        key=RequestKey(1),
        drafts=tuple(drafts),
        num_tokens=10,
        spec=SimpleNamespace(sampling=SimpleNamespace(allowed_token_ids=(), banned_token_ids=())),
    )
    request = cast(Request, fake)
    rows = [Row(request, 10 + index) for index in range(1 + len(drafts))]
    packed = LogitEdits(V, torch.device("cpu")).masks(rows).numpy().view(np.int32)
    bits = np.unpackbits(packed.view(np.uint8), axis=1, bitorder="little")[:, :V]
    return [set(np.flatnonzero(row).tolist()) for row in bits]


@pytest.mark.parametrize("params", [JSON, THOUGHT])
def test_rows_that_follow_drafts_have_the_masks_of_later_steps(
    compiler: GrammarCompiler, eos: TokenId, params: GrammarParams
) -> None:
    for seed in range(30):
        matcher = compiler.compile(params, frozenset([eos]))()
        for token in drawn(matcher, seed, seed % 13):
            assert matcher.accept(token)
        drafts = drawn(matcher, seed + 100, 6)
        allowed(matcher, V)  # so that what the own row costs is counted
        spent = matcher.spent_s
        found = masks_of(matcher, drafts)
        assert matcher.spent_s > spent or not drafts or params is THOUGHT, "it is charged"
        for mask, token in zip(found, drafts, strict=False):
            assert mask == allowed(matcher, V)
            assert matcher.accept(token)
        if not matcher.is_complete:
            assert found[len(drafts)] == allowed(matcher, V)


@pytest.mark.parametrize("params", [JSON, THOUGHT])
def test_a_copy_goes_on_by_itself(
    compiler: GrammarCompiler, eos: TokenId, params: GrammarParams
) -> None:
    """What it takes leaves nothing in the matcher that it is a copy of."""

    def state(matcher: Any) -> dict[str, str]:
        parts = [matcher, *filter(None, [getattr(matcher, "_form", None)])]
        return {
            f"{type(part).__name__}.{name}": repr(getattr(part, name))
            for part in parts
            for name in part.__slots__
            if name not in ("_form", "_matcher", "_grammar", "_root", "_clock", "_held")
        }

    for seed in range(20):
        matcher = compiler.compile(params, frozenset([eos]))()
        for token in drawn(matcher, seed, seed % 7):
            assert matcher.accept(token)
        before, mask = state(matcher), allowed(matcher.copy(), V)
        ahead = matcher.copy()
        for token in drawn(matcher, seed + 50, 8):
            assert ahead.accept(token)
        assert state(matcher) == before
        assert allowed(matcher, V) == mask


def test_rows_that_follow_what_does_not_fit_are_not_judged(
    compiler: GrammarCompiler, tokenizer: Tokenizer, eos: TokenId
) -> None:
    matcher = compiler.compile(JSON, frozenset([eos]))()
    [brace] = tokenizer.encode("{", add_special_tokens=False)
    found = masks_of(matcher, [TokenId(brace), TokenId(brace), TokenId(brace)])
    assert brace in found[0]
    assert brace not in found[1], "so the next row's token is not kept, whatever its mask"
    assert matcher.num_fitting([brace, brace, brace]) == 1
    assert matcher.accept(TokenId(brace)), "the state is unchanged"


def test_forced_text_is_guessed_and_fits(
    compiler: GrammarCompiler, tokenizer: Tokenizer, eos: TokenId
) -> None:
    matcher = compiler.compile(JSON, frozenset([eos]))()
    assert tokenizer.decode(list(matcher.forced(9))).startswith('{"identifier"')
    for token in matcher.forced(9):
        assert matcher.accept(TokenId(token))
    assert matcher.forced(9) == (), "a number may be anything"
    for token in tokenizer.encode('7, "certainty": "c', add_special_tokens=False):
        assert matcher.accept(TokenId(token))
    assert tokenizer.decode(list(matcher.forced(99))) == 'ertainly"}'
    assert len(matcher.forced(1)) == 1
    for token in matcher.forced(99):
        assert matcher.accept(TokenId(token))
    assert matcher.is_complete
    assert matcher.forced(9) == ()
    assert matcher.num_fitting([5]) == 0


def test_little_of_a_long_forced_text_is_tokenized(
    compiler: GrammarCompiler, eos: TokenId, monkeypatch: pytest.MonkeyPatch
) -> None:
    const = form(GrammarKind.JSON_SCHEMA, json.dumps({"const": "a word and " * 2000}))
    matcher = compiler.compile(const, frozenset([eos]))()
    asked: list[str] = []
    encode = Tokenizer.encode

    def counted(self: Tokenizer, text: str, **options: Any) -> list[int]:
        asked.append(text)
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    spent = matcher.spent_s
    assert len(matcher.forced(5)) == 5
    assert len(asked[0]) <= 5 * 16
    assert matcher.spent_s > spent


def test_looking_ahead_cannot_break_a_matcher(
    compiler: GrammarCompiler, eos: TokenId, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error while it looks ahead is not the matcher's own."""
    matcher = compiler.compile(JSON, frozenset([eos]))()
    own = matcher._matcher  # type: ignore[attr-defined]
    looked: list[object] = []
    for name in ("validate_tokens", "compute_ff_bytes"):
        plain = getattr(LLMatcher, name)

        def noted(self: LLMatcher, *given: Any, plain: Any = plain) -> Any:
            looked.append(self)
            return plain(self, *given)

        monkeypatch.setattr(f"llguidance.LLMatcher.{name}", noted)
    matcher.num_fitting([1, 2, 3])
    matcher.forced(3)
    assert len(looked) == 2
    assert own not in looked


def test_nothing_is_forced_in_reasoning_and_its_copies_are_their_own(
    compiler: GrammarCompiler, tokenizer: Tokenizer, eos: TokenId
) -> None:
    matcher = compiler.compile(THOUGHT, frozenset([eos]))()
    assert matcher.forced(9) == ()
    ahead = matcher.copy()
    for token in tokenizer.encode('so.</think>{"', add_special_tokens=False):
        assert ahead.accept(TokenId(token))
    assert ahead.forced(9)
    assert matcher.forced(9) == ()
    assert allowed(matcher, V) != allowed(ahead, V)
