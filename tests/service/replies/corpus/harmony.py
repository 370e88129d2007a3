"""gpt-oss' harmony."""

from __future__ import annotations

from tests.service.replies.cases import (
    Case,
)

START, CHANNEL, MESSAGE = "<|start|>assistant", "<|channel|>", "<|message|>"
END, CALL_END, RETURN = "<|end|>", "<|call|>", "<|return|>"
THOUGHT = f"{CHANNEL}analysis{MESSAGE}hm{END}"


def wrap(name: str, arguments: str) -> str:
    return (
        f"{CHANNEL}commentary to=functions.{name} <|constrain|>json{MESSAGE}{arguments}{CALL_END}"
    )


CALL = wrap("f", '{"a": 1}')
CALLED = ("f", '{"a": 1}')
CASES = [
    Case("nothing", ""),
    Case("final", f"{CHANNEL}final{MESSAGE}Hello.{RETURN}", "Hello."),
    Case("final, its end left out", f"{CHANNEL}final{MESSAGE}Hello.", "Hello."),
    Case("blanks are kept", f"{CHANNEL}final{MESSAGE}\n Hello. \n{RETURN}", "\n Hello. \n"),
    Case("reasoning", THOUGHT, "", "hm"),
    Case("reasoning, final", f"{THOUGHT}{START}{CHANNEL}final{MESSAGE}hi{RETURN}", "hi", "hm"),
    Case("a call", CALL, calls=[CALLED]),
    Case("a call, its end left out", CALL[: -len(CALL_END)], calls=[CALLED]),
    Case("reasoning, a call", f"{THOUGHT}{START}{CALL}", "", "hm", [CALLED]),
    Case(
        "called in the role",
        f"{THOUGHT}{START} to=functions.f{CHANNEL}commentary json{MESSAGE}{{}}{CALL_END}",
        "",
        "hm",
        [("f", "{}")],
    ),
    Case(
        "called at once",
        f" to=functions.f{CHANNEL}commentary <|constrain|>json{MESSAGE}{{}}{CALL_END}",
        calls=[("f", "{}")],
    ),
    Case("two calls", f"{CALL}{START}{wrap('g', '{}')}", calls=[CALLED, ("g", "{}")]),
    Case(
        "preamble, a call",
        f"{CHANNEL}commentary{MESSAGE}I look.{END}{START}{CALL}",
        "I look.",
        calls=[CALLED],
    ),
    Case("no constraint", f"{CHANNEL}commentary to=functions.f{MESSAGE}{{}}", calls=[("f", "{}")]),
    Case(
        "constraint at once",
        f"{CHANNEL}commentary to=functions.f<|constrain|>json{MESSAGE}{{}}",
        calls=[("f", "{}")],
    ),
    Case(
        "called from the analysis",
        f"{CHANNEL}analysis to=functions.f{MESSAGE}{{}}",
        calls=[("f", "{}")],
    ),
    Case(
        "a tool of the model's own",
        f"{CHANNEL}analysis to=python{MESSAGE}print(1){CALL_END}",
        "",
        "print(1)",
    ),
    Case("another one", f"{CHANNEL}commentary to=browser.open{MESSAGE}x{CALL_END}", "x"),
    Case(
        "blanks around arguments",
        f"{CHANNEL}commentary to=functions.f{MESSAGE}\n{{}}\n{CALL_END}",
        calls=[("f", "{}")],
    ),
    Case("empty arguments, closed", wrap("f", ""), calls=[("f", "{}")]),
    Case("empty arguments, not closed", wrap("f", "")[: -len(CALL_END)], calls=[("f", "", False)]),
    Case("arguments and more", wrap("f", "{}x"), "x", calls=[("f", "{}")]),
    Case(
        "no end before the next",
        f"{CHANNEL}analysis{MESSAGE}hm{START}{CHANNEL}final{MESSAGE}hi",
        "hi",
        "hm",
    ),
    Case("no start of the next", f"{THOUGHT}{CHANNEL}final{MESSAGE}hi", "hi", "hm"),
    Case("text alone", "Hello.", "Hello."),
    Case("text between", f"{THOUGHT}x{START}{CHANNEL}final{MESSAGE}hi", "xhi", "hm"),
    Case("unknown channel", f"{CHANNEL}other{MESSAGE}hi{END}", f"{CHANNEL}other{MESSAGE}hi{END}"),
    Case("no channel", f"{START}{MESSAGE}hi", f"{START}{MESSAGE}hi"),
    Case("header ended", f"{CHANNEL}fin", f"{CHANNEL}fin"),
    Case("header without a message", f"{CHANNEL}final{END}x", f"{CHANNEL}final{END}x"),
    Case("header begun twice", f"{START}{START}{CHANNEL}final{MESSAGE}hi", f"{START}hi"),
    Case("a long header", f"{CHANNEL}{'x' * 2000}{MESSAGE}hi", f"{CHANNEL}{'x' * 2000}{MESSAGE}hi"),
    Case("not at once", " to=x", " to=x"),
    Case("mark begun at the end", f"{CHANNEL}final{MESSAGE}a <|en", "a <|en"),
    Case(
        "marks in arguments",
        wrap("f", f'{{"a": "{END}{START}"}}'),
        calls=[("f", f'{{"a": "{END}{START}"}}')],
    ),
    Case("ended in the arguments", CALL[: -len(CALL_END) - 1], calls=[("f", '{"a": 1', False)]),
    Case(
        "broken, then final",
        f"{wrap('f', '{x}')}{START}{CHANNEL}final{MESSAGE}hi",
        "x}hi",
        calls=[("f", "{", False)],
    ),
    Case("messages joined", f"{THOUGHT}{START}{THOUGHT}", "", "hmhm"),
]
TRUNCATED = f"{THOUGHT}{START}{CALL}{START}{CHANNEL}final{MESSAGE}hi{RETURN}"
WRAPS = [wrap]
