"""The scanner takes what Python's parser takes, strictly, and finds where a value ends."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.replies.json_scanner import MAX_DEPTH, JsonScanner, is_json

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)
NO_JSON = re.compile(r"NaN|Infinity")


def by_python(text: str) -> bool:
    if NO_JSON.search(text) or text != text.strip(" \t\r\n"):
        return False
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def scan(parts: list[str]) -> tuple[int, bool, bool]:
    scanner = JsonScanner()
    taken = 0
    for part in parts:
        taken += scanner.feed(part, 0, len(part))
    return taken, scanner.done, scanner.failed


@settings(deadline=None)
@given(value=VALUES, indent=st.none() | st.integers(0, 2), ascii=st.booleans())
def test_it_takes_what_is_written(value: object, indent: int | None, ascii: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii)
    assert is_json(text)
    whole = scan([text + " x"])
    assert whole == scan(list(text + " x"))
    assert whole == (len(text), True, False)


@settings(deadline=None)
@given(text=st.text(st.sampled_from('{}[]",:\\ \n0123.eE+-truefalsnu"au{}'), max_size=24))
def test_it_takes_no_more_than_pythons_parser(text: str) -> None:
    assert is_json(text) == by_python(text)
    assert scan([text]) == scan(list(text))


@settings(deadline=None)
@given(value=VALUES, place=st.integers(0), character=st.characters())
def test_one_character_changed(value: object, place: int, character: str) -> None:
    text = json.dumps({"a": value})
    place %= len(text)
    text = text[:place] + character + text[place + 1 :]
    assert is_json(text) == by_python(text)


@pytest.mark.parametrize("opened", ["[", '{"a":'])
def test_how_deep_it_goes(opened: str) -> None:
    closed = "]" if opened == "[" else "}"
    inner = "[]" if opened == "[" else "{}"
    fits = opened * (MAX_DEPTH - 1) + inner + closed * (MAX_DEPTH - 1)
    assert is_json(fits)
    assert not is_json(opened + fits + closed)
