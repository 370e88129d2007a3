"""Computes, for a pattern, another pattern for the strings that it does not match.

llguidance can intersect patterns of a schema, but cannot complement them. So the pattern (in the
syntax of ECMA 262, which JSON Schema prescribes) is converted to an automaton, accepting and
non-accepting states are swapped, and the states are removed one by one until a pattern is left:

    text ─▶ NFA (Thompson) ─▶ DFA (subsets) ─▶ complement ─▶ pattern (elimination of states)

A pattern is matched from the beginning of a string. If it does not end with $, anything may follow.
Each stage has a limit, because all three can grow exponentially.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

MAX_NFA_STATES = 400
MAX_DFA_STATES = 64
MAX_SPANS = 100
MAX_COMPLEMENT_BYTES = 8192
"""The longest pattern to produce."""
_MAX_COUNT = 256
"""The largest repetition count."""
_MAX_NESTING = 32

_LAST = 0x10FFFF
NOTHING = "[^\\x{0}-\\x{10ffff}]"
"""A pattern that matches no character."""
Ranges = tuple[tuple[int, int], ...]
"""A set of characters: sorted ranges of code points that do not touch, with both ends included."""


class PatternError(Exception):
    """A pattern whose complement cannot be computed; the text says which feature is at fault."""


def complement(pattern: str) -> str:
    """Return an anchored pattern, in Rust's syntax, for the strings without NUL that do not begin
    with a match of `pattern`. Word boundaries, look-around, back-references and Unicode classes are
    not supported.

    Raises:
        PatternError: the pattern uses one of these, is not valid, or is too complex.
    """
    nfa = _Parser(pattern).parse()
    return f"^(?:{_without(_Dfa(nfa))})$"


def fixed_length(pattern: str) -> int | None:
    """Return the length, in characters, of everything that a pattern matches. None if the length
    varies or nothing matches.

    Raises:
        PatternError: see `complement`.
    """
    nfa = _Parser(pattern).parse()
    states = nfa.closed({nfa.start}, begin=True)
    for length in range(MAX_NFA_STATES):
        onward = [target for state in states - {nfa.final} for _, target in nfa.reading[state]]
        if nfa.final in states:
            return None if onward else length
        states = nfa.closed(onward)
    return None


# ---- sets of characters --------------------------------------------------------------------------


def _ranges(found: Iterable[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(found):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return tuple(merged)


def _others(ranges: Ranges) -> Ranges:
    found, begin = [], 0
    for first, last in ranges:
        if first > begin:
            found.append((begin, first - 1))
        begin = last + 1
    if begin <= _LAST:
        found.append((begin, _LAST))
    return tuple(found)


def _of(characters: str) -> Ranges:
    return _ranges((ord(one), ord(one)) for one in characters)


ANY: Ranges = ((0, _LAST),)
_DIGITS = _ranges([(48, 57)])
_WORD = _ranges([(48, 57), (65, 90), (95, 95), (97, 122)])
_BLANKS: Ranges = (
    (9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
    (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
)  # fmt: skip
_DOT = _others(_of("\n"))  # what llguidance takes for it elsewhere
_CLASSES = {
    "d": _DIGITS, "D": _others(_DIGITS), "w": _WORD, "W": _others(_WORD),
    "s": _BLANKS, "S": _others(_BLANKS),
}  # fmt: skip
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
_COUNT = re.compile(r"\{(\d{1,6})(?:(,)(\d{0,6}))?\}")
_CODE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}")


# ---- from text to an NFA -------------------------------------------------------------------------


class _Nfa:
    """A nondeterministic automaton. States are numbers. Edges without a character may be taken
    anywhere, or only at the beginning (^) or the end ($) of a string.
    """

    def __init__(self) -> None:
        self.free: list[list[int]] = []
        self.at_begin: list[list[int]] = []
        self.at_end: list[list[int]] = []
        self.reading: list[list[tuple[Ranges, int]]] = []
        self.start = self.final = 0

    def state(self) -> int:
        if len(self.free) == MAX_NFA_STATES:
            raise PatternError("is too complex")
        for edges in (self.free, self.at_begin, self.at_end):
            edges.append([])
        self.reading.append([])
        return len(self.free) - 1

    def closed(self, states: Iterable[int], *, begin: bool = False, end: bool = False) -> set[int]:
        """Return these states and those reachable from them without a character."""
        found = set(states)
        waiting = list(found)
        while waiting:
            state = waiting.pop()
            edges = [self.free[state]]
            edges += [self.at_begin[state]] if begin else []
            edges += [self.at_end[state]] if end else []
            for target in (one for some in edges for one in some):
                if target not in found:
                    found.add(target)
                    waiting.append(target)
        return found


_Part = tuple[int, int]
"""The first and last state of a fragment of an NFA."""


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._nesting = 0
        self._nfa = _Nfa()

    def parse(self) -> _Nfa:
        start, final = self._choice()
        if self._at < len(self._text):
            raise PatternError("has a ) too many")
        self._nfa.reading[final].append((ANY, final))  # anything may follow
        self._nfa.start, self._nfa.final = start, final
        return self._nfa

    def _choice(self) -> _Part:
        parts = [self._sequence()]
        while self._take("|"):
            parts.append(self._sequence())
        if len(parts) == 1:
            return parts[0]
        start, final = self._nfa.state(), self._nfa.state()
        for begin, end in parts:
            self._nfa.free[start].append(begin)
            self._nfa.free[end].append(final)
        return start, final

    def _sequence(self) -> _Part:
        start = end = self._nfa.state()
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            begin, last = self._repeated()
            self._nfa.free[end].append(begin)
            end = last
        return start, end

    def _repeated(self) -> _Part:
        begin = self._at
        part = self._atom()
        least, most = self._count()
        if (least, most) == (1, 1):
            return part
        after = self._at
        found = [part]
        for _ in range(max(least, most or 1) - 1):  # the same text again, as often as it may come
            self._at = begin
            found.append(self._atom())
        self._at = after
        nfa = self._nfa
        start, final = nfa.state(), nfa.state()
        nfa.free[start].append(found[0][0])
        for (_, end), (following, _) in itertools.pairwise(found):
            nfa.free[end].append(following)
        if least == 0:
            nfa.free[start].append(final)
        for index, (first, end) in enumerate(found):
            if index + 1 >= least and most != 0:
                nfa.free[end].append(final)
            if most is None and index == len(found) - 1:
                nfa.free[end].append(first)
        return start, final

    def _count(self) -> tuple[int, int | None]:
        least: int
        most: int | None
        least, most = 1, 1
        if self._take("*"):
            least, most = 0, None
        elif self._take("+"):
            least, most = 1, None
        elif self._take("?"):
            least, most = 0, 1
        elif found := _COUNT.match(self._text, self._at):
            self._at = found.end()
            least = int(found[1])
            most = least if found[2] is None else int(found[3]) if found[3] else None
            if max(least, most or 0) > _MAX_COUNT:
                raise PatternError(f"repeats something more than {_MAX_COUNT} times")
            if most is not None and most < least:
                raise PatternError(f"has the repetition {found[0]}, which no number satisfies")
        else:
            return 1, 1
        self._take("?")  # how much is tried first does not matter
        if self._text[self._at : self._at + 1] in ("*", "+", "?"):
            raise PatternError("repeats a repetition")
        return least, most

    def _atom(self) -> _Part:
        nfa = self._nfa
        character = self._next()
        if character == "(":
            return self._group()
        start, end = nfa.state(), nfa.state()
        if character == "^":
            nfa.at_begin[start].append(end)
        elif character == "$":
            nfa.at_end[start].append(end)
        elif character in "*+?":
            raise PatternError(f"has a {character} with nothing to repeat")
        else:
            nfa.reading[start].append((self._characters(character), end))
        return start, end

    def _characters(self, character: str) -> Ranges:
        if character == ".":
            return _DOT
        if character == "[":
            return self._class()
        if character == "\\":
            return self._escaped()
        return _of(character)

    def _group(self) -> _Part:
        self._nesting += 1
        if self._nesting > _MAX_NESTING:
            raise PatternError("is nested too deeply")
        if self._take("?"):
            named = re.compile(r"P?<\w+>").match(self._text, self._at)
            if named:
                self._at = named.end()
            elif not self._take(":"):
                raise PatternError("has look-around, or a flag, within it")
        part = self._choice()
        if not self._take(")"):
            raise PatternError("has a group that is not closed")
        self._nesting -= 1
        return part

    def _escaped(self) -> Ranges:
        character = self._next()
        if character in _CLASSES:
            return _CLASSES[character]
        if character in _CONTROLS:
            return _of(_CONTROLS[character])
        if found := _CODE.match(self._text, self._at - 1):
            self._at = found.end()
            code = int(next(filter(None, found.groups())), 16)
            if code > _LAST:
                raise PatternError("has a character that does not exist")
            return ((code, code),)
        if character.isalnum():
            raise PatternError(f"has \\{character}, which is not taken here")
        return _of(character)

    def _class(self) -> Ranges:
        is_negated = self._take("^")
        found: list[tuple[int, int]] = []
        while not self._take("]"):
            first = self._member()
            is_range = self._text[self._at : self._at + 1] == "-"
            if is_range and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                last = self._member()
                if not _is_one(first) or not _is_one(last) or last < first:
                    raise PatternError("has a range of characters that is not valid")
                first = ((first[0][0], last[0][1]),)
            found += first
        ranges = _ranges(found)
        return _others(ranges) if is_negated else ranges

    def _member(self) -> Ranges:
        character = self._next()
        if character != "\\":
            return _of(character)
        if self._take("b"):
            return _of("\b")
        return self._escaped()

    def _next(self) -> str:
        if self._at == len(self._text):
            raise PatternError("ends too early")
        self._at += 1
        return self._text[self._at - 1]

    def _take(self, character: str) -> bool:
        is_there = self._text.startswith(character, self._at)
        self._at += is_there
        return is_there


def _is_one(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]


# ---- from an NFA to a DFA ------------------------------------------------------------------------


class _Dfa:
    """A deterministic automaton. States are numbers, starting with 0. Only one of several equal
    states is kept.

    Attributes:
        edges: for each state, its targets with the characters that lead there.
        accepting: the states in which a string matches.
    """

    def __init__(self, nfa: _Nfa) -> None:
        cuts = {0, _LAST + 1}
        for edges in nfa.reading:
            for ranges, _ in edges:
                for first, last in ranges:
                    cuts |= {first, last + 1}
        ordered = sorted(cuts)
        spans = list(itertools.pairwise(ordered))
        if len(spans) > MAX_SPANS:
            raise PatternError("names too many different characters")
        start = (frozenset(nfa.closed({nfa.start}, begin=True)), True)
        numbers = {start: 0}  # by the states, and whether nothing was read yet
        waiting = [start]
        steps: list[list[int]] = []  # [state][span]
        while waiting:
            states, _ = waiting.pop(0)
            reading = [edge for state in states for edge in nfa.reading[state]]
            row: list[int] = []
            for first, _ in spans:
                closed = nfa.closed(
                    target
                    for ranges, target in reading
                    if any(low <= first <= high for low, high in ranges)
                )
                # Once it matched, it matches whatever follows.
                following = (frozenset({nfa.final} if nfa.final in closed else closed), False)
                if following not in numbers:
                    if len(numbers) == MAX_DFA_STATES:
                        raise PatternError("is too complex")
                    numbers[following] = len(numbers)
                    waiting.append(following)
                row.append(numbers[following])
            steps.append(row)
        matched = [
            nfa.final in nfa.closed(states, begin=begin, end=True) for states, begin in numbers
        ]
        self._merge(spans, steps, matched)

    def _merge(
        self, spans: list[tuple[int, int]], steps: list[list[int]], matched: list[bool]
    ) -> None:
        """Merge states that accept the same strings (Moore's partition refinement)."""
        groups = [int(one) for one in matched]
        while True:
            keys = [
                (groups[i], tuple(groups[target] for target in row)) for i, row in enumerate(steps)
            ]
            names: dict[object, int] = {}
            refined = [names.setdefault(key, len(names)) for key in keys]
            if len(names) == len(set(groups)):
                break
            groups = refined
        self.edges: dict[int, dict[int, Ranges]] = {}
        self.accepting: set[int] = set()
        for state, group in enumerate(refined):
            if group in self.edges:
                continue
            found: dict[int, list[tuple[int, int]]] = {}
            for (first, following), target in zip(spans, steps[state], strict=True):
                found.setdefault(refined[target], []).append((first, following - 1))
            self.edges[group] = {target: _ranges(some) for target, some in found.items()}
            if matched[state]:
                self.accepting.add(group)


# ---- from a DFA to the pattern of its complement -------------------------------------------------


def _without(dfa: _Dfa) -> str:
    """Return the pattern of the strings that an automaton does not accept, or [] if there are
    none.
    """
    begin, end = -1, -2
    edges: dict[int, dict[int, str]] = {
        state: {target: _written(ranges) for target, ranges in targets.items()}
        for state, targets in dfa.edges.items()
    }
    for state in edges:
        if state not in dfa.accepting:
            edges[state][end] = ""
    edges[begin] = {0: ""}
    while others := [state for state in edges if state != begin]:
        # The one through which the fewest ways lead, so that little text is repeated.
        state = min(others, key=lambda one: _cost(edges, one))
        out = edges.pop(state)
        loop = out.pop(state, None)
        again = "" if loop is None else f"{_grouped(loop)}*"
        for targets in edges.values():
            if (into := targets.pop(state, None)) is None:
                continue
            for target, onward in out.items():
                way = into + again + onward
                known = targets.get(target)
                targets[target] = way if known is None else _either(known, way)
        if sum(len(text) for targets in edges.values() for text in targets.values()) > (
            4 * MAX_COMPLEMENT_BYTES
        ):
            raise PatternError("is too complex")
    found = edges[begin].get(end)
    if found is None:
        return NOTHING
    if len(found) > MAX_COMPLEMENT_BYTES:
        raise PatternError("is too complex")
    return found


def _cost(edges: dict[int, dict[int, str]], state: int) -> int:
    ways_in = [
        targets[state] for one, targets in edges.items() if one != state and state in targets
    ]
    ways_out = [text for target, text in edges[state].items() if target != state]
    loop = len(edges[state].get(state, ""))
    inward, outward = sum(map(len, ways_in)), sum(map(len, ways_out))
    return inward * len(ways_out) + outward * len(ways_in) + loop * len(ways_in) * len(ways_out)


def _either(one: str, other: str) -> str:
    if one == other:
        return one
    if not one:
        return f"(?:{other})?"
    if not other:
        return f"(?:{one})?"
    return f"(?:{one}|{other})"


def _grouped(text: str) -> str:
    return text if text.startswith("[") and text.find("]") == len(text) - 1 else f"(?:{text})"


def _written(ranges: Ranges) -> str:
    """Return a class in Rust's syntax, by code points, so that nothing in it is special. NUL is
    left out (see `patterns`).
    """
    if ranges and ranges[0][0] == 0:
        ranges = (*([(1, ranges[0][1])] if ranges[0][1] else []), *ranges[1:])
    if not ranges:
        return NOTHING
    listed = "".join(
        f"\\x{{{first:x}}}" if first == last else f"\\x{{{first:x}}}-\\x{{{last:x}}}"
        for first, last in ranges
    )
    return f"[{listed}]"
