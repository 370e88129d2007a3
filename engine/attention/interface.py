"""The data types of attention (a step's metadata, a layer's cache), and the contract of a
backend.

    model layer ──query, key, value of T tokens──▶ paged_attention ──▶ AttentionBackend.forward
                                                       │                  1. write key, value to the
                                                       cache
                        AttentionContext (one a step) ─┘                  2. attend through the
                        block tables

T is the number of tokens in the step: the tokens of all requests in one flat ragged row, requests
with one token first, padding last. Hq and Hkv are query and key/value heads, G = Hq / Hkv, D and Dv
the head sizes of keys and values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The shape of one layer's KV, as the model really makes it (with MLA its config says
    otherwise).
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None

    @property
    def elements_per_token(self) -> int:
        """How many elements the key and value of one token have."""
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
    """The layout of the requests' tokens in a step, on the host. Filled by
    `engine.runner.input_batch`.

    Attributes:
        starts: int64 [R], the position of each request's first token in the step.
        counts: int64 [R], how many tokens each request has in the step; the first num_decodes
            entries are 1, the others more.
        num_decodes: how many requests compute one token.
        positions: int64 [T − num_padding], each token's position in its request.
        tables: int32 [R, max blocks], the block tables of one group, padded with the null block.
        block_size: tokens in a block.
        num_padding: padding tokens at the end of the flat row: their keys and values go to the null
            block, and their output is zero.
        kv_interval: the length of the context that is read is padded to a multiple of this; 0: not
            padded.
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
        softcap: scores become softcap · tanh(score / softcap) (Gemma 2); None: off.
        sinks: [Hq], a logit per head that takes part in the softmax without a value (gpt-oss);
            None: off.
    """

    scaling: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class StaticShape:
    """The sizes of a step with tensors at fixed addresses, so that it can be captured and
    replayed. Steps of any context lengths have the same shape: lengths are read on the device.

    Attributes:
        is_decode: every request computes one token.
        tokens: T, padding included.
        requests: most requests; with is_decode, as many as tokens.
        blocks: the widest block table; the same for all shapes with as many requests.
        block_size: tokens in a block.
    """

    is_decode: bool
    tokens: int
    requests: int
    blocks: int
    block_size: int


class AttentionMetadata:
    """One group's metadata for one step, in its backend's own form. Opaque to other code."""


class AttentionBackend(ABC):
    """A way to compute paged attention.

    `forward` writes the step's keys and values into the cache before it reads; it may not change
    query, key or value.
    """

    name: str
    dtypes: tuple[torch.dtype, ...] | None = None
    """The supported types; None: any."""
    block_multiple: int = 1
    """Tokens in a block must be a multiple of this."""
    can_capture: bool = False
    """Whether a step can be computed at fixed addresses. A backend that says so implements the
    three methods whose names have `static`.
    """
    step_lock: AbstractContextManager[object] = nullcontext()
    """Held while a step is computed. Several engines may share a model, each with its own thread;
    if steps share scratch memory, this lock makes them take turns.
    """

    def why_not(self, shape: LayerShape, params: AttentionParams) -> str | None:
        """Why a layer is not supported, as the end of a sentence about the layer; None: it is."""
        return None

    @abstractmethod
    def prepare(
        self, layout: BatchLayout, window: int | None, like: torch.Tensor
    ) -> AttentionMetadata:
        """Make one group's metadata for a step. `like`: a tensor of the cache's dtype and
        device.
        """

    def static_fields(self, shape: StaticShape, window: int | None) -> Mapping[str, int]:
        """The int64 arrays that one group's metadata needs in a captured step: the number of
        elements of each, by name.
        """
        raise NotImplementedError

    def fill_static(
        self,
        layout: BatchLayout,
        window: int | None,
        shape: StaticShape,
        fields: Mapping[str, npt.NDArray[np.int64]],
    ) -> None:
        """Write a step's metadata into those arrays, on the host. What an earlier step left there
        must not matter.

        layout: that of a step that fits `shape`; its padding is ignored.
        """
        raise NotImplementedError

    def static_metadata(
        self,
        shape: StaticShape,
        window: int | None,
        fields: Mapping[str, torch.Tensor],
        like: torch.Tensor,
    ) -> AttentionMetadata:
        """Make one group's metadata from those arrays, on the device.

        This is part of the captured work: it may compute with `fields`, but not read their values
        on the host.
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
        """Attend.

        Args:
            query: [Hq, T, D]. key: [Hkv, T, D]. value: [Hkv, T, Dv].
            cache: the layer's cache.
            metadata: the result of `prepare` for the layer's group.
            params: scaling and the like.

        Returns:
            [T, Hq, Dv].
        """

    def slots(self, metadata: AttentionMetadata) -> torch.Tensor | None:
        """The slot of each token, int64 [T], if the caller may put keys and values there itself and
        call `attend`; None: only `forward` is supported.
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
        """Attend where the step's keys and values are in the cache already.

        Args:
            query: [Hq, T, D].
            output: [T, Hq, Dv], contiguous; what is written. Rows of padding tokens are set
                to 0.
            cache, metadata, params: see `forward`.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class AttentionContext:
    """Everything that the attention calls of one step share; passed to the model's forward as one
    keyword argument.

    Attributes:
        backend: computes.
        caches: by layer index.
        metadata: by group.
    """

    backend: AttentionBackend
    caches: Sequence[LayerCache]
    metadata: Sequence[AttentionMetadata]
