"""Llama 3: JSON by itself."""

from __future__ import annotations

from tests.service.replies.cases import (
    Case,
)

TAG = "<|python_tag|>"
TOOLS: dict[str, dict[str, frozenset[str]]] = {"f": {}}


def wrap(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


CALL = wrap("f", '{"a": 1}')
CALLED = ("f", '{"a": 1}')
CASES = [
    Case("in a block of code", f"```json\n{CALL}\n```", calls=[CALLED], tools=TOOLS),
    Case("in a plain block", f"```\n{CALL}\n```\n", calls=[CALLED], tools=TOOLS),
    Case("a block behind text", f"So:\n```json\n{CALL}\n```", "So:", calls=[CALLED], tools=TOOLS),
    Case("another block", "```json\n{}\n```", "```json\n{}\n```", tools=TOOLS),
    Case(
        "another tool in a block",
        f"```json\n{wrap('g', '{}')}\n```",
        f"```json\n{wrap('g', '{}')}\n```",
        tools=TOOLS,
    ),
    Case("on its own line", f"I look.\n\n{CALL}", "I look.", calls=[CALLED], tools=TOOLS),
    Case(
        "another tool on its line",
        f"I look.\n\n{wrap('g', '{}')}",
        f"I look.\n\n{wrap('g', '{}')}",
        tools=TOOLS,
    ),
    Case("nothing", "", tools=TOOLS),
    Case("text", "Hello {you}.", "Hello {you}.", tools=TOOLS),
    Case("a call", CALL, calls=[CALLED], tools=TOOLS),
    Case("blanks around", f"\n\n {CALL}\n", calls=[CALLED], tools=TOOLS),
    Case("behind the mark", TAG + CALL, calls=[CALLED], tools=TOOLS),
    Case("behind the mark, without tools", TAG + CALL, calls=[CALLED]),
    Case("without tools or mark", CALL, CALL),
    Case("two", f"{CALL}; {CALL}", calls=[CALLED, CALLED], tools=TOOLS),
    Case("two, no blanks", f"{CALL};{CALL}", calls=[CALLED, CALLED], tools=TOOLS),
    Case("two, on lines", f"{CALL}\n{CALL}", calls=[CALLED, CALLED], tools=TOOLS),
    Case("two marks", f"{TAG}{CALL}{TAG}{CALL}", calls=[CALLED, CALLED], tools=TOOLS),
    Case("divided, then text", f"{CALL}; bye", "bye", calls=[CALLED], tools=TOOLS),
    Case("divided, then the end", f"{CALL};", calls=[CALLED], tools=TOOLS),
    Case("text behind", f"{CALL} bye {CALL}", f"bye {CALL}", calls=[CALLED], tools=TOOLS),
    Case("text before", f"hi {CALL}", f"hi {CALL}", tools=TOOLS),
    Case("text, then the mark", f"hi\n{TAG}{CALL}", "hi", calls=[CALLED], tools=TOOLS),
    Case("arguments", '{"name": "f", "arguments": {}}', calls=[("f", "{}")], tools=TOOLS),
    Case(
        "with a type",
        '{"type": "function", "name": "f", "parameters": {}}',
        calls=[("f", "{}")],
        tools=TOOLS,
    ),
    Case("parameters first", '{"parameters": {"a": 1}, "name": "f"}', calls=[CALLED], tools=TOOLS),
    Case(
        "parameters as a string",
        r'{"name": "f", "parameters": "{\"a\": 1}"}',
        calls=[CALLED],
        tools=TOOLS,
    ),
    Case("no parameters", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', tools=TOOLS),
    Case("no name", '{"parameters": {}}', '{"parameters": {}}', tools=TOOLS),
    Case("other JSON", '{"a": [1, {"name": "f"}]}', '{"a": [1, {"name": "f"}]}', tools=TOOLS),
    Case("an array", f"[{CALL}]", f"[{CALL}]", tools=TOOLS),
    Case("no JSON", "{name: f}", "{name: f}", tools=TOOLS),
    Case("a brace", "{", "{", tools=TOOLS),
    Case("braces", "{{{{{", "{{{{{", tools=TOOLS),
    Case("code behind the mark", f"{TAG}search.call(q='x')", f"{TAG}search.call(q='x')"),
    Case("the mark alone", TAG, TAG),
    Case("mark begun at the end", "a <|python", "a <|python"),
    Case(
        "mark in a string",
        wrap("f", f'{{"a": "{TAG}"}}'),
        calls=[("f", f'{{"a": "{TAG}"}}')],
        tools=TOOLS,
    ),
    Case("ended before it is certain", '{"name": "f", "par', '{"name": "f", "par', tools=TOOLS),
    Case(
        "ended in arguments",
        wrap("f", '{"a": 1')[:-1],
        calls=[("f", '{"a": 1', False)],
        tools=TOOLS,
    ),
    Case("last brace missing", CALL[:-1] + "\n", calls=[CALLED], tools=TOOLS),
    Case(
        "reasoning, then a call",
        f"<think>hm</think>\n{CALL}",
        reasoning="hm",
        calls=[CALLED],
        tools=TOOLS,
    ),
    Case(
        "opened by the prompt",
        f"hm</think>{CALL}",
        reasoning="hm",
        calls=[CALLED],
        tools=TOOLS,
        in_reasoning=True,
    ),
    Case(
        "broken, then text",
        f'{CALL}; {{"name": 1}} x',
        '{"name": 1} x',
        calls=[CALLED],
        tools=TOOLS,
    ),
]
TRUNCATED = f"<think>hm</think>{CALL}; {TAG}{CALL}"
WRAPS = [wrap]
