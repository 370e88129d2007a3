"""A format: how a family of models marks reasoning and tool calls in its output.

Most formats are text with marks: reasoning is between two marks at the beginning, and a call
follows another mark. Such a format only defines its marks and how to read a call (`marked`); the
rest is common to all. A format may also do all of its own reading (harmony).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from service.replies.call_form import CallGrammar
from service.replies.json_scanner import BLANKS
from service.replies.pieces import Piece, PieceWriter
from service.replies.reader import MAX_BLANKS, MalformedError, ReplyMarks, ReplyReader, Steps
from service.replies.tool_types import ToolTypes


@dataclass(frozen=True, slots=True)
class Context:
    """What is known about a request before its reply begins.

    Attributes:
        tools: the tools given to the model, with the types of their parameters.
        in_reasoning: whether the prompt ends within reasoning that the template opened.
        seed: the seed of the calls' ids; different for each reply.
        calls: whether calls are recognised; if not, what looks like one is text.
        special: the special tokens that are marks or occur in one. Their text counts only at
            the positions given to `ReplyParser.told`, so that ordinary text cannot imitate them.
    """

    tools: ToolTypes = field(default_factory=dict)
    in_reasoning: bool = False
    seed: str = ""
    calls: bool = True
    special: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The marks around reasoning.

    Attributes:
        opening, closing: the marks.
        then: what follows the closing mark before anything else.
        in_prompt: whether a template may open the reasoning at the end of the prompt.
    """

    opening: str
    closing: str
    then: str = ""
    in_prompt: bool = True


@dataclass(frozen=True, slots=True)
class Format:
    """The output format of a family of models.

    Attributes:
        name: its name in flags.
        marks: all of its marks. Marks that are special tokens must be in the parsed text, even if
            other special tokens are left out.
        reasoning: the marks of reasoning.
        read: reads a reply.
        forms: how calls are written; empty if calls cannot be constrained. If models of the format
            write calls in several ways, the model's chat template decides which is used (`proof`).
    """

    name: str
    marks: frozenset[str]
    reasoning: ReasoningMarks
    read: Callable[[ReplyReader, PieceWriter, Context], Steps]
    forms: tuple[CallGrammar, ...] = ()

    @property
    def form(self) -> CallGrammar | None:
        """The grammar that constrains calls unless a template requires another one."""
        return next(iter(self.forms), None)

    def opens_reasoning(self, prompt: str) -> bool:
        """Whether a prompt ends within reasoning. The end of the prompt is enough to decide."""
        marks = self.reasoning
        return marks.in_prompt and prompt.rstrip(BLANKS).endswith(marks.opening)

    def closes_reasoning(self, prompt: str) -> bool:
        """Whether a prompt ends with finished reasoning, which may be empty. The end of the prompt
        is enough to decide.
        """
        marks = self.reasoning
        return marks.in_prompt and prompt.rstrip(BLANKS).endswith(marks.closing)

    def begin(self, context: Context) -> ReplyParser:
        """Make a parser for one reply."""
        return ReplyParser(self, context)


class ReplyParser:
    """Parses one reply's text into pieces. Not thread-safe."""

    __slots__ = ("_out", "_over", "_reader", "_steps")

    def __init__(self, format: Format, context: Context) -> None:
        self._reader = ReplyReader(context.special)
        self._out = PieceWriter(context.seed, in_reasoning=context.in_reasoning)
        self._steps = format.read(self._reader, self._out, context)
        self._over = False

    @property
    def size(self) -> int:
        """How many characters are held back; at most MAX_HELD plus a mark with its blanks."""
        return self._reader.size

    @property
    def in_reasoning(self) -> bool:
        """Whether the next text is reasoning, as far as is certain."""
        return self._out.in_reasoning

    def told(self, places: Iterable[int]) -> None:
        """Set where special tokens are, before their text is pushed. `places` are the indices of
        their first characters in the reply's text.
        """
        self._reader.told(places)

    def push(self, text: str) -> list[Piece]:
        """Add text and return the pieces that are now certain, if any."""
        if not text:
            return []
        self._reader.add(text)
        next(self._steps, None)
        return self._out.drain()

    def finish(self) -> list[Piece]:
        """End the output and return the remaining pieces. A second call returns nothing."""
        if self._over:
            return []
        self._over = True
        self._reader.close()
        for _ in self._steps:
            pass
        return self._out.drain()


