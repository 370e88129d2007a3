"""Replaces a model's linear layers with packed ones, in place.

    choose_dtype   ─▶ the type to compute in: the checkpoint's, or one that suits the machine
    choose_packing ─▶ the method: our kernel (as bfloat16 or int8), oneDNN's, or no packing
    pack_model     ─▶ for each weight: pack, compare, replace, free the original

Only plain torch.nn.Linear layers on the CPU are replaced, if they are in bfloat16, or if both the
layer and the model are in float32. A weight shared with an embedding is packed once for both. A
weight shared with anything else is copied. Only models that Headrace itself has loaded are packed;
others belong to their owners.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn.functional import linear as torch_linear

from engine.contract.config import LoadConfig, Quantization
from engine.contract.errors import ConfigError, ModelRefusedError
from engine.loading.checkpoint import Checkpoint
from engine.loading.memory import GIB
from engine.loading.pages import Pages
from engine.models.packed import (
    PackedEmbedding,
    PackedLinear,
    in_slices,
    native_library,
    new_scales,
    pack,
    packed_size,
    packed_view,
    read_rows,
    scales_size,
)
from engine.models.packed_onednn import OneDnnLinear
from engine.native.library import NativeUnavailableError

Packing = Literal["native", "onednn", "int8"]

_SMALLEST = 16
"""The smallest number of inputs and outputs of a packed layer."""
_PROBE_ROWS = 3
"""The number of rows of random input on which a packed layer is compared."""
_TOLERANCE = 2e-2
"""The tolerance of that comparison, relative to the largest element. It allows for a different
summation order of bfloat16 products.
"""
_SAMPLED_ROWS = 64
"""The number of rows in each slice of a packed weight that are read back and must be equal."""
_SLICE_BYTES = 16 << 20
"""Large weights are packed and freed in slices of about this size, so that both versions of a
weight are never completely in memory.
"""
_SHARE_OF_FLOAT32 = 0.5
"""The maximum share of free memory for weights held in a larger type than the checkpoint's. The
rest is for keys and values, and for reading.
"""
_OF_LIBRARY = "transformers.models."
"""The module prefix of the library's own model classes."""


@dataclass(frozen=True, slots=True)
class PackingReport:
    """The result of packing a model.

    Attributes:
        linears, embeddings: the number of layers of each kind that were replaced.
        how: what computes them.
        copied_bytes: the size of weights that are held twice because other modules use the
            original.
    """

    linears: int
    embeddings: int
    how: str
    copied_bytes: int

    def __str__(self) -> str:
        """Return a line for the log."""
        text = f"linear layers: {self.linears} packed for {self.how}"
        if self.embeddings:
            text += f", {self.embeddings} embedding reads the output layer's packed weights"
        if self.copied_bytes:
            text += f"; {self.copied_bytes / 2**20:.0f} MiB are held twice, others use them too"
        return text


@dataclass(frozen=True, slots=True)
class DtypeChoice:
    """The type of a model's weights.

    Attributes:
        dtype: the chosen type.
        why: a line for the log if the machine affected the choice, or else empty.
    """

    dtype: torch.dtype
    why: str = ""


def choose_packing(
    device: torch.device,
    dtype: torch.dtype,
    wanted: bool | None,
    quantization: Quantization = "none",
) -> Packing | None:
    """Choose how linear layers are packed for a device and dtype. None means no packing.

    Args:
        device, dtype: the model's device and dtype.
        wanted: True to pack or raise an error, False not to pack, and None to pack where
            measurements showed a benefit.
        quantization: see LoadConfig.

    Raises:
        ConfigError: packing or int8 is required but impossible.
    """
    if quantization == "int8":
        return _int8(device, dtype, wanted)
    if wanted is False:
        return None
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float32):
        reason = f"only bfloat16 and float32 on a CPU are packed, and this is {dtype} on {device}"
        return _not_packed(reason, wanted)
    try:
        isa = native_library().isa
    except NativeUnavailableError as error:
        if dtype is torch.bfloat16 and torch.cpu._is_avx512_bf16_supported():
            return "onednn"
        return _not_packed(str(error), wanted)
    if dtype is torch.bfloat16 and torch.cpu._is_amx_tile_supported() and isa != "amx":
        return "onednn"  # its tiles are faster than vectors for many rows
    if isa == "portable":
        return _not_packed("there is no kernel for this kind of processor", wanted)
    return "native"


