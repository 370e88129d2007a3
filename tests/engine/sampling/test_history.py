"""What follows from a request's history: penalties and n-grams, step by step."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

from engine.contract.token_ids import TokenIds
from engine.contract.types import TokenId
from engine.sampling.history import NgramIndex, TokenCounts
from engine.sampling.sampler import Sampler
from engine.scheduler.runner_protocol import INVALID_TOKEN
from tests.engine.sampling.helpers import CPU, VOCAB, make, processed, reference

TEXT = st.lists(st.integers(0, 3).map(TokenId), max_size=40)


@given(TEXT, st.integers(1, 6), st.lists(st.integers(0, 40), max_size=6))
@settings(max_examples=200, deadline=None)
def test_ngrams_are_those_of_transformers(text: list[TokenId], size: int, cuts: list[int]) -> None:
    index = NgramIndex(size)
    for end in (*sorted(cuts), len(text)):
        index.catch_up(text, end)
    right = NoRepeatNGramLogitsProcessor(size)(
        torch.tensor([text], dtype=torch.int64), torch.zeros(1, 4)
    )[0]
    banned = set(right.isinf().nonzero().flatten().tolist())
    assert set(index.repeating()) == banned


def test_the_ngram_index_takes_memory_by_tokens_not_by_size() -> None:
    index = NgramIndex(1024)
    text = [TokenId(i % 1500) for i in range(4000)]
    index.catch_up(text, len(text))
    assert index.repeating() == (text[2500],)
    assert len(index._followers) == 1500


@given(TEXT.filter(bool), TEXT, st.lists(st.integers(0, 80), max_size=5))
@settings(max_examples=100, deadline=None)
def test_counts_are_of_the_output(
    prompt: list[TokenId], output: list[TokenId], cuts: list[int]
) -> None:
    counts = TokenCounts(TokenIds.of(prompt))
    for end in (*sorted(max(cut, len(prompt)) for cut in cuts), len(prompt) + len(output)):
        counts.catch_up([*prompt, *output], end)
    found = dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))
    assert found == {token: output.count(token) for token in {*prompt, *output}}


def test_repetition_penalty_is_transformers() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2)) * 4
    requests = [
        make(prompt=(1, 9, 9), output=(5, i, i), repetition_penalty=1.8, logprobs=0)
        for i in range(3)
    ]
    ids = torch.tensor([request.token_ids for request in requests])
    right = RepetitionPenaltyLogitsProcessor(1.8)(ids, logits.clone())
    for row, request in enumerate(requests):
        ours = torch.tensor(processed(logits[row].tolist(), request))
        assert torch.allclose(ours, right[row]), "the tests' reference is right"
    assert Sampler(VOCAB, CPU).sample(logits, requests)[0] == right.argmax(dim=-1).tolist()


@pytest.mark.parametrize("seed", range(4))
def test_histories_grow_through_chunks_and_preemptions(seed: int) -> None:
    """What was computed comes and goes; what was generated counts once, whatever happens."""
    chance = random.Random(seed)
    sampler = Sampler(VOCAB, CPU)
    options = {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "no_repeat_ngram_size": 2,
        "temperature": 1.2,
        "top_k": 12,
    }
    requests = [
        make(
            str(i),
            prompt=tuple(chance.randrange(12) for _ in range(chance.randint(1, 30))),
            seed=i,
            **options,
        )
        for i in range(4)
    ]
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    for _ in range(25):
        chosen = [i for i in range(4) if chance.random() < 0.7]  # others compute a chunk
        rows = [requests[i] for i in chosen]
        if not rows:
            continue
        tokens, _ = sampler.sample(logits[chosen], rows)
        for index, request, token in zip(chosen, rows, tokens, strict=True):
            assert token == reference(logits[index].tolist(), request)
            request.token_ids.append(token)
            request.num_computed_tokens = request.num_tokens - 1
            if chance.random() < 0.2:
                request.num_computed_tokens = 0
                request.preemptions += 1
    assert len(sampler._edits._states) == 4
    for request in requests:
        sampler.release(request.key)
        sampler.release(request.key)
    assert not sampler._edits._states


def test_nothing_of_a_released_request_is_left() -> None:
    sampler = Sampler(VOCAB, CPU)
    logits = torch.zeros(1, VOCAB)
    logits[0, 10], logits[0, 11] = 1.5, 1.0
    for options in (
        {"frequency_penalty": 2.0},
        {"no_repeat_ngram_size": 1},
        {"banned_token_ids": (10,)},
    ):
        first = make(prompt=(1,), output=(10,), **options)
        assert sampler.sample(logits, [first])[0] == [11]
        sampler.release(first.key)
        again = make(prompt=(1,))
        again.key = first.key
        assert sampler.sample(logits, [again])[0] == [10]


def test_every_token_repeats() -> None:
    """Nothing is left of one row; its neighbour goes on."""
    logits = torch.zeros(2, 4)
    logits[1, 2] = 1.0
    for options in ({}, {"temperature": 1.0, "top_p": 0.5}):
        requests = [
            make(prompt=(0, 1, 2, 3), eos=(), no_repeat_ngram_size=1, **options),
            make(prompt=(0, 1, 2, 3), eos=()),
        ]
        assert Sampler(4, CPU).sample(logits, requests)[0] == [INVALID_TOKEN, 2]


def test_greedy_requests_keep_nothing() -> None:
    sampler = Sampler(VOCAB, CPU)
    requests = [make(), make(temperature=1.0, top_k=3, min_p=0.1), make(min_tokens=3)]
    sampler.sample(torch.randn(3, VOCAB), requests)
    assert not sampler._edits._states


@pytest.mark.parametrize("penalty", [1e-45, 1e-300])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_least_repetition_penalty_leaves_logits_finite(
    penalty: float, temperature: float
) -> None:
    """It is allowed, so it must not make a token that cannot be sampled."""
    logits = torch.zeros(1, VOCAB)
    logits[0, :3] = torch.tensor([30.0, 40.0, 50.0])
    request = make(prompt=(1, 2, 4), repetition_penalty=penalty, temperature=temperature, top_p=0.9)
    assert Sampler(VOCAB, CPU).sample(logits, [request])[0] == [2]
