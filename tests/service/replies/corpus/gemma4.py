"""Gemma 4: objects with bare keys, and strings between tokens."""

from __future__ import annotations

from tests.service.replies.cases import Case

CALL_OPEN, CALL_CLOSE, QUOTE = "<|tool_call>call:", "<tool_call|>", '<|"|>'


def wrap(inner: str) -> str:
    return f"{CALL_OPEN}f{{{inner}}}{CALL_CLOSE}"


def text(value: str) -> str:
    return f"{QUOTE}{value}{QUOTE}"


def value(id: str, written: str, as_json: str) -> Case:
    return Case(id, wrap(f"a:{written}"), calls=[("f", f'{{"a":{as_json}}}')])


def none(id: str, raw: str) -> Case:
    return Case(id, raw, raw)


CALL, CALLED = wrap(f"a:{text('x')}"), ("f", '{"a":"x"}')
CASES = [
    Case("nothing", ""),
    none("text", "Hello <you>."),
    Case("a call", CALL, calls=[CALLED]),
    Case("no arguments", wrap(""), calls=[("f", "{}")]),
    Case("two arguments", wrap(f"a:{text('x')},b:2"), calls=[("f", '{"a":"x","b":2}')]),
    Case("two calls", CALL + wrap(""), calls=[CALLED, ("f", "{}")]),
    Case("no end", CALL.removesuffix(CALL_CLOSE), calls=[CALLED]),
    Case("text around", f"hi\n{CALL}\nbye", "hibye", calls=[CALLED]),
    Case("reasoning", f"<|channel>thought\nhm<channel|>hi{CALL}", "hi", "hm", [CALLED]),
    Case("opened", f"hm\n<channel|>{CALL}", "", "hm", [CALLED], in_reasoning=True),
    Case("a draft in reasoning", f"{CALL}<channel|>hi", "hi", CALL, in_reasoning=True),
    Case("blanks", wrap(f" a : {text('x')} , b : 1 "), calls=[("f", '{"a":"x","b":1}')]),
    Case("quoted keys", wrap(f"{text('a')}:{text('x')}"), calls=[CALLED]),
    Case("not ASCII", wrap(f"größe:{text('水')}"), calls=[("f", '{"größe":"水"}')]),
    value("a string with marks", text('"},]:{ \\ \n'), r'"\"},]:{ \\ \n"'),
    value("an empty string", text(""), '""'),
    value("a number", "-1.5e3", "-1.5e3"),
    value("a boolean", "true", "true"),
    value("None", "None", "null"),
    value("a word", "Ulm an der Donau", '"Ulm an der Donau"'),
    value("a list", f"[1,{text('x,y')},[]]", '[1, "x,y", []]'),
    value("an object", f"{{b:{{c:{text('}')}}},d:1}}", '{"b": {"c": "}"}, "d": 1}'),
    none("no call", "<|tool_call>f{}<tool_call|>"),
    none("no brace", f"{CALL_OPEN}f<tool_call|>"),
    none("no name", f"{CALL_OPEN}{{}}"),
    Case("a key twice", wrap("a:1,a:2"), f",a:2}}{CALL_CLOSE}", calls=[("f", '{"a":1', False)]),
    Case("no value", wrap("a:"), f"}}{CALL_CLOSE}", calls=[("f", '{"a":', False)]),
    Case("no comma", wrap(f"a:{text('x')}b:1"), f"b:1}}{CALL_CLOSE}",
         calls=[("f", '{"a":"x"', False)]),
    Case("ended in a string", f"{CALL_OPEN}f{{a:{QUOTE}xy", calls=[("f", '{"a":"xy', False)]),
    Case("ended in a list", f"{CALL_OPEN}f{{a:[1", "[1", calls=[("f", '{"a":', False)]),
    Case("ended in a key", f"{CALL_OPEN}f{{ab", "ab", calls=[("f", "{", False)]),
]  # fmt: skip
TRUNCATED = "<|channel>thought\nhm<channel|>hi" + wrap(f"a:{text('x')},b:[1,2]")
