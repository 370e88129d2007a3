"""Tokens that the kernel draws: by the law, the same in any company, those of the tensor steps."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.native import library
from engine.native.build import LIBRARY, variants
from engine.native.library import NativeUnavailableError, load_library
from engine.sampling import drawing, ops
from engine.sampling.drawing import DrawInLibrary, choose_draw
from engine.sampling.filters import Filters, filtered_weights
from engine.sampling.greedy import valid
from engine.sampling.sampler import Sampler
from engine.scheduler.runner_protocol import INVALID_TOKEN
from tests.engine.sampling.helpers import CPU, make

ISAS = tuple(variants(platform.machine()))
WIDTHS = (1, 2, 15, 16, 17, 2047, 2048, 2049, 6144, 40_000, 151_936)


@pytest.fixture(scope="module")
def kernel() -> DrawInLibrary:
    try:
        return DrawInLibrary(load_library())
    except NativeUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(params=ISAS)
def variant(request: pytest.FixtureRequest) -> Iterator[DrawInLibrary]:
    """The kernel of each instruction set that this machine has."""
    try:
        best = load_library().isa
    except NativeUnavailableError as error:
        pytest.skip(str(error))
    handle = ctypes.CDLL(str(LIBRARY))
    handle.headrace_use.restype = ctypes.c_bool
    if not handle.headrace_use(request.param.encode()):
        pytest.skip(f"this machine has no {request.param}")
    yield DrawInLibrary(load_library())
    assert handle.headrace_use(best.encode())


def _draw(
    kernel: DrawInLibrary, logits: torch.Tensor, temperatures: torch.Tensor, uniforms: torch.Tensor
) -> torch.Tensor:
    rows = torch.arange(len(logits))
    return kernel(logits, rows, uniforms.double().numpy(), temperatures.float().numpy())


def _in_tensors(
    logits: torch.Tensor, temperatures: torch.Tensor, uniforms: torch.Tensor
) -> torch.Tensor:
    logits = logits.float()
    best = logits.amax(dim=-1, keepdim=True)
    scaled = (logits - best) / temperatures.float().unsqueeze(-1)
    weights = filtered_weights(scaled, Filters())
    return valid(ops.draw(weights, uniforms.double().unsqueeze(-1)), best.squeeze(-1))


def _rows(
    count: int, width: int, seed: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, width, generator=generator) * 4
    temperatures = torch.rand(count, generator=generator) * 2 + 0.05
    uniforms = torch.rand(count, generator=generator, dtype=torch.float64)
    return logits.to(dtype), temperatures, uniforms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", WIDTHS)
def test_by_the_law(variant: DrawInLibrary, width: int, dtype: torch.dtype) -> None:
    """The token's part of the cumulative distribution has the uniform number in it."""
    logits, temperatures, uniforms = _rows(40, width, width, dtype)
    tokens = _draw(variant, logits, temperatures, uniforms)
    scaled = logits.double() / temperatures.double().unsqueeze(-1)
    ends = torch.softmax(scaled, dim=-1).cumsum(dim=-1)
    end = ends.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    begin = torch.where(
        tokens > 0, ends.gather(-1, (tokens - 1).clamp(min=0).unsqueeze(-1)).squeeze(-1), 0.0
    )
    assert bool(((begin - 1e-6 <= uniforms) & (uniforms <= end + 1e-6)).all())


def test_those_of_the_tensor_steps(variant: DrawInLibrary) -> None:
    for seed, (count, width) in enumerate([(3000, 50), (1000, 3000), (30, 151_936)]):
        for dtype in (torch.float32, torch.bfloat16):
            rows = _rows(count, width, seed, dtype)
            differing = int((_draw(variant, *rows) != _in_tensors(*rows)).sum())
            assert differing <= 1, "their last bits let one draw in ten thousand or more differ"


@given(
    count=st.integers(1, 70),
    width=st.sampled_from(WIDTHS[:-1]),
    threads=st.integers(1, 5),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=40, deadline=None)
def test_a_row_in_any_company(
    kernel: DrawInLibrary, count: int, width: int, threads: int, seed: int
) -> None:
    logits, temperatures, uniforms = _rows(count, width, seed, torch.bfloat16)
    together = _draw(kernel, logits, temperatures, uniforms)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        order = torch.randperm(count)
        chosen = kernel(
            logits,
            order,
            uniforms[order].numpy(),
            temperatures[order].float().numpy(),
        )
        assert torch.equal(chosen, together[order])
        row = seed % count
        one = slice(row, row + 1)
        assert torch.equal(
            _draw(kernel, logits[one], temperatures[one], uniforms[one]), chosen[order == row]
        )
    finally:
        torch.set_num_threads(before)


