"""Rewrites keywords of a schema that llguidance does not support in terms of those that it does.

Each function looks at one schema and changes it in place. Its subschemas are processed afterwards,
so what is added is checked like the rest. The schema then allows the same values, or fewer. The
caller gets a note if it allows fewer, or if something is not enforced, as the standard permits. A
keyword that cannot be rewritten is refused, with what to write instead.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from engine.contract.json_types import referred, type_of
from engine.structured.complement import PatternError
from engine.structured.patterns import REMEDY, LookArounds, exact, has_look_around

MAX_ALTERNATIVES = 400
"""The most alternatives that one keyword of one schema may expand to."""
MAX_ALL_ALTERNATIVES = 4096
"""The most alternatives that the keywords of one grammar may expand to."""
MAX_PRESENT = 6
"""The most properties whose presence is told apart: 64 alternatives."""
MAX_FIRST = 128
"""The most choices of which optional properties come first, if a minimum number must be present."""
MAX_SET_IN_ORDER = 8
"""The most values of a set that is enforced, if need be in a single order: 256 subsets."""
MAX_NOTES = 16
"""The most notes about one grammar."""

Schema = dict[str, Any]

_HELD_FORMATS = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
)
_UUID = re.compile(r"uuid([1-8])")
_BASE64 = "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
_PATTERNS = {
    "base64": _BASE64,
    "byte": _BASE64,
    "base64url": "^(?:[A-Za-z0-9_-]{4})*(?:[A-Za-z0-9_-]{2}(?:==)?|[A-Za-z0-9_-]{3}=?)?$",
}
"""Formats that a pattern enforces: OpenAPI's and those of validator libraries."""
_NOTES = frozenset(
    ["title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"]
) | {"$comment", "$schema"}
"""Keywords that say nothing about a value."""
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_MAX_REFERENCES = 8
_WRAPPER = frozenset(["name", "description", "schema", "strict", "type"])


_NO_SET = (
    "leave it out and drop what is repeated from the answer, or use an object with a boolean "
    "property for each value"
)


class KeywordError(Exception):
    """A keyword that cannot be enforced.

    Attributes:
        what: which keyword, and why.
        remedy: what to write instead.
    """

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}; {remedy}")
        self.what = what
        self.remedy = remedy


