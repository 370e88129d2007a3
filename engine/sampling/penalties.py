"""Repetition, presence and frequency penalties, based on the tokens that each choice has seen.

choose_penalties ─┬▶ OnHost     on a CPU: a list of the tokens that were seen; only their logits are
                  │             touched
                  └▶ OnDevice   elsewhere: a table of counts on the device, [slots, V], to which a
                                step adds the tokens that it samples

With OnDevice, the next token can be chosen before the host knows the previous one, and the host's
work per step does not grow with the number of tokens seen.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from engine.contract.request import Request
from engine.contract.types import RequestKey
from engine.native.device_copy import to_device
from engine.sampling import ops
from engine.sampling.history import TokenCounts
from engine.sampling.sampling_rows import Row

_LEAST_REPETITION_PENALTY = 1e-30
"""The smallest repetition penalty that is used. A smaller one would have the same effect, but
dividing a logit by it would not give a finite float32.
"""
_FIRST_SLOTS = 8
"""The number of slots of a table when it first grows."""


class Penalties(Protocol):
    """Applies penalties to logits. All rows passed in are of requests with penalties.

    Attributes:
        needs_host_tokens: whether all previous tokens must be on the host before the next one is
            chosen.
    """

    needs_host_tokens: bool

    def prepare(self, rows: Sequence[Row]) -> None:
        """Count the tokens that were seen so far. Called once per step with all its rows, before
        the other methods.
        """
        ...

    def apply(self, logits: torch.Tensor, places: Sequence[int], rows: Sequence[Row]) -> None:
        """Change logits in place: float32 [R, V]. `places`: the rows' indices in the logits."""
        ...

    def chosen(self, rows: Sequence[Row], tokens: torch.Tensor) -> None:
        """Count the tokens that were chosen for rows: int64, INVALID_TOKEN if none was."""
        ...

    def release(self, key: RequestKey) -> None:
        """Drop the state of a choice. Does nothing if there is none."""
        ...


def choose_penalties(vocab_size: int, device: torch.device) -> Penalties:
    """Return the implementation for a device."""
    return OnHost(vocab_size) if device.type == "cpu" else OnDevice(vocab_size, device)


class OnHost(Penalties):
    """Penalties for logits on a CPU, with the counts on the host."""

    needs_host_tokens = True

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._counts: dict[RequestKey, TokenCounts] = {}

    @override
    def prepare(self, rows: Sequence[Row]) -> None:
        for request, length in rows:
            counts = self._counts.get(request.key)
            if counts is None:
                counts = self._counts[request.key] = TokenCounts(request.spec.prompt)
            counts.catch_up(request.token_ids, length)

    @override
    def apply(self, logits: torch.Tensor, places: Sequence[int], rows: Sequence[Row]) -> None:
        histories = [self._counts[row.request.key] for row in rows]
        lengths = [len(history.ids) for history in histories]
        offsets = np.repeat(np.array(places, dtype=np.int64) * self._vocab_size, lengths)
        ids = torch.from_numpy(np.concatenate([history.ids for history in histories]) + offsets)
        counts = torch.from_numpy(np.concatenate([history.counts for history in histories]))
        repetition, presence, frequency = torch.from_numpy(
            np.repeat(_factors(rows).T, lengths, axis=1)
        )
        flat = logits.view(-1)
        seen = flat.index_select(0, ids)
        flat.index_copy_(0, ids, ops.penalize(seen, counts, repetition, presence, frequency))

    def chosen(self, rows: Sequence[Row], tokens: torch.Tensor) -> None:
        """Do nothing: tokens are counted once they are in the requests."""

    @override
    def release(self, key: RequestKey) -> None:
        self._counts.pop(key, None)


@dataclass(slots=True)
class _Slot:
    """A choice's row of the table.

    Attributes:
        index: the row.
        request: the choice.
        length: how many of its tokens are counted, prompt and output.
    """

    index: int
    request: Request
    length: int


