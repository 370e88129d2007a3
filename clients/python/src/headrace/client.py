"""The client for threads."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Self, Unpack

from grpc_health.v1 import health_pb2

from headrace import _calls, _forks
from headrace._batch import BatchInput, BatchItem, run_batch
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
from headrace._link import A, Link, Method, Q
from headrace._servers import ManyServers, OneServer
from headrace._tool_loop import OnError, ToolLoop
from headrace.control import Control
from headrace.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
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
from headrace.session import Session
from headrace.streams import PolledEvents, Stream
from headrace.tool_run import Approve, ToolRun
from headrace.v1 import generation_service_pb2 as pb
from headrace.v1 import model_service_pb2
from headrace.v1.generation_pb2 import GenerationSpec


class Client:
    """A client of one Headrace server, or of several treated as one, for threads. Thread-safe.

        with headrace.Client() as client:
            print(client.generate("Once upon a time", max_tokens=32).text)

    Args:
        target: one server: `host:port` or `unix:/path`. Several servers: `dns:///host:port`, where
            every address of the name is a server; a list; or text separated by commas. With
            several, the client chooses a server for each request; see docs/fleet.md. Default:
            HEADRACE_TARGET in the environment, otherwise 127.0.0.1:50051.
        tls: True for encryption; False for plaintext, even with a token; None to encrypt if a
            certificate is given.
        ca: the certificate authority to trust, as a path or PEM bytes. Default: the system's.
        client_cert, client_key: this client's certificate and key, as paths or PEM bytes.
        server_name: the name to expect in the server's certificate, if it is not the target's.
        token: sent as `authorization: Bearer …` with every call.
        token_file: a file that contains the token; it is read again when it has changed.
        metadata: additional metadata sent with every call.
        keepalive: seconds between pings of a busy connection; None to send none.
        max_message_bytes: the maximum size of a message, sent or received, in bytes.
        retries: how often a unary call that ended with UNAVAILABLE or RESOURCE_EXHAUSTED is
            retried.
        rpc_timeout: the time limit of short calls (model, tokenize, health, cancel) in seconds;
            None for no limit.
        timeout: the time limit of any call in seconds, from start to end, enforced by this client
            whatever the server does. A call's own `timeout` takes precedence. Default: no limit
            except `rpc_timeout`. To limit a request's work, use its `time_limit`, which the server
            enforces: the request then ends with its output so far.
        read_timeout: the maximum number of seconds before the first message of a stream and
            between two messages; None for no limit.
        load_balancing: with `least_loaded`, the client itself chooses among several servers. With
            `pick_first` and `round_robin`, gRPC chooses among a name's addresses, on one channel
            that knows nothing about requests. Then cancel, get_result and attach may not reach the
            server that has the request.
        channel_options: additional gRPC channel arguments.

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
        self._lock = threading.Lock()
        self._made: OneServer | ManyServers | None = None
        self._is_closed = False
        self._was_forked_in_use = False
        _forks.tell(self)

    @property
    def target(self) -> str:
        """The server's address, as passed to gRPC. With several servers, their targets."""
        return self._settings.target

    @property
    def timeout(self) -> float | None:
        """The time limit in seconds of calls that are given no `timeout`; None for no limit."""
        return self._timeout

    @property
    def control(self) -> Control:
        """Operator functions: view the server's statistics and requests, pause it, or drain it.

        Raises:
            InvalidArgumentError: the client has several servers.
        """
        if self._settings.places:
            raise invalid_argument(
                "target",
                "names several servers; control is of one, so make a client of its address",
            )
        return Control(self._only_link, self._short(None))

    def close(self) -> None:
        """Closes all connections and cancels the calls still running on them."""
        with self._lock:
            self._is_closed = True
            made = self._made
        if made is not None:
            made.close()

    def forked(self) -> None:
        """Prepares the client for use in a forked child; implements `_forks.Forkable.forked`."""
        self._lock = threading.Lock()  # another thread may have held it
        made, self._made = self._made, None
        if made is not None:
            _forks.keep(made)
            if any(link.open_calls for link in made.links):
                self._was_forked_in_use = True

    @property
    def _servers(self) -> OneServer | ManyServers:
        """The connections, opened at their first use in a process.

        Raises:
            UnavailableError: the client is closed.
            FailedPreconditionError: the client had open calls when its process forked.
        """
        with self._lock:
            if self._was_forked_in_use:
                raise FailedPreconditionError(
                    "this client had calls open when its process forked, and cannot be used in "
                    "the child; fork while no call is open"
                )
            if self._made is None:
                if self._is_closed:
                    raise UnavailableError("the client is closed")
                make = ManyServers if self._settings.places else OneServer
                self._made = make(self._settings)
            return self._made

    def _only_link(self) -> Link:
        return self._servers.links[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # ---- one request -----------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
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
        return self._generate(build_spec(prompt, options), timeout=timeout)

    def stream(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        read_timeout: float | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Stream:
        """Runs one request and streams its output; see `Stream`.

        Args:
            prompt: text, token ids or a conversation.
            timeout: the time limit of the whole stream in seconds, from its start, enforced by this
                client whatever the server does; None for the client's `timeout`. To limit the work
                itself, use `time_limit`.
            read_timeout: the maximum number of seconds before the first message and between two
                messages; None for the client's.
            options: see `GenerationOptions`.

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
        approve: Approve | None = None,
        on_error: OnError = "tell",
        timeout: float | None = None,
        read_timeout: float | None = None,
        **options: Unpack[TurnOptions],
    ) -> ToolRun:
        """Holds a conversation with tools; see `ToolRun`.

        Generates a reply, runs the functions that the model calls, tells the model what they
        returned, and so on, until a reply calls no function.

        Args:
            messages: the conversation.
            tools: functions, or tools made by `headrace.tool`. The calls of one reply run in order.
            max_turns: the maximum number of replies. The calls of the last one are not run.
            approve: called before a call runs, with its arguments as an object. True lets it run.
                False, or a text that gives the reason, declines it, and the model is told.
            on_error: what to do with an unknown tool, arguments that do not fit, a declined call,
                or a function that raises. "tell" tells the model; "raise" raises the error; a
                function gets the `ToolError` and returns what to tell the model.
            timeout, read_timeout: the limits of each request, as in `generate` and `stream`.
            options: options of each request. A `tool_choice` that requires a call applies to the
                first reply; after that the model may answer.

        Raises:
            TypeError: a function cannot be a tool, or there is no option with this name.
            InvalidArgumentError: a value cannot be sent at all.
        """
        loop = ToolLoop(messages, tools, max_turns=max_turns, on_error=on_error, options=options)
        return ToolRun(
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
    ) -> Session:
        """Opens a session: many requests on one stream; see `Session`.

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
    ) -> Iterator[BatchItem]:
        """Runs any number of requests over one session, with a limited number in flight.

        Yields `(index, outcome)` for each request as it ends. The outcome is a `Result` or, for a
        request that was refused or failed, a `HeadraceError`. Closing the iterator cancels running
        requests. Requests refused because of a full queue are resent when the server has room.

            for index, outcome in client.batch(prompts, max_tokens=64, progress=True):
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

    def add_request(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
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
        response = self._servers.start(
            lambda at: at.generation.AddRequest, request, self._short(timeout), spec
        )
        return accepted_from_proto(response.request_id, response.accepted)

    def get_result(self, request_id: str, *, timeout: float | None = None) -> Result:
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
            result = wait.take(self._get_result(request, wait.left()))
            if result is not None:
                return result

    def attach(
        self,
        request_id: str,
        *,
        from_seq: int = 1,
        timeout: float | None = None,
        read_timeout: float | None = None,
    ) -> Stream:
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
        return Stream(
            lambda: PolledEvents(self._get_result, fold, Deadline(timeout), pause),
            fold,
            cancel=self.cancel,
            target=self._settings.peer(self.target),
        )

    def cancel(
        self,
        ids: str | Iterable[str],
        *,
        timeout: float | None = None,
    ) -> dict[str, CancelStatus]:
        """Ends requests of this identity by their ids. Returns the result for each.

        Raises:
            HeadraceError: the server cannot be reached, or refuses the caller.
        """
        deadline = Deadline(self._short(timeout))
        statuses: dict[str, CancelStatus] = {}
        for request in _calls.cancel_requests(ids):
            answer = self._servers.cancel(request, deadline.left())
            statuses |= _calls.cancel_statuses(answer)
        return statuses

    # ---- the model and the server ----------------------------------------------------------------

    def model(self, *, timeout: float | None = None) -> ModelCard:
        """Returns the model card and the server's limits.

        Raises:
            UnavailableError: the server cannot be reached, or its model is still loading.
        """
        request = model_service_pb2.GetModelRequest()
        response = self._any(lambda at: at.models.GetModel, request, timeout)
        return ModelCard.from_proto(response.model)

    def adapters(self, *, timeout: float | None = None) -> list[model_service_pb2.Adapter]:
        """Returns the adapters that the caller may use, by name.

        Raises:
            UnavailableError: the server cannot be reached, or its model is still loading.
        """
        request = model_service_pb2.ListAdaptersRequest(page_size=_calls.PAGE_SIZE)
        found: list[model_service_pb2.Adapter] = []
        while True:
            answer = self._any(lambda at: at.models.ListAdapters, request, timeout)
            found += answer.adapters
            if not answer.next_page_token:
                return found
            request.page_token = answer.next_page_token

    def tokenize(
        self,
        prompt: str | Conversation | GenerationSpec,
        *,
        token_details: bool = False,
        add_special_tokens: bool | None = None,
        timeout: float | None = None,
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
        answer = self._any(lambda at: at.models.Tokenize, request, timeout)
        return _calls.tokenization(answer)

    def detokenize(
        self,
        token_ids: Iterable[int],
        *,
        skip_special_tokens: bool | None = None,
        timeout: float | None = None,
    ) -> str:
        """Converts token ids to text.

        Raises:
            HeadraceError: an id is out of range, or the server cannot be reached.
        """
        request = _calls.detokenize_request(token_ids, skip_special_tokens)
        answer = self._any(lambda at: at.models.Detokenize, request, timeout)
        return answer.text

    def health(
        self,
        service: str = _calls.GENERATION_SERVICE,
        *,
        timeout: float | None = None,
    ) -> HealthStatus:
        """Returns whether the server is ready for requests or, with an empty service name, alive.

        Raises:
            HeadraceError: the server cannot be reached, or refuses the caller.
        """
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            answer = self._any(lambda at: at.health.Check, request, timeout)
            return _calls.health_status(answer)
        except NotFoundError:
            return HealthStatus.SERVICE_UNKNOWN

    def wait_until_ready(self, timeout: float = 60.0) -> None:
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
                status = self.health(timeout=max(left, _calls.READY_POLL_SECONDS))
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
            time.sleep(_calls.READY_POLL_SECONDS)

    def _generate(
        self,
        spec: GenerationSpec,
        requires: tuple[str, ...] = (),
        *,
        timeout: float | None = None,
    ) -> Result:
        _calls.name_request(spec)
        request = with_capabilities(pb.GenerateRequest(spec=spec, required_capabilities=requires))
        response = self._servers.start(
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
    ) -> Stream:
        timeout, pause = self._limits(timeout, read_timeout)
        _calls.name_request(spec)
        request = with_capabilities(
            pb.GenerateStreamRequest(spec=spec, required_capabilities=requires)
        )
        fold = Fold(spec.request_id, n=choices_of(spec))
        return Stream(
            lambda: self._servers.stream(request, fold, Deadline(timeout)),
            fold,
            cancel=self.cancel,
            target=self._settings.peer(self.target),
            read_timeout=pause,
        )

    def _get_result(
        self, request: pb.GetResultRequest, left: float | None = None
    ) -> pb.GetResultResponse:
        """Reads a request's results. `left` is the caller's remaining time, or None."""
        limit = self._rpc_timeout and self._rpc_timeout + request.wait.ToNanoseconds() / 1e9
        return self._servers.get_result(request, shortest(limit, left))

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

    def _any(self, pick: Callable[[Link], Method[Q, A]], request: Q, seconds: float | None) -> A:
        """Makes a short call that any server may answer."""
        return self._servers.call(pick, request, self._short(seconds))