class Rewriter:
    """Rewrites the schemas of one grammar."""

    def __init__(self) -> None:
        self._num_alternatives = 0
        self._notes: dict[str, str] = {}  # by their subjects
        self._look_arounds = LookArounds()

    @property
    def notes(self) -> tuple[str, ...]:
        """What is enforced differently from what the schemas say: each subject once, where it first
        occurs.
        """
        notes = tuple(self._notes.values())
        num_more = len(notes) - MAX_NOTES
        return notes if num_more <= 0 else (*notes[:MAX_NOTES], f"{num_more} more of this kind")

    def note(self, subject: str, text: str) -> None:
        """Add a note, unless there is already one about its subject."""
        self._notes.setdefault(subject, text)

    def rewrite(self, schema: Schema, root: Schema, place: object) -> None:
        """Rewrite one schema, without its subschemas.

        Args:
            schema: changed in place.
            root: the whole schema, in which references are resolved.
            place: the location of the schema, whose text appears in notes.

        Raises:
            KeywordError: the schema has something that cannot be enforced.
        """
        if "not" in schema:
            _negate(schema)
        if "propertyNames" in schema:
            _name_properties(schema, root)
        if "uniqueItems" in schema:
            self._make_unique(schema, root, place)
        self._count(_tell_apart(schema))
        if isinstance(schema.get("format"), str):
            self._hold_format(schema, place)
        if isinstance(pattern := schema.get("pattern"), str):
            if has_look_around(pattern):
                self._split(schema, pattern, place)
            schema["pattern"] = exact(schema["pattern"])
        if isinstance(named := schema.get("patternProperties"), dict):
            schema["patternProperties"] = {exact(name): one for name, one in named.items()}

    def _count(self, num_alternatives: int) -> None:
        self._num_alternatives += num_alternatives
        if self._num_alternatives > MAX_ALL_ALTERNATIVES:
            raise KeywordError(
                "has too many sets, dependencies and counted objects together", "use fewer of them"
            )

    # ---- strings ---------------------------------------------------------------------------------

    def _hold_format(self, schema: Schema, place: object) -> None:
        """Enforce a format. Unknown formats are annotations and are dropped."""
        name = schema["format"]
        if name in _HELD_FORMATS:
            return
        if found := _UUID.fullmatch(name):
            schema["format"] = "uuid"
            add_pattern(schema, f"^.{{14}}{found[1]}")
            return
        del schema["format"]
        if name in _PATTERNS:
            add_pattern(schema, _PATTERNS[name])
        elif _may_be(schema, "string"):
            shown = json.dumps(name if len(name) <= 40 else f"{name[:37]}…", ensure_ascii=False)
            self.note(f"format {name}", f"the format {shown} in {place} is not held")

    def _split(self, schema: Schema, pattern: str, place: object) -> None:
        """Replace a pattern with look-around by several patterns without it."""
        try:
            (schema["pattern"], *others), is_narrower = self._look_arounds.without(pattern)
        except PatternError as error:
            raise KeywordError(f"has a pattern with look-around that {error}", REMEDY) from error
        for other in others:
            add_pattern(schema, other)
        if is_narrower:
            self.note(
                f"pattern {pattern}",
                f"the pattern in {place} is held from the beginning of the string, as with ^",
            )

    # ---- arrays ----------------------------------------------------------------------------------

    def _make_unique(self, schema: Schema, root: Schema, place: object) -> None:
        """Replace a set of few values by the list of its possible arrays."""
        if schema.pop("uniqueItems") is not True or not _may_be(schema, "array"):
            return
        most = schema.get("maxItems")
        if isinstance(most, int) and most <= 1:
            return
        values = _values_of(schema.get("items"), root)
        if values is None or "prefixItems" in schema or "enum" in schema or "const" in schema:
            raise KeywordError(
                "has uniqueItems with items that are no short list of values",
                f"{_NO_SET}, or give the items an enum of at most {MAX_SET_IN_ORDER} values",
            )
        num_most = len(values) if most is None else min(most, len(values))
        sizes = range(schema.get("minItems", 0), num_most + 1)
        arrange: Callable[[list[Any], int], Iterator[tuple[Any, ...]]] = itertools.permutations
        if _is_more(MAX_ALTERNATIVES, (math.perm(len(values), size) for size in sizes)):
            if _is_more(MAX_ALTERNATIVES, (math.comb(len(values), size) for size in sizes)):
                raise KeywordError(
                    f"has uniqueItems with items of {len(values)} values, which are too many",
                    _NO_SET,
                )
            arrange = itertools.combinations
            self.note(
                f"order {place}",
                f"the items of {place} come in the order in which the schema lists their values",
            )
        arrays = [list(chosen) for size in sizes for chosen in arrange(values, size)]
        self._count(len(arrays))
        for keyword in ("items", "minItems", "maxItems"):
            schema.pop(keyword, None)
        _only(schema, "array", {"enum": arrays})


def check_wrapper(schema: Schema) -> None:
    """Refuse an object of another API that is not a schema but contains one.

    Raises:
        KeywordError: it is such an object.
    """
    where = None
    inner = schema.get("json_schema")
    if isinstance(schema.get("schema"), dict) and schema.keys() <= _WRAPPER:
        where = "schema"
    elif isinstance(inner, dict) and schema.get("type") in (None, "json_schema"):
        where = "json_schema.schema" if isinstance(inner.get("schema"), dict) else "json_schema"
    if where is not None:
        raise KeywordError(
            "is no schema, but an object around one, as another API takes it",
            f'send what stands under "{where}"',
        )


def add_pattern(schema: Schema, pattern: str) -> None:
    """Add a pattern that a schema's strings must also match."""
    if "pattern" not in schema:
        schema["pattern"] = pattern
    else:
        _also(schema, {"pattern": pattern})


# ---- not -----------------------------------------------------------------------------------------


def _negate(schema: Schema) -> None:
    excluded = schema.pop("not")
    if excluded is False:
        return
    if excluded is True or (isinstance(excluded, dict) and not excluded.keys() - _NOTES):
        schema.pop("const", None)
        schema["enum"] = []
        return
    if isinstance(excluded, dict):
        said = {key: one for key, one in excluded.items() if key not in _NOTES}
        if _exclude(schema, said):
            return
    raise KeywordError(
        "has a `not` that cannot be held", "say what is allowed instead, with type, enum or anyOf"
    )


