"""Patterns with look-around come to several without, which together match the same strings."""

from __future__ import annotations

import itertools
import json
import re

import pytest

from engine.contract.errors import InvalidRequestError
from engine.contract.sampling_params import GrammarKind
from engine.structured import GrammarCompiler
from engine.structured.complement import PatternError, complement, fixed_length
from engine.structured.patterns import LookArounds
from engine.text import Tokenizer
from tests.engine.structured.conftest import form
from tests.engine.structured.everyday_forms import DECIMAL, EMAIL
from tests.engine.structured.following import takes

SCHEMA = GrammarKind.JSON_SCHEMA


def in_python(pattern: str) -> re.Pattern[str]:
    """A pattern as Python writes it: code points in another way, and no $ before a line's end."""
    coded = re.sub(r"\\x\{(\w+)\}", lambda found: f"\\U{int(found[1], 16):08x}", pattern)
    return re.compile(coded.replace("$", r"\Z"))


BODIES = [
    "", "a", ".*aa", "^[ab]*$", "(a|b)c$", "a{2,3}b?$", "[^a]", r".*\.", r"[\s\S]*-$", "(?:ab)+c",
    "a*?b", "^", "$", "^$", "(^a|b)", r"\w", r"\d\D", r".*[^\w.]", "a|b|", r".*\n",
    "(?:a|ab)(?:c|b)", ".{3}", "(a{0,2}b){2}", "x{0}a", r"[\]a-c\-]", ".*(ab|cb)",
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES)
def test_a_complement_matches_exactly_the_other_strings(body: str) -> None:
    excluded, rest = in_python(body), in_python(complement(body))
    for size in range(5):
        for letters in itertools.product("ab-c.\n", repeat=size):
            text = "".join(letters)
            assert (rest.search(text) is None) == (excluded.match(text) is not None), text


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (r"\bx", r"\\b, which is not taken"),
        (r"(a)\1", r"\\1, which is not taken"),
        (r"\p{L}", r"\\p, which is not taken"),
        ("(?=a)", "within it"),
        ("(?i)a", "within it"),
        ("(a", "not closed"),
        ("a)", "too many"),
        ("*a", "nothing to repeat"),
        ("a**", "repeats a repetition"),
        ("[b-a]", "range"),
        ("[a", "ends too early"),
        ("a{3,2}", "no number satisfies"),
        ("a{1000}", "more than 256 times"),
        ("(((a{99}){99}){99}){99}", "too complex"),
        (".*a[ab]{12}", "too complex"),
        ("(" * 40 + "a" + ")" * 40, "nested too deeply"),
        ("[a-z]{20}.*[0-9]{20}x(a|b|c|d){20}", "too complex"),
    ],
)
def test_what_has_no_complement_is_told(body: str, what: str) -> None:
    with pytest.raises(PatternError, match=what):
        complement(body)


def test_the_length_of_a_part_is_known_where_it_is_one() -> None:
    lengths = {"": 0, "abc": 3, "a|b": 1, "[a-z]{4}-": 5, "a?": None, "a*": None, "ab|c": None}
    assert {part: fixed_length(part) for part in lengths} == lengths


