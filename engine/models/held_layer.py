"""Layers that hold packed weights (see `engine.models.formats`). To the owner of a model they look
like ordinary layers: `weight`, `state_dict` and `load_state_dict` read and write the weights.

These layers do not support gradients: a backward pass through one raises an error, so that nobody
unknowingly trains only the rest of a model. Converting the model (`model.to(dtype)`) leaves packed
weights unchanged.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from typing_extensions import override

from engine.contract.errors import NoGradientsError
from engine.models.formats.weight_format import WeightFormat
from engine.models.packed_weight import PackedWeight

WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""The types of tensors that are accepted as weights."""
_UNPACKED = "_headrace_unpacked"
"""The attribute of a tensor in a state dict: the id of the packed weight it was made from."""


class HeldLayer(torch.nn.Module):
    """The base of layers that hold their weight [N, K] packed.

    Attributes:
        held: the weight, which other layers may share.
        was_asked: whether the layer has received a weight, or been told to keep the one it has,
            since this was last set to False.
        guard: called before the weight is changed. Raises if it must not be changed now.
    """

    held: WeightFormat
    was_asked: bool
    guard: Callable[[], None] | None
    _shared: torch.Tensor | None
    _seen: dict[str, tuple[weakref.ref[torch.Tensor], int]]

    def __init__(self, held: WeightFormat) -> None:
        super().__init__()
        self.held = held
        # Empty, but present: a model's dtype and device are those of its first parameter.
        nothing = torch.empty(0, dtype=held.dtype)
        self.register_parameter("_dtype", torch.nn.Parameter(nothing, requires_grad=False))
        self.was_asked = False
        self.guard = None
        self._shared = None
        self._seen = {}  # one for this module and its twin in a view

    @property
    def weight(self) -> torch.Tensor:
        """The weight, [N, K]. Writing to it changes the layer."""
        held = self.held
        return PackedWeight(self, torch.empty(held.shape, dtype=held.dtype, device="meta"))

    @property
    def key(self) -> Hashable:
        """A key that is equal for layers that share a weight: the id of its parameter, if it has
        one.
        """
        return id(self.held) if self._shared is None else id(self._shared)

    def _hold(self, weight: torch.Tensor) -> None:
        for rows, own in self.held.slices(weight):
            own.pack(rows)
        # torch counts neither what a kernel writes nor what is written inside an operation.
        torch.autograd.graph.increment_version(list(self.held.tensors().values()))

    def take(self, weight: torch.Tensor) -> None:
        """See HoldsWeight.

        Raises:
            ValueError: the weight has another shape, or is not a tensor of floating-point numbers.
            WeightsRefusedError: a step may be reading it.
        """
        if self.guard is not None:
            self.guard()
        reason = why_not_taken(weight, self.held.shape)
        if reason is not None:
            raise ValueError(reason)
        with torch.no_grad():
            self.was_asked = True
            weight = weight.clone() if isinstance(weight, PackedWeight) else weight.detach().cpu()
            self._hold(weight)
            if self._shared is not None:
                self._shared.copy_(weight)
                self._has_changed("shared", self._shared)

    def share(self, weight: torch.Tensor) -> None:
        """Record that other modules use the same weight, a parameter. Changes to it also change the
        layer.
        """
        vars(self)["_shared"] = weight  # it is not this module's parameter
        self._has_changed("shared", weight)

    def sync(self) -> None:
        """Apply any changes to parameters that the kernels read in another format.

        This is cheap if nothing has changed.
        """
        if self._shared is not None and self._has_changed("shared", self._shared):
            self._hold(self._shared.detach())

    def _has_changed(self, name: str, tensor: torch.Tensor) -> bool:
        seen, count = self._seen.get(name), writes(tensor)
        if seen is not None and seen[0]() is tensor and seen[1] == count:
            return False
        self._seen[name] = weakref.ref(tensor), count
        return True

    @override
    def extra_repr(self) -> str:
        """Return the arguments for `repr`."""
        return f"{self.held.shape}, {self.held.name}"

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy. The copy checks its parameters for changes again."""
        return {**vars(self), "_seen": {}}

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        # One tensor for all that share a packed weight, so that it is saved once.
        shared = (one for one in destination.values() if vars(one).get(_UNPACKED) == id(self.held))
        weight = next(shared, None)
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[f"{prefix}_dtype"]
        if weight is None:
            weight = self.held.unpacked()
            setattr(weight, _UNPACKED, id(self.held))
        destination[f"{prefix}weight"] = weight

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


class PackedLinear(HeldLayer):
    """Replaces a torch.nn.Linear."""

    bias: torch.nn.Parameter | None
    padded_bias: torch.Tensor | None

    def __init__(self, held: WeightFormat, linear: torch.nn.Module) -> None:
        """Make a layer that computes the same as `linear`.

        Args:
            held: the packed weight of `linear`.
            linear: the linear layer to replace. Its weight is not kept.
        """
        super().__init__(held)
        self.out_features, self.in_features = held.shape
        bias = linear._parameters["bias"]
        self.register_parameter("bias", bias)
        self.register_buffer("padded_bias", held.padded(bias), persistent=False)
        self.sync()

    @override
    def sync(self) -> None:
        """Apply changes; see HeldLayer. The kernel may read a padded copy of the bias."""
        super().sync()
        bias, padded = self.bias, self.padded_bias
        if bias is not None and padded is not None and self._has_changed("bias", bias):
            with torch.no_grad():
                padded[: len(bias)].copy_(bias)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the layer: [..., K] → [..., N]."""
        bias = self.bias if self.padded_bias is None else self.padded_bias
        if torch.compiler.is_compiling():
            return self.held.multiply(x, bias)
        self.sync()
        if not torch.is_grad_enabled():
            return self.held.multiply(x, bias)
        y: torch.Tensor = _NoGradients.apply(  # type: ignore[no-untyped-call]
            x, self.bias, lambda: self.held.multiply(x, bias)
        )
        return y


class PackedEmbedding(HeldLayer):
    """Replaces a torch.nn.Embedding that shares its weight with a linear layer, or Gemma's
    embedding, which multiplies rows by its `embed_scale`.
    """

    embed_scale: torch.Tensor | None

    def __init__(self, held: WeightFormat, embedding: torch.nn.Module) -> None:
        """Make a table that returns the same as `embedding`.

        Args:
            held: the packed weight, shared with the linear layer.
            embedding: the embedding to replace. Its weight is not kept.
        """
        super().__init__(held)
        self.num_embeddings, self.embedding_dim = held.shape
        self.padding_idx: int | None = getattr(embedding, "padding_idx", None)
        factor = getattr(embedding, "embed_scale", None)
        self.register_buffer("embed_scale", factor, persistent=False)

    @override
    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Look up rows: [...] → [..., K]."""
        return self.scaled(self.held.rows(token_ids))

    def scaled(self, rows: torch.Tensor) -> torch.Tensor:
        """Scale rows of the weight if the embedding scales its results."""
        return rows if self.embed_scale is None else rows * self.embed_scale.to(rows.dtype)


def held_layers(model: torch.nn.Module) -> list[HeldLayer]:
    """Return the layers of a model that hold their weights packed."""
    return [one for one in model.modules() if isinstance(one, HeldLayer)]


def writes(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written in place, or 0 if it does not keep count."""
    return 0 if tensor.is_inference() else tensor._version


def why_not_taken(weight: object, shape: tuple[int, ...]) -> str | None:
    """Return why a tensor cannot become a weight of this shape, or None if it can."""
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
