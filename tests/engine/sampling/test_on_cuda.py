"""What the sampler asks of a CUDA device, where there is none: nothing waits, whatever the options
and whoever comes and goes; and what an option launches does not grow with the requests.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from engine.contract.request import Request
from engine.contract.types import RequestKey, TokenId
from engine.runner.device import CudaDevice
from engine.runner.input_batch import PromptRows
from engine.runner.launched import InputBuffers, LaunchedStep
from engine.runner.prompt_logprobs import report_prompts
from engine.sampling import sampler as sampler_module
from engine.sampling.plain import PlainKind
from engine.sampling.sampler import Sampler
from tests.engine.cuda.choices import (
    OPTIONS,
    ROWS,
    TYPES,
    VOCAB,
    captured,
    make_row,
    of_sampler,
    sample,
)
from tests.engine.cuda.watch import CUDA, DeviceFault, Watch, fake_cuda
from tests.engine.sampling.helpers import make


@pytest.fixture
def watch() -> Iterator[Watch]:
    watch = Watch()
    with fake_cuda(watch):
        yield watch


@pytest.mark.parametrize("name", OPTIONS)
def test_no_option_waits_or_launches_more_for_more_requests(name: str, watch: Watch) -> None:
    assert of_sampler(watch, name, 1) == of_sampler(watch, name, 9)
    assert not watch.faults


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_a_captured_choice_is_at_most_four_launches(
    rows: int, dtype: torch.dtype, watch: Watch
) -> None:
    """However many rows there are."""
    pytest.importorskip("triton")
    found = {kind: captured(watch, kind, rows, dtype) for kind in PlainKind}
    assert found == {
        PlainKind.GREEDY: ["find_most_likely"],
        PlainKind.DRAWN: ["find_most_likely", "sum_weights", "pick_token"],
        PlainKind.FILTERED: ["find_most_likely", "count_bins", "sum_weights", "pick_token"],
    }
    assert not watch.faults


def test_nothing_waits_whoever_comes_and_goes(watch: Watch) -> None:
    chance = random.Random(3)
    sampler = Sampler(VOCAB, CUDA)
    live: list[Request] = []
    for step in range(25):
        options = chance.choice(list(OPTIONS.values()))
        live.append(make_row(f"{step}", options))
        if chance.random() < 0.3:
            gone = live.pop(chance.randrange(len(live)))
            sampler.release(gone.key)
        rows = [request for request in live if chance.random() < 0.8]
        if rows:
            sample(watch, sampler, rows)
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
        sample(watch, Sampler(VOCAB, CUDA), [make_row("a", OPTIONS["top_p"])])
