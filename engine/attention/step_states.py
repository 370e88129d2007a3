"""The states of recurrent layers: their shapes, their tensors, and a step's view of them.

    layer ─ conv state 0, 1 … ──────┐    one slot for each running request: [slots, ...] a state,
          └ recurrent state 0, 1 … ─┴──▶ slot 0 is the null slot, as block 0 of a cache is

A recurrent layer carries a state from token to token instead of keeping every token's keys and
values. In transformers it reads and writes that state through the model's cache, by layer and
index. `StepStates` takes the place of that cache in a step: it is passed to the model's forward,
and says which rows of the step are whose, and in which slot each request's state lies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

StateKind = Literal["conv", "recurrent"]


@dataclass(frozen=True, slots=True)
class StateShape:
    """One state of a layer, as the model's own code made it.

    Attributes:
        layer: the layer's index.
        kind: whether it holds the last inputs of a convolution, or a recurrence.
        index: which of the layer's states of this kind it is.
        shape: of one request's state.
        dtype: its type, which need not be the model's.
    """

    layer: int
    kind: StateKind
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of one request's state."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Recurrence:
    """What was observed of a model's recurrent layers.

    Attributes:
        keyword: the argument of the model's forward that takes its cache; "" if nothing recurs.
        shapes: all states.
        modules: the modules that read and write states, by path. For each tensor of a module's
            result, the dimension that counts tokens.
        forgetting: the paths of those that begin anew with every row of several tokens, whatever
            state there is. They go on with one token after the other.
    """

    keyword: str = ""
    shapes: tuple[StateShape, ...] = ()
    modules: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    forgetting: frozenset[str] = frozenset()

    def described(self) -> str:
        """Say what recurs, for the log."""
        text = (
            f"recurrent layers: {len(self.layers)}, {self.slot_bytes / 2**20:.2f} MiB of state a "
            "request"
        )
        if self.forgetting:
            text += "; their code goes on with a prompt token by token after its first chunk"
        return text

    def in_float32(self) -> Recurrence:
        """Return the same with states in float32."""
        shapes = tuple(replace(one, dtype=torch.float32) for one in self.shapes)
        return replace(self, shapes=shapes)

    @property
    def layers(self) -> tuple[int, ...]:
        """The indices of the layers with states."""
        return tuple(sorted({one.layer for one in self.shapes}))

    @property
    def slot_bytes(self) -> int:
        """The bytes of all states of one request."""
        return sum(one.nbytes for one in self.shapes)


NOTHING_RECURS = Recurrence()

StateTensors = Mapping[StateShape, torch.Tensor]
"""For each state its tensor, [slots, *shape]."""


class RequestStates:
    """One request's states in a step, with the methods of transformers' cache that recurrent
    layers call.

    A request that computes its first token has no earlier state, whatever its slot holds. Every
    state that a step writes is written to the slot in place.
    """

    def __init__(self, tensors: StateTensors, slot: int, *, is_first: bool) -> None:
        """Take a request's slot. is_first: whether the step computes its first token."""
        self._states = {
            (shape.layer, shape.kind, shape.index): tensor[slot : slot + 1]
            for shape, tensor in tensors.items()
        }
        self._is_first = is_first
        self._written: set[tuple[int, int]] = set()

    def has_previous_state(self, layer_idx: int, state_idx: int = 0) -> bool:
        """Return whether earlier tokens have left a state."""
        return not self._is_first or (layer_idx, state_idx) in self._written

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return a layer's last inputs, [1, ...], which may be written in place. None if there are
        none yet.
        """
        return self._previous(layer_idx, "conv", state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return a layer's recurrent state, [1, ...], which may be written in place. None if there
        is none yet.
        """
        return self._previous(layer_idx, "recurrent", state_idx)

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> torch.Tensor:
        """Append a layer's next inputs, [1, ..., T], to those that are kept, and keep the last.

        Returns:
            All of them, those that were kept first. At a request's beginning they are padded with
            zeros to as many as are kept.
        """
        kept = self._states[layer_idx, "conv", state_idx]
        width = kept.shape[-1]
        if self.has_previous_state(layer_idx, state_idx):
            conv_states = torch.cat([kept, conv_states], dim=-1)
        elif conv_states.shape[-1] < width:
            missing = width - conv_states.shape[-1]
            conv_states = torch.nn.functional.pad(conv_states, (missing, 0))
        self._written.add((layer_idx, state_idx))
        kept.copy_(conv_states[..., -width:])
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> torch.Tensor:
        """Replace a layer's recurrent state, [1, ...]."""
        kept = self._states[layer_idx, "recurrent", state_idx]
        return kept.copy_(recurrent_states.view(kept.shape))

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return whether states of earlier tokens are kept, too: they never are."""
        return False

    def _previous(self, layer: int, kind: StateKind, index: int) -> torch.Tensor | None:
        has = self.has_previous_state(layer, index)
        return self._states[layer, kind, index] if has else None


class StepStates:
    """The states of a step's requests. To the model it is a cache that keeps no keys and values.

    Attributes:
        tensors: the states of all slots.
        slots: the slot of each request, in the order of the step's rows.
        starts: the position of each request's first row.
        counts: the number of rows of each request. Rows after the last are padding.
        layer: the index that the last layer to attend has told. Modules that several layers share
            do not know it themselves.
    """

    is_compileable = False

    def __init__(
        self,
        tensors: StateTensors,
        slots: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
    ) -> None:
        self.tensors = tensors
        self.slots, self.starts, self.counts = slots, starts, counts
        self._requests: tuple[RequestStates, ...] | None = None
        self.layer: int | None = None

    @classmethod
    def of(
        cls,
        tensors: StateTensors,
        tables: npt.NDArray[np.integer[Any]],
        starts: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int64],
    ) -> StepStates:
        """Return a step's states. Slots are the first entries of the requests' tables, [R, N]."""
        return cls(tensors, tables[:, 0].tolist(), starts.tolist(), counts.tolist())

    @property
    def requests(self) -> tuple[RequestStates, ...]:
        """Each request's states."""
        if self._requests is None:
            self._requests = tuple(
                RequestStates(self.tensors, slot, is_first=start == 0)
                for slot, start in zip(self.slots, self.starts, strict=True)
            )
        return self._requests

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, **_: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values as they are, because our attention keeps them."""
        self.layer = layer_idx
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0, because positions are given."""
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return 0, because positions are given."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the size of a mask of this step's tokens alone."""
        return query_length, 0

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int = 0) -> bool:
        """Return False, because each request is asked instead."""
        return False


def allocate_states(
    shapes: Iterable[StateShape], slots: int, device: torch.device
) -> dict[StateShape, torch.Tensor]:
    """Return zeroed states of some slots."""
    return {one: torch.zeros((slots, *one.shape), dtype=one.dtype, device=device) for one in shapes}


def find_states(args: Iterable[Any], kwargs: Mapping[str, Any]) -> StepStates | None:
    """Return the states among a module's arguments, or None if there are none."""
    for one in (*args, *kwargs.values()):
        if isinstance(one, StepStates):
            return one
    return None
