"""Choices by tensors alone: the sampler's tokens, also where they are captured."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from engine.contract.request import Request, RequestStatus
from engine.sampling import plain
from engine.sampling.plain import COLUMNS, GREEDY_ROW, PlainChoice, PlainKind
from engine.sampling.sampler import Sampler
from engine.sampling.selection import least_bound
from engine.scheduler.runner_protocol import INVALID_TOKEN
from tests.engine.runner.fake_graphs import RecordingBackend
from tests.engine.sampling.helpers import CPU, make

GREEDY, DRAWN, FILTERED = PlainKind
ROWS, SIZE = 24, 1500


def choices(requests: list[Request], size: int = SIZE) -> PlainChoice | None:
    return plain.plain_choice(requests, [request.num_tokens for request in requests], size)


def anybody(chance: random.Random, kind: PlainKind) -> dict[str, Any]:
    """The options of a row that needs no more than a kind."""
    if kind is GREEDY or chance.random() < 0.2:
        return {"temperature": 0.0, "top_k": chance.choice([0, 3])}
    options = {"temperature": chance.choice([1e-9, 0.3, 1.0, 4.0]), "seed": chance.getrandbits(64)}
    if kind is FILTERED:
        options["top_k"] = chance.choice([0, 1, 7, 256, 257, 1400, SIZE, SIZE + 5])
        options["top_p"] = chance.choice([1e-9, 0.5, 0.95, 1.0, 1.0])
        options["min_p"] = chance.choice([0.0, 0.0, 0.05, 1.0])
    return options


def some_logits(chance: random.Random, dtype: torch.dtype) -> torch.Tensor:
    """With ties, tokens that are impossible, all equally likely ones, and rows of no use."""
    source = torch.Generator().manual_seed(chance.getrandbits(40))
    logits = torch.randn((ROWS, SIZE), generator=source) * 3
    logits[::2] = (logits[::2] * 4).round() / 4
    logits[1, ::3] = float("-inf")
    logits[2] = 1.25
    logits[3], logits[4, 5], logits[5, 9] = float("-inf"), float("nan"), float("inf")
    return logits.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", list(PlainKind))
def test_replays_give_the_tokens_of_the_sampler(
    kind: PlainKind, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One capture, then steps with other logits and other requests; in pieces of five rows."""
    monkeypatch.setattr(plain, "DRAWN_AT_ONCE", 5 * SIZE)
    chance = random.Random(kind)
    sampler = Sampler(SIZE, CPU)
    sampler._draw = None  # its exponential has another last bit now and then
    logits = torch.zeros((ROWS, SIZE), dtype=dtype)
    numbers = torch.ones((ROWS, COLUMNS), dtype=torch.float64)
    tokens = torch.zeros(ROWS, dtype=torch.int64)

    def run() -> torch.Tensor:
        plain.write_most_likely(logits, tokens)
        if kind is not GREEDY:
            plain.draw_tokens(least_bound, kind, logits, numbers, tokens)
        return tokens

    graph = RecordingBackend().capture(run)
    drawn = 0
    for _ in range(12):
        count = chance.choice([ROWS, 9])
        requests = [make(**anybody(chance, kind)) for _ in range(count)]
        logits.copy_(some_logits(chance, dtype))
        before = logits.clone()
        choice = choices(requests)
        assert choice is not None
        numbers[:] = torch.tensor(GREEDY_ROW)
        if choice.kind is not GREEDY:
            numbers[:count] = torch.from_numpy(choice.numbers)
        expected, _ = sampler.sample(logits[:count], requests)
        assert graph.replay().tolist()[:count] == expected
        assert expected[3:6] == [INVALID_TOKEN] * 3
        assert torch.equal(logits, before) or logits.isnan().any()
        drawn += expected != logits[:count].float().nan_to_num().argmax(-1).tolist()
    assert drawn > 0


def test_pieces_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows there are: what is captured keeps the memory of one piece."""
    sizes: list[int] = []

    def seen(bound: Any, kind: Any, logits: torch.Tensor, *rest: Any) -> None:
        sizes.append(logits.numel())

    monkeypatch.setattr(plain, "_draw", seen)
    for rows, width in ((256, 1 << 17), (3, 1 << 24), (1, 5)):
        logits = torch.empty((1, 1)).expand(rows, width)
        plain.draw_tokens(least_bound, DRAWN, logits, logits, logits)
        assert sum(sizes) == rows * width
        assert max(sizes) <= max(plain.DRAWN_AT_ONCE, width)
        sizes.clear()


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ([{}], GREEDY),
        ([{}, {"temperature": 1.0}], DRAWN),
        ([{"temperature": 1.0, "top_k": SIZE, "top_p": 1.0}], DRAWN),
        ([{}, {"temperature": 1.0}, {"temperature": 0.5, "top_k": 3}], FILTERED),
        ([{"temperature": 1.0, "top_p": 0.5}, {}], FILTERED),
        ([{"temperature": 1.0, "min_p": 0.5, "choice": 2}], FILTERED),
    ],
)
def test_a_step_is_of_the_kind_of_the_row_that_needs_most(
    options: list[dict[str, Any]], kind: PlainKind
) -> None:
    choice = choices([make(**one) for one in options])
    assert choice is not None
    assert choice.kind is kind
    assert len(choice.numbers) == (len(options) if kind is not GREEDY else 0)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0, "typical_p": 0.5},
        {"repetition_penalty": 1.1},
        {"no_repeat_ngram_size": 2},
        {"logit_bias": {4: 1.0}},
        {"banned_token_ids": (4,)},
        {"grammar": range(9)},
        {"min_tokens": 3},
        {"logprobs": 0},
    ],
)
def test_rows_that_need_more_are_left_to_the_sampler(options: dict[str, Any]) -> None:
    assert choices([make(), make(**options)]) is None
    assert choices([make(), make()]) is not None


def test_ended_requests_need_nothing() -> None:
    ended = make(repetition_penalty=1.1)
    ended.status = RequestStatus.FINISHED
    choice = choices([ended, make(temperature=1.0)])
    assert choice is not None
    assert choice.kind is DRAWN
