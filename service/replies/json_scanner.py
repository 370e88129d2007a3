"""Finds the end of a JSON value in text that arrives in chunks, and checks that the text so far is
JSON.

The scanner is strict: it accepts only JSON as in RFC 8259. It neither changes nor keeps the text,
and reads each character once.
"""

from __future__ import annotations

import re
from enum import Enum, auto

MAX_DEPTH = 64
"""The deepest nesting. The same limit applies to arguments of a call that are sent back in a
conversation.
"""

BLANKS = " \t\r\n"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_HEX = frozenset("0123456789abcdefABCDEF")
_DIGITS = "0123456789"
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}


class _At(Enum):
    VALUE = auto()
    FIRST_ITEM = auto()  # a value, or the array's end
    FIRST_KEY = auto()  # a key, or the object's end
    KEY = auto()
    COLON = auto()
    NEXT = auto()  # a comma, or the container's end
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    LITERAL = auto()
    MINUS = auto()
    ZERO = auto()
    INTEGER = auto()
    POINT = auto()
    FRACTION = auto()
    E = auto()
    SIGN = auto()
    EXPONENT = auto()


def _numbers() -> dict[_At, dict[str, _At]]:
    exponent = {"e": _At.E, "E": _At.E}
    first = {"0": _At.ZERO} | dict.fromkeys("123456789", _At.INTEGER)
    digits = dict.fromkeys(_DIGITS, _At.EXPONENT)
    return {
        _At.MINUS: first,
        _At.ZERO: {".": _At.POINT, **exponent},
        _At.INTEGER: {".": _At.POINT, **exponent} | dict.fromkeys(_DIGITS, _At.INTEGER),
        _At.POINT: dict.fromkeys(_DIGITS, _At.FRACTION),
        _At.FRACTION: exponent | dict.fromkeys(_DIGITS, _At.FRACTION),
        _At.E: {"+": _At.SIGN, "-": _At.SIGN} | digits,
        _At.SIGN: digits,
        _At.EXPONENT: digits,
    }


_NUMBER = _numbers()
_WHOLE_NUMBER = frozenset({_At.ZERO, _At.INTEGER, _At.FRACTION, _At.EXPONENT})


class JsonScanner:
    """Finds the end of one value, which begins with the first character.

    Attributes:
        done: whether the value is complete.
        failed: whether the next character is invalid or would nest too deeply.
    """

    __slots__ = ("_at", "_deepest", "_is_key", "_left", "_literal", "_stack", "done", "failed")

    def __init__(self, around: int = 0) -> None:
        """Create a scanner. `around` is how many containers enclose the value; they count as
        nesting.
        """
        self._deepest = MAX_DEPTH - around
        self._at = _At.VALUE
        self._stack: list[str] = []  # the closing bracket of each container around
        self._is_key = False  # whether the string is a key
        self._left = 0  # hexadecimal digits of \uXXXX
        self._literal = ""
        self.done = False
        self.failed = False

    @property
    def container(self) -> str | None:
        """If the text so far ends inside a string, the type of the value that contains that
        string; otherwise None.
        """
        if self.failed or not self._stack or self._at not in (_At.STRING, _At.ESCAPE, _At.HEX):
            return None
        return "object" if self._stack[0] == "}" else "array"

    def feed(self, text: str, start: int, end: int) -> int:
        """Scan text[start:end] and return the index after the last accepted character. It stops
        early only if the value is complete or the next character is invalid.
        """
        place = start
        while place < end and not self.done and not self.failed:
            if self._at is _At.STRING:
                place = self._string(text, place, end)
            elif self._take(text[place]):
                place += 1
        return place

    def finish(self) -> bool:
        """End the text and return whether the value is complete. The end of a number is known only
        now.
        """
        if not self.failed and not self._stack and self._at in _WHOLE_NUMBER:
            self.done = True
        return self.done

    def _string(self, text: str, place: int, end: int) -> int:
        found = _PLAIN.match(text, place, end)
        place = found.end() if found is not None else place
        if place == end:
            return place
        match text[place]:
            case '"':
                if self._is_key:
                    self._at = _At.COLON
                else:
                    self._value_ended()
            case "\\":
                self._at = _At.ESCAPE
            case _:
                self.failed = True
                return place
        return place + 1

    def _take(self, character: str) -> bool:
        """Scan one character other than a string's plain text, and return whether it was
        accepted.
        """
        at = self._at
        if (following := _NUMBER.get(at)) is not None:
            if (then := following.get(character)) is not None:
                self._at = then
                return True
            if at in _WHOLE_NUMBER:
                self._value_ended()
            else:
                self.failed = True
            return False
        if at is _At.ESCAPE:
            return self._escape(character)
        if at is _At.HEX:
            self._left -= 1
            if not self._left:
                self._at = _At.STRING
            return self._check(character in _HEX)
        if at is _At.LITERAL:
            fits = character == self._literal[0]
            self._literal = self._literal[1:]
            if fits and not self._literal:
                self._value_ended()
            return self._check(fits)
        return character in BLANKS or self._structure(at, character)

    def _structure(self, at: _At, character: str) -> bool:
        if character in "}]" and at in (_At.NEXT, _At.FIRST_ITEM, _At.FIRST_KEY):
            if not self._stack or self._stack[-1] != character:
                return self._check(False)
            self._stack.pop()
            self._value_ended()
            return True
        match at:
            case _At.VALUE | _At.FIRST_ITEM:
                return self._value(character)
            case _At.KEY | _At.FIRST_KEY:
                self._is_key = True
                self._at = _At.STRING
                return self._check(character == '"')
            case _At.COLON:
                self._at = _At.VALUE
                return self._check(character == ":")
            case _:  # NEXT
                self._at = _At.KEY if self._stack[-1] == "}" else _At.VALUE
                return self._check(character == ",")

    def _value(self, character: str) -> bool:
        if character in "{[":
            self._stack.append("}" if character == "{" else "]")
            self._at = _At.FIRST_KEY if character == "{" else _At.FIRST_ITEM
            return self._check(len(self._stack) <= self._deepest)
        if character == '"':
            self._is_key = False
            self._at = _At.STRING
        elif character == "-":
            self._at = _At.MINUS
        elif character in _DIGITS:
            self._at = _At.ZERO if character == "0" else _At.INTEGER
        elif character in _LITERALS:
            self._at = _At.LITERAL
            self._literal = _LITERALS[character]
        else:
            return self._check(False)
        return True

    def _escape(self, character: str) -> bool:
        if character == "u":
            self._at = _At.HEX
            self._left = 4
            return True
        self._at = _At.STRING
        return self._check(character in '"\\/bfnrt')

    def _check(self, fits: bool) -> bool:
        if not fits:
            self.failed = True
        return fits

    def _value_ended(self) -> None:
        self._at = _At.NEXT
        if not self._stack:
            self.done = True


def is_json(text: str, around: int = 0) -> bool:
    """Whether a text is exactly one JSON value, without surrounding blanks. See `JsonScanner` for
    `around`.
    """
    scanner = JsonScanner(around)
    return scanner.feed(text, 0, len(text)) == len(text) and scanner.finish()
