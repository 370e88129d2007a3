"""Formats that tokenizers declare: those that are read, and beside transformers' own reading."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend
from transformers.utils.chat_parsing import parse_response

from engine.contract.errors import ConfigError
from engine.text import Tokenizer
from service.replies import Context, Format, format_option
from service.replies.response_template import declared_format
from tests.service.replies.cases import (
    BROKEN_ARGUMENTS,
    WHOLE_ARGUMENTS,
    Case,
    cases_of_lists,
    check,
    check_broken_arguments,
    check_truncated,
    check_whole_arguments,
    parse,
)
from tests.service.replies.templates import HERMES

OBJECTS: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>\n", "close": "\n</think>", "content": "text"},
        "tool_calls": {
            "open": "<call>\n",
            "close": "\n</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<|im_end|>", "content": "text"},
    },
}
LISTS: dict[str, Any] = {
    "version": 1,
    "start_anchor_pattern": "x",
    "fields": {
        "reasoning_content": {"open": "<hm>", "close": "</hm>"},
        "tool_calls": {
            "open": ["<calls>", "<CALLS>"],
            "close": "</calls>",
            "content": "json",
            "transform_each": True,
            "transform": {
                "type": "function",
                "function": {"name": "{tool}", "arguments": "{parameters}"},
            },
        },
        "content": {"open": "<say>", "close": ["</say>", "<end>"]},
    },
}


def format_of(template: dict[str, Any]) -> Format:
    found = declared_format(template)
    assert found is not None
    return found


def changed(template: dict[str, Any], *path: str, to: object) -> dict[str, Any]:
    made = copy.deepcopy(template)
    place = made
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    return made


CALL = '<call>\n{"name": "f", "arguments": {"a": 1}}\n</call>'
CALLED = ("f", '{"a": 1}')
OBJECT_CASES = [
    Case("a call", CALL, calls=[CALLED]),
    Case("two calls", f"{CALL}\n{CALL}", calls=[CALLED, CALLED]),
    Case("no end", CALL[: -len("\n</call>")], calls=[CALLED]),
    Case("reasoning", f"<think>\nhm\n</think>\n\nhi{CALL}<|im_end|>", "hi", "hm", [CALLED]),
    Case("the end left out", "hi<|im_end|>", "hi"),
    Case("no call", "<call>\n1\n</call>", "<call>\n1\n</call>"),
    Case("another end", f"{CALL[:-7]}</CALL>", "</CALL>", calls=[CALLED]),
]
LIST_CASES = [
    *cases_of_lists(
        "<calls>", "</calls>", name="tool", arguments="parameters", reasoning=("<hm>", "</hm>")
    ),
    Case("the other mark", '<CALLS>[{"tool": "f"}]</calls>', calls=[("f", "{}")]),
    Case("an answer", "<say>Hello.</say><end>", "Hello."),
]


@pytest.mark.parametrize("case", OBJECT_CASES, ids=lambda case: case.id)
def test_objects(case: Case) -> None:
    check(format_of(OBJECTS), case)


@pytest.mark.parametrize("case", LIST_CASES, ids=lambda case: case.id)
def test_lists(case: Case) -> None:
    check(format_of(LISTS), case)


def wrap(name: str, arguments: str) -> str:
    return f'<call>{{"name": "{name}", "arguments": {arguments}}}</call>'


@pytest.mark.parametrize("arguments", WHOLE_ARGUMENTS.values(), ids=WHOLE_ARGUMENTS.keys())
def test_arguments_are_as_they_were_written(arguments: str) -> None:
    check_whole_arguments(format_of(OBJECTS), wrap, arguments)


@pytest.mark.parametrize("arguments", BROKEN_ARGUMENTS.values(), ids=BROKEN_ARGUMENTS.keys())
def test_what_is_no_json_comes_as_text(arguments: str) -> None:
    check_broken_arguments(format_of(OBJECTS), wrap, arguments)


def test_a_reply_that_ends_anywhere() -> None:
    check_truncated(format_of(OBJECTS), f"<think>hm</think>hi\n{CALL}", Context())


@pytest.mark.parametrize(
    ("template", "raw"),
    [
        (OBJECTS, f"<think>\nhm\n</think>\n\nI look.\n{CALL}{CALL}<|im_end|>"),
        (OBJECTS, "Hello.<|im_end|>"),
        (OBJECTS, f"{CALL}<|im_end|>"),
        (OBJECTS, "<think>\nhm,\n\nhm\n</think>\n\nHello."),
        (LISTS, '<calls>[{"tool": "f", "parameters": {"é": [1, null]}}, '
                '{"tool": "g", "parameters": {}}]</calls>'),
        (LISTS, "<hm>hm</hm><say>Hello.</say>"),
    ],
)  # fmt: skip
def test_it_comes_to_what_transformers_makes_of_it(template: dict[str, Any], raw: str) -> None:
    theirs = parse_response(raw, template, prefix="")
    ours = parse(format_of(template), [raw])
    assert ours.text.strip() == theirs.get("content", "")
    assert ours.reasoning == theirs.get("thinking", theirs.get("reasoning_content", ""))
    calls = [
        {"type": "function", "function": {"name": c.name, "arguments": json.loads(c.arguments)}}
        for c in ours.calls
    ]
    assert calls == theirs.get("tool_calls", [])


FIELD = ("fields", "tool_calls")
UNREAD: dict[str, object] = {
    "nothing": None,
    "no object": [],
    "no fields": {"fields": []},
    "another version": {**OBJECTS, "version": 2},
    "another key": {**OBJECTS, "x": 1},
    "another field": changed(OBJECTS, "fields", "x", to={"open": "a"}),
    "a field that is no object": changed(OBJECTS, "fields", "content", to=1),
    "a regular expression": changed(OBJECTS, *FIELD, "open_pattern", to="a+"),
    "one at the end": changed(OBJECTS, "fields", "content", "close_pattern", to="a+"),
    "XML": changed(OBJECTS, *FIELD, "content", to="xml-inline"),
    "a dialect of JSON": changed(OBJECTS, *FIELD, "content_args", to={"unquoted_keys": True}),
    "blanks that count": changed(OBJECTS, "fields", "content", "content_args", to={"strip": False}),
    "calls without a mark": changed(OBJECTS, *FIELD, "open", to=[]),
    "a mark of blanks": changed(OBJECTS, *FIELD, "open", to="\n"),
    "a mark that is none": changed(OBJECTS, *FIELD, "open", to=[1]),
    "a long mark": changed(OBJECTS, *FIELD, "open", to="x" * 200),
    "two marks of reasoning": changed(OBJECTS, "fields", "thinking", "open", to=["<a>", "<b>"]),
    "marks that overlap": changed(OBJECTS, *FIELD, "open", to="<think><call>"),
    "no transform": changed(OBJECTS, *FIELD, "transform", to=None),
    "another transform": changed(OBJECTS, *FIELD, "transform", to={"function": {"name": "f"}}),
    "a capture": changed(
        OBJECTS, *FIELD, "transform", to={"function": {"name": "{name}", "arguments": "{content}"}}
    ),
    "another member": changed(LISTS, *FIELD, "transform", "function", "arguments", to="{x}"),
}  # fmt: skip


@pytest.mark.parametrize("template", UNREAD.values(), ids=UNREAD.keys())
def test_what_is_not_read_declares_nothing(template: object) -> None:
    assert declared_format(template) is None


def tokenizer(chat_template: str, response_template: object) -> Tokenizer:
    backend = Backend(models.WordLevel({"a": 0}, unk_token="a"))
    backend.add_special_tokens([AddedToken(mark) for mark in ("<call>", "<|im_end|>", "<x>")])
    return Tokenizer(
        backend, chat_templates={"default": chat_template}, response_template=response_template
    )


def test_when_it_is_used() -> None:
    """By name; else where we know none of the template's calls."""
    named, auto = format_option("response_template"), format_option("auto")
    for chat_template, expected in (
        ("", "response_template"),
        ("</think>", "response_template"),
        (HERMES, "hermes"),
    ):
        own = tokenizer(chat_template, OBJECTS)
        found, asked = auto(own), named(own)
        assert found is not None
        assert asked is not None
        assert (found.format.name, asked.format.name) == (expected, "response_template")
        assert asked.special == ("<call>", "<|im_end|>")
        assert asked.call_form is not None
        written = asked.call_form.written("f")
        assert [call.name for call in parse(asked.format, [written]).calls] == ["f"]
    none = auto(tokenizer("</think>", {}))
    assert none is not None
    assert none.format.name == "think"
    assert auto(tokenizer("", {})) is None
    assert named(None) is None
    with pytest.raises(ConfigError, match="tokenizer has none that can be read"):
        named(tokenizer("</think>", {}))


def test_a_special_token_within_a_mark_is_shown() -> None:
    template = changed(OBJECTS, "fields", "thinking", "open", to="<x>thought")
    found = format_option("auto")(tokenizer("", template))
    assert found is not None
    assert set(found.shown.values()) == {"<call>", "<|im_end|>", "<x>"}
    assert found.special == ("<call>", "<x>", "<|im_end|>")
