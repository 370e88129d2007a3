"""Computes mixtures of experts without waiting for the device.

    scores ─ route ─▶ experts and weights of each token
                        └─ sort ─▶ pairs by expert ─▶ [gate up] ─ gate ─▶ down ─▶ weighted sum

Each step is one kernel of `engine.models.experts_kernels`. A pair is a token with one of its
experts, numbered t · k + i. Each launch is one torch operation, such as
`headrace::experts_product`, so that a substitute for CUDA graphs sees a single call and what it
writes.

`mix_experts` computes a mixture for our decoder, and `experts_forward` the experts of a module for
transformers' interface, which routes and applies the gate itself.

Tile sizes of few pairs depend only on the dtype, so a row's result depends neither on its
neighbours nor on the number of rows. Weights are read in place. Elements are rounded where
transformers' `grouped_mm` rounds them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton

from engine.attention.triton_launch import launch
from engine.models import description as described
from engine.models.experts_kernels import (
    experts_product_kernel,
    route_kernel,
    sort_kernel,
    weighted_sum_kernel,
)
from engine.native.torch_library import operation, writes_nothing


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """The constants of a launch.

    Attributes:
        rows, columns, inputs: BLOCK_M, BLOCK_N, BLOCK_K.
        warps: the number of warps per program.
        stages: the number of tiles of inputs and weights that are being loaded or computed at a
            time.
    """

    rows: int
    columns: int
    inputs: int
    warps: int
    stages: int


_NARROW = ExpertTiles(rows=64, columns=64, inputs=64, warps=4, stages=4)
"""For 16-bit types. These sizes suit tensor cores and fit in the 99 KiB of the smallest devices, so
that three programs fit on a large one. While a tile has few rows, reading the weights takes longer
than multiplying all rows of the tile.
"""
_LARGE = ExpertTiles(rows=128, columns=128, inputs=64, warps=8, stages=3)
"""For 16-bit types, and experts with many pairs. What is read for a product halves, as a tile of 64
× 64 reads an element for each 32 multiplications, and one of 128 × 128 for each 64.
"""
_MANY = 96
"""The mean number of pairs per expert from which tiles are large, so that most of them are full."""
_WIDE = ExpertTiles(rows=16, columns=64, inputs=32, warps=4, stages=3)
"""For float32, which does not use tensor cores, so unused rows of a tile also cost time."""
_SORTED, _SUMMED = 1 << 11, 1 << 10
"""The number of pairs and of elements that a program reads at a time."""
MOST_EXPERTS = 1 << 10
"""The maximum number of experts, whose scores are in one program's registers."""


def choose_tiles(itemsize: int, pairs: int, experts: int) -> ExpertTiles:
    """Return the tiles for elements of `itemsize` bytes."""
    if itemsize == 4:
        return _WIDE
    return _LARGE if pairs >= _MANY * experts else _NARROW


def most_tiles(pairs: int, experts: int, rows: int) -> int:
    """Return the maximum number of tiles of `rows` rows for a number of pairs.

    Each expert that has any pairs may have one tile that is not full.
    """
    return (pairs + min(pairs, experts) * (rows - 1)) // rows


@operation(
    "route(Tensor scores, Tensor(a!) chosen, Tensor(b!) weights, bool normed, bool rounds) -> ()",
    writes_nothing,
)
def _route(
    scores: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    normed: bool,
    rounds: bool,
) -> None:
    experts, count = scores.shape[-1], chosen.shape[-1]
    launch(
        *(route_kernel, (len(scores),), (scores, chosen, weights), 1),
        EXPERTS=experts,
        CHOSEN=count,
        NORMED=normed,
        ROUNDS=rounds,
        BLOCK_E=triton.next_power_of_2(experts),
        BLOCK_C=triton.next_power_of_2(count),
    )


