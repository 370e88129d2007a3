"""The kernels between a model's matrix products: equal to torch's, one after the other."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import pytest
import torch
from torch.nn.functional import gelu, layer_norm, relu, silu

from engine.models import comparison
from engine.models.formats.native import native_library
from engine.native import library
from engine.native.library import (
    CENTERED,
    FROM_ONE,
    GELU_TANH,
    RELU_SQUARED,
    ROUNDED_FIRST,
    SIGMOID,
    SILU,
    HeadsCall,
    NormWeight,
)

WIDTHS = (1, 5, 15, 16, 17, 31, 64, 100, 129, 1000, 1024, 4099)
MAGNITUDES = (1e-4, 1.0, 1e3)
DTYPES = {torch.float32: library.FLOAT32, torch.bfloat16: library.BFLOAT16}
EPS = 1e-6
FORMS = (0, FROM_ONE, ROUNDED_FIRST, CENTERED)

pytestmark = pytest.mark.usefixtures("isa")


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """The type of elements."""
    assert isinstance(request.param, torch.dtype)
    return request.param


def _random(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _near(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """As the comparison at load judges norms and activations."""
    return comparison._norm(actual, expected) is None


def _weight(norm_weight: torch.Tensor, form: int, bias: torch.Tensor | None = None) -> NormWeight:
    address = None if bias is None else bias.data_ptr()
    return NormWeight(norm_weight.data_ptr(), address, len(norm_weight), EPS, form)


def _norm(
    x: torch.Tensor, weight: torch.Tensor, form: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    y, threads = torch.empty_like(x), torch.get_num_threads()
    rows = x.numel() // x.shape[-1]
    native_library().norm(
        ctypes.byref(_weight(weight, form, bias)), x.data_ptr(), y.data_ptr(), x.shape[-1], rows,
        DTYPES[x.dtype], threads,
    )  # fmt: skip
    return y


def _expected_norm(
    x: torch.Tensor, weight: torch.Tensor, form: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """As the models' own code has it."""
    wide = x.float()
    if form == CENTERED:
        other = None if bias is None else bias.float()
        return layer_norm(wide, x.shape[-1:], weight.float(), other, EPS).to(x.dtype)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    if form == ROUNDED_FIRST:
        return weight * normed.to(x.dtype)
    return (normed * (weight.float() + (form == FROM_ONE))).to(x.dtype)


@pytest.mark.parametrize("form", FORMS)
def test_norms(form: int, dtype: torch.dtype) -> None:
    for width in WIDTHS:
        if form == CENTERED and width < 5:
            continue  # nothing is left of one element without its mean
        weight = _random(dtype, width, seed=1)
        bias = _random(dtype, width, seed=2) if form == CENTERED else None
        for magnitude in MAGNITUDES:
            for shape in ((1, width), (3, 1, 7, width), (90, width)):
                x = (_random(dtype, *shape) * magnitude).to(dtype)
                actual = _norm(x, weight, form, bias)
                assert _near(actual, _expected_norm(x, weight, form, bias)), (magnitude, shape)
        assert _norm(_random(dtype, 0, width), weight, form).shape == (0, width)


def test_the_forms_of_norms_are_not_alike() -> None:
    """Else the comparison above would show nothing."""
    x, weight = _random(torch.bfloat16, 20, 128), _random(torch.bfloat16, 128, seed=1)
    results = [_norm(x, weight, form) for form in FORMS]
    assert not any(_near(results[i], results[j]) for i in range(len(FORMS)) for j in range(i))


@pytest.mark.parametrize("form", [0, FROM_ONE, ROUNDED_FIRST])
def test_norms_of_what_is_no_ordinary_number(form: int) -> None:
    weight, x = _random(torch.bfloat16, 40, seed=1), _random(torch.bfloat16, 7, 40)
    x[0] = 0
    x[1, 3] = float("nan")
    x[2, 39] = float("inf")
    x[3, 0] = float("-inf")
    x[4] = 3e38
    x[5] = 1e-39
    torch.testing.assert_close(
        _norm(x, weight, form), _expected_norm(x, weight, form), rtol=2**-7, atol=0, equal_nan=True
    )


