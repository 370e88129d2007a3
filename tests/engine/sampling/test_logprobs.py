"""Log-probabilities are those of the model's own distribution."""

from __future__ import annotations

import pytest
import torch

from engine.sampling import sampler as sampler_module
from engine.sampling.sampler import Sampler
from tests.engine.sampling.helpers import CPU, VOCAB, make


def test_none_unless_asked_for() -> None:
    _, logprobs = Sampler(VOCAB, CPU).sample(torch.zeros(1, VOCAB), [make()])
    assert logprobs is None


def test_more_candidates_than_tokens() -> None:
    _, logprobs = Sampler(VOCAB, CPU).sample(torch.zeros(1, VOCAB), [make(logprobs=128)])
    assert logprobs is not None
    assert logprobs[0] is not None
    assert len(logprobs[0].candidates) == VOCAB
    assert logprobs[0].rank == 1


def test_each_row_reports_what_it_asked_for() -> None:
    size = 3000
    logits = torch.randn(4, size, generator=torch.Generator().manual_seed(1)) * 4
    requests = [
        make(logprobs=2, logprob_ids=(7, 2999, 7), temperature=2.0, banned_token_ids=(7,)),
        make(),
        make(logprobs=0),
        make(logprobs=17, logprob_ids=(0,), repetition_penalty=3.0),
    ]
    tokens, logprobs = Sampler(size, CPU).sample(logits, requests)
    assert logprobs is not None
    assert logprobs[1] is None
    own = torch.log_softmax(logits.double(), dim=-1)
    for row in (0, 2, 3):
        entry, params = logprobs[row], requests[row].spec.logprobs
        assert entry is not None
        assert params is not None
        assert entry.logprob == pytest.approx(own[row, tokens[row]].item(), abs=1e-5)
        assert entry.rank == int((own[row] > own[row, tokens[row]]).sum()) + 1
        best = own[row].topk(params.top_n)
        assert [token for token, _ in entry.candidates] == best.indices.tolist()
        assert [value for _, value in entry.candidates] == pytest.approx(
            best.values.tolist(), abs=1e-5
        )
        assert [token for token, _ in entry.requested] == list(params.token_ids)
        assert [value for _, value in entry.requested] == pytest.approx(
            [own[row, token].item() for token in params.token_ids], abs=1e-5
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [1, 1 << 30])
def test_of_given_tokens(dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "_CHUNK_ON_CPU", chunk)
    logits = (torch.randn(9, VOCAB, generator=torch.Generator().manual_seed(3)) * 5).to(dtype)
    ids = [5, 1, 59, 0, 5, 5, 8, 9, 10]
    entries = Sampler(VOCAB, CPU).token_logprobs(logits, ids, 3).entries()
    own = torch.log_softmax(logits.double(), dim=-1)
    assert len(entries) == 9
    for row, (token, entry) in enumerate(zip(ids, entries, strict=True)):
        assert entry.logprob == pytest.approx(own[row, token].item(), abs=1e-5)
        assert entry.rank == int((own[row] > own[row, token]).sum()) + 1
        assert [value for _, value in entry.candidates] == pytest.approx(
            own[row].topk(3).values.tolist(), abs=1e-5
        )
        assert entry.requested == ()
    assert Sampler(VOCAB, CPU).token_logprobs(logits[:0], [], 3).entries() == []
    (alone,) = Sampler(VOCAB, CPU).token_logprobs(logits[2:3], [59], 0).entries()
    assert alone.candidates == ()
    assert alone.logprob == entries[2].logprob


def test_large_logits_lose_no_digits() -> None:
    """Of logits in the thousands, the difference to the largest is what counts."""
    logits = torch.tensor([[3000.0, 3000.25, 2999.5, -5000.0]])
    (entry,) = Sampler(4, CPU).token_logprobs(logits, [2], 4).entries()
    own = torch.log_softmax(logits.double(), dim=-1)[0]
    assert entry.logprob == pytest.approx(own[2].item(), abs=1e-5)
    assert dict(entry.candidates)[3] == pytest.approx(own[3].item(), rel=1e-6)


def test_an_impossible_token_has_minus_infinity() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 3] = float("-inf")
    (entry,) = Sampler(VOCAB, CPU).token_logprobs(logits, [3], 0).entries()
    assert entry.logprob == float("-inf")
    assert entry.rank == VOCAB


def test_a_row_of_nan_does_not_disturb_another() -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(3))
    sampler = Sampler(VOCAB, CPU)
    (_, right) = sampler.token_logprobs(logits, [4, 5], 6).entries()
    logits[0] = float("nan")
    assert sampler.token_logprobs(logits, [4, 5], 6).entries()[1] == right
