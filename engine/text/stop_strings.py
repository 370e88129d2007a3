"""Finds a request's stop strings in its text, across deltas, and holds back what may become one.

Text comes in deltas. After each character, the matcher knows the longest suffix of the text that is
a prefix of some stop string. That is the state of an Aho-Corasick automaton, which takes one step
per character, however many strings there are. The suffix is held back; everything before it can be
released.

The first match to be completed counts. If several are completed by the same character, the longest
one counts. The text ends before the match, or after it with `include_stop`.

A match that is completed before there are `min_tokens` tokens is ignored: the text continues, and a
later match may share characters with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string that was found. `num_tokens`: the number of output tokens up to its last
    character.
    """

    stop_string: str
    num_tokens: int


@dataclass(slots=True)
class _State:
    """A state of the automaton: the suffix of the text that is a prefix of some stop string.

    Attributes:
        depth: the length of the suffix in characters.
        next: character → the state with this character appended.
        fail: the state of its longest proper suffix that is also such a prefix; None for the empty
            suffix.
        stop: the longest stop string that ends here; empty if there is none.
        live: what must be held back: this state, or the first one along `fail` that can still grow.
    """

    depth: int
    next: dict[str, _State] = field(default_factory=dict)
    fail: _State | None = None
    stop: str = ""
    live: _State | None = None


class StopStrings:
    """The automaton for a set of stop strings. It never changes, so the outputs of a request share
    it. It takes a few hundred bytes per character.

    Attributes:
        root: the initial state, in which nothing is recognised.
        first: the first characters of the strings.
    """

    __slots__ = ("first", "root")

    def __init__(self, stop_strings: Sequence[str]) -> None:
        """`stop_strings`: the strings; none may be empty (`sampling_params.check_stop_strings`)."""
        self.root = _automaton(stop_strings)
        self.first = frozenset(self.root.next)


class StopMatcher:
    """Finds stop strings in the text of one output. Not thread-safe."""

    __slots__ = ("_first", "_held", "_include_stop", "_match", "_min_tokens", "_root", "_state")

    def __init__(
        self,
        stop_strings: StopStrings | Sequence[str],
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """Begin an output.

        Args:
            stop_strings: the strings to look for; see `StopStrings`.
            include_stop: whether the stop string is part of the text.
            min_tokens: matches that complete with fewer output tokens are ignored.
        """
        if not isinstance(stop_strings, StopStrings):
            stop_strings = StopStrings(stop_strings)
        self._root = stop_strings.root
        self._first = stop_strings.first
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._state = self._root
        self._held = ""  # the last self._state.depth characters
        self._match: StopMatch | None = None

    def push(self, text: str, num_tokens: int) -> tuple[str, StopMatch | None]:
        """Add text and return what can be released. `num_tokens`: the output tokens so far.

        Text after a match is dropped, and nothing more is released.
        """
        if self._match is not None or not text:
            return "", None
        root = self._root
        state = self._state
        if state is root and self._first.isdisjoint(text):
            return text, None
        buffer = self._held + text
        start = len(self._held)
        watching = num_tokens >= self._min_tokens
        for index, character in enumerate(text, start + 1):
            state = _step(state, character, root)
            if state.stop and watching:
                self._match = StopMatch(state.stop, num_tokens)
                self._state, self._held = root, ""
                end = index if self._include_stop else index - len(state.stop)
                return buffer[:end], self._match
            state = state.live or root
        self._state = state
        cut = len(buffer) - state.depth
        self._held = buffer[cut:]
        return buffer[:cut], None

    def flush(self) -> str:
        """End the output, and return what was held back, because it is not a stop string after
        all.
        """
        held, self._held, self._state = self._held, "", self._root
        return held


def _step(state: _State, character: str, root: _State) -> _State:
    """Return the state after one more character."""
    current: _State | None = state
    while current is not None:
        following = current.next.get(character)
        if following is not None:
            return following
        current = current.fail
    return root


def _automaton(stop_strings: Sequence[str]) -> _State:
    """Return the automaton's root: the initial state, in which nothing is recognised."""
    root = _State(0)
    root.live = root
    for stop_string in stop_strings:
        state = root
        for character in stop_string:
            state = state.next.setdefault(character, _State(state.depth + 1))
        if state is not root:
            state.stop = stop_string
    # Breadth first: the states along `fail` are shorter, so they are complete when they are looked
    # at.
    queue = deque([root])
    while queue:
        state = queue.popleft()
        for character, child in state.next.items():
            child.fail = root if state.fail is None else _step(state.fail, character, root)
            child.stop = child.stop or child.fail.stop
            child.live = child if child.next else child.fail.live
            queue.append(child)
    return root
