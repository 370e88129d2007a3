"""What may not be generated: lists of ids, grammars, and min_tokens among them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling import ops
from engine.sampling.sampler import Sampler
from engine.scheduler.runner_protocol import INVALID_TOKEN
from tests.engine.sampling.helpers import CPU, VOCAB, SetMatcher, make, reference


@given(st.lists(st.booleans(), min_size=1, max_size=100))
@settings(max_examples=100, deadline=None)
def test_packed_bits_come_back(flags: list[bool]) -> None:
    packed = ops.pack(np.array(flags))
    assert packed.dtype == np.int32
    assert len(packed) == ops.mask_width(len(flags)) == -(-len(flags) // 32)
    for token, flag in enumerate(flags):
        assert bool(packed[token // 32] >> (token % 32) & 1) == flag
    logits = torch.arange(len(flags), dtype=torch.float32).unsqueeze(0)
    right = logits.masked_fill(~torch.tensor([flags]), float("-inf"))
    ops.apply_masks(
        logits, torch.from_numpy(packed.view(np.uint8)).unsqueeze(0), ops.mask_table(CPU)
    )
    assert torch.equal(logits, right)


@pytest.mark.parametrize("size", [31, 32, 33, 60, 64, 1000])
def test_only_allowed_ids_are_chosen(size: int) -> None:
    logits = torch.randn(4, size, generator=torch.Generator().manual_seed(size))
    order = logits.argsort(dim=-1, descending=True).tolist()
    requests = [
        make(allowed_token_ids=(order[0][5], order[0][9])),
        make(banned_token_ids=tuple(order[1][:7])),
        make(allowed_token_ids=tuple(order[2][:9]), banned_token_ids=tuple(order[2][:8])),
        make(grammar=(order[3][4], order[3][2]), banned_token_ids=(order[3][2],)),
    ]
    tokens, _ = Sampler(size, CPU).sample(logits, requests)
    assert tokens == [order[0][5], order[1][7], order[2][8], order[3][4]]


def test_a_grammar_is_asked_at_each_step() -> None:
    sampler = Sampler(VOCAB, CPU)
    request = make()
    matcher = request.matcher = SetMatcher((3,))
    logits = torch.randn(1, VOCAB)
    for token in (3, 50, 31, 32):
        matcher.allowed = {token}
        assert sampler.sample(logits, [request])[0] == [token]


def test_tokens_that_the_grammar_does_not_know_are_forbidden() -> None:
    """A tokenizer smaller than the logits fills only the words it has."""
    request = make()
    request.matcher = SetMatcher(range(VOCAB), words=1)
    logits = torch.zeros(1, VOCAB)
    logits[0, 40], logits[0, 31], logits[0, 7] = 9.0, 2.0, 1.0
    assert Sampler(VOCAB, CPU).sample(logits, [request])[0] == [31]


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3}])
def test_nothing_left_fails_one_row_alone(options: dict[str, Any]) -> None:
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(1))
    logits[3, 5] = float("-inf")
    requests = [
        make(seed=1, **options),
        make(grammar=(), **options),
        make(allowed_token_ids=(5,), banned_token_ids=(5,), **options),
        make(allowed_token_ids=(5,), **options),
        make(grammar=(8, 9), seed=2, **options),
    ]
    tokens, _ = Sampler(VOCAB, CPU).sample(logits, requests)
    assert tokens[1:4] == [INVALID_TOKEN] * 3
    for row in (0, 4):
        assert tokens[row] == reference(logits[row].tolist(), requests[row])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_forbidden_token_may_be_anything_but_nan(bad: float) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 20] = bad
    request = make(banned_token_ids=(20,), allowed_token_ids=(4,))
    (token,), _ = Sampler(VOCAB, CPU).sample(logits, [request])
    assert token == (4 if bad == float("inf") else INVALID_TOKEN)


class TestMinTokens:
    """Ending tokens are held back until min_tokens, if something else is left."""

    logits = torch.zeros(1, VOCAB)
    logits[0, 2], logits[0, 7], logits[0, 9] = 9.0, 8.0, 7.0

    def _sample(self, **options: Any) -> int:
        (token,), _ = Sampler(VOCAB, CPU).sample(self.logits, [make(**options)])
        return token

    def test_every_ending_token(self) -> None:
        assert self._sample(min_tokens=2, stop=(7,), output=(1,)) == 9
        assert self._sample(min_tokens=2, stop=(7,), output=(1, 1)) == 2
        assert self._sample(min_tokens=2, stop=(7,), ignore_eos=True) == 2

    def test_with_allowed_ids(self) -> None:
        assert self._sample(min_tokens=2, allowed_token_ids=(2, 30)) == 30
        assert self._sample(min_tokens=2, stop=(7,), allowed_token_ids=(2, 7)) == 2

    def test_with_a_grammar(self) -> None:
        assert self._sample(min_tokens=2, grammar=(2, 30)) == 30
        assert self._sample(min_tokens=2, grammar=(2,)) == 2
        assert self._sample(min_tokens=2, grammar=(2,), temperature=1.0, top_k=4) == 2

    def test_with_n_grams(self) -> None:
        rest = tuple(token for token in range(VOCAB) if token != 2)
        assert self._sample(min_tokens=2, prompt=rest, no_repeat_ngram_size=1) == 2

    def test_a_penalty_does_not_bring_them_back(self) -> None:
        assert self._sample(min_tokens=2, stop=(7,), repetition_penalty=0.5, prompt=(2, 7)) == 9


def test_masks_are_made_only_where_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    masked: list[int] = []
    apply = ops.apply_masks

    def count(logits: torch.Tensor, packed: torch.Tensor, table: torch.Tensor) -> None:
        masked.append(len(logits))
        apply(logits, packed, table)

    monkeypatch.setattr(ops, "apply_masks", count)
    sampler = Sampler(VOCAB, CPU)
    logits = torch.randn(3, VOCAB)
    sampler.sample(logits, [make(), make(repetition_penalty=1.2), make(temperature=1.0)])
    assert not masked
    sampler.sample(logits, [make(), make(grammar=(1,)), make(banned_token_ids=(1,))])
    assert masked == [2], "one pass for both"


def test_a_long_list_is_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[int] = []
    pack = ops.pack

    def count(allowed: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
        packed.append(len(allowed))
        return pack(allowed)

    monkeypatch.setattr(ops, "pack", count)
    sampler = Sampler(5000, CPU)
    request = make(banned_token_ids=tuple(range(10, 4000)))
    for _ in range(3):
        sampler.sample(torch.randn(1, 5000), [request])
    assert packed == [5000]
