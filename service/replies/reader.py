"""Lets a format's generator read a reply's text as it arrives.

A format is written as if the whole text were available. If it needs more text, it yields (in
`more`) and continues when more text arrives:

    push(text) ──▶ ReplyReader.add ──▶ the generator goes on ──▶ pieces

The result depends only on the characters, not on how they were divided: a reply gives the same
result whether it is added as a whole, by token or by character. Text that was read but not yet
passed on (`take`) is held, up to MAX_HELD characters. Text that was looked at but not read
(`literal`, `until`) is shorter than a mark and the blanks before it. Each character is therefore
read once and looked at a bounded number of times, and a reply takes bounded memory.

If a mark is a special token of the model, it counts only at the positions of that token, which
`told` sets. The same text spelled by other tokens is ordinary text, so what a user wrote or
what a model quotes calls no tool.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable, Iterator

from service.replies.json_scanner import BLANKS, JsonScanner

MAX_HELD = 65_536
"""The most characters that are held until their meaning is certain; beyond that, they are text."""
MAX_BLANKS = 64
"""The most blanks before and after a mark that belong to it; further ones are text."""
MAX_NAME = 256
"""The longest name of a tool, in characters; a call with a longer one is text."""
_FEW_PLACES = 64
"""How many positions of special tokens are kept before those that were passed are dropped."""

Steps = Generator[None, None, None]
"""A running format; it yields when it needs more text."""


class MalformedError(Exception):
    """The held text does not follow the format."""


class ReplyReader:
    """The text of one reply, to read from.

    Attributes:
        text: the text from the first character that was not passed on.
        pos: the next character's index in it.
        end: how far the text may be read before something must be taken.
        places: where the special tokens ahead are in the reply.
    """

    __slots__ = (
        "_aside",
        "_base",
        "_begin",
        "_inside",
        "_many_places",
        "_num_added",
        "_num_aside",
        "_over",
        "_special",
        "end",
        "places",
        "pos",
        "text",
    )

    def __init__(self, special: frozenset[str] = frozenset()) -> None:
        """Create a reader. `special` has the texts of special tokens, which count only where `told`
        says.
        """
        self._special = sorted(special, key=len, reverse=True)
        self._inside: dict[str, tuple[int, ...]] = {}
        self.places: set[int] = set()
        self._many_places = _FEW_PLACES
        self._base = 0  # of the text: its first character's index in the reply
        self.text = ""
        self.pos = 0
        self.end = 0
        self._begin = 0  # of what is held
        self._aside: list[str] = []  # what is held and no longer in the text
        self._num_added = 0
        self._num_aside = 0
        self._over = False

    @property
    def num_held(self) -> int:
        """How many characters were read but not passed on."""
        return self._num_aside + self.pos - self._begin

    @property
    def size(self) -> int:
        """How many characters are kept, read or not."""
        return self._num_aside + len(self.text) - self._begin

    def told(self, places: Iterable[int]) -> None:
        """Set where special tokens begin in the reply's text, which is added later."""
        self.places.update(places)
        if len(self.places) > self._many_places:
            self.places = {place for place in self.places if place >= self._base}
            self._many_places = max(_FEW_PLACES, 2 * len(self.places))

    def _stands(self, mark: str, start: int) -> bool:
        """Whether the text found at an index is a mark, because its special tokens really are
        there.
        """
        if not self._special:
            return True
        inside = self._inside.get(mark)
        if inside is None:
            inside = self._inside[mark] = tuple(_tokens_in(mark, self._special))
        return all(self._base + start + place in self.places for place in inside)

    def add(self, text: str) -> None:
        """Add text."""
        if self.pos > self._begin:
            self._aside.append(self.text[self._begin : self.pos])
            self._num_aside += self.pos - self._begin
        self._base += self.pos
        self.text = self.text[self.pos :] + text
        self.pos = self._begin = 0
        self.end = min(len(self.text), MAX_HELD - self._num_aside)
        self._num_added += len(text)

    def close(self) -> None:
        """End the text."""
        self._over = True

    def take(self) -> str:
        """Return the held text and release it."""
        taken = self.text[self._begin : self.pos]
        if self._aside:
            taken = "".join([*self._aside, taken])
            self._aside = []
            self._num_aside = 0
        self._begin = self.pos
        self.end = min(len(self.text), self.pos + MAX_HELD)
        return taken

    def back(self, text: str) -> None:
        """Unread this text, which is the end of the mark that `until` has just found."""
        self.pos -= len(text)

    @property
    def held_blanks(self) -> str:
        """The blanks before the mark that `until` has just found."""
        held = self.text[self._begin : self.pos]
        return held[: len(held) - len(held.lstrip(BLANKS))]

    def more(self) -> Generator[None, None, bool]:
        """Wait for more text and return whether there is any.

        Raises:
            MalformedError: too much text is held.
        """
        if self.num_held >= MAX_HELD:
            raise MalformedError
        if self._over:
            return False
        size = self._num_added
        yield
        return self._num_added > size

    def peek(self) -> Generator[None, None, str]:
        """Return the next character without reading it; empty at the end of the text."""
        while self.pos >= self.end:
            if not (yield from self.more()):
                return ""
        return self.text[self.pos]

    def expect(self, characters: str) -> Generator[None, None, str]:
        """Read one of these characters.

        Raises:
            MalformedError: the next character is not one of them, or the text ends.
        """
        found = yield from self.peek()
        if not found or found not in characters:
            raise MalformedError
        self.pos += 1
        return found

    def blanks(self, most: int = MAX_HELD) -> Steps:
        """Read at most this many blanks."""
        for _ in range(most):
            found = yield from self.peek()
            if not found or found not in BLANKS:
                return
            self.pos += 1

    def behind_blanks(self) -> Generator[None, None, str]:
        """Return the first character after at most MAX_BLANKS blanks, without reading it; empty if
        there is none.
        """
        place = 0
        while place <= MAX_BLANKS:
            if self.pos + place >= len(self.text):
                if not (yield from self.more()):
                    return ""
            elif (found := self.text[self.pos + place]) not in BLANKS:
                return found
            else:
                place += 1
        return ""

    def ahead(self, end: str, most: int) -> Generator[None, None, str]:
        """Return the text before the given one if that is within this many characters, without
        reading it.
        """
        most += len(end)
        while (place := self.text.find(end, self.pos, self.pos + most)) < 0:
            if len(self.text) - self.pos >= most or not (yield from self.more()):
                return ""
        return self.text[self.pos : place]

    def literal(self, literal: str) -> Generator[None, None, bool]:
        """Read this text if it comes next; otherwise read nothing. If it is the text of a
        special token, it must come from that token itself.
        """
        while not self.text.startswith(literal, self.pos):
            ahead = self.text[self.pos : self.pos + len(literal)]
            if len(ahead) == len(literal) or not literal.startswith(ahead):
                return False
            if not (yield from self.more()):
                return False
        if not self._stands(literal, self.pos):
            return False
        self.pos += len(literal)
        return True

    def past(self, literal: str) -> Generator[None, None, bool]:
        """Read blanks and then this text, if they come next. The blanks may be read even if the
        text does not follow.
        """
        if (yield from self.behind_blanks()) != literal[0]:
            return False
        yield from self.blanks()
        return (yield from self.literal(literal))

    def past_any(self, *literals: str) -> Steps:
        """Read blanks and then one of these texts, if one comes next; empty texts are ignored."""
        for literal in literals:
            if literal and (yield from self.past(literal)):
                return

    def name(self, stop: str) -> Generator[None, None, str]:
        """Read up to one of these characters and return the tool's name, without the blanks around
        it.

        Raises:
            MalformedError: it is not a valid name, or the text ends.
        """
        found: list[str] = []
        while (character := (yield from self.peek())) not in stop or not character:
            if not character or len(found) >= MAX_NAME + MAX_BLANKS:
                raise MalformedError
            found.append(character)
            self.pos += 1
        return checked_name("".join(found).strip(BLANKS))

    def value(self) -> Generator[None, None, str]:
        """Read a JSON value and return its text.

        Raises:
            MalformedError: it is not JSON, it is too long to be held, or the text ends.
        """
        scanner = JsonScanner()
        parts: list[str] = []
        while True:
            start = self.pos
            self.pos = scanner.feed(self.text, start, self.end)
            parts.append(self.text[start : self.pos])
            if scanner.done:
                return "".join(parts)
            if scanner.failed or not (yield from self.more()):
                raise MalformedError

    def string(self) -> Generator[None, None, str]:
        """Read a JSON string and return its value.

        Raises:
            MalformedError: see `value`; or it is not a string.
        """
        if (yield from self.peek()) != '"':
            raise MalformedError
        return str(json.loads((yield from self.value())))

    def until(
        self,
        marks: ReplyMarks,
        hand_on: Callable[[str], None],
        *,
        blanks: str = BLANKS,
        most: int = MAX_BLANKS,
    ) -> Generator[None, None, str]:
        """Pass the text on up to the first of these marks. The mark is then held, with the blanks
        before it (a limited number of the given characters). No text may be held before the call.

        Returns:
            The mark; empty at the end of the text, when everything was passed on.
        """
        while True:
            found = marks.find.search(self.text, self.pos)
            while found is not None and not self._stands(found.group(), found.start()):
                found = marks.find.search(self.text, found.start() + 1)
            if found is None:
                partial = marks.find_partial.search(self.text, self.pos)
                end = len(self.text) if partial is None else partial.start()
            else:
                end = found.start()
            before = self.text[max(self.pos, end - most) : end]
            safe = end - len(before) + len(before.rstrip(blanks))
            ready = self.text[self.pos : safe]
            self.pos = self._begin = safe
            if ready:
                hand_on(ready)
            if found is not None:
                self.pos = found.end()
                self.end = min(len(self.text), safe + MAX_HELD)
                return found.group()
            if not (yield from self.more()):
                self.pos = len(self.text)
                if rest := self.take():
                    hand_on(rest)
                return ""


