"""Command R and R+."""

from __future__ import annotations

from tests.service.replies.cases import (
    Case,
    cases_of_lists,
)

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
TRUNCATED = f"<think>hm</think>hi\n{CALL}"
WRAPS = [wrap]
