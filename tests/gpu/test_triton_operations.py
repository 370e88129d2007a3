"""Each kernel of `engine.models.decoder_kernels` against its plain counterpart: what has no sum is
equal bit by bit, a norm or an activation differs by one neighbouring number in 1 % of places.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from engine.models.comparison import _norm as judge_norm
from engine.models.description import ClampedGate
from engine.models.operations import BoundNorm, Heads, KVPlaces, Tables, TorchOperations
from engine.models.triton_operations import TritonOperations, add_norm_launch, turn_launch
from tests.gpu.conftest import INTERPRETED

pytestmark = pytest.mark.gpu

PLAIN, TRITON = TorchOperations(), TritonOperations()
FORMS = ("plain", "from_one", "rounded_first", "centered")


class Numbers:
    """Random tensors, the same in each run."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._device, self._dtype = device, dtype

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        made = torch.randn(*shape, generator=self._generator)
        return made.to(self._device, dtype or self._dtype)

    def norm(self, width: int, form: str, *, biased: bool = False, eps: float = 1e-5) -> BoundNorm:
        weight = self(width) * 0.3 + (0.0 if form == "from_one" else 1.0)
        bias = self(width) if biased else None
        return BoundNorm(weight, bias, eps, form)  # type: ignore[arg-type]

    def tables(self, tokens: int, dim: int, *, rounds: bool) -> Tables:
        angles = self(tokens, dim // 2, dtype=torch.float32) * 100
        dtype = self._dtype if rounds else torch.float32
        return angles.cos().to(dtype), angles.sin().to(dtype)


def check_norm(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    assert actual.dtype is expected.dtype
    assert judge_norm(actual.flatten(1), expected.flatten(1)) is None


TYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=TYPES[:2] if INTERPRETED else TYPES, ids=str)
def numbers(request: pytest.FixtureRequest, device: torch.device) -> Numbers:
    return Numbers(device, request.param)


# ---- products ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("inputs", "outputs"), [(5, 3), (4096, 9), (4100, 130), (9000, 1)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_of_one_token(inputs: int, outputs: int, biased: bool, numbers: Numbers) -> None:
    """Of other types, and of more tokens, it is torch's."""
    x, weight = numbers(1, inputs), numbers(outputs, inputs)
    bias = numbers(outputs) if biased else None
    right = torch.nn.functional.linear(
        x.double(), weight.double(), None if bias is None else bias.double()
    )
    found = TRITON.multiply(x, weight, bias)
    assert found.dtype is x.dtype
    torch.testing.assert_close(found.double(), right, rtol=1e-2, atol=1e-2 * inputs**0.5)


# ---- sums and norms ----------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_a_norm(form: str, numbers: Numbers) -> None:
    for rows, width in ((1, 1), (3, 40), (1, 67), (2, 256), (4, 1153)):
        for biased in (False, True):
            x, norm = numbers(rows, width) * 3, numbers.norm(width, form, biased=biased)
            total, normed = TRITON.add_norm(x, before=norm)
            assert total is x
            check_norm(normed, PLAIN.add_norm(x, before=norm)[1])


@pytest.mark.parametrize("factor", [1.0, 0.22])
@pytest.mark.parametrize("count", [1, 2])
def test_sums_are_equal(count: int, factor: float, numbers: Numbers) -> None:
    for rows, width in ((1, 67), (70, 40), (3, 256)):
        x, *made = (numbers(rows, width) * scale for scale in (3, 1, 2)[: count + 1])
        kept = [one.clone() for one in (x, *made)]
        total, normed = TRITON.add_norm(x, made, factor=factor)
        assert normed is total
        assert torch.equal(total, PLAIN.add_norm(x, made, factor=factor)[0])
        assert all(torch.equal(*pair) for pair in zip(kept, (x, *made), strict=True))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("factor", [1.0, 0.22])
def test_all_at_once_is_each_after_the_other(form: str, factor: float, numbers: Numbers) -> None:
    """What was made is normed, multiplied and added, and the sum is normed: bit by bit what these
    compute alone.
    """
    for rows, width in ((1, 67), (7, 256)):
        x, made = numbers(rows, width) * 3, numbers(rows, width)
        after, before = (numbers.norm(width, form, biased=True) for _ in range(2))
        total, normed = TRITON.add_norm(x, [made], after, factor, before)
        alone = TRITON.add_norm(made, before=after)[1]
        assert torch.equal(total, PLAIN.add_norm(x, [alone], factor=factor)[0])
        assert torch.equal(normed, TRITON.add_norm(total, before=before)[1])


def test_a_wide_row_is_left_to_torch(numbers: Numbers) -> None:
    norm = numbers.norm(20_000, "plain")
    assert add_norm_launch(20_000, 1, None, 1.0, norm) is None
    x = numbers(2, 20_000)
    for one, other in zip(
        TRITON.add_norm(x, [x], before=norm), PLAIN.add_norm(x, [x], before=norm), strict=True
    ):
        assert torch.equal(one, other)


# ---- queries, keys and values ------------------------------------------------------------------


def turned(
    operations: Any, projected: torch.Tensor, heads: Heads, tables: Tables | None, *, cached: bool
) -> list[torch.Tensor]:
    """Queries, keys, values; what is not written is -1."""
    tokens, slots = len(projected), 3 * len(projected) + 8
    shape = (slots if cached else tokens, heads.kv_heads, heads.head_dim)
    keys, values = projected.new_full((2, *shape), -1.0).unbind(0)
    places = KVPlaces(keys, values)
    if cached:
        where = torch.randperm(slots - 8, generator=torch.Generator().manual_seed(1))[:tokens] + 8
        where[-1] = 5  # a token of padding
        places = KVPlaces(keys, values, where.to(projected.device))
    queries = operations.rotate(projected, heads, tables, places)
    return [queries, keys, values]


SIZES = [(4, 2, 64), (3, 1, 96), (7, 7, 128), (2, 1, 192), (4, 2, 256), (5, 5, 18)]


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SIZES)
@pytest.mark.parametrize("paired", [False, True])
def test_rotations_are_equal(
    heads: int, kv_heads: int, dim: int, paired: bool, numbers: Numbers
) -> None:
    """Whole and partial, rounded here and there, into a cache or not."""
    for tokens, rotary, rounds, cached, turns in (
        (1, dim, True, True, True),
        (3, dim // 4 * 2, True, False, True),
        (2, dim, False, False, True),
        (1, dim, True, True, False),
    ):
        projected = numbers(tokens, (heads + 2 * kv_heads) * dim)
        tables = numbers.tables(tokens, rotary, rounds=rounds) if turns else None
        one = Heads(heads, kv_heads, dim, rotary_dim=rotary, paired=paired, rounds_products=rounds)
        ours, theirs = (
            turned(which, projected, one, tables, cached=cached) for which in (TRITON, PLAIN)
        )
        assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_norms_of_heads(form: str, whole: bool, last: bool, numbers: Numbers) -> None:
    """Of each head, or of all; before the rotation, or after it."""
    heads, kv_heads, dim, rotary = (3, 1, 20, 10) if whole else (4, 2, 96, 96)
    query_width, key_width = (dim * count if whole else dim for count in (heads, kv_heads))
    projected = numbers(2, (heads + 2 * kv_heads) * dim) * 3
    tables = numbers.tables(2, rotary, rounds=True)
    plain = Heads(heads, kv_heads, dim, rotary_dim=rotary, rounds_products=True)
    one = dataclasses.replace(
        plain,
        query_norm=numbers.norm(query_width, form),
        key_norm=numbers.norm(key_width, form, biased=True),
        norms_last=last,
    )
    ours = turned(TRITON, projected, one, None, cached=False)
    theirs = turned(PLAIN, projected, one, None, cached=False)
    for actual, expected in zip(ours, theirs, strict=True):
        check_norm(actual, expected)
    # Together they are one after the other.
    both = turned(TRITON, projected, one, tables, cached=True)
    if last:
        middle = turned(PLAIN, projected, plain, tables, cached=False)
        expected_parts = turned(TRITON, _flat(middle), one, None, cached=True)
    else:
        expected_parts = turned(PLAIN, _flat(ours), plain, tables, cached=True)
    for actual, expected in zip(both, expected_parts, strict=True):
        if last:  # what is rotated is added up by halves
            check_norm(actual, expected)
        else:
            assert torch.equal(actual, expected)


def _flat(parts: list[torch.Tensor]) -> torch.Tensor:
    """Queries, keys and values as a product makes them."""
    return torch.cat([one.flatten(1) for one in parts], -1)


def test_many_tokens(numbers: Numbers) -> None:
    one = Heads(3, 1, 64, rotary_dim=64, rounds_products=True)
    projected, tables = numbers(70, 5 * 64), numbers.tables(70, 64, rounds=True)
    ours, theirs = (turned(which, projected, one, tables, cached=True) for which in (TRITON, PLAIN))
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


def test_many_heads_together_are_left_to_torch(numbers: Numbers) -> None:
    norm = numbers.norm(129 * 128, "plain")
    one = Heads(129, 1, 128, query_norm=norm)
    assert turn_launch(one, turns=False, has_slots=False) is None
    projected = numbers(1, 131 * 128)
    ours, theirs = (turned(which, projected, one, None, cached=True) for which in (TRITON, PLAIN))
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


# ---- activations -------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu_squared"])
@pytest.mark.parametrize("gated", [False, True])
def test_activations(activation: Any, gated: bool, numbers: Numbers) -> None:
    for rows, width in ((1, 67), (5, 1030), (70, 16)):
        inner = numbers(rows, (1 + gated) * width) * 4
        inner[0, :4] = torch.tensor([-300.0, 300.0, 0.0, -88.0])
        ours = TRITON.gate(inner, activation, gated=gated)
        check_norm(ours, PLAIN.gate(inner, activation, gated=gated))


def test_a_clamped_gate(numbers: Numbers) -> None:
    """By turns in its input; what is no number stays where it is."""
    clamped = ClampedGate(1.702, 7.0)
    for rows, width in ((1, 67), (3, 1030), (70, 16)):
        inner = numbers(rows, 2 * width) * 6
        inner[0, :8] = torch.tensor([-300.0, 300.0, 300.0, -300.0, 0.0, 7.0, float("nan"), 1.0])
        ours = TRITON.gate(inner, clamped, gated=True)
        assert ours[0].isnan().nonzero().tolist() == [[3]]
        check_norm(ours.nan_to_num(), PLAIN.gate(inner, clamped, gated=True).nan_to_num())


@pytest.mark.skipif(not INTERPRETED, reason="on a device every test is run in float16")
def test_float16(device: torch.device) -> None:
    """One of each: the kernels do not ask which of the 16-bit types it is."""
    numbers = Numbers(device, torch.float16)
    test_all_at_once_is_each_after_the_other("rounded_first", 0.22, numbers)
    test_rotations_are_equal(4, 2, 64, False, numbers)
    test_norms_of_heads("rounded_first", False, False, numbers)
    test_activations("silu", True, numbers)
