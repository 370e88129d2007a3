"""Nemotron's lists."""

from __future__ import annotations

import pytest

from service.replies import FORMATS, Context
from tests.service.replies.cases import (
    BROKEN_ARGUMENTS,
    WHOLE_ARGUMENTS,
    Case,
    cases_of_lists,
    check,
    check_broken_arguments,
    check_truncated,
    check_whole_arguments,
)

FORMAT = FORMATS["nemotron"]
TEMPLATES = ["{{- '<TOOLCALL>[' -}}{{ calls }}{{- ']</TOOLCALL>' -}}<think></think>"]
CALL = '<TOOLCALL>[{"name": "f", "arguments": {"a": 1}}]</TOOLCALL>'


def wrap(name: str, arguments: str) -> str:
    return f'<TOOLCALL>[{{"name": "{name}", "arguments": {arguments}}}]</TOOLCALL>'


CASES = [
    *cases_of_lists("<TOOLCALL>", "</TOOLCALL>"),
    Case("no list", '<TOOLCALL>{"name": "f"}</TOOLCALL>', '<TOOLCALL>{"name": "f"}</TOOLCALL>'),
    Case("another case", CALL.lower(), CALL.lower()),
    Case("ends alone", "a</TOOLCALL>b", "a</TOOLCALL>b"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_reply(case: Case) -> None:
    check(FORMAT, case)


@pytest.mark.parametrize("arguments", WHOLE_ARGUMENTS.values(), ids=WHOLE_ARGUMENTS.keys())
def test_arguments_are_as_they_were_written(arguments: str) -> None:
    check_whole_arguments(FORMAT, wrap, arguments)


@pytest.mark.parametrize("arguments", BROKEN_ARGUMENTS.values(), ids=BROKEN_ARGUMENTS.keys())
def test_what_is_no_json_comes_as_text(arguments: str) -> None:
    check_broken_arguments(FORMAT, wrap, arguments)


def test_a_reply_that_ends_anywhere() -> None:
    check_truncated(FORMAT, f"<think>hm</think>hi\n{CALL}", Context())
