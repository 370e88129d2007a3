"""Describes a model whose class is in the table, for our decoders.

    model ─▶ its class in FAMILIES? ─▶ read sizes ─▶ its functions in force as written? ─▶ Decoder

A class's name proves nothing about its code, which changes between versions of transformers. So a
description of a particular model, with its weights and config, is then compared with the model
itself (`engine.models.comparison`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.module import _has_any_global_hook as has_global_hooks
from transformers import PreTrainedModel

from engine.models.description import (
    Activation,
    Attention,
    ClampedGate,
    Decoder,
    DeltaNet,
    Experts,
    Layer,
    Mlp,
    Norm,
    NormForm,
    Recurrence,
    Rotary,
    Routing,
    ShortConvolution,
)
from engine.models.in_force import replaced_function
from engine.models.length_table import LengthTable, table_name
from engine.models.table import FAMILIES, Family, RecurrentParts

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu_squared",
}
_FIXED_ROTARY = frozenset({"default", "linear", "llama3", "yarn", "ntk_alpha"})
"""The kinds of rotary embeddings whose frequencies do not depend on the length."""
_ROTARY_OF_LENGTHS = frozenset({"dynamic", "longrope"})
_EPS = ("variance_epsilon", "eps")
_LIBRARY = "transformers.models."


class NotDescribedError(Exception):
    """A model cannot be described. The message gives the reason, worded to complete a sentence."""


def describe(model: PreTrainedModel) -> Decoder:
    """Return the description of a model.

    Raises:
        NotDescribedError: the class is not in the table, its functions were replaced, or the model
            has a feature that a description cannot express.
    """
    family_name = model.config.get_text_config().model_type
    family = FAMILIES.get(family_name)
    folder = f"transformers.models.{family_name.removesuffix('_text')}."
    body = _body(model)
    # A model with towers has a class of its own around the text model.
    of_text = type(model.get_submodule(body)).__module__.startswith(folder)
    of_model = type(model).__module__.startswith(folder if body == "model" else _LIBRARY)
    if family is None or not (of_text and of_model):
        raise NotDescribedError(f"{type(model).__name__} is not in the table of decoders")
    try:
        found = _Reader(model, family, body).decoder()
    except (AttributeError, KeyError, StopIteration) as error:
        raise NotDescribedError(f"{type(model).__name__} lacks a part: {error}") from error
    replaced = replaced_function(model)
    if replaced is not None:
        raise NotDescribedError(f"{replaced} was replaced, and is not the library's own")
    if has_global_hooks():  # type: ignore[no-untyped-call]
        raise NotDescribedError("all modules have hooks")
    ours = {one.module for one in found.rotaries if _follows_lengths(model, one)}
    for path, module in model.named_modules():
        is_foreign = "forward" in vars(module) and path not in ours
        if module._forward_hooks or module._forward_pre_hooks or is_foreign:
            raise NotDescribedError(f"{path or 'the model'} has hooks, or a forward of its own")
    return found


def _follows_lengths(model: PreTrainedModel, one: Rotary) -> bool:
    """Return whether a rotary module's forward was replaced by `engine.loading.rotary`."""
    module = model.get_submodule(one.module)
    return one.lengths is not None and LengthTable.of(module, one.lengths) is not None


