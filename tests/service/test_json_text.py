"""JSON that comes as text: nothing is lost of it, and what is no JSON object is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.call_errors import FieldError
from service.convert.json_text import MAX_JSON_BYTES, MAX_JSON_VALUES, count_values, json_object

VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    max_leaves=20,
)  # fmt: skip


@given(st.dictionaries(st.text(st.characters(codec="utf-8")), VALUES), st.booleans())
def test_order_and_digits_are_kept(value: dict[str, Any], ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    found = json_object(text, "x")
    assert found == value
    assert json.dumps(found) == json.dumps(value)  # the order too
    assert found.text == text


def test_an_empty_text_is_an_empty_object() -> None:
    assert (json_object("", "x"), json_object("", "x").text) == ({}, "{}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ('{"a": 1,}', "is not JSON"),
        ('{"a": 1} x', "is not JSON"),
        ("[1]", "is not a JSON object"),
        ("null", "is not a JSON object"),
        ('{"a": NaN}', "has NaN"),
        ('{"a": [-Infinity]}', "has -Infinity"),
        ('{"a": 1e999}', "beyond the range"),
        ('{"a": 1, "b": 2, "a": 3}', "names the member 'a' twice"),
        ('{"a": {"b": 1, "b": 1}}', "names the member 'b' twice"),
        ('{"a": "\\ud800"}', "surrogate"),
        ('{"\\udc00": 1}', "surrogate"),
        ('{"a": ' + "9" * 5000 + "}", "too many digits"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "values"),
        ('{"a": ' + "[" * 9000 + "]" * 9000 + "}", "nested too deeply"),
        ('{"a": "' + "x" * MAX_JSON_BYTES + '"}', f"at most {MAX_JSON_BYTES}"),
        ('{"a": "' + "ä" * (MAX_JSON_BYTES // 2) + '"}', f"at most {MAX_JSON_BYTES}"),
        ('{"a": [' + "1," * MAX_JSON_VALUES + "1]}", f"more than {MAX_JSON_VALUES} values"),
    ],
)
def test_what_is_no_object_is_refused(text: str, said: str) -> None:
    with pytest.raises(FieldError) as caught:
        json_object(text, "chat.tools[0].parameters_json")
    assert caught.value.path == "chat.tools[0].parameters_json"
    assert said in caught.value.description


def test_pairs_of_surrogates_are_text() -> None:
    assert json_object('{"a": "\\ud83d\\ude00"}', "x") == {"a": "😀"}


def test_commas_in_strings_are_no_values() -> None:
    text = json.dumps({"code": ',[{\\"' * 20_000})
    assert json_object(text, "x") == json.loads(text)
    assert count_values(text) == 1
