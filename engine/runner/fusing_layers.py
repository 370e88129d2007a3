"""Replaces the forward of whole decoder layers, if those of all their parts have been replaced.

The layer's own forward is run, with the engine's attention over a small cache. Apart from its
modules, it may make only two operations, both sums. Our forward must give the same values, bit for
bit, and write the same into the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from engine.attention.base import AttentionContext, BatchLayout, LayerCache
from engine.attention.native_backend import NativeAttentionBackend
from engine.attention.registry import ATTENTION_NAME, CONTEXT_KEYWORD, register
from engine.native.library import HeadsCall, LayerSpec, LinearWeight, NormWeight
from engine.runner.fused import (
    PLAN,
    AttentionPlan,
    GatePlan,
    Joined,
    NormPlan,
    exchange,
    is_exchanged,
    restore,
)
from engine.runner.fused_layer import (
    LayerPlace,
    LayerPlan,
    LayerRun,
    LayerScratch,
    layer_forward,
)
from engine.runner.likeness import FAILURES, Likeness, Operations, has_hooks, random_numbers
from engine.runner.packed import PackedLinear, native_library

_PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_BLOCK_SIZE = 4
_STARTS, _COUNTS = (5, 0, 3), (1, 6, 2)
"""Start positions and token counts of the requests in a small step."""
_OPTIONS = {"dropout", "scaling", "sliding_window", "softcap"}
"""The options that a layer may pass to the attention function. The window is in the metadata."""


def fuse_layers(model: PreTrainedModel, likeness: Likeness) -> int:
    """Replace the forward of each layer for which ours is equivalent.

    Args:
        model: the forwards of its smaller modules have already been replaced.
        likeness: the kinds that were found to be equivalent.

    Returns:
        how many were replaced.
    """
    scratch = LayerScratch()
    layers = [one for one in model.modules() if one._modules.keys() == _PARTS]
    plans = [(one, _plan(one)) for one in layers if not is_exchanged(one)]
    if any(plan is not None for _, plan in plans):
        register()
        before = model.config._attn_implementation
        model.set_attn_implementation(ATTENTION_NAME)
        try:
            for layer, plan in plans:
                if plan is not None:
                    _fuse(layer, plan, scratch, likeness)
        finally:
            model.set_attn_implementation(before)
    return sum(is_exchanged(layer) for layer in layers)


@dataclass(frozen=True, slots=True)
class _Parts:
    """A layer's modules, and what is known about them."""

    modules: dict[str, Any]
    first: NormPlan
    second: NormPlan
    attention: AttentionPlan
    mlp: GatePlan
    projection: Joined
    gate_up: Joined
    output: PackedLinear
    down: PackedLinear


def _parts(layer: torch.nn.Module) -> _Parts | None:
    """A layer's parts, if all of them have our forwards; None: they do not."""
    if layer._parameters or layer._buffers or any(has_hooks(one) for one in layer.modules()):
        return None
    modules: dict[str, Any] = dict(layer._modules)
    first, second, attention, mlp = (
        vars(modules[name]).get(PLAN)
        for name in ("input_layernorm", "post_attention_layernorm", "self_attn", "mlp")
    )
    if not (
        isinstance(first, NormPlan)
        and isinstance(second, NormPlan)
        and isinstance(attention, AttentionPlan)
        and isinstance(mlp, GatePlan)
        and attention.joined is not None
        and mlp.joined is not None
        and attention.options.keys() <= _OPTIONS
        and isinstance(getattr(modules["self_attn"], "layer_idx", None), int)
    ):
        return None
    output, down = modules["self_attn"].o_proj, modules["mlp"].down_proj
    width = attention.joined.inputs
    heads = attention.num_heads * attention.head_dim
    kv_heads = attention.num_kv_heads * attention.head_dim
    if (
        type(output) is not PackedLinear
        or type(down) is not PackedLinear
        or {width} != {first.width, second.width, mlp.joined.inputs, output.out_features}
        or down.out_features != width
        or output.in_features != heads
        or 2 * down.in_features != mlp.joined.outputs
        or attention.joined.outputs != heads + 2 * kv_heads
    ):
        return None
    return _Parts(
        modules, first, second, attention, mlp, attention.joined, mlp.joined, output, down
    )


