"""DeepSeek: V3 and R1, and V3.1."""

from __future__ import annotations

from tests.service.replies.cases import (
    Case,
)

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
ONE, ONE_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEP = "<｜tool▁sep｜>"


def one(name: str, arguments: str) -> str:
    return f"{ONE}{name}{SEP}{arguments}{ONE_END}"


def fenced(name: str, arguments: str) -> str:
    return f"{ONE}function{SEP}{name}\n```json\n{arguments}\n```{ONE_END}"


def wrap(name: str, arguments: str) -> str:
    return CALLS + one(name, arguments) + CALLS_END


CALL = one("f", '{"a": 1}')
FENCED = fenced("f", '{"a": 1}')
CALLED = ("f", '{"a": 1}')
CASES = [
    Case("nothing", ""),
    Case("text", "Hello <you>.", "Hello <you>."),
    Case("a call", f"{CALLS}{CALL}{CALLS_END}", calls=[CALLED]),
    Case("two calls", f"{CALLS}{CALL}{CALL}{CALLS_END}", calls=[CALLED, CALLED]),
    Case("fenced", f"{CALLS}{FENCED}{CALLS_END}", calls=[CALLED]),
    Case("two fenced", f"{CALLS}{FENCED}\n{FENCED}{CALLS_END}", calls=[CALLED, CALLED]),
    Case("of both kinds", f"{CALLS}{FENCED}\n{CALL}{CALLS_END}", calls=[CALLED, CALLED]),
    Case("blanks", f"{CALLS}\n{ONE} f {SEP}\n{{}}\n{ONE_END}\n{CALLS_END}\n", calls=[("f", "{}")]),
    Case("a tool named function", f"{CALLS}{one('function', '{}')}", calls=[("function", "{}")]),
    Case("no mark of all calls", CALL, calls=[CALLED]),
    Case("no end of all calls", f"{CALLS}{CALL}", calls=[CALLED]),
    Case("no end of a call", f"{CALLS}{CALL[: -len(ONE_END)]}", calls=[CALLED]),
    Case("no end of the fence", f"{CALLS}{FENCED[: -len(ONE_END) - 3]}", calls=[CALLED]),
    Case("text before", f"Let me see.\n\n{CALLS}{CALL}{CALLS_END}", "Let me see.", calls=[CALLED]),
    Case("text behind", f"{CALLS}{CALL}{CALLS_END}done", "done", calls=[CALLED]),
    Case("text between", f"{CALLS}{CALL} x {CALL}", "x", calls=[CALLED, CALLED]),
    Case("reasoning", f"<think>hm</think>hi{CALLS}{CALL}", "hi", "hm", [CALLED]),
    Case("opened by the prompt", "hm\n</think>\n\nhi", "hi", "hm", in_reasoning=True),
    Case("calls within reasoning", f"{CALL}</think>hi", "hi", CALL, in_reasoning=True),
    Case("reasoning never closed", "hm", "", "hm", in_reasoning=True),
    Case("closed and not opened", "hm</think>hi", "hm</think>hi"),
    Case(
        "marks in arguments",
        one("f", f'{{"a": "{ONE_END}{CALLS_END}```"}}'),
        calls=[("f", f'{{"a": "{ONE_END}{CALLS_END}```"}}')],
    ),
    Case("the first mark alone", CALLS, CALLS),
    Case("the first mark and its end", f"{CALLS}{CALLS_END}x", "x"),
    Case("ends alone", f"a{ONE_END}{CALLS_END}b", f"a{ONE_END}{CALLS_END}b"),
    Case("mark begun at the end", "a <｜tool▁ca", "a <｜tool▁ca"),
    Case("mark begun twice", f"<｜tool<｜<{CALL}", "<｜tool<｜<", calls=[CALLED]),
    Case("mark repeated", f"{CALLS}{CALLS}{ONE}{CALL}", f"{CALLS}{CALLS}{ONE}", calls=[CALLED]),
    Case("text behind the first mark", f"{CALLS}x", f"{CALLS}x"),
    Case("no separator", f"{ONE}f{ONE_END}", f"{ONE}f{ONE_END}"),
    Case("no name", f"{ONE}{SEP}{{}}", f"{ONE}{SEP}{{}}"),
    Case("no fence", f"{ONE}function{SEP}f\n{{}}", f"{ONE}function{SEP}f\n{{}}"),
    Case("another fence", f"{ONE}function{SEP}f\n```py\n{{}}", f"{ONE}function{SEP}f\n```py\n{{}}"),
    Case("no arguments", f"{ONE}f{SEP}{ONE_END}", f"{ONE}f{SEP}{ONE_END}"),
    Case(
        "fenced, no object", f"{ONE}function{SEP}f\n```json\n1", f"{ONE}function{SEP}f\n```json\n1"
    ),
    Case("ended in the name", f"{CALLS}{ONE}get_wea", f"{CALLS}{ONE}get_wea"),
    Case("ended in the arguments", f'{ONE}f{SEP}{{"a":', calls=[("f", '{"a":', False)]),
]
TRUNCATED = f"<think>hm</think>\nhi\n{CALLS}{FENCED}\n{CALL}{CALLS_END}"
WRAPS = [wrap, lambda *call: CALLS + fenced(*call) + CALLS_END]
