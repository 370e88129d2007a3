"""The Triton kernels: equal to plain attention in float64, for every shape a model may have."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

triton = pytest.importorskip("triton")
import triton.language as tl

from engine.attention import step_arrays, triton_backend, triton_launch
from engine.attention.interface import BatchLayout
from engine.attention.triton_kernels import decode
from tests.gpu.attention_cases import TOLERANCES, Case, Layer, make_layout, shape_for
from tests.gpu.conftest import INTERPRETED

pytestmark = pytest.mark.gpu

EXAMPLES = 15 if INTERPRETED else 30  # on a device, each new layer is compiled
LONGEST, MOST = (300, 50) if INTERPRETED else (3000, 400)
DTYPES = list(TOLERANCES)
SETTINGS = settings(
    max_examples=EXAMPLES,
    deadline=None,
    # Not to the smallest failure: each try takes seconds, to interpret or to compile.
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

parts = st.lists(
    st.tuples(st.integers(0, LONGEST), st.one_of(st.just(1), st.integers(2, MOST))),
    min_size=1,
    max_size=3 if INTERPRETED else 8,
)
layers = st.builds(
    lambda groups, kv_heads, dims, **options: Layer(groups * kv_heads, kv_heads, *dims, **options),
    groups=st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8]),
    kv_heads=st.sampled_from([1, 2, 3]),
    dims=st.one_of(
        st.sampled_from([8, 64, 80, 96, 128, 256]).map(lambda dim: (dim, dim)),
        st.sampled_from([(192, 128), (24, 16), (40, 72)]),
    ),
    window=st.sampled_from([None, 1, 7, 100, 300]),
    softcap=st.sampled_from([None, 5.0]),
    has_sinks=st.booleans(),
)
sizes = st.sampled_from([1, 4, 16, 24, 32, 256])


def check(case: Case, output: torch.Tensor) -> None:
    count = int(case.layout.counts.sum())
    tolerance = TOLERANCES[case.dtype]
    torch.testing.assert_close(
        output[:count].double(), case.reference(), rtol=tolerance, atol=tolerance
    )
    assert not output[count:].any(), "padding is zero"


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([(5, 1), (300, 1), (0, 9)], id="mixed"),
        pytest.param([(40, 1), (3, 1)], id="decodes"),
        pytest.param([(0, 9)], id="prompts"),
    ],
)
@pytest.mark.parametrize("is_static", [False, True])
def test_no_padding_is_left_as_it_was(
    parts: list[tuple[int, int]], is_static: bool, device: torch.device
) -> None:
    """No other kernel writes it, and a product of the rows may not see what memory held: more
    rows of padding than programs, heads that do not fill a tile, and sizes that do not either.
    """
    more = 11
    layout = make_layout(parts, 16, padding=0 if is_static else more)
    case = Case(layout, Layer(6, 2, 24, 40), torch.float16)
    shape, cache = shape_for(layout, more) if is_static else None, case.cache(device)
    case.run(device, cache)
    output = case.run(device, cache, shape, is_written=True)
    check(case, output)
    assert len(output) == int(layout.counts.sum()) + more


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_over_a_cache_that_is_written_already(dtype: torch.dtype, device: torch.device) -> None:
    """The same, bit by bit; padding is zero."""
    layout = make_layout([(5, 1), (300, 1), (0, 9), (7, 20)], 16, padding=2)
    case = Case(layout, Layer(4, 2, 64, 64, window=100), dtype)
    cache = case.cache(device)
    expected = case.run(device, cache)
    kept = cache.keys.clone()
    output = case.run(device, cache, is_written=True)
    assert torch.equal(output, expected)
    assert torch.equal(cache.keys, kept)


@SETTINGS
@given(
    parts=parts,
    layer=layers,
    dtype=st.sampled_from(DTYPES),
    size=sizes,
    padding=st.sampled_from([0, 3]),
)
def test_equals_plain_attention(
    parts: list[tuple[int, int]],
    layer: Layer,
    dtype: torch.dtype,
    size: int,
    padding: int,
    device: torch.device,
) -> None:
    """Decode, prefill, chunks and mixtures. Everything that nobody may see is NaN."""
    layout = make_layout(parts, size, padding=padding, window=layer.window, seed=len(parts))
    case = Case(layout, layer, dtype, fill=float("nan"))
    cache = case.cache(device)
    check(case, case.run(device, cache))
    begin = 0
    for row, count in enumerate(layout.counts.tolist()):
        slots = case.slots(row)[-count:]
        own = slice(begin, begin + count)
        begin += count
        for tensor, written in ((cache.keys, case.key), (cache.values, case.value)):
            assert torch.equal(tensor.cpu()[slots].double(), written[:, own].transpose(0, 1))


@pytest.mark.parametrize(
    ("layer", "dtype"),
    [
        (Layer(32, 8, 128, 128), torch.bfloat16),
        (Layer(8, 4, 256, 256, window=512, softcap=50.0), torch.bfloat16),
        (Layer(16, 2, 64, 64, window=128, has_sinks=True), torch.float16),
        (Layer(4, 4, 96, 96), torch.float32),
    ],
)
@settings(SETTINGS, max_examples=1 if INTERPRETED else 50)
@given(parts=parts)
def test_many_steps_of_usual_layers(
    parts: list[tuple[int, int]], layer: Layer, dtype: torch.dtype, device: torch.device
) -> None:
    layout = make_layout(parts, 32, window=layer.window, seed=len(parts))
    case = Case(layout, layer, dtype, fill=float("nan"))
    check(case, case.run(device))


@pytest.mark.parametrize(
    ("layer", "dtype", "size"),
    [
        pytest.param(Layer(16, 2, 512, 512), torch.bfloat16, 64, id="all"),
        pytest.param(
            Layer(6, 2, 320, 264, window=70, softcap=5.0, has_sinks=True),
            torch.float16,
            24,
            id="what fills no part",
        ),
        pytest.param(Layer(2, 1, 512, 80), torch.float16, 256, id="few values"),
    ],
)
def test_keys_that_are_read_in_parts(
    layer: Layer, dtype: torch.dtype, size: int, device: torch.device
) -> None:
    """Prompts of no tiles of keys that all see, and of several; behind a context, too."""
    layout = make_layout(
        [(0, 5), (0, 150), (64, 64), (190, 30), (40, 1)], size, window=layer.window
    )
    case = Case(layout, layer, dtype, fill=float("nan"))
    check(case, case.run(device))


@pytest.mark.parametrize("groups", [16, 70])
def test_many_heads_to_a_key_head(groups: int, device: torch.device) -> None:
    layout = make_layout([(90, 1), (20, 9)], 16)
    case = Case(layout, Layer(groups * 2, 2, 16, 16), torch.float32)
    check(case, case.run(device))


@pytest.mark.parametrize("limit", [None, 3])
@pytest.mark.parametrize("window", [None, 700])
def test_long_contexts_are_cut(
    limit: int | None, window: int | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More cuts than are merged at once; and fewer cuts than the shortest would make."""
    if limit is not None:
        monkeypatch.setattr(triton_backend, "most_cuts", lambda heads, window: limit)
    layer = Layer(4, 2, 16, 16, window=window, has_sinks=True)
    layout = make_layout([(0, 1), (255, 1), (256, 1), (4400, 1)], 256, window=window)
    case = Case(layout, layer, torch.float32, fill=float("nan"))
    check(case, case.run(device))
    monkeypatch.setattr(triton_launch, "decode_places", lambda *_, **__: 2)
    few = case.run(device)
    monkeypatch.setattr(triton_launch, "decode_places", lambda *_, **__: 10)
    assert torch.equal(case.run(device), few), "who computes a cut does not matter"


