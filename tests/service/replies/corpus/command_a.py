"""Command A and Command R7B."""

from __future__ import annotations

from tests.service.replies.cases import (
    Case,
    cases_of_lists,
)

OPEN, CLOSE = "<|START_ACTION|>", "<|END_ACTION|>"
CALL = f'{OPEN}[{{"tool_call_id": "0", "tool_name": "f", "parameters": {{"a": 1}}}}]{CLOSE}'
CALLED = ("f", '{"a": 1}')


def wrap(name: str, arguments: str) -> str:
    return f'{OPEN}[{{"tool_name": "{name}", "parameters": {arguments}}}]{CLOSE}'


CASES = [
    *cases_of_lists(
        OPEN,
        CLOSE,
        name="tool_name",
        arguments="parameters",
        reasoning=("<|START_THINKING|>", "<|END_THINKING|>"),
    ),
    Case("with its number", CALL, calls=[CALLED]),
    Case("an answer", "<|START_RESPONSE|>Hello.<|END_RESPONSE|>", "Hello."),
    Case("an answer that is cut", "<|START_RESPONSE|>Hello", "Hello"),
    Case("an answer of a later model", "<|START_TEXT|>Hello.<|END_TEXT|>", "Hello."),
    Case(
        "reasoning, an answer",
        "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>Hi.<|END_RESPONSE|>",
        "Hi.",
        "hm",
    ),
    Case(
        "name instead of tool_name",
        CALL.replace("tool_name", "name"),
        CALL.replace("tool_name", "name"),
    ),
    Case("ends alone", f"a{CLOSE}b", f"a{CLOSE}b"),
]
TRUNCATED = f"<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>hi<|END_RESPONSE|>{CALL}"
WRAPS = [wrap]
