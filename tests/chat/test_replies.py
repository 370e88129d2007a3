"""Replies in the form that each family's template writes them: taken apart, and put back in the
next turn, they give the template's own text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

from engine.text import ChatTemplateError, ChatTemplates, JsonObject
from service.replies import Context, Format, Reply, choose, tool_types
from service.replies.proof import Writings
from tests.chat.families import BARE, FAMILIES, GAUGE, SPECIAL, templates
from tests.service.replies.cases import check_divided, parse

TURN_ENDS = re.compile(
    r"(<\|im_end\|>|<\|eot_id\|>|<\|eom_id\|>|</s>|<｜end▁of▁sentence｜>|<\|call\|>|<\|end\|>"
    r"|<\|END\|>|<\|end_of_text\|>|<\|END_OF_TURN_TOKEN\|>|\n<SPECIAL_12>\n\n|\[e~\[\n"
    r"|\n<\|end\|>\n|<\|assistant_end\|>|<\|hy_eos:opensource\|>|<\|eot\|>|<end_of_sentence>|<seed:eos>|<turn\|>)+\s*\Z"
)
TOOLS = [GAUGE, BARE]
USER = {"role": "user", "content": "How high is it?"}
VALUES = {"zulu": 2**53 + 1, "größe": 'm\n"q" \\ é', "at": [0.5, 2**70], "水": {"z": True}}


PUT_BACK = [name for name, family in FAMILIES.items() if family.parser and family.put_back]


def _call(name: str, arguments: Mapping[str, object], id: str, text: str = "") -> dict[str, Any]:
    text = text or json.dumps(arguments, ensure_ascii=False)
    function = {"name": name, "arguments": JsonObject(arguments, text)}
    return {"id": id, "type": "function", "function": function}


GAUGED = _call("read_gauge", VALUES, "abcDE1234")
TOLD = _call("now", {}, "abcDE1235")
MESSAGES: dict[str, dict[str, Any]] = {
    "text": {"content": "It is 3 m.\nAt *Ulm*."},
    "call": {"content": None, "tool_calls": [GAUGED]},
    "two calls": {"content": None, "tool_calls": [GAUGED, TOLD]},
    "text and a call": {"content": "I look.", "tool_calls": [TOLD]},
    "reasoning and text": {"content": "It is.", "reasoning_content": "Is it?\n\nHm."},
    "reasoning and a call": {
        "content": None,
        "reasoning_content": "Is it?",
        "tool_calls": [GAUGED],
    },
}


@cache
def proved(family: str) -> Format | None:
    """The format that a family's template is proved to write."""
    found = choose(Writings(templates(family), SPECIAL))
    return None if found is None else found[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_template_proves_its_format(family: str) -> None:
    format = proved(family)
    assert ("" if format is None else format.name) == FAMILIES[family].parser


@pytest.mark.parametrize("name", MESSAGES)
@pytest.mark.parametrize("family", PUT_BACK)
def test_a_reply_that_is_put_back_gives_the_templates_own_text(family: str, name: str) -> None:
    known, message = templates(family), _with_ids(MESSAGES[name], FAMILIES[family].ids)
    format = proved(family)
    assert format is not None
    prompt = known.render([USER], tools=TOOLS)
    try:
        full = _shown(known, message)
    except ChatTemplateError:
        assert (family, name) == ("llama3_1", "two calls")
        return
    opened, marks = format.opens_reasoning(prompt), format.reasoning
    if not full.startswith(prompt):  # the prompt has reasoning that this turn does not have
        prompt = prompt[: prompt.rindex(marks.opening)]
        opened = opened and marks.closing in full[len(prompt) :]
    assert full.startswith(prompt)
    raw = TURN_ENDS.sub("", full[len(prompt) :])
    context = Context(tool_types(TOOLS), opened, "seed")
    reply = parse(format, [raw], context)
    check_divided(format, raw, context, reply)
    called = message.get("tool_calls", [])[: FAMILIES[family].calls]
    assert [call.name for call in reply.calls] == [call["function"]["name"] for call in called]
    for call, given in zip(reply.calls, called, strict=True):
        assert call.complete
        assert json.loads(call.arguments) == given["function"]["arguments"]
        full = full.replace(given["id"], call.id)
    shown = FAMILIES[family].reasoning
    if "reasoning_content" in message and (shown == "yes" or (shown == "beside calls" and called)):
        assert reply.reasoning == message["reasoning_content"]
    assert _shown(known, _message(reply)) == full


def _with_ids(message: dict[str, Any], ids: str) -> dict[str, Any]:
    """A message whose calls have ids of this form."""
    if not ids or "tool_calls" not in message:
        return message
    calls = [
        {**call, "id": ids.format(name=call["function"]["name"], index=index)}
        for index, call in enumerate(message["tool_calls"])
    ]
    return {**message, "tool_calls": calls}


def _shown(known: ChatTemplates, message: Mapping[str, Any]) -> str:
    """A conversation that ends with this message."""
    messages = [USER, {"role": "assistant", **message}]
    return known.render(messages, tools=TOOLS, add_generation_prompt=False)


def _message(reply: Reply) -> dict[str, Any]:
    """A reply as the next turn has it."""
    made: dict[str, Any] = {"content": reply.text or None}
    if reply.reasoning:
        made["reasoning_content"] = reply.reasoning
    if reply.calls:
        made["tool_calls"] = [
            _call(one.name, json.loads(one.arguments), one.id, one.arguments) for one in reply.calls
        ]
    return made
