"""OLMo 3's calls as in Python."""

from __future__ import annotations

from service.replies.json_scanner import MAX_DEPTH
from tests.service.replies.cases import (
    BROKEN_ARGUMENTS,
    WHOLE_ARGUMENTS,
    Case,
    deep,
)

OPEN, CLOSE = "<function_calls>", "</function_calls>"


def wrap(*calls: str) -> str:
    return OPEN + "\n".join(calls) + CLOSE


def none(id: str, raw: str) -> Case:
    return Case(id, raw, raw)


def value(id: str, text: str, as_json: str) -> Case:
    return Case(id, wrap(f"f(a={text})"), calls=[("f", f'{{"a":{as_json}}}')])


CALL = wrap('f(a="x")')
CALLED = ("f", '{"a":"x"}')
CASES = [
    Case("nothing", ""),
    none("text", 'Hello <you>: f(a="x").'),
    Case("a call", CALL, calls=[CALLED]),
    Case("no arguments", wrap("f()"), calls=[("f", "{}")]),
    Case("two arguments", wrap('f(a="x", b=2)'), calls=[("f", '{"a":"x","b":2}')]),
    Case("two calls", wrap('f(a="x")', "g()"), calls=[CALLED, ("g", "{}")]),
    Case("two calls, a blank line", wrap("f()", "", "g()"), calls=[("f", "{}"), ("g", "{}")]),
    Case("two blocks", f"{CALL}\n{CALL}", calls=[CALLED, CALLED]),
    Case(
        "blanks", f'{OPEN}\n f ( a="x" , b=[1] , ) \n{CLOSE}\n', calls=[("f", '{"a":"x","b":[1]}')]
    ),
    Case("no end", f'{OPEN}f(a="x")', calls=[CALLED]),
    Case("names with dots", wrap("a.b-c(d-e=1)"), calls=[("a.b-c", '{"d-e":1}')]),
    Case("not ASCII", wrap('größe(水="é")'), calls=[("größe", '{"水":"é"}')]),
    Case("text before", f"I look.\n{CALL}", "I look.", calls=[CALLED]),
    Case("text behind", f"{CALL}\ndone", "done", calls=[CALLED]),
    Case("reasoning", f"<think>hm</think>hi{CALL}", "hi", "hm", [CALLED]),
    Case("opened by the prompt", f"hm</think>{CALL}", "", "hm", [CALLED], in_reasoning=True),
    Case("calls within reasoning", f"{CALL}</think>hi", "hi", CALL, in_reasoning=True),
    value("a number", "-1.50e3", "-1.50e3"),
    value("an integer above 2^53", "123456789012345678901", "123456789012345678901"),
    value("JSON's words", "[true, false, null]", "[true, false, null]"),
    value("true", "true", "true"),
    value("True", "True", "true"),
    value("False", "False", "false"),
    value("None", "None", "null"),
    value("an object", '{"b": [1, {"c": "d"}]}', '{"b": [1, {"c": "d"}]}'),
    value("brackets in text", '")),(]"', '")),(]"'),
    value("marks in text", f'"{CLOSE}"', f'"{CLOSE}"'),
    value("single quotes", "'it is \"here\"'", r'"it is \"here\""'),
    value("single quotes, escaped", r"'it\'s\n\\ \d é'", r'"it\'s\n\\ \\d é"'.replace(r"\'", "'")),
    value("an empty text", "''", '""'),
    none("the mark alone", OPEN),
    none("text behind the mark", f"{OPEN}hello world{CLOSE}"),
    none("an empty block", OPEN + CLOSE),
    none("mark begun at the end", "a <function_ca"),
    Case("mark repeated", f"{OPEN}{CALL}", OPEN, calls=[CALLED]),
    none("ends alone", f"a{CLOSE}b"),
    none("no name", wrap("(a=1)")),
    none("no names of arguments", wrap("f(1, 2)")),
    none("no call, an object", wrap('{"name": "f"}')),
    none("XML", f'{OPEN}\n<invoke name="f">\n</invoke>\n{CLOSE}'),
    none("ended in the name", f"{OPEN}get_wea"),
    none("ended in a name of arguments", f"{OPEN}f(ke"),
    Case("ended in text", f'{OPEN}f(a="xy', calls=[("f", '{"a":"xy', False)]),
    Case("ended in single quotes", f"{OPEN}f(a='xy", "'xy", calls=[("f", '{"a":', False)]),
    Case("ended in a number", f"{OPEN}f(a=12", calls=[("f", '{"a":12', False)]),
    Case("ended in a word", f"{OPEN}f(a=Tr", "Tr", calls=[("f", '{"a":', False)]),
    Case("ended between", f"{OPEN}f(a=1, ", ", ", calls=[("f", '{"a":1', False)]),
    Case("a name twice", wrap("f(a=1, a=2)"), f", a=2){CLOSE}", calls=[("f", '{"a":1', False)]),
    Case("no value", wrap("f(a=)"), f"){CLOSE}", calls=[("f", '{"a":', False)]),
    Case("an expression", wrap("f(a=1 + 2)"), f" + 2){CLOSE}", calls=[("f", '{"a":1', False)]),
    Case("a call as a value", wrap("f(a=g())"), f"g()){CLOSE}", calls=[("f", '{"a":', False)]),
    Case("the second is none", wrap("f()", "hello"), f"\nhello{CLOSE}", calls=[("f", "{}")]),
]


WHOLE = WHOLE_ARGUMENTS | {"deepest": deep(MAX_DEPTH - 1)}
BROKEN = BROKEN_ARGUMENTS | {"too deep": deep(MAX_DEPTH)}
"""The arguments themselves are one level."""
PYTHON = {
    "single quotes": '{"a": 1}',
    "no such literal": '{"a": true}',
    "trailing comma": '{"a": 1}',
}
"""What is no JSON, but is so in Python."""
TRUNCATED = f"<think>hm</think>hi\n{wrap('f(a=[1, true], b=None)', 'g(c=2)')}"
