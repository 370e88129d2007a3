"""Output formats that are small to send but costly to compile or to follow."""

from __future__ import annotations

import itertools
import json

from benchmarks.hostile import encoding as wire
from benchmarks.hostile.inputs.kinds import Group, Input, invalid
from benchmarks.hostile.sending import GENERATION, Sender

GENERATE = GENERATION + "Generate"
JSON_SCHEMA, JSON_OBJECT, REGEX, GRAMMAR, CHOICE, TAG = range(1, 7)
SLOW = 'start: a*\na: b b b b | b b b | b b | b\nb: "a"|" "|"e"|b b'
LARGEST = 250 << 10


async def _forms(s: Sender, kind: int, *forms: str, n: int = 1, width: int = 2) -> None:
    messages = [
        wire.request(
            wire.text_input("Once upon a time")
            + wire.structured(kind, form)
            + wire.max_tokens(64)
            + wire.choices(n)
        )
        for form in forms
    ]

    async def one(_: int) -> None:
        for raw in messages:
            await s.call(GENERATE, raw)

    await s.again(width, one)


async def slow_grammar(s: Sender) -> None:
    """Send highly ambiguous 75-byte grammars with 16 choices, three requests at the same time."""
    await _forms(s, GRAMMAR, SLOW, n=min(16, s.card.choices), width=3)


async def schema_properties(s: Sender) -> None:
    """Send a schema with 2,000 plain properties."""
    properties = {f"property_{number}": {"type": "string"} for number in range(2000)}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    await _forms(s, JSON_SCHEMA, json.dumps(schema))


async def schema_deep(s: Sender) -> None:
    """Send schemas of nested arrays: 200 levels, and as many as fit."""

    def deep(levels: int) -> str:
        return '{"type":"array","items":' * levels + "{}" + "}" * levels

    await _forms(s, JSON_SCHEMA, deep(200), deep(LARGEST // 25))


async def schema_enum(s: Sender) -> None:
    """Send an enum with as many strings as fit."""
    names = [f"value-{number:07d}" for number in range(LARGEST // 18)]
    await _forms(s, JSON_SCHEMA, json.dumps({"enum": names}))


async def schema_references(s: Sender) -> None:
    """Send definitions that each refer to the previous one twice, and expand to 2^25 elements."""
    definitions = {
        f"d{number}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{number - 1}"}] * 2}
        for number in range(1, 26)
    }
    schema = {"$ref": "#/$defs/d25", "$defs": {"d0": {"type": "string"}, **definitions}}
    await _forms(s, JSON_SCHEMA, json.dumps(schema))


async def schema_counts(s: Sender) -> None:
    """Send schemas of strings, arrays and numbers with very large bounds."""
    schemas = [
        {"type": "string", "minLength": 100_000, "maxLength": 1_000_000},
        {"type": "array", "minItems": 10_000, "maxItems": 1_000_000, "items": {"type": "null"}},
        {"type": "integer", "minimum": -(10**30), "maximum": 10**30, "multipleOf": 7},
        {"type": "object", "minProperties": 1000, "additionalProperties": {"type": "null"}},
    ]
    await _forms(s, JSON_SCHEMA, *map(json.dumps, schemas))


async def regexes(s: Sender) -> None:
    """Send regexes with nested repetitions, alternatives with a common prefix, and huge classes."""
    await _forms(
        s,
        REGEX,
        "(a{1,1000}){1,1000}",
        "((a|b|ab|ba){0,100}c){0,1000}",
        "(.*a){20}",
        "(x+x+)+y",
        "|".join("a" * number for number in range(1, 600)),
        "[\\p{L}\\p{N}]{1,10000}",
    )


async def choices(s: Sender) -> None:
    """Send a choice of as many strings as fit."""
    strings = b"".join(wire.field(1, f"choice {number:07d}") for number in range(LARGEST // 18))
    spec = (
        wire.text_input("Once upon a time")
        + wire.field(8, wire.field(CHOICE, strings))
        + wire.max_tokens(16)
    )
    await s.again(2, lambda _: s.call(GENERATE, wire.request(spec)))


async def grammars(s: Sender) -> None:
    """Send grammars with mutually recursive rules, empty rules, and as many rules as fit."""
    rules = "\n".join(f'r{n}: "a" r{n + 1} | "b"' for n in range(8000))
    many = f'start: r0\n{rules}\nr8000: "c"'
    await _forms(
        s,
        GRAMMAR,
        "start: start start | ",
        'start: a\na: b | ""\nb: a a | "x"',
        many,
        'start: "a"~1..100000',
    )


async def other_forms(s: Sender) -> None:
    """Send a new schema with every request, so that nothing can be reused from a cache."""

    numbers = itertools.count()

    async def one(_: int) -> None:
        number = next(numbers)
        schema = {"type": "object", "properties": {f"p{number}-{i}": {} for i in range(200)}}
        spec = (
            wire.text_input("Once upon a time")
            + wire.structured(JSON_SCHEMA, json.dumps(schema))
            + wire.max_tokens(2)
        )
        await s.call(GENERATE, wire.request(spec))

    await s.again(16, one)


STRUCTURED = Group(
    "structured output",
    (
        Input(
            name="slow-grammar",
            meaning="a grammar of 75 bytes, read in very many ways, 16 choices, three at once",
            send=slow_grammar,
            answers=invalid("spec.structured_output.grammar"),
            fields=("StructuredOutput.grammar",),
        ),
        Input(
            name="schema-properties",
            meaning="a JSON schema of 2,000 properties",
            send=schema_properties,
            fields=("StructuredOutput.json_schema",),
        ),
        Input(
            name="schema-deep",
            meaning="JSON schemas of arrays in arrays",
            send=schema_deep,
            answers=invalid("spec.structured_output.json_schema"),
            fields=("StructuredOutput.json_schema",),
        ),
        Input(
            name="schema-enum",
            meaning="an enum of 14,000 strings",
            send=schema_enum,
            fields=("StructuredOutput.json_schema",),
        ),
        Input(
            name="schema-references",
            meaning="definitions that each hold the one before twice",
            send=schema_references,
            fields=("StructuredOutput.json_schema",),
        ),
        Input(
            name="schema-counts",
            meaning="strings, arrays and numbers within far bounds",
            send=schema_counts,
            fields=("StructuredOutput.json_schema",),
        ),
        Input(
            name="regexes",
            meaning="repetitions of repetitions in regexes",
            send=regexes,
            fields=("StructuredOutput.regex",),
        ),
        Input(
            name="choices",
            meaning="one of 14,000 strings",
            send=choices,
            fields=("ChoiceFormat.choices",),
        ),
        Input(
            name="grammars",
            meaning="grammars of rules that call each other, and of 8,000 rules",
            send=grammars,
            fields=("StructuredOutput.grammar",),
        ),
        Input(
            name="other-forms",
            meaning="a JSON schema of 200 properties, another each time, 16 at once",
            send=other_forms,
            fields=("StructuredOutput.json_schema",),
        ),
    ),
)