def why_kernels_are_slower() -> str:
    """Return a line for the log if the kernels do not use all features of this processor.

    Otherwise, the result is empty. Missing kernels are reported where attention is chosen.
    """
    try:
        return native_library().slower()
    except NativeUnavailableError:
        return ""


def choose_dtype(
    checkpoint: Checkpoint, load_config: LoadConfig, device: torch.device, available: int
) -> DtypeChoice:
    """Choose the type of the weights: the one load_config requests, or for auto, the checkpoint's.

    Torch multiplies bfloat16 several times slower than float32 if the processor has no instructions
    for it. If our kernels cannot multiply it either, auto is float32, provided that there is room.

    Args:
        checkpoint: the checkpoint to load.
        load_config: how to load it.
        device: the device of the model.
        available: bytes of free memory.
    """
    own = checkpoint.dtype or torch.float32
    if load_config.dtype != "auto":
        return DtypeChoice(getattr(torch, load_config.dtype))
    if device.type != "cpu" or own is not torch.bfloat16 or load_config.quantization != "none":
        return DtypeChoice(own)
    if not torch.cpu._is_avx2_supported() or torch.cpu._is_avx512_bf16_supported():
        return DtypeChoice(own)  # of other kinds of processors nothing was measured
    if choose_packing(device, own, load_config.pack_weights) is not None:
        return DtypeChoice(own)
    size, free = 2 * checkpoint.file_bytes / GIB, available / GIB
    if size > _SHARE_OF_FLOAT32 * free:
        return DtypeChoice(
            own,
            "bfloat16, as the checkpoint has it: without our kernels this processor would be "
            f"several times faster in float32, whose weights take {size:.2f} GiB, of which "
            f"{free:.2f} GiB free are too few",
        )
    return DtypeChoice(
        torch.float32,
        "float32 in place of the checkpoint's bfloat16: without our kernels this processor is "
        f"several times faster in it; the weights take {size:.2f} GiB, and half of that with "
        "dtype bfloat16",
    )


def _int8(device: torch.device, dtype: torch.dtype, wanted: bool | None) -> Packing:
    reason = None
    if wanted is False:
        reason = "pack_weights is False: weights are int8 only where they are packed"
    elif device.type != "cpu" or dtype != torch.bfloat16:
        reason = (
            f"it is for bfloat16 on a CPU, and this is {dtype} on {device}; choose these, or none"
        )
    else:
        try:
            native_library()
        except NativeUnavailableError as error:
            reason = str(error)
    if reason:
        raise ConfigError("quantization", f"is int8, but {reason}")
    return "int8"


def _not_packed(reason: str, wanted: bool | None) -> Packing | None:
    if wanted:
        raise ConfigError("pack_weights", f"is True, but {reason}")
    return None


def pack_model(model: torch.nn.Module, how: Packing) -> PackingReport:
    """Replace the model's linear layers.

    Args:
        model: in evaluation mode, not in use. Its modules are replaced in place, and its other
            parameters are moved.
        how: see `choose_packing`.

    Raises:
        ModelRefusedError: a packed layer does not compute the same results as the original.
    """
    groups = list(shared_weights(model, how))
    with torch.no_grad():
        if how == "onednn":
            report = _pack_for_onednn(model, groups)
        else:
            report = _pack_natively(model, groups, int8=how == "int8")
        # The other parameters may be in a mapping of the checkpoint's file, and would keep all of
        # it in memory.
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    return report


@dataclass(slots=True)
class _Group:
    """The layers that share one weight, by name.

    `is_ours` says that nothing else holds the weight.
    """

    linears: dict[str, torch.nn.Linear]
    embeddings: dict[str, torch.nn.Embedding]
    is_ours: bool

    @property
    def weight(self) -> torch.Tensor:
        return next(iter(self.linears.values())).weight


def shared_weights(model: torch.nn.Module, how: Packing) -> Iterator[_Group]:
    """Return the weights that can be packed, in the order in which their first layers are found."""
    dtype = torch.bfloat16
    if how == "native" and next(model.parameters()).dtype is torch.float32:
        dtype = torch.float32
    holders: dict[int, list[tuple[str, torch.nn.Module]]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), []).append((name, module))
    for found in holders.values():
        linears = {
            name: one
            for name, one in found
            if isinstance(one, torch.nn.Linear) and _is_plain_linear(one, dtype)
        }
        embeddings = {
            name: one
            for name, one in found
            if isinstance(one, torch.nn.Embedding) and _is_plain_embedding(one)
        }
        # A bias is also a parameter.
        weights = {id(one.weight) for one in linears.values()}
        if len(weights) != 1 or holders.get(next(iter(weights))) is not found:
            continue
        yield _Group(linears, embeddings, len(found) == len(linears) + len(embeddings))


