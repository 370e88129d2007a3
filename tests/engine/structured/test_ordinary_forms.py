"""Forms that people use are followed to their end: none fails, waits, or ends for what it costs.

Costs are the processor's time of this thread, so that a busy machine does not count; the bounds are
some ten times above what these forms cost with a vocabulary of 150,000 tokens.
"""

from __future__ import annotations

import json
import random

import pytest

from engine.contract.request import Request
from engine.contract.sampling_params import GrammarKind, GrammarParams
from engine.contract.types import RequestKey, TokenId
from engine.core.grammar_budget import charge
from engine.structured import GrammarCompiler
from engine.text import Tokenizer
from tests.engine.fake_runner import make_request
from tests.engine.structured.conftest import V, form
from tests.engine.structured.following import allowed

Schema = dict[str, object]
NUM_WALKS = 3
MAX_TOKENS = 120


def nested(depth: int) -> Schema:
    if depth == 0:
        return {"type": "string"}
    return {
        "type": "object",
        "properties": {"name": {"type": "string"}, "child": nested(depth - 1)},
        "required": ["name", "child"],
        "additionalProperties": False,
    }


PERSON: Schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "born": {"type": "string", "format": "date"},
        "seen": {"type": "string", "format": "date-time"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 8},
        "kind": {"enum": ["a", "b", "c"]},
        "score": {"type": "number", "minimum": 0, "maximum": 1},
    },
    "required": ["name", "age", "email", "tags", "kind", "score"],
    "additionalProperties": False,
}
TREE: Schema = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["value"],
        }
    },
}
KINDS: Schema = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"type": {"const": f"kind{i}"}, f"field{i}": {"type": "string"}},
            "required": ["type", f"field{i}"],
        }
        for i in range(20)
    ]
}
TOOLS: Schema = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[a-z_]+$"},
            "arguments": {"type": "object"},
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    },
    "minItems": 1,
    "maxItems": 10,
}
SCHEMAS: dict[str, Schema] = {
    "a person": PERSON,
    "40 levels": nested(40),
    "200 strings": {"enum": [f"category {i} of things" for i in range(200)]},
    "200 strings in an object": {
        "type": "object",
        "properties": {"c": {"enum": [f"category {i} of things" for i in range(200)]}},
        "required": ["c"],
    },
    "a tree": TREE,
    "20 kinds": KINDS,
    "tool calls": TOOLS,
    "anything": {},
    "256 optional properties": {
        "type": "object",
        "properties": {f"property_{i}": {"type": ["string", "null"]} for i in range(256)},
        "additionalProperties": False,
    },
    "long strings": {
        "type": "array",
        "items": {"type": "string", "minLength": 3, "maxLength": 4000},
    },
    "many items": {"type": "array", "items": {"type": "integer"}, "minItems": 50, "maxItems": 5000},
    "addresses": {
        "type": "object",
        "properties": {
            name: {"type": "string", "format": name} for name in ("uri", "uuid", "ipv4", "ipv6")
        },
        "required": ["uri", "uuid", "ipv4", "ipv6"],
    },
}
ARITHMETIC = r"""start: sum
sum: product (("+" | "-") product)*
product: factor (("*" | "/") factor)*
factor: NUMBER | NAME | "(" sum ")"
NUMBER: /[0-9]+(\.[0-9]+)?/
NAME: /[a-z_][a-z0-9_]*/
%ignore /[ ]{1,4}/
"""
QUERY = r"""start: "SELECT " columns " FROM " NAME where? order?
columns: "*" | NAME (", " NAME)*
where: " WHERE " condition
condition: test | condition " AND " condition | condition " OR " condition | "(" condition ")"
test: NAME " " OPERATOR " " value
value: NUMBER | STRING
order: " ORDER BY " NAME (" ASC" | " DESC")?
OPERATOR: "=" | "<" | ">" | "<=" | ">="
NUMBER: /[0-9]+/
STRING: /'[^']*'/
NAME: /[a-z_][a-z0-9_]*/
"""
FORMS: dict[str, GrammarParams] = {
    **{name: form(GrammarKind.JSON_SCHEMA, json.dumps(what)) for name, what in SCHEMAS.items()},
    "an object": form(GrammarKind.JSON_OBJECT),
    "a mail address": form(GrammarKind.REGEX, r"[a-z]+@[a-z]+\.(com|org|net)(\.[a-z]{2})?"),
    "words": form(GrammarKind.REGEX, r"(\w+ ){20,60}\p{Lu}.*"),
    "any text": form(GrammarKind.REGEX, r"(?s).*"),
    "sections": form(GrammarKind.REGEX, r"(# [^\n]+\n(- [^\n]{1,200}\n){1,10}){1,8}"),
    "a number to call": form(GrammarKind.REGEX, r"\+?[0-9]{1,3}([ -][0-9]{2,4}){2,4}"),
    "arithmetic": form(GrammarKind.LARK, ARITHMETIC),
    "a query": form(GrammarKind.LARK, QUERY),
    "1,000 choices": form(GrammarKind.CHOICE, tuple(f"choice {i} of many" for i in range(1000))),
}


@pytest.mark.parametrize("name", FORMS)
def test_it_is_followed_and_costs_little(
    compiler: GrammarCompiler, tokenizer: Tokenizer, name: str
) -> None:
    make_matcher = compiler.compile(FORMS[name], frozenset())
    for walk in range(NUM_WALKS):
        draw = random.Random(walk)
        request = Request(make_request("a", [1]), 0.0, 1000, RequestKey(1))
        matcher = request.matcher = make_matcher()
        for _ in range(MAX_TOKENS):
            if matcher.is_complete:
                break
            tokens = sorted(allowed(matcher, V))
            assert matcher.failure is None, matcher.failure
            bytes_alone = [i for i in tokens if len(tokenizer.token_bytes(i)) == 1]
            chosen = bytes_alone if bytes_alone and draw.random() < 0.4 else tokens
            assert matcher.accept(TokenId(draw.choice(chosen)))
            assert charge(request, [request])