def _body(model: PreTrainedModel) -> str:
    """Return the path of the module that has the layers of text."""
    kind = type(model.config.get_text_config())
    paths = (
        path
        for path, one in model.named_modules()
        if isinstance(one, PreTrainedModel) and type(one.config) is kind and hasattr(one, "layers")
    )
    found: str = next(paths, "")
    return found


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads sizes and paths from a model of a family. `path` is that of its body."""

    model: Any
    family: Family
    path: str

    @property
    def config(self) -> Any:
        """The config of the layers. What follows them has the model's own."""
        return self.model.config.get_text_config()

    def decoder(self) -> Decoder:
        """Return the description of the whole model."""
        body, config = self.model.get_submodule(self.path), self.model.config
        rotaries = self._rotaries(getattr(body, self.family.rotary))
        scaling = getattr(config, "logits_scaling", None)
        multiplies = self.family.multiplies_logits
        return Decoder(
            family=self.config.model_type,
            embedding=f"{self.path}.embed_tokens",
            embedding_factor=getattr(body, "embedding_multiplier", None),
            layers=tuple(
                self._layer(f"{self.path}.layers.{index}", index, one, rotaries)
                for index, one in enumerate(body.layers)
            ),
            rotaries=tuple(rotaries.values()),
            norm=self._norm(f"{self.path}.{self.family.last_norm}", self.family.form),
            output="lm_head",
            logits_factor=scaling if multiplies else getattr(self.model, "logit_scale", None),
            logits_divisor=None if multiplies else scaling,
            logits_softcap=getattr(config, "final_logit_softcapping", None),
        )

    def _layer(self, path: str, index: int, layer: Any, rotaries: dict[str, Rotary]) -> Layer:
        family, norms = self.family, self.family.norms
        if family.recurrence is not None and "self_attn" not in layer._modules:
            norms = family.recurrence.norms or norms
        before_attention, after_attention, before_mlp, after_mlp = (
            None
            if name is None or type(getattr(layer, name)) is torch.nn.Identity
            else self._norm(f"{path}.{name}", family.form)
            for name in norms
        )
        return Layer(
            module=path,
            index=index,
            mixer=self._mixer(path, layer, rotaries),
            mlp=self._mlp(f"{path}.{family.mlp}", getattr(layer, family.mlp)),
            before_attention=before_attention,
            after_attention=after_attention,
            before_mlp=before_mlp,
            after_mlp=after_mlp,
            parallel=family.parallel,
            residual=float(getattr(layer, "residual_multiplier", 1.0)),
        )

    def _mixer(self, path: str, layer: Any, rotaries: dict[str, Rotary]) -> Attention | Recurrence:
        parts = self.family.recurrence
        if parts is None or "self_attn" in layer._modules:
            return self._attention(f"{path}.self_attn", layer.self_attn, rotaries)
        path, one = f"{path}.{parts.module}", getattr(layer, parts.module)
        if parts.form == "short_convolution":
            return self._convolution(path, one, parts)
        return self._delta(path, one, parts)

    def _convolution(self, path: str, one: Any, parts: RecurrentParts) -> ShortConvolution:
        (projection,) = parts.projection
        return ShortConvolution(
            module=path,
            projection=(f"{path}.{projection}",),
            convolution=f"{path}.conv",
            output=f"{path}.{parts.output}",
            channels=one.conv.in_channels,
            width=one.conv.kernel_size[0],
        )

    def _delta(self, path: str, one: Any, parts: RecurrentParts) -> DeltaNet:
        if one.activation not in ("silu", "swish"):
            raise NotDescribedError(f"its convolutions are followed by {one.activation}")
        return DeltaNet(
            module=path,
            projection=tuple(f"{path}.{name}" for name in parts.projection),
            groups=one.num_k_heads if parts.by_key_head else 1,
            convolution=f"{path}.conv1d",
            log_rate="A_log",
            rate_bias="dt_bias",
            beta_factor=2.0 if getattr(one, "allow_neg_eigval", False) else 1.0,
            norm=self._norm(f"{path}.{parts.norm}", "rounded_first"),
            output=f"{path}.{parts.output}",
            key_heads=one.num_k_heads,
            heads=one.num_v_heads,
            key_dim=one.head_k_dim,
            value_dim=one.head_v_dim,
            width=one.conv_kernel_size,
        )

    def _attention(self, path: str, one: Any, rotaries: dict[str, Rotary]) -> Attention:
        family, config = self.family, self.config
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        if getattr(config, "clip_qkv", None) is not None:
            raise NotDescribedError("it clips queries, keys and values")
        kinds = getattr(config, "layer_types", None)
        kind = kinds[one.layer_idx] if kinds and "" not in rotaries else ""
        query_norm, key_norm = (
            self._norm(f"{path}.{name}", family.form) if name in one._modules else None
            for name in family.head_norms
        )
        return Attention(
            module=path,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=one.head_dim,
            projection=tuple(f"{path}.{name}" for name in family.projection),
            output=f"{path}.{family.output}",
            query_norm=query_norm,
            key_norm=key_norm,
            norms_last=family.norms_last,
            rotary=list(rotaries).index(kind) if rotaries and family.rotates(one) else None,
            scaling=float(one.scaling),
            softcap=one.attn_logit_softcapping if family.caps_scores else None,
            sinks="sinks" if "sinks" in one._parameters else None,
            gated=family.gates_attention,
        )

    def _mlp(self, path: str, one: Any) -> Mlp | Experts:
        if "experts" in one._modules:
            return Experts(path, self._routing(path, one))
        activation, config = self.family.activation, self.config
        if activation is None:
            name = getattr(config, "hidden_activation", None) or config.hidden_act
            if name not in _ACTIVATIONS:
                raise NotDescribedError(f"its activation is {name}")
            activation = _ACTIVATIONS[name]
        inner = tuple(f"{path}.{part}" for part in self.family.inner)
        return Mlp(inner, f"{path}.{self.family.down}", activation, self.family.gated)

    def _routing(self, path: str, one: Any) -> Routing | None:
        parts = self.family.mixture
        if parts is None:
            return None
        activation: Activation | ClampedGate | None = _ACTIVATIONS.get(self.config.hidden_act)
        if parts.clamped:
            activation = ClampedGate(float(one.experts.alpha), float(one.experts.limit))
        if activation is None:
            return None
        router = getattr(one, parts.router)
        return Routing(
            router=f"{path}.{parts.router}",
            experts=f"{path}.experts",
            chosen=router.top_k,
            normed=router.norm_topk_prob if parts.normed is None else parts.normed,
            rounds=parts.rounds,
            activation=activation,
        )

    def _norm(self, path: str, form: NormForm) -> Norm:
        module: Any = self.model.get_submodule(path)
        eps = next(getattr(module, name) for name in _EPS if hasattr(module, name))
        return Norm(path, module.weight.shape[-1], float(eps), form)

    def _rotaries(self, module: Any) -> dict[str, Rotary]:
        """Return the rotary embeddings by kind of layer. The key is "" if all layers share them.

        module: None if nothing is rotated.
        """
        found: dict[str, Rotary] = {}
        for name, buffer in () if module is None else module.named_buffers():
            if not name.endswith("inv_freq") or name.endswith("original_inv_freq"):
                continue
            kind = name.removesuffix("inv_freq").rstrip("_")
            prefix = f"{kind}_" if kind else ""
            rope_type = module.rope_type[kind] if kind else module.rope_type
            depends = rope_type in _ROTARY_OF_LENGTHS
            if not depends and rope_type not in _FIXED_ROTARY:
                raise NotDescribedError(f"its rotary embeddings are {rope_type}")
            found[kind] = Rotary(
                module=f"{self.path}.{self.family.rotary}",
                # The other one has those of the last length that the model was called with.
                frequencies=f"{prefix}original_inv_freq" if depends else name,
                lengths=table_name(name) if depends else None,
                dim=2 * len(buffer),
                scaling=float(getattr(module, f"{prefix}attention_scaling")),
                paired=self.family.paired,
                rounds_tables=self.family.rounds_tables,
                rounds_products=self.family.rounds_products,
            )
        return found
