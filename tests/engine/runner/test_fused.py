"""The kernels between a model's matrix products: equal to torch's, one after the other."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Iterator

import pytest
import torch
from torch.nn.functional import gelu, silu

from engine.native import library
from engine.native.library import FROM_ONE, GELU_TANH, ROUNDED_FIRST, SILU
from engine.runner.fused import AttentionPlan, NormPlan, apply_gate, join, rms_norm, rotate_heads
from engine.runner.likeness import agree
from engine.runner.packed import PackedLinear, native_library
from engine.runner.packing import Packing, pack_model

WIDTHS = (1, 5, 8, 15, 16, 17, 31, 64, 80, 100, 129, 1000, 1024, 4099)
MAGNITUDES = (1e-4, 1.0, 1e3)


@pytest.fixture(scope="module", params=["avx512_bf16", "avx512", "avx2", "portable"], autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The kernels' variant for an instruction set."""
    best = native_library().isa
    handle = ctypes.CDLL(str(library.LIBRARY))
    handle.headrace_use.restype = ctypes.c_bool
    if not handle.headrace_use(request.param.encode()):
        pytest.skip(f"this machine has no {request.param}")
    yield request.param
    assert handle.headrace_use(best.encode())


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _norm(x: torch.Tensor, weight: torch.Tensor, plan: NormPlan) -> torch.Tensor:
    """As the models' own code has it."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + plan.eps)
    if plan.form == ROUNDED_FIRST:
        return weight * normed.to(x.dtype)
    return (normed * (weight.float() + (plan.form == FROM_ONE))).to(x.dtype)


@pytest.mark.parametrize("form", [0, FROM_ONE, ROUNDED_FIRST])
@pytest.mark.parametrize("width", WIDTHS)
def test_norms(form: int, width: int) -> None:
    plan = NormPlan(width, 1e-6, form)
    weight = _random(width, seed=1)
    for magnitude in MAGNITUDES:
        for shape in ((1, width), (3, 1, 7, width), (90, width)):
            x = (_random(*shape) * magnitude).bfloat16()
            assert agree(rms_norm(x, weight, plan), _norm(x, weight, plan))
    assert rms_norm(_random(0, width), weight, plan).shape == (0, width)


def test_the_forms_of_norms_are_not_alike() -> None:
    """Else the comparison above would show nothing."""
    x, weight = _random(20, 128), _random(128, seed=1)
    results = [rms_norm(x, weight, NormPlan(128, 1e-6, form)) for form in (0, 1, 2)]
    assert not any(agree(results[i], results[j]) for i, j in ((0, 1), (0, 2), (1, 2)))
    assert not agree(rms_norm(x, weight, NormPlan(128, 1e-2, 0)), results[0])


@pytest.mark.parametrize("form", [0, FROM_ONE, ROUNDED_FIRST])
def test_norms_of_what_is_no_ordinary_number(form: int) -> None:
    plan, weight = NormPlan(40, 1e-6, form), _random(40, seed=1)
    x = _random(7, 40)
    x[0] = 0
    x[1, 3] = float("nan")
    x[2, 39] = float("inf")
    x[3, 0] = float("-inf")
    x[4] = 3e38
    x[5] = 1e-39
    torch.testing.assert_close(
        rms_norm(x, weight, plan), _norm(x, weight, plan), rtol=2**-7, atol=0, equal_nan=True
    )
    zero_eps = NormPlan(40, 0.0, form)
    assert rms_norm(x, weight, zero_eps)[0].isnan().all(), "0 / 0, as in torch"


def _gated(gate: torch.Tensor, up: torch.Tensor, activation: int) -> torch.Tensor:
    active = silu(gate) if activation == SILU else gelu(gate, approximate="tanh")
    return active * up


@pytest.mark.parametrize("activation", [SILU, GELU_TANH])
@pytest.mark.parametrize("width", WIDTHS)
def test_gates(activation: int, width: int) -> None:
    for magnitude in (1e-2, 1.0, 30.0):
        for rows in (1, 3, 70):
            both = (_random(rows, 2 * width) * magnitude).bfloat16()
            expected = _gated(both[:, :width].contiguous(), both[:, width:], activation)
            allowed = (both[:, :width] * both[:, width:]).float().abs() * 2.0**-22
            up = both[:, width:].clone()
            gate = both[:, :width]
            apply_gate(gate, both[:, width:], 2 * width, activation)
            assert agree(gate, expected, allowed)
            assert torch.equal(both[:, width:], up)


@pytest.mark.parametrize("activation", [SILU, GELU_TANH])
def test_gates_of_every_number(activation: int) -> None:
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).view(64, 1024)
    ones = torch.ones_like(x)
    actual = x.clone()
    apply_gate(actual, ones, 1024, activation)
    expected = _gated(x, ones, activation)
    assert torch.equal(actual.isnan(), expected.isnan())
    assert agree(actual, expected, x.float().abs() * 2.0**-22)


def _turned(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, weight: torch.Tensor | None, form: int
) -> torch.Tensor:
    """As the models' own code has it: x [T, H, D], cos and sin [T, R]."""
    if weight is not None:
        x = _norm(x, weight, NormPlan(x.shape[-1], 1e-6, form))
    width = cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    left, right = turned.chunk(2, -1)
    half_turned = torch.cat((-right, left), -1)
    turned = turned * cos[:, None] + half_turned * sin[:, None]
    return torch.cat((turned, rest), -1)


