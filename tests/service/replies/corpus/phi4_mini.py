"""Phi-4-mini's lists."""

from __future__ import annotations

from tests.service.replies.cases import (
    Case,
    cases_of_lists,
)

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
TRUNCATED = f"<think>hm</think>hi\n{CALL}"
WRAPS = [wrap]
