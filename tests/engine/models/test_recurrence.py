"""Recurrences of the rows of many requests: those of transformers, whoever the neighbours are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.kimi_linear import modeling_kimi_linear as kimi_linear
from transformers.models.lfm2 import modeling_lfm2 as lfm2
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from engine.models.recurrence import GRID, short_convolution
from tests.engine.models.recurrences import (
    FORMS,
    Form,
    Outcome,
    Rows,
    Where,
    check,
    convolution,
    delta_rule,
    random,
    run,
)

pytestmark = pytest.mark.usefixtures("isa")


@pytest.fixture(params=FORMS, ids=lambda form: form.name)
def form(request: pytest.FixtureRequest) -> Form:
    """A recurrence."""
    assert isinstance(request.param, Form)
    return request.param


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of threads for a test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def _one(count: int, start: int = 0) -> Where:
    return Where(torch.tensor([start]), torch.tensor([count]), torch.tensor([1]))


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())


@pytest.mark.parametrize("source", [qwen3_next, qwen3_5], ids=["qwen3_next", "qwen3_5"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [1, 7, 64, 130])
def test_the_delta_rule_is_that_of_transformers(
    source: Any, dtype: torch.dtype, length: int
) -> None:
    form = delta_rule(2, 4, 64, 80)
    made = form.make(length + 1, 0)
    rows = (*(x.to(dtype) for x in made[:3]), *made[3:])
    state = torch.full((3, 4, 64, 80), torch.nan)
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    expected, kept = source.torch_chunk_gated_delta_rule(
        *(x[None, :length] for x in rows), **options
    )
    found = form.compute(tuple(x[:length] for x in rows), state, _one(length))
    # Elements of bfloat16 may be rounded to the one beside.
    tolerance = 1e-5 if dtype is torch.float32 else 2**-8
    assert _error(found, expected[0]) <= tolerance
    assert _error(state[1], kept[0]) <= 1e-5
    expected, kept = source.torch_recurrent_gated_delta_rule(
        *(x[None, length:] for x in rows), initial_state=kept, **options
    )
    found = form.compute(tuple(x[length:] for x in rows), state, _one(1, length))
    assert _error(found, expected[0]) <= tolerance
    assert _error(state[1], kept[0]) <= 1e-5
    assert state[::2].isnan().all()


@pytest.mark.parametrize("length", [1, 7, 130])
def test_decays_by_channel_are_those_of_transformers(length: int) -> None:
    form = delta_rule(2, 2, 64, 48, by_channel=True)
    rows = form.make(length, 0)
    state = torch.full((3, 2, 64, 48), torch.nan)
    expected, kept = kimi_linear.recurrent_kimi_delta_attention(
        *(x[None] for x in rows), None, True, use_qk_l2norm_in_kernel=True
    )
    found = form.compute(rows, state, _one(length))
    assert _error(found, expected[0]) <= 1e-5
    assert _error(state[1], kept[0]) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", range(2, 9))
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_the_convolution_is_that_of_transformers(
    dtype: torch.dtype, width: int, has_bias: bool, activation: str | None
) -> None:
    source = qwen3_next if activation else lfm2
    x = random(0, 12, 70).to(dtype)
    weight, bias = random(1, 70, width).to(dtype), random(2, 70).to(dtype) if has_bias else None
    options = {"activation": activation} if activation else {}
    state = torch.full((3, 70, width - 1), torch.nan, dtype=dtype)
    expected = source.causal_conv1d_fn(x[None, :11].mT, weight, bias, **options)
    found = short_convolution(x[:11], weight, bias, bool(activation), state, *_one(11).places)
    tolerance = 1e-5 if dtype is torch.float32 else 2**-7
    assert _error(found, expected[0].mT) <= tolerance
    kept = x[None, 12 - width : 11].mT.contiguous()
    assert torch.equal(state[1], kept[0])
    expected = source.causal_conv1d_update(x[None, 11:].mT, kept, weight, bias, **options)
    found = short_convolution(x[11:], weight, bias, bool(activation), state, *_one(1, 11).places)
    assert _error(found, expected[0].mT) <= tolerance
    assert torch.equal(state[1], kept[0])
    assert state[::2].isnan().all()


def test_a_convolution_of_bfloat16_may_keep_float32() -> None:
    x, weight = random(0, 9, 40).bfloat16(), random(1, 40, 4).bfloat16()
    narrow, wide = torch.zeros(2, 40, 4, dtype=torch.bfloat16), torch.zeros(2, 40, 4)
    for begin, end in ((0, 2), (2, 8), (8, 9)):
        where = _one(end - begin, begin)
        first, second = (
            short_convolution(x[begin:end], weight, None, True, one, *where.places)
            for one in (narrow, wide)
        )
        assert torch.equal(first, second)
        assert torch.equal(narrow.float(), wide)


@st.composite
def _schedules(draw: st.DrawFn) -> tuple[list[int], list[list[tuple[int, int]]], list[int]]:
    """The lengths of some requests, steps that compute all of their rows, and slots."""
    lengths = draw(st.lists(st.integers(1, 150), min_size=1, max_size=5))
    slots = draw(st.permutations(range(len(lengths) + 2)))[: len(lengths)]
    left, steps = dict(enumerate(lengths)), []
    while left:
        step = []
        for one in draw(st.permutations(sorted(left))):
            count = draw(st.sampled_from((150, 1, 5, 63, 64, 65, 0)))
            step.append((one, min(count, left[one])))
        for one, count in step:
            left[one] -= count
        left = {one: count for one, count in left.items() if count}
        steps.append(step)
    return lengths, steps, list(slots)


@settings(max_examples=15, deadline=None)
@given(schedule=_schedules(), seed=st.integers(0, 1000), index=st.integers(0, len(FORMS) - 1))
def test_any_schedule_gives_what_the_reference_gives(
    schedule: tuple[list[int], list[list[tuple[int, int]]], list[int]], seed: int, index: int
) -> None:
    lengths, steps, slots = schedule
    form = FORMS[index]
    requests = [form.make(length, seed + 10 * r) for r, length in enumerate(lengths)]
    outcome = run(form, requests, steps, slots, len(lengths) + 2)
    check(form, requests, outcome)
    others = sorted(set(range(len(lengths) + 2)) - set(slots))
    assert outcome.state[others].isnan().all(), "a slot that is no request's was written"


@pytest.mark.parametrize("count", [1, 5, 100])
def test_a_request_has_its_bits_among_any_neighbours_and_threads(
    form: Form, count: int, threads: Callable[[int], None]
) -> None:
    lengths = (count, 1, 70, 1, 33)
    requests = [form.make(length + 1, 7 * length) for length in lengths]
    alone = run(form, requests[:1], [[(0, count)], [(0, 1)]], [2])
    poison = tuple(torch.full_like(x, torch.nan) for x in requests[2])
    for order in ((0, 1, 2, 3, 4), (4, 3, 2, 1, 0), (2, 0, 1)):
        for number in (1, 2, 3, 7):
            threads(number)
            steps = [[(r, lengths[r]) for r in order], [(r, 1) for r in order]]
            others = [*requests[:2], poison, *requests[3:]]
            among = run(form, others, steps, [5, 0, 3, 1, 6])
            assert torch.equal(among.results[0], alone.results[0])
            assert torch.equal(among.states[0], alone.states[0])


@settings(max_examples=10, deadline=None)
@given(
    length=st.integers(1, 4 * GRID),
    cuts=st.sets(st.sampled_from((GRID, 2 * GRID, 3 * GRID))),
    index=st.integers(0, len(FORMS) - 1),
)
def test_steps_that_are_cut_on_the_grid_have_the_bits_of_one(
    length: int, cuts: set[int], index: int
) -> None:
    form = FORMS[index]
    requests = [form.make(length, length)]
    whole = run(form, requests, [[(0, length)]], [1])
    ends = [*sorted(cut for cut in cuts if cut < length), length]
    steps = [[(0, end - begin)] for begin, end in zip([0, *ends], ends, strict=False)]
    parts = run(form, requests, steps, [1])
    assert torch.equal(whole.results[0], parts.results[0])
    assert torch.equal(whole.states[0], parts.states[0])


def test_padding_is_zeros_and_writes_no_state(form: Form) -> None:
    rows = form.make(6, 0)
    state = torch.zeros(3, *form.shape)
    where = Where(torch.tensor([0, 0]), torch.tensor([4, 0]), torch.tensor([1, 2]))
    made = form.compute(rows, state, where)
    assert made[:4].any()
    assert not made[4:].any()
    assert state[1].any()
    assert not state[::2].any()


def test_strong_decays_and_empty_keys_stay_finite() -> None:
    form = delta_rule(1, 2, 16, 16)
    query, key, value, decay, beta = form.make(70, 0)
    decay[::3] = -1e4
    decay[1::3] = 0.0
    key[5:9] = 0.0
    requests: list[Rows] = [(query, key, value, decay, beta)]
    outcome = run(form, requests, [[(0, 70)]], [0])
    check(form, requests, outcome)


def _decays_late(form: Form) -> Form:
    def compute(rows: Rows, state: torch.Tensor, where: Where) -> torch.Tensor:
        late = rows[3].roll(1, dims=0)
        return form.compute((*rows[:3], late, rows[4]), state, where)

    return replace(form, compute=compute)


def _forgets(form: Form) -> Form:
    def compute(rows: Rows, state: torch.Tensor, where: Where) -> torch.Tensor:
        before = state.clone()
        made = form.compute(rows, state, where)
        if where.starts.any():
            state.copy_(before)
        return made

    return replace(form, compute=compute)


def _takes_another_slot(form: Form) -> Form:
    def compute(rows: Rows, state: torch.Tensor, where: Where) -> torch.Tensor:
        return form.compute(rows, state, replace(where, slots=where.slots.roll(1)))

    return replace(form, compute=compute)


def _takes_what_is_left(form: Form) -> Form:
    def compute(rows: Rows, state: torch.Tensor, where: Where) -> torch.Tensor:
        state.nan_to_num_(0.5)
        return form.compute(rows, state, replace(where, starts=where.starts + GRID))

    return replace(form, compute=compute)


@pytest.mark.parametrize(
    ("fault", "form"),
    [
        (_decays_late, delta_rule(2, 4, 32, 72)),
        (_decays_late, delta_rule(2, 2, 24, 16, by_channel=True)),
        *(
            (fault, one)
            for fault in (_forgets, _takes_another_slot, _takes_what_is_left)
            for one in (convolution(70, 4, 4), delta_rule(2, 4, 32, 72))
        ),
    ],
)
def test_planted_faults_are_found(fault: Callable[[Form], Form], form: Form) -> None:
    requests = [form.make(length, length) for length in (20, 21)]
    steps = [[(0, 10), (1, 10)], [(0, 1), (1, 1)], [(0, 9), (1, 10)]]
    check(form, requests, run(form, requests, steps, [1, 2]))
    outcome: Outcome = run(fault(form), requests, steps, [1, 2])
    with pytest.raises(AssertionError, match="request"):
        check(form, requests, outcome)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": torch.tensor([1, 1])}, "share a slot"),
        ({"slots": torch.tensor([1, 3])}, "slots are 0 to 2"),
        ({"slots": torch.tensor([1, -1])}, "slots are 0 to 2"),
        ({"counts": torch.tensor([3, 2])}, "5 rows of requests, of 4 rows"),
        ({"counts": torch.tensor([-1, 2])}, "counts"),
        ({"starts": torch.tensor([0])}, "differ in length"),
        ({"starts": torch.tensor([0.0, 0.0])}, "int64"),
    ],
)
def test_what_does_not_fit_is_refused(
    form: Form, change: dict[str, torch.Tensor], message: str
) -> None:
    where = Where(torch.tensor([0, 0]), torch.tensor([2, 2]), torch.tensor([1, 2]))
    state = torch.zeros(3, *form.shape)
    rows = form.make(4, 0)
    form.compute(rows, state, where)
    with pytest.raises(ValueError, match=message):
        form.compute(rows, state, replace(where, **change))
    with pytest.raises(ValueError, match="a state of"):
        form.compute(rows, state[:, :-1], where)


@pytest.mark.parametrize(("width", "kept"), [(1, 4), (9, 8), (4, 2), (4, 9)])
def test_widths_that_the_kernel_lacks_are_refused(width: int, kept: int) -> None:
    form = convolution(8, width, kept)
    rows, state = form.make(3, 0), torch.zeros(2, *form.shape)
    with pytest.raises(ValueError, match="weights"):
        form.compute(rows, state, _one(3))
