"""What becomes of weights that are quantised in their files.

check_stored     ─▶ options with which they are not served are refused
describe_stored  ─▶ a line for the log
pages_given_back ─▶ what the model's own code reads of the file does not stay in memory
pack_stored      ─▶ for each layer: its codes packed, read back, multiplied, replaced, given back

The reference is the layer that holds the file's tensors (`StoredLinear`). It computes the formula
of the format, while packing goes through the order of inputs that the kernels read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.functional import linear as torch_linear
from transformers import PreTrainedModel

from engine.contract.config import LoadConfig
from engine.contract.errors import ConfigError, ModelRefusedError
from engine.loading.checkpoint import Checkpoint
from engine.loading.memory import GIB
from engine.loading.packing import NOT_FINITE, WRONG, held_bytes, packs_stored, shared_weights
from engine.loading.pages import Pages
from engine.loading.quantised.stored_linear import (
    StoredEmbedding,
    StoredLinear,
    StoredModule,
    stored_modules,
    stored_weights,
)
from engine.models.formats.grouped import Grouped
from engine.models.formats.native import Native, ask_for_large_pages, packed_bytes
from engine.models.formats.registry import Format, named
from engine.models.held_layer import HeldLayer, PackedEmbedding, PackedLinear

_PROBE_ROWS = 3
"""The number of rows of random input on which a packed layer is compared."""
_TOLERANCE = 5e-3
"""The allowed error of an output over these rows, relative to that output. Rounding a result to
bfloat16 makes at most 0.2 %.
"""
_SAMPLED_ROWS = 64
"""About how many rows of a slice are compared as embeddings read them."""
_ROUNDED = 2.0**-7
"""The allowed error of a row's elements, relative to each: they are rounded to bfloat16."""
_FLOOR = 2.0**-14
"""The error that the order of sums may add, relative to the largest output."""


def check_stored(checkpoint: Checkpoint, load_config: LoadConfig, device: torch.device) -> None:
    """Refuse options with which weights that are quantised in their files are not served.

    Raises:
        ConfigError, ModelRefusedError: an option, or the device, does not go with them.
    """
    if checkpoint.stored is None:
        return
    told = f"{checkpoint.path}: the weights are {checkpoint.stored.form.described}"
    if load_config.quantization != "none":
        asked = named(load_config.quantization)
        if asked.of_tables() is not asked:
            raise ConfigError(
                "quantization",
                f"is {asked.name}, but {told} already; {asked.of_tables().name} quantizes what the "
                "files have left in 16 bits, none leaves it",
            )
    if load_config.tensor_parallel != "none":
        raise ConfigError(
            "tensor_parallel",
            f"is {load_config.tensor_parallel}, but {told}, which are not divided; set it to none",
        )
    if device.type != "cpu":
        raise ModelRefusedError(
            f"{told}, which are served on a CPU: set device to cpu, or give the model that they "
            "were made from"
        ).naming("device")
    if load_config.dtype == "float16":
        raise ConfigError(
            "dtype",
            f"is float16, but {told}, which are served as bfloat16 or float32; set it to auto",
        )


