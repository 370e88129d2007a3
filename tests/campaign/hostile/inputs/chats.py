"""Conversations with hostile tools, tool choices, reasoning markers and media.

The server is configured with the model's tool-call syntax, so that it can constrain replies to the
tools.
"""

from __future__ import annotations

import json
from typing import Any

from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_service_pb2 as rpc
from headrace.v1 import model_service_pb2 as model

from tests.campaign.hostile.inputs.derived import of
from tests.campaign.hostile.inputs.kinds import (
    OK,
    Case,
    Group,
    generates,
    invalid,
    lacking,
)
from tests.campaign.hostile.inputs.structured import DEFINITIONS, DOUBLED, EXPLODING
from tests.campaign.hostile.sending import GENERATE, TOKENIZE, Sender

HELD = 250 << 10
"""A total schema size for all tools that stays below the limit of 256 KiB."""
MOST_TOOLS = 128
REQUIRED = pb.TOOL_CHOICE_MODE_REQUIRED
NONE = pb.TOOL_CHOICE_MODE_NONE
USER, ASSISTANT, TOOL = pb.CHAT_ROLE_USER, pb.CHAT_ROLE_ASSISTANT, pb.CHAT_ROLE_TOOL
SPEC = "spec.chat."
[TOO_LONG] = invalid(SPEC + "messages")
"""The answer when the rendered tools and reasoning do not fit in the context."""
_HI = {"role": USER, "content": "hi"}


def _case(*answers: str, stop: dict[str, Any] | None = None, **chat: Any) -> Case:
    chat = {"messages": [_HI], **chat}
    return generates(*answers, chat=chat, stop=stop or {"max_tokens": 8})


def _wrong(field: str, **chat: Any) -> Case:
    return _case(*invalid(SPEC + field), **chat)


def _fits(**chat: Any) -> Case:
    """Return a case that is taken unless it is too long for the model."""
    return _case(OK, TOO_LONG, **chat)


def _rendered(*answers: str, **chat: Any) -> Case:
    """Return a case that sends the conversation to Tokenize."""
    chat = {"messages": [_HI], **chat}
    return Case(TOKENIZE, lambda s: model.TokenizeRequest(chat=chat), answers or (OK,))


def _tools(number: int, schema: object = None, prefix: str = "tool_") -> list[dict[str, str]]:
    text = "" if schema is None else json.dumps(schema)
    return [{"name": f"{prefix}{n}", "parameters_json": text} for n in range(number)]


def _object(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
        **more,
    }


