"""What rounding weights costs the demo model: `python -m tests.quantised_quality` prints the tables
of docs/performance.md.

    samples of the float32 model ─▶ logits of each kind of weights, in float32 ─▶ beside float32's
                                 ─▶ logits of the kernels in bfloat16 ─▶ beside the same weights'
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch.nn.functional import cross_entropy, kl_div
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.contract.config import LoadConfig
from engine.loading.loader import load_model
from engine.loading.packing import shared_weights
from engine.models.formats.int4 import Int4
from engine.models.formats.int8 import Int8
from engine.models.formats.registry import named
from tests.quantised_files import quantise
from tests.quantised_recipes import RECIPES

DEMO = Path(__file__).parents[1] / "models" / "demo"
SAMPLES, TOKENS = 25, 64
AT_LOAD = ("int8", "int4", "int4-64")
FILES = {"GPTQ": "gptq-4-128-asym", "AWQ": "awq-128"}
Q4_0 = "by llama.cpp's rule for Q4_0"


@dataclass(frozen=True)
class Difference:
    """Between the logits of two models, over all tokens.

    Attributes:
        kl: in nats, of the right one's distribution.
        same: the share of tokens whose most likely next one is the same.
        cross_entropy: of the samples' tokens.
    """

    kl: float
    same: float
    cross_entropy: float


def demo(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(DEMO, dtype=dtype)
    return model.eval()


@cache
def sampled() -> torch.Tensor:
    """Tokens that the demo model draws, after the first one: [SAMPLES, 1 + TOKENS]."""
    torch.manual_seed(0)
    ids: torch.Tensor = demo().generate(
        torch.ones((SAMPLES, 1), dtype=torch.int64),
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        eos_token_id=None,
        max_new_tokens=TOKENS,
    )
    return ids


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    """What a model says of the samples, float32 [tokens, vocabulary]."""
    with torch.inference_mode():
        logits: torch.Tensor = model(sampled()).logits[:, :-1].float()
    return logits.flatten(0, 1)


def difference(right: torch.Tensor, other: torch.Tensor) -> Difference:
    likely, own = right.log_softmax(-1), other.log_softmax(-1)
    return Difference(
        kl_div(own, likely, reduction="batchmean", log_target=True).item(),
        (right.argmax(-1) == other.argmax(-1)).float().mean().item(),
        cross_entropy(other, sampled()[:, 1:].flatten()).item(),
    )


def q4_0(weight: torch.Tensor) -> torch.Tensor:
    """What Q4_0 makes of a weight: of 32 inputs, the one furthest from 0 is -8 times the scale."""
    blocks = weight.float().numpy().reshape(-1, 32)
    furthest = np.take_along_axis(blocks, np.abs(blocks).argmax(1)[:, None], 1)
    scale = furthest / np.float32(-8)
    inverse = np.divide(1, scale, where=scale != 0, out=np.zeros_like(scale))
    codes = np.minimum(15, np.trunc(blocks * inverse + np.float32(8.5)))
    values = (codes - 8) * scale.astype(np.float16).astype(np.float32)
    return torch.from_numpy(values.reshape(weight.shape))


def rounded(kind: str) -> PreTrainedModel:
    """The demo model in float32, with the elements that a kind of weights has."""
    model, original = demo(), demo(torch.bfloat16)
    for group in shared_weights(original, Int4 if kind == Q4_0 else named(kind)):
        held = group.how(group.weight.shape, torch.bfloat16)
        if not isinstance(held, Int8):
            raise TypeError(f"{kind} are no integers of ours")
        held.pack(group.weight.detach())
        values = held.codes(torch.arange(held.shape[0])).values(held.layout)
        if kind == Q4_0 and isinstance(held, Int4):
            values = q4_0(group.weight.detach())
        layer = model.get_submodule(next(iter(group.linears)))
        layer.get_parameter("weight").data.copy_(values)
    return model


def of_weights(kind: str) -> Difference:
    """How a kind of weights differs from float32, in float32 arithmetic."""
    return difference(logits_of(demo()), logits_of(rounded(kind)))


def of_kernels(kind: str) -> Difference:
    """How logits of the kernels, in bfloat16, differ from those of the same weights in float32."""
    with TemporaryDirectory() as place:
        folder, quantization = DEMO, "none"
        if kind in FILES:
            folder = Path(place)
            right = quantise(demo(), folder, RECIPES[FILES[kind]])
        elif kind in AT_LOAD:
            right, quantization = rounded(kind), kind
        else:
            right = demo()
        options = LoadConfig(dtype="bfloat16", quantization=quantization)
        loaded = load_model(str(folder), options, lambda line: None)
        return difference(logits_of(right), logits_of(loaded.original))


def main() -> None:
    for measured, kinds in (
        (of_weights, (*AT_LOAD, Q4_0)),
        (of_kernels, ("bfloat16", *AT_LOAD, *FILES)),
    ):
        for kind in kinds:
            one = measured(kind)
            print(f"| {kind} | {one.kl:.5f} | {100 * one.same:.1f} % | {one.cross_entropy:.4f} |")


if __name__ == "__main__":
    main()
