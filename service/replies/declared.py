"""Data structures that declare how a format writes calls: the texts around them and between them.

    JsonCalls     <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>, or a list of such
    NamedCalls    <function=f>{"a": 1}</function>
    TaggedCalls   <function=f><parameter=a>1</parameter></function>
    PythonCalls   [f(a=1)]

Each structure is data, and reads the calls that it describes. A family of models is a row of such
data (`families`), and so is what a tokenizer declares (`response_template`). A closing text may
always be missing: a call is complete when its arguments are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from types import MappingProxyType

from service.replies.call_form import CallGrammar
from service.replies.format import Context, Format, ReadCall, marked
from service.replies.json_calls import (
    arguments,
    begin,
    call_items,
    call_object,
    keyed_object,
)
from service.replies.pieces import PieceWriter
from service.replies.python_calls import python_call
from service.replies.reader import (
    MAX_BLANKS,
    MalformedError,
    ReplyReader,
    Steps,
)
from service.replies.tagged_calls import TaggedCalls

__all__ = ["JsonCalls", "NamedCalls", "PythonCalls", "TaggedCalls", "declared"]

_FENCE = "```"
_NAMED = '{"name"'
_PYTHON = MappingProxyType({"type": "python_arguments"})


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonCalls:
    """Calls that are JSON objects with a name and arguments, or a list of them.

    Attributes:
        marks: each begins a call or a list; a mark may include the opening bracket.
        closing: the texts that may end a call or a list.
        first: what follows the mark: "{" for an object, "[" for a list, or both.
        name: the member with the tool's name; if empty, the key of the only member is the name.
        between: the characters that may separate objects; None if there is only one object.
        fence: the text between the mark and the JSON.
        bare: whether the mark may be missing. The object is then at the beginning of the reply, or,
            if a tool has its name, in a code block or at the beginning of a line. It needs
            arguments.
        arguments: the name of the member with the arguments when writing; both usual names are
            read.
        written: the texts written around an object or a list; None for the first mark and closing
            text.
    """

    marks: tuple[str, ...]
    closing: tuple[str, ...] = ()
    first: str = "["
    name: str = "name"
    between: str | None = None
    fence: str = ""
    bare: bool = False
    arguments: str = "arguments"
    written: tuple[str, str] | None = None

    @property
    def forms(self) -> tuple[CallGrammar, ...]:
        """The grammars that constrain calls."""
        around = [(mark, "".join(self.closing[:1])) for mark in self.marks if mark[-1] != "["]
        return tuple(map(self._form, (self.written or around[0], *around[1:]), self.marks))

    def _form(self, around: tuple[str, str], mark: str) -> CallGrammar:
        opening, closing = around
        named, given = f'{{"{self.name}": "', f'", "{self.arguments}": '
        form = CallGrammar(
            before=named if self.name else '{"',
            after=given if self.name else '": ',
            end="}",
            marks=(mark, *(other for other in self.marks if other != mark)),
            opening=opening,
            closing=closing,
            bare="{" if self.bare else "",
        )
        if self.first[0] == "[":
            form = replace(form, opening=opening + "[", closing="]" + closing, separator=", ")
        elif self.bare:
            form = replace(form, opening="", closing="", separator=f"{self.between} ")
        elif self.between is None:
            before, end = opening + form.before, form.end + closing
            form = replace(form, before=before, end=end, opening="", closing="")
        return form

    @property
    def readers(self) -> Mapping[str, ReadCall]:
        """How to read what follows each mark that may occur in text."""
        return {mark: self._read_items if mark.endswith("[") else self._read for mark in self.marks}

    @property
    def within(self) -> tuple[str, ...]:
        """The marks within calls."""
        return self.closing

    @property
    def bare_readers(self) -> Mapping[str, ReadCall]:
        """How to read calls without a mark; see `marked`."""
        return {"{": self._read_bare} if self.bare else {}

    @property
    def line_readers(self) -> Mapping[str, ReadCall]:
        """How to read calls that begin a line; see `marked`."""
        return {_NAMED: self._read_line, _FENCE: self._read_block} if self.bare else {}

    def _read(self, reader: ReplyReader, out: PieceWriter, context: Context) -> Steps:
        yield from reader.blanks()
        if self.fence:
            if not (yield from reader.literal(self.fence)):
                raise MalformedError
            yield from reader.blanks()
        if (yield from reader.peek()) == "[" and "[" in self.first:
            yield from reader.expect("[")
            yield from call_items(reader, out, name=self.name)
        else:
            yield from self._objects(reader, out, None)
        yield from reader.past_any(*self.closing)

    def _read_items(self, reader: ReplyReader, out: PieceWriter, context: Context) -> Steps:
        yield from call_items(reader, out, name=self.name)

    def _read_bare(self, reader: ReplyReader, out: PieceWriter, context: Context) -> Steps:
        yield from reader.blanks()
        yield from self._objects(reader, out, None)

    def _read_line(self, reader: ReplyReader, out: PieceWriter, context: Context) -> Steps:
        reader.back(_NAMED)
        yield from self._objects(reader, out, context.tools.keys())

    def _read_block(self, reader: ReplyReader, out: PieceWriter, context: Context) -> Steps:
        yield from reader.literal("json")
        yield from reader.blanks(MAX_BLANKS)
        yield from self._objects(reader, out, context.tools.keys())
        yield from reader.past(_FENCE)

    def _objects(self, reader: ReplyReader, out: PieceWriter, names: Set[str] | None) -> Steps:
        """Read the objects that come next. `names` are the allowed tool names; None allows any."""
        if "{" not in self.first:
            raise MalformedError
        while True:
            if self.name:
                whole = yield from call_object(
                    reader, out, name=self.name, needs_arguments=self.bare, names=names
                )
            else:
                whole = yield from keyed_object(reader, out)
            if not whole or self.between is None:
                return
            ahead = yield from reader.behind_blanks()
            if ahead and ahead in self.between:
                yield from reader.blanks()
                yield from reader.expect(self.between)
                ahead = yield from reader.behind_blanks()
            if ahead != "{":
                return
            yield from reader.blanks()
            out.mark(reader.take())


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedCalls:
    """Calls that consist of a name and a JSON object of arguments, with texts around them.

    Attributes:
        section, section_end: the texts around all calls, if any.
        call, name_end, call_end: the texts before the name, after the name, and after the
            arguments.
        id: the text between a name and the call's id.
        name_in_id: extracts the name from the id, which is then written instead of the name.
        fence: the text between the name and the arguments, which begins a code block. If it is
            used, the kind of call and `name_end` come before the name.
        or_list: whether a list of objects may follow the mark instead.
        written: additional texts that are written around a name.
    """

    call: str
    name_end: str
    call_end: str = ""
    section: str = ""
    section_end: str = ""
    id: str = ""
    name_in_id: re.Pattern[str] | None = None
    fence: str = ""
    or_list: bool = False
    written: tuple[str, str] = ("", "")

    @property
    def forms(self) -> tuple[CallGrammar, ...]:
        """The grammars that constrain calls."""
        before, after = self.written
        form = CallGrammar(
            before=self.call + before,
            after=after + self.name_end,
            end=self.call_end,
            marks=tuple(filter(None, (self.section, self.call))),
            opening=self.section,
            closing=self.section_end,
            # A number in an id grows with each call, so there is one.
            separator=None if self.name_in_id is not None else "",
            name_in_json=False,
        )
        forms = JsonCalls(marks=(self.call,)).forms if self.or_list else ()
        if not self.fence:
            return (*forms, form)
        fenced = replace(
            form,
            before=f"{self.call}function{self.name_end}",
            after=f"\n{self.fence}\n",
            end=f"\n{_FENCE}{self.call_end}",
            separator="\n",
        )
        return (form, fenced)

    @property
    def readers(self) -> Mapping[str, ReadCall]:
        """How to read what follows each mark that may occur in text."""
        sections = {self.section: self._read_section} if self.section else {}
        return {**sections, self.call: self._read}

    @property
    def within(self) -> tuple[str, ...]:
        """The marks within calls."""
        marks = (self.section_end, self.name_end.strip(), self.call_end, self.id)
        return tuple(mark for mark in marks if len(mark) > 1)

    def _read_section(self, reader: ReplyReader, out: PieceWriter, context: Context) -> Steps:
        yield from reader.blanks()
        if (yield from reader.literal(self.call)):
            yield from self._read(reader, out, context)
        elif not (yield from reader.literal(self.section_end)):
            raise MalformedError

    def _read(self, reader: ReplyReader, out: PieceWriter, context: Context) -> Steps:
        while True:
            yield from self._call(reader, out)
            yield from reader.past_any(self.call_end)
            if not self.section:
                return
            if not (yield from reader.past(self.call)):
                yield from reader.past(self.section_end)
                return

    def _call(self, reader: ReplyReader, out: PieceWriter) -> Steps:
        yield from reader.blanks()
        if self.or_list and (yield from reader.peek()) == "[":
            yield from reader.expect("[")
            yield from call_items(reader, out)
            return
        stop, id = self.name_end[0] + "{", None
        name = yield from reader.name(stop)
        if self.id and (yield from reader.literal(self.id)):
            written = yield from reader.name(stop)
            id = written if written.isalnum() and written.isascii() else None
        named = yield from reader.literal(self.name_end)
        if not named and not self.id:  # with an id, the text behind the name may be missing
            raise MalformedError
        yield from reader.blanks()
        fenced = bool(self.fence) and (yield from reader.peek()) != "{"
        if fenced:
            name = yield from reader.name(self.fence[0])
            if not (yield from reader.literal(self.fence)):
                raise MalformedError
            yield from reader.blanks()
        if self.name_in_id is not None:
            if (found := self.name_in_id.match(name)) is None:
                raise MalformedError
            name, id = found.group(1), name
        if (yield from reader.peek()) != "{":
            raise MalformedError
        begin(reader, out, name, id)
        yield from arguments(reader, out)
        if fenced:
            yield from reader.past(_FENCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonCalls:
    """Calls in Python syntax, in a list or one per line; see `python_calls`.

    Attributes:
        marks: each begins a call or a list.
        closing: the text that may end a call or a list.
        in_list: whether the calls are in a list, which may also be a list of JSON objects.
        bare: whether the reply may be such a list without a mark, if its tools are declared.
    """

    marks: tuple[str, ...]
    closing: str
    in_list: bool = True
    bare: bool = False

    @property
    def forms(self) -> tuple[CallGrammar, ...]:
        """The grammars that constrain calls."""
        opening, closing = ("", "") if self.bare else (self.marks[0], self.closing)
        form = CallGrammar(
            before="",
            after="(",
            end=")",
            marks=self.marks,
            opening=opening + "[" if self.in_list else opening,
            closing="]" + closing if self.in_list else closing,
            separator=", " if self.in_list else "\n",
            content=_PYTHON,
            name_in_json=False,
            bare="[" if self.bare else "",
        )
        return (form,)

    @property
    def readers(self) -> Mapping[str, ReadCall]:
        """How to read what follows each mark that may occur in text."""
        return dict.fromkeys(self.marks, self._read)

    @property
    def within(self) -> tuple[str, ...]:
        """The marks within calls."""
        return (self.closing,)

    @property
    def bare_readers(self) -> Mapping[str, ReadCall]:
        """How to read calls without a mark; see `marked`."""
        return {"[": self._read_bare} if self.bare else {}

    def _read_bare(self, reader: ReplyReader, out: PieceWriter, context: Context) -> Steps:
        yield from self._list(reader, out, context.tools.keys())

    def _read(self, reader: ReplyReader, out: PieceWriter, context: Context) -> Steps:
        if self.in_list:
            yield from self._list(reader, out, None)
            yield from reader.past(self.closing)
            return
        while True:
            yield from reader.blanks()
            yield from python_call(reader, out)
            ahead = yield from reader.behind_blanks()
            if not ahead or (ahead == "<" and (yield from reader.past(self.closing))):
                return

    def _list(self, reader: ReplyReader, out: PieceWriter, names: Set[str] | None) -> Steps:
        yield from reader.blanks()
        yield from reader.expect("[")
        yield from reader.blanks()
        if names is None and (yield from reader.peek()) in ("{", "]"):
            yield from call_items(reader, out)
            return
        while True:
            yield from python_call(reader, out, names)
            yield from reader.blanks()
            if not (yield from reader.peek()) or (yield from reader.expect(",]")) == "]":
                return
            yield from reader.blanks()


Calls = JsonCalls | NamedCalls | TaggedCalls | PythonCalls


def declared(
    name: str,
    *calls: Calls,
    reasoning: tuple[str, str] = ("<think>", "</think>"),
    silent: tuple[str, ...] = (),
    ends_reasoning: tuple[str, ...] = (),
    forms: tuple[CallGrammar, ...] | None = None,
) -> Format:
    """Build a format from declared calls; see `marked` for the arguments. `forms` overrides the
    grammars of the structures.
    """
    readers: dict[str, ReadCall] = {}
    bare: dict[str, ReadCall] = {}
    lines: dict[str, ReadCall] = {}
    for one in calls:
        readers |= one.readers
        if isinstance(one, JsonCalls | PythonCalls):
            bare |= one.bare_readers
        if isinstance(one, JsonCalls):
            lines |= one.line_readers
    within = [mark for one in calls for mark in one.within if mark not in {*readers, *silent}]
    return marked(
        name,
        readers,
        reasoning=reasoning,
        bare=bare,
        lines=lines,
        marks=tuple(dict.fromkeys(within)),
        silent=silent,
        ends_reasoning=ends_reasoning,
        forms=tuple(form for one in calls for form in one.forms) if forms is None else forms,
    )
