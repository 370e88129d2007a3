"""The manager: admission on the caller's thread, the loop on its own, every step's results to one
sink.

    any thread                                   engine thread
    submit ──checks──▶ inbox ───────────────────▶ EngineCore ──step──▶ StepOutputs ──▶ sink
    cancel_request, finish_request ─▶ inbox ────▶     │
                                                       └─ between steps: commands are carried out,
                                                       in order

The sink is the service's delivery log (through `engine.client`), or by default the `ResultRouter`,
which gives the methods that users of transformers' continuous batching know: add_request,
get_result, iteration, handlers.

States: new → running → (stop) draining → stopped → (start) running …; a failure of the loop itself
ends in dead.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from engine.admission import AdmissionLimits
from engine.core import EngineCore, MatcherFactory
from engine.endings import new_error_id
from engine.errors import (
    DuplicateRequestError,
    EngineUnavailableError,
    InvalidRequestError,
    QueueFullError,
    UnsupportedFeatureError,
)
from engine.generation_options import REQUEST_KEYS, GenerationDefaults
from engine.outputs import (
    Finish,
    FinishReason,
    RequestFailure,
    RequestOutput,
    StepOutputs,
    Timings,
    Usage,
)
from engine.request import GenerationRequest
from engine.results import GenerationOutput, ResultHandler, ResultRouter, StopFinder
from engine.stats import EngineStats
from engine.threads import call_on_own_thread
from engine.types import RequestId, TokenId

logger = logging.getLogger(__name__)

StepSink = Callable[[StepOutputs], None]
StopFinderFactory = Callable[[tuple[str, ...]], StopFinder]

_MAX_FAILED_STEPS = 3
"""So many unexpected failures of the loop in a row, and the engine is declared dead."""
_STOPPED_MESSAGE = "the engine was stopped before the request was complete; try again"


class ContinuousBatchingManager:
    """Generates for many requests at once, on a thread of its own. All methods may be called from
    any thread.
    """

    def __init__(
        self,
        core: EngineCore,
        limits: AdmissionLimits,
        *,
        max_queue_size: int = 0,
        sink: StepSink | None = None,
        defaults: GenerationDefaults | None = None,
        per_request_processors: bool = False,
        make_stop_finder: StopFinderFactory | None = None,
    ) -> None:
        """Wire a manager; `engine.offline` and `engine.local_client` do it for a loaded model.

        Args:
            core: the engine; from now on only this manager's thread touches it.
            limits: what admission checks.
            max_queue_size: how many requests may wait; 0: no limit.
            sink: takes each step's outputs on the engine's thread; must not block. None: the
                offline API.
            defaults: what requests of the offline API have unless they say otherwise.
            per_request_processors: whether requests of the offline API may say otherwise.
            make_stop_finder: makes a stop string matcher; None: there is no tokenizer, stop strings
                are refused.
        """
        self._core = core
        self._limits = limits
        self._max_queue_size = max_queue_size
        self._defaults = defaults or GenerationDefaults(
            None, (), drop_unsupported=True, return_logprobs=False
        )
        self._per_request_processors = per_request_processors
        self._make_stop_finder = make_stop_finder
        self._router = ResultRouter(self.finish_request)
        self._sink = sink if sink is not None else self._router.accept
        self._changed = threading.Condition()
        self._inbox: deque[Callable[[], object]] = deque()
        self._queued_adds = 0
        self._live: set[RequestId] = set()
        self._finish_times: deque[float] = deque(maxlen=64)
        self._thread: threading.Thread | None = None
        self._accepting = False
        self._stopping = False
        self._aborting = False
        self._failure: Exception | None = None

    # ---- life ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the engine's thread. Harmless while it runs.

        Raises:
            EngineUnavailableError: the engine has died, and a new manager is needed; or it is being
                stopped and has not ended yet.
        """
        with self._changed:
            if self._thread is not None and self._thread.is_alive():
                if self._stopping:
                    raise EngineUnavailableError(
                        "the engine is still being stopped; call join() before start()"
                    )
                return
            if self._failure is not None:
                raise EngineUnavailableError("the engine has failed and cannot be started again")
            self._accepting, self._stopping, self._aborting = True, False, False
            self._router.reopen()
            self._thread = threading.Thread(target=self._run, name="headrace-engine", daemon=True)
            self._thread.start()

    def is_running(self) -> bool:
        """Whether the engine's thread runs."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        *,
        abort: bool = False,
    ) -> None:
        """Stop the engine's thread: nothing new is accepted, live requests are finished first.

        Args:
            block: whether to wait for the thread to end.
            timeout: the most seconds to wait.
            keep_for_next_session: True is refused by managers that no model keeps.
            abort: end live requests at once, with an error, instead of finishing them.

        Raises:
            UnsupportedFeatureError: keep_for_next_session is set.
        """
        if keep_for_next_session:
            raise UnsupportedFeatureError(
                "keep_for_next_session", "is True; managers are not kept between sessions yet"
            )
        with self._changed:
            self._accepting = False
            self._stopping = True
            self._aborting = self._aborting or abort
            self._changed.notify_all()
        if block:
            self.join(timeout)

    def join(self, timeout: float | None = None) -> None:
        """Wait for the engine's thread to end, at most `timeout` seconds. Harmless if it does not
        run.
        """
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def warmup(self) -> None:
        """Run what is slow the first time. Call it before `start`, or it is done on the engine's
        thread.
        """
        with self._changed:
            if self.is_running():
                self._inbox.append(self._core.runner.warmup)
                self._changed.notify_all()
                return
        call_on_own_thread(self._core.runner.warmup, "headrace-warmup")

    @property
    def failure(self) -> Exception | None:
        """Why the engine is dead, if it is."""
        return self._failure

    # ---- requests ------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest, make_matcher: MatcherFactory | None = None) -> int:
        """Take a request in, or refuse it at once.

        Args:
            request: what is asked for.
            make_matcher: of its compiled grammar, where it has one.

        Returns:
            How many requests were waiting before it.

        Raises:
            InvalidRequestError, DuplicateRequestError, QueueFullError, EngineUnavailableError.
        """
        self._limits.check(request)
        with self._changed:
            if self._failure is not None:
                raise EngineUnavailableError("the engine has failed; restart the server")
            if not self._accepting:
                raise EngineUnavailableError(
                    "the engine is not running or is being stopped; try again later"
                )
            if request.request_id in self._live:
                raise DuplicateRequestError(request.request_id)
            waiting = self._queued_adds + self._core.num_waiting
            if self._max_queue_size and waiting >= self._max_queue_size:
                raise QueueFullError(self._max_queue_size, self._retry_after())
            self._live.add(request.request_id)
            self._queued_adds += 1
            arrival = time.monotonic()
            self._inbox.append(lambda: self._add(request, arrival, make_matcher))
            self._changed.notify_all()
            return waiting

    def cancel_request(self, request_id: str) -> bool:
        """End a request within one step; its last output says CANCELLED. False: no live request has
        that id.
        """
        return self._command(RequestId(request_id), lambda name: self._core.cancel(name))

    def finish_request(self, request_id: str, num_tokens: int, choice: int = 0) -> bool:
        """End a choice with STOP as of its first `num_tokens` output tokens. False: it is not
        live.
        """
        return self._command(
            RequestId(request_id), lambda name: self._core.finish(name, num_tokens, choice)
        )

    def stats(self) -> EngineStats:
        """The engine's figures now (the counters of a step that is running may be missing)."""
        return self._core.stats()

    # ---- the offline API -----------------------------------------------------------------------

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
            input_ids: the prompt's token ids.
            request_id: its name; None: one is made.
            max_new_tokens: the most tokens to generate; None: the generation config's.
            streaming: whether every step gives a (cumulative) result, or only the end.
            record_timestamps: whether results tell when each token came.
            eos_token_id: replaces the model's end-of-sequence ids; −1: none.
            logit_processor_kwargs: sampling options of this request alone; need
                per_request_processors.

        Returns:
            The request's id.

        Raises:
            InvalidRequestError, UnsupportedFeatureError, DuplicateRequestError, QueueFullError,
            EngineUnavailableError: it is refused; nothing else is touched.
        """
        if logit_processor_kwargs and not self._per_request_processors:
            known = sorted(set(logit_processor_kwargs) & REQUEST_KEYS)
            if known:
                raise InvalidRequestError(
                    known[0], "is set for one request; that needs per_request_processors=True"
                )
        name = RequestId(request_id if request_id is not None else f"req_{uuid.uuid4().hex}")
        options = self._defaults.resolve(
            len(input_ids),
            max_new_tokens=max_new_tokens,
            eos_token_id=eos_token_id,
            overrides=logit_processor_kwargs,
        )
        find_stop = self._stop_finder(options.stop_strings)
        prompt = tuple(TokenId(token) for token in input_ids)
        self._router.expect(
            name,
            prompt,
            streaming=streaming,
            record_timestamps=record_timestamps,
            find_stop=find_stop,
        )
        try:
            self.submit(options.to_request(name, prompt))
        except Exception:
            self._router.forget(name)
            raise
        return name

    def get_result(
        self, request_id: str | None = None, timeout: float | None = None
    ) -> GenerationOutput | None:
        """The oldest result that was not read, waiting for one.

        Args:
            request_id: only this request's results.
            timeout: the most seconds to wait; None: as long as the engine runs.

        Returns:
            The result; None after the timeout, or when the engine has ended and nothing is left.

        Raises:
            RequestNotFoundError: the named request is not live and has no unread result.
        """
        return self._router.get(None if request_id is None else RequestId(request_id), timeout)

    def __iter__(self) -> Iterator[GenerationOutput]:
        """All results as they come, until the engine has ended and all are read."""
        while (result := self.get_result()) is not None:
            yield result

    def request_id_iter(self, request_id: str) -> Iterator[GenerationOutput]:
        """One request's results as they come; ends after its last one."""
        while (result := self.get_result(request_id)) is not None:
            yield result
            if result.is_finished():
                return

    def register_result_handler(self, request_id: str, callback: ResultHandler) -> None:
        """Call `callback` on the running event loop with each result of a request; ends with its
        last one.

        Raises:
            RequestNotFoundError: the request is not live and has no unread result.
            RuntimeError: no event loop is running here.
        """
        self._router.register(RequestId(request_id), callback)

    # ---- the engine's thread -------------------------------------------------------------------

    def _run(self) -> None:
        failed_steps = 0
        while True:
            try:
                if not self._wait_for_work():
                    break
                # Ends that commands have brought do not wait for a step, which may be a long one.
                self._deliver(self._core.take_outputs())
                outputs = self._core.step()
                failed_steps = 0
            except Exception as error:
                failed_steps += 1
                outputs = self._recover(error, dead=failed_steps >= _MAX_FAILED_STEPS)
            self._deliver(outputs)
            if self._failure is not None:
                break
        self._router.close()

    def _wait_for_work(self) -> bool:
        """Carry out the commands; sleep while there is nothing to do. False: it is time to end."""
        with self._changed:
            while True:
                while self._inbox:
                    self._inbox.popleft()()
                if self._aborting:
                    self._core.fail_all(_STOPPED_MESSAGE, retryable=True)
                    self._aborting = False
                if self._core.has_work:
                    return True
                if self._stopping:
                    return False
                self._changed.wait()

    def _add(
        self, request: GenerationRequest, arrival: float, make_matcher: MatcherFactory | None
    ) -> None:
        self._queued_adds -= 1
        self._core.add(request, arrival, make_matcher)

    def _recover(self, error: Exception, *, dead: bool) -> StepOutputs:
        """The loop itself failed: end everything that lives, and go on unless it fails again and
        again.
        """
        error_id = new_error_id()
        logger.error(
            "error %s: the engine's loop failed; all live requests end", error_id, exc_info=error
        )
        outputs: tuple[RequestOutput, ...] = ()
        try:
            self._core.fail_all(f"the engine failed (error {error_id}); try again", retryable=True)
            outputs = self._core.take_outputs().outputs
        except Exception:
            logger.exception("error %s: the engine cannot be recovered", error_id)
            dead = True
        if dead:
            with self._changed:
                self._failure, self._accepting = error, False
            outputs += self._ends_of_all_but(outputs, error_id)
        return StepOutputs(time.monotonic(), outputs)

    def _ends_of_all_but(
        self, outputs: Sequence[RequestOutput], error_id: str
    ) -> tuple[RequestOutput, ...]:
        """Terminal outputs, made without the core, for live requests that `outputs` does not end:
        those that a broken core has lost, and those that have not left the inbox.
        """
        now = time.monotonic()
        failure = RequestFailure(f"the engine failed (error {error_id})", error_id, retryable=True)
        finish = Finish(
            reason=FinishReason.ERROR,
            usage=Usage(0, 0, 0),
            timings=Timings(now, None, None, None, now, 0),
            failure=failure,
        )
        ended = {output.request_id for output in outputs if output.ends_request}
        with self._changed:
            names = sorted(self._live - ended)
        return tuple(RequestOutput(name, finish=finish, ends_request=True) for name in names)

    def _deliver(self, outputs: StepOutputs) -> None:
        """Hand one step's outputs to the sink; ids of ended requests are free before their ends are
        seen.
        """
        if not outputs.outputs:
            return
        ended = [output.request_id for output in outputs.outputs if output.ends_request]
        if ended:
            with self._changed:
                self._live.difference_update(ended)
                self._finish_times.extend([outputs.time] * len(ended))
        try:
            self._sink(outputs)
        except Exception:
            logger.exception(
                "the sink of the engine's results failed; that step's results are lost to it"
            )

    def _command(self, name: RequestId, command: Callable[[RequestId], object]) -> bool:
        with self._changed:
            if name not in self._live or not self.is_running():
                return False
            self._inbox.append(lambda: command(name))
            self._changed.notify_all()
            return True

    def _retry_after(self) -> float:
        """Seconds until a place in the queue should be free, from the recent rate of ends."""
        times = self._finish_times
        if len(times) < 2 or times[-1] <= times[0]:
            return 1.0
        return min(max((times[-1] - times[0]) / (len(times) - 1), 0.05), 30.0)

    def _stop_finder(self, stop_strings: tuple[str, ...]) -> StopFinder | None:
        if not stop_strings:
            return None
        if self._make_stop_finder is None:
            raise UnsupportedFeatureError(
                "stop_strings",
                "need the model's tokenizer.json, which is not there; use stop_token_ids",
            )
        return self._make_stop_finder(stop_strings)
