"""MiniMax M1: objects, one a line; others have a list there."""

from __future__ import annotations

from tests.service.replies.cases import Case, cases_of_lists

BEGIN, END = "<tool_calls>", "</tool_calls>"
ONE = '{"name": "f", "arguments": {"a": 1}}'


def wrap(name: str, arguments: str) -> str:
    return f'{BEGIN}\n{{"name": "{name}", "arguments": {arguments}}}\n{END}'


WRAPS = [wrap]
CALL, CALLED = wrap("f", '{"a": 1}'), ("f", '{"a": 1}')
CASES = [
    *cases_of_lists(BEGIN, END),
    Case("an object", CALL, calls=[CALLED]),
    Case("objects", f"{BEGIN}\n{ONE}\n{ONE}\n{END}", calls=[CALLED] * 2),
    Case("with commas", f"{BEGIN}\n{ONE},\n{ONE}\n{END}x", "x", calls=[CALLED] * 2),
    Case("no end of objects", f"{BEGIN}\n{ONE}\n{ONE}", calls=[CALLED] * 2),
    Case("the second no call", f"{BEGIN}{ONE}\n{{}}{END}", "{}" + END, calls=[CALLED]),
]
TRUNCATED = f"<think>hm</think>hi\n{BEGIN}\n{ONE}\n{ONE}\n{END}"
