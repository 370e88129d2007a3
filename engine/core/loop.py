"""The engine's loop: checks requests on the caller's thread, runs steps on its own thread, and
passes every step's outputs to one sink.

    any thread                                   engine thread
    submit ──checks──▶ inbox ───────────────────▶ EngineCore ──step──▶ StepOutputs ──▶ sink
    cancel_request, … ──▶ inbox ────────────────▶     │
                                                       └─ between steps: commands are carried out,
                                                       in order; windows are opened

There are three ways to stop computing for a while. `pause` stops the steps, while commands are
still carried out. `model_window` stops steps and commands while the caller uses the model (a
manager's `pause`). `hold_request` stops one request, and the others continue.

The sink is the service's delivery log (through `engine.contract.engine_client`), or the
`ResultRouter` of the Python API (`engine.api.manager`).

States: new → running → (stop) draining → stopped → (start) running …; dead after a failure of the
loop itself.

The thread ends before the interpreter does (`_end_at_exit`), and belongs to one process. A fork of
that process has a copy of the loop's memory, but not its thread, and locks held at the fork are
never released there.
"""

from __future__ import annotations

import atexit
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from engine.contract.adapters import Adapter
from engine.contract.engine_client import Admission
from engine.contract.errors import (
    DuplicateRequestError,
    EngineUnavailableError,
    RanksLostError,
    UnsupportedFeatureError,
)
from engine.contract.outputs import RequestFailure, RequestOutput, StepOutputs, end_of_lost
from engine.contract.request import GenerationRequest, MatcherFactory, TokenMatcher
from engine.contract.sampling_params import GrammarParams
from engine.contract.stats import EngineStats
from engine.contract.types import CallerKey, RequestId, TokenId
from engine.core.admission import AdmissionLimits
from engine.core.endings import new_error_id
from engine.core.engine_core import EngineCore
from engine.core.inbox import Inbox
from engine.core.model_pause import ModelWindow, Pause
from engine.core.threads import call_on_own_thread
from engine.fairness.drain_rate import DrainRate
from engine.fairness.queue_room import QueueRoom

logger = logging.getLogger(__name__)

StepSink = Callable[[StepOutputs], None]
GrammarCompile = Callable[
    [GrammarParams, frozenset[TokenId], bytes, CallerKey, CallerKey], Future[MatcherFactory]
]
"""Starts compiling a grammar for a request. Takes the grammar, the ending token ids, the cache
salt, the caller and the caller's group.
"""

_MAX_FAILED_STEPS = 3
"""The number of consecutive unexpected loop failures after which the engine is declared dead."""
_STOPPED_MESSAGE = "the engine was stopped before the request was complete; try again"


