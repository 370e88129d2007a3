"""The manager: the Python API of a running engine, with the methods of transformers' continuous
batching.

    add_request ──▶ RequestBuilder ──▶ ResultRouter.expect ──▶ EngineLoop.submit_all
    get_result, iteration, handlers ◀── ResultRouter ◀── StepOutputs ◀── the engine's thread

A manager owns an `EngineLoop` and forwards start, stop, pause and cancel calls to it. The loop's
thread references the loop and the router but not the manager, so a manager that is no longer
referenced is garbage-collected and stopped (`_abandon`).
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from engine.api.generation_options import GenerationDefaults
from engine.api.observer import Observer, observed
from engine.api.request_builder import PreparedRequest, RequestBuilder, StopFinderFactory
from engine.api.results import (
    MAX_UNREAD_REQUESTS,
    MAX_UNREAD_RESULTS,
    GenerationOutput,
    Mailbox,
    ResultHandler,
    ResultRouter,
)
from engine.contract.errors import InvalidRequestError, UnsupportedFeatureError
from engine.contract.request import GenerationRequest
from engine.contract.stats import EngineStats
from engine.contract.types import RequestId
from engine.core.admission import AdmissionLimits
from engine.core.engine_core import EngineCore
from engine.core.loop import EngineLoop, GrammarCompile
from engine.core.model_pause import Pause

logger = logging.getLogger(__name__)


class ManagerKeeper(Protocol):
    """Keeps one stopped manager for the next session. Each loaded model has one keeper."""

    def keep(self, manager: ContinuousBatchingManager) -> None:
        """Keep a manager that has ended and may be reused. Must not block."""
        ...

    def release(self, manager: ContinuousBatchingManager) -> None:
        """Stop keeping a manager because it is in use. Harmless if it was not kept."""
        ...


class ContinuousBatchingManager:
    """Generates for many requests at the same time, on its own thread.

    Created by `LoadedModel.init_continuous_batching`. All methods may be called from any thread.

    A manager does not run in a fork of the process in which it was started. In a fork, `stop` and
    `join` do nothing, and every method that needs the engine raises EngineUnavailableError.

    Attributes:
        settings: the configs this manager was made with. A manager with equal settings can replace
            it.
    """

    __slots__ = (
        "__weakref__", "_builder", "_defaults", "_keeping", "_lock", "_loop", "_next_name",
        "_observer", "_refresh_model", "_router", "settings",
    )  # fmt: skip
    # An attribute that it does not have cannot be set, so that none is set to no effect.

    def __init__(
        self,
        core: EngineCore,
        limits: AdmissionLimits,
        *,
        max_queue_size: int = 0,
        max_unread_results: int = MAX_UNREAD_RESULTS,
        max_unread_requests: int = MAX_UNREAD_REQUESTS,
        defaults: GenerationDefaults | None = None,
        per_request_processors: bool = False,
        make_stop_finder: StopFinderFactory | None = None,
        compile_grammar: GrammarCompile | None = None,
        keeper: ManagerKeeper | None = None,
        settings: object = None,
        refresh_model: Callable[[], bool] | None = None,
        observer: Observer | None = None,
    ) -> None:
        """Wire a manager; `engine.assembly` does this for a loaded model.

        Args:
            core, limits, max_queue_size, compile_grammar: see EngineLoop.
            max_unread_results, max_unread_requests: see ContinuousBatchingConfig.
            defaults: the options of requests that do not set their own.
            per_request_processors: whether requests may set their own sampling options.
            make_stop_finder: makes a stop string matcher. If None, there is no tokenizer, and stop
                strings are refused.
            keeper: keeps the manager for the next session if `stop` asks for it. If None, the
                manager cannot be kept.
            settings: see the class.
            refresh_model: called when the model may have changed since the last step. Returns
                whether it has changed since the last call, which invalidates all KV. Its exceptions
                propagate to the caller. May be None.
            observer: notified of what the manager does; may be None.
        """
        # No object that the manager refers to refers back to it, so a dropped manager ends its
        # thread and frees its cache at once.
        finish = weakref.WeakMethod(self.finish_request)
        self._router = ResultRouter(
            partial(_call_if_alive, finish), max_unread_results, max_unread_requests
        )
        sink = self._router.accept
        self._loop = EngineLoop(
            core,
            limits,
            sink=sink if observer is None else observed(sink, observer),
            max_queue_size=max_queue_size,
            compile_grammar=compile_grammar,
        )
        self.settings = settings
        self._defaults = defaults or GenerationDefaults(
            None, (), drop_unsupported=True, return_logprobs=False
        )
        self._builder = RequestBuilder(
            limits,
            self._defaults,
            self._loop.compile_grammar,
            make_stop_finder,
            per_request_processors=per_request_processors,
        )
        self._lock = threading.Lock()  # of the names
        self._keeping = None if keeper is None else _Keeping(keeper)
        self._refresh_model = refresh_model
        self._observer = observer
        self._next_name = 0
        weakref.finalize(self, _abandon, self._loop).atexit = False  # the loop sees to that itself

    # ---- life ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the engine's thread. Harmless if it is already running.

        Raises:
            EngineUnavailableError: see EngineLoop.
            ModelChangedError: modules of the model were replaced since it was verified, or it was
                moved or converted.
        """
        self._loop.refuse_in_a_fork()
        self._refresh()
        on_end = partial(_ended, self._loop, self._router, self._observer, self._keeping)
        self._loop.start(on_start=self._started, on_end=on_end)

    def is_running(self) -> bool:
        """Whether the engine's thread is running in this process."""
        return self._loop.is_running()

    def warmup(self) -> None:
        """Run everything that is slow the first time; see EngineLoop.

        Raises:
            ModelChangedError: see `start`.
            Exception: see EngineLoop.
        """
        self._loop.refuse_in_a_fork()
        self._refresh()
        self._loop.warmup()

    def lets_model_change(self) -> bool:
        """Whether no step is using the model now; see EngineLoop."""
        return self._loop.lets_model_change()

    @property
    def warmed_up(self) -> bool:
        """Whether `warmup` has been done."""
        return self._loop.warmed_up

    @property
    def failure(self) -> Exception | None:
        """The reason the engine is dead, or None if it is not."""
        return self._loop.failure

    def stats(self) -> EngineStats:
        """Return the engine's current statistics, without the counters of a step that is still
        running.
        """
        return self._loop.stats()

    def pause(self) -> Pause:
        """Pause the engine so that the caller can use the model.

        Use it as `with manager.pause(): …`, or in a coroutine as `async with manager.pause(): …`,
        which does not block the event loop while waiting. The block begins when the running step is
        done. Until the block ends, nothing uses the model: requests keep their KV, and new ones are
        accepted but wait. See EngineLoop.model_window.

        Only the block pauses the engine, not this call. The pause ends however the block exits.
        Each block needs a new pause.

        Raises:
            EngineUnavailableError: on entry, if the engine is not running or ends before the pause
                begins.
            ModelChangedError: on exit, as for `start`. Requests then continue with the modules that
                were verified.
            RuntimeError: on entry, if the same pause is entered a second time.
        """
        self._loop.refuse_in_a_fork()
        return self._loop.model_window(self._refresh)

    def reset_prefix_cache(self) -> Future[None]:
        """Discard all cached prefixes before the next step at the latest; see EngineLoop."""
        self._loop.refuse_in_a_fork()
        return self._loop.reset_prefix_cache()

    def _refresh(self) -> None:
        if self._refresh_model is not None and self._refresh_model():
            logger.info("the model has changed: what was computed with the old one is forgotten")
            self._loop.forget_computed()

    def _started(self) -> None:
        if self._keeping is not None:
            self._keeping.release(self)
        self._router.reopen()
        if self._observer is not None:
            self._observer.started(self._loop.stats)

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Stop the engine's thread. New requests are refused, and live ones are finished first.

        Harmless if the engine is not running here. Unread results are kept.

        Args:
            block: whether to wait for the thread to end.
            timeout: the maximum time to wait, in seconds.
            keep_for_next_session: whether the model keeps this manager and its cache, once the
                thread has ended, for the next session with equal configs.
            hard_stop: end live requests immediately with an error instead of finishing them.

        Raises:
            UnsupportedFeatureError: keep_for_next_session is set, but this manager was not made by
                a model.
            RuntimeError: block is True and the calling thread is in a pause of this manager, so it
                would wait for itself.
        """
        if keep_for_next_session and self._keeping is None:
            raise UnsupportedFeatureError(
                "keep_for_next_session", "is True, but no model has made this manager"
            )
        if self._loop.is_forked:
            return
        if block:
            self._loop.refuse_to_wait_for_itself()
        if self._keeping is not None:
            self._keeping.wish(self if keep_for_next_session else None)
            if not self.is_running():
                self._keeping.fulfil(self.failure)
        self._loop.stop(block, timeout, hard_stop=hard_stop)

    def join(self, timeout: float | None = None) -> None:
        """Wait up to `timeout` seconds for the engine's thread to end. Harmless if it is not
        running here.

        Raises:
            RuntimeError: the calling thread is in a pause of this manager.
        """
        self._loop.join(timeout)

    # ---- requests ------------------------------------------------------------------------------

    @property
    def num_return_sequences(self) -> int:
        """The number of choices for requests that do not set it, from 1 to 128.

        It may be set at any time and applies to requests added afterwards.

        Raises:
            InvalidRequestError: it is set to a value out of this range.
        """
        return self._defaults.num_return_sequences

    @num_return_sequences.setter
    def num_return_sequences(self, number: int) -> None:
        self._defaults.num_return_sequences = number

    def add_request(
        self,
        input_ids: Sequence[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | Iterable[int] | None = None,
        **logit_processor_kwargs: Any,
    ) -> str:
        """Add a request to the queue.

        Args:
            input_ids: the prompt's token ids, as a list, or a one-dimensional numpy array or torch
                tensor.
            request_id: the request's name. If None, "req_0", "req_1", … are assigned.
            max_new_tokens: the maximum number of tokens to generate. If None, the generation
                config's.
            streaming: whether every step yields a cumulative result, rather than only the last.
            record_timestamps: whether results include the time of each token.
            eos_token_id: replaces the model's end-of-sequence ids; −1 means none.
            logit_processor_kwargs: options for this request only (docs/offline.md lists them).
                Sampling options require per_request_processors.

        Returns:
            The request's id. If num_return_sequences is above 1, each choice's results have their
                own name: see `engine.api.results.choice_name`.

        Raises:
            InvalidRequestError, UnsupportedFeatureError, DuplicateRequestError, QueueFullError,
                UnreadResultsError, EngineUnavailableError: the request is refused. Other requests
                are not affected.
        """
        self._loop.refuse_in_a_fork()
        name = request_id if request_id is not None else self._new_names(1)[0]
        try:
            prepared = self._builder.build(
                name, input_ids, max_new_tokens, eos_token_id, logit_processor_kwargs
            )
            self._admit([prepared], streaming=streaming, record_timestamps=record_timestamps)
        except BaseException:
            self._router.give_up(name)
            raise
        return name

    def add_requests(
        self,
        inputs: Sequence[Sequence[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **logit_processor_kwargs: Any,
    ) -> list[str]:
        """Add several requests, either all or none; see `add_request`.

        Returns:
            The request ids in the order of the inputs, which is also their order in the queue.

        Raises:
            InvalidRequestError: the error's field begins with the input at fault, such as
                "inputs[3].".
            QueueFullError: there is no room for all of them; add them one by one.
            UnsupportedFeatureError, UnreadResultsError, EngineUnavailableError: see `add_request`.
        """
        self._loop.refuse_in_a_fork()
        prepared = []
        for index, (name, prompt) in enumerate(
            zip(self._new_names(len(inputs)), inputs, strict=True)
        ):
            try:
                prepared.append(
                    self._builder.build(name, prompt, max_new_tokens, None, logit_processor_kwargs)
                )
            except InvalidRequestError as error:
                raise InvalidRequestError(
                    f"inputs[{index}].{error.field}", error.description
                ) from error
        self._admit(prepared, streaming=streaming, record_timestamps=record_timestamps)
        return [entry.spec.request_id for entry in prepared]

    def add_to(
        self,
        mailbox: Mailbox,
        name: str,
        prompt: Sequence[int],
        *,
        max_new_tokens: int | None,
        eos_token_id: int | Iterable[int] | None,
        record_timestamps: bool,
        adapter: str | None = None,
    ) -> int:
        """Add a request whose results go to a separate mailbox; used by
        `engine.api.batch_generation`.

        Returns:
            The request's number of choices.
        """
        self._loop.refuse_in_a_fork()
        own = {"adapter": adapter}
        prepared = self._builder.build(name, prompt, max_new_tokens, eos_token_id, own)
        self._admit(
            [prepared], streaming=False, record_timestamps=record_timestamps, mailbox=mailbox
        )
        return prepared.spec.n

    def cancel_request(self, request_id: str) -> bool:
        """Cancel a request and all its choices within one step; their last results have status
        CANCELLED.

        Handlers that wait for a request with that id are dropped. Returns False if no live request
        has that id.
        """
        self._loop.refuse_in_a_fork()
        self._router.give_up(request_id)
        return self._loop.cancel_request(request_id)

    def finish_request(self, request_id: str, num_tokens: int, choice: int = 0) -> bool:
        """End a choice with STOP after its first `num_tokens` output tokens.

        Returns False if the request is not live.
        """
        self._loop.refuse_in_a_fork()
        return self._loop.finish_request(request_id, num_tokens, choice)

    def new_name(self) -> str:
        """Return a request id that is not in use."""
        self._loop.refuse_in_a_fork()
        return self._new_names(1)[0]

    def _admit(
        self,
        prepared: Sequence[PreparedRequest],
        *,
        streaming: bool,
        record_timestamps: bool,
        mailbox: Mailbox | None = None,
    ) -> None:
        """Submit checked requests, either all or none."""
        requests = [(entry.spec, entry.make_matcher) for entry in prepared]
        arrival = time.monotonic()
        expected: list[RequestId] = []
        told: list[GenerationRequest] = []
        try:
            for entry in prepared:
                self._router.expect(
                    entry.spec,
                    arrival,
                    streaming=streaming,
                    record_timestamps=record_timestamps,
                    make_stop_finder=entry.make_stop_finder,
                    mailbox=mailbox,
                )
                expected.append(entry.spec.request_id)
            if self._observer is not None:
                told = [spec for spec, _ in requests]
                self._observer.submitting(told, arrival)
            self._loop.submit_all(requests, arrival)
        except BaseException:  # also for an interrupt: nothing may be left behind
            for name in expected:
                self._router.forget(name)
            if self._observer is not None:
                self._observer.refused(told)
            raise

    def _new_names(self, count: int) -> list[str]:
        names: list[str] = []
        with self._lock:
            while len(names) < count:
                name = f"req_{self._next_name}"
                self._next_name += 1
                if not self._router.is_known(name):
                    names.append(name)
        return names

    # ---- results -------------------------------------------------------------------------------

    def get_result(
        self, request_id: str | None = None, timeout: float | None = None
    ) -> GenerationOutput | None:
        """Return the oldest unread result, waiting for one if necessary.

        Args:
            request_id: return only results of this request (or choice).
            timeout: the maximum time to wait, in seconds. If None, wait as long as the engine runs.

        Returns:
            The result, or None after the timeout, or if the engine has ended and no results are
                left.

        Raises:
            RequestNotFoundError: the named request is not live and has no unread result.
        """
        self._loop.refuse_in_a_fork()
        return self._router.get(request_id, timeout)

    def get_from(self, mailbox: Mailbox, timeout: float | None) -> GenerationOutput | None:
        """Like `get_result`, but for requests added with `add_to`."""
        self._loop.refuse_in_a_fork()
        return self._router.get(None, timeout, mailbox)

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Yield all results as they arrive, until the engine has ended and all results are read."""
        while (result := self.get_result()) is not None:
            yield result

    def request_id_iter(self, request_id: str) -> Iterator[GenerationOutput]:
        """Yield the results of one request (or choice) as they arrive, up to and including the last
        one.
        """
        while (result := self.get_result(request_id)) is not None:
            yield result
            if result.is_finished():
                return

    def register_result_handler(self, request_id: str, callback: ResultHandler) -> None:
        """Call `callback` on the running event loop with each result of a request (or choice).

        The handler is removed after the last result. It may be registered before its request is
        added, so that no result is missed. It then waits for the next request with that id, and is
        dropped if that request is refused.

        Raises:
            TooManyHandlersError: too many handlers are waiting for their requests.
            RuntimeError: no event loop is running here.
        """
        self._loop.refuse_in_a_fork()
        self._router.register(request_id, callback)


