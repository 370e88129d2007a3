"""What is in force, not what was written: functions that were replaced at run time, and sources of
transformers that our decoder was not made for. Each such model runs by its own modules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import gelu
from transformers.models.cohere import modeling_cohere as cohere
from transformers.models.granite import modeling_granite as granite
from transformers.models.llama import modeling_llama as llama

from engine.contract.errors import ModelChangedError
from engine.models import describing
from engine.models.formats.native import Native
from engine.models.in_force import replaced_function
from tests.engine.models.decoders import NEW, PROMPTS, generate, make, verify
from tests.model_recipes import RECIPES
from tests.tiny_models import greedy_reference, make_model

KNOWN = [name for name, recipe in RECIPES.items() if recipe.is_known]


def served(seed: int = 0) -> str:
    """What is said of the decoder of a model that is served, and whose tokens are its own."""
    model, lines = make("llama", seed).float(), []
    expected = [greedy_reference(model, prompt, NEW) for prompt in PROMPTS]
    verified = verify(model, lines=lines)
    assert generate(verified) == expected
    assert verified.decoder is None
    (line,) = (line for line in lines if line.startswith("decoder: "))
    return line.removeprefix("decoder: transformers', because ")


@pytest.mark.parametrize("name", KNOWN)
def test_no_function_of_the_library_counts_as_replaced(name: str) -> None:
    assert replaced_function(make_model(RECIPES[name].config())) is None


@pytest.mark.parametrize("wraps", [True, False])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (llama.LlamaMLP, "forward"),
        (llama.LlamaRMSNorm, "forward"),
        (llama.LlamaRotaryEmbedding, "forward"),
        (llama.LlamaDecoderLayer, "forward"),
        (llama.LlamaForCausalLM, "forward"),
        (llama.LlamaAttention, "forward"),
        (llama.LlamaAttention, "__call__"),
        (torch.nn.Linear, "forward"),
        (llama, "apply_rotary_pos_emb"),
        (llama, "rotate_half"),
        (llama, "eager_attention_forward"),
    ],
)
def test_a_function_that_was_replaced(
    owner: Any, name: str, wraps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one that computes the same, in the place where it was or around it."""
    right = getattr(owner, name)

    def same(*given: Any, **named: Any) -> Any:
        return right(*given, **named)

    monkeypatch.setattr(owner, name, functools.wraps(right)(same) if wraps else same)
    told = name if owner is llama else f"{name} of {owner.__name__}"
    assert served() == f"{told} was replaced, and is not the library's own"


def test_another_function_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is judged by what it computes."""
    monkeypatch.setattr(llama.LlamaMLP, "forward", granite.GraniteMLP.forward)
    lines: list[str] = []
    verify(make("llama"), lines=lines)
    assert "decoder: our own, for llama" in lines
    monkeypatch.setattr(llama, "apply_rotary_pos_emb", cohere.apply_rotary_pos_emb)
    reason = served()
    assert "layer 0, queries, with inputs times 1 differs" in reason


@pytest.mark.parametrize("packing", [Native, None])
def test_a_function_that_is_replaced_between_two_starts(
    packing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules compute with it, and no prefix from before it is used; our decoder cannot."""
    model = make("llama").float()
    verified, right = verify(model, packing), llama.rotate_half
    before = generate(verified)
    monkeypatch.setattr(llama, "rotate_half", lambda x: -right(x))
    if packing is None:
        expected = [greedy_reference(model, prompt, NEW) for prompt in PROMPTS]
        assert generate(verified) == expected != before
    else:
        with pytest.raises(ModelChangedError, match="rotate_half was replaced"):
            generate(verified)


# ---- another source, as if the library had it ------------------------------------------------


def _with(module: Any, name: str, value: Any, forward: Any, *given: Any, **named: Any) -> Any:
    """Call a forward while an attribute has another value."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        return forward(module, *given, **named)
    finally:
        setattr(module, name, before)


def _activation(_: Any, self: Any, x: torch.Tensor) -> Any:
    return self.down_proj(gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


def _clamped_gate(_: Any, self: Any, x: torch.Tensor) -> Any:
    return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=200.0)) * self.up_proj(x))


def _clamped_up(_: Any, self: Any, x: torch.Tensor) -> Any:
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x).clamp(-200.0, 200.0))


def _eps(right: Any, self: Any, x: torch.Tensor) -> Any:
    return _with(self, "variance_epsilon", 3 * self.variance_epsilon, right, x)


def _scale(right: Any, self: Any, *given: Any, **named: Any) -> Any:
    return _with(self, "scaling", self.scaling * 0.9, right, *given, **named)


def _far_position(right: Any, self: Any, x: Any, position_ids: torch.Tensor) -> Any:
    return right(self, x, position_ids + (position_ids > 300))


def _next_position(right: Any, self: Any, x: Any, position_ids: torch.Tensor) -> Any:
    return right(self, x, position_ids + 1)


def _clamped_layer(right: Any, self: Any, *given: Any, **named: Any) -> Any:
    return right(self, *given, **named).clamp(-300.0, 300.0)


def _capped_logits(right: Any, self: Any, *given: Any, **named: Any) -> Any:
    made = right(self, *given, **named)
    made.logits = made.logits.clamp(-100.0, 100.0)
    return made


@pytest.mark.parametrize(
    ("cls", "change", "said"),
    [
        (llama.LlamaMLP, _activation, "layer 0, activation, with inputs times 1 differs"),
        (llama.LlamaMLP, _clamped_gate, "layer 0, activation, with inputs times 64 differs"),
        (llama.LlamaMLP, _clamped_up, "layer 0, activation, with inputs times 64 differs"),
        (llama.LlamaRMSNorm, _eps, "layer 0, before_attention, with inputs times "),
        (llama.LlamaAttention, _scale, "layer 0, attention: scaling, softcap and sinks are (0.225"),
        (llama.LlamaRotaryEmbedding, _far_position, "layer 0, queries, with inputs times "),
        (llama.LlamaRotaryEmbedding, _next_position, "layer 0, queries, with inputs times 1 "),
        (llama.LlamaDecoderLayer, _clamped_layer, "layer 0, result, with inputs times 64 differs"),
        (llama.LlamaForCausalLM, _capped_logits, "logits differs"),
    ],
)
def test_a_source_that_computes_something_else(
    cls: Any, change: Callable[..., Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of it only for large inputs or far positions, which no prompt here reaches."""
    monkeypatch.setattr(describing, "replaced_function", lambda model: None)
    right = cls.forward

    @functools.wraps(right)
    def forward(self: Any, *given: Any, **named: Any) -> Any:
        return change(right, self, *given, **named)

    monkeypatch.setattr(cls, "forward", forward)
    reason = served()
    assert reason.startswith("our decoder does not compute this llama as the model does: ")
    assert said in reason