def _exclude(schema: Schema, said: Schema) -> bool:
    """Exclude the values of another schema. Return False if these cannot be excluded."""
    types = _types_of(schema)
    if said.keys() == {"type"}:
        unwanted = _types_of(said)
        if "number" in unwanted:
            unwanted.add("integer")
        elif "integer" in unwanted and "number" in types:
            return False
        if rest := sorted(types - unwanted):
            schema["type"] = rest
        else:
            schema["enum"] = []
        return True
    if said.get("type", "string") == "string" and types == {"string"}:
        if said.keys() <= {"enum", "const", "type"}:
            values = said.get("enum", [said.get("const")])
            texts = [value for value in values if isinstance(value, str)]
            if texts and len(values) <= MAX_ALTERNATIVES:
                listed = "|".join(map(re.escape, texts))
                _also(schema, {"pattern": f"^(?!(?:{listed})$)"})
            return len(values) <= MAX_ALTERNATIVES
        if said.keys() <= {"pattern", "type"} and isinstance(pattern := said["pattern"], str):
            _also(schema, {"pattern": f"^(?![\\s\\S]*(?:{pattern}))"})
            return True
    names = said.get("required")
    is_named = said.keys() <= {"required", "type"} and said.get("type", "object") == "object"
    if is_named and isinstance(names, list) and types == {"object"}:
        _also(schema, {"anyOf": [{"properties": {name: False}} for name in names]})
        return True
    return False


# ---- objects -------------------------------------------------------------------------------------


def _name_properties(schema: Schema, root: Schema) -> None:
    """Replace propertyNames: a list of names becomes properties, a pattern becomes
    patternProperties.
    """
    names = _resolved(schema.pop("propertyNames"), root)
    if names is True or not _may_be(schema, "object"):
        return
    if not isinstance(names, dict):
        raise KeywordError(*_NAMES)
    said = {key: one for key, one in names.items() if key not in _NOTES}
    if said.pop("type", "string") != "string":
        raise KeywordError(*_NAMES)
    if not said:
        return
    if "patternProperties" in schema:
        raise KeywordError(*_NAMES)
    others = schema.get("additionalProperties", {})
    declared = schema.get("properties", {})
    listed = said.get("enum", [said["const"]] if "const" in said else None)
    if isinstance(listed, list) and len(said) == 1 and isinstance(declared, dict):
        allowed = [name for name in listed if isinstance(name, str)]
        kept = {name: one if name in allowed else False for name, one in declared.items()}
        schema["properties"] = kept | {name: others for name in allowed if name not in declared}
    elif not declared and (pattern := _pattern_of(said)) is not None:
        schema["patternProperties"] = {pattern: others}
    else:
        raise KeywordError(*_NAMES)
    schema["additionalProperties"] = False


_NAMES = (
    "has propertyNames other than an enum, a pattern or lengths, or beside other rules for names",
    "list the names in `properties`, or use patternProperties with additionalProperties: false",
)


def _pattern_of(names: Schema) -> str | None:
    """Return a single pattern for the strings of a schema, or None if there is no such pattern."""
    pattern = names.get("pattern")
    if names.keys() == {"pattern"} and isinstance(pattern, str):
        return None if has_look_around(pattern) else pattern
    if names.keys() <= {"minLength", "maxLength"}:
        return f"^[\\s\\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
    return None


def _tell_apart(schema: Schema) -> int:
    """Replace rules about which and how many properties are present by alternatives; return the
    number of these.
    """
    needed: dict[str, Any] = {}
    for keyword in ("dependentRequired", "dependencies"):
        if isinstance(schema.get(keyword), dict):
            needed |= schema.pop(keyword)
    if not _may_be(schema, "object"):
        return 0
    if not all(isinstance(others, list) for others in needed.values()):
        raise KeywordError(
            "has dependencies with schemas",
            "use anyOf with a schema for each case: one that has the property in `required`, and "
            "one in which it is false in `properties`",
        )
    if len(needed) > MAX_PRESENT:
        raise KeywordError(
            f"has dependencies of {len(needed)} properties, of which at most {MAX_PRESENT} are "
            "told apart",
            "use anyOf with a schema for each case",
        )
    for name, others in needed.items():
        _also(schema, {"anyOf": [{"properties": {name: False}}, {"required": [name, *others]}]})
    if "minProperties" in schema or "maxProperties" in schema:
        return 2 * len(needed) + _count_properties(schema)
    return 2 * len(needed)


