"""Hermes and Qwen."""

from __future__ import annotations

from tests.service.replies.cases import (
    Case,
)


def wrap(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


CALL = wrap("f", '{"a": 1}')
CALLED = ("f", '{"a": 1}')
CASES = [
    Case("nothing", ""),
    Case("text", "Hello, world.\n", "Hello, world.\n"),
    Case("blanks alone", " \n ", " \n "),
    Case("a call", CALL, calls=[CALLED]),
    Case("text before", f"Let me see.\n{CALL}", "Let me see.", calls=[CALLED]),
    Case("text behind", f"{CALL}\n\nDone.", "Done.", calls=[CALLED]),
    Case("two calls", f"{CALL}\n{wrap('g', '{}')}", calls=[CALLED, ("g", "{}")]),
    Case(
        "reasoning, text, calls",
        f"<think>\nI must\nlook.\n</think>\n\nI look.\n{CALL}\n{CALL}",
        "I look.",
        "I must\nlook.",
        [CALLED, CALLED],
    ),
    Case("opened by the prompt", "hm\n</think>\n\nhi", "hi", "hm", in_reasoning=True),
    Case("reasoning never closed", "<think>hm", "", "hm"),
    Case("reasoning again behind a call", f"{CALL}<think>x</think>y", "y", "x", [CALLED]),
    Case("empty reasoning", "<think>\n\n</think>\n\nhi", "hi"),
    Case("a call within reasoning", f"<think>{CALL}</think>hi", "hi", CALL),
    Case("reasoning after text", "a <think>b</think>", "a <think>b</think>"),
    Case("closed and not opened", "a</think>b", "a</think>b"),
    Case("reasoning opened twice", "<think>a<think>b</think>c", "c", "a<think>b"),
    Case("no blanks", '<tool_call>{"name":"f","arguments":{}}</tool_call>', calls=[("f", "{}")]),
    Case(
        "arguments first",
        '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>',
        calls=[CALLED],
    ),
    Case(
        "arguments as a string",
        r'<tool_call>{"name": "f", "arguments": "{\"a\": 1}"}</tool_call>',
        calls=[CALLED],
    ),
    Case("no arguments", '<tool_call>{"name": "f"}</tool_call>', calls=[("f", "{}")]),
    Case("null", '<tool_call>{"name": "f", "arguments": null}</tool_call>', calls=[("f", "{}")]),
    Case(
        "parameters", '<tool_call>{"name": "f", "parameters": {}}</tool_call>', calls=[("f", "{}")]
    ),
    Case(
        "other members",
        '<tool_call>{"x": [1, "}"], "name": "f", "arguments": {"a": 1}, "y": 1.5}</tool_call>',
        calls=[CALLED],
    ),
    Case(
        "escaped name",
        r'<tool_call>{"n\u0061me": "\u0066", "arguments": {}}</tool_call>',
        calls=[("f", "{}")],
    ),
    Case(
        "marks in arguments",
        wrap("f", '{"a": "<tool_call>{\\"name\\": \\"g\\"}</tool_call></think>"}'),
        calls=[("f", '{"a": "<tool_call>{\\"name\\": \\"g\\"}</tool_call></think>"}')],
    ),
    Case(
        "last brace missing",
        '<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call>x',
        "x",
        calls=[CALLED],
    ),
    Case("one brace more", f"{CALL[:-12]}}}</tool_call>x", "}</tool_call>x", calls=[CALLED]),
    Case("closing mark missing", f"{CALL[:-13]}\n{CALL}", calls=[CALLED, CALLED]),
    Case("closing mark alone", "a</tool_call>b", "a</tool_call>b"),
    Case("mark mentioned", "Use <tool_call> here.", "Use <tool_call> here."),
    Case("mark at the end", "a <tool_call>", "a <tool_call>"),
    Case("mark begun at the end", "a <tool_ca", "a <tool_ca"),
    Case("mark begun twice", f"<tool_<tool<{CALL}", "<tool_<tool<", calls=[CALLED]),
    Case(
        "mark repeated", f"<tool_call><tool_call>{CALL}", "<tool_call><tool_call>", calls=[CALLED]
    ),
    Case("not an object", "<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>"),
    Case("empty object", "<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>"),
    Case(
        "no name",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
    ),
    Case(
        "name of another kind",
        '<tool_call>{"name": 1, "arguments": {}}',
        '<tool_call>{"name": 1, "arguments": {}}',
    ),
    Case("empty name", '<tool_call>{"name": ""}', '<tool_call>{"name": ""}'),
    Case(
        "name that cannot be printed",
        r'<tool_call>{"name": "\ud800"}',
        r'<tool_call>{"name": "\ud800"}',
    ),
    Case(
        "arguments of another kind",
        '<tool_call>{"name": "f", "arguments": [1]}',
        '<tool_call>{"name": "f", "arguments": [1]}',
    ),
    Case(
        "string without an object",
        '<tool_call>{"name": "f", "arguments": "x"}',
        '<tool_call>{"name": "f", "arguments": "x"}',
    ),
    Case(
        "ended in the arguments",
        '<tool_call>{"name": "f", "arguments": {"a": "x',
        calls=[("f", '{"a": "x', False)],
    ),
    Case("ended before the name", 'a\n<tool_call>{"na', 'a\n<tool_call>{"na'),
    Case(
        "broken arguments, then a call",
        f'<tool_call>{{"name": "f", "arguments": {{"a": x}}}}</tool_call>{CALL}',
        "x}}</tool_call>",
        calls=[("f", '{"a": ', False), CALLED],
    ),
]
TRUNCATED = wrap("f", '{"a": [1, true]}')
WRAPS = [wrap]
