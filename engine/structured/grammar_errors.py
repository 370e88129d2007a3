"""Rewrites llguidance's errors about a grammar in terms of what the caller sent."""

from __future__ import annotations

import json
import re

from engine.contract.sampling_params import GrammarKind

_MAX_CHARACTERS = 300
_EXCERPT = re.compile(r"\s*(\d+ \||\^|<non-verbose/>)")
_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
_KEYWORDS = re.compile(r"Unimplemented keys: \[(.*)\]")
_TOO_COMPLEX = (
    "lexer precomputation failed",
    "too big",
    "too large",
    "too many",
    "max is",
    "limit",
)
_NO_FURTHER = "became too complex to be followed after {num_tokens} tokens, {place}; {remedy}"
_SIMPLER = (
    "make it smaller or less ambiguous: give each text one way to be read, repeat terminals of "
    "several characters rather than of one, and use smaller repetitions and fewer optional parts"
)
_FEWER_NAMES = (
    "set additionalProperties to false there, have fewer properties that are not required, or use "
    "simpler patternProperties"
)
_SIMPLER_STRING = "give this string a simpler pattern or a smaller length, or none"
_JSON = (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT)
_MAX_TAIL = 40
_MAX_PATH = 80
_PLAIN = {
    "oneOf constraints are not supported": "has a oneOf whose branches may overlap, which is not "
    "supported; use anyOf",
    "Default retriever does not fetch resources": "has a $ref to another document; refer to "
    "definitions of the schema itself",
    "unclosed group": "is not valid: a group is not closed",
    "look-around": "has look-around, which is supported at the beginning and the end of a schema's "
    "`pattern` alone",
    "lookarounds not supported": "has a word boundary (\\b), which is not supported; name the "
    "characters that may stand there",
    "backreferences are not supported": "has a back-reference, which is not supported; repeat what "
    "the group lists",
    "min/maxProperties only supported": "has minProperties or maxProperties beside properties that "
    "are not required; set additionalProperties to false, or list the properties in `required`",
    "no start rule found": "has no rule called start",
}

_CASES = "use anyOf with a schema for each case"
_NO_MORE = "use additionalProperties: false, and items: false, in the schema that lists them"
_ITEMS = "give `prefixItems` or `items`, minItems and maxItems"
_REMEDIES = {
    "if": _CASES,
    "then": _CASES,
    "else": _CASES,
    "dependentSchemas": _CASES,
    "contains": _ITEMS,
    "minContains": _ITEMS,
    "maxContains": _ITEMS,
    "unevaluatedProperties": _NO_MORE,
    "unevaluatedItems": _NO_MORE,
    "$dynamicRef": "use $ref",
    "$recursiveRef": "use $ref",
}
"""For unsupported keywords: what to write instead, if not simply to leave the keyword out."""


def explain(kind: GrammarKind, error: str) -> str:
    """Return the text of a refusal, without llguidance's excerpt of the translated grammar."""
    for said, plain in _PLAIN.items():
        if said in error:
            return plain
    if found := _KEYWORDS.search(error):
        remedies = [_REMEDIES.get(name, "leave it out") for name in re.findall('"(.*?)"', found[1])]
        instead = "; ".join(dict.fromkeys(remedies))
        return f"uses keywords that are not supported: {found[1]}; {instead}"
    place = _PLACE.match(error)
    lines = [line for line in error.splitlines() if not _EXCERPT.match(line)]
    text = " ".join(" ".join(lines).split())
    text = _PLACE.sub("", text, count=1).partition("; following ")[0]
    if kind is not GrammarKind.LARK:
        text = text.rpartition("error: ")[2] if "parse error" in text else text
        text = text.removeprefix("failed to compile JSON schema: ")
        text = text.rpartition(" (in regex): ")[2]
    if any(word in text.lower() for word in _TOO_COMPLEX):
        return "is too complex; make it smaller, or less ambiguous"
    where = f" in line {place[1]}" if place is not None and kind is GrammarKind.LARK else ""
    if len(text) > _MAX_CHARACTERS:
        text = text[:_MAX_CHARACTERS] + "…"
    text = f"cannot be compiled{where}: {text}"
    return text.replace("cannot be compiled: Unsatisfiable schema: ", "allows no value: ")


def too_complex(kind: GrammarKind, output: str, num_tokens: int) -> str:
    """Explain why an output that could be followed so far must end: where it was, and what to
    change.

    Args:
        kind: the kind of grammar.
        output: the text so far.
        num_tokens: the number of tokens of the text.
    """
    if kind in _JSON:
        place, remedy = _place_in_json(output)
    else:
        place, remedy = f"behind {json.dumps(output[-_MAX_TAIL:], ensure_ascii=False)}", _SIMPLER
    return _NO_FURTHER.format(num_tokens=num_tokens, place=place, remedy=remedy)


def _place_in_json(text: str) -> tuple[str, str]:
    """Return where the beginning of a JSON text ends, and what to change there."""
    path: list[str | int] = []  # of each open object its last name, of each array its last index
    string: int | None = None  # where an open string begins
    is_name = False  # whether a name comes next, or is being written
    index = 0
    while index < len(text):
        character = text[index]
        if string is not None:
            if character == "\\":
                index += 1
            elif character == '"':
                if is_name:
                    path[-1] = text[string:index]
                string = None
        elif character == '"':
            string = index + 1
        elif character in "{[":
            is_name = character == "{"
            path.append("" if is_name else 0)
        elif character in "}]":
            path.pop()
            is_name = False
        elif character == ":":
            is_name = False
        elif character == "," and path:
            is_name = isinstance(path[-1], str)
            path[-1] = path[-1] if isinstance(path[-1], str) else path[-1] + 1
        index += 1
    if is_name:
        return f"at a name of the object {_path(path[:-1])}", _FEWER_NAMES
    if string is not None:
        return f"in the string {_path(path)}", _SIMPLER_STRING
    return f"at {_path(path)}", _SIMPLER


def _path(keys: list[str | int]) -> str:
    path = "$" + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    return path if len(path) <= _MAX_PATH else f"{path[:30]}…{path[-49:]}"
