"""Kimi K2's sections of calls."""

from __future__ import annotations

from tests.service.replies.cases import (
    Case,
)

CALLS, CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
BEGIN, ARGUMENTS, END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


def one(id: str, arguments: str) -> str:
    return f"{BEGIN}{id}{ARGUMENTS}{arguments}{END}"


def wrap(name: str, arguments: str) -> str:
    return f"{CALLS}{one(f'functions.{name}:0', arguments)}{CALLS_END}"


ONE, OTHER = one("functions.f:0", '{"a": 1}'), one("functions.g:1", "{}")
CALL = f"{CALLS}{ONE}{CALLS_END}"
CALLED = ("f", '{"a": 1}')


def none(id: str, raw: str) -> Case:
    return Case(id, raw, raw)


CASES = [
    Case("nothing", ""),
    none("text", "Hello <you>: f:0."),
    Case("a call", CALL, calls=[CALLED]),
    Case("two calls", f"{CALLS}{ONE}{OTHER}{CALLS_END}", calls=[CALLED, ("g", "{}")]),
    Case("two sections", f"{CALL}{CALL}", calls=[CALLED, CALLED]),
    Case("no prefix", f"{CALLS}{one('f:3', '{}')}{CALLS_END}", calls=[("f", "{}")]),
    Case("a name with a colon", f"{CALLS}{one('functions.a:b:12', '{}')}", calls=[("a:b", "{}")]),
    Case("a name with dots", f"{CALLS}{one('functions.a.b:0', '{}')}", calls=[("a.b", "{}")]),
    Case("not ASCII", f"{CALLS}{one('functions.größe_水:0', '{}')}", calls=[("größe_水", "{}")]),
    Case(
        "blanks",
        f"{CALLS}\n{BEGIN} functions.f:0 {ARGUMENTS} {{}} {END}\n{CALLS_END}\n",
        calls=[("f", "{}")],
    ),
    Case("no section", ONE, calls=[CALLED]),
    Case("no end of the section", f"{CALLS}{ONE}", calls=[CALLED]),
    Case("no end of a call", f"{CALLS}{ONE[: -len(END)]}", calls=[CALLED]),
    Case("no end of the first", f"{CALLS}{ONE[: -len(END)]}{OTHER}", calls=[CALLED, ("g", "{}")]),
    Case("text before", f"Let me see.\n{CALL}", "Let me see.", calls=[CALLED]),
    Case("text behind", f"{CALL}done", "done", calls=[CALLED]),
    Case("text between", f"{CALL} x {CALL}", "x", calls=[CALLED, CALLED]),
    Case("reasoning", f"<think>hm</think>hi{CALL}", "hi", "hm", [CALLED]),
    Case("no reasoning", f"<think></think>hi{CALL}", "hi", calls=[CALLED]),
    Case("opened by the prompt", f"hm</think>{CALL}", "", "hm", [CALLED], in_reasoning=True),
    Case("calls within reasoning", f"{CALL}</think>hi", "hi", CALL, in_reasoning=True),
    Case("reasoning never closed", "hm", "", "hm", in_reasoning=True),
    Case(
        "marks in arguments",
        wrap("f", f'{{"a": "{END}{CALLS_END}"}}'),
        calls=[("f", f'{{"a": "{END}{CALLS_END}"}}')],
    ),
    none("the first mark alone", CALLS),
    Case("an empty section", f"{CALLS}{CALLS_END}x", "x"),
    none("ends alone", f"a{END}{CALLS_END}b"),
    none("mark begun at the end", "a <|tool_calls_sec"),
    Case("mark begun twice", f"<|tool<|<{CALL}", "<|tool<|<", calls=[CALLED]),
    Case("mark repeated", f"{CALLS}{CALLS}{CALL}", f"{CALLS}{CALLS}", calls=[CALLED]),
    none("text behind the first mark", f"{CALLS}x"),
    none("no number", f"{BEGIN}functions.f{ARGUMENTS}{{}}{END}"),
    none("a number that is none", f"{BEGIN}functions.f:x{ARGUMENTS}{{}}{END}"),
    none("no name", f"{BEGIN}:0{ARGUMENTS}{{}}{END}"),
    none("no arguments' mark", f"{BEGIN}functions.f:0{END}"),
    none("an object as a name", f'{BEGIN}{{"name": "f"}}{END}'),
    none("no arguments", f"{BEGIN}functions.f:0{ARGUMENTS}{END}"),
    none("arguments of another kind", f"{BEGIN}functions.f:0{ARGUMENTS}[1]{END}"),
    none("ended in the name", f"{CALLS}{BEGIN}functions.get_wea"),
    Case(
        "ended in the arguments",
        f'{CALLS}{BEGIN}functions.f:0{ARGUMENTS}{{"a":',
        calls=[("f", '{"a":', False)],
    ),
    Case(
        "broken, then a call",
        wrap("f", '{"a": x}') + CALL,
        f"x}}{END}{CALLS_END}",
        calls=[("f", '{"a": ', False), CALLED],
    ),
]
TRUNCATED = f"<think>hm</think>hi{CALLS}{ONE}{OTHER}{CALLS_END}"
WRAPS = [wrap]
