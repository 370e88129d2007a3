"""Recurrences of layers, for the native kernels: their tensors, and a step's states.

module ─ convolution, rates, norm ─▶ RecurrentSpec ─┐
StepStates ─ rows, slots ─▶ BoundStates ────────────┴─▶ layers(…), or recur(…) alone
"""

from __future__ import annotations

import ctypes

import torch

from engine.attention.step_states import StateKind, StepStates
from engine.models import description as described
from engine.models.formats.native import DTYPES, native_library
from engine.models.layer_parts import UnboundError
from engine.models.native_tensors import Held
from engine.models.recurrence import WIDEST, check_state, state_rows
from engine.native.library import (
    DELTA_NET,
    SHORT_CONVOLUTION,
    LayerSpec,
    LayerStates,
    RecurrentCall,
    RecurrentSpec,
)


def bind_recurrence(held: Held, spec: LayerSpec, one: described.Recurrence, width: int) -> None:
    """Add a recurrence and its linear layers to a layer's spec.

    width: the number of elements per token between layers.

    Raises:
        UnboundError: the tensors are not packed, or not in the kernels' format.
    """
    if not 2 <= one.width <= WIDEST:
        raise UnboundError(
            f"{one.module} convolves {one.width} tokens: 2 to {WIDEST} are supported"
        )
    recurrent = RecurrentSpec(
        weight=held.parameter(one.convolution, "weight", (one.channels, 1, one.width)),
        bias=held.parameter(one.convolution, "bias", (one.channels,)),
        channels=one.channels,
        width=one.width,
    )
    if isinstance(one, described.ShortConvolution):
        spec.mixer, made, mixed = SHORT_CONVOLUTION, 3 * one.channels, one.channels
    else:
        spec.mixer, mixed = DELTA_NET, one.heads * one.value_dim
        made = one.channels + mixed + 2 * one.heads
        recurrent.log_rate = held.parameter(one.module, one.log_rate, (one.heads,))
        recurrent.rate_bias = held.parameter(one.module, one.rate_bias, (one.heads,))
        recurrent.norm = held.norm(one.norm)
        recurrent.num_key_heads, recurrent.num_heads = one.key_heads, one.heads
        recurrent.key_dim, recurrent.value_dim = one.key_dim, one.value_dim
        recurrent.groups, recurrent.beta_factor = one.groups, one.beta_factor
        if one.norm.width != one.value_dim or one.norm.form != "rounded_first":
            raise UnboundError(f"{one.norm.module} is not a norm of each head")
    spec.recurrent = recurrent
    held.project(spec, one.projection, width, made)
    spec.output = held.linears([one.output], mixed, width)[0]


class BoundStates:
    """The states of a step, for the kernels.

    Attributes:
        rows: which rows are whose, and where each request's state is.
    """

    def __init__(self, states: StepStates, tokens: int) -> None:
        """Take a step's states. tokens: the number of the step's rows."""
        self._tensors = {(one.layer, one.kind): state for one, state in states.tensors.items()}
        self._numbers = [torch.tensor(one) for one in (states.starts, states.counts, states.slots)]
        slots = min(len(one) for one in states.tensors.values())
        self.rows = state_rows(tokens, slots, *self._numbers)

    def of(self, layer: described.Layer) -> LayerStates:
        """Return the states of a layer.

        Raises:
            ValueError: the layer's states have other shapes.
        """
        one = layer.mixer
        if isinstance(one, described.Attention):
            raise TypeError(f"{layer.module} attends, and carries no state")
        inputs = self._state(layer, "conv")
        kept = inputs.shape[-1]
        check_state(inputs, (one.channels, kept))
        if not one.width - 1 <= kept <= WIDEST:
            raise ValueError(f"{layer.module} keeps {kept} inputs, for {one.width} weights")
        found = LayerStates(
            inputs=inputs.data_ptr(),
            inputs_stride=inputs.stride(0),
            inputs_width=kept,
            inputs_dtype=DTYPES[inputs.dtype],
        )
        if isinstance(one, described.DeltaNet):
            matrices = self._state(layer, "recurrent")
            check_state(matrices, (one.heads, one.key_dim, one.value_dim))
            if matrices.dtype is not torch.float32:
                raise ValueError(f"{layer.module} has a state of {matrices.dtype}, not float32")
            found.matrices, found.matrices_stride = matrices.data_ptr(), matrices.stride(0)
        return found

    def _state(self, layer: described.Layer, kind: StateKind) -> torch.Tensor:
        if (layer.index, kind) not in self._tensors:
            raise ValueError(f"{layer.module} needs a {kind} state, and the step has none")
        return self._tensors[layer.index, kind]


def recur(
    spec: LayerSpec, layer: described.Layer, projected: torch.Tensor, states: StepStates
) -> torch.Tensor:
    """Compute a layer's recurrence alone, without the norm of a delta net: [T, N] → [T, width]."""
    bound, library = BoundStates(states, len(projected)), native_library()
    of_layer, own = bound.of(layer), projected.clone()
    made = own.new_empty((len(own), spec.output.inputs))
    scratch = own.new_empty(
        len(own) * library.recurrent_scratch(ctypes.byref(spec)), dtype=torch.uint8
    )
    call = RecurrentCall(
        rows=ctypes.addressof(bound.rows),
        states=ctypes.addressof(of_layer),
        projected=own.data_ptr(),
        output=made.data_ptr(),
        scratch=scratch.data_ptr(),
        threads=torch.get_num_threads(),
    )
    library.recur(ctypes.byref(spec), ctypes.byref(call))
    return made


def gated_norm(spec: LayerSpec, mixed: torch.Tensor, projected: torch.Tensor) -> torch.Tensor:
    """Apply the norm of a delta net, and its gate: [T, H * V] → the same shape."""
    made, projected = mixed.clone(), projected.contiguous()
    native_library().gated_norm(
        ctypes.byref(spec), made.data_ptr(), projected.data_ptr(), len(made),
        torch.get_num_threads(),
    )  # fmt: skip
    return made
