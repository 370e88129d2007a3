"""Granite 3's lists."""

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

FORMAT = FORMATS["granite"]
TEMPLATES = [
    "<|start_of_role|>assistant<|end_of_role|>{{ '<|tool_call|>' + calls }}",
    "{% if thinking %}<think></think>{% endif %}<|start_of_role|>respond with <|tool_call|>",
]
CALL = '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]'


def wrap(name: str, arguments: str) -> str:
    return f'<|tool_call|>[{{"name": "{name}", "arguments": {arguments}}}]'


CASES = [
    *cases_of_lists("<|tool_call|>", ""),
    Case(
        "the other mark",
        CALL.replace("<|tool_call|>", "<tool_call>"),
        calls=[("f", '{"a": 1}')],
    ),
    Case("no list", '<|tool_call|>{"name": "f"}', '<|tool_call|>{"name": "f"}'),
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
