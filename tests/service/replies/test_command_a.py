"""Command A and Command R7B."""

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

FORMAT = FORMATS["command_a"]
TEMPLATES = [
    """{{ '<|START_ACTION|>[{"tool_name": ' }}{{ '<|END_ACTION|>' }}<|START_RESPONSE|>""",
    "<|START_THINKING|>Action: <|START_ACTION|> tool_name <|END_ACTION|> ```json",
]
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
    check_truncated(
        FORMAT,
        f"<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>hi<|END_RESPONSE|>{CALL}",
        Context(),
    )
