"""JSON that comes as text in a field: schemas of tools, arguments of calls and of templates.

It is text on the wire so that nothing is lost on the way: its members keep their order, which a
prompt shows, and integers their digits. It becomes values here, once, for the template.

Parsing holds the interpreter, and values take many times their text's memory: so a text's length is
bounded, and its depth and its values are counted before they are made. A conversation may have
thousands of texts, so what they come to together is bounded too.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import NoReturn

from engine.text import JsonObject
from engine.text.conversation import MAX_DEPTH
from service.call_errors import FieldError

MAX_JSON_BYTES = 256 << 10
"""The longest text, in bytes of UTF-8: parsed in some milliseconds."""
MAX_JSON_VALUES = 16_384
"""The most values in one text, at any depth."""
MAX_JSON_BYTES_TOGETHER = 4 * MAX_JSON_BYTES
MAX_JSON_VALUES_TOGETHER = 4 * MAX_JSON_VALUES
"""What the texts of one conversation may come to."""
# A string that is not closed is taken to the end: were it no match, each quote in it would begin
# another search.
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_BRACKET = re.compile(r"[\[\]{}]")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class JsonReader:
    """Reads the JSON texts of one conversation, and counts what they come to."""

    def __init__(self) -> None:
        self._bytes = 0
        self._values = 0

    def object(self, text: str, field: str) -> JsonObject:
        """The object that a JSON text has; of an empty text, an empty one.

        Raises:
            FieldError: it is too long, no JSON, or no object.
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
    """How deep the brackets of a text without its strings are."""
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
    except ValueError as error:  # of int(): more digits than Python converts
        raise FieldError(field, "has an integer with too many digits") from error
    if not isinstance(value, dict):
        raise FieldError(field, "is not a JSON object; write {...}")
    return JsonObject(value, text)


class _NotJsonError(Exception):
    """What Python's parser takes, and JSON does not have."""


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
