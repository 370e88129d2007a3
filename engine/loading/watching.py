"""Watches a model's own code compute prompts. All that is known of a model beyond its config comes
from here.

    prompt ─▶ forward ─┬─ masks ──────────────▶ windows      (`engine.loading.mask_rules`)
                       ├─ calls of attention ─▶ shapes, heads, type; the load gate judges each call
                       ├─ linear layers ──────▶ those that read the same tensor
                       ├─ layers ─────────────▶ a record     (`engine.models.recording`)
                       └─ logits

A config may be wrong about shapes and windows (it is for multi-head latent attention), so they are
taken from the calls themselves. `headrace-server plan` watches a model without weights, on the meta
device, where attention gives shapes only.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from engine.attention.interface import LayerShape
from engine.contract.errors import ModelRefusedError
from engine.contract.types import TokenId
from engine.loading.eager import eager_attention, eager_forward
from engine.loading.mask_rules import MaskWatch, UnknownMaskError
from engine.loading.model_defaults import context_length
from engine.loading.recurrent import ATTENTION_KINDS, RecurrentWatch, layer_kinds, recurs
from engine.loading.rotary import read_rope
from engine.models.description import Decoder
from engine.models.recording import MAGNITUDES, Observation, Recorder, spread

_NAME = "headrace_watch"

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries, keys and values, [1, H, T, D] each; see `engine.attention.interface`."""


@dataclass(frozen=True, slots=True)
class ObservedCall:
    """A call of a layer's attention.

    Attributes:
        layer: the layer's index.
        module: the attention layer.
        shape: the shape of its keys and values.
        tensors: what it is given.
        mask: the attention mask.
        scaling: multiplies the scores.
        options: its other arguments.
    """

    layer: int
    module: nn.Module
    shape: LayerShape
    tensors: Tensors
    mask: torch.Tensor | None
    scaling: float
    options: dict[str, Any]


Judge = Callable[[ObservedCall], None]
"""Judges a call of attention. Raises ModelRefusedError if the layer would run incorrectly."""


def observe(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[TokenId]],
    judge: Judge | None = None,
    decoder: Decoder | None = None,
) -> Observation:
    """Run a model's own code on prompts, and watch it.

    Args:
        model: in evaluation mode and not in use, on a device or on meta. Its attention
            implementation is changed.
        prompts: token ids.
        judge: judges each call of attention, unless the forward is recorded.
        decoder: the model's description if its layers are to be recorded, with the last prompt.

    Raises:
        ModelRefusedError: the model fails, a layer would run incorrectly, or the config contradicts
            what the layers do.
    """
    linears, states = _plain_layers(model), RecurrentWatch(model)
    watch = _Watch(model, states)
    AttentionInterface.register(_NAME, watch.attend)
    AttentionMaskInterface.register(_NAME, watch.masks)
    model.set_attn_implementation(_NAME)
    logits, record = [], None
    for index, prompt in enumerate(prompts):
        is_recorded = decoder is not None and index == len(prompts) - 1
        recorder = None
        if decoder is not None and is_recorded:
            positions = spread(len(prompt), watch.fixed, model.dtype).to(model.device)
            recorder = Recorder(decoder, positions)
        watch.begin(None if is_recorded else judge, recorder)
        ids = torch.tensor([prompt], device=model.device)
        with ExitStack() as hooks:
            handles = [one.register_forward_pre_hook(watch.note_input) for one in linears]
            handles += [*(recorder.watch(model) if recorder is not None else ()), *states.hooks()]
            for handle in handles:
                hooks.callback(handle.remove)
            rows = len(MAGNITUDES[model.dtype]) if is_recorded else 1
            cache = states.begin(len(prompt), rows)
            found = eager_forward(model, ids, keeps_all=is_recorded, **cache).logits
        states.end()
        watch.check(model)
        logits.append(found[0, -1].float())
        if recorder is not None:
            record = recorder.finish(ids, found)
    joinable = _joinable(model, watch.inputs)
    watch.begin(None, None)  # transformers keeps what is registered
    return Observation(
        shapes=dict(sorted(watch.shapes.items())),
        heads=dict(sorted(watch.heads.items())),
        dtype=watch.dtype(model),
        prompts=tuple(map(tuple, prompts)),
        logits=tuple(logits),
        joinable=joinable,
        record=record,
        recurrence=states.found(),
    )


