"""Compiles grammars beside the engine: on threads of their own, within bounds, each once.

    any thread ── begin ──▶ cache? ──▶ done at once
                              │ no
                              ▼
                            queue ──▶ at most `workers` threads ──▶ cache, and all that wait for it

llguidance compiles without the interpreter's lock, and cannot be interrupted. Its own limits, and
the checks of `source`, keep a compilation at seconds. Should one take longer than the time limit,
whoever waits for it is refused; it goes on on its thread until it ends, and the thread is not
replaced meanwhile, so that no more than `workers` ever run. What waits behind it is refused in turn
when its own time is up, or at once when the queue is full.

The threads have large stacks, because llguidance follows definitions that refer to each other by
recursion. They live as long as there is something to compile.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from engine.errors import EngineUnavailableError, HeadraceError, InvalidRequestError
from engine.request import TokenMatcher
from engine.sampling_params import GrammarKind, GrammarParams
from engine.structured.matcher import CompiledGrammar, GrammarMatcher
from engine.structured.messages import explain
from engine.structured.source import to_lark
from engine.structured.vocabulary import read_vocabulary
from engine.text import Tokenizer
from engine.types import TokenId

logger = logging.getLogger(__name__)

_STACK_BYTES = 256 << 20
"""Of address space; what is not used takes no memory. No chain of definitions that was
tried within the bounds of a grammar's size needs more than a quarter of it; 8 MB overflow.
"""
_LEXER_FUEL = 200_000
"""What building the lexer may cost: large enough for thousands of strings to choose from."""
_LARK_LEXER_FUEL = 50_000
"""The same of Lark grammars, whose terminals double with every line where they use others twice:
at this bound a compilation takes at most about a second and 250 MB.
"""
_MAX_CACHED_BYTES = 16 << 20
"""Of the cached grammars' own texts; what llguidance holds of one is larger and not known."""

MatcherFactory = Callable[[], TokenMatcher]
_Value = TypeVar("_Value")


@dataclass(slots=True, eq=False)
class _Job:
    params: GrammarParams
    waiters: list[Future[LLMatcher]] = field(default_factory=list)


