"""Workloads and loads: lengths, prompts, arrivals."""

from __future__ import annotations

import itertools
import random

import pytest

from benchmarks.workloads import WORKLOADS, Lengths, Load, Workload, make_prompts, parse_load


def test_the_named_workloads_have_the_lengths_that_they_say() -> None:
    lengths = {name: workload.lengths() for name, workload in WORKLOADS.items()}
    assert lengths["W1"] == [Lengths(128, 64)] * 16
    assert len(lengths["W2"]) == 32
    assert all(16 <= one.prompt <= 256 and 16 <= one.output <= 128 for one in lengths["W2"])
    assert len(set(lengths["W2"])) > 20
    assert lengths["W3"] == [Lengths(128, 64)]
    assert lengths["W4"] == [Lengths(1088, 64, shared_prefix=1024)] * 16
    assert lengths["W5"] == [Lengths(4096, 64)] * 4


def test_lengths_are_the_same_in_every_run_and_go_on_for_more_requests() -> None:
    workload = WORKLOADS["W2"]
    assert workload.lengths() == workload.lengths()
    assert workload.lengths(64)[:32] == workload.lengths()


def test_prompts_share_their_prefix_and_nothing_else() -> None:
    lengths = [Lengths(12, 1, shared_prefix=8), Lengths(10, 1, shared_prefix=8)]
    one, other = make_prompts(lengths, vocab_size=100_000, seed=1)
    assert (len(one), len(other)) == (12, 10)
    assert one[:8] == other[:8]
    assert one[8:10] != other[8:]
    assert min(one + other) >= 10
    assert make_prompts(lengths, 100_000, seed=1) == [one, other]
    assert make_prompts(lengths, 100_000, seed=2)[0][:8] != one[:8]  # another turn, another prefix


@pytest.mark.parametrize(
    ("text", "load"),
    [
        ("all", Load()),
        ("closed:8", Load(concurrency=8)),
        ("poisson:2.5", Load(rate=2.5)),
    ],
)
def test_loads_are_read_as_they_are_written(text: str, load: Load) -> None:
    assert parse_load(text) == load
    assert load.name == text


@pytest.mark.parametrize(
    "text",
    ["", "closed", "closed:0", "closed:x", "poisson:0", "poisson:-1", "poisson:nan", "all:1"],
)
def test_what_is_no_load_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no load"):
        parse_load(text)


def test_a_closed_loop_has_two_requests_a_place() -> None:
    workload = Workload("X", "", 3, lambda draw: Lengths(1, 1))
    assert Load().count(workload) == 3
    assert Load(concurrency=1).count(workload) == 3
    assert Load(concurrency=8).count(workload) == 16


def test_poisson_arrivals_have_their_rate_and_spread() -> None:
    times = Load(rate=4.0).arrivals(20_000, seed=3)
    assert times == Load(rate=4.0).arrivals(20_000, seed=3)
    assert times[0] == 0.0
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.25, rel=0.03)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert variance == pytest.approx(mean**2, rel=0.1)  # as an exponential distribution has it
    assert Load(concurrency=4).arrivals(3, seed=0) == [0.0] * 3


def test_the_draw_does_not_depend_on_the_global_one() -> None:
    random.seed(1)
    one = WORKLOADS["W2"].lengths()
    random.seed(2)
    assert WORKLOADS["W2"].lengths() == one
