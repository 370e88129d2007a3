"""Linear layers and embeddings whose weights are stored in the order in which the native kernel
reads them.

Packing moves elements without changing them, except with int8. Reading a layer's `weight` unpacks
it, and writing to it packs the new values (`engine.models.packed_weight`), as does
`load_state_dict`. With int8, each element is a multiple of its row's scale, which is the row's
largest absolute element / 127. These layers do not support gradients: a backward pass through one
raises an error, so that nobody unknowingly trains only the rest of a model.

The dtype of a packed tensor tells its contents. int32: the bits of float32. uint8: the bits of
bfloat16, or int8 if there are scales. Converting the model (`model.to(dtype)`) leaves both
unchanged.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from collections.abc import Callable, Hashable, Iterator
from functools import cache
from typing import Any

import torch
from typing_extensions import override

from engine.contract.errors import NoGradientsError
from engine.models.held_layer import HeldLayer
from engine.native.library import BFLOAT16, FLOAT32, LinearWeight, NativeLibrary, load_library
from engine.native.torch_library import operation

_UNPACKED = "_headrace_unpacked"
"""The attribute of a tensor in a state dict that refers to the packed weight it was made from."""
PANEL = 64
"""Biases are padded to a multiple of this many elements, so that the kernel reads whole vectors."""
_SLICE_BYTES = 16 << 20
"""The approximate size of the slices in which new elements are converted and packed."""
_LARGE_PAGE = 2 << 20
"""The size in bytes of a large page on most processors. Smaller regions cannot have any."""


@cache
def native_library() -> NativeLibrary:
    """Return the kernels, which are loaded on the first call.

    Raises:
        NativeUnavailableError: the kernels cannot be used here.
    """
    return load_library()


def packed_size(
    outputs: int, inputs: int, *, dtype: torch.dtype = torch.bfloat16, int8: bool = False
) -> int:
    """Return the size of a packed weight in bytes. int8: whether it is packed as int8, for bfloat16
    inputs.
    """
    code = FLOAT32 if dtype is torch.float32 else BFLOAT16
    size: int = native_library().linear_size(outputs, inputs, code, int8)
    return size


def packed_view(memory: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View memory as a packed weight of the dtype; see the module for the types of packed tensors.

    memory: uint8 [packed_size(N, K, dtype)], at a multiple of 4 bytes.
    """
    return memory.view(torch.int32) if dtype is torch.float32 else memory


def type_of(packed: torch.Tensor) -> torch.dtype:
    """Return the dtype of the inputs and outputs of a packed weight."""
    return torch.float32 if packed.dtype is torch.int32 else torch.bfloat16