class _Watch:
    """What is seen of a model.

    Attributes:
        masks: replaces the model's mask function.
        fixed: the length up to which rotary frequencies do not depend on it.
        shapes: the KV shapes, by layer.
        heads: the number of query heads, by layer.
        inputs: in the current forward, references to the inputs of each linear layer.
    """

    def __init__(self, model: PreTrainedModel, states: RecurrentWatch) -> None:
        self._states = states
        rope, config = read_rope(model), model.config.get_text_config()
        self.masks = MaskWatch(context_length(config, rope))
        self.fixed = self.masks.context if rope is None else rope.original
        self.shapes: dict[int, LayerShape] = {}
        self.heads: dict[int, int] = {}
        self._dtypes: set[torch.dtype] = set()
        self.begin(None, None)

    def begin(self, judge: Judge | None, recorder: Recorder | None) -> None:
        """Begin another forward."""
        self._judge, self._recorder = judge, recorder
        self._calls: dict[int, int] = {}
        self.inputs: dict[nn.Module, list[weakref.ref[torch.Tensor]]] = {}

    def note_input(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        """Note what a linear layer reads, without keeping it."""
        if arguments:
            self.inputs.setdefault(module, []).append(weakref.ref(arguments[0]))

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Note a call of attention and compute it by the model's own eager attention, which this
        replaces.

        Raises:
            ModelRefusedError: this layer would run incorrectly.
        """
        tensors, window = (query, key, value), options.get("sliding_window")
        layer = self._note(module, tensors, attention_mask, window)
        if query.is_meta:
            return query.new_empty((1, query.shape[2], query.shape[1], value.shape[-1])), None
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        if self._recorder is not None:
            self._recorder.attend(query, key, {"scaling": scaling, **options})
        if self._judge is not None:
            shape = self.shapes[layer]
            self._judge(
                ObservedCall(layer, module, shape, tensors, attention_mask, scaling, options)
            )
        made: tuple[torch.Tensor, torch.Tensor | None] = eager_attention(module)(
            module, *tensors, attention_mask, scaling=scaling, **options
        )
        return made

    def _note(
        self, module: nn.Module, tensors: Tensors, mask: torch.Tensor | None, window: object
    ) -> int:
        """Note a call, and return its layer's index. window: as the layer passes it, if any."""
        query, key, value = tensors
        rows = 1 if self._recorder is None else len(MAGNITUDES[query.dtype])
        layer = getattr(module, "layer_idx", None)
        if layer is None or layer < 0:
            layer = self._states.told_layer
        if not isinstance(layer, int):
            raise ModelRefusedError(
                f"{type(module).__name__} has no layer_idx, so its cache cannot be found"
            )
        if query.shape[0] != rows:
            raise ModelRefusedError(
                f"{type(module).__name__}, layer {layer}, attends in {query.shape[0]} rows where "
                "one was given, so its tokens cannot be told apart in a ragged batch"
            )
        if query.shape[2] != key.shape[2]:
            raise ModelRefusedError(
                f"{type(module).__name__}, layer {layer}, attends with {query.shape[2]} queries to "
                f"{key.shape[2]} keys, where each token must have one of both"
            )
        self._calls[layer] = self._calls.get(layer, 0) + 1
        self._dtypes.add(key.dtype)
        self.heads[layer] = query.shape[1]
        self.shapes[layer] = LayerShape(
            num_kv_heads=key.shape[1],
            key_dim=key.shape[-1],
            value_dim=value.shape[-1],
            window=self._window(layer, module, mask, window),
        )
        return layer

    def _window(
        self, layer: int, module: nn.Module, mask: torch.Tensor | None, told: object
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

    def dtype(self, model: PreTrainedModel) -> torch.dtype:
        """The type of keys and values, or the model's if there are none.

        Raises:
            ModelRefusedError: there are several.
        """
        if not self._dtypes:
            own: torch.dtype = model.dtype
            return own
        if len(self._dtypes) != 1:
            raise ModelRefusedError(
                f"{type(model).__name__} keeps keys in several types: "
                f"{', '.join(sorted(str(dtype) for dtype in self._dtypes))}"
            )
        return next(iter(self._dtypes))

    def check(self, model: PreTrainedModel) -> None:
        """Check the calls of one forward.

        Raises:
            ModelRefusedError: a layer made no call or several calls, or the config contradicts
                what the layers do.
        """
        name, text_config = type(model).__name__, model.config.get_text_config()
        num_layers = text_config.num_hidden_layers
        kinds = layer_kinds(model)
        attending = {layer for layer in range(num_layers)
                     if not recurs(kinds) or kinds[layer] in ATTENTION_KINDS}  # fmt: skip
        if self._calls != dict.fromkeys(attending, 1):
            raise ModelRefusedError(
                f"{name} has {num_layers} layers, but the attention calls by layer were "
                f"{self._calls}; each layer must attend once"
            )
        # If the config has no kinds of layers, the cache of `generate` drops everything beyond the
        # config's window or chunk, even if the layers do not use one.
        full = [layer for layer in sorted(attending) if self.shapes[layer].window is None]
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
        for layer, kind in enumerate(kinds):
            if layer not in attending:
                continue
            if ("sliding" in kind) != (self.shapes[layer].window is not None):
                raise ModelRefusedError(
                    f"{name}, layer {layer}: the config says {kind}, but the layer's window is "
                    f"{self.shapes[layer].window}"
                )


def _plain_layers(model: nn.Module) -> list[nn.Linear]:
    """Return the linear layers without hooks whose parameters no other module shares."""
    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    return [
        one
        for one in model.modules()
        if type(one) is nn.Linear
        and not one._forward_hooks
        and not one._forward_pre_hooks
        and one.weight.is_contiguous()
        and all(holders[id(parameter)] == 1 for parameter in one.parameters())
    ]


def _joinable(
    model: nn.Module, inputs: dict[nn.Module, list[weakref.ref[torch.Tensor]]]
) -> tuple[tuple[str, ...], ...]:
    """Return groups of linear layers in the same module that read the same tensor, once each."""
    found = []
    for path, parent in model.named_modules():
        by_input: dict[tuple[int, torch.dtype], list[str]] = {}
        for name, one in parent.named_children():
            if isinstance(one, nn.Linear) and len(inputs.get(one, ())) == 1:
                # Python has one reference to each object.
                key = (id(inputs[one][0]), one.weight.dtype)
                by_input.setdefault(key, []).append(f"{path}.{name}" if path else name)
        found += [tuple(group) for group in by_input.values() if len(group) > 1]
    return tuple(found)
