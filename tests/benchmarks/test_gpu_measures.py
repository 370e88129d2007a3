"""Steady decode within a turn, and how long a device was busy."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch.autograd import DeviceType

from benchmarks.adapters.profiling import summary
from benchmarks.measures import covered, decode_figures, medians


def reply(*times: float) -> dict[str, object]:
    return {"arrived": 0.0, "times": list(times), "tokens": [0] * len(times)}


def test_steady_decode_is_between_the_last_beginning_and_the_first_end() -> None:
    early = reply(1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
    late = reply(3.0, 4.0, 5.0, 6.0, 7.0, 8.0)
    found = decode_figures([10, 20], [early, late])
    assert found is not None
    assert found["decode_rate"] == pytest.approx(2.0)  # tokens at 4, 5 and 6 of both
    assert found["step_s"] == pytest.approx(1.0)
    # A new token's own position counts: the early one's have 13, 14, 15, the late one's 21, 22, 23.
    assert found["context"] == pytest.approx((13 + 14 + 15 + 21 + 22 + 23) / 6)


def test_a_request_alone_decodes_from_its_first_token_on() -> None:
    found = decode_figures([100], [reply(0.5, 0.6, 0.7, 0.8)])
    assert found is not None
    assert found["decode_rate"] == pytest.approx(10.0)
    assert found["context"] == pytest.approx((101 + 102 + 103) / 3)


def test_there_may_be_no_steady_decode() -> None:
    assert decode_figures([10, 10], [reply(1.0, 2.0), reply(3.0, 4.0)]) is None
    assert decode_figures([10], [reply(1.0)]) is None


def test_a_figure_that_not_all_turns_have_has_no_median() -> None:
    assert medians([{"a": 1.0, "b": 2.0}, {"a": 3.0}]) == {"a": 2.0}


def test_time_that_is_covered_counts_once() -> None:
    assert covered([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0), (5.2, 5.4)]) == pytest.approx(4.0)
    assert covered([]) == 0.0


def event(name: str, begin: float, end: float, *, cuda: bool = True, note: bool = False) -> object:
    return SimpleNamespace(
        name=name,
        device_type=DeviceType.CUDA if cuda else DeviceType.CPU,
        time_range=SimpleNamespace(start=begin, end=end),
        is_user_annotation=note,
    )


def test_the_busy_share_is_of_kernels_and_copies_alone() -> None:
    events = [
        event("product", 0.0, 40.0),
        event("attention", 30.0, 60.0),  # on another stream
        event("product", 80.0, 100.0),
        event("a launch", 0.0, 500.0, cuda=False),
        event("a range", 0.0, 500.0, note=True),
    ]
    found = summary(events)
    assert found["span_s"] == pytest.approx(100e-6)
    assert found["busy_s"] == pytest.approx(80e-6)
    assert found["kernels"] == [
        {"name": "product", "count": 2, "seconds": pytest.approx(60e-6)},
        {"name": "attention", "count": 1, "seconds": pytest.approx(30e-6)},
    ]
    with pytest.raises(RuntimeError, match="saw nothing"):
        summary(events[3:])
