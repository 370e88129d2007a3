"""What each route does, from a body to its answer, without the HTTP layer (`door`)."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
import uuid
from collections.abc import Mapping
from contextlib import AsyncExitStack

from headrace._trace import label_trace
from headrace.async_session import AsyncRequestHandle, feed
from headrace.async_streams import AsyncStream
from headrace.errors import HeadraceError, UnavailableError
from headrace.model_card import ModelCard
from headrace.openai.asked import Asked
from headrace.openai.callers import Caller, Callers, Line
from headrace.openai.errors import ApiError, from_headrace
from headrace.openai.protocol import Writer
from headrace.openai.replies import Replies, dumps, dumps_in_pieces
from headrace.results import Chunk, FinishReason, Result, TokenInfo
from headrace.v1.generation_pb2 import GenerationSpec

_ID = re.compile(r"[A-Za-z0-9._:/-]{1,100}")
_SMALL_BYTES, _AROUND_BYTES = 60_000, 1_000
"""The message size that every server accepts, and the maximum overhead around a request."""

Handle = AsyncRequestHandle | AsyncStream


class Run:
    """The requests of one body, from their start to the answer.

    Leaving its block cancels running requests, unless the caller gave an Idempotency-Key to ask for
    them again.

    Args:
        callers: the sessions.
        caller: the caller that sent the body.
        asked: the parsed body.
        key: the caller's Idempotency-Key; empty if there is none.
        labels: trace labels of the requests.
        turn: a lock held while a large answer is serialized in a thread.
    """

    def __init__(
        self,
        callers: Callers,
        caller: Caller,
        asked: Asked,
        key: str,
        labels: Mapping[str, str],
        turn: asyncio.Lock,
    ) -> None:
        self.asked = asked
        self.id = _named(key) if key else uuid.uuid4().hex
        self._callers = callers
        self._caller = caller
        self._is_named = bool(key)
        self._labels = labels
        self._turn = turn
        self._stack = AsyncExitStack()
        self._handles: list[Handle] = []
        self._line: Line | None = None

    async def __aenter__(self) -> Run:
        return self

    async def __aexit__(self, *error: object) -> None:
        for handle in self._handles:
            if isinstance(handle, AsyncRequestHandle) and not handle.done:
                handle.cancel()
        await self._stack.aclose()

    async def start(self) -> Replies:
        """Starts all requests, and returns once their servers have accepted them.

        Raises:
            ApiError: a request was refused.
        """
        try:
            line = await self._connect()
            first, *others = self.asked.specs
            try:
                self._handles.append(await self._begin(line, 0, first))
            except UnavailableError as error:
                if error.reached_server:
                    raise
                line = await self._connect()  # the session was lost since its last use
                self._handles.append(await self._begin(line, 0, first))
            for number, spec in enumerate(others, 1):
                self._handles.append(await self._begin(line, number, spec))
            name = self.asked.model or (await self.card()).name
            if not self.asked.wants_ids:
                self.asked.specs.clear()  # large ones would be there as long as their answers
        except HeadraceError as error:
            raise from_headrace(error, self.asked.names) from None
        return Replies(self.asked, self.id, name, int(time.time()))

    async def whole(self, replies: Replies) -> str:
        """Returns the whole answer as JSON.

        Raises:
            ApiError: a request failed or was cancelled by someone else.
        """
        try:
            # All at once: what nobody reads is held by its server, and ended after a while.
            results = await asyncio.gather(*(handle.result() for handle in self._handles))
            for result in results:
                _check_end(result)
            ids = await self._prompt_ids()
            if self.asked.logprobs is None and not self.asked.has_prompt:
                return dumps(replies.whole(results, ids))
            # With thousands of candidates it takes a while, in which other streams go on.
            async with self._turn:
                return await asyncio.to_thread(lambda: dumps_in_pieces(replies.whole(results, ids)))
        except HeadraceError as error:
            raise from_headrace(error, self.asked.names) from None

    async def stream(self, replies: Replies, write: Writer) -> None:
        """Writes the events of a stream, up to [DONE] or an event that reports a failure."""
        failure: Exception | None = None
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._pass_on(number, replies, write))
                    for number in range(len(self._handles))
                ]
            if self.asked.wants_usage:
                write(replies.usage([task.result() for task in tasks]))
            write("data: [DONE]\n\n")
        except* (HeadraceError, ApiError) as failed:
            failure = failed.exceptions[0]
        if isinstance(failure, HeadraceError):
            failure = from_headrace(failure, self.asked.names)
        if isinstance(failure, ApiError):
            write(f"event: error\ndata: {dumps(failure.body())}\n\n")

    async def _pass_on(self, number: int, replies: Replies, write: Writer) -> Result:
        """Writes the events of one prompt as they come. Returns its result."""
        handle = self._handles[number]
        begun: set[int] = set()
        is_echoed = self.asked.echo and self.asked.logprobs is not None

        def take(chunk: Chunk) -> bool:
            before = self._before(handle, chunk, begun) if is_echoed else ()
            event = replies.event(number, chunk, before)
            return not event or write(event)

        if isinstance(handle, AsyncRequestHandle):
            result = await feed(handle, take, write.room)
        else:
            async for chunk in handle:
                if not take(chunk):
                    await write.room()
            result = await handle.result()
        _check_end(result)
        write(replies.finish(number, result))
        return result

    async def rendered(self) -> list[list[int]]:
        """Returns the token ids of the prompts.

        Raises:
            ApiError: a prompt was refused.
        """
        try:
            line = await self._connect()
            return [await self._ids(line, spec) for spec in self.asked.specs]
        except HeadraceError as error:
            raise from_headrace(error, self.asked.names) from None

    async def card(self) -> ModelCard:
        """Returns the card of the model that the prompts are for."""
        target = await self._callers.target(self.asked.model, self._caller)
        return await self._callers.card(target, self._caller)

    async def _connect(self) -> Line:
        target = await self._callers.target(self.asked.model, self._caller)
        line = self._callers.line(target, self._caller)
        self._line = await self._stack.enter_async_context(line)
        return self._line

    async def _begin(self, line: Line, number: int, spec: GenerationSpec) -> Handle:
        spec.model = self.asked.model
        del spec.labels[:]
        label_trace(spec)  # of a span of the door's own, where something instruments it
        for name, value in () if spec.labels else self._labels.items():
            spec.labels.add(name=name, value=value)
        await self._check_size(spec)
        if not self._is_named:
            return await self._callers.submit(line, spec)
        # Kept by the server after its end, and the same request again gets the same answer.
        spec.request_id = f"{self.id}.{number}"
        await line.client.add_request(spec)
        return line.attach(spec.request_id)

    async def _check_size(self, spec: GenerationSpec) -> None:
        """Raises ApiError if a request is too large for its server.

        A message that is too large would make the server end the session and everything that runs
        on it.
        """
        size = spec.ByteSize() + _AROUND_BYTES
        if size > _SMALL_BYTES and size > (most := (await self.card()).limits.max_message_bytes):
            message = f"the request takes about {size} bytes; its server takes at most {most}"
            raise ApiError(413, message, code="body_too_large")

    def _before(self, handle: Handle, chunk: Chunk, begun: set[int]) -> tuple[TokenInfo, ...]:
        """Returns the prompt's tokens for the first chunk of a choice that echoes the prompt."""
        if chunk.choice_index in begun:
            return ()
        begun.add(chunk.choice_index)
        prompt = handle.prompt
        return prompt.tokens if prompt is not None else ()

    async def _prompt_ids(self) -> list[list[int]]:
        if not self.asked.wants_ids or self._line is None:
            return []
        return [await self._ids(self._line, spec) for spec in self.asked.specs]

    async def _ids(self, line: Line, spec: GenerationSpec) -> list[int]:
        await self._check_size(spec)
        if spec.WhichOneof("input") == "tokens":
            return list(spec.tokens.ids)
        return list((await line.client.tokenize(spec)).token_ids)


def _named(key: str) -> str:
    return key if _ID.fullmatch(key) else hashlib.sha256(key.encode()).hexdigest()


def _check_end(result: Result) -> None:
    """Raises ApiError if someone else cancelled the request."""
    if any(choice.finish_reason is FinishReason.CANCELLED for choice in result.choices):
        raise ApiError(
            503,
            "the request was cancelled, by an operator or because its server stops; send it again",
            type="server_error",
            code="cancelled",
            headers={"retry-after": "1"},
        )
