"""Layers whose weights are held in a form of the kernels'. To their owner they are as if they had
the weights themselves: `weight`, `state_dict` and `load_state_dict` read and write them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch

from engine.models.packed_weight import PackedWeight

WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""The types of tensors that are taken over as weights."""


class HeldLayer(torch.nn.Module):
    """A layer whose weight [N, K] is held in a form of the kernels'. To its owner it is as if it
    had the weight itself.

    Attributes:
        shape: N and K.
        was_asked: whether the weight, or that it stays, was given since this was last set to False.
        guard: called before the weight is changed; raises if it must not be now.
    """

    shape: tuple[int, int]
    was_asked: bool
    guard: Callable[[], None] | None
    _shared: torch.Tensor | None
    _seen: dict[str, tuple[weakref.ref[torch.Tensor], int]]

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype) -> None:
        """shape: N and K; dtype: of inputs and outputs."""
        super().__init__()
        self.shape, self._held_as = shape, dtype
        # Empty, but present: a model's dtype and device are those of its first parameter.
        nothing = torch.empty(0, dtype=dtype)
        self.register_parameter("_dtype", torch.nn.Parameter(nothing, requires_grad=False))
        self.was_asked = False
        self.guard = None
        self._shared = None
        self._seen = {}  # one for this module and its twin in a view

    @property
    def weight(self) -> torch.Tensor:
        """[N, K]: what is written to it is taken over."""
        return PackedWeight(self, torch.empty(self.shape, dtype=self._held_as, device="meta"))

    @property
    def key(self) -> Hashable:
        """Equal for what shares a weight; the id of its parameter, if there is one."""
        return id(self) if self._shared is None else id(self._shared)

    def unpacked(self) -> torch.Tensor:
        """The weight as the model has it, [out, in]."""
        raise NotImplementedError

    def hold(self, weight: torch.Tensor) -> None:
        """Hold other elements from now on. weight: of the layer's shape, on the CPU."""
        raise NotImplementedError

    def take(self, weight: torch.Tensor) -> None:
        """See HoldsWeight.

        Raises:
            ValueError: the weight has another shape, or is no tensor of floating-point numbers.
            WeightsRefusedError: a step may be reading it.
        """
        if self.guard is not None:
            self.guard()
        reason = why_not_taken(weight, self.shape)
        if reason is not None:
            raise ValueError(reason)
        with torch.no_grad():
            self.was_asked = True
            weight = weight.clone() if isinstance(weight, PackedWeight) else weight.detach().cpu()
            self.hold(weight)
            if self._shared is not None:
                self._shared.copy_(weight)
                self._has_changed("shared", self._shared)

    def share(self, weight: torch.Tensor) -> None:
        """Note that other modules have the same weight, a parameter: what is written there is the
        layer's, too.
        """
        vars(self)["_shared"] = weight  # it is not this module's parameter
        self._has_changed("shared", weight)

    def sync(self) -> None:
        """Take over what was written, or set, in the place of parameters that the kernels read in
        another form. Cheap if nothing was.
        """
        if self._shared is not None and self._has_changed("shared", self._shared):
            self.hold(self._shared.detach())

    def _has_changed(self, name: str, tensor: torch.Tensor) -> bool:
        seen, count = self._seen.get(name), writes(tensor)
        if seen is not None and seen[0]() is tensor and seen[1] == count:
            return False
        self._seen[name] = weakref.ref(tensor), count
        return True

    def __getstate__(self) -> dict[str, Any]:
        """What a copy has: it looks at its parameters anew."""
        return {**vars(self), "_seen": {}}

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[f"{prefix}_dtype"]
        destination[f"{prefix}weight"] = self.unpacked()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        own = {name: one for name, one in state_dict.items() if name.startswith(prefix)}
        name = f"{prefix}weight"
        weight = own.pop(name, None)
        own[f"{prefix}_dtype"] = self._dtype
        super()._load_from_state_dict(
            own, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if weight is not None:
            try:
                self.take(weight)
            except ValueError as error:
                error_msgs.append(f"{name}: {error}")
        elif strict:
            missing_keys.append(name)
        self.was_asked = True
        self.sync()


def held_layers(model: torch.nn.Module) -> list[HeldLayer]:
    """The layers of a model whose weights are held in a form of the kernels'."""
    return [one for one in model.modules() if isinstance(one, HeldLayer)]


def writes(tensor: torch.Tensor) -> int:
    """How often a tensor was written in place; 0 for those that do not count."""
    return 0 if tensor.is_inference() else tensor._version


def why_not_taken(weight: object, shape: tuple[int, ...]) -> str | None:
    """Why a tensor cannot become a weight of this shape; None: it can."""
    if not isinstance(weight, torch.Tensor):
        return f"is a {type(weight).__name__}; it must be a tensor"
    if tuple(weight.shape) != tuple(shape):
        return f"has shape {list(weight.shape)}; it must be {list(shape)}"
    if weight.dtype not in WEIGHT_DTYPES or weight.layout is not torch.strided:
        return (
            f"is {weight.dtype}, {weight.layout}; it must be an ordinary tensor of float32, "
            "bfloat16, float16 or float64: dequantize it first"
        )
    if weight.is_meta:
        return "is on the meta device, and has no elements"
    return None
