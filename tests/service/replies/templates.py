"""Chat templates that write tool calls, and a tokenizer that has one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.service.fake_engine import byte_tokenizer

TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content or '' }}{% for call in m.tool_calls or [] %}CALL{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NAMED = '"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}'
HERMES = TURNS.replace("CALL", f"<tool_call>\n{{{NAMED}}}\n</tool_call>")
FUNCTION_TAG = TURNS.replace(
    "CALL", "<function={{ call.function.name }}>{{ call.function.arguments | tojson }}</function>"
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{% if m.content or not loop.first %}{{ '\\n' }}{% endif %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<|box|>")


def tokenizer(template: str = TEMPLATE, special: Sequence[str] = SPECIAL) -> Any:
    return byte_tokenizer(chat_template=template, special=special)
