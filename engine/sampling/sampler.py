"""Samples one token for each row of a step's logits, by each request's own parameters.

    logits ─▶ logit_bias ─▶ repetition, presence, frequency penalty ─▶ no_repeat_ngram
           ─▶ banned ids, allowed ids, grammar ─▶ ending tokens kept out (min_tokens)
           ─▶ temperature ─▶ top_k ─▶ top_p ─▶ min_p ─▶ typical_p ─▶ one uniform number ─▶ token

The order is that of transformers' `generate`: logits are changed before the distribution is
filtered. Among the steps that only forbid tokens the order makes no difference, except that
min_tokens comes last: it forbids ending tokens only if another token is left.

Rows that need the same steps are computed together; a greedy row that needs nothing else is one
argmax, and on a CPU a draw without filters is one kernel (see `engine.sampling.drawing`). How rows
are grouped and split does not change their tokens (see `engine.sampling.ops`). Log-probabilities
are taken from the model's unchanged logits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.outputs import TokenLogprobs
from engine.request import Request
from engine.sampling import ops
from engine.sampling.drawing import choose_draw
from engine.sampling.filters import Filters, filtered_weights
from engine.sampling.greedy import choose_greedy, valid
from engine.sampling.logprobs import RowLogprobs, row_logprobs
from engine.sampling.plan import (
    ARGMAX,
    DRAW,
    ChoiceState,
    Row,
    has_lists,
    holds_back_endings,
    steps_of,
)
from engine.sampling.random import uniform
from engine.sampling_params import LogprobParams, SamplingParams, SamplingSteps
from engine.transfer import to_device
from engine.types import RequestKey, TokenId

_CHUNK_ON_CPU = 1 << 19
"""How many logits are processed at a time on a CPU, so that they fit in its caches."""
_CHUNK_ON_DEVICE = 1 << 25
"""The same on other devices; limits the memory of intermediate results, some 30 bytes per logit."""
_LEAST_TEMPERATURE = float(np.finfo(np.float32).tiny)
_LEAST_REPETITION_PENALTY = 1e-30
"""A smaller one has the same effect, and divided by it a logit is no finite float32."""
_FORBIDDEN = float("-inf")


class SampledRows:
    """The tokens of a step's rows, which may still be being computed.

    Attributes:
        token_ids: int64 [R] on the device; INVALID_TOKEN for a row without a valid token.
    """

    __slots__ = ("_logprobs", "token_ids")

    def __init__(
        self,
        token_ids: torch.Tensor,
        logprobs: Sequence[tuple[Sequence[int], Sequence[LogprobParams], RowLogprobs]],
    ) -> None:
        """logprobs: pieces of (rows, what to report for each, the values)."""
        self.token_ids = token_ids
        self._logprobs = logprobs

    def copied(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> SampledRows:
        """The same rows, with every tensor replaced by its copy on the host. If the copies are
        asynchronous, call `result` only when they are complete.
        """
        return SampledRows(
            copy(self.token_ids),
            [(rows, wanted, computed.copied(copy)) for rows, wanted, computed in self._logprobs],
        )

    def result(self) -> tuple[list[TokenId], list[TokenLogprobs | None] | None]:
        """Wait for the tokens; see `Sampler.sample`."""
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
        """vocab_size: the logits' width."""
        self._vocab_size = vocab_size
        self._device = device
        self._states: dict[RequestKey, ChoiceState] = {}
        self._greedy = choose_greedy(device)
        self._draw = choose_draw(device)
        self._mask_table = ops.mask_table(device)
        entries = _CHUNK_ON_CPU if device.type == "cpu" else _CHUNK_ON_DEVICE
        self._chunk = max(1, entries // vocab_size)

    def release(self, key: RequestKey) -> None:
        """Drop the state of a choice. Harmless if it has none."""
        self._states.pop(key, None)

    def sample(
        self, logits: torch.Tensor, requests: Sequence[Request]
    ) -> tuple[list[TokenId], list[TokenLogprobs | None] | None]:
        """Choose a token for each row.

        Args:
            logits: [R, V] in the model's dtype, on the device.
            requests: R requests, one a row.

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

        Everything needed from the requests is read before this returns. If they have got tokens or
        ended since the step was launched, `lengths` says how many tokens come before the one that
        is chosen; None: as many as they have.
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
        """Each row's token, int64 [R]; rows with the same steps are computed together."""
        tokens = torch.empty(len(rows), dtype=torch.int64, device=self._device)
        groups: dict[SamplingSteps, list[int]] = {}
        for place, steps in enumerate(kinds):
            groups.setdefault(steps, []).append(place)
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
            masks = self._masks(group) if steps.masks else None
            for piece in _pieces(len(places), self._chunk):
                index = self._upload(places[piece])
                part = logits.index_select(0, index).float()
                self._process(part, group[piece], steps, None if masks is None else masks[piece])
                chosen = self._choose(part, group[piece], steps)
                tokens.index_copy_(0, index, chosen)
        return tokens

    def token_logprobs(
        self, logits: torch.Tensor, token_ids: Sequence[int], top_n: int
    ) -> list[TokenLogprobs]:
        """The log-probabilities of given tokens, such as a prompt's.

        Args:
            logits: [R, V] from the model, on the device; row i belongs to the position before token
                i.
            token_ids: R ids below V.
            top_n: how many most likely candidates to report with each.
        """
        entries: list[TokenLogprobs] = []
        for piece in _pieces(len(token_ids), self._chunk):
            part = token_ids[piece]
            none = torch.empty((len(part), 0), dtype=torch.int64, device=self._device)
            computed = row_logprobs(logits[piece].float(), self._upload(part), top_n, none)
            entries += computed.entries([top_n] * len(part), [()] * len(part))
        return entries

    # ---- what changes logits -------------------------------------------------------------------

    def _process(
        self,
        logits: torch.Tensor,
        rows: Sequence[Row],
        steps: SamplingSteps,
        masks: torch.Tensor | None,
    ) -> None:
        """Apply all steps before temperature, in place. logits: float32 [R, V], contiguous."""
        if steps.edits:
            self._add_bias(logits, rows)
            self._penalize(logits, rows)
            self._forbid_repetition(logits, rows)
        if masks is not None:
            ops.apply_masks(logits, masks, self._mask_table)
        if steps.edits:
            self._hold_back_endings(logits, rows)

    def _add_bias(self, logits: torch.Tensor, rows: Sequence[Row]) -> None:
        biases = [row.request.spec.sampling.logit_bias for row in rows]
        if any(biases):
            _, places = self._places([bias.ids for bias in biases])
            values = np.concatenate([bias.values for bias in biases]).astype(np.float32)
            logits.view(-1).index_add_(0, places, self._upload(values))

    def _penalize(self, logits: torch.Tensor, rows: Sequence[Row]) -> None:
        penalized = [i for i, row in enumerate(rows) if row.request.spec.sampling.has_penalties]
        if not penalized:
            return
        histories = []
        for i in penalized:
            request, length = rows[i]
            history = self._state(request).counts
            if history is not None:
                history.catch_up(request.token_ids, length)
                histories.append(history)
        lengths = [len(history.ids) for history in histories]
        offsets = np.repeat(np.array(penalized, dtype=np.int64) * self._vocab_size, lengths)
        places = self._upload(np.concatenate([history.ids for history in histories]) + offsets)
        counts = self._upload(np.concatenate([history.counts for history in histories]))
        params = [rows[i].request.spec.sampling for i in penalized]
        factors = np.array(
            [
                (
                    max(p.repetition_penalty, _LEAST_REPETITION_PENALTY),
                    p.presence_penalty,
                    p.frequency_penalty,
                )
                for p in params
            ],
            dtype=np.float32,
        )
        repetition, presence, frequency = self._upload(np.repeat(factors, lengths, axis=0).T)
        flat = logits.view(-1)
        seen = flat.index_select(0, places)
        flat.index_copy_(0, places, ops.penalize(seen, counts, repetition, presence, frequency))

    def _forbid_repetition(self, logits: torch.Tensor, rows: Sequence[Row]) -> None:
        """Forbid tokens that would complete an n-gram that already occurred."""
        repeating: list[Sequence[int]] = []
        for request, length in rows:
            ngrams = None
            if request.spec.sampling.no_repeat_ngram_size:
                ngrams = self._state(request).ngrams
            if ngrams is not None:
                ngrams.catch_up(request.token_ids, length)
            repeating.append(ngrams.repeating() if ngrams is not None else ())
        if any(repeating):
            _, places = self._places(repeating)
            logits.view(-1).index_fill_(0, places, _FORBIDDEN)

    def _hold_back_endings(self, logits: torch.Tensor, rows: Sequence[Row]) -> None:
        """Forbid the ending tokens of requests that are still too short, unless a row has no other
        token left.
        """
        endings = [
            tuple(row.request.ending_token_ids) if holds_back_endings(*row) else () for row in rows
        ]
        if not any(endings):
            return
        owners, places = self._places(endings)
        flat = logits.view(-1)
        before = flat.index_select(0, places)
        flat.index_fill_(0, places, _FORBIDDEN)
        nothing_left = logits.amax(dim=-1) == _FORBIDDEN
        after = before.masked_fill(~nothing_left.index_select(0, owners), _FORBIDDEN)
        flat.index_copy_(0, places, after)

    def _masks(self, rows: Sequence[Row]) -> torch.Tensor:
        """The allowed ids of each row as bits: uint8 [R, 4 * ceil(V / 32)]."""
        packed = np.zeros((len(rows), ops.mask_width(self._vocab_size)), dtype=np.int32)
        for bits, (request, _) in zip(packed, rows, strict=True):
            if request.matcher is None:
                bits[:] = -1
            else:
                # Tokens that the matcher does not cover, because the tokenizer lacks them, stay 0.
                request.matcher.fill_mask(bits)
            listed = self._state(request).mask if has_lists(request) else None
            if listed is not None:
                bits &= listed
        return self._upload(packed.view(np.uint8))

    # ---- the choice ----------------------------------------------------------------------------

    def _choose(
        self, logits: torch.Tensor, rows: Sequence[Row], steps: SamplingSteps
    ) -> torch.Tensor:
        """Each row's token, int64 [R]. logits: float32 [R, V], processed; overwritten."""
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
        tokens = ops.draw(filtered_weights(scaled, filters), uniforms)
        return valid(tokens, best.squeeze(-1))

    def _numbers(self, row: Row) -> tuple[float, ...]:
        params = row.request.spec.sampling
        return (
            *_chance(row),
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

    def _state(self, request: Request) -> ChoiceState:
        state = self._states.get(request.key)
        if state is None:
            state = self._states[request.key] = ChoiceState(request, self._vocab_size)
        return state

    def _places(self, ids: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of the given tokens, and their indices in the flattened logits."""
        rows = np.repeat(np.arange(len(ids)), [len(row_ids) for row_ids in ids])
        tokens = np.fromiter(itertools.chain.from_iterable(ids), np.int64, len(rows))
        return self._upload(rows), self._upload(rows * self._vocab_size + tokens)

    def _upload(self, values: npt.ArrayLike) -> torch.Tensor:
        """Copy to the device, without waiting for it."""
        return to_device(values, self._device)


def _chance(row: Row) -> tuple[float, float]:
    """The uniform number and the temperature of a row's draw."""
    request, length = row
    params = request.spec.sampling
    number = uniform(params.seed, request.choice, length - request.num_prompt_tokens)
    return number, max(params.temperature, _LEAST_TEMPERATURE)


def _chances(rows: Sequence[Row]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float32]]:
    uniforms, temperatures = zip(*map(_chance, rows), strict=True)
    return np.array(uniforms, dtype=np.float64), np.array(temperatures, dtype=np.float32)


def _pieces(count: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, count, size))
