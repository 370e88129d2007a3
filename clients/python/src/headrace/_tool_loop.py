"""Runs a conversation with tools, without I/O: what to ask next, which calls to run, and what to
tell the model about each call.

1. `spec` returns the next request: the conversation so far, with the tools.
2. `take` reads the reply. If the reply calls no tool, was cut off, or is the last one allowed, the
   run has ended. Otherwise its calls are to be run.
3. `call` and `call_async` run one call. A call that cannot be run (an unknown tool, arguments that
   do not fit) is already an error.
4. `settle` makes the call's answer: what the function returned, or what went wrong.
5. `close` adds the reply and the answers to the conversation in one step. If a run is interrupted
   before that, the conversation is unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, TypeAlias, cast

from headrace.errors import invalid_argument
from headrace.messages import Conversation, ToolCall
from headrace.options import (
    TURN_OPTION_NAMES,
    GenerationOptions,
    TurnOptions,
    build_spec,
    check_names,
)
from headrace.results import FinishReason, Result
from headrace.tools import FunctionTool, answer_text, read_object, tools_by_name
from headrace.v1 import generation_pb2 as pb

_QUOTED_CHARACTERS = 1000
_WHOLE = (FinishReason.STOP, FinishReason.TOOL_CALLS)


class ToolError(Exception):
    """A call that no function answered. The message is what the model is told about it."""

    def __init__(self, call: ToolCall, message: str) -> None:
        super().__init__(message)
        self.call = call
        """The call, as the model wrote it."""


class UnknownToolError(ToolError):
    """There is no tool with this name."""


class ToolArgumentsError(ToolError):
    """The arguments are not a JSON object, or do not fit the function's type hints."""


class ToolDeclinedError(ToolError):
    """`approve` did not allow the call."""


class ToolFailedError(ToolError):
    """The function raised an exception, which is available as `__cause__`."""


OnError: TypeAlias = Literal["tell", "raise"] | Callable[[ToolError], str]
Verdict: TypeAlias = bool | str


class ToolRunEnd(StrEnum):
    """Why a tool run ended."""

    ANSWERED = "answered"
    """The last reply calls no tool."""
    CUT = "cut"
    """The last reply was cut off (by its length, a limit, a stop string or a cancellation). Its
    calls, if any, were not run because they may be incomplete.
    """
    MAX_TURNS = "max_turns"
    """The turn limit was reached. The last reply has calls, which were not run."""


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """The outcome of one call."""

    call: ToolCall
    """The call, with its arguments as the model wrote them."""
    content: str
    """What the model is told."""
    value: Any = None
    """What the function returned."""
    error: ToolError | None = None
    """Why no function answered."""


@dataclass(frozen=True, slots=True)
class ToolTurn:
    """One reply of the model, and the outcomes of its calls."""

    result: Result
    answers: tuple[ToolAnswer, ...] = ()
    """The answers, in the order of the calls; empty if the calls were not run."""


@dataclass(frozen=True, slots=True)
class PendingCall:
    """A call that can be run."""

    call: ToolCall
    tool: FunctionTool
    arguments: Mapping[str, Any]
    """The arguments as JSON values."""
    values: Mapping[str, Any]
    """The arguments as the function takes them."""

    @property
    def question(self) -> ToolCall:
        """The call as shown to `approve`, with its arguments as an object."""
        return ToolCall(self.call.id, self.call.name, self.arguments)


