"""Where guesses come from: matches are right, time and memory bounded, whatever the text."""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable

import pytest

from engine.contract.request import GenerationRequest, Request
from engine.contract.sampling_params import SamplingParams, StopParams
from engine.contract.token_ids import TokenIds
from engine.contract.types import RequestId, RequestKey
from engine.drafts.draft_source import DraftSource
from engine.drafts.own_text import OwnText
from engine.drafts.prediction import Prediction
from engine.drafts.suffix_index import CHUNK_TOKENS, SIZES, SharedIndexes, SuffixIndex

HISTORY_BYTES = 64
"""The most that a token of history may take."""


def fibonacci(count: int) -> list[int]:
    before, word = [1], [1, 2]
    while len(word) < count:
        before, word = word, word + before
    return word[:count]


TEXTS: dict[str, Callable[[int], list[int]]] = {
    "random": lambda count: [random.Random(1).randrange(150_000) for _ in range(count)],
    "one token": lambda count: [7] * count,
    "periodic": lambda count: [index % 13 for index in range(count)],
    "fibonacci": fibonacci,
    "large ids": lambda count: [2**31 - 1 - index % 5 for index in range(count)],
}


def last_match(text: list[int], end: int) -> tuple[int, int] | None:
    """What `find` is to return for the first `end` tokens, the slow way."""
    for size in SIZES:
        for place in range(end - 1, size - 1, -1):
            if end >= size and text[place - size : place] == text[end - size : end]:
                return size, place
    return None


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("letters", [2, 5, 40])
def test_the_last_longest_ngram_is_found(letters: int, chunked: bool) -> None:
    chance = random.Random(letters)
    text = [chance.randrange(letters) for _ in range(600)]
    known = array("i")
    index = SuffixIndex(known)
    if chunked:
        known.extend(text[:500])
        index = SuffixIndex(known)
        index.extend(500)
    missed = 0
    for end in range(len(known), len(text)):
        known.append(text[end])
        index.extend(end + 1)
        found, wanted = index.find(known), last_match(text, end + 1)
        if found is not None:  # what is found is right, and not longer than what there is
            assert wanted is not None
            assert text[found.end - found.size : found.end] == text[end + 1 - found.size : end + 1]
        missed += found != wanted  # another n-gram with the same hash came later
    assert missed < 0.35 * len(text)


def history(tokens: array[int], num_prompt: int) -> DraftSource:
    return OwnText(tokens, num_prompt, SuffixIndex(array("i", tokens[:num_prompt])))


def prediction(tokens: array[int], num_prompt: int) -> DraftSource:
    expected = array("i", tokens[:num_prompt])
    return Prediction(SuffixIndex(expected), num_prompt)


@pytest.mark.parametrize("make", [history, prediction])
@pytest.mark.parametrize("name", TEXTS)
def test_guessing_is_bounded(name: str, make: Callable[[array[int], int], DraftSource]) -> None:
    text = TEXTS[name](300_000)
    tokens, outputs = array("i", text[:-5000]), text[-5000:]
    source, longest = make(tokens, len(tokens)), 0.0
    began = time.process_time()
    for token in outputs:
        started = time.process_time()
        guess = source.guess(tokens, 15)
        longest = max(longest, time.process_time() - started)
        assert guess is None or (1 <= len(guess.tokens) <= 15 and guess.kind < source.num_kinds)
        tokens.append(token)
    each = (time.process_time() - began) / len(outputs)
    assert longest < 0.1, "no call takes long, though it has a prompt to read"
    assert each < 60e-6  # 20 is the goal, on a quiet machine


