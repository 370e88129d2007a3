"""Samples one token for each row of a step's logits, using the parameters of the row's request.

    logits ─▶ logit_bias ─▶ repetition, presence, frequency penalty ─▶ no_repeat_ngram
           ─▶ banned ids, allowed ids, grammar ─▶ ending tokens kept out (min_tokens)
           ─▶ temperature ─▶ top_k ─▶ top_p ─▶ min_p ─▶ typical_p ─▶ one uniform number ─▶ token

The order is that of transformers' `generate`: logits are changed before the distribution is
filtered. Among the steps that only forbid tokens the order makes no difference, except that
min_tokens comes last: it forbids ending tokens only if another token is left.

Rows that need the same steps are computed together. A greedy row that needs nothing more is one
argmax, and on a CPU a draw without filters is one kernel (see `engine.sampling.drawing`). How rows
are grouped and split does not change their tokens (see `engine.sampling.ops`). Log-probabilities
are taken from the model's unchanged logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.contract.outputs import TokenLogprobs
from engine.contract.request import Request
from engine.contract.sampling_params import LogprobParams, SamplingParams, SamplingSteps
from engine.contract.types import RequestKey, TokenId
from engine.native.device_copy import to_device
from engine.sampling import ops
from engine.sampling.drawing import choose_draw
from engine.sampling.edits import LogitEdits
from engine.sampling.filters import Filters, choose_bound, filtered_weights
from engine.sampling.greedy import choose_greedy, valid
from engine.sampling.logprobs import GivenLogprobs, RowLogprobs, row_logprobs
from engine.sampling.plain import PlainChoice, plain_choice
from engine.sampling.sampling_rows import ARGMAX, DRAW, Row, chance, steps_of

_CHUNK_ON_CPU = 1 << 19
"""How many logits are processed at a time on a CPU, chosen to fit in its caches."""
_CHUNK_ON_DEVICE = 1 << 25
"""How many logits are processed at a time on other devices. This limits the memory for intermediate
results, about 45 bytes per logit.
"""


class SampledRows:
    """The tokens of a step's rows, possibly still being computed.

    Attributes:
        token_ids: int64 [R] on the device; INVALID_TOKEN for a row without a valid token.
    """

    __slots__ = ("_logprobs", "token_ids")

    def __init__(
        self,
        token_ids: torch.Tensor,
        logprobs: Sequence[tuple[Sequence[int], Sequence[LogprobParams], RowLogprobs]],
    ) -> None:
        """logprobs: groups of (rows, what to report for each, the values)."""
        self.token_ids = token_ids
        self._logprobs = logprobs

    def copied(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> SampledRows:
        """Return the same rows, with every tensor replaced by its copy on the host. If the copies
        are asynchronous, call `result` only when they are complete.
        """
        return SampledRows(
            copy(self.token_ids),
            [(rows, wanted, computed.copied(copy)) for rows, wanted, computed in self._logprobs],
        )

    def result(self) -> tuple[list[TokenId], list[TokenLogprobs | None] | None]:
        """Wait for the tokens and return what `Sampler.sample` returns."""
        tokens = [TokenId(token) for token in self.token_ids.tolist()]
        if not self._logprobs:
            return tokens, None
        entries: list[TokenLogprobs | None] = [None] * len(tokens)
        for rows, wanted, computed in self._logprobs:
            reported = computed.entries([p.top_n for p in wanted], [p.token_ids for p in wanted])
            for row, entry in zip(rows, reported, strict=True):
                entries[row] = entry
        return tokens, entries


class Sampler:
    """Samples tokens, and keeps the sampling state of each live choice until its `release`."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        """vocab_size: the width of the logits."""
        self._vocab_size = vocab_size
        self._device = device
        self._edits = LogitEdits(vocab_size, device)
        self._greedy = choose_greedy(device)
        self._draw = choose_draw(device)
        self._bound = choose_bound(device)
        entries = _CHUNK_ON_CPU if device.type == "cpu" else _CHUNK_ON_DEVICE
        self._chunk = max(1, entries // vocab_size)

    def needs_host_tokens(self, request: Request) -> bool:
        """Whether a request's next token can be chosen only once the tokens before it are on the
        host.
        """
        return self._edits.needs_host_tokens(request)

    def plain(self, requests: Sequence[Request], lengths: Sequence[int]) -> PlainChoice | None:
        """Return how captured work chooses the token after each request's first `lengths` tokens,
        or None if only `begin` can.
        """
        return plain_choice(requests, lengths, self._vocab_size)

    def release(self, key: RequestKey) -> None:
        """Drop the state of a choice. Does nothing if there is none."""
        self._edits.release(key)

    def sample(
        self, logits: torch.Tensor, requests: Sequence[Request]
    ) -> tuple[list[TokenId], list[TokenLogprobs | None] | None]:
        """Choose a token for each row.

        Args:
            logits: [R, V] in the model's dtype, on the device.
            requests: R requests, one per row.

        Returns:
            R tokens (INVALID_TOKEN for a row without finite logits, or with nothing left to
            choose), and the log-probabilities of rows that asked for them (None if none did).
        """
        return self.begin(logits, requests).result()

    def begin(
        self,
        logits: torch.Tensor,
        requests: Sequence[Request],
        lengths: Sequence[int] | None = None,
    ) -> SampledRows:
        """Choose a token for each row, without waiting for the device; see `sample`.

        Everything needed from the requests is read before this returns. `lengths` is how many
        tokens come before each one that is chosen. Pass it if requests have received tokens or
        ended since the step was launched. The default is all their tokens.
        """
        if lengths is None:
            lengths = [request.num_tokens for request in requests]
        size = self._vocab_size
        kinds = [steps_of(q, n, size) for q, n in zip(requests, lengths, strict=True)]
        if kinds.count(ARGMAX) == len(kinds):
            tokens = self._greedy(logits)
        else:
            tokens = self._choose_by_kind(logits, list(map(Row, requests, lengths)), kinds)
        return SampledRows(tokens, self._logprobs(logits, tokens, requests))

    def _choose_by_kind(
        self,
        logits: torch.Tensor,
        rows: Sequence[Row],
        kinds: Sequence[SamplingSteps],
    ) -> torch.Tensor:
        """Return each row's token, int64 [R], computing rows with the same steps together."""
        tokens = torch.empty(len(rows), dtype=torch.int64, device=self._device)
        groups: dict[SamplingSteps, list[int]] = {}
        for place, steps in enumerate(kinds):
            groups.setdefault(steps, []).append(place)
        edited = [row for row, steps in zip(rows, kinds, strict=True) if steps.edits]
        self._edits.prepare(edited)
        for steps, places in groups.items():
            if steps == ARGMAX:
                index = self._upload(places)
                tokens.index_copy_(0, index, self._greedy(logits.index_select(0, index)))
                continue
            group = [rows[place] for place in places]
            if steps == DRAW and self._draw is not None:
                index = self._upload(places)
                tokens.index_copy_(0, index, self._draw(logits, index, *_chances(group)))
                continue
            masks = self._edits.masks(group) if steps.masks else None
            for piece in _pieces(len(places), self._chunk):
                index = self._upload(places[piece])
                part = logits.index_select(0, index).float()
                mask = None if masks is None else masks[piece]
                self._edits.apply(part, group[piece], steps, mask)
                chosen = self._choose(part, group[piece], steps)
                if steps.edits:
                    self._edits.chosen(group[piece], chosen)
                tokens.index_copy_(0, index, chosen)
        return tokens

    def token_logprobs(
        self, logits: torch.Tensor, token_ids: Sequence[int], top_n: int
    ) -> GivenLogprobs:
        """Return the log-probabilities of given tokens, such as a prompt's, without waiting for the
        device.

        Args:
            logits: [R, V] from the model, on the device; row i belongs to the position before token
                i.
            token_ids: R ids below V.
            top_n: how many of the most likely candidates to report with each.
        """
        pieces: list[RowLogprobs] = []
        for piece in _pieces(len(token_ids), self._chunk):
            part = token_ids[piece]
            none = torch.empty((len(part), 0), dtype=torch.int64, device=self._device)
            pieces.append(row_logprobs(logits[piece].float(), self._upload(part), top_n, none))
        return GivenLogprobs(tuple(pieces), top_n)

    # ---- the choice ----------------------------------------------------------------------------

    def _choose(
        self, logits: torch.Tensor, rows: Sequence[Row], steps: SamplingSteps
    ) -> torch.Tensor:
        """Return each row's token, int64 [R]. logits: float32 [R, V], processed; overwritten."""
        if not steps.draws:
            return self._greedy(logits)
        if self._draw is not None and steps.keeps_all:
            return self._draw(logits, torch.arange(len(logits)), *_chances(rows))
        best = logits.amax(dim=-1, keepdim=True)
        numbers = self._upload(np.array([self._numbers(row) for row in rows], dtype=np.float64))
        uniforms, temperature, top_k, top_p, min_p, typical_p = torch.split(numbers, 1, dim=-1)
        # Subtracting the largest logit first avoids overflow with a small temperature.
        scaled = logits.sub_(best).div_(temperature.float())
        params = [row.request.spec.sampling for row in rows]
        highest_k = max(map(self._top_k, params))
        has_top_k = any(0 < p.top_k < self._vocab_size for p in params)
        has_top_p = any(p.top_p < 1.0 for p in params)
        filters = Filters(
            top_k=top_k.to(torch.int64) if has_top_k else None,
            max_top_k=highest_k,
            top_p=top_p if has_top_p else None,
            min_p=min_p.float() if steps.min_p else None,
            typical_p=typical_p if steps.typical else None,
        )
        tokens = ops.draw(filtered_weights(scaled, filters, self._bound), uniforms)
        return valid(tokens, best.squeeze(-1))

    def _numbers(self, row: Row) -> tuple[float, ...]:
        params = row.request.spec.sampling
        return (
            *chance(row),
            self._top_k(params),
            params.top_p,
            params.min_p,
            params.typical_p,
        )

    def _top_k(self, params: SamplingParams) -> int:
        return min(params.top_k or self._vocab_size, self._vocab_size)

    # ---- log-probabilities ---------------------------------------------------------------------

    def _logprobs(
        self, logits: torch.Tensor, tokens: torch.Tensor, requests: Sequence[Request]
    ) -> list[tuple[Sequence[int], Sequence[LogprobParams], RowLogprobs]]:
        asked = [(row, p) for row, q in enumerate(requests) if (p := q.spec.logprobs) is not None]
        pieces: list[tuple[Sequence[int], Sequence[LogprobParams], RowLogprobs]] = []
        for piece in _pieces(len(asked), self._chunk):
            rows = [row for row, _ in asked[piece]]
            wanted = [params for _, params in asked[piece]]
            requested = np.zeros((len(rows), max(len(p.token_ids) for p in wanted)), np.int64)
            for place, params in enumerate(wanted):
                requested[place, : len(params.token_ids)] = params.token_ids.array
            index = self._upload(rows)
            computed = row_logprobs(
                logits.index_select(0, index).float(),
                tokens.index_select(0, index).clamp_(min=0),
                max(params.top_n for params in wanted),
                self._upload(requested),
            )
            pieces.append((rows, wanted, computed))
        return pieces

    # ---- helpers -------------------------------------------------------------------------------

    def _upload(self, values: npt.ArrayLike) -> torch.Tensor:
        """Copy to the device, without waiting for it."""
        return to_device(values, self._device)


def _chances(rows: Sequence[Row]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float32]]:
    uniforms, temperatures = zip(*map(chance, rows), strict=True)
    return np.array(uniforms, dtype=np.float64), np.array(temperatures, dtype=np.float32)


def _pieces(count: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, count, size))