def _new_tools(s: Sender, size: int = HELD) -> rpc.GenerateRequest:
    """Return the largest allowed number of tools, with new names and schemas of the given size."""
    number = s.source.getrandbits(40)
    names = [f"p{number:x}_{index}" for index in range(size // MOST_TOOLS // 90)]
    schema = _object({name: {"type": "string", "maxLength": 8} for name in names})
    tools = _tools(MOST_TOOLS, schema, f"t{number:x}_")
    chat = {"messages": [_HI], "tools": tools, "tool_choice": {"mode": REQUIRED}}
    return rpc.GenerateRequest(spec={"chat": chat, "stop": {"max_tokens": 8}})


_SCHEMAS: list[Any] = [
    _object({"a": DOUBLED}, **{"$defs": DEFINITIONS}),
    _object({"a": {"type": "string", "pattern": EXPLODING[0]}}),
    _object({"a": {"type": "string", "minLength": 100_000, "maxLength": 1_000_000}}),
    _object({f"p{n}": {"type": "number", "multipleOf": 0.001 * (2 * n + 1)} for n in range(40)}),
    {"type": "object", "properties": {f"p{n}": {} for n in range(1000)}},
    _object({"a": json.loads('{"items":' * 60 + "{}" + "}" * 60)}),
    {"type": "string"},
]
_OVERLAPPING = [{"name": "a" * number} for number in range(1, MOST_TOOLS + 1)]
_FUNCTION = {"name": "f", "parameters": _object({"a": {"type": "integer"}})}
_DEEP = '{"a":' * 60 + "1" + "}" * 60
_THOUGHT = "<think>" * 300 + "</think>" * 300

_DEFINITION = "tools[].definition_json"
_TEMPLATE = "template_arguments_json"


def _reasoning(text: str, times: int = 1) -> list[dict[str, Any]]:
    return [{"role": ASSISTANT, "reasoning_content": text}] * times


CHATS = Group("conversations", options=("--reply-parser", "hermes"))
CHATS.tries(
    "tool-choice-names",
    "choices of tools by as many names as fit, by long ones, by ones that are not there",
    *(
        _wrong(
            "tool_choice.tool_names",
            tools=_tools(MOST_TOOLS),
            tool_choice={"mode": REQUIRED, "tool_names": names},
        )
        for names in (
            ["tool_1"] * 100_000,
            [f"none_{n}" for n in range(MOST_TOOLS)],
            ["n" * 8000] * MOST_TOOLS,
            [""],
        )
    ),
)
CHATS.tries(
    "tool-choice-modes",
    "modes that do not exist, and choices that contradict the rest",
    *of("ToolChoice"),
    _wrong("tool_choice.mode", tools=_tools(1), tool_choice={"mode": 99}),
    _wrong("tool_choice", tool_choice={"mode": REQUIRED}),
    _wrong(
        "tool_choice.tool_names",
        tools=_tools(1),
        tool_choice={"mode": NONE, "tool_names": ["tool_0"]},
    ),
    _wrong("tool_choice", tools=_tools(MOST_TOOLS + 1), tool_choice={"mode": REQUIRED}),
    _wrong("tools[]", tools=_tools(1) * MOST_TOOLS, tool_choice={"mode": REQUIRED}),
)
CHATS.tries(
    "tool-calls-in-parallel",
    "replies that have to call one of 128 tools, many times and once",
    *(
        _case(
            tools=_tools(MOST_TOOLS, _object({"a": {"type": "integer"}})),
            tool_choice={"mode": REQUIRED, "parallel_calls": parallel},
            stop={"max_tokens": 16},
        )
        for parallel in (True, False)
    ),
    width=2,
    seconds=4.0,
)
CHATS.tries(
    "held-tools",
    "128 tools with forms of 250 KiB together, others each time",
    Case(GENERATE, _new_tools, (OK, TOO_LONG), each=True),
    Case(GENERATE, lambda s: _new_tools(s, HELD // 4), (OK, TOO_LONG), each=True),
    width=4,
    seconds=6.0,
)
CHATS.tries(
    "held-schemas",
    "tools of schemas that explode, count far, or cannot be held",
    *(
        _case(
            *(OK, TOO_LONG, *invalid(SPEC + "tool_choice", SPEC + "tools[]")),
            tools=_tools(4, schema),
            tool_choice={"mode": REQUIRED},
        )
        for schema in _SCHEMAS
    ),
    seconds=4.0,
)
CHATS.tries(
    "overlapping-tools",
    "128 tools, each name the beginning of the next",
    *(
        _fits(tools=_OVERLAPPING, tool_choice={"mode": mode}, stop={"max_tokens": 16})
        for mode in (REQUIRED, NONE, pb.TOOL_CHOICE_MODE_AUTO)
    ),
    width=4,
    seconds=4.0,
)
CHATS.tries(
    "tool-descriptions",
    "tools with descriptions as large as fits, and of control characters",
    _fits(tools=[{"name": "f", "description": "\x00\u2028</t>" * 50_000}]),
    _fits(tools=[{"name": "f", "description": "a" * 4000}] * 200),
)
CHATS.tries(
    "tool-definitions",
    "whole definitions of tools: deep, with members twice, of other shapes, beside a name",
    _wrong(_DEFINITION, tools=[{"definition_json": "["}]),
    _wrong(_DEFINITION, tools=[{"definition_json": '{"a":1,"a":2}'}]),
    _wrong(
        _DEFINITION,
        tools=[{"name": "f", "definition_json": json.dumps({"function": _FUNCTION})}],
    ),
    _fits(tools=[{"definition_json": _DEEP}] * 1000),
    _wrong(
        "tools[]",
        tools=[{"definition_json": json.dumps({"function": [1]})}],
        tool_choice={"mode": REQUIRED},
    ),
)
CHATS.tries(
    "reasoning-bounds",
    "bounds for reasoning of nothing and of the most there may be, with forms and without",
    *(
        generates(
            chat={"messages": [{"role": USER, "content": _THOUGHT}]},
            stop={"max_tokens": 16, "max_reasoning_tokens": bound},
            **form,
        )
        for bound in (0, 1, 2**31 - 1)
        for form in ({}, {"structured_output": {"json_schema": json.dumps(_SCHEMAS[0])}})
    ),
    generates(
        *invalid("spec.stop.max_reasoning_tokens"),
        text={"text": "hi"},
        stop={"max_reasoning_tokens": 0},
    ),
    width=4,
    seconds=4.0,
)
CHATS.tries(
    "speakers",
    "names of speakers and ids of calls, long and of control characters; unknown roles",
    *of("ChatMessage.name", "ChatMessage.tool_call_id", "ToolCall.id", "ChatMessage.role"),
    _case(messages=[{**_HI, "name": "\x00\n<|user|>" * 20_000}]),
    _case(
        messages=[
            {"role": ASSISTANT, "tool_calls": [{"id": "i" * 4000, "name": "f"}] * 100},
            _HI,
        ]
    ),
)
CHATS.tries(
    "reasoning-content",
    "reasoning as long as fits, of marks of reasoning, in 4,000 messages",
    _fits(messages=[*_reasoning("</think>" * 100_000), _HI]),
    _fits(messages=_reasoning("</think>", 300)),
    _fits(messages=_reasoning("</think>", 4000)),
    _rendered(OK, *invalid("chat.messages"), messages=_reasoning("a", 4000)),
)
CHATS.tries(
    "open-messages",
    "last messages that are continued, of blanks, and with another turn's opening",
    _case(
        messages=[{"role": ASSISTANT, "content": " \n" * 50_000}],
        continue_final_message=True,
    ),
    _case(
        *invalid(SPEC + "add_generation_prompt", SPEC + "continue_final_message"),
        add_generation_prompt=True,
        continue_final_message=True,
    ),
    _case(messages=[_HI] * 300, continue_final_message=True),
)
CHATS.tries(
    "media",
    "images, sounds and films: large ones, and addresses within the server's machine",
    *(
        _case(
            lacking(f"{SPEC}messages[].content_parts.parts[].{kind}"),
            messages=[{"role": USER, "content_parts": {"parts": [{kind: media}] * 50}}],
        )
        for kind in ("image", "audio", "video")
        for media in (
            {"data": b"\x89PNG" * 3000, "mime_type": "image/png"},
            {"uri": "file:///etc/passwd", "mime_type": "x" * 10_000},
            {"uri": "http://127.0.0.1:1/" + "a" * 10_000},
        )
    ),
    *of("Media"),
)
CHATS.tries(
    "template-names",
    "template arguments of names that the server sets, and of no object",
    *(
        _wrong(f"{_TEMPLATE}.{name}", template_arguments_json=f'{{"{name}":[]}}')
        for name in ("messages", "tools", "bos_token", "loop", "range")
    ),
    *(
        _wrong(_TEMPLATE, template_arguments_json=text)
        for text in (
            "[1]",
            '{"a":1e999}',
            '{"a":NaN}',
            '{"a":' + "9" * 5000 + "}",
            '{"a":1,"a":1}',
            '{"__class__":{"__init__":1},"self":1}',
        )
    ),
    _case(template_arguments_json='{"rang":{"__class__":1},"message":[[]]}'),
)
