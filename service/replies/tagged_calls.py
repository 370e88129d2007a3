"""Calls whose arguments are keys and values between marks, declared as data; see `declared`."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Set
from dataclasses import dataclass, field, replace
from html import unescape
from types import MappingProxyType

from service.replies.call_form import CallGrammar
from service.replies.format import Context, ReadCall
from service.replies.json_calls import MAX_PARAMETERS, begin
from service.replies.json_scanner import MAX_DEPTH
from service.replies.pieces import PieceWriter
from service.replies.reader import MAX_NAME, MalformedError, ReplyMarks, ReplyReader, Steps
from service.replies.typed_values import TypedValue, as_json

_STRING = frozenset({"string"})
_OTHERS = frozenset({"number", "integer", "boolean", "null", "object", "array"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedCalls:
    """Calls that consist of a name, keys and values with texts around them. The values have no
    types; see `typed_values`.

    Attributes:
        section, section_end: the texts around calls, if any.
        call, name_end, call_end: the texts before the name, after the name, and after the
            arguments.
        key, key_end: the texts around a key.
        value: the text between a key and its value, after any blanks.
        value_end: the text after a value.
        attributes_end: the text that ends the attributes after a name or a key; empty if there are
            none.
        attributes: the attribute of a key, by the type of its value, or "other". A value whose key
            has the attribute of "string" is text; any other value is JSON.
        name_attributes: the attributes of a name, as they are written.
        each: whether each call is written in its own section.
        may_begin: whether a call may be outside of a section.
        trimmed: a character that is left out at both ends of a value.
        key_again: whether the key is repeated after value_end, followed by `>`.
        nests: whether values may be objects and lists of such tags.
        gaps: the text written between all these; several if models differ.
        plain: whether the marks of keys and values are written as text, even if they are special
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
    gaps: tuple[str, ...] = ("\n",)
    plain: bool = False

    @property
    def forms(self) -> tuple[CallGrammar, ...]:
        """The grammars that constrain calls. Values that nest are constrained to JSON, which the
        reader accepts.
        """
        return tuple(
            self._form(gap, section, end)
            for gap in self.gaps
            for section, end in zip(self.section or ("",), self.section_end or ("",), strict=True)
        )

    def _form(self, gap: str, section: str, section_end: str) -> CallGrammar:
        trimmed = self.trimmed
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
        form = CallGrammar(
            before=self.call,
            after=self.name_end + self.name_attributes + self.attributes_end + gap,
            end=self.call_end,
            marks=(section, *self.section, self.call) if section else (self.call,),
            opening=section + gap if section else "",
            closing=gap + section_end if section else "",
            separator=None if self.name_attributes else gap,
            content=MappingProxyType(content),
            plain=(self.key, self.value_end) if self.plain else (),
            name_in_json=False,
        )
        if self.each:
            before, end = form.opening + form.before, form.end + form.closing
            form = replace(form, before=before, end=end, opening="", closing="")
        return form

    @property
    def readers(self) -> Mapping[str, ReadCall]:
        """How to read what follows each mark that may occur in text."""
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

    def _read_section(self, reader: ReplyReader, out: PieceWriter, context: Context) -> Steps:
        yield from reader.blanks()
        if not (yield from reader.literal(self.call)):
            raise MalformedError
        yield from self._read(reader, out, context)

    def _read(self, reader: ReplyReader, out: PieceWriter, context: Context) -> Steps:
        while True:
            yield from self._call(reader, out, context)
            if not self.section or not (yield from reader.past(self.call)):
                yield from reader.past_any(*self.section_end)
                return

    def _call(self, reader: ReplyReader, out: PieceWriter, context: Context) -> Steps:
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
        reader: ReplyReader,
        out: PieceWriter,
        types: Mapping[str, frozenset[str]],
        more: bool | None,
    ) -> Steps:
        """Read the keys and values and the end of the call. `more` says whether a key's mark has
        been read; None if nothing has been read yet.
        """
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

    def _more(self, reader: ReplyReader) -> Generator[None, None, bool]:
        """Read the mark of the next key and return True, or read the end of the call and return
        False.
        """
        yield from reader.blanks()
        if (yield from reader.literal(self.call_end)):
            return False
        if not (yield from reader.literal(self.key)):
            raise MalformedError
        return True

    def _text(self, reader: ReplyReader, end: str) -> Generator[None, None, str]:
        """Read a name or a key, and the text after it."""
        found = yield from reader.name(end[0] if end[0] == "<" else end[0] + "\n")
        if not (yield from reader.literal(end)):
            raise MalformedError
        return unescape(found) if self.attributes_end and "&" in found else found

    def _attributes(self, reader: ReplyReader) -> Generator[None, None, str]:
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
        reader: ReplyReader,
        out: PieceWriter,
        types: frozenset[str],
        others: Set[str],
    ) -> Generator[None, None, str]:
        """Read a value up to the mark that ends it. This is the value's own mark or, if that was
        forgotten, the mark of the next key (one of the tool's `others`).
        """
        if self.trimmed:
            yield from reader.literal(self.trimmed)
        if self.nests and (yield from reader.behind_blanks()) == self.key[0]:
            yield from reader.blanks()
            tree = yield from self._tree(reader, 1)
            out.arguments(tree, reader.take())
            return self.value_end
        value = TypedValue(out, types)
        ends = ReplyMarks({self.value_end} if self.nests else {self.value_end, self.key})
        while True:
            mark, raw = yield from value.read(reader, ends, trimmed=self.trimmed)
            if mark == self.key:
                key = yield from reader.ahead(self.key_end, MAX_NAME)
                if key not in others:
                    value.add(raw)
                    continue
            value.close(raw)
            return mark

    def _tree(self, reader: ReplyReader, depth: int) -> Generator[None, None, str]:
        """Read and hold a value that contains tags, and its end; return its JSON."""
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