def _gate(both: torch.Tensor, activation: int) -> torch.Tensor:
    """Of gate and up side by side."""
    width = both.shape[-1] // 2
    y = both.new_empty((len(both), width))
    up = both.data_ptr() + width * both.element_size()
    native_library().gate(
        activation, both.data_ptr(), 2 * width, up, 2 * width, y.data_ptr(), width, len(both),
        width, DTYPES[both.dtype], torch.get_num_threads(),
    )  # fmt: skip
    return y


def _active(gate: torch.Tensor, activation: int) -> torch.Tensor:
    if activation == RELU_SQUARED:
        return relu(gate).square()
    if activation == SIGMOID:
        return gate.sigmoid()
    return silu(gate) if activation == SILU else gelu(gate, approximate="tanh")


@pytest.mark.parametrize("activation", [SILU, GELU_TANH, RELU_SQUARED, SIGMOID])
def test_gates(activation: int, dtype: torch.dtype) -> None:
    for width, magnitude, rows in itertools.product(WIDTHS, (1e-2, 1.0, 30.0), (1, 3, 70)):
        both = (_random(dtype, rows, 2 * width) * magnitude).to(dtype)
        expected = _active(both[:, :width].contiguous(), activation) * both[:, width:]
        assert _near(_gate(both, activation), expected), (width, magnitude, rows)


@pytest.mark.parametrize("activation", [SILU, GELU_TANH, RELU_SQUARED, SIGMOID])
def test_activations_of_every_number(activation: int) -> None:
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).view(64, 1024)
    y, threads = torch.empty_like(x), torch.get_num_threads()
    native_library().gate(
        activation, x.data_ptr(), 1024, None, 0, y.data_ptr(), 1024, 64, 1024, library.BFLOAT16,
        threads,
    )  # fmt: skip
    expected = _active(x, activation)
    assert torch.equal(y.isnan(), expected.isnan())
    if activation == RELU_SQUARED:
        assert torch.equal(y.nan_to_num(), expected.nan_to_num())
    is_number = ~expected.isnan() & ~expected.isinf()
    difference = (y.float() - expected.float()).abs()[is_number]
    allowed = expected.float().abs() * 2.0**-7 + x.float().abs() * 2.0**-22
    assert (difference <= allowed[is_number]).all()
    assert (y != expected)[is_number].float().mean() <= 0.01


def _turned(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, paired: bool, rounds: bool
) -> torch.Tensor:
    """As the models' own code has it: x [T, H, D], cos and sin [T, R / 2]."""
    width, dtype = 2 * cos.shape[-1], x.dtype
    turned, rest = x[..., :width], x[..., width:]
    if paired:
        cos, sin = (one.repeat_interleave(2, -1) for one in (cos, sin))
        half = torch.stack((-turned[..., 1::2], turned[..., ::2]), -1).flatten(-2)
    else:
        cos, sin = (torch.cat((one, one), -1) for one in (cos, sin))
        left, right = turned.chunk(2, -1)
        half = torch.cat((-right, left), -1)
    if rounds:
        cos, sin = cos.to(dtype), sin.to(dtype)
    turned = (turned * cos[:, None] + half * sin[:, None]).to(dtype)
    return torch.cat((turned, rest), -1)


HEADS = ((2, 2), (16, 16), (34, 34), (64, 64), (80, 20), (96, 0), (128, 128))
"""The width of a head, and how much of it is turned."""


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("order", ["without norms", "norms first", "norms last", "norms of all"])
@pytest.mark.parametrize(("paired", "rounds"), [(False, True), (False, False), (True, True)])
def test_heads(order: str, kv_heads: int, paired: bool, rounds: bool, dtype: torch.dtype) -> None:
    if order == "norms first" and paired:
        pytest.skip("not computed")
    forms = (None,) if order == "without norms" else FORMS
    for form, (width, rotary), tokens in itertools.product(forms, HEADS, (1, 9, 130)):
        if form == CENTERED and width < 5:
            continue  # nothing is left of one element without its mean
        _check_heads(
            width, rotary, form, tokens, dtype, kv_heads=kv_heads, paired=paired, rounds=rounds,
            order=order,
        )  # fmt: skip


