"""Statistics by adapter: few names, no count lost, none that falls."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.contract.adapters import MAX_NAMED
from engine.contract.stats import AdapterStats, EngineStats
from service.telemetry.adapter_series import AdapterSeries


def told(*rows: AdapterStats, other: AdapterStats | None = None) -> EngineStats:
    return EngineStats(by_adapter=rows, other_adapters=other)


def test_a_name_that_goes_and_comes_keeps_its_counts() -> None:
    series = AdapterSeries()
    series.take(told(AdapterStats("a", 1, 2, 30, 4), AdapterStats("b", 0, 0, 5, 6)))
    assert series.present()["a"] == AdapterStats("a", 1, 2, 30, 4)
    series.engine_starts()
    assert not series.present()
    series.take(told(AdapterStats("b", 1, 0, 10, 10)))
    assert series.totals() == {
        "a": AdapterStats("a", 0, 0, 30, 4), "b": AdapterStats("b", 1, 0, 15, 16),
    }  # fmt: skip
    series.take(told(AdapterStats("b", 1, 0, 11, 12), AdapterStats("a", 0, 0, 1, 1)))
    assert series.totals()["a"] == AdapterStats("a", 0, 0, 31, 5)


def test_an_adapter_that_is_called_other_is_not_the_others() -> None:
    series = AdapterSeries()
    series.take(told(AdapterStats("other", 0, 0, 1, 2), other=AdapterStats("", 0, 0, 3, 4)))
    assert {name: one.prompt_tokens for name, one in series.totals().items()} == {"other": 1, "": 3}


@given(
    st.lists(st.lists(st.integers(0, 3 * MAX_NAMED), unique=True, max_size=MAX_NAMED), max_size=12)
)
def test_names_are_few_whatever_engines_tell(engines: list[list[int]]) -> None:
    """Each engine names others first, and counts one token for each of them, and one for others."""
    series, kept, total = AdapterSeries(), dict[str, int](), 0
    for names in engines:
        rows = [AdapterStats(f"n{one}", 0, 0, 1, 0) for one in names]
        series.take(told(*rows, other=AdapterStats("", 0, 0, 1, 0)))
        total += len(rows) + 1
        found = {name: one.prompt_tokens for name, one in series.totals().items()}
        assert sum(found.values()) == total
        assert len(found) <= MAX_NAMED + 1
        assert all(found[name] >= count for name, count in kept.items())
        kept = found
        series.engine_starts()
        assert {name: one.prompt_tokens for name, one in series.totals().items()} == found
