"""A decoder on the native kernels: all layers of a step in one call of the library.

    ids ─ embedding ─ x ─▶ layers(spec, spec, …) ─ y ─▶ norm ─ output ─▶ logits of the wanted tokens

It replaces the transformers model in a step, and reads the same weights. Recurrent layers are among
the others, and read and write the states of all of the step's requests in their slots. The model's
own embedding, output layer and mixtures of experts are called, so a call of the library ends before
each of them. Everything else is computed here.

The processing of a logit (a factor, a divisor, a softcap) depends only on that logit, and bfloat16
has only 65,536 values. So torch computes the result once for each of them, and the output layer's
kernel looks it up before storing a logit. This saves a pass over the logits and gives the same
bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from typing_extensions import override

from engine.attention.interface import AttentionContext
from engine.attention.native_backend import NativeAttentionBackend, NativeMetadata
from engine.attention.registry import CONTEXT_KEYWORD
from engine.models import description as described
from engine.models.decoder_frame import DecoderFrame, DecoderOutput
from engine.models.formats.native import Native, native_library
from engine.models.held_layer import PackedLinear
from engine.models.layer_parts import Kind
from engine.models.low_rank import layer_tables
from engine.models.native_layer import BoundLayer
from engine.models.native_recurrence import BoundStates
from engine.models.native_tensors import Held
from engine.models.operations import Tables
from engine.native.library import ATTENTION, LayersCall, LayerStates


@dataclass(slots=True)
class _Scratch:
    """Scratch memory that all layers share. It grows to the needs of the largest step."""

    memory: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))

    def of(self, needed: int) -> int:
        """Return the address of at least `needed` bytes."""
        if needed > self.memory.numel():
            self.memory = torch.empty(needed, dtype=torch.uint8)
        return self.memory.data_ptr()


class NativeDecoder(DecoderFrame):
    """Computes a model's steps on the native kernels.

    Only one thread at a time may use it: hold the attention backend's `step_lock`.
    """

    layers: tuple[BoundLayer, ...]
    one_call: Kind = "exact"
    device = torch.device("cpu")

    def __init__(self, model: torch.nn.Module, decoder: described.Decoder) -> None:
        """Bind a description to the tensors of a model whose linear layers are packed.

        Raises:
            UnboundError: the layers are not packed, or not in the kernels' format.
        """
        width = decoder.norm.width
        self.layers = tuple(BoundLayer.of(model, decoder, one, width) for one in decoder.layers)
        super().__init__(model, decoder, self.layers[0].dtype)
        self.backend = NativeAttentionBackend(native_library())
        self._held = Held(model, self.dtype)
        self._norm = self._held.norm(decoder.norm)
        self._finished = self._finish_each() if self.dtype is torch.bfloat16 else None
        self._scratch = _Scratch()
        self._scratch_per_token = max(
            native_library().layer_scratch(ctypes.byref(one.spec), 1) for one in self.layers
        )

    @override
    def refresh(self) -> None:
        super().refresh()
        for layer in self.layers:
            layer.held.refresh()

    def __call__(self, **inputs: Any) -> DecoderOutput:
        """Return a step's logits; see `engine.runner.forward.CausalModel`."""
        x = self.embed(inputs["input_ids"][0])
        x = self.run(
            self.layers, x, self.tables(inputs["position_ids"][0]), inputs[CONTEXT_KEYWORD]
        )
        rows = inputs["logits_to_keep"]
        if isinstance(rows, torch.Tensor):
            x = x.index_select(0, rows)
        return DecoderOutput(self.logits(self.norm(x)).unsqueeze(0))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the output layer, and scale and cap its results, in one pass: [L, K] → [L, V]."""
        layer = self._output
        held = layer.held if isinstance(layer, PackedLinear) else None
        if self._finished is None or not isinstance(held, Native):
            return self.finish(self.output(x))
        return held.multiply(x, layer.padded_bias, self._finished)

    @override
    def tables(self, positions: torch.Tensor) -> list[Tables]:
        """See DecoderFrame. They are float32, even if they were rounded to another type."""
        return [(cos.float(), sin.float()) for cos, sin in super().tables(positions)]

    @override
    def norm(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        width = self.description.norm.width
        native_library().norm(
            ctypes.byref(self._norm), x.data_ptr(), y.data_ptr(), width, len(x),
            self.layers[0].spec.dtype, torch.get_num_threads(),
        )  # fmt: skip
        return y

    @override
    def finish(self, logits: torch.Tensor) -> torch.Tensor:
        if self._finished is None:
            return super().finish(logits)
        return self._finished[logits.contiguous().view(torch.int16).int() & 0xFFFF]

    def _finish_each(self) -> torch.Tensor | None:
        """Return the final logit for each of the 65,536 bfloat16 values, indexed by its bits.

        Return None if logits are used as they are.
        """
        one = self.description
        if one.logits_factor is one.logits_divisor is one.logits_softcap is None:
            return None
        every = torch.arange(2**16).to(torch.uint16).view(torch.bfloat16)
        return super().finish(every)

    @override
    def run(
        self,
        layers: tuple[BoundLayer, ...],
        x: torch.Tensor,
        tables: list[Tables],
        context: AttentionContext,
    ) -> torch.Tensor:
        """Compute some layers: [T, K] → [T, K]. A call of the library ends at each mixture of
        experts.

        Args:
            layers: the layers.
            x: contiguous, in the model's dtype.
            tables: see `tables`.
            context: the context of a step with the native backend.
        """
        backend = context.backend
        if not isinstance(backend, NativeAttentionBackend):
            raise TypeError(f"another backend: {type(backend).__name__}")
        states = None if context.states is None else BoundStates(context.states, len(x))
        for part in _up_to_experts(layers):
            x = self._call(part, x, tables, context, backend, states)
            if part[-1].experts is not None:
                x = part[-1].add_experts(x)
        return x

    def _call(
        self,
        layers: tuple[BoundLayer, ...],
        x: torch.Tensor,
        tables: list[Tables],
        context: AttentionContext,
        backend: NativeAttentionBackend,
        states: BoundStates | None,
    ) -> torch.Tensor:
        addresses = ctypes.c_void_p * len(layers)
        of_groups = [_address(one) for one in context.metadata]
        of_layers = [None if one.spec.mixer == ATTENTION else _states(states, one)
                     for one in layers]  # fmt: skip
        caches = [context.caches[one.description.index] if of_layer is None else None
                  for one, of_layer in zip(layers, of_layers, strict=True)]  # fmt: skip
        specs = addresses(*[ctypes.addressof(one.spec) for one in layers])
        attention = addresses(*[None if one is None else of_groups[one.group] for one in caches])
        keys = addresses(*[None if one is None else one.keys.data_ptr() for one in caches])
        values = addresses(*[None if one is None else one.values.data_ptr() for one in caches])
        recurrent = addresses(*[None if one is None else ctypes.addressof(one)
                                for one in of_layers])  # fmt: skip
        cos, sin = (
            (ctypes.c_void_p * len(tables))(*[one[which].data_ptr() for one in tables])
            for which in (0, 1)
        )
        y = torch.empty_like(x)
        tokens, adapted = len(x), None
        if context.adapters is not None:
            adapted = layer_tables(context.adapters, layers[0].description.index)
        call = LayersCall(
            ctypes.addressof(specs),
            ctypes.addressof(attention),
            ctypes.addressof(keys),
            ctypes.addressof(values),
            ctypes.addressof(recurrent),
            None if states is None else ctypes.addressof(states.rows),
            x.data_ptr(),
            y.data_ptr(),
            ctypes.addressof(cos),
            ctypes.addressof(sin),
            self._scratch.of(tokens * self._scratch_per_token),
            backend.scratch.data_ptr(),
            backend.scratch.numel(),
            tokens,
            len(layers),
            0,
            torch.get_num_threads(),
            None if adapted is None else adapted.address,
        )
        while needed := native_library().layers(ctypes.byref(call)):
            backend.grow_scratch(needed)
            call.attention_scratch = backend.scratch.data_ptr()
            call.attention_floats = backend.scratch.numel()
        return y


def _up_to_experts(layers: tuple[BoundLayer, ...]) -> Iterator[tuple[BoundLayer, ...]]:
    """Split layers after each one that has experts, which the kernels do not compute."""
    start = 0
    for index, one in enumerate(layers):
        if one.experts is not None or index == len(layers) - 1:
            yield layers[start : index + 1]
            start = index + 1


def _states(states: BoundStates | None, layer: BoundLayer) -> LayerStates:
    if states is None:
        raise ValueError(f"{layer.description.module} needs states, and the step has none")
    return states.of(layer.description)


def _address(metadata: object) -> int:
    if not isinstance(metadata, NativeMetadata):
        raise TypeError(f"metadata of another backend: {type(metadata).__name__}")
    return ctypes.addressof(metadata.call)
