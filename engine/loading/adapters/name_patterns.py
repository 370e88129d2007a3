"""Matches names with regular expressions, in bounded time.

    pattern ─▶ Python's own parser ─▶ tree ─▶ the set of places where a match may end

Python's matcher goes back and tries again, for ever with some patterns. Here each part of a pattern
is given all places where it may begin and returns all places where it may end, so nothing is tried
twice. What needs more than that, such as references to groups and looking ahead, is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

_parser: Any = re._parser  # type: ignore[attr-defined]  # the only one that reads as `re` does
MAX_PATTERN = 4096
"""The maximum length of a pattern, in characters."""
_MAX_REPEATS = 1000
"""The maximum number of a pattern's repetitions that is counted."""
_MAX_WORK = 200_000
"""The maximum work for one name: places that parts of a pattern were given."""

_Places = frozenset[int]
_NOWHERE: _Places = frozenset()
_CATEGORIES: dict[str, Callable[[str], bool]] = {
    "category_digit": str.isdecimal,
    "category_space": str.isspace,
    "category_word": lambda one: one.isalnum() or one == "_",
}


class NamePatternError(Exception):
    """A pattern is not one that can be matched here. The message completes a sentence."""


class NamePattern:
    """A regular expression."""

    def __init__(self, pattern: str) -> None:
        """Read a pattern.

        Raises:
            NamePatternError: it is too long, no regular expression, or uses what is not matched.
        """
        if len(pattern) > MAX_PATTERN:
            raise NamePatternError(
                f"has {len(pattern)} characters; at most {MAX_PATTERN} are allowed"
            )
        try:
            parsed = _parser.parse(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise NamePatternError(f"is no regular expression: {str(error)[:80]}") from error
        if parsed.state.flags & ~re.UNICODE:
            raise NamePatternError("sets flags, which are not supported: leave them out")
        self._tree = parsed
        self._name, self._work = "", 0
        self.fits("")  # all kinds of parts are looked at, whatever the name

    def fits(self, name: str) -> bool:
        """Return whether the whole name matches, as `re.fullmatch` says.

        Raises:
            NamePatternError: this takes too much work.
        """
        self._name, self._work = name, 0
        try:
            return len(name) in self._sequence(self._tree, frozenset({0}))
        except RecursionError as error:
            raise NamePatternError("is nested too deeply") from error

    def _sequence(self, parts: Iterable[Any], places: _Places) -> _Places:
        for kind, value in parts:
            places = self._part(str(kind).lower(), value, places)
        return places

    def _part(self, kind: str, value: Any, places: _Places) -> _Places:
        self._work += 1 + len(places)
        if self._work > _MAX_WORK:
            raise NamePatternError("takes too much work to match; write a simpler one, or a list")
        match kind:
            case "literal" | "not_literal" | "any" | "in":
                name = self._name
                fits = [at < len(name) and _is_one(kind, value, name[at]) for at in places]
                return frozenset(at + 1 for at, fit in zip(places, fits, strict=True) if fit)
            case "branch":
                return _NOWHERE.union(*(self._sequence(one, places) for one in value[1]))
            case "subpattern":
                _, added, removed, inner = value
                if added or removed:
                    raise NamePatternError("sets flags, which are not supported: leave them out")
                return self._sequence(inner, places)
            case "max_repeat" | "min_repeat":
                least, most, inner = value
                return self._repeated(least, most, inner, places)
            case "at":
                return frozenset(at for at in places if self._is_at(str(value).lower(), at))
        raise NamePatternError(
            f"uses {kind.replace('_', ' ')}, which is not supported: leave it out"
        )

    def _repeated(self, least: int, most: Any, inner: Sequence[Any], places: _Places) -> _Places:
        if least > _MAX_REPEATS:
            raise NamePatternError(
                f"repeats a part {least} times; at most {_MAX_REPEATS} are counted"
            )
        for _ in range(least):
            places = self._sequence(inner, places)
        found, last = places, places
        if not places:
            self._sequence(inner, places)  # only to look at its kinds
        for _ in range(min(int(most), len(self._name) + 1) - least):
            last = self._sequence(inner, last) - found
            if not last:
                break
            found |= last
        return found

    def _is_at(self, kind: str, at: int) -> bool:
        name = self._name
        match kind:
            case "at_beginning" | "at_beginning_string":
                return at == 0
            case "at_end" | "at_end_string":
                return at == len(name)
            case "at_boundary" | "at_non_boundary":
                is_word = _CATEGORIES["category_word"]
                before = at > 0 and is_word(name[at - 1])
                after = at < len(name) and is_word(name[at])
                return (before != after) == (kind == "at_boundary")
        raise NamePatternError(f"uses {kind}, which is not supported: leave it out")


def _is_one(kind: str, value: Any, letter: str) -> bool:
    match kind:
        case "any":
            return letter != "\n"
        case "literal":
            return bool(ord(letter) == value)
        case "not_literal":
            return bool(ord(letter) != value)
        case "in":
            negated = bool(value) and str(value[0][0]).lower() == "negate"
            members = value[1:] if negated else value
            return negated != any(_is_one(str(k).lower(), v, letter) for k, v in members)
        case "range":
            return bool(value[0] <= ord(letter) <= value[1])
        case "category":
            name = str(value).lower()
            plain = name.replace("_not_", "_")
            if plain in _CATEGORIES:
                return _CATEGORIES[plain](letter) != (name != plain)
    raise NamePatternError(f"uses {kind} {value}, which is not supported: leave it out")
