"""Reasoning before a form, and its bound, by unit and against a slow reading."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contract.errors import InvalidRequestError
from engine.contract.sampling_params import GrammarKind, GrammarParams, ReasoningParams
from engine.contract.types import TokenId
from engine.structured import GrammarCompiler
from engine.structured.reasoning import ReasoningMatcher
from engine.text import Tokenizer
from tests.engine.structured.conftest import V
from tests.engine.structured.following import allowed
from tests.engine.structured.reasoning_check import SlowReasoning
from tests.engine.structured.tags import Taker

THINK = ReasoningParams("<think>", "</think>")
CHOICES = ("ab", "abc", "<no>")
EVERY = set(range(V))


@pytest.fixture(scope="module")
def takes(compiler: GrammarCompiler, tokenizer: Tokenizer) -> Taker:
    return Taker(compiler, tokenizer)


def begin(
    compiler: GrammarCompiler,
    reasoning: ReasoningParams,
    choices: tuple[str, ...] = CHOICES,
    endings: frozenset[TokenId] = frozenset({TokenId(2)}),
) -> ReasoningMatcher:
    """A matcher of a choice, or of any output if there are no choices."""
    kind = GrammarKind.CHOICE if choices else GrammarKind.FREE
    params = GrammarParams(kind=kind, choices=choices, reasoning=reasoning)
    matcher = compiler.compile(params, endings)()
    assert isinstance(matcher, ReasoningMatcher)
    return matcher


def follow(matcher: ReasoningMatcher, tokens: Sequence[int]) -> int:
    """Accept tokens as far as they fit; returns how many did. Masks and `accept` agree."""
    for count, token in enumerate(tokens):
        if matcher.is_free:
            return len(tokens)
        is_allowed = token in allowed(matcher, V)
        assert matcher.accept(TokenId(token)) == is_allowed
        if not is_allowed:
            return count
    return len(tokens)


FITTING = [
    "ab",
    "abc",
    "<no>",
    "<think></think>ab",
    "<think>thoughts of <think> and </thin or ab</think>\n\n<no>",
    "<think>" + "x" * 100 + "</think> \n\tabc",
]
UNFIT = [
    ("x", 0),
    ("<n<", 2),
    ("<think></think>x", 15),
    ("<think>a</think>abd", 18),
    ("ab</think>", 2),
    ("<think><|eos|>", 7),
    ("<|eos|>", 0),
    ("<think></think><|eos|>", 15),
]


@pytest.mark.parametrize("text", FITTING)
def test_reasoning_and_the_form_behind_it(takes: Taker, text: str) -> None:
    for ids in (takes.bytewise(text), takes.tokenizer.encode(text, add_special_tokens=False)):
        matcher = begin(takes.compiler, THINK)
        assert follow(matcher, ids) == len(ids)
        assert matcher.is_complete or 2 in allowed(matcher, V)
        assert not matcher.is_free


@pytest.mark.parametrize(("text", "num_fitting"), UNFIT)
def test_what_does_not_fit(takes: Taker, text: str, num_fitting: int) -> None:
    ids = takes.bytewise(text)
    assert follow(begin(takes.compiler, THINK), ids) == num_fitting


def test_special_tokens_are_not_spelled_by_text(takes: Taker) -> None:
    params = ReasoningParams("<|user|>", "<|system|>", forbidden=("<|assistant|>",))
    spelled = [takes.bytewise(c)[0] for c in "<|system|>"]
    matcher = begin(takes.compiler, params)
    opening, closing = takes.bytewise("<|user|><|system|>")
    assert follow(matcher, [opening, *spelled, closing, *takes.bytewise("ab")]) == 14
    matcher = begin(takes.compiler, params)
    assert follow(matcher, [opening, *takes.bytewise("<|assistant|>")]) == 1
    matcher = begin(takes.compiler, params)
    assert follow(matcher, [takes.bytewise(c)[0] for c in "<|user|>"]) == 1  # the form's "<"


def test_what_must_follow_the_closing_mark(takes: Taker) -> None:
    params = ReasoningParams("<|user|>a<|system|>", "<|bos|>", then="<|user|>as", max_blanks=0)
    text = "<|user|>a<|system|>thoughts<|bos|><|user|>as"
    matcher = begin(takes.compiler, params)
    assert follow(matcher, takes.bytewise(text + "ab")) == len(takes.bytewise(text)) + 2
    for wrong in ("<|user|>a<|system|>t<|bos|>a", text + " ab"):
        ids = takes.bytewise(wrong)
        assert follow(begin(takes.compiler, params), ids) < len(ids)


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("budget", [0, 1, 5])
@pytest.mark.parametrize("choices", [CHOICES, ()])
def test_the_bound_forces_the_closing_mark(
    takes: Taker, is_open: bool, budget: int, choices: tuple[str, ...]
) -> None:
    params = ReasoningParams("<think>", "</think>", is_open=is_open, max_tokens=budget)
    matcher = begin(takes.compiler, params, choices)
    if not is_open:
        assert follow(matcher, takes.bytewise("<think>")) == 7
    assert follow(matcher, takes.bytewise("x" * budget)) == budget
    rest = "</think>"
    while rest:
        fitting = allowed(matcher, V)
        assert fitting
        assert all(rest.startswith(takes.tokenizer.token_text(token)) for token in fitting)
        assert 2 not in allowed(matcher, V)  # the end of the output
        token = random.Random(len(rest)).choice(sorted(fitting))
        assert matcher.accept(TokenId(token))
        rest = rest.removeprefix(takes.tokenizer.token_text(token))
    assert not matcher.is_free
    if choices:
        assert follow(matcher, takes.bytewise("\nabc")) == 4
        assert matcher.is_complete
    else:
        assert allowed(matcher, V) == EVERY


def test_without_a_form_nothing_is_held_until_the_bound(takes: Taker) -> None:
    for text in ("hello", "<thin", " \n <think>ab", "<think>a</think>b"):
        matcher = begin(takes.compiler, ReasoningParams("<think>", "</think>", max_tokens=9), ())
        for token in takes.bytewise(text):
            assert not matcher.is_free
            assert allowed(matcher, V) == EVERY
            assert matcher.accept(TokenId(token))
            if matcher.is_free:
                break
        assert matcher.is_free == (text in ("hello", "<think>a</think>b")), text
    assert begin(takes.compiler, ReasoningParams("", "</think>", max_tokens=1), ()).is_free


def test_reasoning_that_begins_again_shares_the_bound(takes: Taker) -> None:
    params = ReasoningParams("<think>", "</think>", max_tokens=3)
    matcher = begin(takes.compiler, params, ())
    text = takes.bytewise("<think>ab</think>\n<think>c")
    assert follow(matcher, text) == len(text)
    fitting = allowed(matcher, V) - {2}
    assert all("</think>".startswith(takes.tokenizer.token_text(token)) for token in fitting)


def test_the_cost_of_a_form_that_was_given_up_counts(takes: Taker) -> None:
    matcher = begin(takes.compiler, THINK)
    spent = [matcher.spent_s]
    for token in takes.bytewise("<think>ab</think>ab"):
        allowed(matcher, V)
        assert matcher.accept(TokenId(token))
        spent.append(matcher.spent_s)
    assert spent == sorted(spent)
    assert spent[-1] > spent[8] > 0


def test_a_form_is_compiled_once_with_any_reasoning(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = {"kind": GrammarKind.REGEX, "text": "compiled once"}
    compiler.compile(GrammarParams(**form), frozenset())  # type: ignore[arg-type]
    monkeypatch.setattr("engine.structured.compiler.compile_grammar", None)
    for most in (None, 1, 2):
        reasoning = ReasoningParams("<once>", "</once>", max_tokens=most)
        params = GrammarParams(**form, reasoning=reasoning)  # type: ignore[arg-type]
        assert compiler.compile(params, frozenset())() is not None


REFUSED = [
    ({"closing": ""}, "closing", "is empty"),
    ({"closing": "x" * 300}, "closing", "at most 256 bytes"),
    ({"opening": "\udcff"}, "opening", "UTF-8"),
    ({"max_tokens": -1}, "max_tokens", "is -1"),
    ({"max_blanks": 65}, "max_blanks", "between 0 and 64"),
    ({"forbidden": ("x",) * 65}, "forbidden", "at most 64"),
]


@pytest.mark.parametrize(("change", "field", "message"), REFUSED)
def test_bounds(change: dict[str, object], field: str, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ReasoningParams(**{"opening": "<t>", "closing": "</t>", **change})  # type: ignore[arg-type]
    assert caught.value.field == "grammar.reasoning"
    assert caught.value.description.startswith(f"{field} ")
    assert message in caught.value.description


def test_any_output_needs_a_bound() -> None:
    for reasoning in (None, THINK):
        with pytest.raises(InvalidRequestError, match="needs `reasoning` with a bound"):
            GrammarParams(kind=GrammarKind.FREE, reasoning=reasoning)
    bound = ReasoningParams("<think>", "</think>", max_tokens=1)
    with pytest.raises(InvalidRequestError, match="takes no text"):
        GrammarParams(kind=GrammarKind.FREE, text="x", reasoning=bound)


def test_a_token_with_both_marks_in_it_does_not_fit(takes: Taker) -> None:
    params = ReasoningParams(" t", "h")
    both = next(token for token in range(V - 100) if takes.tokenizer.token_bytes(token) == b" the")
    matcher = begin(takes.compiler, params)
    assert follow(matcher, [both]) == 0
    assert allowed(matcher, V)


# ---- against the slow reading --------------------------------------------------------------------

MARKS = ["he", "and", " the", "aab", "aaa", "</think>", "<|user|>", "a<|system|>b", "\n\n"]
PIECES = [
    "he",
    "the",
    "aa",
    "b",
    "</",
    "think>",
    "<|user|>",
    "<|system|>",
    "<|assistant|>",
    "\n",
    "ab",
]


@settings(max_examples=60, deadline=None)
@given(
    opening=st.sampled_from(["", "th", "<think>", "<|bos|>x", "ab<"]),
    closing=st.sampled_from(MARKS),
    then=st.sampled_from(["", "", "ab", "<|bos|>a"]),
    is_open=st.booleans(),
    most=st.sampled_from([None, 0, 1, 2, 5]),
    blanks=st.sampled_from([0, 1, 3]),
    forbidden=st.sampled_from([(), ("<|assistant|>", "<|pad|>")]),
    seed=st.integers(0, 1 << 30),
)
def test_the_same_tokens_fit_as_by_a_slow_reading(
    takes: Taker,
    opening: str,
    closing: str,
    then: str,
    is_open: bool,
    most: int | None,
    blanks: int,
    forbidden: tuple[str, ...],
    seed: int,
) -> None:
    params = ReasoningParams(opening, closing, then, is_open, most, blanks, forbidden)
    draw = random.Random(seed)
    tokenizer = takes.tokenizer
    slow = SlowReasoning(params, CHOICES, tokenizer, frozenset({2}))
    matcher = begin(takes.compiler, params)
    watched = {
        t for word in [*MARKS, *PIECES, *CHOICES, opening, then] for t in takes.bytewise(word)
    }
    real = [t for t in range(tokenizer.vocab_size) if tokenizer.token_bytes(t)]
    shared = [t for t in real if any(m in tokenizer.token_text(t) for m in ("he", "and", "\n"))]
    output: list[int] = []
    hint: list[int] = []
    while not matcher.is_complete and len(output) < 40:
        fitting = allowed(matcher, V)
        sample = (
            watched | set(draw.sample(real, 60)) | set(draw.sample(shared, min(40, len(shared))))
        )
        sample |= set(draw.sample(sorted(fitting), min(len(fitting), 40)))
        for token in sorted(sample):
            assert (token in fitting) == slow.fits(output, token), (output, token)
        fitting -= {2}
        if not fitting:
            break
        if not hint:
            hint = takes.bytewise(draw.choice([*PIECES, opening, closing, then, *CHOICES]))
        wanted = hint.pop(0) if hint and draw.random() < 0.7 else -1
        token = wanted if wanted in fitting else draw.choice(sorted(fitting & sample or fitting))
        assert matcher.accept(TokenId(token))
        output.append(token)
