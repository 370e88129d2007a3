"""A tiny model with random weights, a long context and a large vocabulary.

Everything that the context or the vocabulary bounds is large here, while a step stays fast.

Its tokenizer is a byte-level BPE of letters. Every pair and triple of lowercase letters and many
sequences of four are tokens, so that long words take many merges, as with the tokenizers of large
models. Its chat template renders tools and reasoning as many models do, so that the server can
recognize their syntax and constrain replies to the tools.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
from pathlib import Path

from benchmarks.models import random_model

NAME = "long"
"""The model's name, as in `benchmarks.models.SHAPES`."""
SPECIAL = ("<|pad|>", "<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>")
TEMPLATE = """\
{{- bos_token }}
{%- if tools %}
    {{- '<|system|>You may call these functions:\n<tools>' }}
    {%- for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}
    {{- '\n</tools>\nCall as <tool_call>\n{"name": …, "arguments": …}\n</tool_call>' + eos_token }}
{%- endif %}
{%- for message in messages %}
    {{- '<|' + ('assistant' if message.role == 'assistant' else 'user') + '|>' }}
    {%- if message.reasoning_content %}
        {{- '<think>\n' + message.reasoning_content + '\n</think>\n' }}
    {%- endif %}
    {%- if message.content is string %}{{ message.content | trim }}{% endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson + '}\n</tool_call>' }}
    {%- endfor %}
    {{- eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""


def long_model(cache: Path) -> Path:
    """Return the model's directory. Creates it if necessary, which takes half a minute."""
    folder = cache / f"{NAME}-{hashlib.sha256(TEMPLATE.encode()).hexdigest()[:8]}"
    if folder.exists():
        return folder
    import torch

    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model = random_model(NAME, device="cpu", dtype=torch.float32)
    model.save_pretrained(partial)
    write_tokenizer(partial, model.config.vocab_size)
    partial.rename(folder)
    return folder


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer with the given number of entries."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = [chr(97 + number) for number in range(26)]
    vocabulary = {
        name: index
        for index, name in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    pairs = ["".join(two) for two in itertools.product(letters, letters)]
    merges = [
        *((one, other) for one, other in itertools.product(letters, letters)),
        *((pair, letter) for pair, letter in itertools.product(pairs, letters)),
        *itertools.product(pairs, pairs),
    ]
    merges = merges[: vocab_size - len(vocabulary)]
    for one, other in merges:
        vocabulary[one + other] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": TEMPLATE,
        "pad_token": SPECIAL[0],
        "bos_token": SPECIAL[1],
        "eos_token": SPECIAL[2],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