def _is_plain_linear(module: torch.nn.Linear, dtype: torch.dtype) -> bool:
    return (
        type(module) is torch.nn.Linear
        and module.weight.dtype == dtype
        and module.weight.device.type in ("cpu", "meta")
        and module.weight.stride(1) == 1
        and min(module.weight.shape) >= _SMALLEST
        and not (module._forward_hooks or module._forward_pre_hooks)
        and set(dict(module.named_parameters())) <= {"weight", "bias"}
    )


def _is_plain_embedding(module: torch.nn.Embedding) -> bool:
    """Return whether a module is torch's own Embedding, or one of Gemma's.

    Gemma's multiply rows by a buffer. The code that replaces them checks that they do nothing
    else.
    """
    is_scaled = list(module._buffers) == ["embed_scale"] and _OF_LIBRARY in type(module).__module__
    return (
        (type(module) is torch.nn.Embedding or is_scaled)
        and module.max_norm is None
        and not (module._forward_hooks or module._forward_pre_hooks)
    )


def held_bytes(model: torch.nn.Module, how: Packing | None) -> dict[str, int]:
    """Return how many bytes each parameter takes after packing, by its first name.

    Args:
        model: not packed; it may be on the meta device.
        how: see `choose_packing`.
    """
    held = {name: parameter.nbytes for name, parameter in model.named_parameters()}
    if how is None:
        return held
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in shared_weights(model, how):
        weight, name = group.weight, names[id(group.weight)]
        # What is shared with an embedding can be read from our packed weight, not from oneDNN's.
        is_held_twice = not group.is_ours or (how == "onednn" and bool(group.embeddings))
        if how == "onednn":
            packed = weight.nbytes
        else:
            int8 = how == "int8"
            packed = packed_size(*weight.shape, dtype=weight.dtype, int8=int8)
            packed += scales_size(len(weight)) if int8 else 0
        held[name] = packed + (weight.nbytes if is_held_twice else 0)
    return held


def _pack_natively(model: torch.nn.Module, groups: list[_Group], *, int8: bool) -> PackingReport:
    sizes = [
        packed_size(*group.weight.shape, dtype=group.weight.dtype, int8=int8) for group in groups
    ]
    # One allocation for all weights: its pages, which may be large ones, are filled while the
    # originals are freed.
    memory = torch.empty(sum(sizes), dtype=torch.uint8)
    pages = Pages(itertools.chain(model.parameters(), model.buffers()))
    copied = start = 0
    for group, size in zip(groups, sizes, strict=True):
        weight = group.weight
        packed = packed_view(memory[start : start + size], weight.dtype)
        scales = new_scales(len(weight)) if int8 else None
        start += size
        name, rows = next(iter(group.linears)), _some_rows(weight)
        tables = {name: embedding(rows) for name, embedding in group.embeddings.items()}
        products = _pack_slices(name, weight, packed, scales, pages if group.is_ours else None)
        for name, linear in group.linears.items():
            made = PackedLinear(packed, linear, scales)
            _exchange(model, name, linear, made, products)
            if not group.is_ours:
                made.share(linear.weight)
        if group.is_ours:
            for name, embedding in group.embeddings.items():
                table = PackedEmbedding(packed, embedding, scales)
                expected = tables[name]
                if int8:
                    expected = table.scaled(read_rows(packed, scales, rows, *weight.shape))
                if not torch.equal(_bits(table(rows)), _bits(expected)):
                    raise ModelRefusedError(f"{name}: {_WRONG.format('rows')}")
                model.set_submodule(name, table)
        else:
            copied += weight.nbytes
        group.linears.clear()
        group.embeddings.clear()
    return PackingReport(
        linears=_count(model, PackedLinear),
        embeddings=_count(model, PackedEmbedding),
        how=f"{native_library().isa}, as int8" if int8 else native_library().isa,
        copied_bytes=copied,
    )


