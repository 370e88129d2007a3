"""Joins the tensors of linear layers that have the same input."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


def join_tensors(layers: Sequence[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Join the weights and the biases of several linear layers, whose parameters become views of
    the result.

    Returns:
        The weight [N, K] and the bias [N]. The bias is None if no layer has one, and 0 for the
        layers without one if some have.
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
    """Concatenate tensors along their first dimension. They become views of the result."""
    with torch.no_grad():
        whole = torch.cat([one.detach() for one in parts])
    for part, view in zip(parts, whole.split_with_sizes([len(one) for one in parts]), strict=True):
        part.data = view
    return whole
