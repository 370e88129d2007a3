"""Figures of turns, by hand-computable times."""

from __future__ import annotations

import pytest

from benchmarks.measures import medians, quantile, turn_figures


@pytest.mark.parametrize(
    ("percent", "value"), [(0, 1.0), (50, 2.5), (90, 3.7), (99, 3.97), (100, 4.0)]
)
def test_quantiles_lie_between_neighbours(percent: float, value: float) -> None:
    assert quantile([4.0, 1.0, 3.0, 2.0], percent) == pytest.approx(value)


def test_a_quantile_of_one_value_is_the_value_and_of_none_an_error() -> None:
    assert quantile([7.0], 99) == 7.0
    with pytest.raises(ValueError, match="no values"):
        quantile([], 50)


def test_the_figures_of_a_turn() -> None:
    figures = turn_figures(
        [10, 20],
        [
            {"arrived": 0.0, "times": [1.0, 1.5, 2.0]},  # TTFT 1, gaps 0.5 0.5
            {"arrived": 1.0, "times": [2.5, 4.5]},  # TTFT 1.5, gap 2
        ],
    )
    assert figures["wall_s"] == 4.5
    assert figures["output_rate"] == pytest.approx(5 / 4.5)
    assert figures["total_rate"] == pytest.approx(35 / 4.5)
    assert figures["ttft_p50_s"] == pytest.approx(1.25)
    assert figures["ttft_p99_s"] == pytest.approx(1.495)
    assert figures["tpot_s"] == pytest.approx((0.5 + 2.0) / 2)
    assert figures["itl_p50_s"] == pytest.approx(0.5)
    assert figures["itl_p90_s"] == pytest.approx(0.5 + 0.8 * 1.5)


def test_requests_of_one_token_have_no_time_between_tokens() -> None:
    figures = turn_figures([4], [{"arrived": 0.0, "times": [0.5]}])
    assert figures["ttft_p50_s"] == 0.5
    assert not [name for name in figures if name.startswith(("tpot", "itl"))]


def test_medians_are_taken_figure_by_figure() -> None:
    turns = [{"a": 1.0, "b": 9.0}, {"a": 5.0, "b": 1.0}, {"a": 2.0, "b": 2.0}]
    assert medians(turns) == {"a": 2.0, "b": 2.0}
