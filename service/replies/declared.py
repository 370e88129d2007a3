"""What a format declares of its calls: in which texts they stand, and what is between these.

    JsonCalls     <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>, or a list of such
    NamedCalls    <function=f>{"a": 1}</function>
    TaggedCalls   <function=f><parameter=a>1</parameter></function>
    PythonCalls   [f(a=1)]

Each is data, and reads the calls that it describes. A family of models is a row of such data
(`families`); what a tokenizer declares becomes one, too (`response_template`). A closing text may
be missing everywhere: what tells that a call is whole are its arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from html import unescape
from types import MappingProxyType

from service.replies.call_form import CallForm
from service.replies.calls import (
    MAX_PARAMETERS,
    arguments,
    begin,
    call_items,
    call_object,
    keyed_object,
)
from service.replies.format import Context, Format, ReadCall, marked
from service.replies.json_scanner import MAX_DEPTH
from service.replies.pieces import PieceWriter
from service.replies.python_calls import python_call
from service.replies.reader import (
    MAX_BLANKS,
    MAX_NAME,
    MalformedError,
    Marks,
    Reader,
    Steps,
)
from service.replies.typed_values import TypedValue, as_json

_FENCE = "```"
_NAMED = '{"name"'
_PYTHON = MappingProxyType({"type": "python_arguments"})
_STRING = frozenset({"string"})
_OTHERS = frozenset({"number", "integer", "boolean", "null", "object", "array"})


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonCalls:
    """Calls that are JSON objects with a name and arguments, or a list of them.

    Attributes:
        marks: each begins a call or a list, of which it may have the bracket.
        closing: the texts that may end it.
        first: what follows the mark: "{" an object, "[" a list, or either.
        name: the member with the tool's name; empty: the only member's key is the name.
        between: the characters that may stand between objects; None: there is one object.
        fence: what stands between mark and JSON.
        bare: whether there may be no mark: an object at the beginning of the reply, in a block of
            code, or at the beginning of a line where a tool has that name; it needs arguments.
        arguments: the member with the arguments, as it is written; both usual ones are read.
        written: what is written around an object or a list; None: the first mark and closing text.
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
    def forms(self) -> tuple[CallForm, ...]:
        """How calls are held."""
        opening, closing = self.written or (self.marks[0], "".join(self.closing[:1]))
        named, given = f'{{"{self.name}": "', f'", "{self.arguments}": '
        form = CallForm(
            before=named if self.name else '{"',
            after=given if self.name else '": ',
            end="}",
            marks=self.marks,
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
        return (form,)

    @property
    def readers(self) -> Mapping[str, ReadCall]:
        """How to read what follows each mark that may stand in text."""
        return {mark: self._read_items if mark.endswith("[") else self._read for mark in self.marks}

    @property
    def within(self) -> tuple[str, ...]:
        """The marks within calls."""
        return self.closing

    @property
    def bare_readers(self) -> Mapping[str, ReadCall]:
        """How to read calls without a mark: see `marked`."""
        return {"{": self._read_bare} if self.bare else {}

    @property
    def line_readers(self) -> Mapping[str, ReadCall]:
        """How to read calls that begin a line: see `marked`."""
        return {_NAMED: self._read_line, _FENCE: self._read_block} if self.bare else {}

    def _read(self, reader: Reader, out: PieceWriter, context: Context) -> Steps:
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
        yield from past_any(reader, self.closing)

    def _read_items(self, reader: Reader, out: PieceWriter, context: Context) -> Steps:
        yield from call_items(reader, out, name=self.name)

    def _read_bare(self, reader: Reader, out: PieceWriter, context: Context) -> Steps:
        yield from reader.blanks()
        yield from self._objects(reader, out, None)

    def _read_line(self, reader: Reader, out: PieceWriter, context: Context) -> Steps:
        reader.back(_NAMED)
        yield from self._objects(reader, out, context.tools.keys())

    def _read_block(self, reader: Reader, out: PieceWriter, context: Context) -> Steps:
        yield from reader.literal("json")
        yield from reader.blanks(MAX_BLANKS)
        yield from self._objects(reader, out, context.tools.keys())
        yield from reader.past(_FENCE)

    def _objects(self, reader: Reader, out: PieceWriter, names: Set[str] | None) -> Steps:
        """Read the objects that come next. `names`: those that tools may have; None: any."""
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
    """Calls that are a name and a JSON object of arguments, between texts.

    Attributes:
        section, section_end: the texts around all calls, if there are any.
        call, name_end, call_end: what stands before the name, behind it, and behind the arguments.
        id: what stands between a name and the call's id.
        name_in_id: finds the name in what stands in its place, which is then the id.
        fence: what stands between the name, which is only the call's kind then, and the arguments:
            the name itself, and the beginning of a block of code.
        or_list: whether a list of objects may follow the mark instead.
        written: what is written around a name, besides.
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
    def forms(self) -> tuple[CallForm, ...]:
        """How calls are held."""
        before, after = self.written
        form = CallForm(
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
        """How to read what follows each mark that may stand in text."""
        sections = {self.section: self._read_section} if self.section else {}
        return {**sections, self.call: self._read}

    @property
    def within(self) -> tuple[str, ...]:
        """The marks within calls."""
        marks = (self.section_end, self.name_end.strip(), self.call_end, self.id)
        return tuple(mark for mark in marks if len(mark) > 1)

    def _read_section(self, reader: Reader, out: PieceWriter, context: Context) -> Steps:
        yield from reader.blanks()
        if (yield from reader.literal(self.call)):
            yield from self._read(reader, out, context)
        elif not (yield from reader.literal(self.section_end)):
            raise MalformedError

    def _read(self, reader: Reader, out: PieceWriter, context: Context) -> Steps:
        while True:
            yield from self._call(reader, out)
            yield from past_any(reader, (self.call_end,))
            if not self.section:
                return
            if not (yield from reader.past(self.call)):
                yield from reader.past(self.section_end)
                return

    def _call(self, reader: Reader, out: PieceWriter) -> Steps:
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
class TaggedCalls:
    """Calls that are a name, keys and values between texts. The values have no types: see
    `typed_values`.

    Attributes:
        section, section_end: the texts around calls, if there are any.
        call, name_end, call_end: what stands before the name, behind it, and behind the arguments.
        key, key_end: what stands around a key.
        value: what stands between key and value, behind blanks.
        value_end: what stands behind a value.
        attributes_end: what ends the attributes behind a name or a key; empty: there are none.
        attributes: the attribute of a key, by the type of its value, or "other"; a value is text
            where it has that of "string", and else JSON.
        name_attributes: the attributes of a name, as they are written.
        each: whether each call is written in a section of its own.
        may_begin: whether a call may stand without a section.
        trimmed: a character that is left out at both ends of a value.
        key_again: whether the key stands once more behind value_end, and `>`.
        nests: whether values may be objects and lists of such tags.
        gap: what is written between all these.
        plain: whether the marks of keys and values are written as text, even where they are special
            tokens.
    """

    call: str
    key: str
    key_end: str
    value_end: str
    call_end: str
    name_end: str = ""
    value: str = ""
    section: tuple[str, ...] = ()
    section_end: tuple[str, ...] = ()
    attributes_end: str = ""
    attributes: Mapping[str, str] = field(default_factory=dict)
    name_attributes: str = ""
    each: bool = False
    may_begin: bool = False
    trimmed: str = ""
    key_again: bool = False
    nests: bool = False
    gap: str = "\n"
    plain: bool = False

    @property
    def forms(self) -> tuple[CallForm, ...]:
        """How calls are held; values that nest are held to JSON, which is read there."""
        gap, trimmed = self.gap, self.trimmed
        key_end = self.key_end + (gap + self.value if self.value else "") + trimmed
        after: object = {
            kind: self.key_end + attribute + self.attributes_end
            for kind, attribute in self.attributes.items()
        }
        content = {
            "type": "tagged_parameters",
            "before_name": self.key,
            "after_name": after if self.attributes else key_end,
            "after_value": trimmed + self.value_end + ("{name}>" if self.key_again else "") + gap,
        }
        forms = []
        for index, section in enumerate(self.section or ("",)):
            form = CallForm(
                before=self.call,
                after=self.name_end + self.name_attributes + self.attributes_end + gap,
                end=self.call_end,
                marks=(section, *self.section, self.call) if section else (self.call,),
                opening=section + gap if section else "",
                closing=gap + self.section_end[index] if section else "",
                separator=None if self.name_attributes else gap,
                content=MappingProxyType(content),
                plain=(self.key, self.value_end) if self.plain else (),
                name_in_json=False,
            )
            if self.each:
                before, end = form.opening + form.before, form.end + form.closing
                form = replace(form, before=before, end=end, opening="", closing="")
            forms.append(form)
        return tuple(forms)

    @property
    def readers(self) -> Mapping[str, ReadCall]:
        """How to read what follows each mark that may stand in text."""
        sections: dict[str, ReadCall] = dict.fromkeys(self.section, self._read_section)
        return sections if sections and not self.may_begin else {**sections, self.call: self._read}

    @property
    def within(self) -> tuple[str, ...]:
        """The marks within calls."""
        marks = (
            self.call, self.call_end, self.name_end, self.key, self.key_end, self.value,
            self.value_end, self.attributes_end, *self.section_end,
        )  # fmt: skip
        return tuple(mark for mark in marks if len(mark) > 2)

    def _read_section(self, reader: Reader, out: PieceWriter, context: Context) -> Steps:
        yield from reader.blanks()
        if not (yield from reader.literal(self.call)):
            raise MalformedError
        yield from self._read(reader, out, context)

    def _read(self, reader: Reader, out: PieceWriter, context: Context) -> Steps:
        while True:
            yield from self._call(reader, out, context)
            if not self.section or not (yield from reader.past(self.call)):
                yield from past_any(reader, self.section_end)
                return

    def _call(self, reader: Reader, out: PieceWriter, context: Context) -> Steps:
        more: bool | None = None
        if self.name_end:
            name = yield from self._text(reader, self.name_end)
            yield from self._attributes(reader)
            if (yield from reader.behind_blanks()) not in (self.key[0], ""):
                raise MalformedError
        else:
            name = yield from reader.name(self.key[0] + "{")
            more = yield from self._more(reader)
        begin(reader, out, name)
        out.arguments("{", "")
        try:
            yield from self._arguments(reader, out, context.tools.get(name, {}), more)
        except MalformedError:
            out.end(complete=False)
            raise
        out.arguments("}", reader.take())
        out.end(complete=True)

    def _arguments(
        self,
        reader: Reader,
        out: PieceWriter,
        types: Mapping[str, frozenset[str]],
        more: bool | None,
    ) -> Steps:
        """Read keys and values, and the call's end. `more`: whether a key's mark has been read."""
        keys: set[str] = set()
        if more is None:
            more = yield from self._more(reader)
        while more:
            key = yield from self._text(reader, self.key_end)
            attributes = yield from self._attributes(reader)
            if self.value:
                yield from reader.blanks()
                if not (yield from reader.literal(self.value)):
                    raise MalformedError
            if key in keys or len(keys) >= MAX_PARAMETERS:
                raise MalformedError
            out.arguments(("," if keys else "") + json.dumps(key, ensure_ascii=False) + ":", "")
            keys.add(key)
            if attributes:
                kind = _STRING if self.attributes["string"].strip() in attributes else _OTHERS
            else:
                kind = types.get(key, frozenset())
            ended = yield from self._value(reader, out, kind, types.keys() - keys)
            if self.key_again:
                if not (yield from reader.literal(key + ">")):
                    raise MalformedError
                out.arguments("", reader.take())
            more = ended == self.key or (yield from self._more(reader))

    def _more(self, reader: Reader) -> Generator[None, None, bool]:
        """Read the mark of the next key, or the call's end: False."""
        yield from reader.blanks()
        if (yield from reader.literal(self.call_end)):
            return False
        if not (yield from reader.literal(self.key)):
            raise MalformedError
        return True

    def _text(self, reader: Reader, end: str) -> Generator[None, None, str]:
        """Read a name or a key, and what stands behind it."""
        found = yield from reader.name(end[0] if end[0] == "<" else end[0] + "\n")
        if not (yield from reader.literal(end)):
            raise MalformedError
        return unescape(found) if self.attributes_end and "&" in found else found

    def _attributes(self, reader: Reader) -> Generator[None, None, str]:
        found: list[str] = []
        while self.attributes_end and not (yield from reader.literal(self.attributes_end)):
            character = yield from reader.peek()
            if not character or character == "\n" or len(found) > MAX_NAME:
                raise MalformedError
            found.append(character)
            reader.pos += 1
        return "".join(found)

    def _value(
        self,
        reader: Reader,
        out: PieceWriter,
        types: frozenset[str],
        others: Set[str],
    ) -> Generator[None, None, str]:
        """Read a value up to the mark that ends it: its own, or that of the next key (one of the
        `others` that the tool has) if its own was forgotten.
        """
        if self.trimmed:
            yield from reader.literal(self.trimmed)
        if self.nests and (yield from reader.behind_blanks()) == self.key[0]:
            yield from reader.blanks()
            tree = yield from self._tree(reader, 1)
            out.arguments(tree, reader.take())
            return self.value_end
        value = TypedValue(out, types)
        ends = Marks({self.value_end} if self.nests else {self.value_end, self.key})
        while True:
            mark, raw = yield from value.read(reader, ends, trimmed=self.trimmed)
            if mark == self.key:
                key = yield from reader.ahead(self.key_end, MAX_NAME)
                if key not in others:
                    value.add(raw)
                    continue
            value.close(raw)
            return mark

    def _tree(self, reader: Reader, depth: int) -> Generator[None, None, str]:
        """Read a value with tags in it, which is held, and what ends it; returns its JSON."""
        text: list[str] = []
        members: dict[str, list[str]] = {}
        while not (yield from reader.literal(self.value_end)):
            if (yield from reader.literal(self.key)):
                if depth >= MAX_DEPTH:
                    raise MalformedError
                key = yield from self._text(reader, self.key_end)
                members.setdefault(key, []).append((yield from self._tree(reader, depth + 1)))
                if not (yield from reader.literal(key + ">")):
                    raise MalformedError
                continue
            character = yield from reader.peek()
            if not character:
                raise MalformedError
            text.append(character)
            reader.pos += 1
        if not members:
            return as_json("".join(text))
        if members.keys() == {"item"}:
            return f"[{', '.join(members['item'])}]"
        if any(len(values) > 1 for values in members.values()):
            raise MalformedError
        listed = [f"{json.dumps(key, ensure_ascii=False)}: {v[0]}" for key, v in members.items()]
        return f"{{{', '.join(listed)}}}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonCalls:
    """Calls as in Python, in a list or one a line; see `python_calls`.

    Attributes:
        marks: each begins a call or a list.
        closing: the text that may end it.
        in_list: whether they are in a list, which may also be one of JSON objects.
        bare: whether the reply may be such a list of declared tools, without a mark.
    """

    marks: tuple[str, ...]
    closing: str
    in_list: bool = True
    bare: bool = False

    @property
    def forms(self) -> tuple[CallForm, ...]:
        """How calls are held."""
        opening, closing = ("", "") if self.bare else (self.marks[0], self.closing)
        form = CallForm(
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
        """How to read what follows each mark that may stand in text."""
        return dict.fromkeys(self.marks, self._read)

    @property
    def within(self) -> tuple[str, ...]:
        """The marks within calls."""
        return (self.closing,)

    @property
    def bare_readers(self) -> Mapping[str, ReadCall]:
        """How to read calls without a mark: see `marked`."""
        return {"[": self._read_bare} if self.bare else {}

    def _read_bare(self, reader: Reader, out: PieceWriter, context: Context) -> Steps:
        yield from self._list(reader, out, context.tools.keys())

    def _read(self, reader: Reader, out: PieceWriter, context: Context) -> Steps:
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

    def _list(self, reader: Reader, out: PieceWriter, names: Set[str] | None) -> Steps:
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


def past_any(reader: Reader, closing: Sequence[str]) -> Steps:
    """Read blanks and one of these texts, if one comes next."""
    for text in closing:
        if text and (yield from reader.past(text)):
            return


def declared(
    name: str,
    *calls: Calls,
    reasoning: tuple[str, str] = ("<think>", "</think>"),
    silent: tuple[str, ...] = (),
    ends_reasoning: tuple[str, ...] = (),
    forms: tuple[CallForm, ...] | None = None,
) -> Format:
    """A format of calls that are declared; see `marked` for the arguments. `forms`: instead of the
    structures' own.
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
