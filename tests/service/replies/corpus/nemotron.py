"""Nemotron's lists."""

from __future__ import annotations

from tests.service.replies.cases import (
    Case,
    cases_of_lists,
)

CALL = '<TOOLCALL>[{"name": "f", "arguments": {"a": 1}}]</TOOLCALL>'


def wrap(name: str, arguments: str) -> str:
    return f'<TOOLCALL>[{{"name": "{name}", "arguments": {arguments}}}]</TOOLCALL>'


CASES = [
    *cases_of_lists("<TOOLCALL>", "</TOOLCALL>"),
    Case("no list", '<TOOLCALL>{"name": "f"}</TOOLCALL>', '<TOOLCALL>{"name": "f"}</TOOLCALL>'),
    Case("another case", CALL.lower(), CALL.lower()),
    Case("ends alone", "a</TOOLCALL>b", "a</TOOLCALL>b"),
]
TRUNCATED = f"<think>hm</think>hi\n{CALL}"
WRAPS = [wrap]