class ReplyMarks:
    """A set of literal marks to look for, compiled.

    Attributes:
        find: finds a mark.
        find_partial: finds the beginning of a mark at the end of a text.
    """

    __slots__ = ("find", "find_partial")

    def __init__(self, marks: Iterable[str]) -> None:
        """Compile marks.

        Raises:
            ValueError: a mark ends within another one. The first mark to be complete would then not
                always be the first to begin.
        """
        listed = sorted(marks)
        if any(mark in other[:-1] for mark in listed for other in listed):
            raise ValueError(f"marks that overlap: {listed}")
        self.find = re.compile("|".join(map(re.escape, listed)))
        self.find_partial = re.compile("(?:" + "|".join(map(_beginnings, listed)) + r")\Z")


def _tokens_in(mark: str, special: Iterable[str]) -> Iterator[int]:
    """Return where special tokens begin in a mark, the longest one first."""
    place = 0
    while place < len(mark):
        found = next((text for text in special if mark.startswith(text, place)), "")
        if found:
            yield place
        place += len(found) or 1


def _beginnings(mark: str) -> str:
    """Return a pattern for the proper prefixes of a mark, at least one character long."""
    pattern = ""
    for character in reversed(mark[1:-1]):
        pattern = f"(?:{re.escape(character)}{pattern})?"
    return re.escape(mark[0]) + pattern


def checked_name(name: str) -> str:
    """Check a tool's name as it was read.

    Raises:
        MalformedError: it is empty, too long, or has unprintable characters.
    """
    if not name or len(name) > MAX_NAME or not name.isprintable():
        raise MalformedError
    return name
