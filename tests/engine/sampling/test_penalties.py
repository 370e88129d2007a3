"""Counts on the device are those on the host, whatever happens to the requests."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.api.offline import LoadedModel
from engine.contract.request import PENDING_TOKEN, Request
from engine.contract.sampling_params import SamplingParams
from engine.contract.types import TokenId
from engine.sampling import edits, penalties
from engine.sampling.penalties import OnDevice, OnHost, choose_penalties
from engine.sampling.sampler import Sampler
from engine.scheduler.runner_protocol import INVALID_TOKEN
from tests.engine.runner.fake_device import LateDevice
from tests.engine.runner.steps import build, make_core, make_request, run, tokens_of
from tests.engine.sampling.helpers import CPU, VOCAB, make
from tests.tiny_models import make_prompts


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samplers that are made count on the device, which is the CPU."""
    monkeypatch.setattr(edits, "choose_penalties", OnDevice)


def test_the_device_decides() -> None:
    assert isinstance(choose_penalties(VOCAB, CPU), OnHost)
    assert isinstance(choose_penalties(VOCAB, torch.device("meta")), OnDevice)


def _request(chance: random.Random, index: int) -> Request:
    return make(
        str(index),
        prompt=tuple(chance.randrange(20) for _ in range(chance.randint(1, 12))),
        repetition_penalty=chance.choice([1.0, 1.3, 0.7, 1e-40]),
        presence_penalty=chance.choice([0.0, 0.4, -1.0]),
        frequency_penalty=chance.choice([0.5, -0.2]),
        temperature=chance.choice([0.0, 1.2]),
        no_repeat_ngram_size=chance.choice([0, 0, 3]),
        seed=index,
    )


@pytest.mark.parametrize("seed", range(6))
def test_counts_follow_requests(
    seed: int, on_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests come, rest, lose their last token to a step that failed, end. The tokens are those
    of a sampler that counts on the host.
    """
    chance = random.Random(seed)
    monkeypatch.setattr(penalties, "_FIRST_SLOTS", 2)
    ours = Sampler(VOCAB, CPU)
    monkeypatch.setattr(edits, "choose_penalties", choose_penalties)
    theirs = Sampler(VOCAB, CPU)
    live: list[Request] = []
    most = 0
    for step in range(60):
        if len(live) < 9 and chance.random() < 0.5:
            live.append(_request(chance, step))
        rows = [request for request in live if chance.random() < 0.4]
        rows += [make("plain"), make("biased", logit_bias={3: 1.0})]
        chance.shuffle(rows)
        generator = torch.Generator().manual_seed(step)
        logits = torch.randn(len(rows), VOCAB, generator=generator) * 3
        tokens, _ = ours.sample(logits, rows)
        assert tokens == theirs.sample(logits, rows)[0]
        for request, token in zip(rows, tokens, strict=True):
            if chance.random() < 0.9:  # else the step is lost to it
                request.token_ids.append(token)
        most = max(most, len([one for one in rows if one.spec.sampling.has_penalties]))
        for request in [one for one in live if chance.random() < 0.05]:
            live.remove(request)
            for sampler in (ours, theirs):
                sampler.release(request.key)
    table: Any = ours._edits._penalties
    assert len(table._table) <= 2 * most
    assert len(table._free) + len(table._slots) == len(table._table)
    for request in live:
        ours.release(request.key)
    assert not table._slots


def test_tokens_that_are_not_on_the_host_are_counted(on_device: None) -> None:
    """A step behind is not needed on the host; its slot is not given away meanwhile."""
    sampler = Sampler(VOCAB, CPU)
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 8], logits[0, 9] = 3.0, 2.0, 1.0
    request = make(frequency_penalty=1.5, prompt=(1,))
    assert not sampler.needs_host_tokens(request)
    found = []
    for index in range(4):
        begun = sampler.begin(logits, [request])
        request.token_ids.append(PENDING_TOKEN)
        request.num_pending_tokens += 1
        found.append(begun)
        others = [make(f"{index}{i}", frequency_penalty=1.0) for i in range(20)]
        sampler.sample(logits.expand(20, -1), others)
        if index == 0:
            request.token_ids[1] = TokenId(7)
            request.num_pending_tokens = 1  # the rest stays behind
    tokens = [begun.result()[0][0] for begun in found]
    assert tokens == [7, 8, 7, 9]


def test_a_row_without_a_token_is_alone(on_device: None) -> None:
    sampler = Sampler(VOCAB, CPU)
    logits = torch.zeros(2, VOCAB)
    logits[:, 5] = 1.0
    rows = [make(frequency_penalty=0.8, prompt=(1,)), make(frequency_penalty=0.8, prompt=(1,))]
    logits[0, 3] = float("nan")
    tokens, _ = sampler.sample(logits, rows)
    assert tokens == [INVALID_TOKEN, 5]
    sampler.release(rows[0].key)
    rows[1].token_ids.append(tokens[1])
    assert sampler.sample(logits[1:], rows[1:])[0] == [5]
    rows[1].token_ids.append(TokenId(5))
    assert sampler.sample(logits[1:], rows[1:])[0] == [0]


def test_only_what_needs_the_host_waits_for_it() -> None:
    on_host, on_device = Sampler(VOCAB, CPU), Sampler(VOCAB, torch.device("meta"))
    for request, host, device in (
        (make(), False, False),
        (make(temperature=1.0, top_p=0.5, min_tokens=5), False, False),
        (make(frequency_penalty=1.0), True, False),
        (make(repetition_penalty=1.1), True, False),
        (make(no_repeat_ngram_size=2), True, True),
        (make(grammar=(1, 2)), True, True),
    ):
        assert on_host.needs_host_tokens(request) is host
        assert on_device.needs_host_tokens(request) is device


def test_through_an_engine_that_overlaps(
    loaded_torch: Callable[[str], LoadedModel], on_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that give up their blocks and come back, one step always behind."""
    prompts = make_prompts((1, 9, 31, 64, 20, 5))
    sampling = SamplingParams(
        temperature=1.1, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.3, seed=5
    )

    def tokens(overlap: bool) -> tuple[list[list[int]], int]:
        built = build(
            loaded_torch("llama"), num_blocks=20, max_batch_tokens=40, use_async_batching=overlap
        )
        device = LateDevice()
        built.runner._device = device
        core = make_core(built, overlap=overlap)
        requests = [
            make_request(str(i), prompt, 16, sampling=sampling, n=2 if i == 1 else 1)
            for i, prompt in enumerate(prompts)
        ]
        outputs = run(core, requests)
        assert core.scheduler.num_preemptions > 0
        found = [
            tokens_of([one for one in outputs[request.request_id] if one.choice == choice])
            for request in requests
            for choice in range(request.n)
        ]
        return found, device.most_pending

    behind, most_pending = tokens(overlap=True)
    assert most_pending == 2
    monkeypatch.setattr(edits, "choose_penalties", choose_penalties)
    assert tokens(overlap=False) == (behind, 1)
