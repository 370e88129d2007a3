"""The tensors of linear layers with the same input, side by side."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


def join_tensors(layers: Sequence[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One weight and one bias of several linear layers, whose parameters become views of them: [N,
    K] and [N]; None: there is no bias. Where some have none, theirs is 0.
    """
    weights = [one.weight for one in layers]
    biases: list[torch.Tensor | None] = [one.bias for one in layers]
    bias = None
    if any(one is not None for one in biases):
        bias = join_parts(
            [weight.new_zeros(len(weight)) if one is None else one
             for one, weight in zip(biases, weights, strict=True)]
        )  # fmt: skip
    weight = join_parts(weights)
    if weight.is_cuda:
        # Free the originals' memory, which neither the next joined weight nor the KV cache could
        # reuse.
        torch.cuda.empty_cache()
    return weight, bias


def join_parts(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """One tensor of parts, side by side, which become views of it."""
    with torch.no_grad():
        whole = torch.cat([one.detach() for one in parts])
    for part, view in zip(parts, whole.split_with_sizes([len(one) for one in parts]), strict=True):
        part.data = view
    return whole