@triton.jit
def _shares(extent, entries, found, MAX_CUTS: tl.constexpr):
    place = found + tl.program_id(0) * 4
    begin, end, row, before = decode._share(extent, entries, MAX_CUTS)
    tl.store(place, begin)
    tl.store(place + 1, end)
    tl.store(place + 2, row)
    tl.store(place + 3, before)


@pytest.mark.parametrize("places", [1, 7, 40, 396])
@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("short", [130, 50, None])
def test_cuts_are_shared_out_evenly(
    places: int, window: int, short: int | None, device: torch.device
) -> None:
    """However long the contexts are, and however many: each program finds its share of them."""
    most = step_arrays.most_cuts(8, window)
    parts = [(32_000, 1)] if short is None else [(5, 1)] * short + [(32_000, 1)] + [(700, 1)] * 70
    cuts = [{5: 1, 32_000: 3 if window else 32, 700: 2 if window else 3}[one] for one, _ in parts]
    if short is not None:
        parts += [(90, 40), (0, 7)]
    layout = make_layout(parts, 256)
    order = np.argsort([start for start, count in parts if count == 1], kind="stable")
    of_row = [row for row, place in enumerate(order) for _ in range(cuts[place])]
    sizes = step_arrays.array_sizes(
        len(layout.positions), len(parts), layout.tables.size + len(cuts) * most
    )
    arrays = {name: np.full(size, -1, dtype=np.int64) for name, size in sizes.items()}
    step_arrays.fill_arrays(layout, window, most, arrays)
    extent, entries = (torch.tensor(arrays[name], device=device) for name in ("extent", "entries"))
    found = torch.full((places, 4), -1, dtype=torch.int32, device=device)
    _shares[(places,)](extent, entries, found, MAX_CUTS=most)
    reached = 0
    for begin, end, row, before in found.tolist():
        assert begin == reached
        assert end - begin in (len(of_row) // places, len(of_row) // places + 1)
        reached = end
        if begin < end:
            assert row == of_row[begin]
            assert before == of_row.index(row)
    assert reached == len(of_row)


@triton.jit
def _counted(positions, found, SIZE: tl.constexpr, WINDOW: tl.constexpr, MAX_CUTS: tl.constexpr):
    places = tl.arange(0, SIZE)
    _, _, cuts = decode._cuts(tl.load(positions + places), WINDOW, MAX_CUTS)
    tl.store(found + places, cuts)


@settings(SETTINGS, max_examples=EXAMPLES)
@given(
    positions=st.lists(
        st.one_of(
            st.integers(0, 1 << 20),
            st.integers(0, 300).map(lambda cuts: cuts * 256),
            st.integers(1, 300).map(lambda cuts: cuts * 256 - 1),
        ),
        min_size=16,
        max_size=16,
    ),
    window=st.sampled_from([0, 1, 255, 256, 257, 4096]),
    kv_heads=st.sampled_from([1, 4, 8, 30, 128]),
)
def test_the_host_counts_the_cuts_that_the_device_makes(
    positions: list[int], window: int, kv_heads: int, device: torch.device
) -> None:
    most = step_arrays.most_cuts(kv_heads, window)
    found = torch.zeros(16, dtype=torch.int32, device=device)
    on_device = torch.tensor(positions, dtype=torch.int32, device=device)
    _counted[(1,)](on_device, found, SIZE=16, WINDOW=window, MAX_CUTS=most)
    counted = step_arrays.count_cuts(np.array(positions), window, most)
    assert found.tolist() == counted.tolist()
    assert 1 <= counted.min() <= counted.max() <= most


@settings(SETTINGS, max_examples=EXAMPLES // 3)
@given(
    parts=st.one_of(
        parts, st.lists(st.tuples(st.integers(0, 600), st.just(1)), min_size=1, max_size=4)
    ),
    window=st.sampled_from([None, 1, 24]),
    size=sizes,
    more=st.integers(0, 5),
    blocks=st.integers(0, 40),
)
def test_fixed_places_equal_the_step_as_it_comes(
    parts: list[tuple[int, int]],
    window: int | None,
    size: int,
    more: int,
    blocks: int,
    device: torch.device,
) -> None:
    """To the last bit, in the cache too; padding is zero."""
    layout = make_layout(parts, size, window=window)
    case = Case(layout, Layer(4, 2, 16, 8, window=window), torch.float32, fill=float("nan"))
    expected_cache, cache = case.cache(device), case.cache(device)
    expected = case.run(device, expected_cache)
    output = case.run(device, cache, shape_for(layout, more, blocks))
    check(case, output)
    assert torch.equal(output[: len(expected)], expected)
    for one, other in (
        (cache.keys, expected_cache.keys),
        (cache.values, expected_cache.values),
    ):
        assert torch.equal(one[size:].nan_to_num(), other[size:].nan_to_num())


@pytest.mark.parametrize(
    ("layer", "count"),
    [(Layer(6, 2, 32, 32), 1), (Layer(6, 2, 32, 32), 70), (Layer(2, 1, 512, 512), 70)],
)
def test_a_request_is_the_same_among_any_neighbours(
    layer: Layer, count: int, device: torch.device
) -> None:
    """To the last bit, though the step's other contexts are longer and there are more of them."""
    alone = Case(make_layout([(700, count)], 16), layer, torch.float16)
    expected = alone.run(device)
    own = alone.layout
    others = [(900, 1), (650, 1), (3, 1), (0, 40), (10, 90)]
    rows = sorted([*others, (700, count)], key=lambda part: part[1] > 1)
    width = -(-max(start + tokens for start, tokens in rows) // 16)
    place = rows.index((700, count))
    tables = 1 + own.tables.max() + np.arange(len(rows) * width, dtype=np.int32).reshape(-1, width)
    tables[place, : own.tables.shape[1]] = own.tables[0]
    counts = np.array([tokens for _, tokens in rows], dtype=np.int64)
    layout = BatchLayout(
        starts=np.array([start for start, _ in rows], dtype=np.int64),
        counts=counts,
        num_decodes=int((counts == 1).sum()),
        positions=np.concatenate([np.arange(s, s + c) for s, c in rows]),
        tables=tables,
        block_size=16,
    )
    among = Case(layout, layer, torch.float16)
    begin = int(counts[:place].sum())
    for name in ("query", "key", "value"):
        getattr(among, name)[:, begin : begin + count] = getattr(alone, name)
    for name in ("keys", "values"):
        getattr(among, name)[: len(alone.keys)] = getattr(alone, name)
    assert torch.equal(among.run(device)[begin : begin + count], expected)


@pytest.mark.parametrize(
    "layer",
    [Layer(4, 2, 32, 32), Layer(4, 2, 32, 32, window=50), Layer(2, 1, 512, 512, window=50)],
)
def test_where_a_prompt_is_cut_in_chunks_does_not_matter(
    layer: Layer, device: torch.device
) -> None:
    """To the last bit, as far as the kernels say it; a compiler may fuse what it masks and what it
    does not mask differently. Chunks of one token are decoded, and left out here.
    """
    whole = Case(make_layout([(0, 150)], 16), layer, torch.float16)
    expected = whole.run(device)
    cache = whole.cache(device)
    for begin, end in ((0, 7), (7, 90), (90, 150)):
        chunk = Case(make_layout([(begin, end - begin)], 16), layer, torch.float16)
        chunk.layout.tables[:] = whole.layout.tables[:, : chunk.layout.tables.shape[1]]
        for name in ("query", "key", "value"):
            setattr(chunk, name, getattr(whole, name)[:, begin:end])
        tolerance = 0 if INTERPRETED else 1e-3
        output = chunk.run(device, cache)
        torch.testing.assert_close(output, expected[begin:end], rtol=tolerance, atol=tolerance)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_request_that_is_not_a_number_stays_alone(device: torch.device) -> None:
    for counts in ((1, 1, 1), (1, 5, 40)):
        layout = make_layout([(300 + i, count) for i, count in enumerate(counts)], 16)
        case = Case(layout, Layer(4, 2, 16, 16), torch.float32)
        expected = case.run(device)
        case.keys[case.slots(0)[:5]] = float("nan")
        output = case.run(device)
        assert torch.isnan(output[0]).all(), "it shows in its own output"
        assert torch.equal(output[1:], expected[1:])


def test_strides_are_taken_as_they_are(device: torch.device) -> None:
    """Parts of one packed projection, and heads that lie in no order that a model uses today."""
    case = Case(make_layout([(20, 1), (5, 9)], 16), Layer(4, 2, 16, 16), torch.float32)
    expected = case.run(device)
    packed = torch.cat([case.query, case.key, case.value]).transpose(0, 1).contiguous()
    query, key, value = packed.transpose(0, 1).split([4, 2, 2])
    case.query, case.key, case.value = query, key, value
    assert torch.equal(case.run(device), expected)
    case.query = query.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(case.run(device), expected)


def test_the_operation_is_what_torch_is_told(device: torch.device) -> None:
    """Its schema, what it writes, and its stand-in for tracing."""
    case = Case(make_layout([(20, 1), (5, 9)], 16), Layer(4, 2, 16, 16), torch.float32)
    cache = case.cache(device)
    backend = triton_launch.triton_attention
    seen: list[tuple[object, ...]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "engine.attention.triton_backend.triton_attention",
            lambda *args: seen.append(args) or backend(*args),
        )
        case.run(device, cache)
    arguments = tuple(
        argument.clone() if isinstance(argument, torch.Tensor) else argument for argument in seen[0]
    )
    torch.library.opcheck(backend, arguments)
