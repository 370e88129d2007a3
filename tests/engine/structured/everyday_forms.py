"""Forms as the libraries of this field write them: what Pydantic, Zod (4 and zod-to-json-schema),
schemars and generators of OpenAPI make of everyday types, written down by hand. All but
`REFUSED` are held, and what is written by them is valid.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
_DRAFT_7 = "http://json-schema.org/draft-07/schema#"
_DRAFT_2020 = "https://json-schema.org/draft/2020-12/schema"

EMAIL = (
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+"
    r"[A-Za-z]{2,}$"
)
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"


def closed(properties: Schema, *optional: str, **more: Any) -> Schema:
    """An object of these properties and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
        **more,
    }


PYDANTIC: dict[str, Schema] = {
    "SecretStr": closed({"key": {"type": "string", "format": "password", "writeOnly": True}}),
    "Path": closed({"file": {"format": "path", "title": "File", "type": "string"}}),
    "UUID4 or None": closed(
        {"id": {"anyOf": [{"type": "string", "format": "uuid4"}, {"type": "null"}]}}
    ),
    "UUID7": {"type": "string", "format": "uuid7"},
    "bytes": {"type": "string", "format": "binary", "maxLength": 20},
    "Base64Bytes": {"type": "string", "format": "base64", "maxLength": 12},
    "bytes as base64url": {"type": "string", "format": "base64url", "maxLength": 12},
    "Decimal": closed(
        {"price": {"anyOf": [{"type": "number"}, {"type": "string", "pattern": DECIMAL}]}}
    ),
    "set of an enum": {
        "$defs": {"Color": {"enum": ["red", "green", "blue"], "type": "string"}},
        **closed({"s": {"type": "array", "uniqueItems": True, "items": {"$ref": "#/$defs/Color"}}}),
    },
    "set of five literals": {
        "type": "array",
        "uniqueItems": True,
        "items": {"enum": ["a", "b", "c", "d", "e"], "type": "string"},
    },
    "set of days": {
        "type": "array",
        "uniqueItems": True,
        "minItems": 1,
        "items": {"enum": ["mon", "tue", "wed", "thu", "fri", "sat", "sun"]},
    },
    "set of bool": {"type": "array", "uniqueItems": True, "items": {"type": "boolean"}},
    "set of at most one": {
        "type": "array",
        "uniqueItems": True,
        "maxItems": 1,
        "items": {"type": "string", "maxLength": 5},
    },
    "dict by an enum": {
        "$defs": {"Color": {"enum": ["red", "green"], "title": "Color", "type": "string"}},
        "type": "object",
        "propertyNames": {"$ref": "#/$defs/Color"},
        "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "dict by names with a pattern": {
        "type": "object",
        "propertyNames": {"pattern": "^[a-z]{1,4}$"},
        "additionalProperties": {"type": "boolean"},
        "maxProperties": 3,
    },
    "dict by names with a length": {
        "type": "object",
        "propertyNames": {"maxLength": 3, "minLength": 1},
        "additionalProperties": {"type": "null"},
        "maxProperties": 2,
    },
    "import string and file": closed(
        {
            "code": {"format": "py-import", "type": "string"},
            "f": {"format": "file-path", "type": "string"},
        },
    ),
    "discriminated union": {
        "$defs": {
            "Cat": closed({"kind": {"const": "cat", "type": "string"}, "age": {"type": "integer"}}),
            "Dog": closed({"kind": {"const": "dog", "type": "string"}, "name": {"type": "string"}}),
        },
        "discriminator": {"mapping": {"cat": "#/$defs/Cat"}, "propertyName": "kind"},
        "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
    },
    "Json and a default of 64 bits": closed(
        {
            "data": {"type": "string", "contentMediaType": "application/json", "maxLength": 9},
            "n": {
                "type": "integer",
                "default": 9223372036854775807,
                "maximum": 9223372036854775807,
            },
        },
    ),
}
ZOD: dict[str, Schema] = {
    "email": {
        "$schema": _DRAFT_2020,
        **closed({"m": {"type": "string", "format": "email", "pattern": EMAIL}}),
    },
    "int": {
        "$schema": _DRAFT_2020,
        "type": "integer",
        "minimum": -9007199254740991,
        "maximum": 9007199254740991,
    },
    "int64": {"type": "integer", "minimum": -9223372036854775808, "maximum": 9223372036854775807},
    "float32": {
        "type": "number",
        "minimum": -3.4028234663852886e38,
        "maximum": 3.4028234663852886e38,
    },
    "never": closed({"a": {"type": "integer"}, "never": {"not": {}}}, "never"),
    "undefined in a union": closed({"a": {"anyOf": [{"not": {}}, {"type": "string"}]}}, "a"),
    "record of an enum": {
        "type": "object",
        "propertyNames": {"type": "string", "enum": ["x", "y"]},
        "additionalProperties": {"type": "number"},
        "required": ["x", "y"],
    },
    "record of strings": {
        "type": "object",
        "propertyNames": {"type": "string"},
        "additionalProperties": {"type": "boolean"},
    },
    "templates and formats": closed(
        {
            "j": {"type": "string", "format": "jwt", "maxLength": 8},
            "n": {"type": "string", "format": "nanoid", "pattern": "^[a-zA-Z0-9_-]{21}$"},
            "c": {"type": "string", "format": "cuid2", "pattern": "^[0-9a-z]+$"},
            "e": {"type": "string", "format": "emoji", "maxLength": 4},
        },
        "e",
    ),
    "set of enum, draft 7": {
        "$schema": _DRAFT_7,
        **closed(
            {"s": {"type": "array", "uniqueItems": True, "items": {"enum": ["a", "b"]}}},
        ),
    },
    "map of entries": {
        "$schema": _DRAFT_7,
        "type": "array",
        "maxItems": 125,
        "items": {
            "type": "array",
            "items": [{"type": "string"}, {"type": "number"}],
            "minItems": 2,
            "maxItems": 2,
        },
    },
    "password rules": {
        "type": "string",
        "pattern": r"^(?=.*[a-z])(?=.*[A-Z])(?=.*\d)[A-Za-z\d]{8,16}$",
    },
    "partial with one at least": closed(
        {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "boolean"}},
        "a", "b", "c",
        minProperties=2,
    ),
    "slug": {"type": "string", "pattern": r"^(?!-)(?!.*--)[a-z0-9-]{1,40}(?<!-)$"},
    "not empty": {"type": "string", "maxLength": 9, "not": {"const": ""}},
}  # fmt: skip
SCHEMARS: dict[str, Schema] = {
    "u8 and u16": closed(
        {
            "a": {"type": "integer", "format": "uint8", "minimum": 0, "maximum": 255},
            "b": {"type": "integer", "format": "uint16", "minimum": 0.0, "maximum": 65535.0},
        }
    ),
    "u64": {"type": "integer", "format": "uint64", "minimum": 0.0, "maximum": 18446744073709551615},
    "i128 and f64": closed(
        {
            "a": {"type": "integer", "format": "int128"},
            "b": {"type": ["number", "null"], "format": "double"},
        },
        "b",
    ),
    "NonZero": {"type": "integer", "format": "uint32", "minimum": 1, "not": {"type": "string"}},
    "char": {"type": "string", "minLength": 1, "maxLength": 1},
    "HashSet of an enum": {
        "$schema": _DRAFT_2020,
        "type": "array",
        "uniqueItems": True,
        "items": {"$ref": "#/$defs/Mode"},
        "$defs": {"Mode": {"type": "string", "enum": ["Fast", "Slow"]}},
    },
    "partial date-time": {"type": "string", "format": "partial-date-time", "maxLength": 9},
    "duration of two u": closed(
        {
            "nanos": {"type": "integer", "format": "uint32", "minimum": 0},
            "secs": {"type": "integer", "format": "uint64", "minimum": 0},
        }
    ),
}
OPENAPI: dict[str, Schema] = {
    "int32, int64, float": closed(
        {
            "a": {"type": "integer", "format": "int32", "maximum": 2147483647},
            "b": {"type": "integer", "format": "int64", "example": 9007199254740991},
            "c": {"type": "number", "format": "float", "nullable": True},
        }
    ),
    "byte and uri-reference": closed(
        {
            "a": {"type": "string", "format": "byte", "maxLength": 8},
            "b": {"type": "string", "format": "uri-reference"},
        }
    ),
    "not unique": {"type": "array", "uniqueItems": False, "items": {"type": "integer"}},
    "largest lengths": {"type": "string", "minLength": 1, "maxLength": 9223372036854775807},
    "dependent": closed(
        {"card": {"type": "integer"}, "address": {"type": "string"}},
        "card", "address",
        dependencies={"card": ["address"]},
    ),
    "dependentRequired of two": closed(
        {"a": {"type": "null"}, "b": {"type": "null"}, "c": {"type": "null"}},
        "a", "b", "c",
        dependentRequired={"a": ["b"], "b": ["c"]},
    ),
    "at most two of four": closed(
        {name: {"type": "boolean"} for name in "abcd"}, *"abcd", minProperties=1, maxProperties=2
    ),
    "not both": closed(
        {"a": {"type": "null"}, "b": {"type": "null"}},
        "a", "b",
        **{"not": {"required": ["a", "b"]}},
    ),
    "not one of two words": {
        "type": "string",
        "pattern": "^[a-z]{1,6}$",
        "not": {"enum": ["root", "admin"]},
    },
    "read-only": closed({"id": {"type": "string", "format": "uuid", "readOnly": True}}),
    "host without a hyphen at its ends": {
        "type": "string",
        "pattern": r"^(?!-)[A-Za-z0-9-]{1,63}(?<!-)$",
    },
    "social security number": {
        "type": "string",
        "pattern": r"^(?!000|666)[0-8][0-9]{2}-(?!00)[0-9]{2}-(?!0{4})[0-9]{4}$",
    },
}  # fmt: skip
REFUSED: dict[str, tuple[Schema, str]] = {
    "pydantic: Decimal with digits and places": (
        {
            "type": "string",
            "pattern": r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,8}|(?=[\d.]{1,11}0*$)\d{0,8}\.\d{0,2}0*$)",
        },
        "look-aheads are held in no group",
    ),
    "pydantic: set of strings": (
        closed({"tags": {"type": "array", "uniqueItems": True, "items": {"type": "string"}}}),
        "in $.properties.tags; leave it out and drop what is repeated from the answer",
    ),
    "openapi: if and then": (
        {"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}},
        "use anyOf with a schema for each case",
    ),
    "openapi: contains": (
        {"type": "array", "contains": {"const": 1}},
        "give `prefixItems` or `items`",
    ),
}
"""With words of the refusal that say what to write instead."""
FORMS: dict[str, Schema] = {
    f"{library}: {name}": schema
    for library, listed in {
        "pydantic": PYDANTIC,
        "zod": ZOD,
        "schemars": SCHEMARS,
        "openapi": OPENAPI,
    }.items()
    for name, schema in listed.items()
}
