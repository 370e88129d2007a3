"""Rewrites llguidance's errors about a grammar in terms of what the caller sent."""

from __future__ import annotations

import re

from engine.sampling_params import GrammarKind

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
"""For each keyword that is not supported: what to write instead, if it is not to leave it out."""


def explain(kind: GrammarKind, error: str) -> str:
    """The text of a refusal, without llguidance's excerpt of the translated grammar."""
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
