"""What is observed of an unmodified model (`engine.loading.watching`), and the recorder of what its
layers compute, with which our decoder is compared (`engine.models.comparison`).

    prompt ─▶ embedding ─ x ─▶ layer ─ x ─▶ layer … ─▶ norm ─▶ output ─▶ logits
                           [x, x · 2⁻¹⁰, x · 2⁶] ─▶ a batch of three, of which the first goes on
                                  (x · 2³ in float16, whose maximum is 65504)

Hooks give each layer, and the last norm, their input in several magnitudes, because a fault may
depend on values: very small ones expose a norm's eps, and very large ones expose which terms are
added to each other. What a norm makes is as large for any input, so hooks enlarge it, too, and the
first token's product of the output layer: this exposes bounds that only large values reach. The
magnitudes are the rows of one batch, so weights are read only once. Rows other than the first are
rotated for positions up to the longest, because a fault may depend on those, too. Other hooks keep
the modules' results. Nothing is packed yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from engine.attention.interface import LayerShape
from engine.attention.step_states import NOTHING_RECURS, Recurrence
from engine.contract.types import TokenId
from engine.models import description as described

_WIDE = (1.0, 2.0**-10, 2.0**6)
MAGNITUDES = {
    torch.float32: _WIDE,
    torch.bfloat16: _WIDE,
    torch.float16: (1.0, 2.0**-10, 2.0**3),
}
"""The factors for the layers' inputs, by the model's dtype. They are powers of two, so that no
element within range is rounded.
"""
_WIDE_GROWTH = {"before_attention": 2.0**3, "before_mlp": 2.0**10}
GROWTH = {
    torch.float32: _WIDE_GROWTH,
    torch.bfloat16: _WIDE_GROWTH,
    torch.float16: {"before_attention": 2.0, "before_mlp": 2.0**3},
}
"""The factors for what norms make of the largest inputs, by the model's dtype and their names in a
layer. Attention loses precision with the square of its factor, as scores grow with it.
"""


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """The results of one layer. M is the number of MAGNITUDES, T the number of tokens.

    What norms make is as it was before it was enlarged.

    Attributes:
        x: the layer's input, [M * T, K].
        parts: results by the names of `engine.models.layer_parts.Walk`, [M * T, width].
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
        positions: int64 [M, T], by which the rows of each magnitude are rotated.
        layers: the layers' results in order.
        normed: the last norm's result, [M * T, K].
        product: the output layer's result for the first magnitude, [T, V], before it was enlarged.
        logits: [T, V].
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    layers: tuple[LayerRecord, ...]
    normed: torch.Tensor
    product: torch.Tensor
    logits: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What forwards of an unmodified model showed.

    Attributes:
        shapes: the KV shapes, by layer; only of layers that attend.
        heads: the number of query heads, by layer.
        dtype: the type of keys and values.
        prompts: the prompts, one for each forward.
        logits: [V] each, float32, the logits after each prompt's last token.
        joinable: the paths of linear layers of one module that read the same tensor, by group.
        record: the results for the last prompt; None if they were not asked for.
        recurrence: the layers that carry a state.
    """

    shapes: Mapping[int, LayerShape]
    heads: Mapping[int, int]
    dtype: torch.dtype
    prompts: tuple[tuple[TokenId, ...], ...]
    logits: tuple[torch.Tensor, ...]
    joinable: tuple[tuple[str, ...], ...] = ()
    record: ModelRecord | None = None
    recurrence: Recurrence = NOTHING_RECURS


def spread(tokens: int, longest: int, dtype: torch.dtype) -> torch.Tensor:
    """Return positions [M, T]: those of the prompt, then rows that each reach far behind it.

    Neighbours among the far ones have about the same ratio, and the last one is the longest.
    """
    rows, last = len(MAGNITUDES[dtype]) - 1, max(tokens, longest) - 1
    places = torch.linspace(math.log2(tokens), math.log2(last), tokens * rows)
    far = places.double().exp2().round().long().clamp(max=last)
    far[-1] = last
    return torch.cat([torch.arange(tokens)[None], far.view(tokens, rows).T])


class Recorder:
    """Collects a model's results in one forward."""

    def __init__(self, decoder: described.Decoder, positions: torch.Tensor) -> None:
        """Create a recorder. decoder: the model's description; positions: see `spread`."""
        self._decoder = decoder
        self._positions = positions
        self._tokens = positions.shape[1]
        self._layers: list[LayerRecord] = []
        # The most recent result and input of each module, by path, as rows.
        self._made: dict[str, torch.Tensor] = {}
        self._given: dict[str, torch.Tensor] = {}
        self._turned: dict[str, torch.Tensor] = {}
        self._options: dict[str, Any] = {}

    def finish(self, token_ids: torch.Tensor, logits: torch.Tensor) -> ModelRecord:
        """Return the record of a forward: of ids [1, T], with logits [1, T, V]."""
        normed, product = (
            self._made[path] for path in (self._decoder.norm.module, self._decoder.output)
        )
        layers = tuple(self._layers)
        return ModelRecord(token_ids[0], self._positions, layers, normed, product, logits[0])

    def attend(self, query: torch.Tensor, key: torch.Tensor, options: dict[str, Any]) -> None:
        """Keep queries and keys, [B, H, T, D], and the options of a layer's attention."""
        queries, keys = (self._rows(one.transpose(1, 2)) for one in (query, key))
        self._turned = {"queries": queries, "keys": keys}
        self._options = {name: options.get(name) for name in ("scaling", "softcap", "s_aux")}

    def watch(self, model: PreTrainedModel) -> list[Any]:
        """Register hooks on all modules of the description, and return their handles."""
        paths = {self._decoder.norm.module, self._decoder.output}
        last = model.get_submodule(self._decoder.norm.module)
        handles = [last.register_forward_pre_hook(lambda _, given: _in_magnitudes(given[0]))]
        grown: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            self._decoder.norm.module: lambda made: made[:1],
            self._decoder.output: enlarge_first,
        }
        for layer in self._decoder.layers:
            handles += self._watch_layer(model, layer)
            paths |= _modules_of(layer)
            for name, norm in layer.norms.items():
                if name in GROWTH[model.dtype]:
                    grown[norm.module] = partial(enlarge_last, name)

        def keep(path: str) -> Any:
            def hook(_: Any, arguments: tuple[Any, ...], made: Any) -> torch.Tensor | None:
                made = made[0] if isinstance(made, tuple) else made  # experts, then scores
                self._given[path], self._made[path] = self._rows(arguments[0]), self._rows(made)
                return grown[path](made) if path in grown else None

            return hook

        for path in {one.module for one in self._decoder.rotaries}:
            rotary = model.get_submodule(path)
            handles.append(rotary.register_forward_hook(self._rotate_all, with_kwargs=True))
        return handles + [
            model.get_submodule(path).register_forward_hook(keep(path)) for path in sorted(paths)
        ]

    def _rotate_all(
        self, module: Any, given: tuple[Any, ...], named: dict[str, Any], made: Any
    ) -> tuple[torch.Tensor, ...]:
        """Return the cosines and sines of all positions, [M, T, D] each, by the module's own code.

        It is called once for each row, because it may take only one.
        """
        found = [made]
        for row in self._positions[1:, None]:
            others = (_placed(one, row) for one in given)
            by_name = {name: _placed(one, row) for name, one in named.items()}
            found.append(module.forward(*others, **by_name))
        return tuple(torch.cat(tables) for tables in zip(*found, strict=True))

    def _watch_layer(self, model: torch.nn.Module, layer: described.Layer) -> list[Any]:
        def widen(_: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
            x = _in_magnitudes(arguments[0])
            return (x, *arguments[1:]), _with_positions(named, self._positions)

        def keep(_: Any, arguments: tuple[Any, ...], y: torch.Tensor) -> torch.Tensor:
            self._layers.append(
                LayerRecord(self._rows(arguments[0]), self._parts(layer, y), self._options)
            )
            return y[:1]

        module = model.get_submodule(layer.module)
        return [
            module.register_forward_pre_hook(widen, with_kwargs=True),
            module.register_forward_hook(keep),
        ]

    def _rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Reshape to rows: [B, T, …] or, heads first, [B, H, T, D] or, of all magnitudes,
        [B * T * H, D] → [B * T, width].
        """
        if tensor.dim() == 2:  # the heads of all tokens
            return tensor.reshape(self._positions.numel(), -1)
        if tensor.dim() == 4 and tensor.shape[1] != self._tokens:
            tensor = tensor.transpose(1, 2)
        return tensor.reshape(tensor.shape[0] * self._tokens, -1)

    def _parts(self, layer: described.Layer, y: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return what was recorded in a call of a layer, by the names of its operations."""
        mixer, mlp, made, given = layer.mixer, layer.mlp, self._made, self._given
        norms = layer.norms
        parts = {name: made[norm.module] for name, norm in norms.items()}
        if isinstance(mixer, described.Attention):
            parts |= self._turned
            if mixer.norms_last:
                for name, norm in (("queries", "query_norm"), ("keys", "key_norm")):
                    parts[name] = given[norms[norm].module] if norm in norms else parts[name]
            parts["attention"] = given[mixer.output]
        elif isinstance(mixer, described.ShortConvolution):
            parts["convolution"] = given[mixer.output]
        else:
            parts["delta_rule"], parts["gated_norm"] = given[mixer.norm.module], given[mixer.output]
        parts["projection"] = torch.cat([made[path] for path in mixer.projection], -1)
        parts["output"] = made[mixer.output]
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


def _in_magnitudes(x: torch.Tensor) -> torch.Tensor:
    """Return x [1, T, K] in all magnitudes, [M, T, K]."""
    return torch.cat([x * one for one in MAGNITUDES[x.dtype]])


def enlarge_last(name: str, made: torch.Tensor) -> torch.Tensor:
    """Return what a norm of that name makes, enlarged for the last magnitude: [M, T, K]."""
    return torch.cat([made[:-1], made[-1:] * GROWTH[made.dtype][name]])


def enlarge_first(product: torch.Tensor) -> torch.Tensor:
    """Return the output layer's result, enlarged for the first token: [..., T, V]."""
    product = product.clone()
    product[..., 0, :] *= MAGNITUDES[product.dtype][-1]
    return product


def _placed(value: object, row: torch.Tensor) -> object:
    """Return other positions instead of positions, along all axes if there are several."""
    if isinstance(value, torch.Tensor) and not value.is_floating_point():
        return row.expand_as(value)
    return value


def _with_positions(named: dict[str, Any], positions: torch.Tensor) -> dict[str, Any]:
    return named | ({"position_ids": positions} if "position_ids" in named else {})


def _modules_of(layer: described.Layer) -> set[str]:
    mlp = layer.mlp
    own = {mlp.module} if isinstance(mlp, described.Experts) else {*mlp.inner, mlp.down}
    own |= {*layer.mixer.projection, layer.mixer.output}
    if isinstance(layer.mixer, described.DeltaNet):
        own.add(layer.mixer.norm.module)
    return own | {norm.module for norm in layer.norms.values()}
