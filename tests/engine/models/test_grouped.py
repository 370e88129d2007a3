"""Integers with scales by group: every element is its formula's, whatever the layout, and products
are those of the elements, whatever the processor's instructions.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools

import pytest
import torch

from engine.models.formats.codes import Codes, Layout
from engine.models.formats.grouped import Grouped, held_bytes, why_not_held
from engine.models.formats.native import PANEL, native_library, packed_bytes
from engine.models.held_layer import PackedEmbedding, PackedLinear
from engine.models.native_tensors import Held

ROUNDING = 2.0**-8
"""Of one bfloat16, relative."""
SHAPES = ((200, 704), (17, 135), (130, 64), (5, 7))
"""Outputs and inputs. 704 are 5.5 groups of 128."""


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _layout(
    inputs: int,
    bits: int = 4,
    group: int = 128,
    has_minima: bool = False,
    is_ordered: bool = False,
    scale_dtype: torch.dtype = torch.float16,
) -> Layout:
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(5))
    whole = inputs if group == -1 else group
    return Layout(bits, whole, has_minima, order if is_ordered else None, scale_dtype)


def _codes(outputs: int, inputs: int, layout: Layout, seed: int = 0) -> Codes:
    groups = -(-inputs // layout.group)
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << layout.bits, (outputs, inputs), generator=generator)
    dtype = torch.float16 if layout.scale_dtype is torch.float16 else torch.bfloat16  # as in files
    scales = (_random(outputs, groups, seed=seed) * 0.1).to(dtype).float()
    zeros = torch.randint(0, 1 << layout.bits, (outputs, groups), generator=generator)
    return Codes(codes.to(torch.uint8), scales, -scales * zeros if layout.has_minima else None)


def _k_quants(bits: int, group: int, has_minima: bool) -> Layout:
    own = torch.int8
    return Layout(bits, group, has_minima, None, own, own, per_factor=256 // group)


def _codes_with_factors(outputs: int, inputs: int, layout: Layout, seed: int = 0) -> Codes:
    groups, generator = inputs // layout.group, torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << layout.bits, (outputs, inputs), generator=generator)
    scales, minima = torch.randint(-128, 128, (2, outputs, groups), generator=generator).float()
    count = groups // layout.per_factor * (1 + layout.has_minima)
    factors = (_random(outputs, count, seed=seed) * 1e-3).half().float()
    return Codes(codes.to(torch.uint8), scales, minima if layout.has_minima else None, factors)


def _multiplied(layout: Layout, codes: Codes) -> Codes:
    """The same with scales and minima in float32, by hand."""
    assert codes.factors is not None
    scales, minima = codes.scales.clone(), None if codes.minima is None else codes.minima.clone()
    kinds = 1 + layout.has_minima
    for group in range(scales.shape[1]):
        first = group // layout.per_factor * kinds
        scales[:, group] *= codes.factors[:, first]
        if minima is not None:
            minima[:, group] *= codes.factors[:, first + 1]
    return Codes(codes.codes, scales, minima)


def _held(outputs: int, inputs: int, layout: Layout, codes: Codes) -> Grouped:
    """Packed in slices."""
    held = Grouped((outputs, inputs), torch.bfloat16, layout)
    for first in range(0, outputs, PANEL):
        own = (None if one is None else one[first : first + PANEL] for one in codes.parts)
        held.pack_codes(first, Codes(*own))  # type: ignore[arg-type]  # only minima are None
    return held


def _formula(layout: Layout, codes: Codes) -> tuple[torch.Tensor, torch.Tensor]:
    """The elements by the formula alone, float64 [N, K], and how large their parts are: 8 bits are
    multiplied less their centre, 4 bits as they are where no instruction multiplies pairs.
    """
    outputs, inputs = codes.codes.shape
    elements = torch.empty(outputs, inputs, dtype=torch.float64)
    sizes = torch.empty_like(elements)
    centre = 1 << (layout.bits - 1)
    for j in range(inputs):
        scale = codes.scales[:, j // layout.group].double()
        code = codes.codes[:, j].double()
        least = -centre * scale
        if codes.minima is not None:
            least = codes.minima[:, j // layout.group].double()
        place = j if layout.order is None else int(layout.order[j])
        elements[:, place] = scale * code + least
        lowered = (scale * (code - centre)).abs() + (least + scale * centre).abs()
        kept = (scale * code).abs() + least.abs() if layout.bits == 4 else lowered
        sizes[:, place] = torch.maximum(lowered, kept)
    return elements, sizes


def _check_product(held: Grouped, layout: Layout, codes: Codes, x: torch.Tensor) -> None:
    elements, sizes = _formula(layout, codes)
    bias = _random(held.shape[0], seed=1).bfloat16()
    actual = held.multiply(x, held.padded(bias))
    exact = x.double() @ elements.T + bias.double()
    size = x.double().abs() @ sizes.T + bias.double().abs()
    bound = ROUNDING * exact.abs() + (held.shape[1] + 2) * 2.0**-23 * size
    assert actual.dtype == torch.bfloat16
    assert ((actual.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("is_ordered", [False, True], ids=["plain", "ordered"])
@pytest.mark.parametrize("has_minima", [False, True], ids=["symmetric", "minima"])
@pytest.mark.parametrize("group", [-1, 16, 32, 64, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_elements_and_products(
    isa: str, bits: int, group: int, has_minima: bool, is_ordered: bool
) -> None:
    for (outputs, inputs), dtype in zip(
        SHAPES, itertools.cycle((torch.float16, torch.float32)), strict=False
    ):
        layout = _layout(inputs, bits, group, has_minima, is_ordered, dtype)
        codes = _codes(outputs, inputs, layout)
        held = _held(outputs, inputs, layout, codes)
        elements, _ = _formula(layout, codes)
        rows = torch.randperm(outputs)
        assert torch.equal(held.rows(rows), elements[rows].float().bfloat16())
        assert torch.equal(codes.values(layout), elements.float())
        read = held.codes(rows)
        assert torch.equal(read.codes, codes.codes[rows])
        assert torch.equal(read.scales, codes.scales[rows])
        if read.minima is None or codes.minima is None:
            assert read.minima is codes.minima
        else:
            assert torch.equal(read.minima, codes.minima[rows])
        for count in (1, 2, 5, 13, 97):
            _check_product(held, layout, codes, _random(count, inputs, seed=count).bfloat16())


@pytest.mark.parametrize(
    ("bits", "group", "has_minima"), [(4, 32, True), (8, 32, True), (8, 16, False)]
)
def test_integers_times_factors(isa: str, bits: int, group: int, has_minima: bool) -> None:
    """Of float32 scales, which are their products, they differ in size alone."""
    for outputs, inputs in ((200, 768), (17, 256)):
        layout = _k_quants(bits, group, has_minima)
        codes = _codes_with_factors(outputs, inputs, layout)
        held = _held(outputs, inputs, layout, codes)
        assert held.layout.per_factor == layout.per_factor
        wide = Layout(bits, group, has_minima)
        same = _multiplied(layout, codes)
        assert torch.equal(codes.values(layout), same.values(wide))
        read = held.codes(rows := torch.randperm(outputs))
        for own, file in zip(read.parts, codes.parts, strict=True):
            assert own is file if own is None or file is None else torch.equal(own, file[rows])
        other = _held(outputs, inputs, wide, same)
        assert torch.equal(held.rows(rows), other.rows(rows))
        x = _random(97, inputs, seed=3).bfloat16()
        for count in (1, 2, 5, 13, 97):
            assert torch.equal(held.multiply(x[:count], None), other.multiply(x[:count], None))
        _check_product(held, wide, same, x)


def test_k_quants_take_few_bits() -> None:
    """Those of a weight, beside 6 and 10 with float32 scales."""
    for layout, bits in (
        (_k_quants(4, 32, True), 4.625),
        (_k_quants(8, 32, True), 8.625),
        (_k_quants(8, 16, False), 8.5625),
    ):
        assert held_bytes((128, 512), layout) * 8 == 128 * 512 * bits


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 128), (8, 64), (8, -1)])
@pytest.mark.parametrize("has_more", [False, True], ids=["symmetric", "minima, ordered"])
def test_a_row_is_the_same_among_any_others_and_for_any_threads(
    isa: str, bits: int, group: int, has_more: bool
) -> None:
    layout = _layout(601, bits, group, has_more, has_more)
    held = _held(300, 601, layout, _codes(300, 601, layout))
    x = _random(210, 601, seed=3).bfloat16()
    all_rows = held.multiply(x, None)
    before = torch.get_num_threads()
    try:
        for threads, rows in itertools.product((1, 2, 7), (1, 2, 5, 6, 7, 16, 17, 97, 200)):
            torch.set_num_threads(threads)
            assert torch.equal(held.multiply(x[:rows], None), all_rows[:rows])
    finally:
        torch.set_num_threads(before)


def test_input_that_lies_in_strides(isa: str) -> None:
    for is_ordered, has_minima in itertools.product((False, True), repeat=2):
        layout = _layout(64, 4, 32, has_minima, is_ordered)
        held = _held(40, 64, layout, _codes(40, 64, layout))
        wide = _random(9, 100, seed=2).bfloat16()
        x = wide[:, 7:71]
        assert torch.equal(held.multiply(x, None), held.multiply(x.contiguous(), None))
        assert held.multiply(x[:0], None).shape == (0, 40)


@pytest.mark.parametrize("wrong", ["zero", "halves", "group", "output", "order", "last"])
@pytest.mark.parametrize("bits", [4, 8])
def test_faults_are_found(bits: int, wrong: str) -> None:
    """Each changes elements and products by more than the checks of these allow."""
    layout = _layout(704, bits, 128, has_minima=True, is_ordered=True)
    codes, x = _codes(64, 704, layout), _random(7, 704).bfloat16()
    held = _held(64, 704, layout, codes)
    _check_product(held, layout, codes, x)
    assert held.minima is not None
    groups = [one.view(6, 64) for one in (held.scales, held.minima)]
    if wrong == "zero":
        held.minima -= held.scales
    elif wrong == "halves":
        number = held.packed.view(torch.int32 if bits == 4 else torch.int16)
        number.copy_(number << 16 | number >> 16 & 0xFFFF if bits == 4 else number.roll(1))
    elif wrong == "group":
        held.scales, held.minima = (one.roll(1, 0).contiguous().flatten() for one in groups)
    elif wrong == "output":
        held.scales, held.minima = (one.roll(1, 1).contiguous().flatten() for one in groups)
    elif wrong == "order":
        held.order = None
    else:
        for one in groups:
            one[-1] = 0
    with pytest.raises(AssertionError):
        _check_product(held, layout, codes, x)
    assert not torch.equal(
        held.rows(torch.arange(64)), _formula(layout, codes)[0].float().bfloat16()
    )


def test_what_the_kernels_do_not_take_is_said_in_words() -> None:
    assert why_not_held(128, Layout(4, 64, has_minima=True)) is None
    assert why_not_held(7, Layout(8, 7, has_minima=False)) is None
    assert "3 bits" in str(why_not_held(128, Layout(3, 64, has_minima=False)))
    assert "multiples of 8" in str(why_not_held(128, Layout(4, 20, has_minima=False)))


def test_what_it_holds_is_what_a_plan_counts() -> None:
    for has_more, dtype in itertools.product((False, True), (torch.float16, torch.float32)):
        layout = _layout(704, 4, 128, has_more, has_more, dtype)
        tensors = Grouped((130, 704), torch.bfloat16, layout).tensors().values()
        assert sum(one.nbytes for one in tensors) == held_bytes((130, 704), layout)
        layout = _k_quants(8, 32, has_more)
        tensors = Grouped((130, 512), torch.bfloat16, layout).tensors().values()
        assert sum(one.nbytes for one in tensors) == held_bytes((130, 512), layout)


def test_scales_keep_their_bits() -> None:
    layout = _layout(64, group=32)
    codes = _codes(40, 64, layout)
    held = Grouped((40, 64), torch.bfloat16, layout)
    with pytest.raises(ValueError, match=r"scales are not torch\.float16"):
        held.pack_codes(0, dataclasses.replace(codes, scales=codes.scales * 1.0001))


def test_other_elements_are_refused() -> None:
    layout = _layout(64, group=32)
    layer = PackedLinear(_held(40, 64, layout, _codes(40, 64, layout)), torch.nn.Linear(64, 40))
    with pytest.raises(ValueError, match="quantized in its file"):
        layer.take(torch.zeros(40, 64))


def test_a_layer_compiles() -> None:
    layout = _layout(64, 4, 32, has_minima=True, is_ordered=True)
    held = _held(40, 64, layout, _codes(40, 64, layout))
    linear = torch.nn.Linear(64, 40).bfloat16().eval()
    embedding = torch.nn.Embedding(40, 64, _weight=linear.weight.detach())
    layers = torch.nn.Sequential(PackedEmbedding(held, embedding), PackedLinear(held, linear))
    compiled = torch.compile(layers, fullgraph=True, backend="aot_eager")
    ids = torch.tensor([[3, 39, 0]])
    assert torch.equal(compiled(ids), layers(ids))


@pytest.mark.parametrize(
    ("second", "count"),
    [
        ({}, 1),
        ({"has_minima": False}, 2),
        ({"is_ordered": False}, 2),
        ({"group": 64}, 2),
        ({"scale_dtype": torch.float32}, 2),
    ],
)
def test_neighbours_that_are_alike_are_one_product(second: dict[str, bool], count: int) -> None:
    memory = torch.empty(2 * packed_bytes((64, 96), torch.bfloat16, 4), dtype=torch.uint8)
    model = torch.nn.Module()
    first = {"group": 32, "has_minima": True, "is_ordered": True}
    for name, place, own in zip("ab", memory.chunk(2), (first, first | second), strict=True):
        layout = _layout(96, **own)
        held = Grouped((64, 96), torch.bfloat16, layout, place)
        held.pack_codes(0, _codes(64, 96, layout, seed=ord(name)))
        setattr(model, name, PackedLinear(held, torch.nn.Linear(96, 64, bias=False).bfloat16()))
    x = _random(9, 96).bfloat16()
    keeps = Held(model, torch.bfloat16)
    weights = keeps.linears(["a", "b"], 96, 128)
    assert len(weights) == count
    y = torch.empty(9, 128, dtype=torch.bfloat16)
    for i, weight in enumerate(weights):
        to = y[:, 64 * i :].data_ptr()
        native_library().linear(ctypes.byref(weight), x.data_ptr(), 96, to, 128, 9, 2)
    assert torch.equal(y, torch.cat([model.a(x), model.b(x)], 1))
