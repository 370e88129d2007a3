"""OpenAI's shapes of a choice of tools, and what they are on the wire."""

from __future__ import annotations

import json
from typing import Any

import headrace
import pytest
from headrace import ToolChoice, build_spec
from headrace._capabilities import with_capabilities
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_service_pb2 as rpc

MESSAGES: Any = [{"role": "user", "content": "hi"}]
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {}}}
STRICT = {"type": "function", "function": {"name": "f", "parameters": {}, "strict": True}}
G = {"type": "function", "function": {"name": "g"}}
AUTO, NONE, REQUIRED = (
    pb.TOOL_CHOICE_MODE_AUTO,
    pb.TOOL_CHOICE_MODE_NONE,
    pb.TOOL_CHOICE_MODE_REQUIRED,
)


def spec_with(**options: Any) -> pb.GenerationSpec:
    return build_spec(MESSAGES, options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        ("none", {"mode": NONE}),
        ("required", {"mode": REQUIRED}),
        (G, {"mode": REQUIRED, "tool_names": ["g"]}),
        ({"type": "function", "name": "g"}, {"mode": REQUIRED, "tool_names": ["g"]}),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL, G]}},
            {"mode": AUTO, "tool_names": ["f", "g"]},
        ),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function",
             "name": "g"}]},
            {"mode": REQUIRED, "tool_names": ["g"]},
        ),
        (ToolChoice(), {"mode": AUTO}),
        (
            ToolChoice("required", ("f",), parallel_calls=True),
            {"mode": REQUIRED, "tool_names": ["f"], "parallel_calls": True},
        ),
    ],
)  # fmt: skip
def test_a_choice_holds(choice: Any, wanted: dict[str, Any]) -> None:
    spec = spec_with(tools=[TOOL, G], tool_choice=choice)
    assert spec.chat.tool_choice == pb.ToolChoice(**wanted)
    request = with_capabilities(rpc.GenerateRequest(spec=spec))
    assert list(request.required_capabilities) == ["chat", "tool_choice", "tools"]


@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}])
def test_auto_alone_holds_nothing(choice: Any) -> None:
    loose = {**TOOL, "function": {**TOOL["function"], "strict": False}}
    assert not spec_with(tools=[TOOL, loose, headrace.Tool("g")], **choice).chat.HasField(
        "tool_choice"
    )
    assert not spec_with(**choice).chat.HasField("tool_choice")


@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}])
def test_auto_holds_where_that_is_asked_for(choice: Any) -> None:
    for tool in (STRICT, {"type": "function", "name": "f", "strict": True}):
        spec = spec_with(tools=[TOOL, tool], **choice)
        assert spec.chat.tool_choice == pb.ToolChoice(mode=AUTO)
    for parallel in (True, False):
        spec = spec_with(tools=[TOOL], parallel_tool_calls=parallel, **choice)
        assert spec.chat.tool_choice == pb.ToolChoice(mode=AUTO, parallel_calls=parallel)


def test_parallel_calls_go_with_any_choice() -> None:
    spec = spec_with(tools=[G], tool_choice="required", parallel_tool_calls=False)
    assert spec.chat.tool_choice == pb.ToolChoice(mode=REQUIRED, parallel_calls=False)
    spec = spec_with(tools=[G], tool_choice=ToolChoice(), parallel_tool_calls=True)
    assert spec.chat.tool_choice == pb.ToolChoice(mode=AUTO, parallel_calls=True)
    with pytest.raises(headrace.InvalidArgumentError, match="contradicts"):
        spec_with(tool_choice=ToolChoice(parallel_calls=False), parallel_tool_calls=True)


def test_what_a_raw_spec_chose_stays() -> None:
    raw = spec_with(tools=[G], tool_choice="required")
    assert build_spec(raw, {"max_tokens": 1}).chat.tool_choice.mode == REQUIRED
    spec = build_spec(raw, {"parallel_tool_calls": False})
    assert spec.chat.tool_choice == pb.ToolChoice(mode=REQUIRED, parallel_calls=False)
    assert build_spec(raw, {"tool_choice": "none"}).chat.tool_choice.mode == NONE


@pytest.mark.parametrize(
    "choice",
    [
        "f", "", 5, ["required"], {}, {"type": "custom", "custom": {"name": "f"}},
        {"type": "function"}, {"type": "function", "function": {"name": 5}},
        {"type": "allowed_tools"}, {"type": "allowed_tools", "allowed_tools": []},
        {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": []}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "often", "tools": [G]}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "mcp"}]}},
        ToolChoice("often"),  # type: ignore[arg-type]
        ToolChoice(tool_names="f"), ToolChoice(tool_names=[5]),  # type: ignore[list-item]
        ToolChoice(parallel_calls=[]),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_what_is_no_choice_is_refused(choice: Any) -> None:
    with pytest.raises(headrace.InvalidArgumentError) as caught:
        spec_with(tools=[TOOL], tool_choice=choice)
    assert caught.value.fields[0].field == "tool_choice"


def test_a_choice_belongs_to_a_conversation() -> None:
    for option in ({"tool_choice": "auto"}, {"parallel_tool_calls": True}):
        with pytest.raises(headrace.InvalidArgumentError, match="belongs to a prompt of messages"):
            build_spec("hi", option)  # type: ignore[arg-type]


def test_a_bound_for_reasoning() -> None:
    spec = spec_with(max_reasoning_tokens=0)
    assert spec.stop == pb.StopOptions(max_reasoning_tokens=0)
    request = with_capabilities(rpc.GenerateRequest(spec=spec))
    assert list(request.required_capabilities) == ["chat", "reasoning_budget"]


def test_structural_tags_are_a_form() -> None:
    tag = {"type": "structural_tag", "format": {"type": "const_string", "value": "é"}}
    for given in (tag, json.dumps(tag)):
        spec = spec_with(structural_tag=given)
        assert json.loads(spec.structured_output.structural_tag) == tag
        request = with_capabilities(rpc.GenerateRequest(spec=spec))
        assert list(request.required_capabilities) == [
            "chat", "structural_tag", "structured_output",
        ]  # fmt: skip
    with pytest.raises(headrace.InvalidArgumentError, match="cannot be combined"):
        spec_with(structural_tag=tag, json_object=True)
