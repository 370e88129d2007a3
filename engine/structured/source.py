"""From a request's form to llguidance's grammar language, with the checks that it does not make.

The text of a form is a stranger's. llguidance bounds most of what it does with it, but not all: a
chain of thousands of definitions overflows its stack, `multipleOf` costs time and memory in
proportion to the number, and a long regular expression of optional parts in proportion to the
square of its length. So those are bounded here, before it sees them.

Every form becomes a grammar in llguidance's dialect of Lark, since only there can forced tokens be
turned off: with them on, text that the form dictates may be written in one tokenization alone,
which the tokenizer is asked for, in Python, in the middle of a step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, NoReturn

from llguidance import LLMatcher

from engine.errors import InvalidRequestError
from engine.sampling_params import GrammarKind, GrammarParams

MAX_REGEX_BYTES = 16 * 1024
"""The longest regular expression, in bytes; of a schema, all its patterns together."""
MAX_LARK_BYTES = 64 * 1024
"""The longest Lark grammar, in bytes."""
MAX_SCHEMA_DEPTH = 96
"""How deep arrays and objects may be nested in a schema's text."""
MAX_MULTIPLE_OF = 100_000
"""The largest product of a schema's different multipleOf values, each without its decimal point."""
MAX_BLANKS = 32
"""How many blanks and line ends, at most, may stand between two parts of a JSON text."""

_OPTIONS = '\n%llguidance {"no_forcing": true, "allow_invalid_utf8": false}\n'
"""Comes last, so that it holds whatever a grammar's own options say."""
_JSON_OPTIONS = json.dumps({"whitespace_pattern": f"[ \\n\\r\\t]{{1,{MAX_BLANKS}}}"})


def to_lark(params: GrammarParams) -> str:
    """The grammar of a form, in llguidance's Lark dialect.

    Raises:
        InvalidRequestError: it is no JSON, or too large or too deep to be compiled safely.
    """
    match params.kind:
        case GrammarKind.JSON_SCHEMA:
            source = _from_schema(params.text)
        case GrammarKind.JSON_OBJECT:
            source = _from_schema('{"type": "object"}')
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


def _from_schema(text: str) -> str:
    try:
        schema = json.loads(text, parse_float=Decimal, parse_constant=_no_constant)
    except RecursionError:
        _refuse("json_schema", f"is nested deeper than {MAX_SCHEMA_DEPTH} levels")
    except ValueError as error:
        raise InvalidRequestError(
            "structured_output.json_schema", f"is not valid JSON: {error}"
        ) from None
    if isinstance(schema, bool):
        schema, text = {}, "{}" if schema else '{"enum": []}'
    if not isinstance(schema, dict):
        _refuse("json_schema", "is neither a JSON object nor true or false")
    if "x-guidance" in schema:
        _refuse("json_schema", "has the keyword x-guidance, which is not taken; leave it out")
    _check_schema(schema)
    # The schema's own text goes on, so that no number changes on the way; the options go in front.
    body = text.strip()[1:].lstrip()
    comma = "" if body == "}" else ", "
    return f'start: %json {{"x-guidance": {_JSON_OPTIONS}{comma}{body}'


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _check_schema(schema: dict[str, Any]) -> None:
    """Refuse what would cost llguidance too much."""
    pattern_bytes = 0
    multiples: set[int] = set()
    for value, depth in _walk(schema):
        if depth > MAX_SCHEMA_DEPTH:
            _refuse("json_schema", f"is nested deeper than {MAX_SCHEMA_DEPTH} levels")
        if not isinstance(value, dict):
            continue
        if isinstance(pattern := value.get("pattern"), str):
            pattern_bytes += len(pattern.encode("utf-8", "replace"))
        if isinstance(patterns := value.get("patternProperties"), dict):
            pattern_bytes += sum(len(key.encode("utf-8", "replace")) for key in patterns)
        multiple = value.get("multipleOf")
        if isinstance(multiple, (int, Decimal)) and not isinstance(multiple, bool):
            digits = Decimal(multiple).as_tuple().digits
            multiples.add(int("".join(map(str, digits[:20]))) or 1)
    _check_size("json_schema", pattern_bytes, MAX_REGEX_BYTES, "bytes of patterns")
    product = 1
    for multiple in multiples:
        product *= multiple
        if product > MAX_MULTIPLE_OF:
            _refuse(
                "json_schema",
                "has multipleOf values that are too large or too many; the product of their "
                f"digits, without the decimal point, must not exceed {MAX_MULTIPLE_OF}",
            )


def _walk(root: object) -> Iterator[tuple[object, int]]:
    """All values in a JSON value, each with its depth; the root has 1. Does not recurse."""
    stack = [(root, 1)]
    while stack:
        value, depth = stack.pop()
        yield value, depth
        if isinstance(value, dict):
            stack += [(part, depth + 1) for part in value.values()]
        elif isinstance(value, list):
            stack += [(part, depth + 1) for part in value]


def _check_size(kind: str, size: int, limit: int, what: str = "bytes") -> None:
    if size > limit:
        _refuse(kind, f"has {size} {what}; at most {limit} are compiled")


def _refuse(kind: str, message: str) -> NoReturn:
    raise InvalidRequestError(f"structured_output.{kind}", message)
