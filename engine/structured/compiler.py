"""Compiles grammars on separate threads instead of the engine's, within limits, each only once.

    any thread ── begin ──▶ cache? ──▶ done immediately
                              │ no
                              ▼
                            queue ──▶ at most `workers` threads ──▶ cache, and all that wait for it

Compiled grammars are shared only among requests that may share cached prefixes, because what one of
them does to their lexer affects all of them (`root`). Each caller has a share of the queue: callers
take turns, and if the queue is full, the caller with the most entries loses its last one to a
caller with fewer. Turns and entries are first divided among groups of callers, then among the
callers of a group.

llguidance compiles without the interpreter's lock and cannot be interrupted. Its limits, and the
checks of `source`, keep compilation to seconds. If a compilation exceeds the time limit, the
requests that wait for it are refused. It still runs to its end on its thread, which is not replaced
meanwhile, so no more than `workers` threads ever run. Grammars that wait behind it are refused when
their time is up, or immediately if the queue is full. The refusal says when to try again, based on
the rate at which grammars recently left the queue (`engine.fairness.drain_rate`).

The threads have large stacks (`root.start_with_stack`) and live as long as there is something to
compile. On Linux they have a lower priority than the engine's threads. Otherwise, with few CPUs,
each step would wait for its share of a CPU.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import sys
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, TypeVar

from engine.contract.errors import (
    CompileQueueFullError,
    EngineUnavailableError,
    HeadraceError,
    InvalidRequestError,
    UnsupportedFeatureError,
)
from engine.contract.request import MatcherFactory
from engine.contract.sampling_params import GrammarKind, GrammarParams, ReasoningParams
from engine.contract.types import NO_CALLER, CallerKey, TokenId
from engine.fairness.drain_rate import DrainRate
from engine.structured.compilation import CompiledRoot, compile_grammar
from engine.structured.matcher import CompiledGrammar, GrammarMatcher
from engine.structured.reasoning import hold_reasoning
from engine.structured.reasoning_marks import Marks, MarkTables
from engine.structured.root import start_with_stack
from engine.structured.vocabulary import Vocabulary, read_vocabulary
from engine.text import Tokenizer

logger = logging.getLogger(__name__)

_NICER = 5
"""How much nicer the threads are than the process. A thread then gets about a quarter of a CPU that
the engine wants. With less, large grammars could exceed their time limit if other processes want
the CPUs, too.
"""
_MOST_NICE = 19
"""The kernel's maximum."""
_MAX_CACHED_BYTES = 16 << 20
"""The limit on the text of all cached grammars. llguidance needs an unknown amount of additional
memory for each.
"""

_TAG_WEIGHT = 8
"""The weight of structural tags. Once compiled, they were seen to need up to 600 bytes per byte of
text.
"""

_Value = TypeVar("_Value")


class _Key(NamedTuple):
    """A cache key: what is compiled, and under which salt it may be shared. That is either a
    grammar without its reasoning, or the marks around reasoning, which all salts share.
    """

    salt: bytes
    wanted: GrammarParams | Marks


_Compiled = CompiledRoot | MarkTables


@dataclass(slots=True, eq=False)
class _Job:
    key: _Key
    caller: CallerKey
    group: CallerKey
    waiters: list[Future[_Compiled]] = field(default_factory=list)


