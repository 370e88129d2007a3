"""The batched sampler against one that treats each row slowly and obviously."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.request import GenerationRequest, Request
from engine.runner_protocol import INVALID_TOKEN
from engine.sampling import ops
from engine.sampling.random import uniform
from engine.sampling.sampler import Sampler
from engine.sampling_params import LogprobParams, SamplingParams, StopParams
from engine.types import RequestId, RequestKey, TokenId

VOCAB = 60
CPU = torch.device("cpu")


_KEYS = itertools.count(1)


def make(
    name: str,
    *,
    output: tuple[int, ...] = (),
    prompt: tuple[int, ...] = (3, 4, 4, 5),
    min_tokens: int = 0,
    stop: tuple[int, ...] = (),
    eos: tuple[int, ...] = (2,),
    ignore_eos: bool = False,
    logprobs: int | None = None,
    **sampling: Any,
) -> Request:
    bias = sampling.pop("logit_bias", {})
    spec = GenerationRequest(
        request_id=RequestId(name),
        prompt=tuple(TokenId(token) for token in prompt),
        sampling=SamplingParams(logit_bias=tuple(bias.items()), **sampling),
        stop=StopParams(
            max_tokens=100,
            min_tokens=min_tokens,
            stop_token_ids=tuple(TokenId(token) for token in stop),
            eos_token_ids=tuple(TokenId(token) for token in eos),
            ignore_eos=ignore_eos,
        ),
        logprobs=None if logprobs is None else LogprobParams(top_n=logprobs),
    )
    request = Request(spec=spec, arrival=0.0, max_total_tokens=200, key=RequestKey(next(_KEYS)))
    request.token_ids += [TokenId(token) for token in output]
    return request


def reference(row: list[float], request: Request) -> int:
    """One row, in plain Python."""
    params, stop = request.spec.sampling, request.spec.stop
    output = request.token_ids[len(request.spec.prompt) :]
    logits = list(row)
    for token, bias in params.logit_bias:
        logits[token] += bias
    for token in set(request.token_ids):
        value = logits[token]
        penalty = params.repetition_penalty
        logits[token] = value / penalty if value > 0 else value * penalty
    for token in set(output):
        logits[token] -= params.presence_penalty
        logits[token] -= params.frequency_penalty * output.count(token)
    if len(output) < stop.min_tokens:
        held = set(stop.stop_token_ids) | (set() if stop.ignore_eos else set(stop.eos_token_ids))
        for token in held:
            logits[token] = -math.inf
    if params.temperature == 0:
        return max(range(len(logits)), key=lambda token: logits[token])
    top = max(logits)
    weights = [math.exp((value - top) / params.temperature) for value in logits]
    number = uniform(params.seed, 0, len(output))
    plain = params.top_k == 0 and params.top_p == 1.0 and params.min_p == 0.0
    order = list(range(len(logits)))
    if not plain:
        order.sort(key=lambda token: -logits[token])
        order = order[: params.top_k or len(order)]
        total = sum(weights[token] for token in order)
        kept, before = [], 0.0
        for token in order:
            if before >= params.top_p and kept:
                break
            kept.append(token)
            before += weights[token] / total
        order = [token for token in kept if weights[token] >= params.min_p * weights[kept[0]]]
    total = sum(weights[token] for token in order)
    target, cumulated = number * total, 0.0
    for token in order:
        cumulated += weights[token]
        if cumulated > target:
            return token
    return order[-1]


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
        temperature=maybe(chance.uniform(0.2, 3.0), 0.0),
        top_k=maybe(chance.choice([1, 3, 20, VOCAB, 10 * VOCAB]), 0),
        top_p=maybe(chance.uniform(0.05, 1.0), 1.0),
        min_p=maybe(chance.uniform(0.0, 0.5), 0.0),
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


def test_no_logprobs_unless_asked_for() -> None:
    _, logprobs = Sampler(VOCAB, CPU).sample(torch.zeros(1, VOCAB), [make("a")])
    assert logprobs is None


def test_more_candidates_than_tokens() -> None:
    _, logprobs = Sampler(VOCAB, CPU).sample(torch.zeros(1, VOCAB), [make("a", logprobs=128)])
    assert logprobs is not None
    assert logprobs[0] is not None
    assert len(logprobs[0].candidates) == VOCAB


FILTERS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "temperature": {"temperature": 0.4},
    "top_k": {"temperature": 1.3, "top_k": 5},
    "top_p": {"temperature": 1.0, "top_p": 0.6},
    "min_p": {"temperature": 1.5, "min_p": 0.1},
    "all": {"temperature": 1.5, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
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


def test_repetition_penalty_is_transformers() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2)) * 4
    requests = [
        make(str(i), prompt=(1, 9, 9), output=(5, i, i), repetition_penalty=1.8) for i in range(3)
    ]
    ids = torch.tensor([request.token_ids for request in requests])
    right = RepetitionPenaltyLogitsProcessor(1.8)(ids, logits.clone())
    ours = Sampler(VOCAB, CPU)._process(logits, requests)
    assert torch.allclose(ours, right)


def test_histories_follow_a_request_and_go_with_it() -> None:
    sampler = Sampler(VOCAB, CPU)
    request = make("a", prompt=(1,), frequency_penalty=2.0, presence_penalty=1.0)
    logits = torch.zeros(1, VOCAB)
    logits[0, 10] = 4.5
    logits[0, 11] = 1.0
    seen = []
    for _ in range(5):
        (token,), _ = sampler.sample(logits, [request])
        assert token == reference(logits[0].tolist(), request)
        request.token_ids.append(token)
        seen.append(token)
    assert len(set(seen)) > 1
    assert len(sampler._histories) == 1
    sampler.release(request.key)
    assert not sampler._histories
    sampler.release(request.key)
    again = make("a", prompt=(2,), frequency_penalty=2.0, presence_penalty=1.0)
    assert sampler.sample(logits, [again])[0] == [10], "nothing is left of the first one"


def test_min_tokens_hold_back_every_ending_token() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 2], logits[0, 7], logits[0, 9] = 9.0, 8.0, 7.0
    sampler = Sampler(VOCAB, CPU)
    held = make("a", min_tokens=2, stop=(7,), output=(1,))
    assert sampler.sample(logits, [held])[0] == [9]
    over = make("b", min_tokens=2, stop=(7,), output=(1, 1))
    assert sampler.sample(logits, [over])[0] == [2]
    ignored = make("c", min_tokens=2, stop=(7,), ignore_eos=True)
    assert sampler.sample(logits, [ignored])[0] == [2]


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


@pytest.mark.parametrize("number", [0.0, 0.5, 1.0 - 2.0**-53])
def test_inversion_never_finds_weight_zero(number: float) -> None:
    logits = torch.full((1, 7), float("-inf"))
    logits[0, 2], logits[0, 4] = 0.0, 0.0
    uniforms = torch.tensor([[number]], dtype=torch.float64)
    assert ops.sample_plain(logits, uniforms).item() == (2 if number < 0.5 else 4)


def test_a_large_vocabulary_takes_the_sorted_path() -> None:
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
