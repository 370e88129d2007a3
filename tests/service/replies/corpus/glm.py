"""GLM's names, keys and values."""

from __future__ import annotations

from service.replies import tool_types
from tests.service.replies.cases import Case

TOOLS = tool_types(
    [
        {
            "name": "f",
            "parameters": {
                "properties": {
                    "s": {"type": "string"},
                    "n": {"type": "integer"},
                    "o": {"type": ["object", "null"]},
                    "l": {"type": "array"},
                    "b": {"type": "boolean"},
                }
            },
        }
    ]
)


def wrap(name: str, **values: str) -> str:
    pairs = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
        for key, value in values.items()
    )
    return f"<tool_call>{name}\n{pairs}</tool_call>"


def value(id: str, key: str, text: str, as_json: str) -> Case:
    return Case(id, wrap("f", **{key: text}), calls=[("f", f'{{"{key}":{as_json}}}')], tools=TOOLS)


CALL = wrap("f", s="x")
CALLED = ("f", '{"s":"x"}')
PAIR = "<arg_key>s</arg_key><arg_value>x</arg_value>"
CASES = [
    Case("nothing", ""),
    Case("text", "Hello <you>.", "Hello <you>."),
    Case("a call", CALL, calls=[CALLED]),
    Case("on one line", f"<tool_call>f{PAIR}</tool_call>", calls=[CALLED]),
    Case("no arguments", "<tool_call>f\n</tool_call>", calls=[("f", "{}")]),
    Case("no arguments, on one line", "<tool_call>f</tool_call>", calls=[("f", "{}")]),
    Case("two arguments", wrap("f", s="x", t="y"), calls=[("f", '{"s":"x","t":"y"}')]),
    Case("two calls", f"{CALL}\n{CALL}", calls=[CALLED, CALLED]),
    Case("two calls beside each other", CALL + CALL, calls=[CALLED, CALLED]),
    Case("text around", f"\nLook.\n{CALL}\nDone.", "\nLook.Done.", calls=[CALLED]),
    Case("reasoning", f"\n<think>hm</think>\nhi\n{CALL}", "hi", "hm", [CALLED]),
    Case("no reasoning", f"\n<think></think>\n{CALL}", calls=[CALLED]),
    Case("opened by the prompt", f"hm</think>{CALL}", "", "hm", [CALLED], in_reasoning=True),
    Case("a call within reasoning", f"{CALL}</think>hi", "hi", CALL, in_reasoning=True),
    Case("blanks around the name", f"<tool_call>\n f \n{PAIR}\n\n</tool_call>", calls=[CALLED]),
    Case("a name that is not ASCII", "<tool_call>größe</tool_call>", calls=[("größe", "{}")]),
    Case("a key that is not ASCII", wrap("f", größe="m"), calls=[("f", '{"größe":"m"}')]),
    value("a string", "s", 'a "b"\n\\c\té 🙂', r'"a \"b\"\n\\c\té 🙂"'),
    value("a string with its blanks", "s", "\n a \n", r'"\n a \n"'),
    value("an empty string", "s", "", '""'),
    value("a string of a number", "s", "5", '"5"'),
    value("markup in a string", "s", "</tool_call><arg_key>", '"</tool_call><arg_key>"'),
    value("a closing mark begun", "s", "a </arg_val b", '"a </arg_val b"'),
    value("unknown argument", "unknown", "5", '"5"'),
    Case("unknown tool", wrap("g", n="5"), calls=[("g", '{"n":"5"}')], tools=TOOLS),
    value("an integer above 2^53", "n", "123456789012345678901", "123456789012345678901"),
    value("no integer", "n", "five", '"five"'),
    value("true", "b", "true", "true"),
    value("null", "o", "null", "null"),
    value("an object", "o", '{"a": [1,  2]}', '{"a": [1,  2]}'),
    value("an array", "l", "[1, {}]", "[1, {}]"),
    value("a broken array", "l", "[1, ", '"[1, "'),
    Case(
        "a key twice",
        f"<tool_call>f{PAIR}{PAIR}</tool_call>",
        "<arg_key>s</arg_key><arg_value>x</arg_value></tool_call>",
        calls=[("f", '{"s":"x"', False)],
    ),
    Case(
        "text between arguments",
        f"<tool_call>f{PAIR}y</tool_call>",
        "y</tool_call>",
        calls=[("f", '{"s":"x"', False)],
    ),
    Case(
        "a key without a value",
        f"<tool_call>f{PAIR}<arg_key>t</arg_key></tool_call>",
        "<arg_key>t</arg_key></tool_call>",
        calls=[("f", '{"s":"x"', False)],
    ),
    Case(
        "a value without a key",
        "<tool_call>f<arg_value>x</arg_value></tool_call>",
        "<tool_call>f<arg_value>x</arg_value></tool_call>",
    ),
    Case("no name", f"<tool_call>{PAIR}</tool_call>", f"<tool_call>{PAIR}</tool_call>"),
    Case(
        "no name, an object",
        '<tool_call>{"name": "f"}</tool_call>',
        '<tool_call>{"name": "f"}</tool_call>',
    ),
    Case("text in the call", "<tool_call>f g\nh</tool_call>", "<tool_call>f g\nh</tool_call>"),
    Case(
        "mark repeated", f"<tool_call><tool_call>{CALL}", "<tool_call><tool_call>", calls=[CALLED]
    ),
    Case("mark begun at the end", "a <tool_ca", "a <tool_ca"),
    Case("ends alone", "a</tool_call></arg_value>", "a</tool_call></arg_value>"),
    Case("ended in the name", "<tool_call>get_wea", "<tool_call>get_wea"),
    Case("ended in a key", "<tool_call>f\n<arg_key>ke", "ke", calls=[("f", "{", False)]),
    Case(
        "ended in a string",
        "<tool_call>f\n<arg_key>s</arg_key><arg_value>ab",
        calls=[("f", '{"s":"ab', False)],
    ),
    Case(
        "ended in a number",
        "<tool_call>f\n<arg_key>n</arg_key><arg_value>12",
        tools=TOOLS,
        calls=[("f", '{"n":12', False)],
    ),
    Case("ended between", f"<tool_call>f\n{PAIR}", calls=[("f", '{"s":"x"', False)]),
]
TRUNCATED = f"<think>hm</think>hi\n{wrap('f', s='a', n='12')}"
