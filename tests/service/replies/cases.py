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
from service.replies import Context, Format, Reply, ToolTypes, fold, special_marks
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


def check(format: Format, case: Case) -> None:
    """A case comes to what it says, as a whole, at every split, by character and by token."""
    whole = parse(format, [case.raw], case.context)
    calls = [(call.name, call.arguments, call.complete) for call in whole.calls]
    assert (whole.text, whole.reasoning, calls) == (
        case.text,
        case.reasoning,
        [(*call, True)[:3] for call in case.calls],
    )
    check_divided(format, case.raw, case.context, whole)
    assert by_token(format, case) == whole


def check_divided(format: Format, raw: str, context: Context, whole: Reply) -> None:
    """It comes to the same at every split and by character."""
    assert parse(format, list(raw), context) == whole
    step = max(1, len(raw) // 1500)
    for place in range(step, len(raw), step):
        assert parse(format, [raw[:place], raw[place:]], context) == whole


def by_token(format: Format, case: Case) -> Reply:
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
