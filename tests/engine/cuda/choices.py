"""What a choice of tokens launches on CUDA, traced without a device (see `watch`): captured ones by
kind, type and number of rows; the sampler's by option, for any number of rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from engine.contract.request import PENDING_TOKEN, Request
from engine.runner.device import CudaDevice
from engine.runner.launched import InputBuffers, LaunchedStep
from engine.runner.prompt_logprobs import PromptReport
from engine.sampling.plain import COLUMNS, PlainKind, choose_draws, choose_most_likely
from engine.sampling.sampler import Sampler
from tests.engine.cuda.watch import CUDA, Watch, fake_cuda
from tests.engine.sampling.helpers import make

ROWS = (1, 64, 256)
TYPES = (torch.bfloat16, torch.float16, torch.float32)
VOCAB = 3000
WIDTH = 151_936
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
"""Options of a request, by name."""


def make_row(name: str, options: Mapping[str, Any]) -> Request:
    """A request that has some tokens, twice the same among them."""
    return make(name, prompt=(3, 4, 4, 5, 3, 4), output=(9, 9), **options)


def sample(watch: Watch, sampler: Sampler, requests: Sequence[Request]) -> int:
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


def of_sampler(watch: Watch, name: str, rows: int) -> int:
    """The launches of the sampler for rows with an option, in their second step."""
    sampler = Sampler(VOCAB, CUDA)
    requests = [make_row(str(index), OPTIONS[name]) for index in range(rows)]
    sample(watch, sampler, requests)  # penalties: first what was seen is counted
    for request in requests:
        waits = sampler.needs_host_tokens(request)
        request.token_ids.append(7 if waits else PENDING_TOKEN)
    return sample(watch, sampler, requests)


def captured(watch: Watch, kind: PlainKind, rows: int, dtype: torch.dtype) -> list[str]:
    """What captured work launches for a choice of a kind, by name. Places for what it keeps from
    one step to the next are made before.
    """
    logits = torch.empty((rows, WIDTH), dtype=dtype, device=CUDA)
    numbers = torch.empty((rows, COLUMNS), dtype=torch.float64, device=CUDA)
    tokens = torch.empty(rows, dtype=torch.int64, device=CUDA)
    most_likely, draws = choose_most_likely(logits), choose_draws(logits)
    before = len(watch.launches)
    with watch.watching(allows_copies=False):
        most_likely(logits, tokens)
        if kind is not PlainKind.GREEDY:
            draws(kind, logits, numbers, tokens)
    return watch.launches[before:]


def measure() -> dict[str, Any]:
    """The table's entry: launches of captured choices by type, kind and rows, of the sampler's by
    option.
    """
    pytest.importorskip("triton", reason="Triton is not installed here")
    watch = Watch()
    with fake_cuda(watch):
        return {
            "captured": {
                str(dtype).removeprefix("torch."): {
                    kind.name.lower(): {
                        str(rows): len(captured(watch, kind, rows, dtype)) for rows in ROWS
                    }
                    for kind in PlainKind
                }
                for dtype in TYPES
            },
            "sampler": {
                name: {str(rows): of_sampler(watch, name, rows) for rows in ROWS}
                for name in OPTIONS
            },
        }