@pytest.mark.parametrize("tokens", [1, 9, 130])
@pytest.mark.parametrize("form", [None, 0, FROM_ONE, ROUNDED_FIRST])
@pytest.mark.parametrize(
    ("width", "rotary"), [(2, 2), (16, 16), (34, 34), (64, 64), (80, 20), (96, 0), (128, 128)]
)
def test_heads(width: int, rotary: int, form: int | None, tokens: int) -> None:
    plan = AttentionPlan(
        num_heads=3,
        num_kv_heads=2,
        head_dim=width,
        rotary_dim=rotary,
        joined=None,
        form=form,
        eps=(1e-6, 1e-6),
        options={},
        eager=lambda: None,
    )
    cos, sin = _random(tokens, rotary, seed=4), _random(tokens, rotary, seed=5)
    weights = None if form is None else (_random(width, seed=1), _random(width, seed=2))
    # Queries, keys and values side by side, then a gap.
    whole = _random(tokens, 7 * width + 5)
    query, key = whole[:, : 3 * width], whole[:, 3 * width : 5 * width]
    rest = whole[:, 5 * width :].clone()
    expected = [
        _turned(x.reshape(tokens, -1, width), cos, sin, weight, form or 0).flatten(1)
        for x, weight in zip((query, key), weights or (None, None), strict=True)
    ]
    stride = 7 * width + 5
    addresses = (query.data_ptr(), key.data_ptr())
    rotate_heads(addresses, (stride, stride), tokens, (cos, sin), weights, plan)
    if form is None:
        assert torch.equal(query, expected[0])
        assert torch.equal(key, expected[1])
    else:
        assert agree(query, expected[0], mixed=True)
        assert agree(key, expected[1], mixed=True)
    assert torch.equal(whole[:, 5 * width :], rest)


def test_a_row_is_the_same_among_any_others_and_for_any_threads() -> None:
    x, weight, plan = _random(300, 1030), _random(1030, seed=1), NormPlan(1030, 1e-6, 0)
    all_rows = rms_norm(x, weight, plan)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            for rows in (1, 2, 17, 299):
                assert torch.equal(rms_norm(x[:rows], weight, plan), all_rows[:rows])
            gated = x.clone()
            apply_gate(gated, x, 1030, SILU)
            one = x[5:6].clone()
            apply_gate(one, x[5:6], 1030, SILU)
            assert torch.equal(gated[5:6], one)
    finally:
        torch.set_num_threads(before)


def _packed(*sizes: tuple[int, int, bool], how: Packing = "native") -> list[PackedLinear]:
    """Packed layers of (outputs, inputs, bias), one behind the other."""
    model = torch.nn.Sequential(
        *(torch.nn.Linear(inputs, outputs, bias=bias) for outputs, inputs, bias in sizes)
    ).bfloat16()
    pack_model(model, how)
    return list(model)  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["native", "int8"])
@pytest.mark.parametrize("biases", [(False, False, False), (True, True, True), (False, True, True)])
def test_layers_that_lie_side_by_side_are_one(
    biases: tuple[bool, bool, bool], how: Packing
) -> None:
    sizes = zip((128, 64, 40), (72, 72, 72), biases, strict=True)
    layers = _packed(*sizes, how=how)
    joined = join(layers)
    assert joined is not None
    assert joined.outputs == 232
    assert joined.packed.data_ptr() == layers[0].packed.data_ptr(), "no weight is held twice"
    for rows in (1, 5, 40):
        x = _random(rows, 72)
        assert torch.equal(joined(x), torch.cat([layer(x) for layer in layers], -1))
    with_copies = copy.deepcopy(joined)
    assert torch.equal(with_copies(x), joined(x))


def test_layers_that_are_not_joined() -> None:
    first, second, third = _packed((64, 32, False), (64, 32, False), (64, 32, False))
    assert join([first, second, third]) is not None
    assert join([first, third]) is None, "there is another between them"
    assert join([second, first]) is None
    assert join([first, copy.deepcopy(second)]) is None
    assert join([first, torch.nn.Linear(32, 64)]) is None
    assert join(_packed((40, 32, False), (64, 32, False))) is None, "no whole panels"
    assert join(_packed((64, 32, False), (64, 48, False))) is None, "of different inputs"
