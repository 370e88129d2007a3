"""Replaces a model's linear layers with packed ones, in place.

    choose_dtype   ─▶ the type to compute in: the checkpoint's, or one that suits the machine
    choose_packing ─▶ the format (see `engine.models.formats`), or no packing
    pack_model     ─▶ for each weight: pack, compare, replace, free the original

Only plain torch.nn.Linear layers in the model's dtype are replaced, if the format takes them. A
weight shared with an embedding is packed once for both. A weight shared with anything else is
copied. Only models that Headrace itself has loaded are packed; others belong to their owners.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import linear as torch_linear
from transformers import PreTrainedModel

from engine.contract.config import LoadConfig
from engine.contract.errors import ConfigError, ModelRefusedError
from engine.loading.checkpoint import Checkpoint
from engine.loading.memory import GIB
from engine.loading.pages import Pages
from engine.loading.quantised.stored_linear import StoredModule, stored_weights
from engine.models.formats import grouped
from engine.models.formats.native import native_library
from engine.models.formats.registry import FORMATS, Format, named
from engine.models.formats.weight_format import WeightFormat
from engine.models.held_layer import PackedEmbedding, PackedLinear
from engine.native.library import NativeUnavailableError

_PROBE_ROWS = 3
"""The number of rows of random input on which a packed layer is compared."""
_TOLERANCE = 2e-2
"""The tolerance of that comparison, relative to the largest element. It allows for a different
summation order of bfloat16 products.
"""
_SAMPLED_ROWS = 64
"""The number of rows in each slice of a packed weight that are read back and must be equal."""
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
    device: torch.device, dtype: torch.dtype, wanted: bool | None, quantization: str = "none"
) -> Format | None:
    """Choose how linear layers are packed for a device and dtype. None means no packing.

    Args:
        device, dtype: the model's device and dtype.
        wanted: True to pack or raise an error, False not to pack, and None to pack where
            measurements showed a benefit.
        quantization: see LoadConfig.

    Raises:
        ConfigError: packing, or a quantization, is required but impossible.
    """
    if quantization != "none":
        asked = named(quantization)
        reason = asked.why_not(device, dtype)
        if wanted is False:
            reason = f"pack_weights is False: weights are {quantization} only where they are packed"
        if reason is not None:
            raise ConfigError("quantization", f"is {quantization}, but {reason}")
        return asked
    if wanted is False:
        return None
    reasons = {one: one.why_not(device, dtype) for one in FORMATS}
    chosen = next((one for one, reason in reasons.items() if reason is None), None)
    if chosen is None and wanted:
        raise ConfigError("pack_weights", f"is True, but {reasons[FORMATS[0]]}")
    return chosen


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
    if checkpoint.stored is not None and own is torch.float16:
        own = torch.bfloat16  # which holds as large numbers as float32, and has kernels
    if load_config.dtype != "auto":
        return DtypeChoice(getattr(torch, load_config.dtype))
    if device.type != "cpu" or own is not torch.bfloat16 or load_config.quantization != "none":
        return DtypeChoice(own)
    if not torch.cpu._is_avx2_supported() or torch.cpu._is_avx512_bf16_supported():
        return DtypeChoice(own)  # of other kinds of processors nothing was measured
    if choose_packing(device, own, load_config.pack_weights) is not None:
        return DtypeChoice(own)
    if checkpoint.stored is not None:
        return DtypeChoice(torch.float32)
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


@torch.no_grad()
def pack_model(model: torch.nn.Module, how: Format) -> PackingReport:
    """Replace the model's linear layers.

    Args:
        model: in evaluation mode, not in use. Its modules are replaced in place, and its other
            parameters are moved.
        how: see `choose_packing`.

    Raises:
        ModelRefusedError: a packed layer does not compute the same results as the original.
    """
    groups = list(shared_weights(model, how))
    sizes = [one.how.placed_bytes(one.weight.shape, one.weight.dtype) for one in groups]
    # One allocation for all weights: its pages, which may be large ones, are filled while the
    # originals are freed.
    memory = torch.empty(sum(sizes), dtype=torch.uint8)
    pages = Pages(itertools.chain(model.parameters(), model.buffers()))
    linears = embeddings = copied = 0
    for group, place in zip(groups, memory.split_with_sizes(sizes), strict=True):
        weight = group.weight
        linears += len(group.linears)
        held = group.how(weight.shape, weight.dtype, place)
        name, rows = next(iter(group.linears)), _some_rows(weight)
        tables = {name: embedding(rows) for name, embedding in group.embeddings.items()}
        products = _pack_slices(name, weight, held, pages if group.is_ours else None)
        for name, linear in group.linears.items():
            made = PackedLinear(held, linear)
            _exchange(model, name, linear, made, products)
            if not group.is_ours:
                made.share(linear.weight)
        if group.is_ours:
            embeddings += len(group.embeddings)
            for name, embedding in group.embeddings.items():
                table = PackedEmbedding(held, embedding)
                expected = table.scaled(held.rows(rows)) if held.changes_results else tables[name]
                if not torch.equal(table(rows).view(torch.int16), expected.view(torch.int16)):
                    raise ModelRefusedError(f"{name}: {WRONG.format('rows')}")
                model.set_submodule(name, table)
        else:
            copied += weight.nbytes
        group.linears.clear()
        group.embeddings.clear()
    # The other parameters may be in a mapping of the checkpoint's file, and would keep all of it in
    # memory.
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return PackingReport(linears, embeddings, how.described(), copied)


@dataclass(slots=True)
class _Group:
    """The layers that share one weight, by name, and the format that takes it.

    `is_ours` says that nothing else holds the weight. Embeddings that cannot read a packed weight
    hold theirs.
    """

    linears: dict[str, torch.nn.Linear]
    embeddings: dict[str, torch.nn.Embedding]
    is_ours: bool
    how: Format

    @property
    def weight(self) -> torch.Tensor:
        return next(iter(self.linears.values())).weight


def shared_weights(model: torch.nn.Module, how: Format | None) -> Iterator[_Group]:
    """Return the weights that can be packed, in the order in which their first layers are found."""
    if how is None:
        return
    like = next(model.parameters())
    output = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    holders: dict[int, list[tuple[str, torch.nn.Module]]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), []).append((name, module))
    for found in holders.values():
        is_table = any(one is output or isinstance(one, torch.nn.Embedding) for _, one in found)
        own = how.of_tables() if is_table else how
        linears = {
            name: one
            for name, one in found
            if isinstance(one, torch.nn.Linear) and _is_plain_linear(one, like, own)
        }
        embeddings = {
            name: one
            for name, one in found
            if own.reads_rows and isinstance(one, torch.nn.Embedding) and _is_plain_embedding(one)
        }
        # A bias is also a parameter.
        weights = {id(one.weight) for one in linears.values()}
        if len(weights) != 1 or holders.get(next(iter(weights))) is not found:
            continue
        yield _Group(linears, embeddings, len(found) == len(linears) + len(embeddings), own)


def _is_plain_linear(module: torch.nn.Linear, like: torch.Tensor, how: Format) -> bool:
    weight = module.weight
    return (
        type(module) is torch.nn.Linear
        and (weight.dtype, weight.device) == (like.dtype, like.device)
        and how.takes(weight)
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


def held_bytes(model: torch.nn.Module, how: Format | None) -> dict[str, int]:
    """Return how many bytes each parameter, and each weight that is quantised in the file, takes
    after packing, by its first name.

    Args:
        model: not packed; it may be on the meta device.
        how: see `choose_packing`.
    """
    held = {name: parameter.nbytes for name, parameter in model.named_parameters()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in shared_weights(model, how):
        weight, name = group.weight, names[id(group.weight)]
        packed = group.how.held_bytes(weight.shape, weight.dtype)
        held[name] = packed + (0 if group.is_ours else weight.nbytes)
    for name, stored in stored_weights(model).items():
        is_packed = packs_stored(stored, how)
        held[f"{name}.weight"] = (
            grouped.held_bytes(stored.shape, stored.stored.layout) if is_packed else stored.nbytes
        )
    return held


def packs_stored(stored: StoredModule, packing: Format | None) -> bool:
    """Return whether a layer's weight will be packed, where plain weights are packed like this."""
    return (
        packing is not None
        and packing.is_ours
        and grouped.Grouped.why_not(torch.device("cpu"), stored.dtype) is None
        and grouped.why_not_held(stored.shape[1], stored.stored.layout) is None
    )