class _Held:
    """Keeps tensors alive whose addresses are used, even if their module gets others."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def address(self, tensor: torch.Tensor | None) -> int | None:
        if tensor is None:
            return None
        self.tensors.append(tensor.detach())
        return tensor.data_ptr()

    def norm(self, module: Any, plan: NormPlan) -> NormWeight:
        return NormWeight(
            self.address(module._parameters["weight"]), plan.width, plan.eps, plan.form
        )

    def linear(self, layer: Joined | PackedLinear) -> LinearWeight:
        if isinstance(layer, PackedLinear):
            bias, outputs, inputs = layer.padded_bias, layer.out_features, layer.in_features
        else:
            bias, outputs, inputs = layer.bias, layer.outputs, layer.inputs
        addresses = [self.address(one) for one in (layer.packed, bias, layer.scales)]
        return LinearWeight(*addresses, outputs, inputs)


def _plan(layer: torch.nn.Module) -> LayerPlan | None:
    """The plan for our forward; None: it cannot compute this layer."""
    parts = _parts(layer)
    if parts is None:
        return None
    attention, held = parts.attention, _Held()
    own = parts.modules["self_attn"]
    weights: list[int | None] = [None, None]
    if attention.form is not None:
        weights = [held.address(own._modules[f"{one}_norm"]._parameters["weight"]) for one in "qk"]
    scaling = attention.options.get("scaling")
    spec = LayerSpec(
        first_norm=held.norm(parts.modules["input_layernorm"], parts.first),
        second_norm=held.norm(parts.modules["post_attention_layernorm"], parts.second),
        projection=held.linear(parts.projection),
        output=held.linear(parts.output),
        gate_up=held.linear(parts.gate_up),
        down=held.linear(parts.down),
        heads=HeadsCall(
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            rotary_dim=attention.rotary_dim,
            query_weight=weights[0],
            key_weight=weights[1],
            query_eps=attention.eps[0],
            key_eps=attention.eps[1],
            form=attention.form or 0,
        ),
        activation=parts.mlp.activation,
        scaling=attention.head_dim**-0.5 if scaling is None else scaling,
        softcap=attention.options.get("softcap") or 0.0,
    )
    return LayerPlan(
        spec=spec,
        held=tuple(held.tensors),
        index=own.layer_idx,
        rotary_dim=attention.rotary_dim,
    )


def _fuse(
    layer: torch.nn.Module, plan: LayerPlan, scratch: LayerScratch, likeness: Likeness
) -> None:
    """Replace one layer's forward if ours is equivalent."""
    kind = _kind(layer, plan)
    magnitudes = {magnitude for magnitude, _ in likeness.probes(kind)}
    exchange(layer, layer_forward, LayerPlace(LayerRun([plan], scratch)))
    try:
        is_equal = all(_compare(layer, plan, magnitude) for magnitude in magnitudes)
    except FAILURES:
        is_equal = False
    if is_equal:
        likeness.passed(kind)
    else:
        restore(layer)


def _kind(layer: torch.nn.Module, plan: LayerPlan) -> tuple[Any, ...]:
    """A key that is equal for layers of the same kind."""
    spec = plan.spec
    heads = spec.heads
    return (
        type(layer),
        *((one.eps, one.form) for one in (spec.first_norm, spec.second_norm)),
        *((one.outputs, one.inputs) for one in (spec.projection, spec.output, spec.gate_up)),
        *(heads.num_heads, heads.num_kv_heads, heads.head_dim, heads.rotary_dim, heads.form),
        *(heads.query_eps, heads.key_eps, spec.activation, spec.scaling, spec.softcap),
    )


def _compare(layer: torch.nn.Module, plan: LayerPlan, magnitude: float) -> bool:
    """Whether our forward and the layer's own give the same for one random step."""
    tokens, rotary = sum(_COUNTS), plan.rotary_dim
    x = (random_numbers(1, tokens, plan.spec.projection.inputs) * magnitude).bfloat16()
    angles = random_numbers(1, tokens, rotary, seed=3)
    named = {
        "attention_mask": None,
        "position_ids": torch.zeros(1, tokens, dtype=torch.long),
        "position_embeddings": (angles.cos().bfloat16(), angles.sin().bfloat16()),
        "past_key_values": None,
        "use_cache": False,
    }
    theirs, ours = small_context([plan]), small_context([plan])
    with Operations() as operations, operations.without(list(layer.children())):
        expected = type(layer).forward(layer, x, **named, **{CONTEXT_KEYWORD: theirs})
    actual = layer.forward(x, **named, **{CONTEXT_KEYWORD: ours})
    caches = [
        (one.caches[plan.index].keys, one.caches[plan.index].values) for one in (theirs, ours)
    ]
    return (
        operations.computing == {"add": 2}
        and isinstance(expected, torch.Tensor)
        and torch.equal(_bits(actual), _bits(expected))
        and all(torch.equal(_bits(a), _bits(b)) for a, b in zip(*caches, strict=True))
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16)


def small_context(plans: Sequence[LayerPlan]) -> AttentionContext:
    """A step of a few requests, with random caches for some layers."""
    layout = small_step()
    slots = (1 + layout.tables.size) * _BLOCK_SIZE
    caches = {}
    for plan in plans:
        heads = plan.spec.heads
        shape = (slots, heads.num_kv_heads, heads.head_dim)
        keys, values = random_numbers(2, *shape, seed=plan.index).bfloat16()
        caches[plan.index] = LayerCache(keys=keys.clone(), values=values.clone(), group=0)
    backend = NativeAttentionBackend(native_library())
    like = next(iter(caches.values())).keys
    return AttentionContext(backend, caches, [backend.prepare(layout, None, like)])  # type: ignore[arg-type]  # by index


def small_step() -> BatchLayout:
    """A step with requests that decode, start and continue a prompt."""
    ends = [start + count for start, count in zip(_STARTS, _COUNTS, strict=True)]
    width = -(-max(ends) // _BLOCK_SIZE)
    tables = 1 + np.arange(len(ends) * width, dtype=np.int32).reshape(len(ends), width)
    return BatchLayout(
        starts=np.array(_STARTS, dtype=np.int64),
        counts=np.array(_COUNTS, dtype=np.int64),
        num_decodes=1,
        positions=np.concatenate([np.arange(*pair) for pair in zip(_STARTS, ends, strict=True)]),
        tables=tables,
        block_size=_BLOCK_SIZE,
    )
