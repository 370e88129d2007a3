"""Changes a row's logits before a token is chosen: bias, penalties, repeated n-grams, token lists,
grammars and min_tokens. Also keeps the state that these need between steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.contract.request import Request, TokenMatcher
from engine.contract.sampling_params import SamplingSteps
from engine.contract.types import RequestKey, TokenId
from engine.native.device_copy import to_device
from engine.sampling import ops
from engine.sampling.penalties import choose_penalties
from engine.sampling.sampling_rows import ChoiceState, Row, has_lists, holds_back_endings

_FORBIDDEN = float("-inf")


class LogitEdits:
    """Edits logits, and keeps the state of each live choice until its `release`."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        """vocab_size: the width of the logits."""
        self._vocab_size = vocab_size
        self._device = device
        self._states: dict[RequestKey, ChoiceState] = {}
        self._penalties = choose_penalties(vocab_size, device)
        self._mask_table = ops.mask_table(device)

    def needs_host_tokens(self, request: Request) -> bool:
        """Whether a request's next token can be chosen only once the tokens before it are on the
        host.
        """
        if request.matcher is not None or request.spec.sampling.no_repeat_ngram_size:
            return True
        return self._penalties.needs_host_tokens and request.spec.sampling.has_penalties

    def release(self, key: RequestKey) -> None:
        """Drop the state of a choice. Does nothing if there is none."""
        self._states.pop(key, None)
        self._penalties.release(key)

    def prepare(self, rows: Sequence[Row]) -> None:
        """Begin a step. `rows`: all rows of the step that need edits."""
        penalized = [row for row in rows if row.request.spec.sampling.has_penalties]
        if penalized:
            self._penalties.prepare(penalized)

    def apply(
        self,
        logits: torch.Tensor,
        rows: Sequence[Row],
        steps: SamplingSteps,
        masks: torch.Tensor | None,
    ) -> None:
        """Apply all steps that come before temperature, in place.

        Args:
            logits: float32 [R, V], contiguous.
            rows: R rows of a step that `prepare` has begun.
            steps: the operations that the rows need.
            masks: the rows' masks from `masks`, or None if they need none.
        """
        if steps.edits:
            self._add_bias(logits, rows)
            penalized = [i for i, row in enumerate(rows) if row.request.spec.sampling.has_penalties]
            if penalized:
                self._penalties.apply(logits, penalized, [rows[i] for i in penalized])
            self._forbid_repetition(logits, rows)
        if masks is not None:
            ops.apply_masks(logits, masks, self._mask_table)
        if steps.edits:
            self._hold_back_endings(logits, rows)

    def chosen(self, rows: Sequence[Row], tokens: torch.Tensor) -> None:
        """Record the tokens that were chosen for rows: int64 [R]."""
        penalized = [i for i, row in enumerate(rows) if row.request.spec.sampling.has_penalties]
        if len(penalized) == len(rows):
            self._penalties.chosen(rows, tokens)
        elif penalized:
            index = to_device(np.array(penalized, dtype=np.int64), self._device)
            self._penalties.chosen([rows[i] for i in penalized], tokens.index_select(0, index))

    def masks(self, rows: Sequence[Row]) -> torch.Tensor:
        """Return the allowed ids of each row as bits: uint8 [R, 4 * ceil(V / 32)]."""
        packed = np.zeros((len(rows), ops.mask_width(self._vocab_size)), dtype=np.int32)
        ahead: dict[RequestKey, _LookAhead] = {}
        for bits, (request, length) in zip(packed, rows, strict=True):
            if request.matcher is None:
                bits[:] = -1
            # Tokens that the matcher does not cover, because the tokenizer lacks them, stay 0.
            elif (num_guessed := length - request.num_tokens) > 0:
                if request.key not in ahead:
                    ahead[request.key] = _LookAhead(request.matcher)
                ahead[request.key].fill_mask(bits, request.drafts[:num_guessed])
            else:
                request.matcher.fill_mask(bits)
            listed = self._state(request).mask if has_lists(request) else None
            if listed is not None:
                bits &= listed
        for one in ahead.values():
            one.charge()
        return to_device(packed.view(np.uint8), self._device)

    def _add_bias(self, logits: torch.Tensor, rows: Sequence[Row]) -> None:
        biases = [row.request.spec.sampling.logit_bias for row in rows]
        if any(biases):
            _, places = self._places([bias.ids for bias in biases])
            values = np.concatenate([bias.values for bias in biases]).astype(np.float32)
            logits.view(-1).index_add_(0, places, to_device(values, self._device))

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
        """Forbid the ending tokens of requests that are still too short, unless the row has no
        other token left.
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

    def _state(self, request: Request) -> ChoiceState:
        state = self._states.get(request.key)
        if state is None:
            state = self._states[request.key] = ChoiceState(request, self._vocab_size)
        return state

    def _places(self, ids: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the row of each given token, and its index in the flattened logits."""
        rows = np.repeat(np.arange(len(ids)), [len(row_ids) for row_ids in ids])
        tokens = np.fromiter(itertools.chain.from_iterable(ids), np.int64, len(rows))
        flat = rows * self._vocab_size + tokens
        return to_device(rows, self._device), to_device(flat, self._device)


class _LookAhead:
    """Fills the masks of the rows that follow a request's drafts."""

    def __init__(self, matcher: TokenMatcher) -> None:
        self._matcher = matcher
        self._copy = matcher.copy()
        self._spent_s = self._copy.spent_s
        self._num_taken = 0
        self._fits = True

    def fill_mask(self, row: npt.NDArray[np.int32], drafts: Sequence[TokenId]) -> None:
        """Write which tokens may follow the drafts; anything if they do not fit, since the row's
        token is then not kept.

        Args:
            row: int32 [ceil(V / 32)], completely overwritten.
            drafts: begin with those of the last call.
        """
        for token in drafts[self._num_taken :]:
            self._fits = self._fits and self._copy.accept(token) and not self._copy.is_complete
        self._num_taken = len(drafts)
        if self._fits:
            self._copy.fill_mask(row)
        else:
            row.fill(-1)

    def charge(self) -> None:
        """Charge what looking ahead has cost."""
        self._matcher.charge(self._copy.spent_s - self._spent_s)
