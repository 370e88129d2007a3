"""Records the results of the modules in a model's layers, by transformers' own code, before
anything is packed. Our decoder is then compared with them (`engine.models.comparison`).

    prompt ─▶ embedding ─ x ─▶ layer ─ x ─▶ layer … ─▶ norm ─▶ output ─▶ logits
                           [x, x · 2⁻¹⁰, x · 2⁶] ─▶ a batch of three, of which the first goes on
                                  (x · 2³ in float16, whose maximum is 65504)

The model runs once on a short prompt. Hooks give each layer its input in several magnitudes,
because a fault may depend on values: very small ones expose a norm's eps, and very large ones
expose which terms are added to each other. The magnitudes are the rows of one batch, so weights are
read only once. Other hooks keep the modules' results, and a replacement for eager attention keeps
queries and keys.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

from engine.models import description as described

_NAME = "headrace_recording"
_WIDE = (1.0, 2.0**-10, 2.0**6)
MAGNITUDES = {
    torch.float32: _WIDE,
    torch.bfloat16: _WIDE,
    torch.float16: (1.0, 2.0**-10, 2.0**3),
}
"""The factors for the layers' inputs, by the model's dtype. They are powers of two, so that no
element within range is rounded.
"""


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """The results of one layer. M is the number of MAGNITUDES, T the number of tokens.

    Attributes:
        x: the layer's input, [M * T, K].
        parts: results by the names of `engine.models.layer_parts.walk`, [M * T, width].
        options: the arguments of attention that are not tensors.
    """

    x: torch.Tensor
    parts: dict[str, torch.Tensor]
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """The results of a model.

    Attributes:
        token_ids: int64 [T].
        layers: the layers' results in order.
        normed: the last norm's result, [T, K].
        product: the output layer's result, [T, V].
        logits: [T, V].
    """

    token_ids: torch.Tensor
    layers: tuple[LayerRecord, ...]
    normed: torch.Tensor
    product: torch.Tensor
    logits: torch.Tensor


def record(
    model: PreTrainedModel, decoder: described.Decoder, token_ids: Sequence[int]
) -> ModelRecord:
    """Run a model on a prompt and record its results.

    Args:
        model: in evaluation mode and not in use. Only its attention implementation is changed, and
            restored afterwards.
        decoder: its description.
        token_ids: the prompt.
    """
    taps = _Taps(decoder, len(token_ids))
    AttentionInterface.register(_NAME, taps.attend)
    AttentionMaskInterface.register(_NAME, eager_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(_NAME)
    ids = torch.tensor([token_ids], device=model.device)
    try:
        with torch.inference_mode(), ExitStack() as hooks:
            for handle in taps.watch(model):
                hooks.callback(handle.remove)
            logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    finally:
        model.set_attn_implementation(before)
    normed, product = taps.made[decoder.norm.module], taps.made[decoder.output]
    layers = tuple(taps.layers)
    taps.forget()  # transformers keeps what is registered
    return ModelRecord(ids[0], layers, normed, product, logits[0])


class _Taps:
    """Collects what the hooks see.

    Attributes:
        layers: the recorded layers.
        made, given: the most recent result and input of each module, by path, as rows.
    """

    def __init__(self, decoder: described.Decoder, tokens: int) -> None:
        self._decoder = decoder
        self._tokens = tokens
        self.forget()

    def forget(self) -> None:
        """Drop all tensors."""
        self.layers: list[LayerRecord] = []
        self.made: dict[str, torch.Tensor] = {}
        self.given: dict[str, torch.Tensor] = {}
        self._turned: dict[str, torch.Tensor] = {}
        self._options: dict[str, Any] = {}

    def attend(self, module: Any, *tensors: Any, **options: Any) -> Any:
        """Record queries and keys, then call the model's eager attention."""
        queries, keys = (self._rows(one.transpose(1, 2)) for one in tensors[:2])
        self._turned = {"queries": queries, "keys": keys}
        self._options = {name: options.get(name) for name in ("scaling", "softcap", "s_aux")}
        eager = inspect.unwrap(type(module).forward).__globals__["eager_attention_forward"]
        return eager(module, *tensors, **options)

    def watch(self, model: PreTrainedModel) -> list[Any]:
        """Register hooks on all modules of the description, and return their handles."""
        paths = {self._decoder.norm.module, self._decoder.output}
        handles = []
        for layer in self._decoder.layers:
            handles += self._watch_layer(model, layer)
            paths |= _modules_of(layer)

        def keep(path: str) -> Any:
            def hook(_: Any, arguments: tuple[Any, ...], made: torch.Tensor) -> None:
                self.given[path], self.made[path] = self._rows(arguments[0]), self._rows(made)

            return hook

        return handles + [
            model.get_submodule(path).register_forward_hook(keep(path)) for path in sorted(paths)
        ]

    def _watch_layer(self, model: PreTrainedModel, layer: described.Layer) -> list[Any]:
        def widen(_: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
            x = arguments[0]
            return (torch.cat([x * one for one in MAGNITUDES[x.dtype]]), *arguments[1:])

        def keep(_: Any, arguments: tuple[Any, ...], y: torch.Tensor) -> torch.Tensor:
            self.layers.append(
                LayerRecord(self._rows(arguments[0]), self._parts(layer, y), self._options)
            )
            return y[:1]

        module = model.get_submodule(layer.module)
        return [module.register_forward_pre_hook(widen), module.register_forward_hook(keep)]

    def _rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Reshape to rows: [B, T, …] or, heads first, [B, H, T, D] → [B * T, width]."""
        if tensor.dim() == 4 and tensor.shape[1] != self._tokens:
            tensor = tensor.transpose(1, 2)
        return tensor.reshape(tensor.shape[0] * self._tokens, -1)

    def _parts(self, layer: described.Layer, y: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return what was recorded in a call of a layer, by the names of its operations."""
        attention, mlp, made, given = layer.attention, layer.mlp, self.made, self.given
        norms = dict(_norms_of(layer))
        parts = {name: made[norm.module] for name, norm in norms.items()} | self._turned
        if attention.norms_last:
            for name, norm in (("queries", "query_norm"), ("keys", "key_norm")):
                parts[name] = given[norms[norm].module] if norm in norms else parts[name]
        parts["projection"] = torch.cat([made[path] for path in attention.projection], -1)
        parts["attention"], parts["output"] = given[attention.output], made[attention.output]
        if isinstance(mlp, described.Experts):
            first = mlp.module
            parts["experts"] = made[mlp.module]
        else:
            first = mlp.inner[0]
            parts["inner"] = torch.cat([made[path] for path in mlp.inner], -1)
            parts["activation"], parts["down"] = given[mlp.down], made[mlp.down]
        if not layer.parallel:
            parts["residual"] = given[norms["before_mlp"].module if layer.before_mlp else first]
        parts["result"] = self._rows(y)
        return parts


def _norms_of(layer: described.Layer) -> list[tuple[str, described.Norm]]:
    names = ("before_attention", "after_attention", "before_mlp", "after_mlp")
    norms = [(name, getattr(layer, name)) for name in names]
    norms += [(name, getattr(layer.attention, name)) for name in ("query_norm", "key_norm")]
    return [(name, norm) for name, norm in norms if norm is not None]


def _modules_of(layer: described.Layer) -> set[str]:
    mlp = layer.mlp
    own = {mlp.module} if isinstance(mlp, described.Experts) else {*mlp.inner, mlp.down}
    own |= {*layer.attention.projection, layer.attention.output}
    return own | {norm.module for _, norm in _norms_of(layer)}
