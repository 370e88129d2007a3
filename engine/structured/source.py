"""Translates a request's grammar to llguidance's language, with checks that llguidance does not
make.

The text comes from untrusted callers. llguidance limits most of its work, but not all. A chain of
thousands of definitions overflows its stack. `multipleOf` costs time and memory in proportion to
its value, and a long regular expression of optional parts in proportion to the square of its
length. So these are limited before they reach llguidance: schemas in `schema`, the others here.

Everything is translated to llguidance's dialect of Lark, because only there can forced tokens be
turned off. With forced tokens, text that the grammar dictates may only be written in one
tokenization. llguidance would call the tokenizer for that, in Python, in the middle of a step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple, NoReturn

from llguidance import LLMatcher

from engine.contract.errors import InvalidRequestError
from engine.contract.sampling_params import GrammarKind, GrammarParams
from engine.structured.schema import JSON_ESCAPES, prepare_schema, schema_text
from engine.structured.special_names import SpecialNames
from engine.structured.structural_tag import read_structural_tag
from engine.structured.tag_grammar import TagError

MAX_REGEX_BYTES = 16 * 1024
"""The longest regular expression, in bytes."""
MAX_LARK_BYTES = 64 * 1024
"""The longest Lark grammar, in bytes."""
MAX_BLANKS = 32
"""The most white-space characters between two tokens of a JSON text."""

_OPTIONS = '\n%llguidance {"no_forcing": true, "allow_invalid_utf8": false}\n'
"""Comes last, so that it overrides the grammar's options."""
_ESCAPES: dict[str, object] = {"json_allowed_escapes": JSON_ESCAPES}
_ONE_LINE: dict[str, object] = {
    **_ESCAPES,
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""JSON with only the white space that most programs use, so that a model cannot fill its output
with white space.
"""
_FLEXIBLE: dict[str, object] = {
    **_ESCAPES,
    "whitespace_pattern": f"[ \\n\\r\\t]{{1,{MAX_BLANKS}}}",
}


class Source(NamedTuple):
    """A translated grammar.

    Attributes:
        text: llguidance's JSON for its grammars.
        has_lark: whether it contains a caller's Lark grammar.
        parts: the components of a structural tag that may be at fault, as separate grammars, by
            location.
        notes: descriptions of what is enforced differently from what the grammar says.
    """

    text: str
    has_lark: bool
    parts: Mapping[str, str]
    notes: tuple[str, ...]


def translate(params: GrammarParams, names: SpecialNames) -> Source:
    """Translate a grammar for llguidance.

    Args:
        params: the grammar.
        names: finds the model's special tokens in structural tags.

    Raises:
        InvalidRequestError: the schema or structural tag is not JSON or not valid, or the text is
            too large or too deep to be compiled safely.
    """
    larks: list[str] = []
    parts: dict[str, str] = {}
    notes: tuple[str, ...] = ()
    options = _FLEXIBLE if params.flexible_whitespace else _ONE_LINE
    match params.kind:
        case GrammarKind.JSON_SCHEMA:
            schema, notes = prepare_schema(params.text, options)
            source = f"start: %json {schema}"
        case GrammarKind.JSON_OBJECT:
            source = "start: %json " + schema_text({"type": "object"}, options)
        case GrammarKind.REGEX:
            _check_size("regex", len(params.text.encode()), MAX_REGEX_BYTES)
            source = _lark_of(LLMatcher.grammar_from_regex(params.text))
        case GrammarKind.LARK:
            source = _checked_lark(params.text)
        case GrammarKind.CHOICE:
            # A terminal, not a rule: the lexer handles any number of alternatives. As ASCII JSON,
            # the strings contain nothing that is special in the grammar's syntax.
            source = "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, params.choices))
        case GrammarKind.STRUCTURAL_TAG:
            try:
                source, tag = read_structural_tag(params.text, names, options, _ONE_LINE)
            except TagError as error:
                raise InvalidRequestError("grammar.structural_tag", str(error)) from error
            larks, parts, notes = tag.larks, tag.parts, tag.notes
        case GrammarKind.FREE:
            raise ValueError("there is no grammar for any output")
    grammars = [{"lark_grammar": source + _OPTIONS}]
    for index, lark in enumerate(larks):
        grammars.append({"name": f"lark_{index}", "lark_grammar": lark + _OPTIONS})
    has_lark = bool(larks) or params.kind is GrammarKind.LARK
    return Source(json.dumps({"grammars": grammars}), has_lark, parts, notes)


def _checked_lark(text: str) -> str:
    _check_size("grammar", len(text.encode()), MAX_LARK_BYTES)
    if "%json" in text:
        _refuse("grammar", "has %json, which is not taken; use a json_schema instead")
    return text


def _lark_of(grammar: str) -> str:
    source: str = json.loads(grammar)["grammars"][0]["lark_grammar"]
    return source


def _check_size(kind: str, size: int, limit: int) -> None:
    if size > limit:
        _refuse(kind, f"has {size} bytes; at most {limit} are compiled")


def _refuse(kind: str, message: str) -> NoReturn:
    raise InvalidRequestError(f"grammar.{kind}", message)