def _count_properties(schema: Schema) -> int:
    """Enforce the number of properties of an object that allows only the declared ones. Return how
    many alternatives that takes.
    """
    properties, required = schema.get("properties", {}), schema.get("required", [])
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    least, most = schema.get("minProperties", 0), schema.get("maxProperties")
    if not (is_closed and isinstance(properties, dict) and isinstance(required, list)):
        return 0
    if least <= 1 and most is None and not required:
        return 0  # llguidance knows that
    optional = [name for name in properties if name not in required]
    num_required = len(dict.fromkeys(required))
    low = max(0, least - num_required)
    high = len(optional) if most is None else min(most - num_required, len(optional))
    schema.pop("minProperties", None)
    schema.pop("maxProperties", None)
    if low == 0 and high == len(optional):
        return 0
    if high < low:
        schema["enum"] = []
        return 0
    alternatives: list[Schema] = []
    if high == len(optional) and math.comb(high, low) <= MAX_FIRST:
        for first in itertools.combinations(range(high), low):  # the first ones that are there
            absent = [i for i in range(first[-1]) if i not in first]
            alternatives.append(
                _present([optional[i] for i in first], [optional[i] for i in absent])
            )
    elif len(optional) <= MAX_PRESENT:
        for size in range(low, high + 1):
            for chosen in itertools.combinations(optional, size):
                absent_names = [name for name in optional if name not in chosen]
                alternatives.append(_present(list(chosen), absent_names))
    else:
        raise KeywordError(
            f"has minProperties or maxProperties with {len(optional)} properties that are not "
            f"required, of which at most {MAX_PRESENT} are told apart",
            "list names in `required`, or leave it out",
        )
    _also(schema, {"anyOf": alternatives})
    return len(alternatives)


def _present(there: list[str], absent: list[str]) -> Schema:
    return {"required": there, "properties": dict.fromkeys(absent, False)}


# ---- parts ---------------------------------------------------------------------------------------


def _also(schema: Schema, other: Schema) -> None:
    """Also apply another schema. It comes last, so that the order of names is kept."""
    listed = schema.pop("allOf", [])
    if not isinstance(listed, list):
        raise KeywordError("has an allOf that is no list", "give it a list of schemas")
    schema["allOf"] = [*listed, other]


def _only(schema: Schema, kind: str, rule: Schema) -> None:
    """Apply a rule to those of a schema's values that have the given type."""
    if schema.get("type") == kind:
        schema.update(rule)
        return
    others = sorted(_types_of(schema) - {kind})
    _also(schema, {"anyOf": [rule, {"type": others}]})


def _types_of(schema: Mapping[str, Any]) -> set[str]:
    kinds = schema.get("type", list(_TYPES))
    listed = kinds if isinstance(kinds, list) else [kinds]
    return {kind for kind in listed if isinstance(kind, str)}


def _may_be(schema: Schema, kind: str) -> bool:
    return kind in _types_of(schema)


def _resolved(schema: Any, root: Schema) -> Any:
    """Return the target of a reference that has no other keywords."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, dict) or schema.keys() - _NOTES != {"$ref"}:
            break
        schema = referred(schema, root)
    return schema


def _values_of(schema: Any, root: Schema) -> list[Any] | None:
    schema = _resolved(schema, root)
    if not isinstance(schema, dict):
        return None
    types = _types_of(schema)
    said = schema.keys() - _NOTES - {"type"}
    if said == {"enum"} and isinstance(schema["enum"], list):
        values = schema["enum"]
        if len(values) > MAX_ALTERNATIVES:
            return None
    elif said == {"const"}:
        values = [schema["const"]]
    elif not said and types <= {"boolean", "null"}:
        values = [False, True] * ("boolean" in types) + [None] * ("null" in types)
    else:
        return None
    found: list[Any] = []
    for value in values:
        kind = type_of(value)
        is_of_type = kind in types or (kind == "integer" and "number" in types)
        if is_of_type and not any(_same(value, one) for one in found):
            found.append(value)
    return found


def _is_more(limit: int, numbers: Iterable[int]) -> bool:
    """Whether the sum of the numbers exceeds a limit. Consumes no more numbers than necessary."""
    return any(total > limit for total in itertools.accumulate(numbers))


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal in JSON Schema, where 1 equals 1.0 but not true."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return bool(one == other)
