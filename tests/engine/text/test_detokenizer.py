"""The detokeniser's law: joined deltas are the output's text in context, in any grouping."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.text import Tokenizer, incremental_detokenizer
from engine.text.detokenizer import _Bytes, _Window

ODD_TEXTS = [
    "",
    " ",
    "   leading and trailing   ",
    "é e\u0301 a\u0308\u0323 combining",
    "👩‍👩‍👧‍👦 👨🏽‍🚀 🏴󠁧󠁢󠁥󠁮󠁧󠁿 🇨🇭",
    "a\u2028b\u2029c\u0085d",
    "水車が回る。한국어 ქართული",
    "\ufffd literal \ufffd",
    "\x00\x01\r\n\t tabs",
    "don't . stop , now !",
    "▁▁ literal marks ▁",
    "<0xAB> <0xC3><0xA9> literal byte names",
    "العربية עברית \u200f\u202e",
]
SHARED = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
texts = st.one_of(
    st.text(max_size=40),
    st.text(alphabet="é水👩\u200d👧🏽\u0301\u2028 a\ufffd▁", max_size=25),
    st.sampled_from(ODD_TEXTS),
)


def groups(ids: Sequence[int], sizes: Sequence[int]) -> Iterator[Sequence[int]]:
    """Cut ids into pieces of these sizes, over and over."""
    start = 0
    for size in itertools.cycle([*sizes, 1]):
        if start >= len(ids):
            return
        yield ids[start : start + size]
        start += size


def stream(
    tokenizer: Tokenizer, ids: Sequence[int], sizes: Sequence[int] = (), **options: Any
) -> str:
    """What the detokeniser makes of ids, joined."""
    detokenizer = incremental_detokenizer(tokenizer, **options)
    deltas = [detokenizer.push(group) for group in groups(ids, sizes)]
    return "".join([*deltas, detokenizer.flush()])


sizes_of = st.lists(st.integers(0, 5), max_size=5)


@SHARED
@given(text=texts, sizes=sizes_of, skip=st.booleans())
def test_joined_deltas_are_the_decoded_output(
    tokenizer: Tokenizer, text: str, sizes: list[int], skip: bool
) -> None:
    ids = tokenizer.encode(text)
    expected = tokenizer.decode(ids, skip_special_tokens=skip)
    assert stream(tokenizer, ids, sizes, skip_special_tokens=skip) == expected


@SHARED
@given(prompt=texts, output=texts, sizes=sizes_of, whole=st.booleans())
def test_joined_deltas_continue_the_prompt(
    tokenizer: Tokenizer, prompt: str, output: str, sizes: list[int], whole: bool
) -> None:
    before = tokenizer.encode(prompt)
    after = tokenizer.encode(output, add_special_tokens=False)
    beginning = tokenizer.decode(before)
    text = tokenizer.decode([*before, *after])
    tail = before if whole else before[-12:]
    if tokenizer.decode(tail) == "":
        tail = before
    assert text.startswith(beginning)
    assert stream(tokenizer, after, sizes, prompt_tail=tail) == text[len(beginning) :]


@SHARED
@given(ids=st.lists(st.integers(0, 400), max_size=30), sizes=sizes_of, skip=st.booleans())
def test_any_byte_level_ids_decode_as_a_whole(
    tokenizers: dict[str, Tokenizer], ids: list[int], sizes: list[int], skip: bool
) -> None:
    tokenizer = tokenizers["byte_level"]
    expected = tokenizer.decode(ids, skip_special_tokens=skip)
    assert stream(tokenizer, ids, sizes, skip_special_tokens=skip) == expected


@SHARED
@given(data=st.binary(max_size=40), sizes=sizes_of)
def test_any_bytes_decode_as_a_whole(
    tokenizers: dict[str, Tokenizer], data: bytes, sizes: list[int]
) -> None:
    tokenizer = tokenizers["byte_level"]
    table = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    ids = [table[bytes([byte])] for byte in data]
    assert stream(tokenizer, ids, sizes) == tokenizer.decode(ids) == data.decode("utf-8", "replace")


@SHARED
@given(ids=st.lists(st.integers(0, 150), max_size=30), sizes=sizes_of, skip=st.booleans())
def test_any_word_pieces_decode_as_a_whole(
    tokenizers: dict[str, Tokenizer], ids: list[int], sizes: list[int], skip: bool
) -> None:
    for kind in ("word_piece", "unigram"):
        tokenizer = tokenizers[kind]
        expected = tokenizer.decode(ids, skip_special_tokens=skip)
        assert stream(tokenizer, ids, sizes, skip_special_tokens=skip) == expected


@SHARED
@given(data=st.binary(max_size=20), sizes=sizes_of)
def test_fallback_bytes_keep_what_is_valid(
    tokenizers: dict[str, Tokenizer], data: bytes, sizes: list[int]
) -> None:
    tokenizer = tokenizers["llama_like"]
    prompt = tokenizer.encode("the")
    ids = [3 + byte for byte in data]
    assert tokenizer.token_bytes(3 + 0xAB) == b"\xab"
    expected = data.decode("utf-8", "replace")
    assert stream(tokenizer, ids, sizes, prompt_tail=prompt) == expected
    if "\ufffd" not in expected:
        text = tokenizer.decode([*prompt, *ids])
        assert text == "the" + expected


@SHARED
@given(text=texts)
def test_no_delta_shows_a_part_of_a_character(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    whole = tokenizer.decode(ids)
    detokenizer = incremental_detokenizer(tokenizer)
    seen = ""
    for token_id in ids:
        seen += detokenizer.push([token_id])
        assert whole.startswith(seen)


def test_emoji_parts_come_as_they_are_complete(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["llama_like"]
    detokenizer = incremental_detokenizer(tokenizer, prompt_tail=tokenizer.encode("the"))
    deltas = [detokenizer.push([3 + byte]) for byte in "👩\u200d🚀".encode()]
    assert deltas == ["", "", "", "👩", "", "", "\u200d", "", "", "", "🚀"]


@pytest.mark.parametrize("kind", ["byte_level", "byte_level_words"])
def test_endless_invalid_bytes_stay_bounded(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    table = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    ids = [table[b"\xe6"]] * 500 + [table[bytes([b])] for b in "水".encode()]
    detokenizer = incremental_detokenizer(tokenizer)
    text = ""
    for token_id in ids:
        text += detokenizer.push([token_id])
        if isinstance(detokenizer, _Bytes):
            assert len(detokenizer._pending) <= 3
        else:
            assert isinstance(detokenizer, _Window)
            assert len(detokenizer._ids) <= 32
    assert text + detokenizer.flush() == tokenizer.decode(ids) == "\ufffd" * 500 + "水"


def test_endless_skipped_tokens_stay_bounded(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["word_piece"]
    word = tokenizer.encode("the", add_special_tokens=False)
    detokenizer = incremental_detokenizer(tokenizer)
    assert detokenizer.push(word) == "the"
    assert detokenizer.push([2] * 1000) == ""
    assert detokenizer.push(word) == " the"


def test_a_prompt_that_ends_within_a_character_is_completed(
    tokenizers: dict[str, Tokenizer],
) -> None:
    tokenizer = tokenizers["byte_level"]
    table = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    first, *rest = [table[bytes([b])] for b in "水".encode()]
    assert stream(tokenizer, rest, prompt_tail=[first]) == "水"
    assert stream(tokenizer, [table[b"a"]], prompt_tail=[first]) == "\ufffda"


def test_a_leading_blank_belongs_to_the_context(tokenizers: dict[str, Tokenizer]) -> None:
    for kind in ("llama_like", "unigram"):
        tokenizer = tokenizers[kind]
        ids = tokenizer.encode("the wheel", add_special_tokens=False)
        assert stream(tokenizer, ids) == "the wheel"
        assert stream(tokenizer, ids, prompt_tail=ids) == " the wheel"
    llama = tokenizers["llama_like"]
    ids = llama.encode("the", add_special_tokens=False)
    assert stream(llama, ids, prompt_tail=[1]) == "the"
    shown = stream(llama, ids, prompt_tail=[1], skip_special_tokens=False)
    assert shown == llama.decode([1, *ids], skip_special_tokens=False).removeprefix("<s>") == " the"


def test_ids_without_a_token_are_silent(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the wheel turns")
    odd = [*ids[:1], 10**6, *ids[1:2], 2**31, *ids[2:]]
    assert stream(tokenizer, odd) == tokenizer.decode(ids)