PATTERNS = [
    "^(?!a)[abc]{1,3}$",
    "^(?!.*bb)[abc]*$",
    "^(?=.*a)(?=.*b)[abc]+$",
    "^(?!a)(?!.*c$)[abc]*$",
    "^[abc]+(?<!c)$",
    "^[abc]+(?<=ab)$",
    "^(?!ab|c)(?=[ab]).*$",
    "^ab(?!c)[abc]?$",
    "^[ab]{2}(?=c)[abc]+$",
    "^(?!^[ab]*$)[abc]*$",
    "^(?:a|b)(?!b)[abc]*$",
    r"^(?!\(|\))[(a)|]+$",
    "^(?![(])[(ab]+$",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_patterns_together_match_the_same_strings(pattern: str) -> None:
    whole = in_python(pattern)
    found, is_narrower = LookArounds().without(pattern)
    assert not is_narrower
    parts = [in_python(part) for part in found]
    for size in range(6):
        for letters in itertools.product("abc(", repeat=size):
            text = "".join(letters)
            assert all(part.search(text) for part in parts) == bool(whole.search(text)), text


@pytest.mark.parametrize("pattern", ["(?=.*a)(?!b)[abc]{2,}", "(?!a)b", "a(?!b)"])
def test_without_an_anchor_fewer_strings_match_and_that_is_told(
    compiler: GrammarCompiler, tokenizer: Tokenizer, pattern: str
) -> None:
    whole = in_python(pattern)
    found, is_narrower = LookArounds().without(pattern)
    assert is_narrower
    parts = [in_python(part) for part in found]
    texts = ["".join(some) for size in range(5) for some in itertools.product("abc", repeat=size)]
    matched = [text for text in texts if all(part.search(text) for part in parts)]
    assert matched
    assert all(whole.search(text) for text in matched)
    factory = compiler.compile(
        form(SCHEMA, json.dumps({"type": "string", "pattern": pattern})), frozenset()
    )
    assert factory.notes == (
        "the pattern in $ is held from the beginning of the string, as with ^",
    )


@pytest.mark.parametrize(
    ("pattern", "what"),
    [
        ("^(?!a)b|c$", "in one of several alternatives"),
        ("^(?:(?!a).)*$", "within it"),
        ("^a*(?!b)c$", "behind a part whose length varies"),
        ("^(?!a(?=b))c$", "within it"),
        (r"^(?!\bx)c$", r"that has \b"),
        ("^(?<!a)b$", "within it"),
        ("(?=a)" * 800, "more than 32 times in it"),
        ("(?=a)" * 3000, "more than 4096 characters"),
    ],
)
def test_other_look_around_is_refused_with_what_to_write_instead(
    compiler: GrammarCompiler, pattern: str, what: str
) -> None:
    schema = json.dumps({"properties": {"p": {"type": "string", "pattern": pattern}}})
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile(form(SCHEMA, schema), frozenset())
    assert what in caught.value.description
    assert "in $.properties.p; look-aheads are held in no group" in caught.value.description


def test_a_form_has_a_bound_for_different_look_arounds(compiler: GrammarCompiler) -> None:
    def schema(patterns: list[str]) -> str:
        return json.dumps({"enum": [], "anyOf": [{"pattern": one} for one in patterns]})

    with pytest.raises(InvalidRequestError, match="more than 32 with look-around"):
        compiler.compile(form(SCHEMA, schema([f"^(?!{i}-)a$" for i in range(33)])), frozenset())
    with pytest.raises(InvalidRequestError, match="allows no value"):
        compiler.compile(form(SCHEMA, schema(["^(?!x)a$"] * 40)), frozenset())


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        (EMAIL, ["a@b.co", "a.b+c'd@x-y.z.org"], [".a@b.co", "a..b@c.de", "a@b", "a.@b.co"]),
        (DECIMAL, ["1", "-0.5", "+.5", "007.", ".5"], ["", "-", ".", "+.", "1e5", "1.2.3"]),
    ],
)
def test_what_two_libraries_write_is_held(
    compiler: GrammarCompiler, tokenizer: Tokenizer, pattern: str, yes: list[str], no: list[str]
) -> None:
    schema = {"type": "string", "pattern": pattern}
    for text in (*yes, *no):
        assert takes(compiler, tokenizer, schema, json.dumps(text)) is (text in yes), text


def test_a_pattern_is_about_the_string_and_not_about_its_spelling(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    schema = {"type": "string", "pattern": r'^(?!.*["\\])(?!n)[\s\S]{1,4}$'}
    assert takes(compiler, tokenizer, schema, r'"a\nb"')
    assert not takes(compiler, tokenizer, schema, r'"a\"b"')
    assert not takes(compiler, tokenizer, schema, r'"a\\b"')
    assert not takes(compiler, tokenizer, schema, '"nb"')
    schema = {"type": "string", "pattern": r"^(?!.*\n)[\s\S]*$"}
    assert takes(compiler, tokenizer, schema, r'"a\tb"')
    assert not takes(compiler, tokenizer, schema, r'"\n"')


@pytest.mark.parametrize("keyword", ["pattern", "propertyNames", "patternProperties"])
@pytest.mark.parametrize(
    "pattern", ['^[^"]*$', r"^[^\\]*$", r'^[^"\n]*$', r"^[^\\a]*b?$", r'^[^"\\]+$', '^[^-"]*$']
)
def test_a_negated_class_keeps_out_what_is_written_with_a_backslash(
    compiler: GrammarCompiler, tokenizer: Tokenizer, keyword: str, pattern: str
) -> None:
    schema = {
        "pattern": {"pattern": pattern},
        "propertyNames": {"propertyNames": {"pattern": pattern}},
        "patternProperties": {"patternProperties": {pattern: {}}, "additionalProperties": False},
    }[keyword]
    for text in ("b", 'b"b', "b\\b", "b\nb", "b\tb", "\u00e9", "b/b"):
        written = json.dumps(text, ensure_ascii=False)
        value = written if keyword == "pattern" else f"{{{written}: 1}}"
        assert takes(compiler, tokenizer, schema, value) is bool(re.search(pattern, text)), text
