"""Llama's calls as in Python: the whole reply, or behind a mark."""

from __future__ import annotations

from tests.service.replies.cases import Case

TOOLS: dict[str, dict[str, frozenset[str]]] = {"f": {}, "g": {}}
CALLED = ("f", '{"a":"x"}')
CALL = '[f(a="x")]'


def none(id: str, raw: str) -> Case:
    return Case(id, raw, raw, tools=TOOLS)


CASES = [
    Case("nothing", ""),
    none("text", "Hello."),
    Case("a call", CALL, calls=[CALLED], tools=TOOLS),
    Case("two", '[f(a="x"), g()]', calls=[CALLED, ("g", "{}")], tools=TOOLS),
    Case("values", "[f(a=[1, {'b': None}], c=True)]", tools=TOOLS,
         calls=[("f", '{"a":[1, {"b": null}],"c":true}')]),
    Case("behind the mark", f"<|python_start|>{CALL}<|python_end|>", calls=[CALLED]),
    Case("the mark behind text", f"hi <|python_start|>{CALL}<|python_end|>", "hi", calls=[CALLED]),
    Case("blanks", f"\n {CALL}\n", calls=[CALLED], tools=TOOLS),
    Case("text behind", f"{CALL} bye", "bye", calls=[CALLED], tools=TOOLS),
    Case("reasoning", f"<think>hm</think>{CALL}", "", "hm", [CALLED], tools=TOOLS),
    Case("no tools", CALL, CALL),
    none("another tool", '[h(a="x")]'),
    none("a link", "[f](http://f)"),
    none("a list", "[1, 2]"),
    none("text before", f"hi {CALL}"),
    none("an empty list", "[]"),
    none("by position", "[f(1)]"),
    Case("ended", '[f(a="x', calls=[("f", '{"a":"x', False)], tools=TOOLS),
]  # fmt: skip
TRUNCATED = f"<think>hm</think>{CALL}"
