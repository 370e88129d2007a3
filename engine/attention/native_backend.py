"""Paged attention on a CPU with the kernels of `engine.native`.

The kernels read contexts in place, through the block tables. They also write the step's keys and
values, so a layer takes one call. The step's parameters are the same for all layers of a group:
`prepare` fills them in, and `forward` adds the layer's pointers.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from engine.attention.interface import (
    AttentionBackend,
    AttentionMetadata,
    AttentionParams,
    BatchLayout,
    LayerCache,
)
from engine.native.library import AttentionCall, NativeLibrary

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The types that the kernels support, with their codes. All sums are in float32."""


@dataclass(frozen=True, slots=True)
class NativeMetadata(AttentionMetadata):
    """One group's metadata.

    Attributes:
        call: the parameters that do not depend on the layer.
        arrays: the arrays that `call` points to, kept alive.
    """

    call: AttentionCall
    arrays: tuple[npt.NDArray[np.integer], ...]


class NativeAttentionBackend(AttentionBackend):
    """The native CPU backend. Hold `step_lock` while a step is computed."""

    def __init__(self, library: NativeLibrary) -> None:
        self.name = f"native, {library.isa}"
        self._attention = library.attention
        self.scratch = torch.empty(0)
        self.step_lock = threading.Lock()

    @override
    def prepare(
        self, layout: BatchLayout, window: int | None, like: torch.Tensor
    ) -> NativeMetadata:
        starts = np.ascontiguousarray(layout.starts, dtype=np.int64)
        counts = np.ascontiguousarray(layout.counts, dtype=np.int64)
        tables = np.ascontiguousarray(layout.tables, dtype=np.int32)
        call = AttentionCall(
            starts=starts.ctypes.data,
            counts=counts.ctypes.data,
            tables=tables.ctypes.data,
            num_requests=len(starts),
            table_width=tables.shape[1],
            block_size=layout.block_size,
            window=window or 0,
            dtype=DTYPES[like.dtype],
            threads=torch.get_num_threads(),
        )
        return NativeMetadata(call, (starts, counts, tables))

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Compute attention; see the base class."""
        if not isinstance(metadata, NativeMetadata):
            raise TypeError(f"metadata of another backend: {type(metadata).__name__}")
        if query.dtype is not cache.keys.dtype:  # the kernel would read beyond the elements
            raise TypeError(f"queries of {query.dtype}, and a cache of {cache.keys.dtype}")
        query, key, value = (_rows_in_one_piece(tensor) for tensor in (query, key, value))
        num_heads, num_tokens, key_dim = query.shape
        output = query.new_empty((num_tokens, num_heads, value.shape[-1]))
        sinks = None if params.sinks is None else params.sinks.float().contiguous()
        call = metadata.call
        call.query, call.key, call.value = query.data_ptr(), key.data_ptr(), value.data_ptr()
        call.query_head_stride, call.query_token_stride = query.stride(0), query.stride(1)
        call.key_head_stride, call.key_token_stride = key.stride(0), key.stride(1)
        call.value_head_stride, call.value_token_stride = value.stride(0), value.stride(1)
        call.keys, call.values = cache.keys.data_ptr(), cache.values.data_ptr()
        call.output = output.data_ptr()
        call.sinks = None if sinks is None else sinks.data_ptr()
        call.num_tokens, call.num_heads, call.num_kv_heads = num_tokens, num_heads, key.shape[0]
        call.key_dim, call.value_dim = key_dim, value.shape[-1]
        call.scaling, call.softcap = params.scaling, params.softcap or 0.0
        self._run(call)
        return output

    def _run(self, call: AttentionCall) -> None:
        call.scratch, call.scratch_floats = self.scratch.data_ptr(), self.scratch.numel()
        needed = self._attention(ctypes.byref(call))
        if needed:
            self.grow_scratch(needed)
            call.scratch, call.scratch_floats = self.scratch.data_ptr(), self.scratch.numel()
            self._attention(ctypes.byref(call))

    def grow_scratch(self, needed: int) -> None:
        """Grow the scratch memory to at least `needed` floats."""
        self.scratch = torch.empty(needed + needed // 2)


def _rows_in_one_piece(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, copied if the elements of one head and token are not contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
