"""Granite 3's lists."""

from __future__ import annotations

from tests.service.replies.cases import (
    Case,
    cases_of_lists,
)

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
TRUNCATED = f"<think>hm</think>hi\n{CALL}"
WRAPS = [wrap]
