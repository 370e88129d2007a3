"""From a request's form to llguidance's grammar language, with the checks that it does not make.

The text of a form is a stranger's. llguidance bounds most of what it does with it, but not all: a
chain of thousands of definitions overflows its stack, `multipleOf` costs time and memory in
proportion to the number, and a long regular expression of optional parts in proportion to the
square of its length. So those are bounded before it sees them: schemas in `schema`, the others
here.

Every form becomes a grammar in llguidance's dialect of Lark, since only there can forced tokens be
turned off: with them on, text that the form dictates may be written in one tokenization alone,
which the tokenizer is asked for, in Python, in the middle of a step.
"""

from __future__ import annotations

import json
from typing import NoReturn

from llguidance import LLMatcher

from engine.errors import InvalidRequestError
from engine.sampling_params import GrammarKind, GrammarParams
from engine.structured.schema import JSON_ESCAPES, prepare_schema

MAX_REGEX_BYTES = 16 * 1024
"""The longest regular expression, in bytes."""
MAX_LARK_BYTES = 64 * 1024
"""The longest Lark grammar, in bytes."""
MAX_BLANKS = 32
"""How many blanks and line ends, at most, may stand between two parts of a JSON text."""

_OPTIONS = '\n%llguidance {"no_forcing": true, "allow_invalid_utf8": false}\n'
"""Comes last, so that it holds whatever a grammar's own options say."""
_ESCAPES: dict[str, object] = {"json_allowed_escapes": JSON_ESCAPES}
_ONE_LINE: dict[str, object] = {
    **_ESCAPES,
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""JSON as most programs write it, in one form alone: a model cannot fill its output with blanks."""
_FLEXIBLE: dict[str, object] = {
    **_ESCAPES,
    "whitespace_pattern": f"[ \\n\\r\\t]{{1,{MAX_BLANKS}}}",
}


def to_lark(params: GrammarParams) -> str:
    """The grammar of a form, in llguidance's Lark dialect.

    Raises:
        InvalidRequestError: it is no JSON, or too large or too deep to be compiled safely.
    """
    options = _FLEXIBLE if params.flexible_whitespace else _ONE_LINE
    match params.kind:
        case GrammarKind.JSON_SCHEMA:
            source = "start: %json " + prepare_schema(params.text, options)
        case GrammarKind.JSON_OBJECT:
            source = "start: %json " + prepare_schema('{"type": "object"}', options)
        case GrammarKind.REGEX:
            _check_size("regex", len(params.text.encode()), MAX_REGEX_BYTES)
            source = _lark_of(LLMatcher.grammar_from_regex(params.text))
        case GrammarKind.LARK:
            source = _checked_lark(params.text)
        case GrammarKind.CHOICE:
            # A terminal, not a rule: the lexer does not mind how many alternatives there are.
            # In JSON's ASCII form they can hold nothing that the grammar's syntax would read.
            source = "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, params.choices))
    return source + _OPTIONS


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
