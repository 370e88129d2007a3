"""Log-probabilities to report, from the model's own distribution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.contract.outputs import TokenLogprobs
from engine.contract.token_ids import NO_VALUES, TokenIds, TokenValues
from engine.contract.types import TokenId
from engine.sampling import ops


def _packed(ids: TokenIds, values: npt.NDArray[np.float64]) -> TokenValues:
    return TokenValues(ids, values.tobytes()) if ids.packed else NO_VALUES


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Log-probabilities of some rows, still on the device.

    Attributes:
        logprobs: the log-probability of each row's token: float32 [R]. ranks: its rank, int64 [R].
        ids, values: the most likely tokens: int64, float32 [R, n].
        requested: the log-probabilities of each row's requested ids, with arbitrary values as
            padding: float32 [R, m].
    """

    logprobs: torch.Tensor
    ranks: torch.Tensor
    ids: torch.Tensor
    values: torch.Tensor
    requested: torch.Tensor

    def copied(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> RowLogprobs:
        """Return a copy in which every tensor is replaced by its copy."""
        return RowLogprobs(
            copy(self.logprobs),
            copy(self.ranks),
            copy(self.ids),
            copy(self.values),
            copy(self.requested),
        )

    def entries(
        self, top_n: Sequence[int], requested_ids: Sequence[Sequence[TokenId]]
    ) -> list[TokenLogprobs]:
        """Return what to report for each row; waits for the device.

        Args:
            top_n: the number of candidates of each row. requested_ids: each row's requested ids.
        """
        ids = self.ids.to("cpu", torch.int32).numpy()
        values, asked = (
            part.to("cpu", torch.float64).numpy() for part in (self.values, self.requested)
        )
        rows = zip(self.logprobs.tolist(), self.ranks.tolist(), top_n, requested_ids, strict=True)
        return [
            TokenLogprobs(
                logprob=logprob,
                rank=rank,
                candidates=_packed(TokenIds(ids[row, :count].tobytes()), values[row, :count]),
                requested=_packed(TokenIds.of(wanted), asked[row, : len(wanted)]),
            )
            for row, (logprob, rank, count, wanted) in enumerate(rows)
        ]


@dataclass(frozen=True, slots=True)
class GivenLogprobs:
    """Log-probabilities of given tokens, such as a prompt's, still on the device.

    Attributes:
        pieces: the log-probabilities of consecutive chunks of the tokens.
        top_n: how many candidates to report with each token.
    """

    pieces: tuple[RowLogprobs, ...]
    top_n: int

    def copied(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> GivenLogprobs:
        """Return a copy in which every tensor is replaced by its copy."""
        return GivenLogprobs(tuple(piece.copied(copy) for piece in self.pieces), self.top_n)

    def entries(self) -> list[TokenLogprobs]:
        """Return what to report for each token; waits for the device."""
        found: list[TokenLogprobs] = []
        for piece in self.pieces:
            count = len(piece.logprobs)
            found += piece.entries([self.top_n] * count, [()] * count)
        return found


def row_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, top_n: int, requested: torch.Tensor
) -> RowLogprobs:
    """Compute the log-probabilities of one token of each row, of the most likely tokens, and of the
    requested ones.

    Args:
        logits: float32 [R, V], as the model gave them.
        tokens: int64 [R].
        top_n: the maximum number of most likely tokens.
        requested: int64 [R, m], ids whose log-probabilities are wanted.
    """
    # The largest logit is subtracted first: with large logits, the logarithm of the sum would lose
    # digits.
    best = logits.amax(dim=-1, keepdim=True)
    log_sum = (logits - best).exp_().sum(dim=-1, keepdim=True).log_()
    chosen = logits.gather(-1, tokens.unsqueeze(-1))
    count = min(top_n, logits.shape[-1])
    if count:
        values, ids = ops.top_values(logits, count)
    else:
        values, ids = logits[:, :0], tokens.unsqueeze(-1)[:, :0]
    return RowLogprobs(
        logprobs=(chosen - best - log_sum).squeeze(-1),
        ranks=ops.count_above(logits, chosen) + 1,
        ids=ids,
        values=values - best - log_sum,
        requested=logits.gather(-1, requested) - best - log_sum,
    )
