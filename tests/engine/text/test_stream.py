"""One output from ids to deltas: stop strings, kept tokens, ending tokens, echo."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.text import StopMatch, TextStream, Tokenizer

SHARED = settings(
    deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture
def bytes_tokenizer(tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers["byte_level"]


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token a byte, so that tests can count."""
    table = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    return [table[bytes([byte])] for byte in text.encode()]


def test_without_stop_strings_a_batch_is_one_delta(bytes_tokenizer: Tokenizer) -> None:
    stream = TextStream(bytes_tokenizer)
    ids = bytes_tokenizer.encode("the water runs", add_special_tokens=False)
    assert stream.push(ids) == "the water runs"
    assert stream.push(()) == ""
    assert stream.finish() == ""
    assert stream.num_tokens == len(ids)
    assert stream.stop is None


def test_the_token_that_completes_a_stop_string_is_the_last_kept(
    bytes_tokenizer: Tokenizer,
) -> None:
    stream = TextStream(bytes_tokenizer, stop_strings=["END"])
    assert stream.push(ids_of(bytes_tokenizer, "abE")) == "ab"
    assert stream.push(ids_of(bytes_tokenizer, "NDxyz")) == ""
    assert stream.num_tokens == 5
    assert stream.stop == StopMatch("END", 5)
    assert stream.push(ids_of(bytes_tokenizer, "more")) == ""
    assert stream.finish() == ""
    assert stream.num_tokens == 5


def test_include_stop_shows_the_stop_string_and_nothing_behind(
    bytes_tokenizer: Tokenizer,
) -> None:
    stream = TextStream(bytes_tokenizer, stop_strings=["END"], include_stop=True)
    assert stream.push(ids_of(bytes_tokenizer, "aENDb")) == "aEND"


def test_a_stop_character_of_several_tokens(bytes_tokenizer: Tokenizer) -> None:
    stream = TextStream(bytes_tokenizer, stop_strings=["水"])
    assert stream.push(ids_of(bytes_tokenizer, "a水b")) == "a"
    assert stream.stop == StopMatch("水", 4)


def test_min_tokens_counts_tokens(bytes_tokenizer: Tokenizer) -> None:
    stream = TextStream(bytes_tokenizer, stop_strings=["b"], min_tokens=3)
    assert stream.push(ids_of(bytes_tokenizer, "abab")) == "aba"
    assert stream.stop == StopMatch("b", 4)


@pytest.mark.parametrize(
    ("include", "skip", "shown"),
    [(False, True, ""), (False, False, ""), (True, True, ""), (True, False, "<|eos|>")],
)
def test_a_special_ending_token(
    bytes_tokenizer: Tokenizer, include: bool, skip: bool, shown: str
) -> None:
    eos = bytes_tokenizer.token_id("<|eos|>")
    assert eos is not None
    for stops in ([], ["zz"]):
        stream = TextStream(
            bytes_tokenizer, stop_strings=stops, include_stop=include, skip_special_tokens=skip
        )
        ids = [*ids_of(bytes_tokenizer, "ab"), eos]
        text = stream.push(ids, ends_with_stop_token=True)
        assert stream.num_tokens == 3
        assert text + stream.finish() == "ab" + shown
        assert stream.num_tokens == 3


@pytest.mark.parametrize("include", [False, True])
def test_an_ordinary_ending_token(bytes_tokenizer: Tokenizer, include: bool) -> None:
    stream = TextStream(bytes_tokenizer, include_stop=include, stop_strings=["bc!"])
    text = stream.push(ids_of(bytes_tokenizer, "abc"), ends_with_stop_token=True)
    assert text == "a"
    assert text + stream.finish() == ("abc" if include else "ab")
    assert stream.finish() == ""


def test_an_unfinished_character_shows_at_the_end(bytes_tokenizer: Tokenizer) -> None:
    for stops in ([], ["zz"]):
        stream = TextStream(bytes_tokenizer, stop_strings=stops)
        assert stream.push(ids_of(bytes_tokenizer, "a水")[:-1]) == "a"
        assert stream.finish() == "\ufffd"


def test_echo_comes_first_and_is_not_searched(bytes_tokenizer: Tokenizer) -> None:
    stream = TextStream(bytes_tokenizer, stop_strings=["x"], initial_text="x is: ")
    assert stream.push(ids_of(bytes_tokenizer, "a")) == "x is: a"
    assert stream.push(ids_of(bytes_tokenizer, "b")) == "b"
    silent = TextStream(bytes_tokenizer, initial_text="x")
    assert silent.finish() == "x"
    assert silent.finish() == ""


@SHARED
@given(
    output=st.text(alphabet="ab水 é\n", max_size=20),
    stops=st.lists(st.text(alphabet="ab水 é\n", min_size=1, max_size=3), max_size=3),
    sizes=st.lists(st.integers(0, 6), max_size=6),
    include=st.booleans(),
    minimum=st.integers(0, 8),
)
def test_grouping_changes_nothing(
    tokenizer: Tokenizer,
    output: str,
    stops: list[str],
    sizes: list[int],
    include: bool,
    minimum: int,
) -> None:
    prompt = tokenizer.encode("the wheel")
    ids = tokenizer.encode(output, add_special_tokens=False)

    def run(cuts: list[int]) -> tuple[str, int, StopMatch | None]:
        stream = TextStream(
            tokenizer,
            stop_strings=stops,
            include_stop=include,
            min_tokens=minimum,
            prompt_tail=prompt,
        )
        text, start = "", 0
        for size in [*cuts, len(ids)]:
            text += stream.push(ids[start : start + size])
            start += size
        text += stream.finish()
        return text, stream.num_tokens, stream.stop

    result = run(sizes)
    assert result == run([1] * len(ids))
    whole = tokenizer.decode([*prompt, *ids])[len(tokenizer.decode(prompt)) :]
    if result[2] is None:
        assert result[0] == whole
        assert result[1] == len(ids)
    else:
        assert whole.startswith(result[0])
        assert result[0].endswith(result[2].stop_string) or not include


@pytest.mark.parametrize("per_push", [1, 2, 50])
@pytest.mark.parametrize("stops", [(), ("<s", "x</s>y")], ids=["no stops", "held back"])
def test_shown_tokens_are_told_where_they_stand(
    tokenizers: dict[str, Tokenizer], per_push: int, stops: tuple[str, ...]
) -> None:
    for tokenizer in tokenizers.values():
        special = min(tokenizer.special_token_ids)
        own = tokenizer.token_text(special)
        words = tokenizer.encode("water", add_special_tokens=False)
        ids = [*words, special, *words, special, special, *words]
        stops = tuple(stop for stop in stops if not own.startswith(stop))
        stream = TextStream(tokenizer, shown={special: own}, stop_strings=stops)
        text = "".join(stream.push(ids[i : i + per_push]) for i in range(0, len(ids), per_push))
        text += stream.finish()
        assert len(stream.shown_at) == 3
        assert all(text.startswith(own, place) for place in stream.shown_at)
        assert stream.shown_at == sorted(set(stream.shown_at))
