"""Samples one token for each row of a step's logits, by each request's own parameters.

    logits ─▶ logit_bias ─▶ ending tokens kept out (min_tokens) ─▶ penalties ─▶ temperature
           ─▶ top_k ─▶ top_p ─▶ min_p ─▶ one uniform number ─▶ token

A batch that is greedy and asks for nothing else is one argmax. Log-probabilities are taken from the
logits as they came from the model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.outputs import TokenLogprobs
from engine.request import Request
from engine.runner_protocol import INVALID_TOKEN
from engine.sampling import ops
from engine.sampling.random import uniform
from engine.types import RequestKey, TokenId


class _History:
    """Which tokens one request has seen; kept only for requests with penalties.

    seen: bool [V]. counts: int32 [V], of the output. num_tokens: how much of token_ids is counted
        in.
    """

    __slots__ = ("counts", "num_tokens", "seen")

    def __init__(self, request: Request, vocab_size: int, device: torch.device) -> None:
        self.seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.counts = torch.zeros(vocab_size, dtype=torch.int32, device=device)
        self.seen[torch.tensor(request.spec.prompt, device=device)] = True
        self.num_tokens = request.num_prompt_tokens

    def catch_up(self, request: Request) -> None:
        """Count in what was generated since."""
        for token in request.token_ids[self.num_tokens :]:
            self.seen[token] = True
            self.counts[token] += 1
        self.num_tokens = len(request.token_ids)


class Sampler:
    """Samples, and keeps the token histories that penalties need: at most one per live request."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._histories: dict[RequestKey, _History] = {}

    def release(self, key: RequestKey) -> None:
        """Forget a choice's history."""
        self._histories.pop(key, None)

    def sample(
        self, logits: torch.Tensor, requests: Sequence[Request]
    ) -> tuple[list[TokenId], list[TokenLogprobs | None] | None]:
        """Choose a token for each row.

        Args:
            logits: [R, V] in the model's dtype, on the device.
            requests: R requests, one a row.

        Returns:
            R tokens (INVALID_TOKEN for a row without finite logits), and their log-probabilities
            where asked for (None if nobody asked).
        """
        raw = logits.float()
        processed = self._process(raw, requests)
        best, tokens = torch.max(processed, dim=-1)
        self._draw(processed, requests, tokens)
        # A row without one finite best logit (NaN, or nothing left to choose) fails alone.
        tokens.masked_fill_(~torch.isfinite(best), INVALID_TOKEN)
        chosen = [TokenId(token) for token in tokens.tolist()]
        if any(request.spec.logprobs is not None for request in requests):
            return chosen, self._logprobs(raw, tokens.clamp(min=0), requests)
        return chosen, None

    def _process(self, logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
        """Bias, minimum length and penalties; returns `logits` itself if nothing applies."""
        biased = [r for r, q in enumerate(requests) if q.spec.sampling.logit_bias]
        held = [
            r
            for r, q in enumerate(requests)
            if q.num_output_tokens < q.spec.stop.min_tokens and q.ending_token_ids
        ]
        penalized = [r for r, q in enumerate(requests) if q.spec.sampling.has_penalties]
        if not (biased or held or penalized):
            return logits
        logits = logits.clone()
        if biased:
            entries = [(r, t, b) for r in biased for t, b in requests[r].spec.sampling.logit_bias]
            rows, columns, values = zip(*entries, strict=True)
            index = (self._tensor(rows), self._tensor(columns))
            logits.index_put_(index, self._tensor(values, torch.float32), accumulate=True)
        if penalized:
            self._penalize(logits, requests, penalized)
        if held:
            pairs = [(r, t) for r in held for t in requests[r].ending_token_ids]
            rows, columns = zip(*pairs, strict=True)
            logits[self._tensor(rows), self._tensor(columns)] = float("-inf")
        return logits

    def _penalize(
        self, logits: torch.Tensor, requests: Sequence[Request], rows: Sequence[int]
    ) -> None:
        """Apply the penalties of `rows`, in place."""
        histories = []
        for row in rows:
            request = requests[row]
            history = self._histories.get(request.key)
            if history is None:
                history = _History(request, self._vocab_size, self._device)
                self._histories[request.key] = history
            history.catch_up(request)
            histories.append(history)
        params = [requests[row].spec.sampling for row in rows]
        index = self._tensor(rows)
        logits[index] = ops.apply_penalties(
            logits[index],
            torch.stack([history.seen for history in histories]),
            torch.stack([history.counts for history in histories]),
            self._column([p.repetition_penalty for p in params]),
            self._column([p.presence_penalty for p in params]),
            self._column([p.frequency_penalty for p in params]),
        )

    def _draw(
        self, logits: torch.Tensor, requests: Sequence[Request], tokens: torch.Tensor
    ) -> None:
        """Replace the greedy tokens of the requests that sample, in place."""
        plain: list[int] = []
        filtered: list[int] = []
        for row, request in enumerate(requests):
            params = request.spec.sampling
            if params.is_greedy:
                continue
            is_plain = params.top_k == 0 and params.top_p == 1.0 and params.min_p == 0.0
            (plain if is_plain else filtered).append(row)
        if plain:
            scaled, uniforms = self._scaled(logits, requests, plain)
            tokens[self._tensor(plain)] = ops.sample_plain(scaled, uniforms)
        if filtered:
            scaled, uniforms = self._scaled(logits, requests, filtered)
            params_of = [requests[row].spec.sampling for row in filtered]
            top_k = [min(p.top_k or self._vocab_size, self._vocab_size) for p in params_of]
            tokens[self._tensor(filtered)] = ops.sample_filtered(
                scaled,
                self._tensor(top_k).unsqueeze(1),
                self._column([p.top_p for p in params_of]),
                self._column([p.min_p for p in params_of]),
                uniforms,
                max(top_k),
            )

    def _scaled(
        self, logits: torch.Tensor, requests: Sequence[Request], rows: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows' logits over their temperatures, and their uniform numbers as float64 [R, 1]."""
        chosen = [requests[row] for row in rows]
        temperatures = self._column([request.spec.sampling.temperature for request in chosen])
        numbers = [uniform(q.spec.sampling.seed, q.choice, q.num_output_tokens) for q in chosen]
        uniforms = self._tensor(numbers, torch.float64).unsqueeze(1)
        rows_logits = logits[self._tensor(rows)]
        # Subtracting the maximum first keeps a tiny temperature from overflowing.
        rows_logits = rows_logits - rows_logits.max(dim=-1, keepdim=True).values
        return rows_logits / temperatures, uniforms

    def _logprobs(
        self, logits: torch.Tensor, tokens: torch.Tensor, requests: Sequence[Request]
    ) -> list[TokenLogprobs | None]:
        rows = [row for row, request in enumerate(requests) if request.spec.logprobs is not None]
        wanted = [requests[row].spec.logprobs for row in rows]
        top_n = max(params.top_n for params in wanted if params is not None)
        index = self._tensor(rows)
        chosen, ranks, ids, values = (
            part.tolist() for part in ops.logprobs_of(logits[index], tokens[index], top_n)
        )
        result: list[TokenLogprobs | None] = [None] * len(requests)
        for place, (row, params) in enumerate(zip(rows, wanted, strict=True)):
            count = params.top_n if params is not None else 0
            candidates = zip(ids[place][:count], values[place][:count], strict=True)
            result[row] = TokenLogprobs(
                logprob=chosen[place],
                rank=ranks[place],
                candidates=tuple((TokenId(token), logprob) for token, logprob in candidates),
            )
        return result

    def _tensor(self, values: Sequence[float], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device)

    def _column(self, values: Sequence[float]) -> torch.Tensor:
        return self._tensor(values, torch.float32).unsqueeze(1)