def test_all_instruction_sets_draw_the_same(kernel: DrawInLibrary) -> None:
    """Every variant's weights have the same bits: so many draws fall into the same tokens."""
    handle = ctypes.CDLL(str(LIBRARY))
    handle.headrace_use.restype = ctypes.c_bool
    best = load_library().isa
    rows = _rows(2000, 4100, 3, torch.float32)
    expected = _draw(kernel, *rows)
    for name in ISAS:
        if handle.headrace_use(name.encode()):
            assert torch.equal(_draw(kernel, *rows), expected)
    assert handle.headrace_use(best.encode())


def test_rows_may_lie_apart(kernel: DrawInLibrary) -> None:
    logits, temperatures, uniforms = _rows(9, 3000, 1, torch.bfloat16)
    for part in (logits[::3], logits[:, 5:2900], logits[2:5], logits[:, ::2], logits[:0]):
        count = len(part)
        found = _draw(kernel, part, temperatures[:count], uniforms[:count])
        assert torch.equal(found, _in_tensors(part, temperatures[:count], uniforms[:count]))
    halves = logits.half()
    assert torch.equal(
        _draw(kernel, halves, temperatures, uniforms),
        _in_tensors(halves, temperatures, uniforms),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite(kernel: DrawInLibrary, dtype: torch.dtype) -> None:
    infinity, nan = float("inf"), float("nan")
    logits = torch.randn(8, 5000).to(dtype)
    logits[1, 4999] = nan
    logits[2, 0] = infinity
    logits[3] = -infinity
    logits[4] = -infinity
    logits[4, 4321] = -3e38
    logits[5, 17] = -nan
    logits[6, :4998] = -infinity
    uniforms = np.linspace(0, 1 - 2**-53, 8)
    tokens = kernel(logits, torch.arange(8), uniforms, np.ones(8, np.float32)).tolist()
    invalid = [row for row, token in enumerate(tokens) if token == INVALID_TOKEN]
    assert invalid == [1, 2, 3, 5]
    assert tokens[4] == 4321
    assert tokens[6] >= 4998
    assert 0 <= tokens[0] < 5000
    assert 0 <= tokens[7] < 5000


def test_forbidden_tokens_are_never_drawn(kernel: DrawInLibrary) -> None:
    """Neither by the smallest nor by the largest number, where nothing but one token is left."""
    logits = torch.full((3, 4097), float("-inf"))
    logits[:, 2048] = -7.0
    uniforms = np.array([0.0, 0.5, 1 - 2**-53])
    for temperature in (1e-38, 1.0, 1e38):
        temperatures = np.full(3, temperature, dtype=np.float32)
        assert kernel(logits, torch.arange(3), uniforms, temperatures).tolist() == [2048] * 3


def test_a_tiny_temperature_is_greedy(kernel: DrawInLibrary) -> None:
    logits, _, uniforms = _rows(20, 6144, 5, torch.float32)
    temperatures = np.full(20, np.finfo(np.float32).tiny)
    found = kernel(logits, torch.arange(20), uniforms.numpy(), temperatures)
    assert torch.equal(found, logits.argmax(dim=-1))


def test_the_sampler_draws_by_it_with_and_without_edits(
    kernel: DrawInLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests without filters, and these alone, whatever else changes their logits."""
    drawn: list[int] = []

    class Counting(DrawInLibrary):
        def __call__(self, logits: torch.Tensor, rows: torch.Tensor, *more: object) -> torch.Tensor:
            drawn.append(len(rows))
            return super().__call__(logits, rows, *more)  # type: ignore[arg-type]

    monkeypatch.setattr("engine.sampling.drawing.DrawInLibrary", Counting)
    sampler = Sampler(300, CPU)
    requests = [
        make(temperature=1.0, seed=1),
        make(temperature=0.0),
        make(temperature=0.7, seed=2, banned_token_ids=(5,)),
        make(temperature=0.7, seed=3, top_k=4),
        make(temperature=1.3, seed=4),
        make(temperature=1.3, seed=5, presence_penalty=1.0),
    ]
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(1)).bfloat16()
    with_kernel, _ = sampler.sample(logits, requests)
    assert sorted(drawn) == [1, 1, 2]
    monkeypatch.setattr(drawing, "load_library", _unavailable)
    assert choose_draw(CPU) is None
    assert Sampler(300, CPU).sample(logits, requests)[0] == with_kernel


def test_choosing() -> None:
    assert choose_draw(torch.device("meta")) is None


def _unavailable() -> library.NativeLibrary:
    raise NativeUnavailableError("they were not built")