def new_scales(outputs: int) -> torch.Tensor:
    """Allocate the scales of a weight's rows, float32."""
    return torch.zeros(scales_size(outputs) // torch.float32.itemsize)


def scales_size(outputs: int) -> int:
    """Return the size in bytes of the scales of a weight's rows."""
    return -(-outputs // PANEL) * PANEL * torch.float32.itemsize


def pack(weight: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor | None = None) -> None:
    """Pack a weight.

    Args:
        weight: bfloat16 or float32 [N, K], with contiguous rows.
        packed: the target; see `packed_size` and `packed_view`.
        scales: see `new_scales`. If given, they are filled, and the weight is packed as int8.
    """
    outputs, inputs = weight.shape
    ask_for_large_pages(packed)
    native_library().linear_pack(
        weight.data_ptr(),
        weight.stride(0),
        outputs,
        inputs,
        _code(packed),
        packed.data_ptr(),
        None if scales is None else scales.data_ptr(),
        torch.get_num_threads(),
    )


def in_slices(
    weight: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor | None, size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """Split a weight into row slices of about `size` bytes, each with its slice of `packed` and
    `scales`.

    See `pack` for the arguments.
    """
    outputs, inputs = weight.shape
    rows = max(1, size // (PANEL * inputs * weight.itemsize)) * PANEL
    start = 0
    for first in range(0, outputs, rows):
        part = weight[first : first + rows]
        taken = packed_size(*part.shape, dtype=type_of(packed), int8=scales is not None)
        own = packed[start : start + taken // packed.itemsize]
        start += len(own)
        yield part, own, None if scales is None else scales[first : first + rows]


def ask_for_large_pages(packed: torch.Tensor) -> None:
    """Ask the system for large pages before memory is written for the first time.

    A step reads all weights. If memory is fragmented, translating the address of each 4 KiB page
    takes longer than reading it (docs/performance.md).
    """
    storage = packed.untyped_storage()
    start = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (storage.data_ptr() + storage.nbytes() - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if sys.platform == "linux" and length >= _LARGE_PAGE:
        # A kernel without large pages refuses, and nothing is lost.
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE
        )


def _code(packed: torch.Tensor) -> int:
    return FLOAT32 if packed.dtype is torch.int32 else BFLOAT16


def pad_bias(bias: torch.Tensor | None) -> torch.Tensor | None:
    """Return a bias for the kernel: float32, padded to whole panels."""
    if bias is None:
        return None
    padded = torch.zeros(-(-len(bias) // PANEL) * PANEL)
    padded[: len(bias)] = bias.detach()
    return padded


def read_rows(
    packed: torch.Tensor,
    scales: torch.Tensor | None,
    rows: torch.Tensor,
    outputs: int,
    inputs: int,
) -> torch.Tensor:
    """Read rows of a packed weight: exact values, or rounded ones with int8.

    Args:
        packed: the weight.
        scales: the scales, with int8.
        rows: int64 or int32, of any shape.
        outputs, inputs: N and K of the weight.

    Returns:
        [*rows.shape, K], in the weight's dtype.

    Raises:
        IndexError: there is no such row.
    """
    wanted = rows.long().contiguous()
    result = torch.empty((*rows.shape, inputs), dtype=type_of(packed))
    weight = linear_weight(packed, scales, None, outputs, inputs)
    if not native_library().linear_rows(
        ctypes.byref(weight),
        wanted.data_ptr(),
        wanted.numel(),
        result.data_ptr(),
        torch.get_num_threads(),
    ):
        raise IndexError(f"index out of range: rows must be between 0 and {outputs - 1}")
    return result


def linear_weight(
    packed: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    outputs: int,
    inputs: int,
) -> LinearWeight:
    """Return a packed weight for the kernel, with the addresses of these tensors; see
    `multiply`.
    """
    return LinearWeight(
        packed.data_ptr(),
        None if bias is None else bias.data_ptr(),
        None if scales is None else scales.data_ptr(),
        outputs,
        inputs,
        _code(packed),
    )


def multiply(
    x: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    outputs: int,
    inputs: int,
    finished: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x · Wᵀ + bias.

    Args:
        x: [..., K], in the weight's dtype.
        packed: W [N, K], packed.
        scales: the scales, with int8.
        bias: see `pad_bias`.
        outputs, inputs: N and K.
        finished: bfloat16 [65536], the value that replaces each result, indexed by the result's
            bits. Only for bfloat16 x.

    Returns:
        [..., N], in the same dtype.

    Raises:
        RuntimeError: x has another type or width, or is not on the CPU, as with torch's own layer.
    """
    shape = x.shape
    dtype = type_of(packed)
    if x.dtype is not dtype or shape[-1] != inputs or not (x.is_cpu and packed.is_cpu):
        raise RuntimeError(
            f"this packed linear layer takes {dtype} [..., {inputs}] on the CPU, and was given "
            f"{x.dtype} {list(shape)} on {x.device}"
        )
    stride = inputs
    if not x.is_contiguous():
        x = x.reshape(-1, inputs)
        if x.stride(1) != 1:
            x = x.contiguous()
        stride = x.stride(0)
    y = x.new_empty((*shape[:-1], outputs))
    weight = linear_weight(packed, scales, bias, outputs, inputs)
    if finished is not None:
        weight.finished = finished.data_ptr()
    native_library().linear(
        ctypes.byref(weight),
        x.data_ptr(),
        stride,
        y.data_ptr(),
        outputs,
        math.prod(shape[:-1]),
        torch.get_num_threads(),
    )
    return y


def _shape_of_product(
    x: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    outputs: int,
    inputs: int,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], outputs))


@operation(
    "packed_linear(Tensor x, Tensor packed, Tensor? scales, Tensor? bias, int outputs, int inputs) "
    "-> Tensor",
    _shape_of_product,
)
def _multiply_opaquely(
    x: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    outputs: int,
    inputs: int,
) -> torch.Tensor:
    return multiply(x, packed, scales, bias, outputs, inputs)


def _shape_of_rows(
    packed: torch.Tensor,
    scales: torch.Tensor | None,
    rows: torch.Tensor,
    outputs: int,
    inputs: int,
) -> torch.Tensor:
    return packed.new_empty((*rows.shape, inputs), dtype=type_of(packed))


@operation(
    "packed_rows(Tensor packed, Tensor? scales, Tensor rows, int outputs, int inputs) -> Tensor",
    _shape_of_rows,
)
def _read_rows_opaquely(
    packed: torch.Tensor,
    scales: torch.Tensor | None,
    rows: torch.Tensor,
    outputs: int,
    inputs: int,
) -> torch.Tensor:
    return read_rows(packed, scales, rows, outputs, inputs)


class _NoGradients(torch.autograd.Function):
    """Puts a layer's result into the autograd graph, with a backward pass that raises an error."""

    @staticmethod
    def forward(
        _: Any, x: torch.Tensor, bias: torch.Tensor | None, run: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        return run()

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> None:
        raise NoGradientsError


def without_gradients(
    x: torch.Tensor, bias: torch.Tensor | None, run: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """Return the result of `run`, which computes a layer from x and bias.

    A backward pass through the result raises NoGradientsError.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        made: torch.Tensor = _NoGradients.apply(x, bias, run)  # type: ignore[no-untyped-call]
        return made
    return run()


class _Packed(HeldLayer):
    """The base of PackedLinear and PackedEmbedding, with the packed weight."""

    packed: torch.Tensor
    scales: torch.Tensor | None

    def __init__(
        self, packed: torch.Tensor, scales: torch.Tensor | None, outputs: int, inputs: int
    ) -> None:
        super().__init__((outputs, inputs), type_of(packed))
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("scales", scales, persistent=False)

    @property
    @override
    def key(self) -> Hashable:
        return self.packed.data_ptr() if self._shared is None else super().key

    @override
    def unpacked(self) -> torch.Tensor:
        return read_rows(self.packed, self.scales, torch.arange(self.shape[0]), *self.shape)

    @override
    def hold(self, weight: torch.Tensor) -> None:
        for rows, packed, scales in in_slices(weight, self.packed, self.scales, _SLICE_BYTES):
            rows = rows.to(type_of(packed))
            pack(rows if rows.stride(1) == 1 else rows.contiguous(), packed, scales)
        # The kernel's writing is not seen by torch.
        torch.autograd.graph.increment_version(self.packed)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        # One tensor for all that share a packed weight, so that it is saved once.
        shared = (one for one in destination.values() if vars(one).get(_UNPACKED) is self.packed)
        weight = next(shared, None)
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if weight is None:
            setattr(destination[f"{prefix}weight"], _UNPACKED, self.packed)
        else:
            destination[f"{prefix}weight"] = weight


class PackedLinear(_Packed):
    """Replaces a torch.nn.Linear."""

    bias: torch.nn.Parameter | None
    padded_bias: torch.Tensor | None

    def __init__(
        self, packed: torch.Tensor, linear: torch.nn.Linear, scales: torch.Tensor | None = None
    ) -> None:
        """Make a layer that computes the same as `linear`.

        Args:
            packed: the packed weight of `linear`.
            linear: the layer to replace. Its weight is not kept.
            scales: the scales, with int8.
        """
        super().__init__(packed, scales, linear.out_features, linear.in_features)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_parameter("bias", linear.bias)
        self.register_buffer("padded_bias", pad_bias(linear.bias), persistent=False)
        self.sync()

    def sync(self) -> None:
        """Apply changes; see HeldLayer. The kernel reads a padded copy of the bias."""
        super().sync()
        bias, padded = self.bias, self.padded_bias
        if bias is not None and padded is not None and self._has_changed("bias", bias):
            with torch.no_grad():
                padded[: len(bias)].copy_(bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the layer: [..., K] → [..., N]."""
        run: Callable[..., torch.Tensor] = multiply
        if torch.compiler.is_compiling():
            run = _multiply_opaquely
        else:
            self.sync()
        sizes = (self.out_features, self.in_features)
        tensors = (self.packed, self.scales, self.padded_bias)
        return without_gradients(x, self.bias, lambda: run(x, *tensors, *sizes))

    def extra_repr(self) -> str:
        """Return the arguments for `repr`."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, {_form(self)}"


class PackedEmbedding(_Packed):
    """Replaces a torch.nn.Embedding that shares its weight with a linear layer, or Gemma's
    embedding, which multiplies rows by its `embed_scale`.

    Attributes:
        stands_for: the class of the module it replaced.
    """

    stands_for: type[torch.nn.Module]
    embed_scale: torch.Tensor | None

    def __init__(
        self,
        packed: torch.Tensor,
        embedding: torch.nn.Embedding,
        scales: torch.Tensor | None = None,
    ) -> None:
        """Make a table that returns the same as `embedding`.

        Args:
            packed: the packed weight, shared with the linear layer.
            embedding: the embedding to replace. Its weight is not kept.
            scales: the scales, with int8.
        """
        super().__init__(packed, scales, embedding.num_embeddings, embedding.embedding_dim)
        self.num_embeddings = embedding.num_embeddings
        self.embedding_dim = embedding.embedding_dim
        self.padding_idx = embedding.padding_idx
        self.stands_for = type(embedding)
        factor = embedding._buffers.get("embed_scale")
        self.register_buffer("embed_scale", factor, persistent=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Look up rows: [...] → [..., K]."""
        run = _read_rows_opaquely if torch.compiler.is_compiling() else read_rows
        sizes = (self.num_embeddings, self.embedding_dim)
        return self.scaled(run(self.packed, self.scales, token_ids, *sizes))

    def scaled(self, rows: torch.Tensor) -> torch.Tensor:
        """Scale rows of the weight if the embedding scales its results."""
        return rows if self.embed_scale is None else rows * self.embed_scale.to(rows.dtype)

    def extra_repr(self) -> str:
        """Return the arguments for `repr`."""
        return f"{self.num_embeddings}, {self.embedding_dim}, {_form(self)}"


def _form(packed: _Packed) -> str:
    return "packed" if packed.scales is None else "packed as int8"
