"""A parser is taken only if it reads back the calls that a chat template writes."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from engine.text import ChatTemplates
from service.replies import FORMATS, ModelFormat, choose, format_option
from service.replies.proof import Proof, Writings
from tests.service.fake_engine import byte_tokenizer
from tests.service.replies.templates import FUNCTION_TAG, HERMES, NAMED, TURNS

LISTED = TURNS.replace(
    "CALL", f"{{{{ '<tool_calls>[' if loop.first else ', ' }}}}{{{NAMED}}}"
    "{{ ']</tool_calls>' if loop.last }}"
)  # fmt: skip
NAMES_HERMES = "{# #}Put calls within <tool_call></tool_call>, with arguments. "
ASSEMBLED = "{% set mark = 'tool_call' %}" + TURNS.replace(
    "CALL", f"{{{{ '<' ~ mark ~ '>' }}}}{{{NAMED}}}{{{{ '</' ~ mark ~ '>' }}}}"
)
FIRST_ALONE = TURNS.replace(
    "CALL", f"{{% if loop.first %}}<tool_call>{{{NAMED}}}</tool_call>{{% endif %}}"
)
MUTE = TURNS.replace("CALL", "")
UNKNOWN = TURNS.replace("CALL", f"[[call]]{{{NAMED}}}[[/call]]")
RENAMED = TURNS.replace("CALL", f"<tool_call>{{{NAMED}, 'x': 1}}</tool_call>")
REFUSES = "{{ raise_exception('no') }}"


def proved(template: str) -> tuple[str, Proof] | None:
    found = choose(Writings(ChatTemplates({"default": template}, {})))
    return None if found is None else (found[0].name, found[1])


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (HERMES, "hermes"),
        (ASSEMBLED, "hermes"),
        (FIRST_ALONE, "hermes"),
        (NAMES_HERMES + LISTED, "minimax_m1"),
        ('<|start_header_id|> "parameters" <|python_tag|>' + FUNCTION_TAG, "functionary"),
    ],
    ids=["hermes", "marks put together", "the first call alone", "other marks told", "llama told"],
)
def test_the_format_that_is_written_is_taken(template: str, name: str) -> None:
    found = proved(template)
    assert found is not None
    assert found[0] == name
    assert {"one call", "nested arguments", "reasoning before a call"} <= set(found[1].read)
    assert found[1].reasoning is True


def test_calls_are_read_behind_reasoning_whose_marks_are_not_known() -> None:
    found = proved(HERMES.replace("think>", "ponder>"))
    assert found is not None
    assert (found[0], found[1].reasoning) == ("hermes", False)


def test_marks_of_reasoning_that_are_not_written_speak_against_a_format() -> None:
    """Apriel's calls are these too, and its name is first."""
    reasoning = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    assert reasoning in LISTED
    found = proved(LISTED.replace(reasoning, ""))
    assert found is not None
    assert (found[0], found[1].reasoning, found[1].is_foreign) == ("minimax_m1", None, False)


@pytest.mark.parametrize(
    "template",
    [MUTE, NAMES_HERMES + MUTE, UNKNOWN, NAMES_HERMES + UNKNOWN, RENAMED, REFUSES, "", "{% x"],
)
def test_no_parser_is_taken_for_what_none_reads(template: str) -> None:
    assert proved(template) is None


def test_the_form_is_the_one_that_the_template_writes() -> None:
    name, given = "{{ call.function.name }}", "{{ call.function.arguments | tojson }}"
    for before, after, end, form in (
        ("", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", 0),
        ("function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>", 1),
    ):
        call = f"<｜tool▁call▁begin｜>{before}{name}{after}{given}{end}"
        found = proved(TURNS.replace("CALL", "{{ '<｜tool▁calls▁begin｜>' if loop.first }}" + call))
        assert found is not None
        assert found[1].form is FORMATS["deepseek"].forms[form]


def test_what_a_failing_template_costs_is_bounded() -> None:
    """Neither one that loops nor one that writes much is read."""
    assert proved("{% for i in range(100000) %}{{ 'x' * 1000 }}{% endfor %}" + HERMES) is None
    assert proved("{{ 'x' * 60000 }}" + HERMES) is not None
    assert proved("{{ 'x' * 70000 }}" + HERMES) is None


def found_by(option: str, template: str, **more: object) -> ModelFormat | None:
    return format_option(option)(byte_tokenizer(chat_template=template, **more))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "template", "name", "words"),
    [
        ("auto", HERMES, "hermes", "reads back what the chat template writes: no call, one call"),
        ("auto", UNKNOWN, "think", "no parser reads back the tool calls that the chat template"),
        ("auto", MUTE, "think", "writes no tool calls that could prove a parser"),
        ("auto", "{{ messages[0].content }}", None, "writes no tool calls that could prove"),
        ("hermes", HERMES, "hermes", "was chosen by --reply-parser and reads back what"),
        ("mistral", HERMES, "mistral", "does not read back the tool calls that the chat template"),
        ("hermes", MUTE, "hermes", "writes no tool calls to prove it by"),
    ],
)
def test_the_log_says_what_was_chosen_and_why(
    option: str,
    template: str,
    name: str | None,
    words: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    found = found_by(option, template)
    [record] = caplog.records
    assert words in record.getMessage()
    warned = option != "auto" and "and reads back" not in words
    assert record.levelno == (logging.WARNING if warned else logging.INFO)
    assert (None if found is None else found.format.name) == name
    if found is not None:
        assert found.proof in record.getMessage()
    assert (found is not None and found.call_form is not None) == (name not in ("think", None))


@pytest.mark.parametrize(
    ("marks", "opening"),
    [(["<seed:think>", "</seed:think>"], "<seed:think>"), (["[THINK]", "[/THINK]"], "[THINK]")],
)
def test_reasoning_alone_has_the_templates_own_marks(marks: Sequence[str], opening: str) -> None:
    found = found_by("auto", "{{ messages[0].content }}" + "".join(marks))
    assert found is not None
    assert (found.format.name, found.format.reasoning.opening) == ("think", opening)
    assert found.call_form is None
