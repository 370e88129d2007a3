"""The batched sampler against one that treats each row slowly and obviously."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from engine.contract.request import Request
from engine.sampling.sampler import Sampler
from engine.scheduler.runner_protocol import INVALID_TOKEN
from tests.engine.sampling.helpers import CPU, VOCAB, make, reference


def random_request(chance: random.Random, name: str) -> Request:
    def maybe(value: Any, neutral: Any) -> Any:
        return value if chance.random() < 0.5 else neutral

    return make(
        name,
        prompt=tuple(chance.randrange(VOCAB) for _ in range(chance.randint(1, 9))),
        output=tuple(chance.randrange(VOCAB) for _ in range(chance.randint(0, 9))),
        min_tokens=maybe(chance.randint(1, 12), 0),
        stop=maybe((7, 8), ()),
        ignore_eos=maybe(True, False),
        logprobs=maybe(chance.randint(0, 5), None),
        logprob_ids=maybe((5, 1, 5), ()),
        grammar=maybe([token for token in range(VOCAB) if chance.random() < 0.7], None),
        temperature=maybe(chance.uniform(0.2, 3.0), 0.0),
        top_k=maybe(chance.choice([1, 3, 20, VOCAB, 10 * VOCAB]), 0),
        top_p=maybe(chance.uniform(0.05, 1.0), 1.0),
        min_p=maybe(chance.uniform(0.0, 0.5), 0.0),
        typical_p=maybe(chance.uniform(0.05, 1.0), 1.0),
        no_repeat_ngram_size=maybe(chance.randint(1, 3), 0),
        allowed_token_ids=maybe(tuple(chance.sample(range(VOCAB), 30)), ()),
        banned_token_ids=maybe(tuple(chance.sample(range(VOCAB), 10)), ()),
        choice=chance.randrange(3),
        repetition_penalty=maybe(chance.uniform(0.5, 2.0), 1.0),
        presence_penalty=maybe(chance.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(chance.uniform(-2, 2), 0.0),
        logit_bias=maybe({chance.randrange(VOCAB): chance.uniform(-9, 9)}, {}),
        seed=chance.randrange(2**64),
    )


@pytest.mark.parametrize("seed", range(12))
def test_mixed_batches_equal_the_reference(seed: int) -> None:
    chance = random.Random(seed)
    requests = [random_request(chance, f"r{i}") for i in range(40)]
    logits = torch.randn(40, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    kept = logits.clone()
    tokens, logprobs = Sampler(VOCAB, CPU).sample(logits, requests)
    assert torch.equal(logits, kept), "the model's logits are not changed"
    right = [
        reference(row, request) for row, request in zip(logits.tolist(), requests, strict=True)
    ]
    assert tokens == right
    assert logprobs is not None
    own = torch.log_softmax(logits, dim=-1)
    for row, (request, entry) in enumerate(zip(requests, logprobs, strict=True)):
        if request.spec.logprobs is None:
            assert entry is None
            continue
        assert entry is not None
        token = tokens[row]
        assert entry.logprob == pytest.approx(own[row, token].item(), abs=1e-5)
        assert entry.rank == 1 + int((own[row] > own[row, token]).sum())
        order = own[row].argsort(descending=True)[: request.spec.logprobs.top_n].tolist()
        assert [token for token, _ in entry.candidates] == order
        assert [value for _, value in entry.candidates] == pytest.approx(
            [own[row, token].item() for token in order], abs=1e-5
        )
        assert [token for token, _ in entry.requested] == list(request.spec.logprobs.token_ids)
        assert [value for _, value in entry.requested] == pytest.approx(
            [own[row, token].item() for token in request.spec.logprobs.token_ids], abs=1e-5
        )


def test_a_request_among_any_neighbours_is_the_same() -> None:
    chance = random.Random(5)
    requests = [random_request(chance, f"r{i}") for i in range(24)]
    logits = torch.randn(24, VOCAB, generator=torch.Generator().manual_seed(5)) * 3
    together, _ = Sampler(VOCAB, CPU).sample(logits, requests)
    for row, request in enumerate(requests):
        assert Sampler(VOCAB, CPU).sample(logits[row : row + 1], [request])[0] == [together[row]]
    order = list(range(24))
    chance.shuffle(order)
    shuffled, _ = Sampler(VOCAB, CPU).sample(logits[order], [requests[i] for i in order])
    assert shuffled == [together[i] for i in order]


FILTERS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "temperature": {"temperature": 0.4},
    "top_k": {"temperature": 1.3, "top_k": 5},
    "top_p": {"temperature": 1.0, "top_p": 0.6},
    "min_p": {"temperature": 1.5, "min_p": 0.1},
    "typical_p": {"temperature": 1.2, "typical_p": 0.7},
    "all": {"temperature": 1.5, "top_k": 30, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.9},
}


@pytest.mark.parametrize("name", FILTERS)
def test_distributions_are_transformers(name: str) -> None:
    """Many draws with fixed seeds against the distribution that transformers' warpers leave."""
    options = FILTERS[name]
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(9)) * 1.5
    warpers = LogitsProcessorList([TemperatureLogitsWarper(options["temperature"])])
    if "top_k" in options:
        warpers.append(TopKLogitsWarper(options["top_k"]))
    if "top_p" in options:
        warpers.append(TopPLogitsWarper(options["top_p"]))
    if "min_p" in options:
        warpers.append(MinPLogitsWarper(options["min_p"]))
    if "typical_p" in options:
        warpers.append(TypicalLogitsWarper(options["typical_p"]))
    right = torch.softmax(warpers(torch.tensor([[0]]), logits.clone()), dim=-1)[0]
    draws = 8000
    requests = [make(f"r{i}", seed=i, **options) for i in range(draws)]
    tokens, _ = Sampler(VOCAB, CPU).sample(logits.expand(draws, -1), requests)
    found = torch.bincount(torch.tensor(tokens), minlength=VOCAB).double()
    assert found[right == 0].sum() == 0, "a filtered token was drawn"
    likely = right * draws >= 5
    expected = right[likely].double() * draws
    chi_square = ((found[likely] - expected) ** 2 / expected).sum().item()
    degrees = int(likely.sum())
    assert chi_square < degrees + 5 * math.sqrt(2 * degrees) + 10


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("options", FILTERS.values(), ids=FILTERS)
def test_rows_without_finite_logits_are_alone(bad: float, options: dict[str, Any]) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    requests = [make(str(i), seed=i, repetition_penalty=1.2, **options) for i in range(3)]
    right, _ = Sampler(VOCAB, CPU).sample(logits, requests)
    logits[1, 30] = bad
    tokens, _ = Sampler(VOCAB, CPU).sample(logits, requests)
    assert tokens == [right[0], INVALID_TOKEN, right[2]]
    logits[1] = float("-inf")
    tokens, _ = Sampler(VOCAB, CPU).sample(logits, requests)
    assert tokens == [right[0], INVALID_TOKEN, right[2]]


