"""Functionary 3.2: each part says to whom it goes."""

from __future__ import annotations

from tests.service.replies.cases import Case


def wrap(name: str, arguments: str) -> str:
    return f"{name}\n{arguments}"


WRAPS = [wrap]
TOOLS: dict[str, dict[str, frozenset[str]]] = {"f": {}, "g": {}}
CALL, CALLED = wrap("f", '{"a": 1}'), ("f", '{"a": 1}')


def none(id: str, raw: str) -> Case:
    return Case(id, raw, raw, tools=TOOLS)


CASES = [
    Case("nothing", ""),
    none("text to nobody", "Hello.\nYou {there}."),
    Case("text", "all\nHello\nyou.", "Hello\nyou."),
    Case("an empty text", "all\n"),
    Case("a call", CALL, calls=[CALLED], tools=TOOLS),
    Case("a call, no tools known", CALL, calls=[CALLED]),
    Case("two", f"{CALL}>>>g\n{{}}", calls=[CALLED, ("g", "{}")], tools=TOOLS),
    Case("text, then a call", f"all\nhi>>>{CALL}", "hi", calls=[CALLED], tools=TOOLS),
    Case("a call, then text", f"{CALL}>>>all\nhi", "hi", calls=[CALLED], tools=TOOLS),
    Case("with the prompt's mark", f">>>{CALL}", calls=[CALLED], tools=TOOLS),
    Case("another tool", f"all\nhi>>>{wrap('h', '{}')}", "hi>>>h\n{}", tools=TOOLS),
    Case("Python's prompt", "all\n>>> f(1)\n2", ">>> f(1)\n2", tools=TOOLS),
    none("no object", "f\n[1]"),
    none("no line break", "f{}"),
    none("the name alone", "f"),
    Case("ended", 'f\n{"a', calls=[("f", '{"a', False)], tools=TOOLS),
]
TRUNCATED = f"all\nhi>>>{CALL}>>>g\n{{}}"
