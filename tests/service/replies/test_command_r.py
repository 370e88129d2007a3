"""Command R and R+."""

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

FORMAT = FORMATS["command_r"]
TEMPLATES = [
    """{{ '\\nAction:\\n```json\\n[' }}{{ '"tool_name": "' }}""",
    'Write \'Action:\' followed by ```json [{"tool_name": title, "parameters"',
]
CALL = """Action:
```json
[
    {
        "tool_name": "f",
        "parameters": {"a": 1}
    }
]```"""
CALLED = ("f", '{"a": 1}')


def wrap(name: str, arguments: str) -> str:
    return f'Action: ```json\n[{{"tool_name": "{name}", "parameters": {arguments}}}]```'


CASES = [
    *cases_of_lists("Action:\n```json\n", "```", name="tool_name", arguments="parameters"),
    Case("as the template writes it", CALL, calls=[CALLED]),
    Case("a plan before", f"Plan: I look.\n{CALL}", "Plan: I look.", calls=[CALLED]),
    Case("an action in words", "Action: I look.", "Action: I look."),
    Case("another block", "Action:\n```py\n[]\n```", "Action:\n```py\n[]\n```"),
    Case("no block", 'Action: [{"tool_name": "f"}]', 'Action: [{"tool_name": "f"}]'),
    Case("name instead of tool_name", CALL.replace("tool_", ""), CALL.replace("tool_", "")),
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
