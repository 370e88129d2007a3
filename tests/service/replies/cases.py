"""A format's cases, and what holds for each of them, however it is divided."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from engine.text import TextStream, Tokenizer
from service.replies import (
    Context,
    Format,
    Reply,
    ToolTypes,
    fold,
    special_marks,
    tool_types,
)
from service.replies.json_scanner import MAX_DEPTH
from service.replies.reader import MAX_BLANKS, MAX_HELD

Call = tuple[str, str] | tuple[str, str, bool]


@dataclass(frozen=True)
class Case:
    """A reply as the model wrote it, and what it comes to. A call: name, arguments, and False where
    they are not whole.
    """

    id: str
    raw: str
    text: str = ""
    reasoning: str = ""
    calls: Sequence[Call] = ()
    tools: ToolTypes = field(default_factory=dict)
    in_reasoning: bool = False

    @property
    def context(self) -> Context:
        return Context(self.tools, self.in_reasoning, "request-1/0")


def parse(format: Format, parts: Sequence[str], context: Context | None = None) -> Reply:
    """What parts come to; checks what holds of every reply."""
    parser = format.begin(context or Context())
    pieces = []
    for part in parts:
        pieces += parser.push(part)
        assert parser.size <= MAX_HELD + MAX_BLANKS + 64
    pieces += parser.finish()
    assert parser.finish() == []
    reply = fold(pieces)
    assert reply.raw == "".join(parts)
    for index, call in enumerate(reply.calls):
        assert call.index == index
        assert call.name
        if call.complete:
            assert isinstance(json.loads(call.arguments), dict)
    assert len({call.id for call in reply.calls}) == len(reply.calls)
    return reply


def check(format: Format, case: Case, *, by_token: bool = True) -> None:
    """A case comes to what it says, as a whole, at every split, by character and by token."""
    whole = parse(format, [case.raw], case.context)
    calls = [(call.name, call.arguments, call.complete) for call in whole.calls]
    assert (whole.text, whole.reasoning, calls) == (
        case.text,
        case.reasoning,
        [(*call, True)[:3] for call in case.calls],
    )
    check_divided(format, case.raw, case.context, whole)
    assert not by_token or read_by_token(format, case) == whole


def check_divided(format: Format, raw: str, context: Context, whole: Reply) -> None:
    """It comes to the same at every split and by character."""
    assert parse(format, list(raw), context) == whole
    step = max(1, len(raw) // 1500)
    for place in range(step, len(raw), step):
        assert parse(format, [raw[:place], raw[place:]], context) == whole


def read_by_token(format: Format, case: Case) -> Reply:
    """What a reply comes to by a tokenizer that has the format's marks as special tokens, which
    alone of its special tokens are shown.
    """
    tokenizer = _tokenizer(format)
    ids = tokenizer.encode(case.raw, add_special_tokens=False)
    assert len(special_marks(format, tokenizer)) == len(format.marks)
    return parse_ids(format, tokenizer, ids, case.context)


def spelled(format: Format, case: Case) -> Reply:
    """What the same text comes to by that tokenizer if no token of it is special."""
    tokenizer = _tokenizer(format)
    ids = [id for part in case.raw for id in tokenizer.encode(part, add_special_tokens=False)]
    assert not tokenizer.special_token_ids & set(ids)
    return parse_ids(format, tokenizer, ids, case.context)


def parse_ids(format: Format, tokenizer: Tokenizer, ids: Sequence[int], context: Context) -> Reply:
    """What tokens come to, as the service reads them."""
    shown = special_marks(format, tokenizer)
    stream = TextStream(tokenizer, shown=shown)
    parser = format.begin(replace(context, special=frozenset(shown.values())))
    pieces = []
    for id in ids:
        text = stream.push([id])
        parser.told(stream.shown_at)
        stream.shown_at.clear()
        pieces += parser.push(text)
    pieces += parser.push(stream.finish())
    return fold(pieces + parser.finish())


@cache
def _tokenizer(format: Format) -> Tokenizer:
    """Bytes, of which some stand together, and the format's marks."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(a, b) for a, b in pairwise('"name": "arguments": {"') if a != b and a != " " != b]
    vocabulary = {token: id for id, token in enumerate(alphabet)}
    for a, b in pairs:
        vocabulary.setdefault(a + b, len(vocabulary))
    backend = Backend(models.BPE(vocabulary, pairs))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\s+|\S+"), "isolated"), pre_tokenizers.ByteLevel(False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in sorted(format.marks)])
    return Tokenizer(backend)


def deep(levels: int) -> str:
    """An object nested so deeply."""
    return '{"a":' * (levels - 1) + "{}" + "}" * (levels - 1)


WHOLE_ARGUMENTS = {
    "empty": "{}",
    "blank inside": "{ }",
    "one": '{"a": 1}',
    "nested": '{"a":{"b":[1,2,{"c":null}],"d":[]},"e":[[],[{}]]}',
    "escapes": r'{"s": "\"quoted\" \\ \/ \u00e9 \n\t\b\f\r"}',
    "not ASCII": '{"é": "日本 🙂"}',
    "above 2^53": '{"n": 123456789012345678901234567890}',
    "numbers": '{"f": -1.50e-10, "z": 0, "m": -0, "e": 1E+5}',
    "literals": '{"t": true, "f": false, "n": null}',
    "laid out": '{\n  "a": [ 1 ,\t2 ]\r\n}',
    "deepest": deep(MAX_DEPTH),
    "long": '{"s": "' + "x" * 3000 + '"}',
    "a key twice": '{"a": 1, "a": 2}',
    "brackets in a string": '{"s": "}}]]{{[[\\"}"}',
    "empty key": '{"": ""}',
    "lone surrogate, escaped": r'{"s": "\ud800"}',
}
BROKEN_ARGUMENTS = {
    "leading zero": '{"a": 01}',
    "single quotes": "{'a': 1}",
    "no such literal": '{"a": True}',
    "cut literal": '{"a": nul}',
    "no colon": '{"a" 1}',
    "trailing comma": '{"a": 1,}',
    "bare key": "{a: 1}",
    "NaN": '{"a": NaN}',
    "line break in a string": '{"a": "x\ny"}',
    "too deep": deep(MAX_DEPTH + 1),
    "no such escape": r'{"a": "\x41"}',
    "short escape": r'{"a": "\u00g0"}',
    "wrong bracket": '{"a": [1}]',
    "no fraction": '{"a": 1.}',
    "no exponent": '{"a": 1e}',
    "two values": '{"a": 1 2}',
}


def check_whole_arguments(format: Format, wrap: Callable[[str, str], str], arguments: str) -> None:
    """A call has its arguments as they were written."""
    raw = wrap("f", arguments)
    check(format, Case("", raw, calls=[("f", arguments)], tools={"f": {}}))


def check_broken_arguments(format: Format, wrap: Callable[[str, str], str], arguments: str) -> None:
    """Arguments stop where they are no JSON any more; what follows is text."""
    raw = wrap("f", arguments)
    context = Context({"f": {}})
    whole = parse(format, [raw], context)
    [call] = whole.calls
    assert not call.complete
    assert arguments.startswith(call.arguments)
    assert whole.text.startswith(arguments[len(call.arguments) :])
    check_divided(format, raw, context, whole)


def check_truncated(format: Format, raw: str, context: Context) -> None:
    """A reply that ends anywhere loses nothing, and what it has is a beginning of the whole."""
    whole = parse(format, [raw], context)
    for end in range(len(raw)):
        reply = parse(format, [raw[:end]], context)
        assert parse(format, list(raw[:end]), context) == reply
        for call, full in zip(reply.calls, whole.calls, strict=False):
            assert call.id == full.id
            assert full.arguments.startswith(call.arguments) or not call.complete


def cases_of_lists(
    opening: str,
    closing: str,
    *,
    name: str = "name",
    arguments: str = "arguments",
    reasoning: tuple[str, str] = ("<think>", "</think>"),
) -> list[Case]:
    """Cases of a format in which a list of JSON objects stands between two texts; the closing one
    may be empty, and is not needed. `name`, `arguments`: an object's members.
    """
    begin, end = reasoning

    def one(called: str = "f", given: str = '{"a": 1}') -> str:
        return f'{{"{name}": "{called}", "{arguments}": {given}}}'

    def wrap(*objects: str) -> str:
        return f"{opening}[{', '.join(objects)}]{closing}"

    def none(id: str, raw: str) -> Case:
        return Case(id, raw, raw)

    call, called = wrap(one()), ("f", '{"a": 1}')
    return [
        Case("nothing", ""),
        none("text", "Hello <you>: [1, 2]."),
        Case("a call", call, calls=[called]),
        Case("two calls", wrap(one(), one("g", "{}")), calls=[called, ("g", "{}")]),
        Case("no end", f"{opening}[{one()}]", calls=[called]),
        Case("no end of the list", f"{opening}[{one()}", calls=[called]),
        Case("two lists", f"{call}\n{call}", calls=[called, called]),
        Case("blanks", f"{opening}\n[\n  {one()} ,\n  {one()}\n]\n{closing}\n", calls=[called] * 2),
        Case("an empty list", f"{opening}[]{closing}x", "x"),
        Case("not ASCII", wrap(one("größe", '{"é": "水"}')), calls=[("größe", '{"é": "水"}')]),
        Case(
            "the name last",
            wrap(f'{{"{arguments}": {{"a": 1}}, "{name}": "f"}}'),
            calls=[called],
        ),
        Case("other members", wrap(f'{{"x": [1, {{}}], {one()[1:-1]}, "y": "z"}}'), calls=[called]),
        Case("no arguments", wrap(f'{{"{name}": "f"}}'), calls=[("f", "{}")]),
        Case("null", wrap(one("f", "null")), calls=[("f", "{}")]),
        Case("arguments in a string", wrap(one("f", '"{\\"a\\": 1}"')), calls=[called]),
        Case("text before", f"Let me see.\n\n{call}", "Let me see.", calls=[called]),
        Case("text behind", f"{call}\ndone", "done", calls=[called]),
        Case("text between", f"{call} x {call}", "x", calls=[called, called]),
        Case("reasoning", f"{begin}\nhm\n{end}\n\nhi{call}", "hi", "hm", [called]),
        Case("opened by the prompt", f"hm{end}{call}", "", "hm", [called], in_reasoning=True),
        Case("calls within reasoning", f"{call}{end}hi", "hi", call, in_reasoning=True),
        Case("reasoning never closed", "hm", "", "hm", in_reasoning=True),
        none("closed and not opened", f"hm{end}hi"),
        Case(
            "marks in arguments",
            wrap(one("f", json.dumps({"a": f"]}}{closing}{opening}"}))),
            calls=[("f", json.dumps({"a": f"]}}{closing}{opening}"}))],
        ),
        none("the mark alone", opening),
        none("text behind the mark", f"{opening}x"),
        none("mark begun at the end", f"a {opening[:-2]}"),
        Case("mark repeated", f"{opening}{call}", opening, calls=[called]),
        none("no object", f"{opening}[1]{closing}"),
        none("no name", f'{opening}[{{"{arguments}": {{}}}}]{closing}'),
        none("an empty name", wrap(one(""))),
        none("a name of two lines", wrap(one("f\\ng"))),
        none("arguments of another kind", wrap(one("f", "[1]"))),
        none("no JSON", f"{opening}[{{{name}: f}}]{closing}"),
        none("ended before the name", f'{opening}[{{"na'),
        none("ended in the name", f'{opening}[{{"{name}": "get_wea'),
        Case("ended in the arguments", f"{opening}[{one()[:-2]}", calls=[("f", '{"a": 1', False)]),
        Case("ended between", f"{opening}[{one()}, ", ", ", calls=[called]),
        Case("a trailing comma", f"{opening}[{one()}, ]{closing}", f", ]{closing}", calls=[called]),
        Case("no comma", f"{opening}[{one()} x]{closing}", f" x]{closing}", calls=[called]),
        Case(
            "broken, then a call",
            wrap(one("f", '{"a": x}')) + call,
            f"x}}}}]{closing}",
            calls=[("f", '{"a": ', False), called],
        ),
        Case(
            "the second broken",
            f"{opening}[{one()}, {{}}]{closing}",
            f", {{}}]{closing}",
            calls=[called],
        ),
    ]


TAGGED = tool_types(
    [
        {
            "name": "f",
            "parameters": {
                "properties": {
                    "s": {"type": "string"},
                    "t": {"type": "string"},
                    "n": {"type": "integer"},
                    "x": {"type": "number"},
                    "b": {"type": "boolean"},
                    "l": {"type": "array"},
                    "o": {"type": ["object", "null"]},
                }
            },
        }
    ]
)
_TEXTS = {"s", "t", "unknown", "水"}


@dataclass(frozen=True)
class Tags:
    """How a format writes calls of keys and values. `{key}` in value_end is the key.

    Attributes:
        opening, closing: around all calls.
        call, name_end, end: before a name, behind it, and behind a call.
        key, key_end, value_end: before a key, behind it, and behind its value.
        other_end: behind the key of a value that is no text, if that is told.
    """

    call: str
    name_end: str
    end: str
    key: str
    key_end: str
    value_end: str
    opening: str = ""
    closing: str = ""
    other_end: str = ""
    reasoning: tuple[str, str] = ("<think>", "</think>")

    def pair(self, key: str, value: str) -> str:
        end = self.key_end if key in _TEXTS or not self.other_end else self.other_end
        return f"{self.key}{key}{end}{value}{self.value_end.replace('{key}', key)}"

    def one(self, name: str, **values: str) -> str:
        pairs = "".join(self.pair(key, value) for key, value in values.items())
        return f"{self.call}{name}{self.name_end}{pairs}{self.end}"

    def wrap(self, name: str, **values: str) -> str:
        return f"{self.opening}{self.one(name, **values)}{self.closing}"

    def cases(self, *, forgotten: bool = True) -> list[Case]:
        """Cases of such a format. `forgotten`: whether the next key ends a value."""

        def value(id: str, key: str, text: str, as_json: str) -> Case:
            called = [("f", f'{{"{key}":{as_json}}}')]
            return Case(id, self.wrap("f", **{key: text}), calls=called, tools=TAGGED)

        call, called = self.wrap("f", s="x"), ("f", '{"s":"x"}')
        begun = f"{self.opening}{self.call}f{self.name_end}"
        half, pair = ("f", '{"s":"x"', False), self.pair("s", "x")
        begin, end = self.reasoning
        begun_key = f"{self.key}n{self.other_end or self.key_end}"
        cases = [
            Case("nothing", ""),
            Case("text", "Hello <you>.", "Hello <you>."),
            Case("a call", call, calls=[called]),
            Case("no arguments", self.wrap("f"), calls=[("f", "{}")]),
            Case("two", self.wrap("f", s="x", t="y"), calls=[("f", '{"s":"x","t":"y"}')]),
            Case(
                "two calls",
                f"{self.opening}{self.one('f', s='x')}{self.one('g')}{self.closing}",
                calls=[called, ("g", "{}")],
            ),
            Case("two blocks", f"{call}\n{call}", calls=[called, called]),
            Case("no end", f"{self.opening}{self.one('f', s='x')}", calls=[called]),
            Case("text around", f"Look.\n{call}\nDone.", "Look.Done.", calls=[called]),
            Case("reasoning", f"{begin}\nhm\n{end}\n\nhi\n{call}", "hi", "hm", [called]),
            Case("opened", f"hm\n{end}\n\n{call}", "", "hm", [called], in_reasoning=True),
            Case("a call within reasoning", f"{call}{end}hi", "hi", call, in_reasoning=True),
            Case("not ASCII", self.wrap("größe", 水="é"), calls=[("größe", '{"水":"é"}')]),
            value("a string", "s", 'a "b"\n\\c\té 🙂', r'"a \"b\"\n\\c\té 🙂"'),
            value("an empty string", "s", "", '""'),
            value("a string of a number", "s", "5", '"5"'),
            value("a string of a word", "s", "TRUE", '"TRUE"'),
            value("an integer above 2^53", "n", "123456789012345678901", "123456789012345678901"),
            value("no integer", "n", "five", '"five"'),
            value("a number", "x", "-1.50e3", "-1.50e3"),
            value("true", "b", "true", "true"),
            value("Python's False", "b", "False", "false"),
            value("null", "o", "null", "null"),
            value("an object", "o", '{"a": [1,  2]}', '{"a": [1,  2]}'),
            value("Python's list", "l", "[1, {'a': True}]", '[1, {"a": true}]'),
            value("no list", "l", "[1, ", '"[1, "'),
            Case("a key twice", f"{begun}{pair}{pair}{self.end}", pair + self.end, calls=[half]),
            Case("text between", f"{begun}{pair}y{self.end}", f"y{self.end}", calls=[half]),
            Case("no name", self.wrap(""), self.wrap("")),
            Case("ended in the name", f"{self.opening}{self.call}get_wea", "{raw}"),
            Case("ended in a text", begun + self.pair("s", "ab").partition("ab")[0] + "ab",
                 calls=[("f", '{"s":"ab', False)]),
            Case("ended in a number", f"{begun}{begun_key}12", tools=TAGGED,
                 calls=[("f", '{"n":12', False)]),
            Case("ended between", f"{begun}{pair}", calls=[half]),
        ]  # fmt: skip
        if not self.other_end:
            cases += [
                value("an integer that is written as a number", "n", "3.0", "3"),
                value("a word for a boolean", "b", "FALSE", "false"),
            ]
        if forgotten:
            text = self.pair("s", "x").partition("x")[0] + "x"
            number = self.pair("n", "2")
            unknown = self.pair("unknown", "2")
            cases += [
                Case("a forgotten end", f"{begun}{text}{number}{self.end}{self.closing}",
                     calls=[("f", '{"s":"x","n":2}')], tools=TAGGED),
                Case("no declared key", f"{begun}{text}{unknown}{self.end}{self.closing}",
                     tools=TAGGED, calls=[("f", json.dumps(
                         {"s": "x" + unknown.removesuffix(self.value_end)},
                         ensure_ascii=False, separators=(",", ":")))]),
            ]  # fmt: skip
        return [replace(one, text=one.raw) if one.text == "{raw}" else one for one in cases]
