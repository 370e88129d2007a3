"""A conversation with tools that are Python functions, under asyncio."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
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
from headrace.async_streams import AsyncStream
from headrace.messages import ToolCall
from headrace.results import Chunk, Result
from headrace.v1.generation_pb2 import GenerationSpec

AsyncApprove = Callable[[ToolCall], Verdict | Awaitable[Verdict]]


class AsyncToolRun:
    """The turns of a conversation with tools. Created by `AsyncClient.run_tools`.

        run = client.run_tools(messages, [read_gauge], max_turns=5)
        async for turn in run:
            for answer in turn.answers:
                print(answer.call.name, answer.content)
        print((await run.result()).text)

    The run advances as it is read: by iterating over its turns, by `events`, or by `result`. The
    calls of one reply run concurrently: coroutine functions in the event loop, others in threads.
    Cancelling the run also cancels the current request or coroutines. A function in a thread runs
    to its end, and its return value is discarded. `messages` then stay as they were after the last
    complete turn.
    """

    def __init__(
        self,
        loop: ToolLoop,
        generate: Callable[[GenerationSpec, tuple[str, ...]], Awaitable[Result]],
        stream: Callable[[GenerationSpec, tuple[str, ...]], AsyncStream],
        approve: AsyncApprove | None,
    ) -> None:
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

    async def __aiter__(self) -> AsyncIterator[ToolTurn]:
        """Yields each turn once its calls have been run.

        Raises:
            HeadraceError: a request was refused or failed.
            ToolError: a call was not answered, and `on_error` is "raise".
        """
        loop = self._loop
        while loop.end is None:
            result = await self._generate(loop.spec(), loop.requires)
            if pending := loop.take(result):
                loop.close(result, await self._answers(pending))
            yield loop.turns[-1]

    async def events(self) -> AsyncIterator[Chunk | ToolAnswer | ToolTurn]:
        """Yields events as they happen: the chunks of each reply, the answers to its calls in the
        order of the calls, and the turn. If a loop may exit early, use `contextlib.aclosing`.

        Raises:
            HeadraceError: a request was refused or failed.
            ToolError: a call was not answered, and `on_error` is "raise".
        """
        loop = self._loop
        while loop.end is None:
            async with self._stream(loop.spec(), loop.requires) as stream:
                async for chunk in stream:
                    yield chunk
                result = await stream.result()
            if pending := loop.take(result):
                turn = loop.close(result, await self._answers(pending))
                for answer in turn.answers:
                    yield answer
            yield loop.turns[-1]

    async def result(self) -> Result:
        """Runs to the end, if necessary, and returns the last reply.

        Raises:
            HeadraceError: a request was refused or failed.
            ToolError: a call was not answered, and `on_error` is "raise".
        """
        async for _ in self:
            pass
        return self._loop.turns[-1].result

    async def _answers(self, steps: list[PendingCall | ToolError]) -> list[ToolAnswer]:
        """Asks for approval of one call after the other, then runs the approved calls
        concurrently.
        """
        asked = [await self._ask(step) for step in steps]
        tasks = [asyncio.ensure_future(self._answer(step)) for step in asked]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def _ask(self, step: PendingCall | ToolError) -> PendingCall | ToolError:
        if self._approve is None or isinstance(step, ToolError):
            return step
        verdict = self._approve(step.question)
        if inspect.isawaitable(verdict):
            verdict = await verdict
        return step if verdict is True else self._loop.decline(step, verdict)

    async def _answer(self, step: PendingCall | ToolError) -> ToolAnswer:
        loop = self._loop
        if isinstance(step, ToolError):
            return loop.settle(step)
        if step.tool.is_async:
            return loop.settle(await loop.call_async(step))
        return loop.settle(await asyncio.to_thread(loop.call, step))
