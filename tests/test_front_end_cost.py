"""The benchmark of the front end measures what it says: each of its servers delivers all tokens."""

from __future__ import annotations

import argparse

import pytest

from benchmarks import front_end_cost


@pytest.mark.slow
@pytest.mark.parametrize("per_second", [200.0, 0.0], ids=["paced", "unpaced"])
@pytest.mark.parametrize("kind", front_end_cost.KINDS)
def test_every_token_is_counted(kind: str, per_second: float) -> None:
    # Without pauses enough steps that they are not over before the kernel has counted any time.
    steps = int(per_second * 0.5) or 3000
    options = argparse.Namespace(requests=8, seconds=0.5, steps=steps, repeats=2)
    figures = front_end_cost.sessions(options, kind, per_second)
    assert len(figures) == 2
    for figure in figures:
        # All but what came with the first message, which starts the clock. A request that begins a
        # step after the first is not in it, and ends a step later.
        assert 0 < figure.tokens < 8 * steps
        assert 1 <= figure.messages < steps + 7
        assert 0 < figure.cpu_s < 20
        assert figure.microseconds == pytest.approx(figure.cpu_s / figure.tokens * 1e6)
        if per_second:
            assert figure.tokens >= 8 * 90
            assert figure.wall_s > 0.4
