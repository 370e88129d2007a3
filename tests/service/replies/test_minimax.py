"""MiniMax M2's XML."""

from __future__ import annotations

import json

import pytest

from service.replies import FORMATS, Context, tool_types
from service.replies.calls import MAX_PARAMETERS
from tests.service.replies.cases import Case, check, check_truncated, parse

FORMAT = FORMATS["minimax"]
TEMPLATES = [
    "{%- set toolcall_begin_token = '<minimax:tool_call>' -%}<invoke name=<parameter <think>",
    "<minimax:tool_call>{{ tool_call.arguments }}",
]
TOOLS = tool_types(
    [
        {
            "name": "f",
            "parameters": {
                "properties": {
                    "s": {"type": "string"},
                    "n": {"type": "integer"},
                    "o": {"type": ["object", "null"]},
                    "b": {"type": "boolean"},
                }
            },
        }
    ]
)
OPEN, CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"


def invoke(name: str, **values: str) -> str:
    pairs = "".join(f'<parameter name="{k}">{v}</parameter>\n' for k, v in values.items())
    return f'<invoke name="{name}">\n{pairs}</invoke>\n'


def wrap(name: str, **values: str) -> str:
    return f"{OPEN}\n{invoke(name, **values)}{CLOSE}"


def value(id: str, key: str, text: str, as_json: str) -> Case:
    return Case(id, wrap("f", **{key: text}), calls=[("f", f'{{"{key}":{as_json}}}')], tools=TOOLS)


def none(id: str, raw: str) -> Case:
    return Case(id, raw, raw)


CALL = wrap("f", s="x")
CALLED = ("f", '{"s":"x"}')
BEGUN = f'{OPEN}<invoke name="f">'
PAIR = '<parameter name="s">x</parameter>'
CASES = [
    Case("nothing", ""),
    none("text", "Hello <you>."),
    Case("a call", CALL, calls=[CALLED]),
    Case("on one line", f"{BEGUN}{PAIR}</invoke>{CLOSE}", calls=[CALLED]),
    Case("no arguments", wrap("f"), calls=[("f", "{}")]),
    Case("two arguments", wrap("f", s="x", t="y"), calls=[("f", '{"s":"x","t":"y"}')]),
    Case(
        "two calls",
        f"{OPEN}\n{invoke('f', s='x')}{invoke('g')}{CLOSE}",
        calls=[CALLED, ("g", "{}")],
    ),
    Case("two blocks", f"{CALL}\n{CALL}", calls=[CALLED, CALLED]),
    Case("no end", f"{OPEN}\n{invoke('f', s='x')}", calls=[CALLED]),
    Case("text around", f"Look.\n{CALL}\nDone.", "Look.Done.", calls=[CALLED]),
    Case("reasoning", f"<think>\nhm\n</think>\n\nhi\n{CALL}", "hi", "hm", [CALLED]),
    Case("opened by the prompt", f"hm\n</think>\n\n{CALL}", "", "hm", [CALLED], in_reasoning=True),
    Case("a call within reasoning", f"{CALL}</think>hi", "hi", CALL, in_reasoning=True),
    Case("not ASCII", wrap("größe", 水="é"), calls=[("größe", '{"水":"é"}')]),
    value("a string", "s", 'a "b"\n\\c\té 🙂', r'"a \"b\"\n\\c\té 🙂"'),
    value("a string with its blanks", "s", "\n a \n", r'"\n a \n"'),
    value("an empty string", "s", "", '""'),
    value("a string of a number", "s", "5", '"5"'),
    value("markup in a string", "s", f"</invoke>{CLOSE}", f'"</invoke>{CLOSE}"'),
    value("a closing mark begun", "s", "a </para b", '"a </para b"'),
    value("an integer above 2^53", "n", "123456789012345678901", "123456789012345678901"),
    value("no integer", "n", "five", '"five"'),
    value("true", "b", "true", "true"),
    value("null", "o", "null", "null"),
    value("an object", "o", '{"a": [1,  2]}', '{"a": [1,  2]}'),
    Case("unknown tool", wrap("g", n="5"), calls=[("g", '{"n":"5"}')], tools=TOOLS),
    Case(
        "a parameter twice",
        f"{BEGUN}{PAIR}{PAIR}</invoke>",
        f"{PAIR}</invoke>",
        calls=[("f", '{"s":"x"', False)],
    ),
    Case(
        "text between parameters",
        f"{BEGUN}{PAIR}y</invoke>",
        "y</invoke>",
        calls=[("f", '{"s":"x"', False)],
    ),
    none("text in the call", f"{BEGUN}hi</invoke>"),
    none("no name", f'{OPEN}<invoke name=""></invoke>'),
    none("a name without its end", f'{OPEN}<invoke name="f" x="y"></invoke>'),
    none("no call", f"{OPEN}x{CLOSE}"),
    none("an empty block", f"{OPEN}{CLOSE}"),
    none("a call without the mark", invoke("f", s="x")),
    Case("mark repeated", f"{OPEN}{CALL}", OPEN, calls=[CALLED]),
    none("mark begun at the end", "a <minimax:to"),
    none("ends alone", f"a{CLOSE}</invoke>b"),
    none("ended in the name", f'{OPEN}<invoke name="get_wea'),
    Case("ended in a string", f'{BEGUN}<parameter name="s">ab', calls=[("f", '{"s":"ab', False)]),
    Case(
        "ended in a number",
        f'{BEGUN}<parameter name="n">12',
        tools=TOOLS,
        calls=[("f", '{"n":12', False)],
    ),
    Case("ended between", f"{BEGUN}{PAIR}", calls=[("f", '{"s":"x"', False)]),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_reply(case: Case) -> None:
    check(FORMAT, case)


def test_a_reply_that_ends_anywhere() -> None:
    check_truncated(FORMAT, f"<think>hm</think>hi\n{wrap('f', s='a', n='12')}", Context(TOOLS))


def test_arguments_are_bounded() -> None:
    values = {f"k{index}": "x" for index in range(MAX_PARAMETERS)}
    [call] = parse(FORMAT, [wrap("f", **values)]).calls
    assert len(json.loads(call.arguments)) == MAX_PARAMETERS
    [call] = parse(FORMAT, [wrap("f", **values, more="x")]).calls
    assert not call.complete