def test_a_large_top_k_among_a_small_one() -> None:
    size = 3000
    logits = torch.randn(2, size, generator=torch.Generator().manual_seed(3))
    few = make("few", temperature=1.0, top_k=40, seed=8)
    many = make("many", temperature=1.0, top_k=2000, seed=9)
    sampler = Sampler(size, CPU)
    together, _ = sampler.sample(logits, [few, many])
    assert sampler.sample(logits[:1], [few])[0] == together[:1]
    assert together == [
        reference(row, request) for row, request in zip(logits.tolist(), (few, many), strict=True)
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits(dtype: torch.dtype) -> None:
    logits = torch.randn(1, VOCAB).to(dtype)
    tokens, logprobs = Sampler(VOCAB, CPU).sample(logits, [make("a", logprobs=1)])
    assert tokens == [int(logits.float().argmax())]
    assert logprobs is not None


def test_tokens_can_be_had_before_the_step_is_over() -> None:
    """What was begun holds all that its result needs: requests go on, the logits' buffer too."""
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    logits[2] = float("nan")
    requests = [make(logprobs=2), make(temperature=1.0, seed=4), make()]
    sampler = Sampler(VOCAB, CPU)
    right = sampler.sample(logits, requests)
    begun = sampler.begin(logits, requests)
    assert begun.token_ids.dtype == torch.int64
    assert begun.token_ids.tolist() == right[0]
    logits.zero_()
    for request in requests:
        request.token_ids.append(request.token_ids[0])
    requests.clear()
    assert begun.result() == right
    assert right[0][2] == INVALID_TOKEN


def test_no_rows() -> None:
    assert Sampler(VOCAB, CPU).sample(torch.empty(0, VOCAB), []) == ([], None)
