"""The operations around a decoder's layers, common to all of our decoders.

These are the embedding, the tables of the rotary embeddings, the output layer and the processing of
logits. The model's own embedding and output layer are called.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.attention.interface import AttentionBackend, AttentionContext
from engine.contract.rope import POSITION_MASK
from engine.models import description as described
from engine.models.layer_parts import Kind, LayerParts
from engine.models.length_table import LengthTable
from engine.models.operations import Tables


@dataclass(frozen=True, slots=True)
class DecoderOutput:
    """The result of a forward pass. logits: [1, L, V]."""

    logits: torch.Tensor


class DecoderFrame(ABC):
    """The base of our decoders: everything except layers and norms.

    Attributes:
        description: what the decoder computes.
        layers: the layers with their tensors.
        dtype, device: of the tensors.
        backend: computes attention in comparisons.
        one_call: how close a layer in one call must be to its separate operations.
    """

    layers: Sequence[LayerParts]
    device: torch.device
    backend: AttentionBackend
    one_call: Kind

    def __init__(
        self, model: torch.nn.Module, decoder: described.Decoder, dtype: torch.dtype
    ) -> None:
        """Bind a description to a model's embedding, output layer and frequencies."""
        self.description = decoder
        self.dtype = dtype
        self._embedding: Any = model.get_submodule(decoder.embedding)
        self._output: Any = model.get_submodule(decoder.output)
        self._rotaries = [model.get_submodule(one.module) for one in decoder.rotaries]
        self.refresh()
        self._of_lengths = [
            None if one.lengths is None else LengthTable.of(module, one.lengths)
            for one in decoder.rotaries
            for module in [model.get_submodule(one.module)]
        ]

    def refresh(self) -> None:
        """Read again what is held as a copy: the model's frequencies."""
        self._frequencies = [
            module.get_buffer(one.frequencies).float()
            for module, one in zip(self._rotaries, self.description.rotaries, strict=True)
        ]

    @abstractmethod
    def run(
        self, layers: Any, x: torch.Tensor, tables: Any, context: AttentionContext
    ) -> torch.Tensor:
        """Compute some layers: [T, K] → [T, K].

        Args:
            layers: the layers.
            x: contiguous, in the model's dtype.
            tables: see `tables`.
            context: the step's context.
        """

    @abstractmethod
    def norm(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the last norm: [L, K] → [L, K]."""

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Embed token ids: [T] → [T, K]."""
        x: torch.Tensor = self._embedding(token_ids)
        factor = self.description.embedding_factor
        return x.contiguous() if factor is None else x * factor

    def tables(self, positions: torch.Tensor) -> Sequence[Tables]:
        """Return the cosines and sines for tokens at these positions, for each of the rotary
        embeddings.

        They are [T, dim / 2], in the model's dtype if they are rounded to it, otherwise float32.
        Positions may carry a length; see `engine.contract.rope`.
        """
        found, places = [], positions
        if any(self._of_lengths):
            places = positions & POSITION_MASK
        for one, frequencies, of_lengths in zip(
            self.description.rotaries, self._frequencies, self._of_lengths, strict=True
        ):
            if of_lengths is not None:
                rows = of_lengths.rows(positions)
                frequencies = of_lengths.frequencies.index_select(0, rows)
            angles = places[:, None].float() * frequencies
            cos, sin = angles.cos(), angles.sin()
            if one.scaling != 1.0:
                cos, sin = cos * one.scaling, sin * one.scaling
            if one.rounds_tables:
                cos, sin = cos.to(self.dtype), sin.to(self.dtype)
            found.append((cos, sin))
        return found

    def output(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the output layer: [L, K] → [L, V]."""
        logits: torch.Tensor = self._output(x)
        return logits

    def finish(self, logits: torch.Tensor) -> torch.Tensor:
        """Scale and cap the output layer's results: [L, V] → [L, V].

        The operations and their order are those of the model's own code.
        """
        one = self.description
        if one.logits_factor is not None:
            logits = logits * one.logits_factor
        if one.logits_divisor is not None:
            logits = logits / one.logits_divisor
        if one.logits_softcap is not None:
            logits = torch.tanh(logits / one.logits_softcap) * one.logits_softcap
        return logits
