"""Qwen3-coder's XML."""

from __future__ import annotations

from service.replies import tool_types
from tests.service.replies.cases import Case

TOOLS = tool_types(
    [
        {
            "type": "function",
            "function": {
                "name": "f",
                "parameters": {
                    "properties": {
                        "s": {"type": "string"},
                        "n": {"type": "integer"},
                        "x": {"type": "number"},
                        "b": {"type": "boolean"},
                        "o": {"type": "object"},
                        "l": {"type": "array"},
                        "on": {"type": ["object", "null"]},
                        "sn": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
                        "r": {"$ref": "#/$defs/r"},
                    }
                },
            },
        }
    ]
)


def function(name: str, **values: str) -> str:
    parameters = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items()
    )
    return f"<function={name}>\n{parameters}</function>"


def wrap(name: str, **values: str) -> str:
    return f"<tool_call>\n{function(name, **values)}\n</tool_call>"


def value(id: str, key: str, text: str, as_json: str) -> Case:
    return Case(id, wrap("f", **{key: text}), calls=[("f", f'{{"{key}":{as_json}}}')], tools=TOOLS)


CALL = wrap("f", s="x")
CALLED = ("f", '{"s":"x"}')
CASES = [
    Case(
        "a forgotten end",
        "<tool_call>\n<function=f>\n<parameter=s>\nx\n<parameter=n>\n2\n</parameter>\n</function>\n"
        "</tool_call>",
        calls=[("f", '{"s":"x","n":2}')],
        tools=TOOLS,
    ),
    value("an integer written as a number", "n", "3.0", "3"),
    value("a word for a boolean", "b", "FALSE", "false"),
    Case(
        "a mark within a list, where a text may be",
        '<function=f><parameter=sl>["</parameter>"]</parameter></function>',
        calls=[("f", '{"sl":["</parameter>"]}')],
        tools={"f": {"sl": frozenset({"string", "array"})}},
    ),
    Case(
        "a text like a list, with a quote",
        '<function=f><parameter=sl>[it "is</parameter></function>',
        calls=[("f", '{"sl":"[it \\"is"}')],
        tools={"f": {"sl": frozenset({"string", "array"})}},
    ),
    value("one of two: a word", "sn", "3.0", '"3.0"'),
    Case("nothing", ""),
    Case("text", "Hello <you>.", "Hello <you>."),
    Case("a call", CALL, calls=[CALLED]),
    Case("no parameters", wrap("f"), calls=[("f", "{}")]),
    Case("two parameters", wrap("f", s="x", t="y"), calls=[("f", '{"s":"x","t":"y"}')]),
    Case("two calls", f"{CALL}\n{CALL}", calls=[CALLED, CALLED]),
    Case("text around", f"Look.\n{CALL}\nDone.", "Look.Done.", calls=[CALLED]),
    Case("reasoning", f"<think>\nhm\n</think>\n\n{CALL}", "", "hm", [CALLED]),
    Case("opened by the prompt", f"hm\n</think>\n\n{CALL}", "", "hm", [CALLED], in_reasoning=True),
    Case("no mark around it", f"hi\n{function('f', s='x')}", "hi", calls=[CALLED]),
    Case("no opening mark around it", f"{function('f', s='x')}\n</tool_call>", calls=[CALLED]),
    Case("on one line", "<function=f><parameter=s>x</parameter></function>", calls=[CALLED]),
    value("a string", "s", 'a "b"\n\\c\té 🙂', r'"a \"b\"\n\\c\té 🙂"'),
    value("a string of a number", "s", "5", '"5"'),
    Case(
        "an empty string",
        "<function=f><parameter=s>\n</parameter></function>",
        calls=[("f", '{"s":""}')],
    ),
    value("line breaks of its own", "s", "\n\nx\n\n", r'"\n\nx\n\n"'),
    value("markup in a string", "s", "<b></function></tool_call>", '"<b></function></tool_call>"'),
    value("unknown parameter", "unknown", "5", '"5"'),
    value("a reference", "r", "5", '"5"'),
    Case("unknown tool", wrap("g", n="5"), calls=[("g", '{"n":"5"}')], tools=TOOLS),
    value("an integer", "n", "5", "5"),
    value("an integer above 2^53", "n", "123456789012345678901", "123456789012345678901"),
    value("an integer with blanks", "n", "  5 ", "5"),
    value("no integer", "n", "5.5", '"5.5"'),
    value("no number", "n", "five", '"five"'),
    value("not JSON's number", "n", "05", '"05"'),
    value("a number", "x", "-1.50e3", "-1.50e3"),
    value("a whole number", "x", "5", "5"),
    value("NaN", "x", "NaN", '"NaN"'),
    value("true", "b", "true", "true"),
    value("Python's False", "b", "False", "false"),
    value("no boolean", "b", "1", '"1"'),
    value("an object", "o", '{"a": [1,  2]}', '{"a": [1,  2]}'),
    value("an object, laid out", "o", '{\n  "a": 1\n}', '{\n  "a": 1\n}'),
    value("a mark within an object", "o", '{"a": "x</parameter>\\""}', '{"a": "x</parameter>\\""}'),
    value("a mark within a list", "l", ' ["</parameter>", 1]', '["</parameter>", 1]'),
    value("an object that is not closed", "o", '{"a": "x', '"{\\"a\\": \\"x"'),
    value("no object", "o", "[1]", '"[1]"'),
    value("Python's object", "o", "{'a': 1}", '{"a": 1}'),
    value("an array", "l", "[1, {}]", "[1, {}]"),
    value("null", "on", "null", "null"),
    value("Python's None", "on", "None", "null"),
    value("one of two: number", "sn", "5", "5"),
    value("one of two: string", "sn", "five", '"five"'),
    Case("closing mark begun", wrap("f", s="a </para b"), calls=[("f", '{"s":"a </para b"}')]),
    Case(
        "a parameter twice",
        wrap("f", s="x")[:-24] + "<parameter=s>y",
        "\n<parameter=s>y",
        calls=[("f", '{"s":"x"', False)],
    ),
    Case(
        "text between parameters",
        "<function=f>\n<parameter=s>x</parameter>y</function>",
        "y</function>",
        calls=[("f", '{"s":"x"', False)],
    ),
    Case("text in the function", "<function=f>hi</function>", "<function=f>hi</function>"),
    Case("no name", "<function=></function>", "<function=></function>"),
    Case("another object", '<tool_call>{"name": "f"}', '<tool_call>{"name": "f"}'),
    Case(
        "mark repeated", f"<tool_call><tool_call>{CALL}", "<tool_call><tool_call>", calls=[CALLED]
    ),
    Case("mark begun at the end", "a <funct", "a <funct"),
    Case("ended in the name", "<tool_call>\n<function=f", "<tool_call>\n<function=f"),
    Case("ended in a string", "<function=f>\n<parameter=s>\nab", calls=[("f", '{"s":"ab', False)]),
    Case(
        "ended in a number",
        "<function=f>\n<parameter=n>\n12",
        tools=TOOLS,
        calls=[("f", '{"n":12', False)],
    ),
    Case(
        "ended between",
        "<function=f>\n<parameter=s>x</parameter>",
        calls=[("f", '{"s":"x"', False)],
    ),
]
TRUNCATED = f"<think>hm</think>hi\n{wrap('f', s='a', n='12')}"