def route(scores: torch.Tensor, routing: described.Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each token's experts.

    Args:
        scores: [T, E], contiguous, E at most MOST_EXPERTS.
        routing: how they are chosen and weighed.

    Returns:
        int32 [T, k], the experts, the one with the largest score first, and float32 [T, k], their
        weights.
    """
    shape = (len(scores), routing.chosen)
    chosen = torch.empty(shape, dtype=torch.int32, device=scores.device)
    weights = torch.empty(shape, dtype=torch.float32, device=scores.device)
    _route(scores, chosen, weights, routing.normed, routing.rounds)
    return chosen, weights


@operation(
    "sort_pairs(Tensor chosen, Tensor(a!) order, Tensor(b!) ends) -> ()",
    writes_nothing,
)
def _sort_pairs(chosen: torch.Tensor, order: torch.Tensor, ends: torch.Tensor) -> None:
    launch(
        *(sort_kernel, (len(ends),), (chosen, order, ends, len(order)), 8),
        EXPERTS=len(ends),
        BLOCK=_SORTED,
    )


def sort_pairs(chosen: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort pairs by their expert, on the device.

    Args:
        chosen: [T, k], contiguous, the experts of each token. Pair t · k + i has the expert
            chosen[t, i].
        experts: the number of experts.

    Returns:
        int32 [T · k], the pairs in order, and int32 [experts], the end offset of each expert's
        pairs.
    """
    order = torch.empty(chosen.numel(), dtype=torch.int32, device=chosen.device)
    ends = torch.empty(experts, dtype=torch.int32, device=chosen.device)
    _sort_pairs(chosen, order, ends)
    return order, ends


@operation(
    "experts_product(Tensor x, Tensor order, Tensor ends, Tensor weights, Tensor? biases, "
    "Tensor(a!) output, int share, bool transposed) -> ()",
    writes_nothing,
)
def experts_product(
    x: torch.Tensor,
    order: torch.Tensor,
    ends: torch.Tensor,
    weights: torch.Tensor,
    biases: torch.Tensor | None,
    output: torch.Tensor,
    share: int,
    transposed: bool,
) -> None:
    """Multiply each pair's row by the weights of its expert.

    Args:
        x: [S / share, K], contiguous.
        order, ends: see `sort_pairs`, for S pairs.
        weights: [E, N, K] or, transposed, [E, K, N], in the dtype of x.
        biases: [E, N], contiguous, added to the rounded products. None for no biases.
        output: [S, N], contiguous. Row p is the result of pair p.
        share: the number of consecutive pairs that read the same row of x.
        transposed: see weights.
    """
    pairs, experts, width = len(order), len(weights), output.shape[1]
    tiles = choose_tiles(x.itemsize, pairs, experts)
    stride_e, stride_n, stride_k = (weights.mT if transposed else weights).stride()
    grid = (most_tiles(pairs, experts, tiles.rows), triton.cdiv(width, tiles.columns))
    launch(
        *(experts_product_kernel, grid, (x, order, ends, weights, biases, output), tiles.warps),
        EXPERTS=experts,
        SHARE=share,
        INPUTS=x.shape[1],
        OUTPUTS=width,
        STRIDE_E=stride_e,
        STRIDE_N=stride_n,
        STRIDE_K=stride_k,
        BIASED=biases is not None,
        BLOCK_E=triton.next_power_of_2(experts),
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.columns,
        BLOCK_K=tiles.inputs,
        num_stages=tiles.stages,
        enable_fp_fusion=True,  # products are summed as torch's are
    )


@operation(
    "weighted_sum(Tensor made, Tensor weights, Tensor(a!) output, bool rounds) -> ()",
    writes_nothing,
)
def _weighted_sum(
    made: torch.Tensor, weights: torch.Tensor, output: torch.Tensor, rounds: bool
) -> None:
    tokens, width = output.shape
    launch(
        *(weighted_sum_kernel, (tokens, triton.cdiv(width, _SUMMED)), (made, weights, output), 4),
        CHOSEN=weights.shape[-1],
        WIDTH=width,
        ROUNDS=rounds,
        BLOCK=_SUMMED,
    )


def _compute(
    experts: Any,
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    rounds: bool,
    gate: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Compute the experts of each token, and add up their weighted results.

    Args:
        experts: the module with the weights.
        x: [T, K].
        chosen, weights: [T, k], contiguous.
        rounds: whether weighted results are rounded before they are added.
        gate: [T · k, N] → [T · k, M], between the two products.

    Returns:
        [T, K].
    """
    count = chosen.shape[-1]
    order = sort_pairs(chosen, experts.num_experts)

    def product(x: torch.Tensor, name: str, share: int) -> torch.Tensor:
        matrices = getattr(experts, name)
        biases = getattr(experts, f"{name}_bias") if experts.has_bias else None
        x = x.to(matrices.dtype).contiguous()
        made = x.new_empty((count * len(chosen), matrices.shape[2 if experts.is_transposed else 1]))
        experts_product(x, *order, matrices, biases, made, share, experts.is_transposed)
        return made

    inner = gate(product(x, "gate_up_proj" if experts.has_gate else "up_proj", count))
    made = product(inner, "down_proj", 1)
    output = made.new_empty((len(chosen), made.shape[1]))
    _weighted_sum(made, weights, output, rounds)
    return output


def mix_experts(
    x: torch.Tensor,
    scores: torch.Tensor,
    experts: Any,
    routing: described.Routing,
    gate: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Compute a mixture of experts: [T, K] → [T, K]. See `Operations.mix`.

    scores: [T, E], the router's. experts: the module with the weights.
    """
    chosen, weights = route(scores, routing)
    return _compute(experts, x, chosen, weights, routing.rounds, gate)


def experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Compute a module of experts; see transformers' ExpertsInterface.

    Args:
        self: the module.
        hidden_states: [T, K].
        top_k_index, top_k_weights: [T, k], the experts of each token, and the weights of their
            results.

    Returns:
        [T, K].
    """
    rounds = top_k_weights.dtype is self.down_proj.dtype
    gate = self._apply_gate if self.has_gate else self.act_fn
    made = _compute(
        self, hidden_states, top_k_index.contiguous(), top_k_weights.contiguous(), rounds, gate
    )
    return made.to(hidden_states.dtype)
