"""A packed weight as a tensor: it is read like any other, and what is written to it is packed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.loading.packing import pack_model
from engine.models.formats.native import Native
from engine.models.held_layer import PackedLinear


@pytest.fixture
def layer() -> PackedLinear:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 48))
    pack_model(model, Native)
    found = model[0]
    assert isinstance(found, PackedLinear)
    return found


def _set_rows(weight: torch.Tensor) -> None:
    weight[1:3] = 7.0


def _add_in_place(weight: torch.Tensor) -> None:
    weight += 1


def _write_out(weight: torch.Tensor) -> None:
    torch.add(torch.ones_like(weight), 1, out=weight)


def _set_data(weight: torch.Tensor) -> None:
    weight.data = torch.full(weight.shape, 3.0)


@pytest.mark.parametrize(
    "write",
    [
        _set_rows,
        _add_in_place,
        _write_out,
        _set_data,
        lambda weight: weight.zero_(),
        lambda weight: weight.t()[0].fill_(2.0),
        lambda weight: weight.view(-1)[5:9].mul_(2.0),
        lambda weight: weight.split(16)[1].neg_(),
        lambda weight: weight.detach().copy_(torch.full((len(weight), 1), 4.0)),
        lambda weight: torch.nn.init.constant_(weight, 6.0),
        lambda weight: torch._foreach_mul_([weight, weight[0]], 2.0),
    ],
)
def test_what_is_written_to_a_packed_weight_is_packed(
    write: Callable[[torch.Tensor], Any], layer: PackedLinear
) -> None:
    before, expected = layer.weight.clone(), layer.weight.clone()
    assert type(expected) is torch.Tensor
    with torch.no_grad():
        write(expected)
        write(layer.weight)
    assert not torch.equal(expected, before)
    assert torch.equal(layer.weight, expected)
    x = torch.randn((3, layer.in_features), generator=torch.Generator().manual_seed(0))
    right = torch.nn.functional.linear(x, expected, layer.bias)
    assert torch.allclose(layer(x), right, rtol=1e-4, atol=1e-4)


def test_a_packed_weight_is_read_like_any_other(layer: PackedLinear) -> None:
    weight, plain = layer.weight, layer.weight.clone()
    assert (weight.shape, weight.dtype, weight.device) == (plain.shape, plain.dtype, plain.device)
    assert type(weight + 1) is torch.Tensor
    assert torch.equal(weight.t() @ weight, plain.t() @ plain)
    assert weight.tolist() == plain.tolist()
    assert repr(weight) == repr(plain)
    array = weight.numpy()
    assert (array == plain.numpy()).all()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1.0
    with pytest.raises(RuntimeError, match="has no address"):
        weight.data_ptr()
    with pytest.raises(RuntimeError, match="must match"):
        weight.copy_(torch.ones(3, 4))
    with pytest.raises((KeyError, AttributeError)):
        layer.weight = torch.nn.Parameter(plain)  # type: ignore[misc, assignment]
