"""A compiled grammar at its start, the lexer that its matchers share, and the recovery when that is
lost.

llguidance's copies of a matcher share one lexer. Its states are created on demand, and a state
created for one matcher costs the others nothing. But when a step of one matcher takes the lexer to
a limit, it never recovers, and no copy can continue, at whatever position it is. So each continues
with a different lexer:

    a matcher finds the lexer lost ─▶ the grammar is compiled again, once for all of them
                                   ─▶ each replays its tokens, at a few microseconds per token

Masks are due when this happens, so the step waits for both; both are bounded. A matcher for which
no time is left cannot continue.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial

from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger(__name__)

RENEWAL_S = 0.1
"""The total time, in seconds, that steps may wait for one root to be compiled again."""
CATCH_UP_S = 0.05
"""The total CPU time, in seconds, that the matchers of one root may take to replay their tokens."""
_STACK_BYTES = 256 << 20
"""The address space of a stack; unused memory is not allocated. Within the limits on a grammar's
size, no chain of definitions that was tried needs more than a quarter of it; 8 MB overflow.
"""
_CHUNK = 32
"""How many tokens are replayed at a time. The lexer's fuel applies to what follows a mask."""


class Root:
    """A compiled grammar at its start. Once created, it is used on one thread only.

    Attributes:
        matcher: at the start; never advanced.
        is_lost: whether its lexer is known to be lost.
    """

    __slots__ = ("_catch_up_s", "_make", "_next", "_renewal_s", "_tokens", "is_lost", "matcher")

    def __init__(self, make: Callable[[], LLMatcher], tokens: LLTokenizer) -> None:
        """Compile the grammar. `make`: compiles it, each time with a new lexer. `tokens`: the
        vocabulary.
        """
        self.matcher = make()
        self.is_lost = False
        self._make = make
        self._tokens = tokens
        self._next: Future[Root | None] | None = None
        self._renewal_s = RENEWAL_S
        self._catch_up_s = CATCH_UP_S

    def text_of(self, tokens: Sequence[int]) -> str:
        """Return the text that tokens write."""
        return self._tokens.decode_bytes(list(tokens)).decode("utf-8", "replace")

    def check(self) -> bool:
        """Check whether the lexer is lost."""
        if not self.is_lost:
            probe = self.matcher.deep_copy()
            probe.compute_bitmask()
            self.is_lost = is_lexer_error(probe)
        return self.is_lost

    def living(self) -> Root | None:
        """Return this root, or the one that was compiled again after its lexer was lost. None if
        that takes too long.
        """
        root: Root | None = self
        while root is not None and root.is_lost:
            root = root._compiled_again()
        return root

    def follow(self, tokens: Sequence[int]) -> LLMatcher | None:
        """Return a matcher that has consumed the given tokens. None if the lexer was lost on the
        way, or if no time was left.
        """
        matcher = self.matcher.deep_copy()
        begin = time.thread_time()
        for start in range(0, len(tokens), _CHUNK):
            if self._catch_up_s < time.thread_time() - begin:
                return None
            matcher.compute_bitmask()
            if not matcher.consume_tokens(list(tokens[start : start + _CHUNK])):
                self.check()
                return None
        self._catch_up_s -= time.thread_time() - begin
        return matcher

    def _compiled_again(self) -> Root | None:
        begin = time.monotonic()
        if self._next is None:
            self._next = Future()
            try:
                start_with_stack(partial(_compile, self._next, self._make, self._tokens))
            except (RuntimeError, MemoryError) as error:  # the system refuses a thread
                logger.error("a thread that compiles grammars could not be started: %s", error)
                self._next.set_result(None)
        try:
            return self._next.result(max(0.0, self._renewal_s))
        except FutureTimeout:
            return None
        finally:
            self._renewal_s -= time.monotonic() - begin


def _compile(
    compiling: Future[Root | None], make: Callable[[], LLMatcher], tokens: LLTokenizer
) -> None:
    root = None
    try:
        root = Root(make, tokens)
    except BaseException as error:  # a panic in Rust is not an Exception
        logger.error("a grammar that was compiled before failed to compile", exc_info=error)
    finally:
        compiling.set_result(root)


def is_lexer_error(matcher: LLMatcher) -> bool:
    """Whether a matcher cannot continue because of the lexer that it shares."""
    return "lexer error" in matcher.get_error()


_stack_lock = threading.Lock()


def start_with_stack(target: Callable[[], None]) -> None:
    """Start a daemon thread with a stack that is large enough to compile grammars. llguidance
    follows definitions that refer to each other recursively.

    The size is a process-wide setting for new threads. A thread that happens to start at the same
    time gets more address space than it needs, which does no harm.
    """
    thread = threading.Thread(target=target, name="headrace-grammar", daemon=True)
    with _stack_lock:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
