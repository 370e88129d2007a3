r"""The format that a tokenizer declares in its files: the `response_template` of transformers.

    {"start_anchor": "<|im_start|>assistant\n",
     "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "repeats": true,
                       "content": "json",
                       "transform": {"type": "function", "function": "{content}"}},
        "content": {"close": "<|im_end|>"}}}

Such a template becomes a `Format` like any other, and its replies are read with the same care. Only
plain text and JSON are supported. A template is ignored if it has a regular expression
(`open_pattern`, `close_pattern`, `xml-inline`), invalid JSON, other fields, or calls that are
assembled in another way. If it does not mention reasoning, reasoning is between `<think>` and
`</think>`. Regular expressions are not supported because they are untrusted code: their running
time is unbounded, and they cannot read text as it arrives.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from service.replies.call_form import CallGrammar
from service.replies.declared import JsonCalls, declared
from service.replies.format import Format

NAME = "response_template"
_VERSION = 1
_MAX_MARK = 128
_REASONING = ("thinking", "reasoning_content", "reasoning")
_TEMPLATE_KEYS = {"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"}
_FIELD_KEYS = {"open", "close", "content", "content_args", "optional"}
_CALLS_KEYS = _FIELD_KEYS | {"repeats", "transform", "transform_each"}
_ARGUMENTS = ("arguments", "parameters")
_MEMBER = re.compile(r"\{content\.(\w+)\}")
_MEMBER_OF_EACH = re.compile(r"\{(\w+)\}")


class _UnknownError(Exception):
    """The template has something that is not supported."""


@dataclass(frozen=True, slots=True)
class _Calls:
    """How calls are declared: the literals around them, the names of an object's members, and
    whether the objects are in a list.
    """

    opening: tuple[str, ...]
    closing: tuple[str, ...]
    name: str = "name"
    arguments: str = "arguments"
    in_list: bool = False


def declared_format(template: object) -> Format | None:
    """Return the format of a response template; None if there is none or it is not supported."""
    if not isinstance(template, Mapping):
        return None
    try:
        return _format(template)
    except (_UnknownError, ValueError):  # marks that overlap are a ValueError
        return None


def _format(template: Mapping[str, object]) -> Format:
    fields = template.get("fields")
    if (
        template.get("version", _VERSION) != _VERSION
        or not template.keys() <= _TEMPLATE_KEYS
        or not isinstance(fields, Mapping)
    ):
        raise _UnknownError
    reasoning = ("<think>", "</think>")
    calls: _Calls | None = None
    silent: tuple[str, ...] = ()
    for name, field in fields.items():
        if not isinstance(field, Mapping):
            raise _UnknownError
        if name == "tool_calls":
            calls = _calls(field)
        elif name in _REASONING:
            reasoning = _reasoning(field)
        elif name == "content":
            silent = (*_text(field, "open"), *_text(field, "close"))
        else:
            raise _UnknownError
    rows = (
        []
        if calls is None
        else [
            JsonCalls(
                marks=_stripped(calls.opening),
                closing=_stripped(calls.closing),
                first="[" if calls.in_list else "{",
                name=calls.name,
            )
        ]
    )
    taken = {*reasoning, *(() if calls is None else (*calls.opening, *calls.closing))}
    return declared(
        NAME,
        *rows,
        reasoning=(reasoning[0].strip(), reasoning[1].strip()),
        silent=_stripped([mark for mark in silent if mark not in taken]),
        forms=() if calls is None else (_form(calls),),
    )


def _stripped(marks: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(mark.strip() for mark in marks))


def _literals(field: Mapping[str, object], key: str) -> tuple[str, ...]:
    """Return the literals of a field's member."""
    value = field.get(key, [])
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(
        isinstance(one, str) and one.strip() and len(one) <= _MAX_MARK for one in listed
    ):
        raise _UnknownError
    return tuple(listed)


def _text(field: Mapping[str, object], key: str) -> tuple[str, ...]:
    """Return the literals on one side of a text field."""
    is_text = field.get("content", "text") == "text" and not field.get("content_args")
    if not field.keys() <= _FIELD_KEYS or not is_text:
        raise _UnknownError
    return _literals(field, key)


def _reasoning(field: Mapping[str, object]) -> tuple[str, str]:
    opening, closing = _text(field, "open"), _text(field, "close")
    if len(opening) != 1 or len(closing) != 1:
        raise _UnknownError
    return opening[0], closing[0]


def _calls(field: Mapping[str, object]) -> _Calls:
    if (
        not field.keys() <= _CALLS_KEYS
        or field.get("content") != "json"
        or field.get("content_args")
    ):
        raise _UnknownError
    opening, closing = _literals(field, "open"), _literals(field, "close")
    if not opening:
        raise _UnknownError
    in_list = bool(field.get("transform_each"))
    transform = field.get("transform")
    if not isinstance(transform, Mapping) or not transform.keys() <= {"type", "function"}:
        raise _UnknownError
    function = transform.get("function")
    if function == "{content}" and not in_list:
        return _Calls(opening, closing)
    if not isinstance(function, Mapping) or function.keys() != {"name", "arguments"}:
        raise _UnknownError
    member = _MEMBER_OF_EACH if in_list else _MEMBER
    name, arguments = (member.fullmatch(str(function[key])) for key in ("name", "arguments"))
    if name is None or arguments is None or arguments[1] not in _ARGUMENTS:
        raise _UnknownError
    return _Calls(opening, closing, name[1], arguments[1], in_list)


def _form(calls: _Calls) -> CallGrammar:
    opening, closing = calls.opening[0], "".join(calls.closing[:1])
    marks = tuple(mark.strip() for mark in calls.opening)
    before, after = f'{{"{calls.name}": "', f'", "{calls.arguments}": '
    if calls.in_list:
        return CallGrammar(
            before=before,
            after=after,
            end="}",
            marks=marks,
            opening=opening + "[",
            closing="]" + closing,
            separator=", ",
        )
    return CallGrammar(before=opening + before, after=after, end="}" + closing, marks=marks)
