"""Requests for the sampler, and what it should do with one row, slowly and obviously."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.contract.request import GenerationRequest, Request
from engine.contract.sampling_params import LogprobParams, SamplingParams, StopParams
from engine.contract.types import RequestId, RequestKey, TokenId
from engine.sampling.random import uniform
from engine.scheduler.runner_protocol import INVALID_TOKEN

VOCAB = 60
CPU = torch.device("cpu")

_KEYS = itertools.count(1)


class SetMatcher:
    """A grammar whose next token is one of a set."""

    is_free = False
    expected_s = spent_s = 0.0
    failure: str | None = None

    def __init__(self, allowed: Iterable[int], *, words: int | None = None) -> None:
        """words: how many int32 of a row it knows of; the others it leaves alone."""
        self.allowed = set(allowed)
        self.words = words

    def fill_mask(self, row: npt.NDArray[np.int32]) -> None:
        assert row.dtype == np.int32
        bits = np.zeros(len(row) * 32, dtype=bool)
        bits[sorted(self.allowed)] = True
        filled = np.packbits(bits, bitorder="little").view(np.int32)
        row[: self.words] = filled[: self.words]

    def accept(self, token: TokenId) -> bool:
        return token in self.allowed

    @property
    def is_complete(self) -> bool:
        return False


def make(
    name: str = "a",
    *,
    output: tuple[int, ...] = (),
    prompt: tuple[int, ...] = (3, 4, 4, 5),
    min_tokens: int = 0,
    stop: tuple[int, ...] = (),
    eos: tuple[int, ...] = (2,),
    ignore_eos: bool = False,
    logprobs: int | None = None,
    logprob_ids: tuple[int, ...] = (),
    grammar: Iterable[int] | None = None,
    choice: int = 0,
    **sampling: Any,
) -> Request:
    bias = sampling.pop("logit_bias", {})
    spec = GenerationRequest(
        request_id=RequestId(name),
        prompt=tuple(TokenId(token) for token in prompt),
        sampling=SamplingParams(logit_bias=tuple(bias.items()), **sampling),
        stop=StopParams(
            max_tokens=1000,
            min_tokens=min_tokens,
            stop_token_ids=tuple(TokenId(token) for token in stop),
            eos_token_ids=tuple(TokenId(token) for token in eos),
            ignore_eos=ignore_eos,
        ),
        logprobs=None
        if logprobs is None
        else LogprobParams(
            top_n=logprobs, token_ids=tuple(TokenId(token) for token in logprob_ids)
        ),
    )
    request = Request(
        spec=spec, arrival=0.0, max_total_tokens=2000, key=RequestKey(next(_KEYS)), choice=choice
    )
    request.token_ids.extend(output)
    if grammar is not None:
        request.matcher = SetMatcher(grammar)
    return request


def reference(row: list[float], request: Request) -> int:
    """One row, in plain Python: the sampled token."""
    logits = processed(row, request)
    params = request.spec.sampling
    top = max(logits)
    if not math.isfinite(top):
        return INVALID_TOKEN
    if params.temperature == 0:
        return logits.index(top)
    weights = kept_weights(logits, params)
    number = uniform(params.seed, request.choice, request.num_output_tokens)
    target, cumulated, last = number * sum(weights), 0.0, -1
    for token, weight in enumerate(weights):
        cumulated += weight
        if weight > 0:
            last = token
            if cumulated > target:
                return token
    return last


def processed(row: list[float], request: Request) -> list[float]:
    """All that comes before the temperature."""
    params, stop = request.spec.sampling, request.spec.stop
    tokens = list(request.token_ids)
    output = tokens[len(request.spec.prompt) :]
    logits = list(row)
    for token, bias in params.logit_bias:
        logits[token] += bias
    for token in set(tokens) if params.has_penalties else ():
        value = logits[token]
        penalty = params.repetition_penalty
        logits[token] = value / penalty if value > 0 else value * penalty
    for token in set(output):
        logits[token] -= params.presence_penalty
        logits[token] -= params.frequency_penalty * output.count(token)
    forbidden = set(params.banned_token_ids)
    if params.allowed_token_ids:
        forbidden |= set(range(len(row))) - set(params.allowed_token_ids)
    if isinstance(request.matcher, SetMatcher):
        forbidden |= set(range(len(row))) - request.matcher.allowed
    size = params.no_repeat_ngram_size
    if size:
        ngrams = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
        forbidden |= {
            token
            for token in range(len(row))
            if (*tokens[len(tokens) - size + 1 :], token) in ngrams
        }
    for token in forbidden:
        logits[token] = -math.inf
    if len(output) < stop.min_tokens:
        held = set(stop.stop_token_ids) | (set() if stop.ignore_eos else set(stop.eos_token_ids))
        if any(logits[token] > -math.inf for token in range(len(row)) if token not in held):
            for token in held:
                logits[token] = -math.inf
    return logits


def kept_weights(logits: list[float], params: SamplingParams) -> list[float]:
    """What the filters leave of each token's likelihood."""
    top = max(logits)
    weights = [math.exp((value - top) / params.temperature) for value in logits]
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    order = order[: params.top_k or len(order)]
    total = sum(weights[token] for token in order)
    kept, before = [], 0.0
    for token in order:
        if before >= params.top_p * total and kept:
            break
        kept.append(token)
        before += weights[token]
    kept = [token for token in kept if weights[token] >= params.min_p]
    if params.typical_p < 1.0:
        total = sum(weights[token] for token in kept)
        surprise = {
            token: -math.log(weights[token] / total) for token in kept if weights[token] > 1e-30
        }
        entropy = sum(weights[token] / total * value for token, value in surprise.items())
        order = sorted(surprise, key=lambda token: abs(surprise[token] - entropy))
        kept, before = [], 0.0
        for token in order:
            kept.append(token)
            before += weights[token] / total
            if before >= params.typical_p:
                break
    return [weight if token in kept else 0.0 for token, weight in enumerate(weights)]
