"""Tiny models with recurrent layers that have the demo model's tokenizer and chat template, as
checkpoints, and what `generate` gives within a form.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from engine.contract.request import TokenMatcher
from engine.contract.sampling_params import GrammarParams
from engine.contract.types import TokenId
from engine.structured import GrammarCompiler
from engine.text import Tokenizer
from tests.engine.structured.conftest import DEMO
from tests.engine.structured.following import allowed
from tests.model_recipes import RECIPES
from tests.tiny_models import make_model

FAMILIES = ("qwen3_5", "granitemoehybrid", "mamba2")
"""One that our decoder computes, one whose recurrence a stand-in computes request by request, and
one without attention.
"""

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"place": {"enum": ["Ulm", "Passau"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["place", "days"],
    "additionalProperties": False,
}
_GAUGE = {"name": "read_gauge", "description": "How high a river is.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": _GAUGE}]
"""A tool, and what it is called with."""


@dataclass(frozen=True, slots=True)
class Hybrid:
    """A model in float32, and the directory with its files.

    Attributes:
        tokenizer: of its files.
        end: the id that ends an output.
    """

    model: PreTrainedModel
    directory: Path
    tokenizer: Tokenizer
    end: TokenId

    def within(self, prompt: list[int], form: GrammarParams, count: int) -> list[int]:
        """What `generate` gives if it may only choose tokens that a form allows, without the end of
        sequence.
        """
        vocabulary, matcher = self.model.config.vocab_size, self.matcher(form)()

        def fitting(_row: int, ids: torch.Tensor) -> list[int]:
            if len(ids) > len(prompt):
                assert matcher.accept(TokenId(int(ids[-1])))
            return [self.end] if matcher.is_complete else sorted(allowed(matcher, vocabulary))

        ids = torch.tensor([prompt])
        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            prefix_allowed_tokens_fn=fitting,
        )
        return self.without_end(output[0, len(prompt) :].tolist())

    def matcher(self, form: GrammarParams) -> Callable[[], TokenMatcher]:
        """What makes matchers of a form."""
        compiler = GrammarCompiler(self.tokenizer, self.model.config.vocab_size)
        return compiler.compile(form, frozenset({self.end}))

    def without_end(self, tokens: list[int]) -> list[int]:
        """Tokens up to the end of sequence."""
        return tokens[: tokens.index(self.end)] if self.end in tokens else tokens


def save_hybrid(family: str, directory: Path) -> Hybrid:
    """Make a family's tiny model, and write its checkpoint."""
    tokenizer = Tokenizer.load(DEMO)
    end = tokenizer.token_id(tokenizer.eos_token or "")
    assert end is not None
    config = RECIPES[family].config(
        vocab_size=tokenizer.vocab_size, eos_token_id=end, max_position_embeddings=2048
    )
    model = make_model(config)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=end, pad_token_id=0)
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO / name, directory / name)
    return Hybrid(model, directory, tokenizer, TokenId(end))