ReadCall = Callable[[ReplyReader, PieceWriter, Context], Steps]
"""Reads one or several calls after a mark, which is held. Raises MalformedError if there is no
call; the held text then becomes text of the reply.
"""


def marked(
    name: str,
    calls: Mapping[str, ReadCall],
    *,
    reasoning: tuple[str, str] = ("<think>", "</think>"),
    bare: Mapping[str, ReadCall] = MappingProxyType({}),
    lines: Mapping[str, ReadCall] = MappingProxyType({}),
    marks: tuple[str, ...] = (),
    silent: tuple[str, ...] = (),
    ends_reasoning: tuple[str, ...] = (),
    forms: tuple[CallGrammar, ...] = (),
) -> Format:
    """Make a format of text with marks.

    Args:
        name: the format's name.
        calls: how to read what follows each mark.
        reasoning: the marks around reasoning. Reasoning is recognised only before any text.
        bare: how to read a call without a mark, by its first character. Such a call is recognised
            only at the beginning of the reply and if there are tools.
        lines: further marks that begin a call only at the beginning of a line, and only if there
            are tools.
        marks: further marks within calls.
        silent: marks that only divide text, and are left out.
        ends_reasoning: marks of calls that also end reasoning if they are special tokens.
        forms: see Format.
    """
    opening, closing = reasoning
    in_words = ReplyMarks({opening, *silent})
    in_text, with_tools = (
        ReplyMarks({opening, *calls, *silent}),
        ReplyMarks({opening, *calls, *lines, *silent}),
    )
    in_reasoning, with_ends = ReplyMarks({closing}), ReplyMarks({closing, *ends_reasoning})
    ends = frozenset(ends_reasoning)

    def read(reader: ReplyReader, out: PieceWriter, context: Context) -> Steps:
        has_tools = bool(context.tools) and context.calls
        words = (with_tools if has_tools else in_text) if context.calls else in_words
        thoughts = with_ends if context.calls and ends <= context.special else in_reasoning
        mark = opening if context.in_reasoning else ""
        while True:
            if mark == opening:
                out.in_reasoning = True
                yield from _blanks(reader, out)
                mark = yield from reader.until(thoughts, out.reasoning)
                out.in_reasoning = False
                if mark in ends:
                    continue
                yield from _blanks(reader, out)
            elif mark in silent:
                yield from _blanks(reader, out)
            elif mark in calls:
                yield from _call(reader, out, context, calls[mark])
            elif mark and (not out.has_text or "\n" in reader.held_blanks):
                yield from _call(reader, out, context, lines[mark])
            elif mark:
                out.text(reader.take())
            while bare and has_tools and not out.has_text:
                if not (one := bare.get((yield from reader.behind_blanks()))):
                    break
                yield from _call(reader, out, context, one)
            mark = yield from reader.until(words, out.text)
            if not mark:
                return
            if mark == opening and out.has_text:
                out.text(reader.take())
                mark = ""

    every = frozenset({opening, closing, *calls, *marks, *silent})
    return Format(name, every, ReasoningMarks(opening, closing), read, forms)


def _blanks(reader: ReplyReader, out: PieceWriter) -> Steps:
    out.mark(reader.take())
    yield from reader.blanks(MAX_BLANKS)
    out.mark(reader.take())


def _call(reader: ReplyReader, out: PieceWriter, context: Context, read: ReadCall) -> Steps:
    try:
        yield from read(reader, out, context)
    except MalformedError:
        out.text(reader.take())
    else:
        yield from _blanks(reader, out)
