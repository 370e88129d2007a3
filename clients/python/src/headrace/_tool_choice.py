"""Which tools a reply may or must call: OpenAI's shapes and `ToolChoice`, as the contract has it.

On the wire a choice that is absent means that nothing holds the model, and one that is present that
the model is held to the tools and their schemas. OpenAI's "auto" says neither. So "auto" (or no
choice) is absent, unless something asks to be held: a tool's dictionary with "strict": true,
`parallel_tool_calls`, a list of allowed tools, or the class `ToolChoice`.
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
    """The choice of a request; None: nothing holds the model.

    Args:
        choice: the option `tool_choice`.
        tools: the option `tools`: one that is strict asks to be held.
        parallel_calls: the option `parallel_tool_calls`.

    Raises:
        InvalidArgumentError: the choice is of no known shape, or contradicts `parallel_calls`.
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
    """One of OpenAI's dictionaries, of its Chat Completions (the members under the type's own
    name) or of its Responses (beside the type).
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
    """The name of a function that a choice names."""
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
