"""Tools that are Python functions: what the model sees of one, and how its calls are read.

`tool` reads a function's name, docstring, type hints and defaults, once. The result is a `Tool`
like any other, which can be passed wherever tools are accepted. `Client.run_tools` also runs it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from typing import Any, NoReturn, overload

from headrace._shapes import InexpressibleError, Member, Shape, hints_of, object_shape
from headrace.messages import Tool

_NAME = re.compile(r"[\w.-]{1,64}")
_SECTION = re.compile(
    r"(Args|Arguments|Parameters|Returns?|Raises|Yields|Examples?|Notes?|Warnings?):\s*"
)
_ENTRY = re.compile(r"(\w+(?:\s*,\s*\w+)*)\s*(?:\([^)]*\))?\s*:\s*(.*)")
_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True)
class FunctionTool(Tool):
    """A function that the model may call. Created by `tool`; it can be called like the function."""

    function: Callable[..., Any] = field(kw_only=True)
    shape: Shape = field(kw_only=True, repr=False, compare=False)
    """The shape of its parameters."""

    @property
    def is_async(self) -> bool:
        """Whether it is a coroutine function."""
        return inspect.iscoroutinefunction(_unwrapped(self.function))

    def read(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Converts the arguments of a call to what the function takes.

        For example, a value becomes an Enum member, and an object becomes a dataclass.

        Raises:
            ValueError: the arguments do not fit the function's type hints; the message names the
                location.
        """
        values: dict[str, Any] = self.shape.read(dict(arguments), "")
        return values

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


@overload
def tool(function: Callable[..., Any], /) -> FunctionTool: ...
@overload
def tool(
    *, name: str | None = None, description: str | None = None
) -> Callable[[Callable[..., Any]], FunctionTool]: ...
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
) -> FunctionTool | Callable[[Callable[..., Any]], FunctionTool]:
    '''Makes a tool of a function. Also a decorator, with or without arguments.

        @headrace.tool
        def read_gauge(place: str, unit: Literal["m", "ft"] = "m") -> float:
            """How high the river is.

            Args:
                place: a town on the river.
            """

    Its JSON Schema is made from the parameters' type hints and defaults. Supported hints are str,
    int, float, bool, None, Any, Literal, Enum, list, tuple, dict with str keys, unions,
    dataclasses, TypedDicts and Annotated. A parameter is described by a text in Annotated or by the
    docstring's `Args:`.

    Args:
        function: the function, a coroutine function, or a bound method.
        name: the tool's name for the model; the default is the function's.
        description: what the tool does, for the model to read; the default is the docstring up to
            its first section.

    Raises:
        TypeError: the function cannot be a tool. Either a parameter has no type hint, or one with
            no equivalent in JSON; or the function takes `*args`, `**kwargs` or positional-only
            parameters; or it has no name that a model could write.
    '''
    if function is None:
        return functools.partial(_tool, name=name, description=description)
    return _tool(function, name=name, description=description)


def tools_by_name(tools: Sequence[Callable[..., Any]]) -> dict[str, FunctionTool]:
    """Makes tools of functions, by name. A `FunctionTool` is used as it is.

    Raises:
        TypeError: a function cannot be a tool, or two have the same name.
    """
    found: dict[str, FunctionTool] = {}
    for one in tools:
        if not callable(one):
            raise TypeError(f"a tool that is run is a function; this is {one!r}")
        made = one if isinstance(one, FunctionTool) else tool(one)
        if made.name in found:
            raise TypeError(f"two tools have the name {made.name!r}")
        found[made.name] = made
    return found


def read_object(text: str) -> dict[str, Any]:
    """Parses a JSON object, by the rules that the server has for the arguments of calls.

    Raises:
        ValueError: the text is malformed or not an object, names a member twice, or contains a
            number or half a surrogate pair that JSON does not allow.
    """

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a member is named twice")
        return found

    try:
        value = json.loads(text, object_pairs_hook=members, parse_constant=_refuse_constant)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("it has half a surrogate pair") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("it is not an object")
    return value


def answer_text(value: Any) -> str:
    """Converts what a function returned to the text that the model reads.

    A string is used unchanged, and anything else becomes JSON. Dataclasses become objects. Values
    that JSON cannot represent become their `str`.

    Raises:
        TypeError, ValueError, RecursionError: a key is not a string, or the value contains itself.
    """
    if isinstance(value, str) and not isinstance(value, Enum):
        return value
    return json.dumps(value, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    return str(value)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _tool(
    function: Callable[..., Any], name: str | None = None, description: str | None = None
) -> FunctionTool:
    name = name or str(getattr(function, "__name__", ""))
    if not _NAME.fullmatch(name):
        raise TypeError(f"{function!r} has no name that a model could write; pass tool(name=…)")
    documented, arguments = _documented(function)
    try:
        shape = object_shape(_members(function, arguments), dict)
    except InexpressibleError as error:
        raise TypeError(f"{name} cannot be a tool: {error}") from None
    return FunctionTool(
        name,
        (documented or None) if description is None else description,
        shape.schema,
        function=function,
        shape=shape,
    )


def _unwrapped(function: Any) -> Any:
    """Returns the underlying function of a partial or of a callable object."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if inspect.isroutine(function) else type(function).__call__


def _members(function: Callable[..., Any], described: Mapping[str, str]) -> dict[str, Member]:
    """Returns a function's parameters as members of an object."""
    try:
        parameters = inspect.signature(function).parameters
        hints = hints_of(_unwrapped(function))
    except ValueError as error:
        raise InexpressibleError(str(error)) from None
    members = {}
    for name, parameter in parameters.items():
        if parameter.kind not in _KINDS:
            kind = parameter.kind.description
            raise InexpressibleError(f"{name!r} is {kind}: it cannot be passed by its name")
        if name not in hints:
            raise InexpressibleError(f"{name!r} has no type hint")
        required = parameter.default is parameter.empty
        default = None if required else parameter.default
        members[name] = Member(hints[name], required, default, described.get(name, ""))
    return members


def _documented(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Splits a docstring into the text before its first section and its `Args:`, by name."""
    lines = (inspect.getdoc(_unwrapped(function)) or "").splitlines()
    starts = [i for i, line in enumerate(lines) if _SECTION.fullmatch(line)]
    text = "\n".join(lines[: starts[0] if starts else len(lines)]).strip()
    arguments: dict[str, str] = {}
    for start, end in pairwise([*starts, len(lines)]):
        if not lines[start].startswith(("Args", "Arguments", "Parameters")):
            continue
        names: list[str] = []
        depth = -1
        for line in lines[start + 1 : end]:
            indent = len(line) - len(line.lstrip())
            if not line.strip():
                continue
            if indent == 0:  # the section is over
                break
            depth = indent if depth < 0 else depth
            if indent <= depth and (entry := _ENTRY.fullmatch(line.strip())):
                names = [name.strip() for name in entry[1].split(",")]
                arguments |= dict.fromkeys(names, entry[2])
            else:
                more = {name: f"{arguments[name]} {line.strip()}".strip() for name in names}
                arguments |= more
    return text, arguments
