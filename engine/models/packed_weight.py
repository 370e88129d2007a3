"""Presents a packed weight as a tensor [N, K] that can be read and written like any other.

    weight[0].mul_(2) ─▶ unpack ─▶ row 0 of the copy, times 2 ─▶ pack again ─▶ the packed memory

No unpacked copy is kept: each operation unpacks what it reads, so it always sees the layer's
current weight. Results are ordinary tensors, except for views. A view remembers how it was derived
from the weight, so writing to it also changes the packed memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map_only

from engine.models.formats.weight_format import WeightFormat


class HoldsWeight(Protocol):
    """A layer that stores its weight in packed form."""

    held: WeightFormat

    def take(self, weight: torch.Tensor) -> None:
        """Replace the weight, in the same memory."""
        ...


_View = Callable[[torch.Tensor], torch.Tensor]


class PackedWeight(torch.Tensor):
    """A packed weight as a tensor. It has no storage, so nobody can write to it without the layer
    knowing.
    """

    _layer: HoldsWeight
    _views: Sequence[_View]

    @staticmethod
    def __new__(
        cls, layer: HoldsWeight, like: torch.Tensor, views: Sequence[_View] = ()
    ) -> PackedWeight:
        """Create the tensor for a layer's weight, or for a view of it.

        Args:
            layer: the layer.
            like: a tensor of the same shape, strides and type. It is not kept.
            views: the operations that derive this view from the weight, in order.
        """
        self: PackedWeight = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=torch.device("cpu")
        )
        self._layer, self._views = layer, views
        return self

    # What is computed is decided below, where every operation passes, also those of collectives.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # stated wrongly there
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation on unpacked copies, then pack those that it has written to."""
        names = [one.name for one in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
        copies: dict[int, torch.Tensor] = {}

        def unpack(one: PackedWeight) -> torch.Tensor:
            whole = copies.get(id(one._layer))
            if whole is None:
                whole = copies[id(one._layer)] = one._layer.held.unpacked()
            for view in one._views:
                whole = view(whole)
            return whole

        plain = tree_map_only(PackedWeight, unpack, given)
        made = func(**plain)
        written: dict[int, HoldsWeight] = {}
        for argument in func._schema.arguments:
            if argument.alias_info is None or argument.name not in given:
                continue
            found = given[argument.name]
            for one in found if isinstance(found, (list, tuple)) else [found]:
                if not isinstance(one, PackedWeight):
                    continue
                if argument.alias_info.is_write:
                    written[id(one._layer)] = one._layer
                    made = one if made is plain[argument.name] else made
                else:
                    made = _views_of(one, func, plain, argument.name, made)
        for key, layer in written.items():
            layer.take(copies[key])
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Format the unpacked weight."""
        return repr(self.clone())

    @property
    def data(self) -> torch.Tensor:
        """The weight itself."""
        return self.detach()

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        self.copy_(values)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return a copy as an ordinary tensor."""
        return self.clone()

    def data_ptr(self) -> int:
        """Raise RuntimeError: the packed elements have no address in the weight's order."""
        raise RuntimeError("a packed weight has no address; clone() it, or read state_dict()")

    def tolist(self) -> Any:
        """Return the elements as lists."""
        return self.clone().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return a read-only copy, because writing to a copy would not change the weight."""
        array = self.clone().numpy(force=force)
        array.flags.writeable = False
        return array


def _views_of(one: PackedWeight, func: Any, given: dict[str, Any], name: str, made: Any) -> Any:
    """Wrap the results of a view operation so that they refer to the packed weight, too."""
    others = {key: value for key, value in given.items() if key != name}  # not the copy

    def view(index: int | None) -> _View:
        def compute(whole: torch.Tensor) -> torch.Tensor:
            found = func(**{**others, name: whole})
            return found if index is None else found[index]  # type: ignore[no-any-return]

        return compute

    if isinstance(made, torch.Tensor):
        return PackedWeight(one._layer, made, (*one._views, view(None)))
    return [
        PackedWeight(one._layer, part, (*one._views, view(index)))
        for index, part in enumerate(made)
    ]
