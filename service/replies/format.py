"""A format: how a family of models marks reasoning and tool calls in what it writes.

Most formats are text with marks: reasoning between two of them at the beginning, and a call behind
another. For those a format says its marks and how a call is read (`marked`); what comes between
is the same for all. A format may also read everything by itself (harmony).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from service.replies.json_scanner import BLANKS
from service.replies.pieces import Piece, PieceWriter
from service.replies.reader import MAX_BLANKS, MalformedError, Marks, Reader, Steps

Schema = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Context:
    """What is known of a request before its reply begins.

    Attributes:
        tools: the tools that the model was told of: their parameters' JSON schemas by name.
        in_reasoning: whether the prompt ends within reasoning that the template opened.
        seed: what the calls' ids are made from; one's own for each reply.
    """

    tools: Mapping[str, Schema] = field(default_factory=dict)
    in_reasoning: bool = False
    seed: str = ""


@dataclass(frozen=True, slots=True)
class Format:
    """A family's way of writing.

    Attributes:
        name: what a flag calls it.
        marks: all of its marks. Those that are special tokens must be in the text that is parsed,
            whatever else is left out of it.
        reasoning: the mark that opens reasoning; empty where a prompt never ends with one.
        read: reads a reply.
    """

    name: str
    marks: frozenset[str]
    reasoning: str
    read: Callable[[Reader, PieceWriter, Context], Steps]

    def opens_reasoning(self, prompt: str) -> bool:
        """Whether a prompt (its end is enough) ends within reasoning."""
        return bool(self.reasoning) and prompt.rstrip(BLANKS).endswith(self.reasoning)

    def begin(self, context: Context) -> ReplyParser:
        """A parser for one reply."""
        return ReplyParser(self, context)


class ReplyParser:
    """One reply's text becomes pieces; on one thread at a time."""

    __slots__ = ("_out", "_over", "_reader", "_steps")

    def __init__(self, format: Format, context: Context) -> None:
        self._reader = Reader()
        self._out = PieceWriter(context.seed)
        self._steps = format.read(self._reader, self._out, context)
        self._over = False

    @property
    def size(self) -> int:
        """Characters that are held back; at most MAX_HELD and a mark with its blanks."""
        return self._reader.size

    def push(self, text: str) -> list[Piece]:
        """The pieces that are certain with this text; may be none."""
        if not text:
            return []
        self._reader.add(text)
        next(self._steps, None)
        return self._out.drain()

    def finish(self) -> list[Piece]:
        """The output is over: the rest. May be called once more, for nothing."""
        if self._over:
            return []
        self._over = True
        self._reader.close()
        for _ in self._steps:
            pass
        return self._out.drain()


ReadCall = Callable[[Reader, PieceWriter, Context], Steps]
"""Reads what follows a mark, which is held: a call, or several.

Raises MalformedError where it is none: then what is held is text.
"""


def marked(
    name: str,
    calls: Mapping[str, ReadCall],
    *,
    reasoning: tuple[str, str] = ("<think>", "</think>"),
    bare: ReadCall | None = None,
    marks: tuple[str, ...] = (),
) -> Format:
    """A format of text with marks.

    Args:
        name: the format's.
        calls: how to read what follows a mark.
        reasoning: the marks around reasoning. It is looked for until there is text.
        bare: reads a call that has no mark: an object that begins the reply, where there are tools.
        marks: further ones, within calls.
    """
    opening, closing = reasoning
    in_text = Marks({opening, *calls})
    in_reasoning = Marks({closing})

    def read(reader: Reader, out: PieceWriter, context: Context) -> Steps:
        mark = opening if context.in_reasoning else ""
        while True:
            if mark == opening:
                yield from _blanks(reader, out)
                yield from reader.until(in_reasoning, out.reasoning)
                yield from _blanks(reader, out)
            elif mark:
                yield from _call(reader, out, context, calls[mark])
            if bare is not None and context.tools:
                while not out.has_text and (yield from reader.behind_blanks()) == "{":
                    yield from _call(reader, out, context, bare)
            mark = yield from reader.until(in_text, out.text)
            if not mark:
                return
            if mark == opening and out.has_text:
                out.text(reader.take())
                mark = ""

    return Format(name, frozenset({opening, closing, *calls, *marks}), opening, read)


def _blanks(reader: Reader, out: PieceWriter) -> Steps:
    """A mark, which is held, takes the blanks behind it."""
    out.mark(reader.take())
    yield from reader.blanks(MAX_BLANKS)
    out.mark(reader.take())


def _call(reader: Reader, out: PieceWriter, context: Context, read: ReadCall) -> Steps:
    try:
        yield from read(reader, out, context)
    except MalformedError:
        out.text(reader.take())
    else:
        yield from _blanks(reader, out)