class EngineLoop:
    """Runs an engine on its own thread. All methods may be called from any thread."""

    def __init__(
        self,
        core: EngineCore,
        limits: AdmissionLimits,
        *,
        sink: StepSink,
        max_queue_size: int = 0,
        compile_grammar: GrammarCompile | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """Wire a loop.

        Args:
            core: the engine; from now on only this loop's thread uses it.
            limits: the limits that admission checks.
            sink: receives each step's outputs on the engine's thread; must not block.
            max_queue_size: how many requests may wait; 0: no limit.
            compile_grammar: starts compiling the grammar of a request. If None, grammars are
                refused.
            jitter: returns random numbers from 0 to 1, which spread the retry times of callers that
                a full queue refuses.
        """
        self._core = core
        self._limits = limits
        self._sink = sink
        self._on_end: Callable[[], None] | None = None  # given to `start`; None: not running
        self._compile_grammar = compile_grammar
        self._changed = threading.Condition()
        self._window = ModelWindow(self._changed)
        self._inbox = Inbox()
        self._queued: set[RequestId] = set()  # accepted; their add commands are still in the inbox
        self._live: dict[RequestId, Adapter | None] = {}
        self._ends = DrainRate(core.clock, jitter)  # while others wait: each end lets one start
        self._room = QueueRoom(max_queue_size, self._ends, core.clock, jitter)
        self._thread: threading.Thread | None = None
        self._process = 0  # the one in which the thread was started
        self._is_running = False
        self._is_warming = False
        self._warmed_up = False
        self._accepting = False
        self._is_paused = False
        self._stopping = False
        self._aborting = False
        self._failure: Exception | None = None

    # ---- life ----------------------------------------------------------------------------------

    def start(
        self,
        *,
        on_start: Callable[[], None] | None = None,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        """Start the engine's thread. Harmless if it is already running.

        Args:
            on_start: called before the thread does anything, unless it is already running.
            on_end: called on the thread as its last action, whether the engine was stopped or has
                died (`failure` tells which). Neither callback may block.

        Raises:
            EngineUnavailableError: the engine has died, and a new one is needed; or it is still
                being stopped.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._is_warming)
            if self._failure is not None:
                raise EngineUnavailableError("the engine has failed and cannot be started again")
            if self._is_running:
                if self._stopping:
                    raise EngineUnavailableError(
                        "the engine is still being stopped; call join() before start()"
                    )
                return
            thread = threading.Thread(target=self._run, name="headrace-engine", daemon=True)
            thread.start()  # it waits for the lock
            self._thread = thread
            self._process = os.getpid()
            self._is_running = self._accepting = True
            self._stopping = self._aborting = self._is_paused = False
            self._window.loop_started()
            self._on_end = on_end
            atexit.register(self._end_at_exit)
            if on_start is not None:
                on_start()

    def is_running(self) -> bool:
        """Whether the engine's thread is running in this process."""
        return self._is_running and self._process == os.getpid()

    def refuse_in_a_fork(self) -> None:
        """Raise if this process is a fork of the one in which the engine runs.

        Called before any operation that needs the engine's thread or one of its locks. Takes no
        lock.

        Raises:
            EngineUnavailableError: this process is such a fork.
        """
        if self.is_forked:
            raise EngineUnavailableError(
                f"the engine runs in process {self._process}, and this process was forked from it: "
                "the engine's thread is not here. Make another manager here, or better, start this "
                "process by spawn and load the model in it"
            )

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the one in which the engine's thread is running."""
        return self._is_running and self._process != os.getpid()

    def lets_model_change(self) -> bool:
        """Whether no step is using the model: the engine is not running, it is paused, or the
        calling thread is in a window.
        """
        with self._changed:
            return not self._is_running or self._is_paused or self._window.is_entered_here

    def stop(
        self, block: bool = True, timeout: float | None = None, *, hard_stop: bool = False
    ) -> None:
        """Stop the engine's thread. New requests are refused, and live ones are finished first.

        Ends a pause and all holds. Harmless if the thread is not running here.

        Args:
            block: whether to wait for the thread to end.
            timeout: the maximum time to wait, in seconds.
            hard_stop: end live requests immediately with an error instead of finishing them.

        Raises:
            RuntimeError: block is True and the calling thread is in a model window of this engine,
                so it would wait for itself.
        """
        if self.is_forked:
            return
        with self._changed:
            if block:
                self.refuse_to_wait_for_itself()
            self._accepting = self._is_paused = False
            self._stopping = True
            self._aborting = self._aborting or hard_stop
            if self._is_running:
                self._inbox.put(self._core.unhold_all)
            self._changed.notify_all()
        if block:
            self.join(timeout)

    def join(self, timeout: float | None = None) -> None:
        """Wait up to `timeout` seconds for the engine's thread to end. Harmless if it is not
        running here.

        Raises:
            RuntimeError: the calling thread is in a model window of this engine.
        """
        thread = self._thread
        if thread is not None and thread is not threading.current_thread() and not self.is_forked:
            self.refuse_to_wait_for_itself()
            thread.join(timeout)

    def refuse_to_wait_for_itself(self) -> None:
        """Raise RuntimeError if the calling thread is in a model window of this engine."""
        if self._window.is_entered_here:
            raise RuntimeError(
                "this thread is in a pause of the engine and would wait for itself; leave the "
                "pause first, or call stop(block=False)"
            )

    def model_window(self, at_end: Callable[[], None]) -> Pause:
        """Return a window in which nothing uses the model: `with loop.model_window(…): …`.

        The loop finishes its step first. Live requests keep their KV and continue afterwards. New
        ones are accepted and wait. Several threads may be in the window at the same time; the loop
        continues when the last one has left. A stop takes effect only then.

        Args:
            at_end: called at the end of the block, before the loop may continue.
        """
        return Pause(self._window, at_end)

    def pause(self) -> Future[None]:
        """Run no further steps until `resume`. Does not block. Harmless if already paused.

        Live requests keep their KV. Unlike in a window, commands are carried out: new requests are
        accepted and wait, and requests end if they are cancelled or their time limits pass.

        Returns:
            A future that completes when the last step is done. From then on, nothing uses the
                model.

        Raises:
            EngineUnavailableError: the engine is not running, or is being stopped.
        """
        with self._changed:
            if not self._is_running or self._stopping:
                raise EngineUnavailableError("the engine does not run, so it cannot be paused")
            self._is_paused = True
            return self._between_steps(self._core.settle)

    def resume(self) -> None:
        """End a pause. Harmless if the engine is not paused."""
        with self._changed:
            self._is_paused = False
            self._changed.notify_all()

    def reset_prefix_cache(self) -> Future[None]:
        """Discard all cached prefixes before the next step at the latest. Running requests keep the
        prefixes they hold until they end.

        Returns:
            A future that completes when this is done. If the engine is stopped first, it fails with
                an EngineUnavailableError.
        """
        return self._forget(self._core.scheduler.kv_cache.reset_prefix_cache)

    def forget_computed(self) -> Future[None]:
        """Discard all KV before the next step at the latest, because the model has changed.

        Live requests are recomputed from their tokens, and continue.

        Returns:
            A future; see `reset_prefix_cache`.
        """
        return self._forget(self._core.forget_computed)

    def _forget(self, action: Callable[[], None]) -> Future[None]:
        with self._changed:
            if self._is_running and not self._window.is_parked:
                return self._between_steps(action)
            action()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _between_steps(self, action: Callable[[], None]) -> Future[None]:
        """Run an action on the engine's thread; called with the lock held."""
        call = self._inbox.call(action)
        self._changed.notify_all()
        return call

    @property
    def speculates(self) -> bool:
        """Whether steps compute guessed tokens."""
        return self._core.scheduler.drafter is not None

    @property
    def warmed_up(self) -> bool:
        """Whether `warmup` has been done."""
        return self._warmed_up

    def warmup(self) -> None:
        """Run everything that is slow the first time, and return when that is done. If the engine
        is running, this happens on its thread, between two steps.

        Raises:
            EngineUnavailableError: the engine ended before the warm-up.
            RuntimeError: the calling thread is in a window of this engine.
            Exception: whatever the warm-up raises; requests are not affected.
        """
        call: Future[None] | None = None
        with self._changed:
            self.refuse_to_wait_for_itself()
            self._changed.wait_for(lambda: not self._is_warming)
            if self._is_running:
                call = self._between_steps(self._warm_up_between_steps)
            else:
                self._is_warming = True
        if call is not None:
            call.result()
        else:
            call_on_own_thread(self._warm_up_alone, "headrace-warmup")
        self._warmed_up = True

    def _warm_up_alone(self) -> None:
        try:
            self._core.runner.warmup()
        finally:
            with self._changed:
                self._is_warming = False
                self._changed.notify_all()

    def _warm_up_between_steps(self) -> None:
        self._core.settle()
        self._core.runner.warmup()

    @property
    def failure(self) -> Exception | None:
        """The reason the engine is dead, or None if it is not."""
        return self._failure

    # ---- requests ------------------------------------------------------------------------------

    def submit(
        self, request: GenerationRequest, make_matcher: MatcherFactory | None = None
    ) -> Admission:
        """Accept a request, or refuse it immediately.

        Args:
            request: what is asked for.
            make_matcher: makes matchers of the request's compiled grammar, if it has one; see
                `compile_grammar`.

        Raises:
            InvalidRequestError, DuplicateRequestError, QueueFullError, EngineUnavailableError: the
                request is refused.
            ValueError: the request has a grammar, but make_matcher is missing, so the output would
                not follow the grammar.
        """
        self._limits.check(request)
        if request.grammar is not None and make_matcher is None:
            raise ValueError("a request with a grammar needs a matcher: see compile_grammar")
        return self.submit_all([(request, make_matcher)], time.monotonic())

    def submit_all(
        self, requests: Sequence[tuple[GenerationRequest, MatcherFactory | None]], arrival: float
    ) -> Admission:
        """Accept checked requests with the matchers of their grammars, either all or none.

        Raises the same errors as `submit`.
        """
        with self._changed:
            if self._failure is not None:
                raise EngineUnavailableError("the engine has failed; restart the server")
            if not self._accepting:
                raise EngineUnavailableError(
                    "the engine is not running or is being stopped; try again later"
                )
            asked = [request for request, _ in requests]
            names = set()
            for request in asked:
                if request.request_id in self._live or request.request_id in names:
                    raise DuplicateRequestError(request.request_id)
                names.add(request.request_id)
            waiting = len(self._queued) + self._core.num_waiting
            with self._adapters_of(asked) as adapters:
                self._room.enter(asked, waiting)
            if not waiting:
                self._ends.begin()
            self._live.update(zip((one.request_id for one in asked), adapters, strict=True))
            self._queued |= names
            for (request, make_matcher), adapter in zip(requests, adapters, strict=True):
                self._inbox.put(partial(self._add, request, arrival, make_matcher, adapter))
            self._changed.notify_all()
            notes = tuple(note for _, make in requests if make is not None for note in make.notes)
            digest = adapters[0].digest.hex() if adapters and adapters[0] is not None else ""
            return Admission(waiting, arrival, notes, digest)

    def _adapters_of(
        self, requests: Sequence[GenerationRequest]
    ) -> AbstractContextManager[tuple[Adapter | None, ...]]:
        """Give requests the adapters that they name; see LoadedAdapters.begun."""
        if not any(request.adapter for request in requests):
            return nullcontext((None,) * len(requests))
        return self._limits.adapters.begun([request.adapter for request in requests])

    def compile_grammar(self, request: GenerationRequest) -> Future[MatcherFactory] | None:
        """Start compiling a request's grammar, for `submit`. Does not block.

        Returns None if the request has no grammar. If the future fails, the request is refused with
        its error.

        Raises:
            UnsupportedFeatureError: structured output is not available here.
        """
        if request.grammar is None:
            return None
        if self._compile_grammar is None:
            raise UnsupportedFeatureError(
                "grammar", "needs the model's tokenizer.json, which is not there"
            )
        return self._compile_grammar(
            request.grammar,
            request.stop.ending_token_ids,
            request.cache_salt,
            request.caller,
            request.caller_group,
        )

    def cancel_request(self, request_id: str) -> bool:
        """Cancel a request and all its choices within one step; its last outputs have reason
        CANCELLED.

        Returns False if no live request has that id.
        """
        return self._command(RequestId(request_id), self._core.cancel)

    def finish_request(self, request_id: str, num_tokens: int, choice: int = 0) -> bool:
        """End a choice with STOP after its first `num_tokens` output tokens.

        Returns False if the request is not live.
        """
        return self._command(
            RequestId(request_id), lambda name: self._core.finish(name, num_tokens, choice)
        )

    def hold_request(self, request_id: str) -> bool:
        """Exclude a request from all steps until `unhold_request`; see EngineCore.hold.

        Its time limit still applies. Returns False if no live request has that id, or the engine is
        being stopped.
        """
        with self._changed:
            return not self._stopping and self._command(RequestId(request_id), self._core.hold)

    def unhold_request(self, request_id: str) -> bool:
        """Resume a held request. Returns False if no live request has that id."""
        return self._command(RequestId(request_id), self._core.unhold)

    def cancel_of(self, adapters: Sequence[Adapter]) -> None:
        """Cancel the requests that have one of these adapters, which requests can no longer
        name.
        """
        gone = {one for one in adapters if not self._limits.adapters.is_loaded(one)}
        with self._changed:
            for name in [name for name, adapter in self._live.items() if adapter in gone]:
                self._command(name, self._core.cancel)

    def stats(self) -> EngineStats:
        """Return the engine's current statistics, without the counters of a step that is still
        running.
        """
        return self._core.stats()

    def _command(self, name: RequestId, command: Callable[[RequestId], object]) -> bool:
        with self._changed:
            if name not in self._live or not self._is_running:
                return False
            self._inbox.put(partial(command, name))
            self._changed.notify_all()
            return True

    # ---- the engine's thread -------------------------------------------------------------------

    def _run(self) -> None:
        failed_steps = 0
        while self._failure is None:
            try:
                if not self._wait_for_work():
                    break
                # Deliver ends that commands caused before the next step, which may be a long one.
                self._deliver(self._core.take_outputs())
                outputs = self._core.step()
                failed_steps = 0
            except Exception as error:
                failed_steps += 1
                is_dead = failed_steps >= _MAX_FAILED_STEPS or isinstance(error, RanksLostError)
                outputs = self._recover(error, dead=is_dead)
            self._deliver(outputs)
        with self._changed:
            self._end()

    def _end(self) -> None:
        self._is_running = self._accepting = False
        self._inbox.close(EngineUnavailableError("the engine ended before it could do this"))
        self._window.loop_ended()
        atexit.unregister(self._end_at_exit)
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()

    def _end_at_exit(self) -> None:
        """End the thread before the interpreter ends.

        After interpreter shutdown begins, Python ends a thread that asks for the interpreter by
        unwinding its stack. torch's C++ frames respond to that with std::terminate. A loop that is
        still parked in a window has no such frames, so it can be left alone.
        """
        if not self.is_running():
            return
        self.stop(block=False, hard_stop=True)
        with self._changed:
            self._changed.wait_for(lambda: not self._is_running or self._window.is_parked)
        if not self._is_running and self._thread is not None:
            self._thread.join()  # its frames may hold the last references to tensors

    def _wait_for_work(self) -> bool:
        """Carry out commands, open windows, and sleep while there is nothing to do.

        Returns False if the thread must end.
        """
        while True:
            self._carry_out_commands()
            if self._window.is_wanted:
                self._core.settle()
                self._deliver(self._core.take_outputs())
                with self._changed:
                    self._window.park()
                continue
            if self._core.has_work and not self._is_paused:
                return True
            # In a pause, or if all requests are held, no step ends the overdue ones.
            until_overdue_s = self._core.end_overdue()
            self._deliver(self._core.take_outputs())  # ends alone
            with self._changed:
                if self._inbox or self._aborting or self._window.is_wanted:
                    continue
                if self._core.has_work and not self._is_paused:
                    continue
                if self._stopping:
                    return False
                self._changed.wait(until_overdue_s)

    def _carry_out_commands(self) -> None:
        """Carry out the commands in the inbox, then a hard stop if one was requested."""
        self._inbox.carry_out()
        with self._changed:
            if self._inbox or not self._aborting:
                return
            self._aborting = False
        self._core.fail_all(_STOPPED_MESSAGE, retryable=True)

    def _add(
        self,
        request: GenerationRequest,
        arrival: float,
        make_matcher: MatcherFactory | None,
        adapter: Adapter | None,
    ) -> None:
        make_next: Callable[[], TokenMatcher] | None = None
        if make_matcher is not None:
            try:
                matchers = iter([make_matcher() for _ in range(request.n)])
            except Exception as error:
                self._refuse_late(request, arrival, error)
                return
            make_next = matchers.__next__
        with self._changed:  # so that `submit` counts it exactly once
            self._queued.discard(request.request_id)
            self._core.add(request, arrival, make_next, adapter)

    def _refuse_late(self, request: GenerationRequest, arrival: float, error: Exception) -> None:
        """End an accepted request whose grammar cannot be followed. No other request is
        affected.
        """
        error_id, name = new_error_id(), request.request_id
        logger.error("error %s: the grammar of %s failed", error_id, request.logged, exc_info=error)
        with self._changed:
            self._queued.discard(name)
        failure = RequestFailure(f"its grammar cannot be followed (error {error_id})", error_id)
        now = time.monotonic()
        self._deliver(StepOutputs(now, (end_of_lost(name, failure, arrival, now),)))

    def _recover(self, error: Exception, *, dead: bool) -> StepOutputs:
        """End all live requests because the loop itself failed. Continue unless it has failed too
        often in a row.
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
        return StepOutputs(time.monotonic(), outputs + self._ends_of_the_lost(outputs, error_id))

    def _ends_of_the_lost(
        self, outputs: Sequence[RequestOutput], error_id: str
    ) -> tuple[RequestOutput, ...]:
        """Build final outputs without the core, for live requests that `outputs` does not end.

        These are the requests that a broken core has lost and, if the engine is dead, those still
        in the inbox.
        """
        failure = RequestFailure(f"the engine failed (error {error_id})", error_id, retryable=True)
        ended = {output.request_id for output in outputs if output.ends_request}
        with self._changed:
            kept = self._queued if self._failure is None else set()
            names = sorted(self._live.keys() - ended - kept)
        now = time.monotonic()
        return tuple(end_of_lost(name, failure, now, now) for name in names)

    def _deliver(self, outputs: StepOutputs) -> None:
        """Pass one step's outputs to the sink.

        The ids of ended requests are free before the sink sees their ends. A step without outputs
        is passed on too, for its record.
        """
        if not outputs.outputs and outputs.step is None:
            return
        if self._room.has_of(outputs.outputs):
            with self._changed:
                self._room.begun(outputs.outputs)
        ended = [output.request_id for output in outputs.outputs if output.ends_request]
        if ended:
            with self._changed:
                self._limits.adapters.end(self._live.pop(name, None) for name in ended)
                if self._queued or self._core.num_waiting:
                    self._ends.left(len(ended))
        try:
            self._sink(outputs)
        except Exception:
            logger.exception(
                "the sink of the engine's results failed; that step's results are lost to it"
            )
