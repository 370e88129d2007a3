"""The kernels of radix selection give the bits that torch's operations give."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from engine.sampling import triton_selection
from engine.sampling.filters import Filters, filtered_weights
from engine.sampling.selection import least_bound


@pytest.mark.parametrize("size", [1, 7, 4096, 5000])
@pytest.mark.parametrize("counts", [False, True])
def test_bounds_are_torchs(size: int, counts: bool, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(size)
    values = torch.randn(6, size, generator=generator).abs() * 5
    values[1] = values[1].round()
    values[2, ::2] = float("inf")
    values[3] = 2.5
    values[4] *= 1e-42
    masses = torch.randint(0, 1 << 40, (6, size), generator=generator)
    masses[:, ::3] = 0
    total = torch.full((6, 1), size) if counts else masses.sum(dim=-1, keepdim=True)
    given = None if counts else masses.to(device)
    for share in (0.0, 0.3, 0.99, 1.0, 1.1):
        target = (total * share).to(torch.int64).clamp(min=1)
        found = triton_selection.least_bound(values.to(device), given, target.to(device))
        assert torch.equal(found.cpu(), least_bound(values, None if counts else masses, target))


def test_filters_by_the_kernels(device: torch.device) -> None:
    logits = torch.randn(5, 3000, generator=torch.Generator().manual_seed(1)).bfloat16() * 2
    scaled = (logits.float() - logits.float().amax(dim=-1, keepdim=True)).to(device)
    column = torch.tensor([[0.1], [0.5], [0.9], [0.999], [1.0]], dtype=torch.float64, device=device)
    top_k = torch.tensor([[1], [300], [700], [2999], [3000]], device=device)
    for filters in (
        Filters(top_k=top_k, max_top_k=3000),
        Filters(top_p=column),
        Filters(top_k=top_k, max_top_k=3000, top_p=column, typical_p=column),
    ):
        right = filtered_weights(scaled, filters, least_bound)
        assert torch.equal(filtered_weights(scaled, filters, triton_selection.least_bound), right)


def test_a_row_with_a_nan_leaves_the_others_alone(device: torch.device) -> None:
    values = torch.rand(3, 5000, generator=torch.Generator().manual_seed(2)).to(device)
    masses = torch.ones(3, 5000, dtype=torch.int64, device=device)
    target = torch.full((3, 1), 2500, device=device)
    right = least_bound(values, masses, target)
    values[1, 17:] = float("nan")
    found = triton_selection.least_bound(values, masses, target)
    assert torch.equal(found[[0, 2]], right[[0, 2]])
