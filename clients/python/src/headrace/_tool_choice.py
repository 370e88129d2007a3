"""Converts OpenAI's tool choices and `ToolChoice` to the contract's: which tools a reply may or
must call.

In the contract, an absent choice means that nothing constrains the model. A choice that is present
constrains the model to the tools and their schemas. OpenAI's "auto" means neither. So "auto" (or no
choice) is sent as absent, unless something asks for constraints: a tool's dictionary with
"strict": true, `parallel_tool_calls`, a list of allowed tools, or the class `ToolChoice`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.errors import HeadraceError, invalid_argument
from headrace.messages import Tool, ToolChoice
from headrace.v1 import generation_pb2 as pb

_MODES = {
    "auto": pb.TOOL_CHOICE_MODE_AUTO,
    "none": pb.TOOL_CHOICE_MODE_NONE,
    "required": pb.TOOL_CHOICE_MODE_REQUIRED,
}


def choice_to_proto(
    choice: str | Mapping[str, Any] | ToolChoice | None,
    tools: Sequence[Tool | Mapping[str, Any]],
    parallel_calls: bool | None,
) -> pb.ToolChoice | None:
    """Returns the choice of a request, or None if nothing constrains the model.

    Args:
        choice: the option `tool_choice`.
        tools: the option `tools`; a strict tool asks for constraints.
        parallel_calls: the option `parallel_tool_calls`.

    Raises:
        InvalidArgumentError: the choice has an unknown shape, or contradicts `parallel_calls`.
    """
    if choice is None or choice == "auto":
        if parallel_calls is None and not any(_is_strict(tool) for tool in tools):
            return None
        choice = ToolChoice()
    elif isinstance(choice, str):
        choice = ToolChoice(_mode(choice))
    elif isinstance(choice, Mapping):
        choice = _from_mapping(choice)
    elif not isinstance(choice, ToolChoice):
        raise _unknown(choice)
    if isinstance(choice.tool_names, str):
        raise invalid_argument("tool_choice", "tool_names is a sequence of names")
    try:
        made = pb.ToolChoice(mode=_MODES[_mode(choice.mode)], tool_names=choice.tool_names)
        own = choice.parallel_calls
        if own is not None and parallel_calls is not None and own != parallel_calls:
            raise invalid_argument("parallel_tool_calls", "contradicts tool_choice.parallel_calls")
        for given in (own, parallel_calls):
            if given is not None:
                made.parallel_calls = given
    except (TypeError, ValueError) as error:
        raise invalid_argument("tool_choice", f"a value does not fit: {error}") from None
    return made


def _from_mapping(choice: Mapping[str, Any]) -> ToolChoice:
    """Converts a dictionary of OpenAI's Chat Completions or Responses API.

    Chat Completions nests the members under the type's name. Responses puts them next to the type.
    """
    kind = choice.get("type")
    if kind == "function":
        return ToolChoice("required", (_name(choice),))
    if kind != "allowed_tools":
        raise _unknown(choice)
    allowed = choice.get("allowed_tools", choice)
    if not isinstance(allowed, Mapping) or not isinstance(allowed.get("tools"), Sequence):
        raise _unknown(choice)
    names = tuple(_name(tool) for tool in allowed["tools"])
    if not names:
        raise invalid_argument("tool_choice", "allowed_tools allows no tool; say 'none' for that")
    return ToolChoice(_mode(allowed.get("mode", "auto")), names)


def _name(tool: Any) -> str:
    """Returns the name of the function in a tool choice."""
    if isinstance(tool, Mapping) and tool.get("type", "function") == "function":
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and isinstance(name := function.get("name"), str):
            return name
    raise _unknown(tool)


def _mode(mode: Any) -> Any:
    if not isinstance(mode, str) or mode not in _MODES:
        raise _unknown(mode)
    return mode


def _unknown(choice: Any) -> HeadraceError:
    return invalid_argument(
        "tool_choice",
        f"{choice!r} is none of 'auto', 'none', 'required', "
        '{"type": "function", "function": {"name": …}}, '
        '{"type": "allowed_tools", "allowed_tools": {"mode": …, "tools": […]}}, ToolChoice',
    )


def _is_strict(tool: Tool | Mapping[str, Any]) -> bool:
    if not isinstance(tool, Mapping):
        return False
    function = tool.get("function")
    inner = function.get("strict") if isinstance(function, Mapping) else None
    return tool.get("strict") is True or inner is True
