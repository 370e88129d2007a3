"""JSON that comes as text: nothing is lost of it, and what is no JSON object is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text import JsonObject
from service.convert.json_text import (
    MAX_JSON_BYTES,
    MAX_JSON_BYTES_TOGETHER,
    MAX_JSON_VALUES,
    MAX_JSON_VALUES_TOGETHER,
    JsonReader,
)
from service.errors.call_errors import FieldError

VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    max_leaves=20,
)  # fmt: skip


def json_object(text: str, field: str) -> JsonObject:
    return JsonReader().object(text, field)


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
        ('{"a": ' + "[" * 9000 + "]" * 9000 + "}", "deeper than 64 levels"),
        ('{"a": ' + "[" * 64 + "]" * 64 + "}", "deeper than 64 levels"),
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


def test_as_deep_as_it_may_be() -> None:
    text = '{"a": ' + "[" * 63 + "1" + "]" * 63 + "}"
    assert json_object(text, "x").text == text


@pytest.mark.timeout(20)
def test_hostile_texts_take_no_longer_than_others() -> None:
    """Each took minutes where its time grew with the square of its length."""
    for text, said in [
        ('{"a": "' + "[," * 9000 + '\\"' * 110_000, "values|not JSON"),
        ('"' * 200_001, "not JSON"),
        ("\\" * 200_001, "not JSON"),
        ("{" + ",".join(f'"{n}":1' for n in range(16_000)) + ',"15999":2}', "'15999' twice"),
    ]:
        with pytest.raises(FieldError, match=said):
            json_object(text, "x")


def test_the_texts_of_a_conversation_are_bounded_together() -> None:
    long = json.dumps({"a": "x" * (MAX_JSON_BYTES - 20)})
    read = JsonReader().object
    for _ in range(MAX_JSON_BYTES_TOGETHER // MAX_JSON_BYTES):
        read(long, "x")
    with pytest.raises(FieldError, match=f"{MAX_JSON_BYTES_TOGETHER} bytes that all") as caught:
        read(long, "chat.tools[4].parameters_json")
    assert caught.value.path == "chat.tools[4].parameters_json"

    many = json.dumps({"a": [0] * (MAX_JSON_VALUES - 10)})
    read = JsonReader().object
    for _ in range(MAX_JSON_VALUES_TOGETHER // MAX_JSON_VALUES):
        read(many, "x")
    with pytest.raises(FieldError, match=f"{MAX_JSON_VALUES_TOGETHER} values that all"):
        read(many, "x")
