"""Packed linear layers: equal to float64 for every shape, whatever the processor's instructions."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch

from engine.models.formats.int4 import Int4
from engine.models.formats.int4_64 import Int4Of64
from engine.models.formats.int8 import Int8
from engine.models.formats.native import Native
from engine.models.held_layer import PackedEmbedding, PackedLinear

ROUNDING = 2.0**-8
"""Of one bfloat16, relative."""


@pytest.fixture(params=[Native, Int8, Int4, Int4Of64], ids=lambda form: form.name)
def form(request: pytest.FixtureRequest) -> type[Native]:
    found: type[Native] = request.param
    return found


def _packed(weight: torch.Tensor, form: type[Native] = Native) -> Native:
    packed = form(weight.shape, weight.dtype)
    packed.pack(weight)
    return packed


def _numbers(weight: torch.Tensor, packed: Native, isa: str) -> torch.Tensor:
    """What a format makes of a weight, float64."""
    if isinstance(packed, Int4):
        return _unpack_int4(packed, isa)
    return _as_int8(weight) if isinstance(packed, Int8) else weight.double()


def _unpack_int4(packed: Int4, isa: str) -> torch.Tensor:
    """The layout, written down a second time (see linear.cpp)."""
    outputs, inputs = packed.shape
    lanes, panels_of_group = {"avx2": (8, 2), "portable": (4, 4)}.get(isa, (16, 4))
    panels, words, groups = -(-outputs // lanes), -(-inputs // 8), -(-inputs // packed.group)
    numbers = torch.empty(outputs, inputs, dtype=torch.float64)
    shifts = torch.tensor([0, 16, 4, 20, 8, 24, 12, 28])
    for output in range(outputs):
        panel, lane = divmod(output, lanes)
        first = panel - panel % panels_of_group
        stride = min(panels_of_group, panels - first) * lanes
        start = first * words * lanes + (panel - first) * lanes + lane
        found = packed.packed.view(torch.int32)[start : start + words * stride : stride][:words]
        row = (found[:, None] >> shifts & 15).flatten()[:inputs] - 8
        at = (output // 64 * groups * 64 + output % 64) + 64 * torch.arange(groups)
        scales = packed.scales[at].double().repeat_interleave(packed.group)[:inputs]
        numbers[output] = row * scales
    return numbers


def _as_int8(weight: torch.Tensor) -> torch.Tensor:
    """What int8 makes of a weight, float64."""
    most = weight.float().abs().amax(1, keepdim=True)
    inverse = torch.where(most > 0, torch.full_like(most, 127) / most, 0.0)
    numbers = (weight.float() * inverse).round()
    return numbers.double() * (most / 127).double()


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    form: type[Native] = Native,
    isa: str = "",
) -> torch.Tensor:
    packed = _packed(weight, form)
    actual = packed.multiply(x, packed.padded(bias))
    numbers = _numbers(weight, packed, isa)
    exact = x.double() @ numbers.T
    size = x.double().abs() @ numbers.abs().T
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    assert actual.dtype == torch.bfloat16
    assert actual.shape == exact.shape
    bound = ROUNDING * exact.abs() + weight.shape[1] * 2.0**-23 * size
    assert ((actual.double() - exact).abs() <= bound).all()
    return actual


@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [(1, 1), (5, 2), (16, 16), (17, 7), (63, 33), (64, 64), (65, 130), (200, 1023), (1000, 96)],
)
def test_every_shape(isa: str, form: type[Native], outputs: int, inputs: int) -> None:
    weight, bias = _random(outputs, inputs), _random(outputs, seed=1)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 11, 13, 16, 31, 70, 97, 200):
        x = _random(rows, inputs, seed=rows)
        _check(x, weight, bias if rows % 2 else None, form, isa)


def test_every_number_of_rows(isa: str, form: type[Native]) -> None:
    for rows in range(1, 71):
        _check(_random(rows, 48, seed=rows), _random(80, 48), None, form, isa)


@pytest.mark.parametrize("inputs", [256, 601])
def test_a_row_is_the_same_among_any_others_and_for_any_threads(
    isa: str, form: type[Native], inputs: int
) -> None:
    weight = _random(300, inputs)
    x, packed = _random(150, inputs, seed=3), _packed(weight, form)
    all_rows = packed.multiply(x, None)
    before = torch.get_num_threads()
    try:
        for threads, rows in itertools.product((1, 2, 7, 40), (1, 2, 5, 6, 7, 16, 17, 97, 100)):
            torch.set_num_threads(threads)
            torch.testing.assert_close(
                packed.multiply(x[:rows], None), all_rows[:rows], rtol=0, atol=0
            )
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("outputs", [5, 64, 200])
def test_what_becomes_of_results(isa: str, form: type[Native], outputs: int) -> None:
    packed = _packed(_random(outputs, 48), form)
    bias = packed.padded(_random(outputs, seed=1))
    every = torch.arange(2**16).to(torch.uint16).view(torch.bfloat16)
    finished = torch.tanh(every / 3.0) * 3.0
    for rows in (1, 5, 16, 97):
        x = _random(rows, 48, seed=rows)
        expected = torch.tanh(packed.multiply(x, bias) / 3.0) * 3.0
        actual = packed.multiply(x, bias, finished)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_input_that_lies_in_strides(isa: str) -> None:
    weight, wide = _random(40, 32), _random(3, 5, 100, seed=2)
    swapped = wide.transpose(0, 1)[..., :32]
    for x in (wide[..., 7:39], wide[:, ::2, 1:33], swapped, wide[0, 1, 3:35]):
        assert not x.is_contiguous() or x.dim() == 1
        _check(x, weight, None)
    _check(_random(32, 6).T, weight, None)
    _check(torch.empty(0, 32, dtype=torch.bfloat16), weight, None)


def test_a_weight_that_lies_in_strides(isa: str) -> None:
    _check(_random(9, 32), _random(50, 100)[:, 10:42], None)


def test_packing_changes_no_number(isa: str) -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for weight in (bits.view(256, 256), bits[:63175].view(95, 665)):
        packed = _packed(weight.view(torch.bfloat16))
        rows = torch.randperm(len(weight))[:95].view(5, 19)
        actual = packed.rows(rows)
        assert torch.equal(actual.view(torch.int16), weight[rows])


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="there are no large pages"
)
def test_the_system_is_asked_for_large_pages() -> None:
    packed = _packed(_random(4096, 1024)).packed
    middle, own = packed.data_ptr() + packed.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            own = int(found[1], 16) <= middle < int(found[2], 16)
        elif own and line.startswith("VmFlags:"):
            assert "hg" in line.split()
            return
    pytest.fail("the memory is not mapped")


def test_int8_is_the_nearest_there_is(isa: str) -> None:
    weight = _random(95, 133)
    weight[3], weight[4, 7:] = 0, 0
    rows = torch.randperm(95)
    actual = _packed(weight, Int8).rows(rows)
    assert torch.equal(actual, _as_int8(weight).float().bfloat16()[rows])


@pytest.mark.parametrize("form", [Int4, Int4Of64])
def test_int4_is_the_nearest_of_good_scales(isa: str, form: type[Int4]) -> None:
    weight = _random(95, 133)
    weight[3], weight[4, 7:] = 0, 0
    packed = _packed(weight, form)
    numbers = _unpack_int4(packed, isa)
    rows = torch.randperm(95)
    assert torch.equal(packed.rows(rows), numbers.float().bfloat16()[rows])
    assert packed.holds(weight, rows)
    shape, more = (95, -1, form.group), (0, -133 % form.group)
    groups = torch.nn.functional.pad(weight.double(), more).view(shape)
    error = torch.nn.functional.pad(numbers - weight.double(), more).view(shape)
    for scale in (groups.abs().amax(-1, keepdim=True) / 7, _furthest(groups) / -8):
        plain = (groups / torch.where(scale == 0, 1, scale)).round().clamp(-8, 7) * scale
        worse = (error.square().sum(-1) - (plain - groups).square().sum(-1)).clamp(min=0)
        assert worse.sum() < 0.02 * error.square().sum(), "float16 scales cost a little"


def _furthest(groups: torch.Tensor) -> torch.Tensor:
    return groups.gather(-1, groups.abs().argmax(-1, keepdim=True))


@pytest.mark.parametrize("form", [Int4, Int4Of64])
@pytest.mark.parametrize("wrong", ["zero", "halves", "group", "output"])
def test_faults_of_int4_are_found(wrong: str, form: type[Int4]) -> None:
    """Each is what packing itself checks, rows against the original."""
    weight, rows = _random(128, 128), torch.arange(128)
    packed = _packed(weight, form)
    assert packed.holds(weight, rows)
    numbers, scales = packed.packed, packed.scales.view(2, -1, 64)
    if wrong == "zero":
        packed.packed = torch.where(numbers % 16 < 15, numbers + 1, numbers)
    elif wrong == "halves":
        packed.packed = numbers // 16 + numbers % 16 * 16
    elif wrong == "group":
        packed.scales = scales.roll(1, 1).contiguous().flatten()
    else:
        packed.scales = scales.roll(1, 2).contiguous().flatten()
    assert not packed.holds(weight, rows)


@pytest.mark.parametrize("form", [Int8, Int4, Int4Of64])
def test_packing_is_the_same_on_any_number_of_threads(isa: str, form: type[Int8]) -> None:
    weight, before = _random(300, 601), torch.get_num_threads()
    expected = _packed(weight, form).tensors()
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            for name, tensor in _packed(weight, form).tensors().items():
                assert torch.equal(tensor, expected[name])
    finally:
        torch.set_num_threads(before)


def test_what_is_not_a_number_stays_none(isa: str) -> None:
    x, weight = _random(2, 32), _random(40, 32)
    weight[3, 5], weight[7, 0] = float("inf"), float("nan")
    actual = _packed(weight).multiply(x, None)
    expected = x.float() @ weight.float().T
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual.isinf(), expected.isinf())


@pytest.mark.parametrize("row", [-1, 40, 2**40])
def test_a_row_that_does_not_exist(row: int) -> None:
    with pytest.raises(IndexError, match="between 0 and 39"):
        _packed(_random(40, 32)).rows(torch.tensor([0, row]))


@pytest.mark.parametrize(
    "x",
    [torch.zeros(2, 32), torch.zeros(2, 31).bfloat16(), torch.zeros(2, 32).bfloat16().to("meta")],
)
def test_input_that_does_not_fit(x: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match=r"takes torch\.bfloat16"):
        _packed(_random(40, 32)).multiply(x, None)


def test_a_layer_compiles_and_keeps_its_weight(tmp_path: Path) -> None:
    linear = torch.nn.Linear(32, 40).bfloat16().eval()
    embedding = torch.nn.Embedding(40, 32, _weight=linear.weight.detach())
    packed = _packed(linear.weight)
    layers = torch.nn.Sequential(PackedEmbedding(packed, embedding), PackedLinear(packed, linear))
    ids = torch.tensor([[3, 39, 0]])
    expected = linear(embedding(ids)).float()
    torch.testing.assert_close(layers(ids).float(), expected, rtol=2e-2, atol=2e-2)
    compiled = torch.compile(layers, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(ids), layers(ids))
    assert layers[1].weight.dtype == torch.bfloat16
    saved = layers.state_dict()
    assert set(saved) == {"0.weight", "1.weight", "1.bias"}
    for name in ("0.weight", "1.weight"):
        assert torch.equal(saved[name], linear.weight)


@pytest.mark.parametrize(
    ("outputs", "inputs"), [(1, 1), (5, 2), (17, 7), (64, 64), (65, 131), (200, 1023), (1000, 96)]
)
def test_float32(isa: str, outputs: int, inputs: int) -> None:
    weight = torch.randn((outputs, inputs), generator=torch.Generator().manual_seed(2))
    bias = torch.linspace(-1, 1, outputs)
    packed = _packed(weight)
    padded = packed.padded(bias)
    rows = torch.arange(outputs).flip(0)
    assert torch.equal(packed.rows(rows), weight.flip(0))
    for count in (1, 3, 6, 7, 40, 97, 200):
        x = torch.randn((count, inputs), generator=torch.Generator().manual_seed(count))
        actual = packed.multiply(x, padded)
        exact = x.double() @ weight.double().T + bias.double()
        size = x.double().abs() @ weight.double().abs().T + bias.double().abs()
        assert ((actual.double() - exact).abs() <= (inputs + 2) * 2.0**-23 * size).all()
        one = packed.multiply(x[:1], padded)
        assert torch.equal(one, actual[:1]), "a row is the same among others"
