"""The data types of attention (step metadata, layer cache) and the interface of a backend.

    model layer ──query, key, value of T tokens──▶ paged_attention ──▶ AttentionBackend.forward
                                                       │             1. write key, value to cache
              AttentionContext (one per step) ─────────┘             2. attend via block tables

T is the number of tokens in the step. The tokens of all requests form one flat ragged row: requests
with one token come first, and padding comes last. Hq and Hkv are the numbers of query and key/value
heads, G = Hq / Hkv, and D and Dv are the head sizes of keys and values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.step_states import StepStates
from engine.contract.adapters import AdapterRows

ENTRIES = "entries"
"""The name of the array of a captured step whose length is that of the contexts."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The shape of one layer's KV, as the model actually produces it.

    With MLA, it differs from the shape in the model's config.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None

    @property
    def elements_per_token(self) -> int:
        """Return the number of elements in the key and value of one token."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The KV cache of one layer.

    keys: [num_slots, Hkv, D], values: [num_slots, Hkv, Dv], in the model's dtype, on its device;
    num_slots = (num_blocks + 1) · block_size, slot = block · block_size + offset. Block 0 is the
    null block.
    """

    keys: torch.Tensor
    values: torch.Tensor
    group: int


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """The layout of the requests' tokens in a step, on the host.

    It is filled in by `engine.runner.input_batch`.

    Attributes:
        starts: int64 [R], the position of each request's first token in the step.
        counts: int64 [R], the number of tokens of each request in the step. The first num_decodes
            entries are 1, and all others are greater.
        num_decodes: the number of requests that compute one token.
        positions: int64 [T − num_padding], each token's position in its request.
        tables: int32 [R, max blocks], the block tables of one group, padded with the null block.
        block_size: tokens per block.
        num_padding: padding tokens at the end of the flat row. Their keys and values go to the null
            block, and their output is zero.
        kv_interval: the length of the context that is read is padded to a multiple of this. 0 means
            no padding.
    """

    starts: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    num_decodes: int
    positions: npt.NDArray[np.int64]
    tables: npt.NDArray[np.int32]
    block_size: int
    num_padding: int = 0
    kv_interval: int = 0


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """The parameters of a layer's attention besides its tensors.

    Attributes:
        scaling: multiplies the scores.
        softcap: scores become softcap · tanh(score / softcap) (Gemma 2). None disables this.
        sinks: [Hq], a logit per head that takes part in the softmax without a value (gpt-oss).
            None disables this.
    """

    scaling: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class StaticShape:
    """The sizes of a step whose tensors are at fixed addresses, for capture and replay.

    The shape does not depend on context lengths, because they are read on the device.

    Attributes:
        is_decode: whether every request computes exactly one token.
        tokens: T, including padding.
        requests: the maximum number of requests; equal to `tokens` if is_decode.
        blocks: the width of the widest block table; the same for all shapes with equal `requests`.
        block_size: tokens per block.
    """

    is_decode: bool
    tokens: int
    requests: int
    blocks: int
    block_size: int


class AttentionMetadata:
    """One group's metadata for one step, in a backend-specific format. Opaque to other code."""


class AttentionBackend(ABC):
    """The interface of a paged attention implementation.

    Methods get a tensor `like` one group's keys in the cache, [num_slots, Hkv, D], with their dtype
    and device.

    `forward` writes the step's keys and values into the cache before it reads from it. It must not
    modify query, key or value.
    """

    name: str
    dtypes: tuple[torch.dtype, ...] | None = None
    """The supported types, or None if any type is supported."""
    block_multiple: int = 1
    """The number of tokens per block must be a multiple of this."""
    can_capture: bool = False
    """Whether a step can be computed at fixed addresses. If so, the backend implements the three
    methods with `static` in their names.
    """
    step_lock: AbstractContextManager[object] = nullcontext()
    """Held while a step is computed. Several engines, each with its own thread, may share a model.
    If their steps share scratch memory, this lock serializes them.
    """

    def why_not(self, shape: LayerShape, params: AttentionParams) -> str | None:
        """Return why a layer is not supported, or None if it is.

        The reason completes a sentence that starts with the layer.
        """
        return None

    @abstractmethod
    def prepare(
        self, layout: BatchLayout, window: int | None, like: torch.Tensor
    ) -> AttentionMetadata:
        """Create one group's metadata for a step."""

    def static_fields(
        self, shape: StaticShape, window: int | None, like: torch.Tensor
    ) -> Mapping[str, int]:
        """Return the int64 arrays that a captured step needs for one group's metadata.

        The result maps each array's name to its number of elements. For ENTRIES, that is the
        maximum: all groups share this array, and only what a step uses of it is copied.
        """
        raise NotImplementedError

    def fill_static(
        self,
        layout: BatchLayout,
        window: int | None,
        like: torch.Tensor,
        fields: Mapping[str, npt.NDArray[np.int64]],
        begin: int,
    ) -> int:
        """Write a step's metadata into the arrays of `static_fields`, on the host.

        The result must not depend on what an earlier step left in the arrays. `layout` belongs to a
        step that fits the shape; its padding is ignored. The group's part of ENTRIES starts at
        `begin`. Returns where it ends.
        """
        raise NotImplementedError

    def static_metadata(
        self,
        shape: StaticShape,
        window: int | None,
        fields: Mapping[str, torch.Tensor],
        like: torch.Tensor,
    ) -> AttentionMetadata:
        """Create one group's metadata from the arrays of `static_fields`, on the device.

        This is part of the captured work: it may compute with `fields`, but must not read their
        values on the host.
        """
        raise NotImplementedError

    @abstractmethod
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Write the step's keys and values into the cache and compute attention.

        Args:
            query: [Hq, T, D].
            key: [Hkv, T, D].
            value: [Hkv, T, Dv].
            cache: the layer's cache.
            metadata: the result of `prepare` for the layer's group.
            params: scaling and the like.

        Returns:
            The output, [T, Hq, Dv].
        """

    def slots(self, metadata: AttentionMetadata) -> torch.Tensor | None:
        """Return the slot of each token, int64 [T], or None if only `forward` is supported.

        With the slots, the caller may write keys and values itself and then call `attend`.
        """
        return None

    def attend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        params: AttentionParams,
    ) -> None:
        """Compute attention when the step's keys and values are already in the cache.

        Args:
            query: [Hq, T, D].
            output: [T, Hq, Dv], contiguous. Receives the result; rows of padding tokens are set
                to 0.
            cache, metadata, params: see `forward`.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class AttentionContext:
    """The data shared by all attention calls of one step.

    It is passed to the model's forward as one keyword argument.

    Attributes:
        backend: computes the attention.
        caches: the layers' caches, by layer index.
        metadata: the step's metadata, by group.
        states: the states of recurrent layers, if there are any.
        adapters: the rows whose requests have adapters, if there are any. Attention itself does not
            read them: they come with what reaches every layer of a step.
    """

    backend: AttentionBackend
    caches: Sequence[LayerCache] | Mapping[int, LayerCache]
    metadata: Sequence[AttentionMetadata]
    states: StepStates | None = None
    adapters: AdapterRows | None = None

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Compute a layer's attention; see `AttentionBackend.forward`."""
        cache = self.caches[layer]
        metadata = self.metadata[cache.group]
        return self.backend.forward(query, key, value, cache, metadata, params)
