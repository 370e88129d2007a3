"""Which format a template writes, and which special tokens its parser is shown."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from engine.text import Tokenizer
from service.replies import FORMATS, choose, special_marks

TEMPLATES = {
    "hermes": [
        '{{ \'<tool_call>\\n{"name": "\' }}{{ call.name }}{{ \'", "arguments": \' }}',
        "<think>{{ m.reasoning_content }}</think> <tool_call> {{ tool_call.arguments | tojson }}",
    ],
    "llama3_json": [
        "<|start_header_id|>ipython<|end_header_id|>{{ '<|python_tag|>' }}",
        '<|start_header_id|>{{ \'{"name": "\' }}{{ name }}{{ \'", "parameters": \' }}',
    ],
    "mistral": ["[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS]", "[TOOL_CALLS]{{ name }}[ARGS]"],
    "qwen3_coder": [
        "<tool_call>\n<function={{ name }}>\n<parameter=",
        "<think><tool_call><function=",
    ],
    "deepseek": ["<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜></think>"],
    "harmony": ["<|start|>assistant<|channel|>analysis<|message|>"],
    "think": [
        "{{ content.split('</think>')[-1] }}",
        "<tool_call>{{ name }}<arg_key>{{ k }}</arg_key></tool_call><think></think>",
    ],
}


@pytest.mark.parametrize(
    ("name", "template"), [(name, text) for name, texts in TEMPLATES.items() for text in texts]
)
def test_a_template_tells_its_format(name: str, template: str) -> None:
    chosen = choose(template)
    assert chosen is FORMATS[name]


@pytest.mark.parametrize("template", ["", "{{ bos_token }}{{ message.content }}", "<tool_call>"])
def test_no_format(template: str) -> None:
    assert choose(template) is None


def test_every_format_can_be_chosen_and_has_its_name() -> None:
    assert set(TEMPLATES) == set(FORMATS)
    assert all(format.name == name for name, format in FORMATS.items())


def test_special_marks_are_those_that_are_special_tokens() -> None:
    backend = Backend(models.WordLevel({"a": 0, "<think>": 1}, unk_token="a"))
    backend.add_special_tokens([AddedToken("<tool_call>", special=True)])
    backend.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    tokenizer = Tokenizer(backend)
    assert special_marks(FORMATS["hermes"], tokenizer) == {tokenizer.token_id("<tool_call>")}
    assert special_marks(FORMATS["mistral"], tokenizer) == frozenset()