def _pack_slices(
    name: str,
    weight: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor | None,
    pages: Pages | None,
) -> torch.Tensor:
    """Pack a weight slice by slice, see `pack`.

    Each slice is checked against the original. The original is then given back to `pages`, unless
    `pages` is None.

    Returns:
        The result of `_random_products` for the original, or for its int8 rounding.
    """
    products = []
    for part, own, own_scales in in_slices(weight, packed, scales, _SLICE_BYTES):
        pack(part, own, own_scales)
        if not _holds(own, own_scales, part, _some_rows(part)):
            if not part.isfinite().all():
                raise ModelRefusedError(NOT_FINITE.format(name=f"{name}.weight"))
            raise ModelRefusedError(f"{name}: {_WRONG.format('weights')}")
        if own_scales is None:
            products.append(_random_products(part))
        else:
            rounded = read_rows(own, own_scales, torch.arange(len(part)), *part.shape)
            products.append(_random_products(rounded))
        if pages is not None:
            pages.give_back(part)
    return torch.cat(products, -1)


def _some_rows(weight: torch.Tensor) -> torch.Tensor:
    return torch.linspace(0, len(weight) - 1, min(len(weight), _SAMPLED_ROWS)).long()


def _holds(
    packed: torch.Tensor, scales: torch.Tensor | None, weight: torch.Tensor, rows: torch.Tensor
) -> bool:
    """Return whether rows of a packed weight equal the original's, except for int8 rounding."""
    original, actual = weight[rows], read_rows(packed, scales, rows, *weight.shape)
    if scales is None:
        return torch.equal(_bits(actual), _bits(original))
    # Rounded to the next multiple of the scale, and then to bfloat16.
    bound = scales[rows, None] * 0.5 + original.float().abs() * 2**-7
    return bool(((actual.float() - original.float()).abs() <= bound).all())


def _pack_for_onednn(model: torch.nn.Module, groups: list[_Group]) -> PackingReport:
    copied = 0
    for group in groups:
        if len(group.linears) > 1:
            continue  # each would hold the weight, and not see what is written to the other one
        is_shared = bool(group.embeddings) or not group.is_ours
        copied += group.weight.nbytes * is_shared
        for name, linear in group.linears.items():
            products = _random_products(linear.weight)
            made = OneDnnLinear(linear)
            _exchange(model, name, linear, made, products)
            if is_shared:
                made.share(linear.weight)
        group.linears.clear()
        group.embeddings.clear()
    return PackingReport(
        linears=_count(model, OneDnnLinear), embeddings=0, how="oneDNN", copied_bytes=copied
    )


NOT_FINITE = (
    "{name} has elements that are NaN or infinite: the checkpoint is damaged, or its training has "
    "diverged; get a whole one"
)
_WRONG = (
    "its packed {} are not those of the checkpoint; report it, and start with pack_weights off "
    "meanwhile"
)


def _random_input(weight: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((_PROBE_ROWS, weight.shape[1]), generator=generator)
    return x.to(weight.dtype)


def _random_products(weight: torch.Tensor) -> torch.Tensor:
    """Multiply random input by a weight [N, K] with torch. Returns float32 [rows, N]."""
    return torch_linear(_random_input(weight), weight).float()


def _exchange(
    model: torch.nn.Module,
    name: str,
    linear: torch.nn.Linear,
    packed: PackedLinear | OneDnnLinear,
    products: torch.Tensor,
) -> None:
    """Replace a layer, and check that the new one computes the same results.

    The check covers the products of random input (see `_random_products`) and the bias.
    """
    bias = linear._parameters["bias"]
    expected = products if bias is None else products + bias.float()
    actual = packed(_random_input(linear.weight)).float()
    # A bias may have infinity, to mask outputs; allclose compares that exactly.
    scale = expected[expected.isfinite()].abs().amax().item() if expected.isfinite().any() else 0.0
    if not torch.allclose(
        actual, expected, rtol=_TOLERANCE, atol=_TOLERANCE * scale, equal_nan=True
    ):
        raise ModelRefusedError(f"{name}: {_WRONG.format('results')}")
    packed.train(linear.training)
    model.set_submodule(name, packed)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of elements, so that NaN equals itself."""
    return tensor.view(torch.int16)


def _count(model: torch.nn.Module, kind: type[torch.nn.Module]) -> int:
    return sum(isinstance(module, kind) for module in model.modules())
