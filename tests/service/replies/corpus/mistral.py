"""Mistral: an array of calls, and calls by name."""

from __future__ import annotations

from tests.service.replies.cases import (
    Case,
)

MARK = "[TOOL_CALLS]"


def wrap(name: str, arguments: str) -> str:
    return f"{MARK}{name}[ARGS]{arguments}"


def listed(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "arguments": {arguments}}}'


CALL = wrap("f", '{"a": 1}')
ITEM = listed("f", '{"a": 1}')
CALLED = ("f", '{"a": 1}')
CASES = [
    Case("nothing", ""),
    Case("text", "Hello [you].", "Hello [you]."),
    Case("by name", CALL, calls=[CALLED]),
    Case("two by name", CALL + wrap("g", "{}"), calls=[CALLED, ("g", "{}")]),
    Case("with an id", f"{MARK}f[CALL_ID]abcdefghi[ARGS]{{}}", calls=[("f", "{}")]),
    Case("blanks", f"{MARK} f [ARGS] {{}}\n", calls=[("f", "{}")]),
    Case("no mark of arguments", f'{MARK}f{{"a": 1}}', calls=[CALLED]),
    Case("an array of one", f"{MARK}[{ITEM}]", calls=[CALLED]),
    Case("an array of two", f"{MARK} [{ITEM}, {ITEM}]", calls=[CALLED, CALLED]),
    Case("an array, laid out", f"{MARK}[\n  {ITEM},\n  {ITEM}\n]\n", calls=[CALLED, CALLED]),
    Case("an empty array", f"{MARK}[]x", "x"),
    Case("an id behind", f'{MARK}[{ITEM[:-1]}, "id": "abcdefghi"}}]', calls=[CALLED]),
    Case("an id before", f'{MARK}[{{"id": "abcdefghi", {ITEM[1:]}]', calls=[CALLED]),
    Case("arguments first", f'{MARK}[{{"arguments": {{"a": 1}}, "name": "f"}}]', calls=[CALLED]),
    Case("text before", f"Let me see.\n{CALL}", "Let me see.", calls=[CALLED]),
    Case("text behind", f"{CALL} done", "done", calls=[CALLED]),
    Case("text behind an array", f"{MARK}[{ITEM}] done", "done", calls=[CALLED]),
    Case("reasoning", f"[THINK]hm[/THINK]hi{CALL}", "hi", "hm", [CALLED]),
    Case("reasoning opened by the prompt", "hm[/THINK]hi", "hi", "hm", in_reasoning=True),
    Case("other reasoning", "<think>hm</think>", "<think>hm</think>"),
    Case("a mark within reasoning", f"[THINK]{CALL}[/THINK]", "", CALL),
    Case(
        "marks in arguments",
        wrap("f", f'{{"a": "{MARK}[ARGS]]"}}'),
        calls=[("f", f'{{"a": "{MARK}[ARGS]]"}}')],
    ),
    Case("the mark alone", MARK, MARK),
    Case("mark begun at the end", "a [TOOL_", "a [TOOL_"),
    Case("mark begun twice", f"[TOOL_[[TOOL{CALL}", "[TOOL_[[TOOL", calls=[CALLED]),
    Case("mark repeated", f"{MARK}{MARK}{CALL}", f"{MARK}{MARK}", calls=[CALLED]),
    Case("mark mentioned", f"The {MARK} token.", f"The {MARK} token."),
    Case("no name", f"{MARK}[ARGS]{{}}", f"{MARK}[ARGS]{{}}"),
    Case("no arguments", f"{MARK}f[ARGS]x", f"{MARK}f[ARGS]x"),
    Case("an array of something else", f"{MARK}[1, 2]", f"{MARK}[1, 2]"),
    Case("an element that is no call", f"{MARK}[{ITEM}, 7]", ", 7]", calls=[CALLED]),
    Case("the array never closed", f"{MARK}[{ITEM}", calls=[CALLED]),
    Case("something between elements", f"{MARK}[{ITEM} {ITEM}]", f" {ITEM}]", calls=[CALLED]),
    Case("the object never closed", f"{MARK}[{ITEM[:-1]}", calls=[CALLED]),
    Case("ended in the name", f"{MARK}get_wea", f"{MARK}get_wea"),
    Case("ended in the arguments", f'{MARK}f[ARGS]{{"a"', calls=[("f", '{"a"', False)]),
    Case("a strange id", f"{MARK}f[CALL_ID]é é[ARGS]{{}}", calls=[("f", "{}")]),
]
TRUNCATED = f"[THINK]hm[/THINK]\nhi\n{MARK}[{ITEM}, {ITEM}]\n{CALL}"
WRAPS = [wrap, lambda *call: f"{MARK}[{listed(*call)}]"]
