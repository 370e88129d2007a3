"""Computes experts without waiting for the device.

Pairs of tokens and experts are sorted on the device, and the kernel of
`engine.models.experts_kernel` multiplies each by the weights of its expert. A product is launched
as one torch operation (`headrace::experts_product`), so that a substitute for CUDA graphs sees a
single call and what it writes.

    tokens, their experts ─▶ sorted pairs ─▶ [gate up] ─ the module's gate ─▶ down ─▶ weighted sum

Tile sizes depend only on the dtype, so a row's result depends neither on its neighbours nor on the
number of rows. Weights are read in place. Elements are rounded where transformers' `grouped_mm`
rounds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from engine.models.experts_kernel import experts_product_kernel
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
_WIDE = ExpertTiles(rows=16, columns=64, inputs=32, warps=4, stages=3)
"""For float32, which does not use tensor cores, so unused rows of a tile also cost time."""


def choose_tiles(itemsize: int) -> ExpertTiles:
    """Return the tiles for elements of `itemsize` bytes."""
    return _WIDE if itemsize == 4 else _NARROW


def most_tiles(pairs: int, experts: int, rows: int) -> int:
    """Return the maximum number of tiles of `rows` rows for a number of pairs.

    Each expert that has any pairs may have one tile that is not full.
    """
    return (pairs + min(pairs, experts) * (rows - 1)) // rows


def sort_pairs(chosen: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort pairs by their expert, on the device.

    Args:
        chosen: [T, k], the experts of each token. Pair t · k + i has the expert chosen[t, i].
        experts: the number of experts.

    Returns:
        int64 [T · k], the pairs in order, and int32 [experts], the end offset of each expert's
        pairs.
    """
    ids, order = torch.sort(chosen.reshape(-1), stable=True)
    wanted = torch.arange(experts, dtype=ids.dtype, device=ids.device)
    return order, torch.searchsorted(ids, wanted, right=True, out_int32=True)


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
    tiles = choose_tiles(x.itemsize)
    experts, width = len(weights), output.shape[1]
    stride_e, stride_n, stride_k = (weights.mT if transposed else weights).stride()
    grid = (most_tiles(len(order), experts, tiles.rows), triton.cdiv(width, tiles.columns))
    # Triton launches on the current device.
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        experts_product_kernel[grid](
            *(x, order, ends, weights, biases, output),
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
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            enable_fp_fusion=True,  # said here, as Triton's default depends on its version
        )


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
    share = top_k_index.shape[-1]
    order, ends = sort_pairs(top_k_index, self.num_experts)

    def product(x: torch.Tensor, name: str, share: int) -> torch.Tensor:
        weights = getattr(self, name)
        biases = getattr(self, f"{name}_bias") if self.has_bias else None
        x = x.to(weights.dtype).contiguous()
        made = x.new_empty((len(order), weights.shape[2 if self.is_transposed else 1]))
        experts_product(x, order, ends, weights, biases, made, share, self.is_transposed)
        return made

    if self.has_gate:
        inner = self._apply_gate(product(hidden_states, "gate_up_proj", share))
    else:
        inner = self.act_fn(product(hidden_states, "up_proj", share))
    made = product(inner, "down_proj", 1) * top_k_weights.reshape(-1, 1)
    return made.view(*top_k_index.shape, -1).sum(1).to(hidden_states.dtype)
