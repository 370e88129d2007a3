"""GigaChat 3: a call is a message of its own."""

from __future__ import annotations

from tests.service.replies.cases import Case

MARK, SEP = "function call<|role_sep|>\n", "<|message_sep|>"


def wrap(name: str, arguments: str) -> str:
    return f'{MARK}{{"name": "{name}", "arguments": {arguments}}}{SEP}\n\n'


def none(id: str, raw: str) -> Case:
    return Case(id, raw, raw)


WRAPS = [wrap]
CALL, CALLED = wrap("f", '{"a": 1}'), ("f", '{"a": 1}')
SHORT = CALL.replace(MARK, "<|function_call|>")
CASES = [
    Case("nothing", ""),
    none("text", "Hello <you>: function call."),
    Case("a call", CALL, calls=[CALLED]),
    Case("by the token", SHORT, calls=[CALLED]),
    Case("text, then a call", f"I look.{SEP}\n\n{CALL}", "I look.", calls=[CALLED]),
    Case("an empty text", f"{SEP}\n\n{CALL}", calls=[CALLED]),
    Case("no end", CALL.removesuffix(SEP + "\n\n"), calls=[CALLED]),
    Case("two", CALL + CALL, calls=[CALLED] * 2),
    Case("an answer", f"hi{SEP}", "hi"),
    none("no object", f"{MARK}x"),
    none("a list", f"{MARK}[]"),
    none("the words alone", "a function call<|role"),
    none("no name", f'{MARK}{{"arguments": {{}}}}'),
    Case("blanks", f' {MARK}\n{{ "name" : "f" }} ', calls=[("f", "{}")]),
    none("a list of calls", f'{MARK}[{{"name": "f"}}]'),
    Case("ended", f'{MARK}{{"name": "f", "arguments": {{"a', calls=[("f", '{"a', False)]),
]
TRUNCATED = f"hi{SEP}\n\n{CALL}"