class _Keeping:
    """Whether `stop` asked to keep the manager, remembered until the thread has ended.

    Nothing else that the thread references refers to its manager.
    """

    def __init__(self, keeper: ManagerKeeper) -> None:
        self._keeper = keeper
        self._lock = threading.Lock()  # taken while the loop's is held, never the other way round
        self._manager: ContinuousBatchingManager | None = None

    def release(self, manager: ContinuousBatchingManager) -> None:
        """Do not keep the manager, because it is in use."""
        self.wish(None)
        self._keeper.release(manager)

    def wish(self, manager: ContinuousBatchingManager | None) -> None:
        """Set the manager to keep once the thread has ended, or None for none."""
        with self._lock:
            self._manager = manager

    def fulfil(self, failure: Exception | None) -> None:
        """Keep the requested manager now that the thread has ended, unless its engine is dead."""
        with self._lock:
            manager, self._manager = self._manager, None
            if manager is not None and failure is None:
                self._keeper.keep(manager)


def _ended(
    loop: EngineLoop, router: ResultRouter, observer: Observer | None, keeping: _Keeping | None
) -> None:
    """Clean up when the engine's thread ends."""
    router.close()
    if observer is not None:
        observer.ended()
    if keeping is not None:
        keeping.fulfil(loop.failure)


def _abandon(loop: EngineLoop) -> None:
    """Stop the loop of a manager that is no longer referenced, so that nobody can read its results.

    This may run in any code, with any lock held, so the loop's lock is taken on another thread.
    """
    if not loop.is_running():
        return
    stop = partial(loop.stop, block=False, hard_stop=True)
    try:
        threading.Thread(target=stop, name="headrace-abandon", daemon=True).start()
    except RuntimeError:  # there can be no further thread
        stop()


def _call_if_alive(method: weakref.WeakMethod[Any], *arguments: object) -> None:
    bound = method()
    if bound is not None:
        bound(*arguments)
