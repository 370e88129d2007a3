"""Watches a model's attention calls, to find the shapes of its KV and its windows.

A config may be wrong about them (it is for multi-head latent attention), so they are taken from the
calls themselves. The load gate watches a forward of the loaded model, and compares results at each
call. `headrace-server plan` watches a forward of a model without weights, on the meta device.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from engine.attention.interface import LayerShape
from engine.contract.errors import ModelRefusedError
from engine.loading.mask_rules import MaskWatch, UnknownMaskError
from engine.loading.rotary import read_rope

_LONGEST_CONTEXT = 1 << 20
"""The context assumed for a model without a limit."""


def masks_of(model: PreTrainedModel) -> MaskWatch:
    """Create a watch of a model's masks."""
    rope = read_rope(model)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    longest = context if rope is None else rope.longest
    return MaskWatch(longest or _LONGEST_CONTEXT)


class LayerWatch:
    """Records attention calls.

    Attributes:
        masks: replaces the model's mask function.
        shapes: the KV shapes, by layer.
        heads: the number of query heads, by layer.
        calls: the number of calls each layer made; cleared before each forward.
        dtypes: the types of the keys.
    """

    def __init__(self, masks: MaskWatch) -> None:
        self.masks = masks
        self.shapes: dict[int, LayerShape] = {}
        self.heads: dict[int, int] = {}
        self.calls: dict[int, int] = {}
        self.dtypes: set[torch.dtype] = set()

    def record(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        window: object,
    ) -> int:
        """Record a call, and return its layer's index.

        Args:
            module: the attention layer.
            query, key, value: [1, H, T, D], see `engine.attention.interface`.
            mask: the attention mask.
            window: the window that the layer passes to attention, if any.

        Raises:
            ModelRefusedError: this layer would run incorrectly.
        """
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int):
            raise ModelRefusedError(
                f"{type(module).__name__} has no layer_idx, so its cache cannot be found"
            )
        if query.shape[0] != 1:
            raise ModelRefusedError(
                f"{type(module).__name__}, layer {layer}, attends in {query.shape[0]} rows where "
                "one was given, so its tokens cannot be told apart in a ragged batch"
            )
        if query.shape[2] != key.shape[2]:
            raise ModelRefusedError(
                f"{type(module).__name__}, layer {layer}, attends with {query.shape[2]} queries to "
                f"{key.shape[2]} keys, where each token must have one of both"
            )
        self.calls[layer] = self.calls.get(layer, 0) + 1
        self.dtypes.add(key.dtype)
        self.heads[layer] = query.shape[1]
        self.shapes[layer] = LayerShape(
            num_kv_heads=key.shape[1],
            key_dim=key.shape[-1],
            value_dim=value.shape[-1],
            window=self._window(layer, module, mask, window),
        )
        return layer

    def _window(
        self, layer: int, module: torch.nn.Module, mask: torch.Tensor | None, told: object
    ) -> int | None:
        """Return the window of the layer's mask, which must agree with the one passed to
        attention.
        """
        name = f"{type(module).__name__}, layer {layer}"
        try:
            window = self.masks.window(mask)
        except UnknownMaskError as error:
            raise ModelRefusedError(f"{name}: {error}") from error
        if isinstance(told, int) and told < self.masks.context and told != window:
            raise ModelRefusedError(
                f"{name}: attention is told a window of {told} tokens, but the window of the "
                f"layer's mask is {window}"
            )
        return window

    def all_shapes(self) -> tuple[LayerShape, ...]:
        """Return the shapes of all layers, in layer order."""
        return tuple(self.shapes[layer] for layer in range(len(self.shapes)))

    def dtype(self, model: PreTrainedModel) -> torch.dtype:
        """The type of keys and values. Raises ModelRefusedError if there are several."""
        if len(self.dtypes) != 1:
            raise ModelRefusedError(
                f"{type(model).__name__} keeps keys in several types: "
                f"{', '.join(sorted(str(dtype) for dtype in self.dtypes))}"
            )
        return next(iter(self.dtypes))

    def check(self, model: PreTrainedModel, num_layers: int) -> None:
        """Check the calls of one forward.

        Raises:
            ModelRefusedError: a layer made no call or several calls, or the config contradicts
                what the layers do.
        """
        name = type(model).__name__
        wrong = {layer: self.calls.get(layer, 0) for layer in range(num_layers)}
        wrong = {layer: calls for layer, calls in wrong.items() if calls != 1}
        if wrong or len(self.calls) != num_layers:
            raise ModelRefusedError(
                f"{name} has {num_layers} layers, but the attention calls by layer were "
                f"{self.calls}; each layer must attend once"
            )
        text_config = model.config.get_text_config()
        kinds = getattr(text_config, "layer_types", None)
        # If the config has no kinds of layers, the cache of `generate` drops everything beyond the
        # config's window or chunk, even if the layers do not use one.
        full = [layer for layer in range(num_layers) if self.shapes[layer].window is None]
        for option in ("sliding_window", "attention_chunk_size"):
            window = getattr(text_config, option, None)
            if not window or kinds or not full:
                continue
            if not getattr(text_config, "use_sliding_window", True):
                continue
            if window < self.masks.context:
                raise ModelRefusedError(
                    f"{name}: {option} is {window} in the config, but layer {full[0]} attends to "
                    "all tokens"
                )
        for layer, kind in enumerate(kinds or ()):
            if (kind == "sliding_attention") != (self.shapes[layer].window is not None):
                raise ModelRefusedError(
                    f"{name}, layer {layer}: the config says {kind}, but the layer's window is "
                    f"{self.shapes[layer].window}"
                )
