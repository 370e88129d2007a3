"""Every Triton kernel, compiled for an H100: it fits, spills nothing, and reads and multiplies in
wide pieces. `make kernels` compiles for all sizes; here are some, and a few in every run.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch

from tests.engine.cuda.kernel_cases import (
    AHEAD,
    LAYERS,
    MIXTURES,
    RESTS,
    TYPES,
    Case,
    attention,
    between,
    draws,
    experts,
    faults,
    selection,
)
from tests.engine.cuda.kernels import compile_all
from tests.engine.cuda.watch import ADA, AMPERE, CUDA, HOPPER

triton = pytest.importorskip("triton", reason="Triton is not installed here")

import triton.language as tl

from engine.attention.triton_kernels.overlap import wait_for_last

HALF = torch.bfloat16
QWEN = LAYERS[0]
FEW = [
    *(attention(QWEN, 64, HALF, kind) for kind in ("decode", "prefill")),
    attention(LAYERS[1], 32, HALF, "decode"),
    attention(LAYERS[3], 32, torch.float16, "prefill"),
    attention(LAYERS[-1], 16, HALF, "prefill"),
    *(between(RESTS[0], dtype) for dtype in (HALF, torch.float16)),
    between(RESTS[0], HALF, AMPERE),
    experts(MIXTURES[0], torch.float16),
    experts(MIXTURES[1], HALF, AMPERE),
    selection(counts=False),
    *(draws(dtype) for dtype in TYPES),
]
MORE = [
    *(
        attention(layer, block_size, HALF, kind)
        for layer in LAYERS
        for block_size in (16, 32, 256)
        for kind in ("decode", "prefill")
    ),
    *(attention(layer, 64, torch.float32, "prefill") for layer in LAYERS),
    *(between(rest, dtype) for rest in RESTS for dtype in TYPES),
    *(
        experts(mixture, dtype, properties)
        for mixture in MIXTURES
        for dtype in TYPES
        for properties in (HOPPER, AMPERE, ADA)
    ),
]


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=case.name) for case in FEW),
        *(
            pytest.param(case, id=case.name, marks=pytest.mark.slow)
            for case in MORE
            if case.name not in {one.name for one in FEW}
        ),
    ],
)
def test_a_kernel_is_as_it_should_be(case: Case) -> None:
    found = compile_all(case.run, case.properties)
    assert found
    wrong = {one.kernel: faults(case, one) for one in found}
    assert not any(wrong.values()), wrong


@pytest.mark.parametrize("dtype", TYPES)
def test_a_product_of_one_token_is_ours_in_16_bits(dtype: torch.dtype) -> None:
    found = {one.kernel for one in compile_all(between(RESTS[0], dtype).run)}
    assert ("product_kernel" in found) == (dtype is not torch.float32)


def test_a_kernel_that_starts_early_must_wait() -> None:
    [found] = [one for one in compile_all(FEW[0].run) if one.kernel == "decode_kernel"]
    assert faults(FEW[0], found) == []
    for wrong in (
        dataclasses.replace(found, ahead=None),
        dataclasses.replace(found, starts_early=False),
    ):
        assert any("launched early" in one for one in faults(FEW[0], wrong))


@triton.jit
def early_kernel(x, weight, output, SIZE: tl.constexpr, BEFORE: tl.constexpr):
    place = tl.arange(0, SIZE)
    made = tl.load(weight + place)
    if BEFORE:
        made += tl.load(x + place)
    wait_for_last(True)
    if not BEFORE:
        made += tl.load(x + place)
    tl.store(output + place, made)


@pytest.mark.parametrize("before", [False, True])
def test_an_early_read_is_seen(before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> None:
        x, weight, output = torch.zeros((3, 64), device=CUDA).unbind()
        early_kernel[(1,)](
            x, weight, output, SIZE=64, BEFORE=before, launch_pdl=True, enable_fp_fusion=False
        )

    monkeypatch.setitem(AHEAD, "early_kernel", frozenset({"weight"}))
    case = Case("an early read", run, torch.float32)
    [found] = compile_all(run)
    assert faults(case, found) == (["it uses x before it has waited"] if before else [])
    monkeypatch.setitem(AHEAD, "early_kernel", frozenset({"weight", "x"}))
    assert faults(case, found) == []
    monkeypatch.delitem(AHEAD, "early_kernel")
    assert faults(case, found) == ["it waits, where nothing starts early"]


@pytest.mark.parametrize(
    ("tiles", "fault"),
    [
        ({"rows": 64, "keys": 16, "depth": 2}, "its products are (8, 64) wide"),
        ({"rows": 16, "keys": 64, "depth": 2}, "its products are () wide"),
        ({"rows": 128, "keys": 128, "depth": 4}, "bytes of shared memory, and there are 232448"),
        pytest.param(
            {"rows": 256, "keys": 128, "depth": 1, "warps": 4},
            "registers are spilled",
            marks=pytest.mark.slow,  # a minute
        ),
    ],
)
def test_a_wrong_tile_is_seen(
    tiles: dict[str, int], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.attention import triton_launch

    wrong = triton_launch.Tiles(**{"warps": 8, **tiles})
    monkeypatch.setattr(triton_launch, "choose_tiles", lambda **size: wrong)
    case = attention(QWEN, 64, HALF, "prefill")
    [found] = [one for one in compile_all(case.run) if one.kernel == "prefill_kernel"]
    assert any(fault in one for one in faults(case, found)), faults(case, found)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"columns": 32}, "its products are (32,) wide"),
        ({"rows": 32}, "its products are () wide"),
        ({"inputs": 128, "stages": 8}, "bytes of shared memory, and there are 232448"),
    ],
)
def test_a_wrong_tile_of_experts_is_seen(
    changes: dict[str, int], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.models import triton_experts

    wrong = dataclasses.replace(triton_experts.choose_tiles(2, 64, 128), **changes)
    monkeypatch.setattr(triton_experts, "choose_tiles", lambda *size: wrong)
    case = experts(MIXTURES[0], torch.float16)
    found = [one for one in compile_all(case.run) if one.kernel == "experts_product_kernel"]
    assert found
    assert all(any(fault in one for one in faults(case, kernel)) for kernel in found)


def test_narrow_copies_and_spills_are_seen() -> None:
    case = attention(QWEN, 64, HALF, "decode")
    [found] = [one for one in compile_all(case.run) if one.kernel == "decode_kernel"]
    assert not faults(case, found)
    narrow = dataclasses.replace(found, copies=(4, 8))
    assert faults(case, narrow) == ["its copies have (4, 8) bytes"]
    in_parts = attention(LAYERS[-1], 64, HALF, "prefill")
    [prefill] = [one for one in compile_all(in_parts.run) if one.kernel == "prefill_kernel"]
    assert not faults(in_parts, prefill)
    narrow = dataclasses.replace(prefill, loads=(2, 8, 16))
    assert faults(in_parts, narrow) == ["its loads have (2, 8, 16) bytes"]
    spilled = dataclasses.replace(found, spilled=8)
    assert faults(case, spilled) == ["8 bytes of a thread's registers are spilled"]


@triton.jit
def careless_kernel(x, arrived, SIZE: tl.constexpr, WAITS: tl.constexpr, ORDERED: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(x + tl.program_id(0) * SIZE + place, place)
    if WAITS:
        tl.debug_barrier()
    count = tl.atomic_add(arrived, 1, sem="acq_rel" if ORDERED else "relaxed")
    if count == tl.num_programs(0) - 1:
        tl.store(arrived, tl.sum(tl.load(x + place), 0))


@pytest.mark.parametrize(("waits", "ordered"), [(True, True), (False, True), (True, False)])
def test_a_last_program_that_may_not_see_everything_is_seen(
    waits: bool, ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> None:
        x, arrived = torch.zeros((2, 256), dtype=torch.int32, device=CUDA).unbind()
        careless_kernel[(4,)](
            x, arrived, SIZE=256, WAITS=waits, ORDERED=ordered, enable_fp_fusion=False
        )

    monkeypatch.setattr("tests.engine.cuda.kernel_cases.LAST", {"careless_kernel"})
    [found] = compile_all(run)
    wrong = ["its last program may not see what the others have stored"]
    assert faults(Case("a last program", run, torch.float32), found) == (
        [] if waits and ordered else wrong
    )


def test_steps_of_all_sizes_share_the_kernels_of_a_mixture() -> None:
    """One product for few pairs and one for many, of each of the two shapes, and one of everything
    else. A kernel that depended on more would be compiled while requests wait.
    """
    steps = experts(MIXTURES[1], HALF, counts=(1, 2, 16, 17, 767, 768, 769, 4096))
    found = {(one.kernel, one.variant) for one in compile_all(steps.run)}
    assert Counter(kernel for kernel, _ in found) == {
        "route_kernel": 1,
        "sort_kernel": 1,
        "experts_product_kernel": 4,
        "clamped_gate_kernel": 1,
        "weighted_sum_kernel": 1,
    }
