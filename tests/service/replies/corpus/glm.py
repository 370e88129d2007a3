"""GLM's names, keys and values."""

from __future__ import annotations

from tests.service.replies.cases import TAGGED, Case, Tags

TAGS = Tags(
    call="<tool_call>",
    name_end="\n",
    end="</tool_call>",
    key="<arg_key>",
    key_end="</arg_key>\n<arg_value>",
    value_end="</arg_value>\n",
)
TOOLS = TAGGED
PAIR = "<arg_key>s</arg_key><arg_value>x</arg_value>"
CALLED = ("f", '{"s":"x"}')


def none(id: str, raw: str) -> Case:
    return Case(id, raw, raw)


CASES = [
    *(
        case
        for case in TAGS.cases()
        if case.id not in ("a key twice", "text between", "ended between")
    ),
    Case("on one line", f"<tool_call>f{PAIR}</tool_call>", calls=[CALLED]),
    Case("no arguments, on one line", "<tool_call>f</tool_call>", calls=[("f", "{}")]),
    Case("blanks around the name", f"<tool_call>\n f \n{PAIR}\n\n</tool_call>", calls=[CALLED]),
    Case(
        "a key twice",
        f"<tool_call>f{PAIR}{PAIR}</tool_call>",
        "<arg_key>s</arg_key><arg_value>x</arg_value></tool_call>",
        calls=[("f", '{"s":"x"', False)],
    ),
    Case(
        "a key without a value",
        f"<tool_call>f{PAIR}<arg_key>t</arg_key></tool_call>",
        "<arg_key>t</arg_key></tool_call>",
        calls=[("f", '{"s":"x"', False)],
    ),
    none("a value without a key", "<tool_call>f<arg_value>x</arg_value></tool_call>"),
    none("no name, an object", '<tool_call>{"name": "f"}</tool_call>'),
    none("text in the call", "<tool_call>f g\nh</tool_call>"),
    none("mark begun at the end", "a <tool_ca"),
    none("ends alone", "a</tool_call></arg_value>"),
    Case("mark repeated", "<tool_call>" + TAGS.wrap("f"), "<tool_call>", calls=[("f", "{}")]),
    Case("ended in a key", "<tool_call>f\n<arg_key>ke", "ke", calls=[("f", "{", False)]),
    Case("ended between", f"<tool_call>f\n{PAIR}", calls=[("f", '{"s":"x"', False)]),
]
TRUNCATED = f"<think>hm</think>hi\n{TAGS.wrap('f', s='a', n='12')}"