@contextmanager
def pages_given_back(model: torch.nn.Module) -> Iterator[None]:
    """Inside the `with` block, give the pages of a layer's tensors back when it has computed.

    The tensors are in a mapping of the file, so what is read again is read from there.
    """
    pages = _pages(model)

    def give_back(module: torch.nn.Module, *_: object) -> None:
        for tensor in module._buffers.values():
            if tensor is not None:
                pages.give_back(tensor)

    handles = [one.register_forward_hook(give_back) for one in stored_modules(model).values()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def pack_stored(model: torch.nn.Module, packing: Format | None) -> str:
    """Replace the modules whose weights are quantised in the file by packed ones.

    Args:
        model: in evaluation mode, not in use. Its modules are replaced in place.
        packing: how plain weights are packed.

    Returns:
        A line for the log.

    Raises:
        ModelRefusedError: a packed layer does not hold, or compute, what the file says.
    """
    modules = stored_modules(model)
    weights = [one for one in stored_weights(model).values() if packs_stored(one, packing)]
    sizes = [packed_bytes(one.shape, one.dtype, one.stored.layout.bits) for one in weights]
    memory = torch.empty(sum(sizes), dtype=torch.uint8)
    ask_for_large_pages(memory)
    pages = _pages(model)
    for weight, place in zip(weights, memory.split_with_sizes(sizes), strict=True):
        users = {name: one for name, one in modules.items() if one.stored is weight.stored}
        held = Grouped(weight.shape, weight.dtype, weight.stored.layout, place)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn((_PROBE_ROWS, weight.shape[1]), generator=generator).to(weight.dtype)
        first = next(iter(users))
        parts = [_packed_part(first, weight, part, held, x) for part in weight.slices()]
        for name, user in users.items():
            made = packed_module(user, held)
            if isinstance(user, StoredLinear):
                _check_products(name, made(x).float(), torch.cat(parts, -1), user.bias)
            made.train(user.training)
            model.set_submodule(name, made)
        for tensor in weight.parts.values():
            pages.give_back(tensor)
    if not weights:
        return "quantized weights: computed in torch, which is slow"
    return f"quantized weights: {len(weights)} packed for {Grouped.described()}"


def _pages(model: torch.nn.Module) -> Pages:
    """Return the pages of a model, in which layers with a tied weight have views of the same."""
    tensors = {
        (one.data_ptr(), one.nbytes): one
        for one in itertools.chain(model.parameters(), model.buffers())
    }
    return Pages(tensors.values())


def packed_module(user: StoredModule, held: Grouped) -> HeldLayer:
    """Return a module that does the same with a packed weight."""
    if isinstance(user, StoredEmbedding):
        return PackedEmbedding(held, user)
    return PackedLinear(held, user)


def _packed_part(
    name: str, stored: StoredModule, part: slice, held: Grouped, x: torch.Tensor
) -> torch.Tensor:
    """Pack some outputs and read them back. Return x times what the file says that they are."""
    given = stored.codes(part)
    if not all(one is None or bool(one.isfinite().all()) for one in given.parts):
        raise ModelRefusedError(NOT_FINITE.format(name=f"{name}.weight"))
    held.pack_codes(part.start, given)
    found = held.codes(torch.arange(part.start, part.stop))
    is_same = all(
        own is file if own is None or file is None else torch.equal(own, file)
        for own, file in zip(found.parts, given.parts, strict=True)
    )
    values = stored.values(part)
    some = torch.arange(part.start, part.stop, max(1, (part.stop - part.start) // _SAMPLED_ROWS))
    if not is_same or not torch.allclose(
        held.rows(some).float(), values[some - part.start], rtol=_ROUNDED, atol=0
    ):
        raise ModelRefusedError(f"{name}: {WRONG.format('weights')}")
    return torch_linear(x.float(), values)


def _check_products(
    name: str, actual: torch.Tensor, expected: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Compare products [rows, N] of a packed layer with those of the file's weights."""
    expected = expected if bias is None else expected + bias.float()
    errors, sizes = (one.square().sum(0).sqrt() for one in (actual - expected, expected))
    if not bool((errors <= sizes * _TOLERANCE + sizes.max() * _FLOOR).all()):
        raise ModelRefusedError(f"{name}: {WRONG.format('results')}")


def describe_stored(model: PreTrainedModel, packing: Format | None) -> str:
    """Return a line for the log: what is quantised in the file, and what could be smaller.

    model: not packed yet, with weights that are quantised in the file.
    """
    held, stored = held_bytes(model, packing), stored_weights(model)
    form = next(iter(stored.values())).stored.form
    plain = [name for name, one in model.named_parameters() if one.dim() > 1]
    text = f"quantized in the file: {len(stored)} weights, {form.described}"
    if plain:
        left, total = sum(held[name] for name in plain) / GIB, sum(held.values()) / GIB
        names = ", ".join(name.removesuffix(".weight") for name in plain[:2])
        others = f" and {len(plain) - 2} more" if len(plain) > 2 else ""
        text += f"; not: {names}{others}, {left:.2f} of {total:.2f} GiB"
        is_rounded = packing is not None and packing.changes_results
        if not is_rounded and any(shared_weights(model, packing or Native)):
            text += ", of which quantization int8 halves the output layer"
    return text
