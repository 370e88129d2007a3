"""Phi-4-mini's lists."""

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

FORMAT = FORMATS["phi4_mini"]
TEMPLATES = [
    "{{ '<|' + role + '|>' + content + '<|tool|>' + tools + '<|/tool|>' }}",
    "{{ '<|tool_call|>' + call + '<|/tool_call|>' }}",
    "a single JSON list formatted as functools[{name, arguments}]",
]
CALL = '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]<|/tool_call|>'
CALLED = ("f", '{"a": 1}')


def wrap(name: str, arguments: str) -> str:
    return f'<|tool_call|>[{{"name": "{name}", "arguments": {arguments}}}]<|/tool_call|>'


CASES = [
    *cases_of_lists("<|tool_call|>", "<|/tool_call|>"),
    Case("one object", CALL.replace("[", "").replace("]", ""), calls=[CALLED]),
    Case("functools", f"functools{CALL[13:-14]}", calls=[CALLED]),
    Case("functools behind text", f"I look.\nfunctools{CALL[13:-14]}", "I look.", calls=[CALLED]),
    Case(
        "no calls of functools",
        "functools[1] and functools.reduce[",
        "functools[1] and functools.reduce[",
    ),
    Case("functools' end left out", 'functools[{"name": "f"}', calls=[("f", "{}")]),
    Case("ends alone", "a<|/tool_call|>b", "a<|/tool_call|>b"),
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