class OnDevice(Penalties):
    """Penalties with a table of counts on the device. A token's entry is 2 for each occurrence in
    the output, plus 1 if it was in the prompt.

    A choice's slot is filled from the host's tokens when it is first assigned. It is filled again
    if its token count does not match the choice's, because a failed step had sampled a token. The
    slot of a choice that is not in the step may be reassigned if all the choice's tokens are on the
    host. So there are at most as many slots as there are rows in two steps.
    """

    needs_host_tokens = False

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._table = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._slots: OrderedDict[RequestKey, _Slot] = OrderedDict()  # least recently used first
        self._free: list[int] = []

    @override
    def prepare(self, rows: Sequence[Row]) -> None:
        missing = []
        for row in rows:
            slot = self._slots.get(row.request.key)
            if slot is None:
                missing.append(row)
                continue
            self._slots.move_to_end(row.request.key)
            if slot.length != row.length:
                self._fill(slot, row.length)
        if missing:
            self._make_room(len(missing), {row.request.key for row in rows})
        for request, length in missing:
            slot = self._slots[request.key] = _Slot(self._free.pop(), request, length)
            self._fill(slot, length)

    @override
    def apply(self, logits: torch.Tensor, places: Sequence[int], rows: Sequence[Row]) -> None:
        slots = [self._slots[row.request.key].index for row in rows]
        where = to_device(np.array([places, slots], dtype=np.int64), self._device)
        factors = to_device(_factors(rows), self._device)
        repetition, presence, frequency = torch.split(factors, 1, dim=-1)
        entries = self._table.index_select(0, where[1])
        part = logits.index_select(0, where[0])
        counts = (entries >> 1).float()
        penalized = ops.penalize(part, counts, repetition, presence, frequency)
        logits.index_copy_(0, where[0], torch.where(entries > 0, penalized, part))

    @override
    def chosen(self, rows: Sequence[Row], tokens: torch.Tensor) -> None:
        slots = []
        for request, length in rows:
            slot = self._slots[request.key]
            slot.length = length + 1
            slots.append(slot.index)
        offsets = to_device(np.array(slots, dtype=np.int64) * self._table.shape[1], self._device)
        # A request without a valid token ends; what its slot holds does not matter any more.
        added = torch.full_like(tokens, 2, dtype=torch.int32)
        self._table.view(-1).index_add_(0, offsets + tokens.clamp(min=0), added)

    @override
    def release(self, key: RequestKey) -> None:
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._free.append(slot.index)

    def _make_room(self, count: int, wanted: set[RequestKey]) -> None:
        """Make `count` slots free. `wanted`: choices that keep their slots."""
        for key, slot in list(self._slots.items()):
            if len(self._free) >= count:
                return
            if key not in wanted and not slot.request.num_pending_tokens:
                self.release(key)
        have, size = self._table.shape
        needed = have + count - len(self._free)
        if needed > have:
            grown = max(needed, 2 * have, _FIRST_SLOTS)
            table = torch.zeros((grown, size), dtype=torch.int32, device=self._device)
            table[:have] = self._table
            self._table = table
            self._free += range(have, grown)

    def _fill(self, slot: _Slot, length: int) -> None:
        """Count a choice's first `length` tokens, which must all be on the host."""
        ids, entries = _entries(slot.request, length)
        row = self._table[slot.index]
        row.zero_()
        row.index_copy_(0, to_device(ids, self._device), to_device(entries, self._device))
        slot.length = length


def _entries(request: Request, length: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Return the tokens that were seen, without duplicates, and their table entries."""
    tokens = np.array(request.token_ids[:length], dtype=np.int64)
    end = request.num_prompt_tokens
    ids, places = np.unique(tokens, return_inverse=True)
    entries = np.zeros(len(ids), dtype=np.int32)
    entries[places[:end]] = 1
    np.add.at(entries, places[end:], 2)
    return ids, entries


def _factors(rows: Sequence[Row]) -> npt.NDArray[np.float32]:
    """Return the repetition, presence and frequency penalty of each row: [R, 3]."""
    params = [row.request.spec.sampling for row in rows]
    return np.array(
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
