"""Records what the parts of a model's layers compute, by transformers' own code, before anything is
packed: what a decoder of ours is compared with (`engine.models.comparison`).

The model runs once on a short prompt. Hooks keep the results of each layer's modules, and a
stand-in for eager attention keeps queries, keys and values. Each layer is then run again on the
same input in other magnitudes, since a fault may depend on values: very small ones show the eps
of a norm, very large ones what is added to what.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

from engine.models import description as described

_NAME = "headrace_recording"
MAGNITUDES = (1.0, 2.0**-10, 2.0**6)
"""What layers' inputs are multiplied with; powers of two, so that no element is rounded."""


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """One layer's results for one input.

    Attributes:
        magnitude: of the input.
        x: the input, [T, K].
        parts: results by the names of `engine.models.parts.walk`.
        options: what attention was given besides tensors.
    """

    magnitude: float
    x: torch.Tensor
    parts: dict[str, torch.Tensor]
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Record:
    """A model's results.

    Attributes:
        token_ids: int64 [T].
        layers: for each layer one record for each of MAGNITUDES.
        normed: the last norm's result, [T, K].
        product: the output layer's result, [T, V].
        logits: [T, V].
    """

    token_ids: torch.Tensor
    layers: tuple[tuple[LayerRecord, ...], ...]
    normed: torch.Tensor
    product: torch.Tensor
    logits: torch.Tensor


@dataclass(slots=True)
class _Taps:
    """What hooks have seen since it was last emptied.

    Attributes:
        tokens: T.
        made: the results of modules, by path.
        given: their inputs, by path.
        attention: queries, keys and values, [T, H * D] each, and attention's options.
    """

    tokens: int
    made: dict[str, torch.Tensor] = field(default_factory=dict)
    given: dict[str, torch.Tensor] = field(default_factory=dict)
    attention: tuple[torch.Tensor, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Stands for the model's eager attention."""
        self.attention = tuple(_rows(one.transpose(1, 2)) for one in (query, key, value))
        self.options = {name: kwargs.get(name) for name in ("scaling", "softcap", "s_aux")}
        eager = inspect.unwrap(type(module).forward).__globals__["eager_attention_forward"]
        result: tuple[torch.Tensor, torch.Tensor | None] = eager(
            module, query, key, value, attention_mask, **kwargs
        )
        return result

    def forget(self) -> None:
        """Let go of all tensors."""
        self.made, self.given, self.attention = {}, {}, ()

    def watch(self, path: str, module: torch.nn.Module) -> Any:
        """Keep a module's input and result; returns the hook's handle."""

        def keep(_: torch.nn.Module, arguments: tuple[Any, ...], made: torch.Tensor) -> None:
            self.given[path] = _rows(arguments[0], self.tokens)
            self.made[path] = _rows(made, self.tokens)

        return module.register_forward_hook(keep)


def _rows(tensor: torch.Tensor, tokens: int | None = None) -> torch.Tensor:
    """[1, T, …] → [T, width]. With `tokens`, heads may come first: [1, H, T, D]."""
    if tensor.dim() == 4 and tokens is not None and tensor.shape[1] != tokens:
        tensor = tensor.transpose(1, 2)
    return tensor.reshape(tensor.shape[1], -1)


def record(model: PreTrainedModel, decoder: described.Decoder, token_ids: Sequence[int]) -> Record:
    """Run a model on a prompt and record.

    Args:
        model: in evaluation mode, not in use; only its attention is set.
        decoder: its description.
        token_ids: the prompt.
    """
    taps = _Taps(len(token_ids))
    AttentionInterface.register(_NAME, taps.attend)
    AttentionMaskInterface.register(_NAME, eager_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(_NAME)
    ids = torch.tensor([token_ids], device=model.device)
    layers: list[tuple[LayerRecord, ...]] = []
    try:
        with torch.inference_mode(), ExitStack() as hooks:
            for path in (decoder.norm.module, decoder.output):
                hooks.callback(taps.watch(path, model.get_submodule(path)).remove)
            for layer in decoder.layers:
                hooks.enter_context(_recording(model, layer, taps, layers))
            logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    finally:
        model.set_attn_implementation(before)
    normed, product = taps.made[decoder.norm.module], taps.made[decoder.output]
    taps.forget()  # transformers keeps what is registered
    return Record(ids[0], tuple(layers), normed, product, logits[0])


@contextmanager
def _recording(
    model: PreTrainedModel,
    layer: described.Layer,
    taps: _Taps,
    found: list[tuple[LayerRecord, ...]],
) -> Iterator[None]:
    """Record a layer's calls during the block."""
    module = model.get_submodule(layer.module)

    def keep(_: Any, arguments: tuple[Any, ...], named: dict[str, Any], y: torch.Tensor) -> None:
        x = arguments[0]
        records = [_take(layer, taps, 1.0, _rows(x), _rows(y))]
        for magnitude in MAGNITUDES[1:]:
            scaled = x * magnitude
            y = type(module).forward(module, scaled, *arguments[1:], **named)
            records.append(_take(layer, taps, magnitude, _rows(scaled), _rows(y)))
        found.append(tuple(records))

    handles = [module.register_forward_hook(keep, with_kwargs=True)]
    handles += [taps.watch(path, model.get_submodule(path)) for path in sorted(_modules_of(layer))]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _norms_of(layer: described.Layer) -> dict[str, described.Norm | None]:
    return {
        "before_attention": layer.before_attention,
        "after_attention": layer.after_attention,
        "before_mlp": layer.before_mlp,
        "after_mlp": layer.after_mlp,
        "query_norm": layer.attention.query_norm,
        "key_norm": layer.attention.key_norm,
    }


def _modules_of(layer: described.Layer) -> set[str]:
    attention, mlp = layer.attention, layer.mlp
    own = {mlp.module} if isinstance(mlp, described.Experts) else {*mlp.inner, mlp.down}
    linears = {*attention.projection, attention.output}
    return own | linears | {one.module for one in _norms_of(layer).values() if one is not None}


def _take(
    layer: described.Layer, taps: _Taps, magnitude: float, x: torch.Tensor, y: torch.Tensor
) -> LayerRecord:
    """What was recorded in one call of a layer, by the names of parts."""
    attention, mlp, made, given = layer.attention, layer.mlp, taps.made, taps.given
    parts = {name: made[norm.module] for name, norm in _norms_of(layer).items() if norm is not None}
    parts |= {
        "projection": torch.cat([made[path] for path in attention.projection], -1),
        "queries": taps.attention[0],
        "keys": taps.attention[1],
        "attention": given[attention.output],
        "output": made[attention.output],
        "result": y,
    }
    if isinstance(mlp, described.Experts):
        first = mlp.module
        parts["experts"] = made[mlp.module]
    else:
        first = mlp.inner[0]
        parts["inner"] = torch.cat([made[path] for path in mlp.inner], -1)
        parts["activation"] = given[mlp.down]
        parts["down"] = made[mlp.down]
    if attention.norms_last:
        for name, norm in (("queries", attention.query_norm), ("keys", attention.key_norm)):
            if norm is not None:
                parts[name] = given[norm.module]
    if not layer.parallel:
        parts["residual"] = given[first if layer.before_mlp is None else layer.before_mlp.module]
    taps.forget()
    return LayerRecord(magnitude, x, parts, dict(taps.options))
