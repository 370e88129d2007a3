r"""Rewrites patterns of a schema in a way that llguidance can enforce.

If a character class contains all control characters, llguidance also adds the quote and the
backslash as they are written in JSON: `[^"]` would match `\"`. So NUL, which JSON generated here
never contains, is left out of negated classes.

llguidance does not support look-around either, but a schema's patterns may be combined. A
look-ahead at the beginning of a string applies to the whole string, and so does a look-behind at
its end:

    ^(?=A)(?!B)REST(?<!C)$  ─▶  ^REST$,  ^(?:A),  what does not match ^B,  what does not end with C

The same applies to a look-ahead after a prefix of known length: its pattern then begins with that
many arbitrary characters. Look-around elsewhere is refused, and so are B and C if their complement
cannot be computed (`complement`).
"""

from __future__ import annotations

import re

from engine.structured.complement import PatternError, complement, fixed_length

MAX_COMPLEMENTS = 32
"""The most different complements of one grammar; each takes up to a few milliseconds to compute."""
MAX_CHARACTERS = 4096
"""The longest pattern with look-around."""
REMEDY = (
    "look-aheads are held in no group, at the beginning or behind a part of one length, and "
    "look-behinds in front of the final $; write it so, or without look-around"
)

_ANY_LOOK = re.compile(r"\(\?<?[=!]")
_LOOK_AHEAD = re.compile(r"\(\?[=!]")
_LOOK_BEHIND = re.compile(r"\(\?<([=!])")


def exact(pattern: str) -> str:
    """Return the pattern with NUL left out of its negated classes."""
    parts, begin = [], 0
    for place, character in _tokens(pattern):
        if character == "[" and pattern.startswith("[^", place):
            parts.append(pattern[begin : place + 2])
            begin = place + 2
            if pattern.startswith("-", begin):  # not a range from NUL
                parts[-1] += "\0\\-"
                begin += 1
            else:
                parts[-1] += "\0"
    return "".join([*parts, pattern[begin:]])


def has_look_around(pattern: str) -> bool:
    """Whether a pattern may have look-around."""
    return _ANY_LOOK.search(pattern) is not None


class LookArounds:
    """Rewrites the patterns of one grammar; computes equal complements only once."""

    def __init__(self) -> None:
        self._complements: dict[str, str] = {}

    def without(self, pattern: str) -> tuple[list[str], bool]:
        """Return the patterns that together replace this one, and whether they are stricter. They
        are if the pattern could match anywhere, and now must match at the beginning of the string.

        Raises:
            PatternError: its look-around cannot be enforced; the text says why, without the remedy.
        """
        if len(pattern) > MAX_CHARACTERS:
            raise PatternError(f"has more than {MAX_CHARACTERS} characters")
        is_anchored = pattern.startswith("^")
        rest = pattern.removeprefix("^")
        if _has_choice(rest):
            raise PatternError("has look-around in one of several alternatives")
        found: list[str] = []
        has_ahead = False
        while (at := _first_look_ahead(rest)) >= 0:
            if len(found) == MAX_COMPLEMENTS:
                raise PatternError(f"is more than {MAX_COMPLEMENTS} times in it")
            end = _end_of_group(rest, at)
            is_not, body = rest[at + 2] == "!", rest[at + 3 : end]
            if (before := fixed_length(rest[:at])) is None:
                raise PatternError("has a look-ahead behind a part whose length varies")
            if before:
                body = f"[\\s\\S]{{{before}}}(?:{body})"
            found.append(self.complement(body) if is_not else f"^(?:{body})")
            rest, has_ahead = rest[:at] + rest[end + 1 :], True
        behind = _last_group(rest.removesuffix("$")) if rest.endswith("$") else -1
        if behind >= 0 and (look := _LOOK_BEHIND.match(rest, behind)):
            body = rest[look.end() : -2]
            is_not = look[1] == "!"
            found.append(self.complement(f"[\\s\\S]*(?:{body})$") if is_not else f"(?:{body})$")
            rest = f"{rest[:behind]}$"
        for part in (rest, *found):
            if has_look_around(part):
                raise PatternError("has look-around within it")
        anchor = "^" if is_anchored or has_ahead else ""
        return [f"{anchor}{rest}", *found], has_ahead and not is_anchored

    def complement(self, body: str) -> str:
        if body not in self._complements:
            if len(self._complements) == MAX_COMPLEMENTS:
                raise PatternError(f"is one of more than {MAX_COMPLEMENTS} with look-around")
            self._complements[body] = complement(body)
        return self._complements[body]


def _tokens(pattern: str) -> list[tuple[int, str]]:
    """Return the positions of ( ) | and of the [ of classes in a pattern, except where escaped or
    inside a class.
    """
    found: list[tuple[int, str]] = []
    at, in_class = 0, False
    while at < len(pattern):
        character = pattern[at]
        if character == "\\":
            at += 1
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            found.append((at, character))
            in_class = True
        elif character in "()|":
            found.append((at, character))
        at += 1
    return found


def _has_choice(pattern: str) -> bool:
    """Whether a pattern has alternatives outside of any group."""
    depth = 0
    for _, character in _tokens(pattern):
        depth += (character == "(") - (character == ")")
        if character == "|" and depth == 0:
            return True
    return False


def _first_look_ahead(pattern: str) -> int:
    """Return the position of the first look-ahead outside of any group, or -1 if there is none."""
    depth = 0
    for place, character in _tokens(pattern):
        if character == "(" and depth == 0 and _LOOK_AHEAD.match(pattern, place):
            return place
        depth += (character == "(") - (character == ")")
    return -1


def _end_of_group(pattern: str, begin: int) -> int:
    depth = 0
    for place, character in _tokens(pattern[begin:]):
        depth += (character == "(") - (character == ")")
        if depth == 0 and character == ")":
            return begin + place
    raise PatternError("has a group that is not closed")


def _last_group(pattern: str) -> int:
    """Return the position of the group that ends a pattern, or -1 if the pattern does not end with
    one.
    """
    opened: list[int] = []
    last = -1
    for place, character in _tokens(pattern):
        if character == "(":
            opened.append(place)
        elif character == ")" and opened:
            begin = opened.pop()
            if place == len(pattern) - 1:
                last = begin
    return last