def _check_heads(
    width: int, rotary: int, form: int | None, tokens: int, dtype: torch.dtype, *, kv_heads: int,
    paired: bool, rounds: bool, order: str,
) -> None:  # fmt: skip
    """Queries and keys in place, bit by bit; nothing beside them is touched."""
    cos, sin = (_random(torch.float32, tokens, rotary // 2, seed=seed) for seed in (4, 5))
    if rounds:
        cos, sin = (one.to(dtype).float() for one in (cos, sin))
    norms_last, of_all = order == "norms last", order == "norms of all"
    sizes = (3 * width, kv_heads * width)
    normed = sizes if of_all else (width, width)
    weights = [_random(dtype, size, seed=seed) for seed, size in enumerate(normed, 1)]
    # Queries, keys and values side by side, then a gap.
    stride = (3 + 2 * kv_heads) * width + 5
    whole = _random(dtype, tokens, stride)
    query, key, rest = whole.split_with_sizes((*sizes, stride - sum(sizes)), -1)
    unchanged = rest.clone()
    expected = []
    for x, weight in zip((query, key), weights, strict=True):
        heads = x.reshape(tokens, -1, width)
        if form is not None and not norms_last:
            together = heads.reshape(tokens, -1, len(weight)).contiguous()
            heads = _norm(together, weight, form).view(heads.shape)
        heads = _turned(heads, cos, sin, paired=paired, rounds=rounds)
        if form is not None and norms_last:
            heads = _norm(heads.contiguous(), weight, form)
        expected.append(heads.flatten(1))
    norms: dict[str, Any] = {}
    if form is not None:
        norms = {
            name: _weight(weight, form)
            for name, weight in zip(("query_norm", "key_norm"), weights, strict=True)
        }
    call = HeadsCall(
        query=query.data_ptr(), key=key.data_ptr(), query_stride=stride, key_stride=stride,
        query_head_stride=width, cos=cos.data_ptr(), sin=sin.data_ptr(), tokens=tokens,
        num_heads=3, num_kv_heads=kv_heads, head_dim=width, rotary_dim=rotary, paired=paired,
        rounds=rounds, norms_last=norms_last,
        **norms,
    )  # fmt: skip
    native_library().heads(ctypes.byref(call), DTYPES[dtype], torch.get_num_threads())
    case = (form, width, rotary, tokens)
    assert torch.equal(query, expected[0]), case
    assert torch.equal(key, expected[1]), case
    assert torch.equal(rest, unchanged), case


@pytest.mark.parametrize("factor", [1.0, 0.22])
def test_sums(factor: float, dtype: torch.dtype) -> None:
    x, y = _random(dtype, 7, 131), _random(dtype, 7, 131, seed=1)
    total = torch.empty_like(x)
    native_library().add(
        x.data_ptr(), y.data_ptr(), factor, total.data_ptr(), 7, 131, DTYPES[dtype], 1
    )
    assert torch.equal(total, x + y * factor)


def test_a_row_is_the_same_among_any_others_and_for_any_threads(dtype: torch.dtype) -> None:
    x, weight = _random(dtype, 300, 1030), _random(dtype, 1030, seed=1)
    all_rows, gated = _norm(x, weight, 0), _gate(x, SILU)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            for rows in (1, 2, 17, 299):
                assert torch.equal(_norm(x[:rows], weight, 0), all_rows[:rows])
                assert torch.equal(_gate(x[:rows], SILU), gated[:rows])
    finally:
        torch.set_num_threads(before)
