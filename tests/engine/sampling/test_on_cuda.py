"""What the sampler asks of a CUDA device, where there is none: nothing waits, whatever the options
and whoever comes and goes; and what an option launches does not grow with the requests.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine.contract.request import PENDING_TOKEN, Request
from engine.contract.types import RequestKey, TokenId
from engine.runner.device import CudaDevice
from engine.runner.input_batch import PromptRows
from engine.runner.launched import InputBuffers, LaunchedStep
from engine.runner.prompt_logprobs import PromptReport, report_prompts
from engine.sampling import sampler as sampler_module
from engine.sampling.plain import COLUMNS, PlainKind, choose_draws
from engine.sampling.sampler import Sampler
from tests.engine.cuda.watch import CUDA, DeviceFault, Watch, fake_cuda
from tests.engine.sampling.helpers import make

VOCAB = 3000
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "large top_k": {"temperature": 0.8, "top_k": 700},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "top_k and top_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "all of a row": {"temperature": 0.8, "top_k": 700, "top_p": 0.9, "min_p": 0.1},
    "min_p": {"temperature": 0.8, "min_p": 0.1},
    "typical_p": {"temperature": 0.8, "typical_p": 0.9},
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.1},
    "n-grams": {"no_repeat_ngram_size": 2},
    "bias": {"logit_bias": {5: 1.0}},
    "banned ids": {"banned_token_ids": (5, 6)},
    "min_tokens": {"min_tokens": 50},
    "a grammar": {"grammar": range(9)},
    "log-probabilities": {"logprobs": 0},
    "candidates": {"logprobs": 20, "logprob_ids": (4, 5)},
}


@pytest.fixture
def watch() -> Iterator[Watch]:
    watch = Watch()
    with fake_cuda(watch):
        yield watch


def _sample(watch: Watch, sampler: Sampler, requests: list[Request]) -> int:
    """A step behind another one, up to the copies to the host; how many launches it takes."""
    logits = torch.empty((len(requests), VOCAB), dtype=torch.bfloat16, device=CUDA)
    device, buffers = CudaDevice(CUDA), InputBuffers(1)
    lengths = [request.num_tokens for request in requests]
    before = len(watch.launches)
    step = LaunchedStep(
        buffers,
        buffers.take(),
        device,
        lambda: sampler.begin(logits, requests, lengths),
        PromptReport({}),
    )
    with watch.watching():
        step.sample()
    return len(watch.launches) - before


def _make(name: str, options: dict[str, Any]) -> Request:
    return make(name, prompt=(3, 4, 4, 5, 3, 4), output=(9, 9), **options)


@pytest.mark.parametrize("name", OPTIONS)
def test_no_option_waits_or_launches_more_for_more_requests(name: str, watch: Watch) -> None:
    def launches(count: int) -> int:
        sampler = Sampler(VOCAB, CUDA)
        requests = [_make(str(index), OPTIONS[name]) for index in range(count)]
        _sample(watch, sampler, requests)  # penalties: first what was seen is counted
        for request in requests:
            request.token_ids.append(PENDING_TOKEN if _may_be_behind(sampler, request) else 7)
        return _sample(watch, sampler, requests)

    assert launches(1) == launches(9)
    assert not watch.faults


@pytest.mark.parametrize("rows", [1, 64, 256])
@pytest.mark.parametrize(("filters", "most"), [(False, 2), (True, 4)])
def test_a_captured_draw_is_few_launches(filters: bool, most: int, rows: int, watch: Watch) -> None:
    """However many rows there are; two places for results are no launches."""
    pytest.importorskip("triton")
    kind = PlainKind.FILTERED if filters else PlainKind.DRAWN
    logits = torch.empty((rows, 151_936), dtype=torch.bfloat16, device=CUDA)
    numbers = torch.empty((rows, COLUMNS), dtype=torch.float64, device=CUDA)
    tokens = torch.empty(rows, dtype=torch.int64, device=CUDA)
    draws = choose_draws(logits)
    before = len(watch.launches)
    with watch.watching(allows_copies=False):
        draws(kind, logits, numbers, tokens)
    assert len(watch.launches) - before == most
    assert not watch.faults


def _may_be_behind(sampler: Sampler, request: Request) -> bool:
    return not sampler.needs_host_tokens(request)


def test_nothing_waits_whoever_comes_and_goes(watch: Watch) -> None:
    chance = random.Random(3)
    sampler = Sampler(VOCAB, CUDA)
    live: list[Request] = []
    for step in range(25):
        options = chance.choice(list(OPTIONS.values()))
        live.append(_make(f"{step}", options))
        if chance.random() < 0.3:
            gone = live.pop(chance.randrange(len(live)))
            sampler.release(gone.key)
        rows = [request for request in live if chance.random() < 0.8]
        if rows:
            _sample(watch, sampler, rows)
        for request in rows:
            request.token_ids.append(TokenId(chance.randrange(VOCAB)))
    assert not watch.faults
    assert watch.copies > 25


def test_prompts_do_not_wait(watch: Watch) -> None:
    sampler, device, buffers = Sampler(VOCAB, CUDA), CudaDevice(CUDA), InputBuffers(1)
    logits = torch.empty((9, VOCAB), dtype=torch.bfloat16, device=CUDA)
    prompts = [
        PromptRows(RequestKey(1), 0, (TokenId(5),) * 3),
        PromptRows(RequestKey(2), 7, (TokenId(6),) * 5),
    ]
    with watch.watching():
        report = report_prompts(sampler, logits[1:], prompts)
        step = LaunchedStep(
            buffers, buffers.take(), device, lambda: sampler.begin(logits[:1], [make()]), report
        )
        step.sample()
    found = step.result().prompt_logprobs
    assert [(key, len(entries)) for key, entries in found.items()] == [(1, 3), (2, 5)]
    assert [len(entry.candidates) for entry in found[RequestKey(2)]] == [7] * 5


def test_waiting_would_be_seen(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    def waits(values: torch.Tensor, masses: object, target: torch.Tensor) -> torch.Tensor:
        return values[:, :1] if bool((target > 5).any()) else values[:, 1:2]

    monkeypatch.setattr(sampler_module, "choose_bound", lambda device: waits)
    with pytest.raises(DeviceFault, match="waits"):
        _sample(watch, Sampler(VOCAB, CUDA), [_make("a", OPTIONS["top_p"])])