class ToolLoop:
    """The state of a run.

    Raises:
        TypeError: a tool is invalid, or an option is not supported in a tool run.
        InvalidArgumentError: `max_turns` is not positive, or an option is invalid.
    """

    def __init__(
        self,
        messages: Conversation,
        tools: Sequence[Callable[..., Any]],
        *,
        max_turns: int,
        on_error: OnError,
        options: TurnOptions,
    ) -> None:
        check_names(options, TURN_OPTION_NAMES, "option of a run of tools")
        if max_turns < 1:
            raise invalid_argument("max_turns", f"is {max_turns}; it must be at least 1")
        if on_error not in ("tell", "raise") and not callable(on_error):
            raise invalid_argument("on_error", f"{on_error!r} is not 'tell', 'raise' or a function")
        self.tools = tools_by_name(tools)
        self.messages: list[Any] = list(messages)
        self.turns: list[ToolTurn] = []
        self.end: ToolRunEnd | None = None
        self._max_turns = max_turns
        self._on_error = on_error
        self._options = cast(GenerationOptions, dict(options))
        if self.tools:
            self._options["tools"] = list(self.tools.values())
        if self.spec().WhichOneof("input") != "chat":
            raise TypeError("a run of tools needs a conversation: messages, or their dictionaries")

    @property
    def requires(self) -> tuple[str, ...]:
        """The capabilities that the server needs; without them, calls would come as text."""
        return ("typed_replies",) if self.tools else ()

    def spec(self) -> pb.GenerationSpec:
        """Returns the next request.

        If a tool call is required, it is required only in the first turn. After that, the model may
        answer without one.
        """
        spec = build_spec(self.messages, self._options)
        choice = spec.chat.tool_choice
        if self.turns and choice.mode == pb.TOOL_CHOICE_MODE_REQUIRED:
            choice.mode = pb.TOOL_CHOICE_MODE_AUTO
            if len(choice.tool_names) == 1:  # it was to be called; it is not the only one
                del choice.tool_names[:]
        return spec

    def take(self, result: Result) -> list[PendingCall | ToolError]:
        """Reads a reply. Returns its calls, or the errors of those that cannot be run.

        An empty list means that the run has ended with this turn.
        """
        is_whole = _ended_by_itself(result)
        if not result.tool_calls:
            is_cut = result.finish_reason not in _WHOLE
            self.messages.append(result.message)
            self.end = ToolRunEnd.CUT if is_cut else ToolRunEnd.ANSWERED
        elif not is_whole:
            self.end = ToolRunEnd.CUT
        elif len(self.turns) + 1 >= self._max_turns:
            self.end = ToolRunEnd.MAX_TURNS
        else:
            return [self._read(call) for call in result.tool_calls]
        self.turns.append(ToolTurn(result))
        return []

    def call(self, pending: PendingCall) -> ToolAnswer | ToolError:
        """Runs a call in this thread."""
        try:
            value = pending.tool.function(**pending.values)
            return ToolAnswer(pending.call, answer_text(value), value)
        except Exception as cause:  # a tool may raise anything
            return _failed(pending.call, cause)

    async def call_async(self, pending: PendingCall) -> ToolAnswer | ToolError:
        """Runs a call of a coroutine function."""
        try:
            value = await pending.tool.function(**pending.values)
            return ToolAnswer(pending.call, answer_text(value), value)
        except Exception as cause:  # a tool may raise anything
            return _failed(pending.call, cause)

    def decline(self, pending: PendingCall, verdict: Verdict) -> ToolError:
        """Returns the error for a call that `approve` did not allow."""
        why = f": {verdict}" if verdict else ""
        return ToolDeclinedError(pending.call, f"this call was declined{why}")

    def settle(self, outcome: ToolAnswer | ToolError) -> ToolAnswer:
        """Returns the answer to a call.

        Raises:
            ToolError: the call was not answered, and `on_error` is "raise".
        """
        if isinstance(outcome, ToolAnswer):
            return outcome
        if self._on_error == "raise":
            raise outcome
        told = f"error: {outcome}" if self._on_error == "tell" else self._on_error(outcome)
        return ToolAnswer(outcome.call, told, error=outcome)

    def close(self, result: Result, answers: Iterable[ToolAnswer]) -> ToolTurn:
        """Ends a turn whose calls were run."""
        turn = ToolTurn(result, tuple(answers))
        message = result.message
        for call, written in zip(result.tool_calls, message["tool_calls"], strict=True):
            if not _is_object(call):  # which no template takes back: the answer quotes it
                written["function"]["arguments"] = "{}"
        self.messages.append(message)
        for answer in turn.answers:
            call = answer.call
            self.messages.append(
                {
                    "role": "tool",
                    "tool_call_id": call.id,
                    "name": call.name,
                    "content": answer.content,
                }
            )
        self.turns.append(turn)
        return turn

    def _read(self, call: ToolCall) -> PendingCall | ToolError:
        tool = self.tools.get(call.name)
        if tool is None:
            known = f"there are {', '.join(self.tools)}" if self.tools else "there are none"
            return UnknownToolError(call, f"there is no tool {call.name!r}; {known}")
        text = call.arguments_json
        try:
            arguments = read_object(text)
        except ValueError as fault:
            quoted = text[:_QUOTED_CHARACTERS]
            said = f"the arguments are no JSON object: {fault}; they were {quoted}"
            return ToolArgumentsError(call, said)
        try:
            return PendingCall(call, tool, arguments, tool.read(arguments))
        except ValueError as fault:
            return ToolArgumentsError(call, f"the arguments do not fit: {fault}")


def _ended_by_itself(result: Result) -> bool:
    """Whether the reply's calls were not cut off.

    A reply with STOP may also have calls: those whose arguments are invalid JSON. They count as
    complete, and the model is told of the error, unless a stop string ended the reply.
    """
    if result.finish_reason is FinishReason.TOOL_CALLS:
        return True
    return result.finish_reason is FinishReason.STOP and result.stop_string is None


def _failed(call: ToolCall, cause: Exception) -> ToolError:
    error = ToolFailedError(call, f"{type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error


def _is_object(call: ToolCall) -> bool:
    try:
        read_object(call.arguments_json)
    except ValueError:
        return False
    return True
