"""Functionary 3.1: a name in a tag, and JSON."""

from __future__ import annotations

from tests.service.replies.cases import Case


def wrap(name: str, arguments: str) -> str:
    return f"<function={name}>{arguments}</function>"


def none(id: str, raw: str) -> Case:
    return Case(id, raw, raw)


WRAPS = [wrap]
CALL, CALLED = wrap("f", '{"a": 1}'), ("f", '{"a": 1}')
CASES = [
    Case("nothing", ""),
    none("text", "Hello <you>."),
    Case("a call", CALL, calls=[CALLED]),
    Case("two", CALL + wrap("g", "{}"), calls=[CALLED, ("g", "{}")]),
    Case("two lines", f"{CALL}\n{CALL}", calls=[CALLED] * 2),
    Case("text around", f"hi\n{CALL}\nbye", "hibye", calls=[CALLED]),
    Case("blanks", '<function= f >\n{"a": 1}\n</function>', calls=[CALLED]),
    Case("no end", CALL.removesuffix("</function>"), calls=[CALLED]),
    Case("reasoning", f"<think>hm</think>{CALL}", "", "hm", [CALLED]),
    none("no object", "<function=f>x</function>"),
    none("no name", "<function=>{}</function>"),
    none("no end of the name", "<function=f{}"),
    none("parameters", "<function=f><parameter=a>1</parameter></function>"),
    none("a mark begun", "a <functio"),
    Case("ended", '<function=f>{"a', calls=[("f", '{"a', False)]),
]
TRUNCATED = f"<think>hm</think>hi\n{CALL}{CALL}"