class GrammarCompiler:
    """Compiles grammars for one model. All methods may be called from any thread."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        *,
        time_limit_s: float = 10.0,
        workers: int = 2,
        max_waiting: int = 64,
        max_cached: int = 256,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the compiler. `warm_up`, or otherwise the first grammar, reads the vocabulary.

        Args:
            tokenizer: the model's tokenizer, or None to refuse every grammar.
            vocab_size: V, the width of the logits.
            time_limit_s: seconds from `begin` after which a grammar is refused.
            workers: how many grammars are compiled at the same time.
            max_waiting: how many grammars may wait in the queue.
            max_cached: how many compiled grammars are kept.
            clock: monotonic seconds, used to advise when to try again.
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._time_limit_s = time_limit_s
        self._workers = workers
        self._max_waiting = max_waiting
        self._max_cached = max_cached
        self._lock = threading.Lock()
        self._vocabulary_lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._cache: OrderedDict[_Key, _Compiled] = OrderedDict()
        self._cached_bytes = 0
        self._jobs: dict[_Key, _Job] = {}
        self._queue: deque[_Job] = deque()
        self._running: list[_Job | None] = []  # an entry a worker; None: it looks for work
        self._last: _Job | None = None  # that had its turn
        self._drain_rate = DrainRate(clock)  # of the queue

    def warm_up(self) -> None:
        """Read the vocabulary, which takes up to several seconds and holds the interpreter's lock.
        If the tokenizer does not support structured output, the first grammar reports it.
        """
        with contextlib.suppress(UnsupportedFeatureError):
            self._read_vocabulary()

    def compile(
        self, params: GrammarParams, ending_token_ids: frozenset[TokenId]
    ) -> MatcherFactory:
        """Like `begin`, but wait for the result, at most until the time limit.

        Raises:
            InvalidRequestError, UnsupportedFeatureError, CompileQueueFullError: see `begin`.
        """
        return self.begin(params, ending_token_ids).result()

    def begin(
        self,
        params: GrammarParams,
        ending_token_ids: frozenset[TokenId],
        salt: bytes = b"",
        caller: CallerKey = NO_CALLER,
        group: CallerKey = NO_CALLER,
    ) -> Future[MatcherFactory]:
        """Start to compile a grammar, or find it in the cache. Does not block.

        Args:
            params: the grammar.
            ending_token_ids: the ids that end the request's output.
            salt: compiled grammars are shared only under the same salt.
            caller, group: who asked for the grammar, and which callers share entries in the queue.
                With NO_CALLER, the caller is a separate group.

        Returns:
            A future of the factory of the request's matchers, or of the error with which to refuse
            it: InvalidRequestError (the grammar is wrong, empty, too complex, or takes too long),
            UnsupportedFeatureError (the tokenizer is missing or of an unsupported kind),
            CompileQueueFullError (too many wait; try again), EngineUnavailableError (the system
            refuses a thread; try again). It may be cancelled.
        """
        result: Future[MatcherFactory] = Future()
        group = caller if group == NO_CALLER else group
        reasoning = params.reasoning
        forms: list[GrammarParams | Marks] = []
        if params.kind is not GrammarKind.FREE:
            forms.append(_form_of(params))
        if reasoning is not None:
            forms.append(_marks_of(reasoning))
        found: list[_Compiled] = []

        def go_on() -> None:
            """Compile the next item, or create the factory once all are compiled."""
            if len(found) == len(forms):
                try:
                    factory = self._factory(params, salt, ending_token_ids, found)
                except Exception as error:
                    _fail(result, error)
                else:
                    _succeed(result, factory)
                return
            wanted = forms[len(found)]
            own_salt = salt if isinstance(wanted, GrammarParams) else b""
            compiling = self._find(_Key(own_salt, wanted), caller, group)
            result.add_done_callback(lambda done: compiling.cancel() if done.cancelled() else None)
            compiling.add_done_callback(take)

        def take(done: Future[_Compiled]) -> None:
            if done.cancelled():
                return
            if (error := done.exception()) is not None:
                _fail(result, error)
                return
            found.append(done.result())
            go_on()

        go_on()
        return result

    def _factory(
        self,
        params: GrammarParams,
        salt: bytes,
        ending_token_ids: frozenset[TokenId],
        found: list[_Compiled],
    ) -> MatcherFactory:
        """Return the factory of a request's matchers, from everything that was compiled for it."""
        vocabulary = self._read_vocabulary()
        make_form: Callable[[], GrammarMatcher] | None = None
        notes: tuple[str, ...] = ()
        for compiled in found:
            if isinstance(compiled, CompiledRoot):
                notes = compiled.notes
                key = _Key(salt, _form_of(params))
                make_form = CompiledGrammar(
                    params.kind,
                    compiled.root,
                    self._vocab_size,
                    ending_token_ids,
                    tuple(filter(vocabulary.spellings.is_special, ending_token_ids)),
                    expected_s=compiled.token_s,
                    lost=partial(self._forget, key, compiled),
                    tokenize=self._tokens_of,
                ).make_matcher
        for compiled in found:
            if isinstance(compiled, MarkTables) and params.reasoning is not None:
                held = hold_reasoning(
                    params.reasoning, compiled, vocabulary, ending_token_ids, make_form
                )
                return MatcherFactory(held.make_matcher, notes)
        if make_form is None:
            raise ValueError("nothing was compiled")
        return MatcherFactory(make_form, notes)

    def _tokens_of(self, text: str) -> Sequence[int]:
        if self._tokenizer is None:
            return ()
        return self._tokenizer.encode(text, add_special_tokens=False)

    # ---- cache and queue -----------------------------------------------------------------------

    def _find(self, key: _Key, caller: CallerKey, group: CallerKey) -> Future[_Compiled]:
        """Find what is to be compiled in the cache, or queue it with its time limit."""
        waiter: Future[_Compiled] = Future()
        displaced: _Job | None = None
        full: CompileQueueFullError | None = None
        with self._lock:
            if (cached := self._cache.get(key)) is not None:
                self._cache.move_to_end(key)
                waiter.set_result(cached)
                return waiter
            job = self._jobs.get(key)
            if job is None:
                self._drop_deserted()
                if len(self._queue) >= self._max_waiting:
                    full = self._full()
                    displaced = self._displace_for(caller, group)
                    if displaced is None:
                        _fail(waiter, full)
                        return waiter
                if not self._queue:
                    self._drain_rate.begin()
                job = self._jobs[key] = _Job(key, caller, group)
                self._queue.append(job)
                if len(self._running) < self._workers:
                    self._start_worker()
                if not self._running:  # else one that is there takes it, once it is free
                    self._leave_queue(job)
                    _fail(waiter, _no_thread())
                    return waiter
            job.waiters.append(waiter)
        if displaced is not None and full is not None:
            for left in displaced.waiters:
                _fail(left, full)
        timer = threading.Timer(self._time_limit_s, self._overrun, (job, waiter))
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError:  # without it, nothing would bound the wait
            _fail(waiter, _no_thread())
        waiter.add_done_callback(lambda _: timer.cancel())
        return waiter

    def _start_worker(self) -> None:
        self._running.append(None)
        try:
            start_with_stack(self._work)
        except (RuntimeError, MemoryError) as error:
            self._running.remove(None)
            logger.error("a thread that compiles grammars could not be started: %s", error)

    def _drop_deserted(self) -> None:
        """Drop queued grammars that no request waits for any more."""
        for job in [job for job in self._queue if all(w.done() for w in job.waiters)]:
            self._leave_queue(job)

    def _full(self, waited_s: float = 0.0) -> CompileQueueFullError:
        """Return the error for a grammar that found no room in the queue, or waited `waited_s` in
        vain.
        """
        present = len(self._queue)
        missing = present if waited_s else present + 1 - self._max_waiting
        delay = self._drain_rate.advise(missing, 1)
        return CompileQueueFullError(self._max_waiting, delay, present, waited_s)

    def _displace_for(self, caller: CallerKey, group: CallerKey) -> _Job | None:
        """Remove a job from the full queue to make room.

        The job is taken from the group with the most jobs if that has at least two more than this
        group, otherwise from this group. Within that group, it is the last job of the caller with
        the most jobs. If that is this group, the caller must have at least two more jobs than this
        one. Return the job, or None if there is no such caller.
        """
        groups = Counter(job.group for job in self._queue)
        crowd, most = groups.most_common(1)[0]
        is_of_others = most >= groups[group] + 2
        jobs = [job for job in self._queue if job.group == (crowd if is_of_others else group)]
        callers = Counter(job.caller for job in jobs)
        if not callers:
            return None
        busiest, number = callers.most_common(1)[0]
        if not is_of_others and number < callers[caller] + 2:
            return None
        job = next(job for job in reversed(jobs) if job.caller == busiest)
        self._leave_queue(job)
        return job

    def _leave_queue(self, job: _Job) -> None:
        self._queue.remove(job)
        del self._jobs[job.key]

    def _take_next(self) -> _Job | None:
        """Return the next job for a worker: the first one of a group that has no job in progress
        and was not served last. If there is none, the same rule is applied to callers. Otherwise,
        it is the first job of all.
        """
        self._drop_deserted()
        if not self._queue:
            return None
        served = [job for job in (*self._running, self._last) if job is not None]
        groups, callers = {job.group for job in served}, {job.caller for job in served}
        by_caller = (job for job in self._queue if job.caller not in callers)
        by_group = (job for job in self._queue if job.group not in groups)
        job = next(by_group, None) or next(by_caller, self._queue[0])
        self._queue.remove(job)
        self._drain_rate.left()
        self._last = job
        return job

    def _forget(self, key: _Key, root: CompiledRoot) -> None:
        """Drop a grammar whose lexer is lost, so that the next request starts with a new one."""
        with self._lock:
            if self._cache.get(key) is root:
                del self._cache[key]
                self._cached_bytes -= _size(key.wanted)

    def _overrun(self, job: _Job, waiter: Future[_Compiled]) -> None:
        error: HeadraceError
        with self._lock:
            if job in self._queue:
                error = self._full(self._time_limit_s)
            else:
                error = InvalidRequestError(
                    _field(job.key.wanted),
                    f"takes longer than {self._time_limit_s:g} s to compile; make it smaller",
                )
        _fail(waiter, error)

    # ---- the worker threads --------------------------------------------------------------------

    def _work(self) -> None:
        _give_way()
        while True:
            with self._lock:
                job = self._take_next()
                self._running.remove(None)
                if job is None:
                    return
                self._running.append(job)
            root: _Compiled | None = None
            error: BaseException | None = None
            try:
                root = self._compile(job.key.wanted)
            except HeadraceError as refusal:
                error = refusal
            except BaseException as failure:  # a panic in Rust is not an Exception
                error_id = secrets.token_hex(6)
                logger.error("error %s: a grammar failed to compile", error_id, exc_info=failure)
                error = InvalidRequestError(
                    _field(job.key.wanted),
                    f"cannot be compiled (error {error_id})",
                )
            with self._lock:
                self._running.remove(job)
                self._running.append(None)
                del self._jobs[job.key]
                if root is not None:
                    self._keep(job.key, root)
            for waiter in job.waiters:
                if root is not None:
                    _succeed(waiter, root)
                elif error is not None:
                    _fail(waiter, error)

    def _compile(self, wanted: GrammarParams | Marks) -> _Compiled:
        vocabulary = self._read_vocabulary()
        if isinstance(wanted, Marks):
            return MarkTables(wanted, vocabulary.spellings)
        return compile_grammar(wanted, vocabulary, self._vocab_size)

    def _read_vocabulary(self) -> Vocabulary:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = read_vocabulary(self._tokenizer, self._vocab_size)
            return self._vocabulary

    def _keep(self, key: _Key, root: _Compiled) -> None:
        """Put a grammar into the cache, and drop the least recently used ones if it is full."""
        self._cache[key] = root
        self._cached_bytes += _size(key.wanted)
        while len(self._cache) > self._max_cached or self._cached_bytes > _MAX_CACHED_BYTES:
            oldest, _ = self._cache.popitem(last=False)
            self._cached_bytes -= _size(oldest.wanted)


