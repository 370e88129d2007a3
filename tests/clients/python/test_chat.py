"""Dictionaries of conversations and tools, as OpenAI's API and transformers have them."""

from __future__ import annotations

import json
from typing import Any

import headrace
import pytest
from headrace import Message, Tool, ToolCall
from headrace._chat import message_to_proto, tools_to_proto
from headrace.v1 import generation_pb2 as pb

CALL: dict[str, Any] = {
    "id": "abcDE1234",
    "type": "function",
    "function": {"name": "f", "arguments": '{"z": 1e2,  "a":9007199254740993}'},
}
ASSISTANT, USER, TOOL = pb.CHAT_ROLE_ASSISTANT, pb.CHAT_ROLE_USER, pb.CHAT_ROLE_TOOL


def test_an_answer_of_openai_is_taken_as_it_is() -> None:
    message = {
        "role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None,
        "function_call": None, "tool_calls": [{**CALL, "index": 0}],
    }  # fmt: skip
    made = message_to_proto(message)
    call = pb.ToolCall(id="abcDE1234", name="f", arguments_json=CALL["function"]["arguments"])
    assert made == pb.ChatMessage(role=ASSISTANT, tool_calls=[call])
    assert made.WhichOneof("content_kind") is None


def test_arguments_are_text_as_it_stands_or_objects_in_their_order() -> None:
    arguments = {"zulu": 2**64, "größe": [None, True, 0.1], "a": {}}
    for call in (
        {"function": {"arguments": arguments, "name": "f"}},  # as transformers has it, no id
        {"name": "f", "arguments": arguments},
        ToolCall("", "f", arguments),
    ):
        [made] = message_to_proto({"role": "assistant", "tool_calls": [call]}).tool_calls
        assert (made.id, made.name) == ("", "f")
        assert made.arguments_json == (
            '{"zulu": 18446744073709551616, "größe": [null, true, 0.1], "a": {}}'
        )
        assert list(json.loads(made.arguments_json)) == list(arguments)


def test_tools_are_sent_as_they_are() -> None:
    function = {"parameters": {"type": "object"}, "strict": True, "name": "f"}
    for tool in (
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}},
        {"function": function, "type": "function"},
        {"type": "custom", "custom": {"name": "ü"}},
        function,
    ):
        assert tools_to_proto([tool]) == [
            pb.Tool(definition_json=json.dumps(tool, ensure_ascii=False))
        ]
    parameters = '{"type":  "object"}'
    assert tools_to_proto([Tool("f"), Tool("g", "d", parameters)]) == [
        pb.Tool(name="f"),
        pb.Tool(name="g", description="d", parameters_json=parameters),
    ]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_by_all_its_names(name: str) -> None:
    made = message_to_proto({"role": "assistant", "content": "x", name: "hm"})
    assert made == pb.ChatMessage(role=ASSISTANT, content="x", reasoning_content="hm")


def test_content_is_text_parts_or_nothing() -> None:
    assert message_to_proto({"role": "user", "content": ""}).HasField("content")
    for message in ({"role": "user"}, {"role": "user", "content": None}, Message("user", None)):
        assert message_to_proto(message) == pb.ChatMessage(role=USER)
    parts: Any = [{"type": "text", "text": "a"}, "b"]
    for message in ({"role": "tool", "content": parts, "tool_call_id": "1"},
                    Message("tool", parts, tool_call_id="1")):  # fmt: skip
        assert message_to_proto(message) == pb.ChatMessage(
            role=TOOL,
            tool_call_id="1",
            content_parts=pb.ContentParts(
                parts=[pb.ContentPart(text="a"), pb.ContentPart(text="b")]
            ),
        )


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "robot", "content": "x"}, "'robot' is not one of"),
        ({"content": "x"}, "no role"),
        ({"role": "user", "content": "x", "colour": 1}, "unknown members colour"),
        ({"role": "assistant", "content": "x", "audio": {"id": "1"}}, "unknown members audio"),
        ({"role": "user", "content": 5}, "does not fit"),
        ({"role": "user", "content": [5]}, "5 is no part"),
        ({"role": "user", "content": [{"type": "text"}]}, "has no text"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "does not fit"),
        ({"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]},
         "unknown members cache_control"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
         "type 'image_url' is not supported; send text"),
        ({"role": "assistant", "tool_calls": [5]}, "is no tool call"),
        ({"role": "assistant", "tool_calls": [{"type": "custom", "custom": {}}]}, "only calls of"),
        ({"role": "assistant", "tool_calls": [{"id": "1", "function": {}}]}, "no name"),
        ({"role": "assistant", "tool_calls": [{**CALL, "extra": 1}]}, "unknown members extra"),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"a": {1}}}]},
         "is no JSON"),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"a": float("nan")}}]},
         "is no JSON"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused_by_name(message: Any, said: str) -> None:
    with pytest.raises(headrace.InvalidArgumentError, match=said) as caught:
        message_to_proto(message)
    assert caught.value.fields[0].field.startswith("messages")


@pytest.mark.parametrize("tool", [5, {"a": {1}}, Tool(5), Tool("f", parameters={"a": {1}})])  # type: ignore[arg-type, dict-item]
def test_tools_that_are_none_are_refused(tool: Any) -> None:
    with pytest.raises(headrace.InvalidArgumentError) as caught:
        tools_to_proto([tool])
    assert caught.value.fields[0].field.startswith("tools")


def test_a_call_s_arguments_as_json() -> None:
    assert ToolCall("c1", "f", {"at": "Ulm"}).arguments_json == '{"at": "Ulm"}'
    assert ToolCall("c1", "f", "{ broken").arguments_json == "{ broken"  # as the model wrote it
