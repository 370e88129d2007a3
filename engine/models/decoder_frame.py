"""What a decoder of ours has around its layers, whatever computes these: the embedding, the tables
of rotary embeddings, the output layer and what is done to its results.

Embedding and output layer are called as the model has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.contract.rope import POSITION_MASK
from engine.models import description as described
from engine.models.length_table import LengthTable


@dataclass(frozen=True, slots=True)
class DecoderOutput:
    """What a forward pass returns. logits: [1, L, V]."""

    logits: torch.Tensor


class DecoderFrame:
    """A decoder of ours without its layers and norms.

    Attributes:
        description: what it computes.
        dtype: of its elements.
    """

    def __init__(
        self, model: torch.nn.Module, decoder: described.Decoder, dtype: torch.dtype
    ) -> None:
        """Bind a description to a model's embedding, output layer and frequencies."""
        self.description = decoder
        self.dtype = dtype
        self._embedding: Any = model.get_submodule(decoder.embedding)
        self._output: Any = model.get_submodule(decoder.output)
        self._rotaries = [model.get_submodule(one.module) for one in decoder.rotaries]
        self.read_frequencies()
        self._of_lengths = [
            None if one.lengths is None else LengthTable.of(module, one.lengths)
            for one in decoder.rotaries
            for module in [model.get_submodule(one.module)]
        ]

    def read_frequencies(self) -> None:
        """Take over the model's frequencies as they are now."""
        self._frequencies = [
            module.get_buffer(one.frequencies).float()
            for module, one in zip(self._rotaries, self.description.rotaries, strict=True)
        ]

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] → [T, K]."""
        x: torch.Tensor = self._embedding(token_ids)
        factor = self.description.embedding_factor
        return x.contiguous() if factor is None else x * factor

    def tables(self, positions: torch.Tensor) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        """Cosines and sines of tokens at these positions, for each of the rotary embeddings: [T,
        dim / 2], of the model's type where they are rounded to it, else float32. Positions may
        carry a length, see `engine.contract.rope`.
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
        """The output layer: [L, K] → [L, V]."""
        logits: torch.Tensor = self._output(x)
        return logits

    def finish(self, logits: torch.Tensor) -> torch.Tensor:
        """What is done to the output layer's results: [L, V] → [L, V]. Operations are those of the
        models' own code, in its order.
        """
        one = self.description
        if one.logits_factor is not None:
            logits = logits * one.logits_factor
        if one.logits_divisor is not None:
            logits = logits / one.logits_divisor
        if one.logits_softcap is not None:
            logits = torch.tanh(logits / one.logits_softcap) * one.logits_softcap
        return logits