def _form_of(params: GrammarParams) -> GrammarParams:
    """Return the grammar without its reasoning, as it is compiled and shared."""
    return params if params.reasoning is None else replace(params, reasoning=None)


def _marks_of(reasoning: ReasoningParams) -> Marks:
    return Marks(reasoning.opening, reasoning.closing, reasoning.then, reasoning.max_blanks)


def _field(wanted: GrammarParams | Marks) -> str:
    """The engine's name of the field that requested it."""
    return "grammar.reasoning" if isinstance(wanted, Marks) else wanted.field


def _size(wanted: GrammarParams | Marks) -> int:
    """How much it counts against _MAX_CACHED_BYTES."""
    if isinstance(wanted, Marks):
        return 0
    weight = _TAG_WEIGHT if wanted.kind is GrammarKind.STRUCTURAL_TAG else 1
    return weight * (len(wanted.text) + sum(map(len, wanted.choices)))


def _succeed(future: Future[_Value], value: _Value) -> None:
    """Set a result, unless the future is already done or cancelled."""
    with contextlib.suppress(InvalidStateError):
        future.set_result(value)


def _fail(future: Future[_Value], error: BaseException) -> None:
    with contextlib.suppress(InvalidStateError):
        future.set_exception(error)


def _give_way() -> None:
    """Lower this thread's priority, on systems with a separate priority for each thread."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        nice = min(_MOST_NICE, os.getpriority(os.PRIO_PROCESS, thread) + _NICER)
        os.setpriority(os.PRIO_PROCESS, thread, nice)


def _no_thread() -> EngineUnavailableError:
    return EngineUnavailableError(
        "the system has no thread left to compile the form of output; try again"
    )
