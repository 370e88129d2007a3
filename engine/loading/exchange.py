"""Writes new weights to a verified model, into the memory of the old ones.

    names and tensors ─▶ all known, correct shapes, none missing ─▶ written, packed again

Everything is checked before anything is written. Names are those of the model's `state_dict`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from engine.contract.errors import WeightsRefusedError
from engine.models.held_layer import HeldLayer, held_layers, why_not_taken

Weights = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
_NAMED = 3
"""The maximum number of names in an error message."""


@dataclass(frozen=True, slots=True)
class _Place:
    """The destination of a weight.

    Attributes:
        key: equal for names that share a weight.
        shape: the shape of the weight.
        holder: a packed layer, or the tensor itself.
        is_needed: whether a complete set of weights contains it.
    """

    key: Hashable
    shape: tuple[int, ...]
    holder: HeldLayer | torch.Tensor
    is_needed: bool

    def why_not(self, tensor: object) -> str | None:
        """Return why a tensor cannot be written here, or None if it can."""
        holder = self.holder
        if isinstance(holder, HeldLayer) and not holder.held.is_writable:
            return "is quantized in its file; load a file that has other weights"
        if isinstance(holder, HeldLayer) or holder.dtype.is_floating_point:
            return why_not_taken(tensor, self.shape)
        if not isinstance(tensor, torch.Tensor) or tensor.dtype is not holder.dtype:
            return f"must be a tensor of {holder.dtype}"
        return None if tensor.shape == holder.shape else f"must have shape {list(self.shape)}"


def exchange_weights(model: torch.nn.Module, weights: Weights, *, partial: bool) -> None:
    """Write new weights to a model. No step may run at the same time.

    Args:
        model: the owner's model, not split across processes.
        weights: the tensors by name. For names that share a weight, one is enough.
        partial: whether names may be missing. Those weights are kept.

    Raises:
        WeightsRefusedError: a name is unknown or missing, or a tensor does not fit. Nothing was
            changed.
    """
    places = dict(_places(model))
    found: dict[Hashable, tuple[str, torch.Tensor]] = {}
    for name, tensor in weights.items() if isinstance(weights, Mapping) else weights:
        place = places.get(name)
        if place is None:
            raise WeightsRefusedError(
                f"{name}: this model has no such weight; names are those of its state_dict(), such "
                f"as {next(iter(places))}"
            )
        reason = place.why_not(tensor)
        if reason is not None:
            raise WeightsRefusedError(f"{name} {reason}")
        other = found.setdefault(place.key, (name, tensor))
        if other[1] is not tensor and not _are_equal(other[1], tensor):
            raise WeightsRefusedError(f"{name} and {other[0]} are one weight here, and differ")
    missing = [name for name, one in places.items() if one.is_needed and one.key not in found]
    if missing and not partial:
        raise WeightsRefusedError(
            f"{len(missing)} weights are missing ({', '.join(missing[:_NAMED])}): give those of "
            "the whole model, or partial=True if they are to stay"
        )
    holders = {one.key: one.holder for one in places.values()}
    # A packed layer also writes the parameter of others that share its weight.
    holders |= {one.key: one.holder for one in places.values() if isinstance(one.holder, HeldLayer)}
    with torch.no_grad():
        for key, (_, tensor) in found.items():
            holder = holders[key]
            if isinstance(holder, HeldLayer):
                holder.take(tensor)
            else:
                holder.copy_(tensor)
    for layer in held_layers(model):
        layer.was_asked = True


def _places(model: torch.nn.Module) -> Iterator[tuple[str, _Place]]:
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        if isinstance(module, HeldLayer):
            yield f"{prefix}weight", _Place(module.key, module.held.shape, module, True)
        for name, one in module._parameters.items():
            if one is not None and not (isinstance(module, HeldLayer) and not one.numel()):
                yield prefix + name, _Place(id(one), tuple(one.shape), one, True)
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield prefix + name, _Place(id(buffer), tuple(buffer.shape), buffer, False)


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype is other.dtype and (
        (one.data_ptr() == other.data_ptr() and one.stride() == other.stride())
        or torch.equal(one, other.to(one.device))
    )
