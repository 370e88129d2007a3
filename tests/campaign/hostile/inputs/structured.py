"""Output formats that are small to send but costly to compile or to follow."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable

from tests.campaign.hostile import encoding as wire
from tests.campaign.hostile.inputs.kinds import Call, Group, invalid
from tests.campaign.hostile.sending import GENERATE, Sender

JSON_SCHEMA, REGEX, GRAMMAR = "json_schema", "regex", "grammar"
SLOW = 'start: a*\na: b b b b | b b b | b b | b\nb: "a"|" "|"e"|b b'
LARGEST = 250 << 10
DEFINITIONS = {
    "d0": {"type": "string"},
    **{
        f"d{n}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{n - 1}"}] * 2}
        for n in range(1, 26)
    },
}
DOUBLED = {"$ref": "#/$defs/d25"}
"""Each of the definitions holds the one before twice."""
EXPLODING = ("(a{1,1000}){1,1000}", "((a|b|ab|ba){0,100}c){0,1000}", "(.*a){20}", "(x+x+)+y")


def _forms(kind: str, *forms: str, n: int = 1) -> list[Call]:
    stop = {"max_tokens": 64}
    raws = [wire.request(structured_output={kind: form}, stop=stop, n=n) for form in forms]
    return [Call(GENERATE, raw, gzip=False) for raw in raws]


STRUCTURED = Group("structured output")


@STRUCTURED.repeats(3, answers=invalid("spec.structured_output.grammar"))
def slow_grammar(s: Sender) -> Iterable[Call]:
    """A grammar of 75 bytes, read in very many ways, 16 choices, three at once."""
    return _forms(GRAMMAR, SLOW, n=min(16, s.limits.max_choices))


@STRUCTURED.repeats()
def schema_properties(s: Sender) -> Iterable[Call]:
    """A JSON schema of 2,000 properties."""
    properties = {f"property_{number}": {"type": "string"} for number in range(2000)}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return _forms(JSON_SCHEMA, json.dumps(schema))


@STRUCTURED.repeats(answers=invalid("spec.structured_output.json_schema"))
def schema_deep(s: Sender) -> Iterable[Call]:
    """JSON schemas of arrays in arrays."""

    def deep(levels: int) -> str:
        return '{"type":"array","items":' * levels + "{}" + "}" * levels

    return _forms(JSON_SCHEMA, deep(200), deep(LARGEST // 25))


@STRUCTURED.repeats()
def schema_enum(s: Sender) -> Iterable[Call]:
    """An enum of 14,000 strings."""
    names = [f"value-{number:07d}" for number in range(LARGEST // 18)]
    return _forms(JSON_SCHEMA, json.dumps({"enum": names}))


@STRUCTURED.repeats()
def schema_references(s: Sender) -> Iterable[Call]:
    """Definitions that each hold the one before twice."""
    return _forms(JSON_SCHEMA, json.dumps({**DOUBLED, "$defs": DEFINITIONS}))


@STRUCTURED.repeats()
def schema_counts(s: Sender) -> Iterable[Call]:
    """Strings, arrays and numbers within far bounds."""
    schemas = [
        {"type": "string", "minLength": 100_000, "maxLength": 1_000_000},
        {"type": "array", "minItems": 10_000, "maxItems": 1_000_000, "items": {"type": "null"}},
        {"type": "integer", "minimum": -(10**30), "maximum": 10**30, "multipleOf": 7},
        {"type": "object", "minProperties": 1000, "additionalProperties": {"type": "null"}},
    ]
    return _forms(JSON_SCHEMA, *map(json.dumps, schemas))


@STRUCTURED.repeats()
def regexes(s: Sender) -> Iterable[Call]:
    """Repetitions of repetitions in regexes."""
    return _forms(
        REGEX,
        *EXPLODING,
        "|".join("a" * number for number in range(1, 600)),
        "[\\p{L}\\p{N}]{1,10000}",
    )


@STRUCTURED.repeats()
def choices(s: Sender) -> Iterable[Call]:
    """One of 14,000 strings."""
    strings = [f"choice {number:07d}" for number in range(LARGEST // 18)]
    form = {"choice": {"choices": strings}}
    return [
        Call(GENERATE, wire.request(structured_output=form, stop={"max_tokens": 16}), gzip=False)
    ]


@STRUCTURED.repeats()
def grammars(s: Sender) -> Iterable[Call]:
    """Grammars of rules that call each other, and of 8,000 rules."""
    rules = "\n".join(f'r{n}: "a" r{n + 1} | "b"' for n in range(8000))
    many = f'start: r0\n{rules}\nr8000: "c"'
    return _forms(
        GRAMMAR,
        "start: start start | ",
        'start: a\na: b | ""\nb: a a | "x"',
        many,
        'start: "a"~1..100000',
    )


@STRUCTURED.sends()
async def other_forms(s: Sender) -> None:
    """A JSON schema of 200 properties, another each time, 16 at once."""

    numbers = itertools.count()

    async def one(_: int) -> None:
        number = next(numbers)
        schema = {"type": "object", "properties": {f"p{number}-{i}": {} for i in range(200)}}
        form = {"json_schema": json.dumps(schema)}
        await s.call(GENERATE, wire.request(structured_output=form, stop={"max_tokens": 2}))

    await s.again(16, one)
