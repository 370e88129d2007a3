"""Stop strings, against an oracle that sees the whole text, and never a part of one too early."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text import StopMatch, StopMatcher


def oracle(
    chunks: list[tuple[str, int]], stops: list[str], include: bool, minimum: int
) -> tuple[str, StopMatch | None]:
    """The final text and the match, found in the whole text character by character."""
    text = ""
    for chunk, num_tokens in chunks:
        for character in chunk:
            text += character
            found = max((s for s in stops if text.endswith(s)), key=len, default="")
            if found and num_tokens >= minimum:
                return (
                    text if include else text[: len(text) - len(found)],
                    StopMatch(found, num_tokens),
                )
    return text, None


@settings(deadline=None, max_examples=400)
@given(
    chunks=st.lists(st.text(alphabet="abc", max_size=4), max_size=15),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=5),
    include=st.booleans(),
    minimum=st.integers(0, 8),
)
def test_agrees_with_the_oracle_and_leaks_nothing(
    chunks: list[str], stops: list[str], include: bool, minimum: int
) -> None:
    numbered = [(chunk, index) for index, chunk in enumerate(chunks, 1)]
    text, match = oracle(numbered, stops, include, minimum)
    matcher = StopMatcher(stops, include_stop=include, min_tokens=minimum)
    released = ""
    arrived = ""
    seen = None
    for chunk, num_tokens in numbered:
        arrived += chunk
        delta, found = matcher.push(chunk, num_tokens)
        released += delta
        seen = seen or found
        assert text.startswith(released)
        if seen is None:
            # As little as possible is held: the longest end that a stop string may begin with.
            held = arrived[len(released) :]
            assert arrived == released + held
            ends = [s[:n] for s in stops for n in range(len(s)) if arrived.endswith(s[:n])]
            assert held == max(ends, key=len, default="")
    assert seen == match
    assert released + matcher.flush() == text


def test_a_match_across_deltas_releases_what_is_before_it() -> None:
    matcher = StopMatcher(["\n\nUser:"])
    assert matcher.push("Hello\n", 1) == ("Hello", None)
    assert matcher.push("\nUs", 2) == ("", None)
    assert matcher.push("er: hi", 3) == ("", StopMatch("\n\nUser:", 3))
    assert matcher.push("more", 4) == ("", None)
    assert matcher.flush() == ""


def test_what_was_held_comes_when_it_is_no_stop_string() -> None:
    matcher = StopMatcher(["stop"])
    assert matcher.push("a sto", 1) == ("a ", None)
    assert matcher.push("ne", 2) == ("stone", None)
    assert matcher.push("st", 3) == ("", None)
    assert matcher.flush() == "st"
    assert matcher.flush() == ""


@pytest.mark.parametrize(
    ("stops", "text", "expected", "found"),
    [
        (["abc", "b"], "xabc", "xa", "b"),  # the one that ends first
        (["bc", "abc"], "xabc", "x", "abc"),  # both end there: the longer one
        (["aa"], "baaa", "b", "aa"),
        (["👩‍🚀"], "hi 👩‍🚀!", "hi ", "👩‍🚀"),
        (["\u2028"], "a\u2028b", "a", "\u2028"),
    ],
)
def test_which_match_counts(stops: list[str], text: str, expected: str, found: str) -> None:
    assert StopMatcher(stops).push(text, 1) == (expected, StopMatch(found, 1))
    included = StopMatcher(stops, include_stop=True).push(text, 1)
    assert included == (expected + found, StopMatch(found, 1))


def test_early_matches_flow_on() -> None:
    matcher = StopMatcher(["aa"], min_tokens=3)
    assert matcher.push("aa", 2) == ("a", None)
    assert matcher.push("a", 3) == ("", StopMatch("aa", 3))
