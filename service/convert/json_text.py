"""Parses JSON text in fields: schemas of tools, and arguments of calls and of templates.

JSON is sent as text so that nothing is lost: members keep their order, which a prompt shows, and
integers keep their digits. It is parsed here, once, for the template.

Parsing holds the interpreter's lock, and values take many times the memory of their text. So the
length of a text is limited, and its depth and number of values are checked before it is parsed. A
conversation may have thousands of texts, so their total is limited too.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import NoReturn

from engine.text import JsonObject
from engine.text.conversation import MAX_DEPTH
from service.errors.call_errors import FieldError

MAX_JSON_BYTES = 256 << 10
"""The longest text, in bytes of UTF-8. It is parsed in a few milliseconds."""
MAX_JSON_VALUES = 16_384
"""The most values in one text, at any depth."""
MAX_JSON_BYTES_TOGETHER = 4 * MAX_JSON_BYTES
MAX_JSON_VALUES_TOGETHER = 4 * MAX_JSON_VALUES
"""The most values in all texts of one conversation."""
# An unclosed string matches to the end; otherwise each quote in it would start another search.
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_BRACKET = re.compile(r"[\[\]{}]")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class JsonReader:
    """Reads the JSON texts of one conversation, and checks their total size."""

    def __init__(self) -> None:
        self._bytes = 0
        self._values = 0

    def object(self, text: str, field: str) -> JsonObject:
        """Return the object in a JSON text, or an empty object for an empty text.

        Raises:
            FieldError: the text is too long, not JSON, or not an object.
        """
        if not text:
            return JsonObject({}, "{}")
        size = len(text) if text.isascii() else len(text.encode())
        if size > MAX_JSON_BYTES:
            raise FieldError(
                field, f"has {size} bytes; at most {MAX_JSON_BYTES} are allowed: shorten it"
            )
        self._bytes += size
        if self._bytes > MAX_JSON_BYTES_TOGETHER:
            raise FieldError(
                field,
                f"is beyond the {MAX_JSON_BYTES_TOGETHER} bytes that all JSON of a conversation "
                "may have: send less of it",
            )
        bare = _STRING.sub("", text)
        values = bare.count(",") + bare.count("[") + bare.count("{")
        if values > MAX_JSON_VALUES:
            raise FieldError(
                field, f"has more than {MAX_JSON_VALUES} values, which is the most: send fewer"
            )
        self._values += values
        if self._values > MAX_JSON_VALUES_TOGETHER:
            raise FieldError(
                field,
                f"is beyond the {MAX_JSON_VALUES_TOGETHER} values that all JSON of a conversation "
                "may have: send fewer",
            )
        if _depth(bare) > MAX_DEPTH:
            raise FieldError(field, f"is nested deeper than {MAX_DEPTH} levels")
        return _parsed(text, field)


def _depth(bare: str) -> int:
    deepest = depth = 0
    for bracket in _BRACKET.findall(bare):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    return deepest


def _parsed(text: str, field: str) -> JsonObject:
    try:
        value = json.loads(
            text, object_pairs_hook=_members, parse_constant=_constant, parse_float=_float
        )
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise FieldError(field, f"is not JSON: {error.msg} at character {error.pos + 1}") from error
    except _NotJsonError as error:
        raise FieldError(field, str(error)) from error
    except UnicodeEncodeError as error:
        raise FieldError(field, "has half of a surrogate pair, which is no text") from error
    except ValueError as error:  # from int(): more digits than Python converts
        raise FieldError(field, "has an integer with too many digits") from error
    if not isinstance(value, dict):
        raise FieldError(field, "is not a JSON object; write {...}")
    return JsonObject(value, text)


class _NotJsonError(Exception):
    """Something that Python's parser accepts but JSON does not allow."""


def _members(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise _NotJsonError(f"names the member {twice[:40]!r} twice; which one is meant?")
    return found


def _constant(name: str) -> NoReturn:
    raise _NotJsonError(f"has {name}, which is no JSON")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _NotJsonError("has a number beyond the range of double precision")
    return value
