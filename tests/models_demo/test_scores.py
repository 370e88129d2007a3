"""The marks of replies, and the counting of drafts, on replies and tokens made up for it."""

from __future__ import annotations

from typing import Any

import pytest

from models.demo.scores import (
    Drafted,
    Reply,
    Tally,
    draft,
    drafted,
    drafted_rows,
    holds,
    marks,
    same,
    tallied,
)

CALL = {"kind": "call", "expect": {"name": "get_tide", "arguments": {"harbour": "Dunmore"}}}


@pytest.mark.parametrize(
    ("calls", "tool", "whole"),
    [
        ((("get_tide", '{"harbour": "Dunmore"}'),), 1.0, 1.0),
        ((("get_tide", '{"harbour": "Dunmere"}'),), 1.0, 0.0),
        ((("get_tide", '{"harbour": "Dunmore", "day": 1}'),), 1.0, 0.0),
        ((("get_tide", '{"harbour": "Dunm'),), 1.0, 0.0),
        ((("get_time", '{"harbour": "Dunmore"}'),), 0.0, 0.0),
        ((("get_tide", '{"harbour": "Dunmore"}'),) * 2, 0.0, 0.0),
        ((), 0.0, 0.0),
    ],
)
def test_a_call(calls: tuple[tuple[str, str], ...], tool: float, whole: float) -> None:
    assert marks(CALL, Reply("", calls)) == {"right tool": tool, "whole call": whole}


def test_no_call() -> None:
    row = {"kind": "no_call", "expect": {"call": False}}
    assert marks(row, Reply("I have no tool for that.")) == {"no call": 1.0}
    assert marks(row, Reply("", (("get_tide", "{}"),))) == {"no call": 0.0}
    assert marks(row, Reply('<tool_call>{"name": "get_ti')) == {"no call": 0.0}
    assert marks(row, Reply(error="refused")) == {"no call": 0.0}


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("Pressure is 138 over 84.", 1.0),
        ("Pressure is 138 over 840.", 0.0),
        ("Pressure is 138.", 0.0),
    ],
)
def test_an_answer_has_all_values(text: str, right: float) -> None:
    row = {"kind": "result", "expect": {"contains": ["138", "84"]}}
    assert marks(row, Reply(text)) == {"answer": right}
    assert marks(row, Reply(text, (("again", "{}"),))) == {"answer": 0.0}


@pytest.mark.parametrize(
    ("text", "value", "is_there"),
    [
        ("It is 4.2 m.", "4.2", True),
        ("It is 4.2.", "4.2", True),
        ("It is 4.25 m.", "4.2", False),
        ("It is 14.2 m.", "4.2", False),
        ("It is 3.9 m.", "9", False),
        ("1,500 of them", "500", False),
        ("9, I think", "9", True),
        ("ask MRS OYELARAN", "Oyelaran", True),
        ("the lockedness", "locked", False),
        ("2028-05-31, at noon", "2028-05-31", True),
    ],
)
def test_values_are_words_of_their_own(text: str, value: str, is_there: bool) -> None:
    assert holds(text, value) is is_there


def test_copies_are_exact_but_for_the_space_around_them() -> None:
    row = {"kind": "copy", "size": 30, "expect": {"text": "a  B, c"}}
    assert marks(row, Reply(" a  B, c\n")) == {"copy 30": 1.0}
    assert marks(row, Reply("a B, c")) == {"copy 30": 0.0}
    assert marks({"kind": "edit", "expect": {"text": "x"}}, Reply('"x"')) == {"edit": 0.0}


@pytest.mark.parametrize(
    ("text", "fields", "whole"),
    [
        ('{"pier": 9, "open": true, "ship": "Rusalka"}', 1.0, 1.0),
        ('{"ship": "Rusalka", "open": true, "pier": 9.0}', 1.0, 1.0),
        ('{"pier": 9, "open": 1, "ship": "Rusalka"}', 2 / 3, 0.0),
        ('{"pier": 9, "open": true, "ship": "Rusalka", "more": 1}', 1.0, 0.0),
        ('{"pier": 9, "open": tr', 0.0, 0.0),
        ("[9]", 0.0, 0.0),
    ],
)
def test_a_form(text: str, fields: float, whole: float) -> None:
    row = {"kind": "form", "expect": {"object": {"pier": 9, "open": True, "ship": "Rusalka"}}}
    assert marks(row, Reply(text)) == {"fields": pytest.approx(fields), "object": whole}


def test_json_values_are_compared_as_such() -> None:
    assert same({"a": [1, 2.0]}, {"a": [1.0, 2]})
    assert not same({"a": [1]}, {"a": [1, 2]})
    assert not same({"a": 1}, {"a": True})
    assert not same([False], [0])
    assert not same("7", 7)
    assert not same(None, {})


def test_marks_are_summed_by_criterion() -> None:
    good = Reply("", (("get_tide", '{"harbour": "Dunmore"}'),))
    other = Reply("", (("get_tide", '{"harbour": "Cork"}'),))
    found = tallied([(CALL, good), (CALL, other)])
    assert found == {"right tool": Tally(2.0, 2), "whole call": Tally(1.0, 2)}
    assert found["whole call"].share == 0.5
    assert Tally().share == 0.0


def test_a_draft_follows_the_longest_end_and_of_those_the_latest() -> None:
    assert list(draft([1, 2, 7, 8, 1, 2, 9, 8, 1, 2])) == [9, 8, 1, 2]
    assert list(draft([5, 1, 2, 7, 7, 1, 2, 9, 9, 5, 1, 2])) == [7, 7, 1, 2, 9]  # three over two
    assert list(draft([1, 2, 3, 4, 5, 6, 7, 8, 1, 2])) == [3, 4, 5, 6, 7]  # five at most
    assert list(draft([1, 2, 3, 2])) == []  # one token alone is none
    assert list(draft([4, 4, 4])) == [4]  # it may overlap its end
    assert list(draft([])) == []


def test_what_is_kept_of_drafts_is_counted() -> None:
    # 1 and 2 are without draft; 1 2 foretells 3 4 5 6 9, of which all but the last come.
    assert drafted([1, 2, 3, 4, 5, 6, 9], [1, 2, 3, 4, 5, 6, 7]) == Drafted(5, 4, 7, 3)
    # All five are kept, and the step's own token comes behind them.
    assert drafted([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8]) == Drafted(5, 5, 8, 3)
    # The reply ends within a draft, whose rest is not kept.
    assert drafted([1, 2, 3, 4, 5, 6, 7], [1, 2, 3]) == Drafted(5, 1, 3, 3)
    assert drafted([1, 2], []) == Drafted()
    assert Drafted(5, 4, 7, 3) + Drafted(5, 1, 3, 3) == Drafted(10, 5, 10, 6)


def test_all_edits_and_some_copies_of_each_size_are_drafted() -> None:
    rows: list[dict[str, Any]] = [{"kind": "edit"}] * 40
    rows += [{"kind": "copy", "size": size} for size in (30, 60) for _ in range(50)]
    chosen = drafted_rows([*rows, CALL])
    assert [row["kind"] for row in chosen] == ["edit"] * 40 + ["copy"] * 40
    assert sum(row.get("size") == 30 for row in chosen) == 20
