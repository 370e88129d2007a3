"""A conversation with tools that are Python functions, for threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from headrace._tool_loop import (
    PendingCall,
    ToolAnswer,
    ToolError,
    ToolLoop,
    ToolRunEnd,
    ToolTurn,
    Verdict,
)
from headrace.messages import ToolCall
from headrace.results import Chunk, Result
from headrace.streams import Stream
from headrace.v1.generation_pb2 import GenerationSpec

Approve = Callable[[ToolCall], Verdict]


class ToolRun:
    """The turns of a conversation with tools. Created by `Client.run_tools`.

        run = client.run_tools(messages, [read_gauge], max_turns=5)
        for turn in run:
            for answer in turn.answers:
                print(answer.call.name, answer.content)
        print(run.result().text)

    The run advances as it is read: by iterating over its turns, by `events`, or by `result`. Any
    exception, including Ctrl-C, cancels the running request and leaves `messages` as they were
    after the last complete turn.
    """

    def __init__(
        self,
        loop: ToolLoop,
        generate: Callable[[GenerationSpec, tuple[str, ...]], Result],
        stream: Callable[[GenerationSpec, tuple[str, ...]], Stream],
        approve: Approve | None,
    ) -> None:
        for tool in loop.tools.values():
            if tool.is_async:
                raise TypeError(
                    f"{tool.name} is a coroutine function; AsyncClient.run_tools runs those"
                )
        self._loop = loop
        self._generate = generate
        self._stream = stream
        self._approve = approve

    @property
    def messages(self) -> list[Any]:
        """The conversation: the given messages, then those of each complete turn.

        A reply whose calls were not run is not included.
        """
        return self._loop.messages

    @property
    def turns(self) -> tuple[ToolTurn, ...]:
        """The turns so far."""
        return tuple(self._loop.turns)

    @property
    def end(self) -> ToolRunEnd | None:
        """Why the run has ended; None if it has not."""
        return self._loop.end

    def __iter__(self) -> Iterator[ToolTurn]:
        """Yields each turn once its calls have been run.

        Raises:
            HeadraceError: a request was refused or failed.
            ToolError: a call was not answered, and `on_error` is "raise".
        """
        loop = self._loop
        while loop.end is None:
            result = self._generate(loop.spec(), loop.requires)
            if pending := loop.take(result):
                loop.close(result, [self._answer(one) for one in pending])
            yield loop.turns[-1]

    def events(self) -> Iterator[Chunk | ToolAnswer | ToolTurn]:
        """Yields events as they happen: each reply's chunks, the answer to each call, and the turn.

        Raises:
            HeadraceError: a request was refused or failed.
            ToolError: a call was not answered, and `on_error` is "raise".
        """
        loop = self._loop
        while loop.end is None:
            with self._stream(loop.spec(), loop.requires) as stream:
                yield from stream
                result = stream.result()
            if pending := loop.take(result):
                answers = []
                for one in pending:
                    answers.append(self._answer(one))
                    yield answers[-1]
                loop.close(result, answers)
            yield loop.turns[-1]

    def result(self) -> Result:
        """Runs to the end, if necessary, and returns the last reply.

        Raises:
            HeadraceError: a request was refused or failed.
            ToolError: a call was not answered, and `on_error` is "raise".
        """
        for _ in self:
            pass
        return self._loop.turns[-1].result

    def _answer(self, step: PendingCall | ToolError) -> ToolAnswer:
        loop = self._loop
        if isinstance(step, ToolError):
            return loop.settle(step)
        verdict = True if self._approve is None else self._approve(step.question)
        return loop.settle(loop.call(step) if verdict is True else loop.decline(step, verdict))