def _pack_slices(
    name: str, weight: torch.Tensor, held: WeightFormat, pages: Pages | None
) -> torch.Tensor:
    """Pack a weight slice by slice.

    Each slice is checked against the original. The original is then given back to `pages`, unless
    `pages` is None.

    Returns:
        The result of `_random_products` for the original, or for what the format rounds it to.
    """
    products = []
    for part, own in held.slices(weight):
        own.pack(part)
        if own.reads_rows and not own.holds(part, _some_rows(part)):
            if not part.isfinite().all():
                raise ModelRefusedError(NOT_FINITE.format(name=f"{name}.weight"))
            raise ModelRefusedError(f"{name}: {WRONG.format('weights')}")
        products.append(_random_products(own.unpacked() if own.changes_results else part))
        if pages is not None:
            pages.give_back(part)
    return torch.cat(products, -1)


def _some_rows(weight: torch.Tensor) -> torch.Tensor:
    return torch.linspace(0, len(weight) - 1, min(len(weight), _SAMPLED_ROWS)).long()


NOT_FINITE = (
    "{name} has elements that are NaN or infinite: the checkpoint is damaged, or its training has "
    "diverged; get a whole one"
)
WRONG = (
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
    packed: PackedLinear,
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
        raise ModelRefusedError(f"{name}: {WRONG.format('results')}")
    packed.train(linear.training)
    model.set_submodule(name, packed)