def test_a_backlog_is_followed_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request is asked for the first time after an output of any length."""
    taken = 0
    take = Prediction._take

    def counted(self: Prediction, tokens: array[int], position: int) -> None:
        nonlocal taken
        taken += 1
        take(self, tokens, position)

    monkeypatch.setattr(Prediction, "_take", counted)
    text = array("i", random.Random(0).choices(range(1000), k=20_000))
    source = prediction(text + text[:15_000], len(text))
    for _ in range(4):  # the place is found by an n-gram once the prediction is in the table
        guess = source.guess(text + text[:15_000], 5)
    assert guess is not None
    assert guess.tokens == text[15_000:15_005]
    assert taken <= 64


@pytest.mark.parametrize("name", TEXTS)
def test_an_index_takes_few_bytes(name: str) -> None:
    for count in (1, 1000, 4097, 5 * CHUNK_TOKENS):
        text = array("i", TEXTS[name](count))
        index = SuffixIndex(text)
        for _ in range(8):
            index.extend(len(text))
        for token in TEXTS[name](count):
            text.append(token)
            index.extend(len(text))
        assert index.num_bytes <= max(HISTORY_BYTES * len(text), 4096)


def test_a_copy_is_guessed_to_its_end() -> None:
    prompt = [random.Random(2).randrange(500) for _ in range(300)]
    tokens = array("i", prompt)
    source = history(tokens, len(prompt))
    right = 0
    for place in range(100, 200):
        guess = source.guess(tokens, 6)
        expected = prompt[place : place + 6]
        right += guess is not None and guess.tokens.tolist()[: len(expected)] == expected
        tokens.append(prompt[place])
    assert right >= 97


def test_a_text_that_repeats_itself_is_guessed_beyond_its_end() -> None:
    tokens = array("i", [9, 8, 1, 2, 3, 1, 2, 3, 1])
    guess = history(tokens, 2).guess(tokens, 7)
    assert guess is not None
    assert guess.tokens.tolist() == [2, 3, 1, 2, 3, 1, 2]


@pytest.mark.parametrize("change", ["exchanged", "left out", "put in"])
@pytest.mark.parametrize(("share", "least"), [(0.0, 1.0), (0.1, 0.8), (0.3, 0.5), (0.5, 0.25)])
def test_a_prediction_is_followed_through_changes(change: str, share: float, least: float) -> None:
    """The next token is guessed nearly as often as the prediction has it."""
    chance = random.Random(3)
    output = [chance.randrange(1000) for _ in range(1000)]
    expected: list[int] = []
    for token in output:
        changed = chance.random() < share
        if changed and change != "left out":
            expected.append(2000 + chance.randrange(1000))
        if not changed or change == "put in":
            expected.append(token)
    tokens, wanted = array("i", [5]), array("i", expected)
    source, right = Prediction(SuffixIndex(wanted), 1), 0
    for token in output:
        guess = source.guess(tokens, 5)
        right += guess is not None and guess.tokens[0] == token
        tokens.append(token)
    assert right / len(output) >= least


def test_a_part_of_a_prediction_is_found_anywhere() -> None:
    expected = array("i", random.Random(4).sample(range(10_000), 2000))
    tokens = array("i", [20_000])
    source = Prediction(SuffixIndex(expected), 1)
    right = 0
    for token in expected[1500:1600]:
        guess = source.guess(tokens, 5)
        right += guess is not None and guess.tokens[0] == token
        tokens.append(token)
    assert right > 90


def test_choices_that_diverge_share_what_is_known_of_their_prompt() -> None:
    """However many there are, and each follows its own output."""
    chance = random.Random(5)
    spec = GenerationRequest(
        request_id=RequestId("a"),
        prompt=TokenIds.of(chance.randrange(1000) for _ in range(5000)),
        sampling=SamplingParams(),
        stop=StopParams(max_tokens=100),
        n=128,
    )
    indexes = SharedIndexes()
    sources: list[tuple[Request, OwnText]] = []
    words: list[list[int]] = []
    for choice in range(spec.n):
        request = Request(spec, 0.0, 10**4, key=RequestKey(choice + 1), choice=choice)
        sources.append((request, OwnText.begin(request, indexes)))
        words.append([1000 + chance.randrange(10**5) for _ in range(9)])
    assert len({id(source._prompt) for _, source in sources}) == 1
    for place in range(40):
        for (request, source), word in zip(sources, words, strict=True):
            guess = source.guess(request.token_ids, 4)
            if place > 12:
                assert guess is not None
                assert guess.tokens.tolist() == [word[(place + ahead) % 9] for ahead in range(4)]
            request.token_ids.append(word[place % 9])
    own = sum(source._output.num_bytes for _, source in sources)
    assert own <= HISTORY_BYTES * 64 * spec.n, "64 tokens each is the least"
    del request, source
    sources.clear()
    assert not indexes._known