class GrammarCompiler:
    """Compiles forms for one model. All methods may be called from any thread."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        *,
        time_limit_s: float = 10.0,
        workers: int = 2,
        max_waiting: int = 64,
        max_cached: int = 256,
    ) -> None:
        """Prepare; the vocabulary is read when the first grammar comes.

        Args:
            tokenizer: the model's; None: every grammar is refused.
            vocab_size: V, the width of the logits.
            time_limit_s: seconds from `begin` after which a grammar is refused.
            workers: how many are compiled at the same time.
            max_waiting: how many may wait for their turn.
            max_cached: how many compiled ones are kept.
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._time_limit_s = time_limit_s
        self._workers = workers
        self._max_waiting = max_waiting
        self._max_cached = max_cached
        self._lock = threading.Lock()
        self._vocabulary_lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._cache: OrderedDict[GrammarParams, LLMatcher] = OrderedDict()
        self._cached_bytes = 0
        self._jobs: dict[GrammarParams, _Job] = {}
        self._queue: deque[_Job] = deque()
        self._running = 0

    def compile(
        self, params: GrammarParams, ending_token_ids: frozenset[TokenId]
    ) -> MatcherFactory:
        """`begin`, and wait for it, at most the time limit.

        Raises:
            InvalidRequestError, UnsupportedFeatureError, EngineUnavailableError: see `begin`.
        """
        return self.begin(params, ending_token_ids).result()

    def begin(
        self, params: GrammarParams, ending_token_ids: frozenset[TokenId]
    ) -> Future[MatcherFactory]:
        """Begin to compile a form, or find it in the cache. Does not block.

        Args:
            params: the form.
            ending_token_ids: the ids that end the request's output.

        Returns:
            What makes the matchers of the request, or the error for which it is refused:
            InvalidRequestError (the form is wrong, empty, too complex, or takes too long),
            UnsupportedFeatureError (the tokenizer is missing or of a kind that cannot be
            followed), EngineUnavailableError (others are being compiled; try again). It may be
            cancelled.
        """
        result: Future[MatcherFactory] = Future()
        root = self._root(params)

        def take(done: Future[LLMatcher]) -> None:
            if (error := done.exception()) is not None:
                _fail(result, error)
                return
            grammar = CompiledGrammar(done.result(), self._vocab_size, ending_token_ids)
            _succeed(result, grammar.make_matcher)

        def leave(done: Future[MatcherFactory]) -> None:
            if done.cancelled():
                root.cancel()

        result.add_done_callback(leave)
        root.add_done_callback(lambda done: None if done.cancelled() else take(done))
        return result

    # ---- cache and queue -----------------------------------------------------------------------

    def _root(self, params: GrammarParams) -> Future[LLMatcher]:
        """A place in the line for a form, with the time limit on it."""
        waiter: Future[LLMatcher] = Future()
        with self._lock:
            if (cached := self._cache.get(params)) is not None:
                self._cache.move_to_end(params)
                waiter.set_result(cached)
                return waiter
            job = self._jobs.get(params)
            if job is None:
                self._drop_deserted()
                if len(self._queue) >= self._max_waiting:
                    waiter.set_exception(
                        EngineUnavailableError(
                            "structured_output: too many forms are waiting to be compiled; "
                            "try again later"
                        )
                    )
                    return waiter
                job = self._jobs[params] = _Job(params)
                self._queue.append(job)
                if self._running < self._workers:
                    self._running += 1
                    _start_with_stack(self._work, _STACK_BYTES)
            job.waiters.append(waiter)
        timer = threading.Timer(self._time_limit_s, self._overrun, (job, waiter))
        timer.daemon = True
        timer.start()
        waiter.add_done_callback(lambda _: timer.cancel())
        return waiter

    def _drop_deserted(self) -> None:
        """Forget what waits for its turn, but nobody waits for any more."""
        for job in [job for job in self._queue if all(w.done() for w in job.waiters)]:
            self._queue.remove(job)
            del self._jobs[job.params]

    def _overrun(self, job: _Job, waiter: Future[LLMatcher]) -> None:
        with self._lock:
            has_begun = job not in self._queue
        error: HeadraceError
        if has_begun:
            error = InvalidRequestError(
                f"structured_output.{job.params.kind.value}",
                f"takes longer than {self._time_limit_s:g} s to compile; make it smaller",
            )
        else:
            error = EngineUnavailableError(
                "structured_output: other forms are still being compiled; try again later"
            )
        _fail(waiter, error)

    # ---- the worker threads --------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._lock:
                self._drop_deserted()
                job = self._queue.popleft() if self._queue else None
                if job is None:
                    self._running -= 1
                    return
            root: LLMatcher | None = None
            error: BaseException | None = None
            try:
                root = self._compile(job.params)
            except HeadraceError as refusal:
                error = refusal
            except BaseException as failure:  # a panic in Rust is no Exception
                error_id = secrets.token_hex(6)
                logger.error("error %s: a grammar failed to compile", error_id, exc_info=failure)
                error = InvalidRequestError(
                    f"structured_output.{job.params.kind.value}",
                    f"cannot be compiled (error {error_id})",
                )
            with self._lock:
                del self._jobs[job.params]
                if root is not None:
                    self._keep(job.params, root)
            for waiter in job.waiters:
                if root is not None:
                    _succeed(waiter, root)
                elif error is not None:
                    _fail(waiter, error)

    def _compile(self, params: GrammarParams) -> LLMatcher:
        """Compile a form and take its first step, which shows whether it can be followed at all."""
        vocabulary = self._read_vocabulary()
        source = LLMatcher.grammar_from_lark(to_lark(params))
        root = LLMatcher(vocabulary, source, log_level=0, limits=_limits(params.kind))
        field_name = f"structured_output.{params.kind.value}"
        if root.is_error():
            raise InvalidRequestError(field_name, explain(params.kind, root.get_error()))
        if GrammarMatcher(root, self._vocab_size, frozenset()).can_go_on():
            return root
        if root.is_error() and "NoExtension" not in root.get_error():
            raise InvalidRequestError(field_name, explain(params.kind, root.get_error()))
        if root.is_accepting():
            raise InvalidRequestError(
                field_name, "matches the empty text alone, so that nothing could be generated"
            )
        raise InvalidRequestError(
            field_name, "matches no text, or none that this model's tokens can write"
        )

    def _read_vocabulary(self) -> LLTokenizer:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = read_vocabulary(self._tokenizer, self._vocab_size)
            return self._vocabulary

    def _keep(self, params: GrammarParams, root: LLMatcher) -> None:
        """Put a grammar into the cache; the ones that were not used for longest go."""
        self._cache[params] = root
        self._cached_bytes += _size(params)
        while len(self._cache) > self._max_cached or self._cached_bytes > _MAX_CACHED_BYTES:
            oldest, _ = self._cache.popitem(last=False)
            self._cached_bytes -= _size(oldest)


def _limits(kind: GrammarKind) -> LLParserLimits:
    return LLParserLimits(
        initial_lexer_fuel=_LARK_LEXER_FUEL if kind is GrammarKind.LARK else _LEXER_FUEL,
        # A few milliseconds each, since the steps are taken on the engine's thread.
        step_lexer_fuel=50_000,
        step_max_items=10_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def _size(params: GrammarParams) -> int:
    return len(params.text) + sum(map(len, params.choices))


def _succeed(future: Future[_Value], value: _Value) -> None:
    """Set a result, unless the future was cancelled or settled before."""
    with contextlib.suppress(InvalidStateError):
        future.set_result(value)


def _fail(future: Future[_Value], error: BaseException) -> None:
    with contextlib.suppress(InvalidStateError):
        future.set_exception(error)


_stack_lock = threading.Lock()


def _start_with_stack(target: Callable[[], None], stack_bytes: int) -> None:
    """Start a daemon thread with a stack of its own size.

    The size is a setting of the process that new threads read; one that happens to start at the
    same time gets more address space than it needs, which does no harm.
    """
    thread = threading.Thread(target=target, name="headrace-grammar", daemon=True)
    with _stack_lock:
        before = threading.stack_size(stack_bytes)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
