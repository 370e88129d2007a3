"""LFM2's lists of calls as in Python."""

from __future__ import annotations

from tests.service.replies.cases import (
    Case,
    cases_of_lists,
)

OPEN, CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"


def wrap(*calls: str) -> str:
    return f"{OPEN}[{', '.join(calls)}]{CLOSE}"


def none(id: str, raw: str) -> Case:
    return Case(id, raw, raw)


CALL = wrap("f(a='x')")
CALLED = ("f", '{"a":"x"}')
CASES = [
    *cases_of_lists(OPEN, CLOSE),
    Case("as in Python", CALL, calls=[CALLED]),
    Case("two as in Python", wrap("f(a='x')", "g()"), calls=[CALLED, ("g", "{}")]),
    Case("over lines", f"{OPEN}[\nf(a='x'),\ng()\n]{CLOSE}", calls=[CALLED, ("g", "{}")]),
    Case("no end, as in Python", f"{OPEN}[f(a='x')", calls=[CALLED]),
    Case("text beside it", f"Look.{CALL}Done.", "Look.Done.", calls=[CALLED]),
    Case("a quote within", wrap("f(a='it's')"), calls=[("f", '{"a":"it\'s"}')]),
    Case("a comma behind it", wrap("f(a='x','y', b=1)"), ",'y', b=1)]" + CLOSE,
         calls=[("f", '{"a":"x"', False)]),
    Case("a list", wrap("f(a=['x', 'y'])"), calls=[("f", '{"a":["x", "y"]}')]),
    Case("a list of JSON", wrap('f(a=["x" , 1 ])'), calls=[("f", '{"a":["x" , 1 ]}')]),
    Case("a tuple", wrap("f(a=('x', None,))"), calls=[("f", '{"a":["x", null]}')]),
    Case("a dictionary", wrap("f(a={'x': True, \"y\": [{}]})"),
         calls=[("f", '{"a":{"x": true, "y": [{}]}}')]),
    Case("a list without a comma", wrap("f(a=[1 2])"), f"[1 2])]{CLOSE}",
         calls=[("f", '{"a":', False)]),
    Case("a wrong bracket", wrap("f(a=[1))"), f"[1))]{CLOSE}", calls=[("f", '{"a":', False)]),
    Case("a number as a key", wrap("f(a={1: 2})"), f"{{1: 2}})]{CLOSE}",
         calls=[("f", '{"a":', False)]),
    Case("a set", wrap("f(a={'x'})"), f"{{'x'}})]{CLOSE}", calls=[("f", '{"a":', False)]),
    none("no list of calls", f"{OPEN}[hello]{CLOSE}"),
    none("no list", f"{OPEN}f(a='x'){CLOSE}"),
    Case("the second is none", wrap("f(a='x')", "hello"), f", hello]{CLOSE}", calls=[CALLED]),
    Case("ended in a list", f"{OPEN}[f(a=['x', 'y", "['x', 'y", calls=[("f", '{"a":', False)]),
]  # fmt: skip
TRUNCATED = f"<think>hm</think>hi{wrap('f(a=[1, True], b=None)', 'g(c=2)')}"
