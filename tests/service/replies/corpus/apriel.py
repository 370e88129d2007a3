"""Apriel 1.6: lists, and reasoning that the prompt begins in words."""

from __future__ import annotations

from tests.service.replies.cases import Case, cases_of_lists

BEGIN, END = "<tool_calls>", "</tool_calls>"
STEPS, FINAL = "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"


def wrap(name: str, arguments: str) -> str:
    return f'{BEGIN}[{{"name": "{name}", "arguments": {arguments}, "id": "a1"}}]{END}'


WRAPS = [wrap]
CALL = wrap("f", '{"a": 1}')
CASES = [
    *(c for c in cases_of_lists(BEGIN, END, reasoning=(STEPS, FINAL)) if c.id != "no object"),
    Case(
        "as it comes",
        f"I look.\n{FINAL}\nhi\n{CALL}",
        "hi",
        "I look.",
        [("f", '{"a": 1}')],
        in_reasoning=True,
    ),
    Case("an object", f'{BEGIN}{{"name": "f"}}{END}', calls=[("f", "{}")]),
]
TRUNCATED = f"{STEPS}hm{FINAL}hi\n{CALL}"
