"""torch's varlen attention on a device: equal to plain attention in float64.

On a CPU a plain implementation stands in for it: see `tests/engine/attention/test_varlen.py`.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from engine.attention import registry, varlen_backend
from engine.attention.varlen_backend import VarlenAttentionBackend
from engine.errors import ConfigError
from tests.gpu import attention_cases
from tests.gpu.attention_cases import TOLERANCES, Case, Layer, make_layout, shape_for

pytestmark = pytest.mark.gpu

SETTINGS = settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
parts = st.lists(
    st.tuples(st.integers(0, 3000), st.one_of(st.just(1), st.integers(2, 400))),
    min_size=1,
    max_size=8,
)
layers = st.builds(
    lambda groups, kv_heads, dim, window: Layer(groups * kv_heads, kv_heads, dim, dim, window),
    groups=st.sampled_from([1, 2, 4, 7, 8]),
    kv_heads=st.sampled_from([1, 2, 8]),
    dim=st.sampled_from([8, 64, 96, 128, 256]),
    window=st.sampled_from([None, 1, 7, 100, 256, 1000]),
)


@pytest.fixture(autouse=True)
def _available(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if varlen_backend.missing() is not None:
        pytest.skip("this torch's varlen attention knows no block tables")
    try:
        registry.choose_backend(cuda, torch.bfloat16, "varlen")
    except ConfigError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(attention_cases, "TritonAttentionBackend", VarlenAttentionBackend)


def check(case: Case, output: torch.Tensor) -> None:
    count = int(case.layout.counts.sum())
    tolerance = TOLERANCES[case.dtype]
    torch.testing.assert_close(
        output[:count].double(), case.reference(), rtol=tolerance, atol=tolerance
    )
    assert not output[count:].any(), "padding is zero"


def make_case(parts: list[tuple[int, int]], layer: Layer, dtype: torch.dtype, size: int) -> Case:
    """Where nobody may look is NaN; what a window's first tile may reach into is finite."""
    layout = make_layout(parts, size, window=layer.window, seed=len(parts))
    case = Case(layout, layer, dtype, fill=float("nan"))
    for tensor in (case.keys, case.values):
        tensor[:size] = 1.0
        for row in range(len(layout.counts)):
            own = case.slots(row)
            tensor[own] = tensor[own].nan_to_num(3.0)
    return case


@SETTINGS
@given(
    parts=parts,
    layer=layers,
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    size=st.sampled_from([256, 512]),
)
def test_equals_plain_attention(
    parts: list[tuple[int, int]], layer: Layer, dtype: torch.dtype, size: int, cuda: torch.device
) -> None:
    case = make_case(parts, layer, dtype, size)
    check(case, case.run(cuda))


@SETTINGS
@given(
    parts=st.one_of(
        parts, st.lists(st.tuples(st.integers(0, 3000), st.just(1)), min_size=1, max_size=8)
    ),
    window=st.sampled_from([None, 1, 24, 300]),
    more=st.integers(0, 5),
    blocks=st.integers(0, 3),
)
def test_fixed_places_equal_plain_attention(
    parts: list[tuple[int, int]], window: int | None, more: int, blocks: int, cuda: torch.device
) -> None:
    """With the longest that a shape may have, and requests that have no tokens."""
    case = make_case(parts, Layer(8, 2, 64, 64, window), torch.bfloat16, 256)
    check(case, case.run(cuda, shape=shape_for(case.layout, more, blocks)))


@pytest.mark.parametrize("length", [1, 4000])
def test_many_rows_of_long_contexts(length: int, cuda: torch.device) -> None:
    """Where contexts are split, rows behind the first are wrong: they must not be."""
    case = make_case([(length + i, 1) for i in range(6)], Layer(8, 1, 64, 64), torch.bfloat16, 256)
    check(case, case.run(cuda))


def test_a_captured_call_is_replayed(cuda: torch.device) -> None:
    case = make_case([(700, 1), (20, 1), (5, 9)], Layer(4, 2, 64, 64), torch.bfloat16, 256)
    cache = case.cache(cuda)
    backend = VarlenAttentionBackend()
    metadata = backend.prepare(case.layout, None, cache.keys)
    step = [one.to(cuda, case.dtype) for one in (case.query, case.key, case.value)]
    params = attention_cases.AttentionParams(scaling=64**-0.5)
    with torch.inference_mode():
        backend.forward(*step, cache, metadata, params)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = backend.forward(*step, cache, metadata, params)
        output.zero_()
        graph.replay()
    check(case, output.cpu())
