"""The client for asyncio."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Self, Unpack

from grpc_health.v1 import health_pb2

from headrace import _calls, _forks
from headrace._async_batch import run_batch
from headrace._async_link import A, AsyncLink, Method, Q
from headrace._async_servers import AsyncManyServers, AsyncOneServer
from headrace._batch import BatchInput, BatchItem
from headrace._capabilities import with_capabilities
from headrace._channel import (
    DEFAULT_KEEPALIVE,
    DEFAULT_MAX_MESSAGE_BYTES,
    LoadBalancing,
    MetadataLike,
    make_settings,
)
from headrace._deadline import Deadline, shortest
from headrace._fold import Fold
from headrace._from_proto import accepted_from_proto, result_from_proto
from headrace._tool_loop import OnError, ToolLoop
from headrace.async_control import AsyncControl
from headrace.async_session import AsyncSession
from headrace.async_streams import AsyncPolledEvents, AsyncStream
from headrace.async_tool_run import AsyncApprove, AsyncToolRun
from headrace.errors import (
    DeadlineExceededError,
    HeadraceError,
    NotFoundError,
    UnavailableError,
    invalid_argument,
)
from headrace.messages import Conversation, Prompt
from headrace.model_card import ModelCard
from headrace.options import GenerationOptions, TurnOptions, build_spec, choices_of
from headrace.results import (
    Accepted,
    CancelStatus,
    HealthStatus,
    Result,
    Tokenization,
)
from headrace.v1 import generation_service_pb2 as pb
from headrace.v1 import model_service_pb2
from headrace.v1.control_service_pb2_grpc import ControlServiceStub
from headrace.v1.generation_pb2 import GenerationSpec


class AsyncClient:
    """A client of one Headrace server, or of several treated as one, for asyncio.

    Use it in one event loop. It connects at its first call.

        async with headrace.AsyncClient() as client:
            print((await client.generate("Once upon a time", max_tokens=32)).text)

    The arguments are those of `Client`.

    Raises:
        ValueError: arguments contradict each other, or the target cannot be parsed.
        OSError: a certificate file cannot be read.
    """

    def __init__(
        self,
        target: str | Sequence[str] | None = None,
        *,
        tls: bool | None = None,
        ca: str | os.PathLike[str] | bytes | None = None,
        client_cert: str | os.PathLike[str] | bytes | None = None,
        client_key: str | os.PathLike[str] | bytes | None = None,
        server_name: str | None = None,
        token: str | None = None,
        token_file: str | os.PathLike[str] | None = None,
        metadata: MetadataLike | None = None,
        keepalive: float | None = DEFAULT_KEEPALIVE,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        retries: int = 3,
        rpc_timeout: float | None = 30.0,
        timeout: float | None = None,
        read_timeout: float | None = None,
        load_balancing: LoadBalancing = "least_loaded",
        channel_options: Sequence[tuple[str, Any]] = (),
    ) -> None:
        self._settings = make_settings(
            target,
            tls=tls,
            ca=ca,
            client_cert=client_cert,
            client_key=client_key,
            server_name=server_name,
            token=token,
            token_file=token_file,
            metadata=metadata,
            keepalive=keepalive,
            max_message_bytes=max_message_bytes,
            retries=retries,
            load_balancing=load_balancing,
            channel_options=channel_options,
        )
        self._rpc_timeout = rpc_timeout
        self._timeout = timeout
        self._read_timeout = read_timeout
        Deadline(timeout), Deadline(read_timeout)  # which check them
        self._servers = self._make_servers()
        _forks.tell(self)

    @property
    def timeout(self) -> float | None:
        """The time limit in seconds of calls that are given no `timeout`; None for no limit."""
        return self._timeout

    @property
    def control(self) -> AsyncControl:
        """Operator functions: view the server's statistics and requests, pause it, or drain it.

        Raises:
            InvalidArgumentError: the client has several servers.
        """
        one = self._servers
        if not isinstance(one, AsyncOneServer):
            raise invalid_argument(
                "target",
                "names several servers; control is of one, so make a client of its address",
            )
        return AsyncControl(
            lambda: ControlServiceStub(one.link.channel),
            lambda method, request: one.link.call(method, request, self._short(None)),
            self._settings.peer(self.target),
            self._settings.metadata,
        )

    @property
    def target(self) -> str:
        """The server's address, as passed to gRPC. With several servers, their targets."""
        return self._settings.target

    async def close(self) -> None:
        """Closes all connections and cancels the calls still running on them."""
        await self._servers.close()

    def forked(self) -> None:
        """Prepares the client for use in a forked child; implements `_forks.Forkable.forked`."""
        _forks.keep(self._servers)
        if not self._servers.is_closed:
            self._servers = self._make_servers()

    def _make_servers(self) -> AsyncOneServer | AsyncManyServers:
        make = AsyncManyServers if self._settings.places else AsyncOneServer
        return make(self._settings)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    # ---- one request -----------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,  # noqa: ASYNC109
        **options: Unpack[GenerationOptions],
    ) -> Result:
        """Runs one request and returns its complete result. Any exception, including Ctrl-C,
        cancels it.

        If the connection is lost, gRPC retries with the same id, so that completed work is not
        repeated.

        Args:
            prompt: text, token ids or a conversation.
            timeout: the time limit of the call in seconds, enforced by this client whatever the
                server does; None for the client's `timeout`. To limit the work itself, use
                `time_limit`.
            options: see `GenerationOptions`.

        Raises:
            DeadlineExceededError: `timeout` passed first, and the request was cancelled.
            HeadraceError: the request was refused or failed; the class indicates why.
            TypeError: there is no option with this name, or the prompt has an unsupported type.
        """
        return await self._generate(build_spec(prompt, options), timeout=timeout)

    def stream(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        read_timeout: float | None = None,
        **options: Unpack[GenerationOptions],
    ) -> AsyncStream:
        """Runs one request and streams its output; see `AsyncStream`.

        The arguments are those of `Client.stream`.

        Raises:
            InvalidArgumentError: a value cannot be sent at all. The stream raises the server's
                refusals.
            TypeError: there is no option with this name, or the prompt has an unsupported type.
        """
        spec = build_spec(prompt, options)
        return self._streamed(spec, timeout=timeout, read_timeout=read_timeout)

    def run_tools(
        self,
        messages: Conversation,
        tools: Sequence[Callable[..., Any]],
        *,
        max_turns: int = 10,
        approve: AsyncApprove | None = None,
        on_error: OnError = "tell",
        timeout: float | None = None,
        read_timeout: float | None = None,
        **options: Unpack[TurnOptions],
    ) -> AsyncToolRun:
        """Holds a conversation with tools, which may be coroutine functions; see `AsyncToolRun`.

        The arguments and errors are those of `Client.run_tools`. The calls of one reply run
        concurrently. Before that, `approve` is called for one after the other; it may be a
        coroutine function.
        """
        loop = ToolLoop(messages, tools, max_turns=max_turns, on_error=on_error, options=options)
        return AsyncToolRun(
            loop,
            partial(self._generate, timeout=timeout),
            partial(self._streamed, timeout=timeout, read_timeout=read_timeout),
            approve,
        )

    # ---- many requests ---------------------------------------------------------------------------

    def session(
        self,
        *,
        lease: float | timedelta | None = None,
        initial_credit: int = 0,
        room_timeout: float | None = None,
        load_interval: float | timedelta | None = None,
    ) -> AsyncSession:
        """Opens a session: many requests on one stream; see `AsyncSession`.

        Args:
            lease: how many seconds requests continue after the stream is lost. Until then they are
                reattached automatically, or another session can `resume` them. By default, there is
                no lease: requests are cancelled immediately, and their handles raise
                UnavailableError.
            initial_credit: how many tokens of each request the server may send ahead of its
                handle's reader; 0 for no limit.
            room_timeout: how many seconds a request is resent, at the times that the server
                advises, while the server has no room. None resends it until there is room. With 0,
                the handle raises the refusal immediately.
            load_interval: how often the session's `load` is updated, in seconds, 0.1 to 3,600. It
                arrives with results, so it is not updated while nothing runs. Default: never.
        """
        return self._servers.session(
            lease=lease,
            initial_credit=initial_credit,
            room_timeout=room_timeout,
            load_interval=load_interval,
            timeout=self._timeout,
        )

    def batch(
        self,
        requests: Iterable[BatchInput],
        *,
        max_in_flight: int = 64,
        ordered: bool = False,
        progress: bool = False,
        timeout: float | None = None,
        **options: Unpack[GenerationOptions],
    ) -> AsyncIterator[BatchItem]:
        """Runs any number of requests over one session, with a limited number in flight.

        Yields `(index, outcome)` for each request as it ends. The outcome is a `Result` or, for a
        request that was refused or failed, a `HeadraceError`. Closing the iterator
        (`contextlib.aclosing`) cancels running requests. Requests refused because of a full queue
        are resent when the server has room.

            async for index, outcome in client.batch(prompts, max_tokens=64, progress=True):
                if isinstance(outcome, headrace.Result):
                    texts[index] = outcome.text

        Args:
            requests: prompts, or `Request`s with their own options. Read as needed.
            max_in_flight: how many requests may run or wait in the server at the same time.
            ordered: whether to yield outcomes in the order of the requests instead of as they end.
            progress: whether to show a progress bar on stderr, if stderr is a terminal.
            timeout: the time limit of each request in seconds, from when it is sent; None for the
                client's.
            options: options for all requests; a `Request`'s own options override them.

        Raises:
            UnavailableError: the connection was lost. Requests in flight were yielded as errors
                first.
        """
        return run_batch(
            self._servers.batch_session,
            requests,
            max_in_flight=max_in_flight,
            ordered=ordered,
            progress=progress,
            options=options,
            timeout=self._limits(timeout)[0],
        )

    # ---- requests that run by themselves ---------------------------------------------------------

    async def add_request(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,  # noqa: ASYNC109
        **options: Unpack[GenerationOptions],
    ) -> Accepted:
        """Starts a request that runs without a stream, and returns once the server has accepted it.

        Its result is kept for `get_result` and `attach`, and for a while after its end. Calling
        this again with the same `request_id`, prompt and options starts nothing and returns the
        same value.

        Raises:
            AlreadyExistsError: there is another request with this `request_id`.
            HeadraceError: the request was refused.
        """
        spec = build_spec(prompt, options)
        _calls.name_request(spec)
        request = with_capabilities(pb.AddRequestRequest(spec=spec))
        response = await self._servers.start(
            lambda at: at.generation.AddRequest, request, self._short(timeout), spec
        )
        return accepted_from_proto(response.request_id, response.accepted)

    async def get_result(self, request_id: str, *, timeout: float | None = None) -> Result:  # noqa: ASYNC109
        """Waits for a request that runs without a stream to end, and returns its complete result.

        Reading does not consume the result: it can be read again while it is kept.

        Args:
            request_id: the request's id.
            timeout: the maximum number of seconds to wait for the end; None for no limit. A
                finished result is read completely, however long that takes.

        Raises:
            NotFoundError: there is no such request, or its result is no longer kept.
            DeadlineExceededError: `timeout` passed first; the request continues.
            HeadraceError: the request failed.
        """
        wait = _calls.ResultWait(request_id, self._limits(timeout)[0])
        while True:
            request = wait.request()
            result = wait.take(await self._get_result(request, wait.left()))
            if result is not None:
                return result

    def attach(
        self,
        request_id: str,
        *,
        from_seq: int = 1,
        timeout: float | None = None,
        read_timeout: float | None = None,
    ) -> AsyncStream:
        """Streams the output of a request that `add_request` started, from its beginning.

        Several readers may attach. Leaving the stream does not affect the request.

        Args:
            request_id: the request's id.
            from_seq: the number of the first event to read.
            timeout: the time limit of reading, in seconds; the request itself continues.
            read_timeout: the maximum number of seconds before the first message and between two
                messages.
        """
        timeout, pause = self._limits(timeout, read_timeout)
        fold = Fold(request_id, n=0, from_seq=from_seq)
        return AsyncStream(
            lambda: AsyncPolledEvents(self._get_result, fold, Deadline(timeout), pause),
            fold,
            cancel=self.cancel,
            target=self._settings.peer(self.target),
        )

    async def cancel(
        self,
        ids: str | Iterable[str],
        *,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> dict[str, CancelStatus]:
        """Ends requests of this identity by their ids. Returns the result for each.

        Raises:
            HeadraceError: the server cannot be reached, or refuses the caller.
        """
        deadline = Deadline(self._short(timeout))
        statuses: dict[str, CancelStatus] = {}
        for request in _calls.cancel_requests(ids):
            answer = await self._servers.cancel(request, deadline.left())
            statuses |= _calls.cancel_statuses(answer)
        return statuses

    # ---- the model and the server ----------------------------------------------------------------

    async def model(self, *, timeout: float | None = None) -> ModelCard:  # noqa: ASYNC109
        """Returns the model card and the server's limits.

        Raises:
            UnavailableError: the server cannot be reached, or its model is still loading.
        """
        request = model_service_pb2.GetModelRequest()
        response = await self._any(lambda at: at.models.GetModel, request, timeout)
        return ModelCard.from_proto(response.model)

    async def adapters(
        self,
        *,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> list[model_service_pb2.Adapter]:
        """Returns the adapters that the caller may use, by name.

        Raises:
            UnavailableError: the server cannot be reached, or its model is still loading.
        """
        request = model_service_pb2.ListAdaptersRequest(page_size=_calls.PAGE_SIZE)
        found: list[model_service_pb2.Adapter] = []
        while True:
            answer = await self._any(lambda at: at.models.ListAdapters, request, timeout)
            found += answer.adapters
            if not answer.next_page_token:
                return found
            request.page_token = answer.next_page_token

    async def tokenize(
        self,
        prompt: str | Conversation | GenerationSpec,
        *,
        token_details: bool = False,
        add_special_tokens: bool | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
        **chat_options: Any,
    ) -> Tokenization:
        """Tokenizes a text or a conversation, exactly as a request would.

        Args:
            prompt: the text or the conversation, or a request that contains one.
            token_details: whether to also return each token's text and bytes.
            add_special_tokens: for a text; the default is yes.
            chat_options: for a conversation: tools, add_generation_prompt,
                continue_final_message, template_arguments.

        Raises:
            HeadraceError: the server refused it, or cannot be reached.
            InvalidArgumentError: an option belongs to the other kind of prompt.
            TypeError: there is no such option.
        """
        request = _calls.tokenize_request(
            prompt,
            token_details=token_details,
            add_special_tokens=add_special_tokens,
            chat_options=chat_options,
        )
        return _calls.tokenization(await self._any(lambda at: at.models.Tokenize, request, timeout))

    async def detokenize(
        self,
        token_ids: Iterable[int],
        *,
        skip_special_tokens: bool | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> str:
        """Converts token ids to text.

        Raises:
            HeadraceError: an id is out of range, or the server cannot be reached.
        """
        request = _calls.detokenize_request(token_ids, skip_special_tokens)
        return (await self._any(lambda at: at.models.Detokenize, request, timeout)).text

    async def health(
        self,
        service: str = _calls.GENERATION_SERVICE,
        *,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> HealthStatus:
        """Returns whether the server is ready for requests or, with an empty service name, alive.

        Raises:
            HeadraceError: the server cannot be reached, or refuses the caller.
        """
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            return _calls.health_status(
                await self._any(lambda at: at.health.Check, request, timeout)
            )
        except NotFoundError:
            return HealthStatus.SERVICE_UNKNOWN

    async def wait_until_ready(self, timeout: float = 60.0) -> None:  # noqa: ASYNC109
        """Waits until the server can be reached and its model is loaded.

        Args:
            timeout: the maximum number of seconds to wait.

        Raises:
            UnavailableError: the server was not ready within `timeout`.
        """
        end = time.monotonic() + timeout
        while True:
            problem: HeadraceError | None = None
            left = end - time.monotonic()
            try:
                status = await self.health(timeout=max(left, _calls.READY_POLL_SECONDS))
                if status is HealthStatus.SERVING:
                    return
            except (UnavailableError, DeadlineExceededError) as error:
                problem = error
            if time.monotonic() >= end:
                if isinstance(problem, UnavailableError):
                    raise problem
                told = status if problem is None else problem
                raise UnavailableError(
                    f"the server at {self.target} is not ready after {timeout} s: {told}"
                )
            await asyncio.sleep(_calls.READY_POLL_SECONDS)

    async def _generate(
        self,
        spec: GenerationSpec,
        requires: tuple[str, ...] = (),
        *,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> Result:
        _calls.name_request(spec)
        request = with_capabilities(pb.GenerateRequest(spec=spec, required_capabilities=requires))
        response = await self._servers.start(
            lambda at: at.generation.Generate, request, self._limits(timeout)[0], spec
        )
        return result_from_proto(response)

    def _streamed(
        self,
        spec: GenerationSpec,
        requires: tuple[str, ...] = (),
        *,
        timeout: float | None = None,
        read_timeout: float | None = None,
    ) -> AsyncStream:
        timeout, pause = self._limits(timeout, read_timeout)
        _calls.name_request(spec)
        request = with_capabilities(
            pb.GenerateStreamRequest(spec=spec, required_capabilities=requires)
        )
        fold = Fold(spec.request_id, n=choices_of(spec))
        return AsyncStream(
            lambda: self._servers.stream(request, fold, Deadline(timeout)),
            fold,
            cancel=self.cancel,
            target=self._settings.peer(self.target),
            read_timeout=pause,
        )

    async def _get_result(
        self, request: pb.GetResultRequest, left: float | None = None
    ) -> pb.GetResultResponse:
        """Reads a request's results. `left` is the caller's remaining time, or None."""
        limit = self._rpc_timeout and self._rpc_timeout + request.wait.ToNanoseconds() / 1e9
        return await self._servers.get_result(request, shortest(limit, left))

    def _limits(
        self, timeout: float | None, read_timeout: float | None = None
    ) -> tuple[float | None, float | None]:
        """Returns the time limit of a call and of the pause between two messages.

        Values that are None are replaced by the client's.
        """
        Deadline(timeout), Deadline(read_timeout)  # which check them
        return (
            self._timeout if timeout is None else timeout,
            self._read_timeout if read_timeout is None else read_timeout,
        )

    def _short(self, timeout: float | None) -> float | None:
        """Returns the time limit of a short call."""
        Deadline(timeout)  # which checks it
        return shortest(self._timeout, self._rpc_timeout) if timeout is None else timeout

    async def _any(
        self, pick: Callable[[AsyncLink], Method[Q, A]], request: Q, seconds: float | None
    ) -> A:
        """Makes a short call that any server may answer."""
        return await self._servers.call(pick, request, self._short(seconds))
