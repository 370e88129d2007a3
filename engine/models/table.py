"""The table of model classes that can be described, and how their descriptions are read from a
model.

    model ─▶ its class in FAMILIES? ─▶ read sizes ─▶ its functions in force as written? ─▶ Decoder

A class's name proves nothing about its code, which changes between versions of transformers. So a
description of a particular model, with its weights and config, is then compared with the model
itself (`engine.models.comparison`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

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


class NotDescribedError(Exception):
    """A model cannot be described. The message gives the reason, worded to complete a sentence."""


_Norms = tuple[str | None, str | None, str | None, str | None]


@dataclass(frozen=True, slots=True)
class RecurrentParts:
    """How the classes of a family name the parts of a recurrence.

    Attributes:
        form: the recurrence.
        module: the module that has it, in layers that have no attention.
        projection, output: its linear layers.
        norm: of a delta net.
        by_key_head: whether the projection makes everything of a key head together.
        norms: those of the layers that have it; None if they are those of all layers.
    """

    form: Literal["short_convolution", "delta_net"]
    module: str
    projection: tuple[str, ...]
    output: str = "out_proj"
    norm: str = "norm"
    by_key_head: bool = False
    norms: _Norms | None = None


@dataclass(frozen=True, slots=True)
class MixtureParts:
    """How the classes of a family compute mixtures of experts.

    Attributes:
        rounds: see Routing.
        normed: see Routing. None if the router says so in its norm_topk_prob.
        router: the module that scores experts.
        clamped: whether the activation is a ClampedGate.
    """

    rounds: bool
    normed: bool | None = None
    router: str = "gate"
    clamped: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """How the classes of a family name and combine their modules.

    Attributes:
        norms: the norms of a layer: before and after attention, before and after the MLP. None, or
            a module of type Identity, if there is no such norm.
        form: the variant of all norms.
        head_norms: the norms of queries and keys, if a model has any.
        norms_last: see Attention.
        projection, output, inner, down: the linear layers of attention and of the MLP.
        mlp, last_norm, rotary: the modules of these parts.
        activation: of the MLP, if its code and not the config has it.
        gated, parallel: see Mlp and Layer.
        gates_attention: see Attention.gated.
        recurrence: what some layers have instead of attention. None if all layers attend.
        mixture: of experts. None if only the model's own module computes it.
        paired, rounds_tables, rounds_products: see Rotary.
        rotates: whether an attention layer uses rotary embeddings.
        caps_scores: whether the config's attn_logit_softcapping applies.
        multiplies_logits: whether logits are multiplied by the config's logits_scaling rather than
            divided by it.
    """

    norms: _Norms = ("input_layernorm", None, "post_attention_layernorm", None)
    form: NormForm = "rounded_first"
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
    norms_last: bool = False
    projection: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    output: str = "o_proj"
    inner: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    mlp: str = "mlp"
    last_norm: str = "norm"
    rotary: str = "rotary_emb"
    activation: Activation | None = None
    gated: bool = True
    parallel: bool = False
    gates_attention: bool = False
    recurrence: RecurrentParts | None = None
    mixture: MixtureParts | None = None
    paired: bool = False
    rounds_tables: bool = True
    rounds_products: bool = True
    rotates: Callable[[Any], bool] = lambda attention: True
    caps_scores: bool = False
    multiplies_logits: bool = False


_BOTH_SIDES = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_AFTER = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_GATE_UP = ("gate_up_proj",)
_UP = ("up_proj",)
_LIBRARY = "transformers.models."
_slides_or_all: Callable[[Any], bool] = lambda one: one.sliding_window is None or one.is_sliding  # noqa: E731

_GLM4 = Family(
    norms=(
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    ),
    inner=_GATE_UP,
    paired=True,
)

_LFM2 = Family(
    norms=("operator_norm", None, "ffn_norm", None),
    head_norms=("q_layernorm", "k_layernorm"),
    output="out_proj",
    inner=("w1", "w3"),
    down="w2",
    mlp="feed_forward",
    last_norm="embedding_norm",
    activation="silu",
    recurrence=RecurrentParts("short_convolution", "conv", ("in_proj",)),
)
_QWEN3_5 = Family(
    form="from_one",
    gates_attention=True,
    recurrence=RecurrentParts(
        "delta_net", "linear_attn", ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    ),
)
_QWEN3_NEXT = replace(
    _QWEN3_5,
    recurrence=RecurrentParts(
        "delta_net", "linear_attn", ("in_proj_qkvz", "in_proj_ba"), by_key_head=True
    ),
)
_OLMO_HYBRID = Family(
    norms=_AFTER,
    form="plain",
    rounds_tables=False,
    rounds_products=False,
    recurrence=RecurrentParts(
        "delta_net",
        "linear_attn",
        ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"),
        output="o_proj",
        norm="o_norm",
        norms=("input_layernorm", None, "post_attention_layernorm", None),
    ),
)

FAMILIES: dict[str, Family] = {
    "arcee": Family(inner=_UP, gated=False),
    "cohere": Family(
        norms=("input_layernorm", None, None, None),
        form="centered",
        parallel=True,
        paired=True,
        rounds_products=False,
    ),
    "cohere2": Family(
        norms=("input_layernorm", None, None, None),
        form="centered",
        parallel=True,
        paired=True,
        rounds_products=False,
        rotates=lambda one: one.sliding_window is not None,
    ),
    "cwm": Family(),
    "ernie4_5": Family(paired=True, rounds_tables=False, rounds_products=False),
    "exaone4": Family(norms=_AFTER, rotates=_slides_or_all),
    "gemma": Family(form="from_one"),
    "gemma2": Family(norms=_BOTH_SIDES, form="from_one", caps_scores=True),
    "gemma3_text": Family(norms=_BOTH_SIDES, form="from_one"),
    "glm": Family(inner=_GATE_UP, paired=True),
    "glm4": _GLM4,
    "glm4v_text": _GLM4,
    "gpt_oss": Family(
        form="plain",
        mixture=MixtureParts(rounds=True, normed=True, router="router", clamped=True),
    ),
    "granite": Family(),
    "helium": Family(form="plain", paired=True),
    "hunyuan_v1_dense": Family(head_norms=("query_layernorm", "key_layernorm"), norms_last=True),
    "hyperclovax": Family(
        norms=("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2"),
        multiplies_logits=True,
    ),
    "jais2": Family(form="centered", inner=_UP, gated=False),
    "lfm2": _LFM2,
    "lfm2_moe": replace(_LFM2, rotary="pos_emb"),
    "llama": Family(),
    "ministral": Family(),
    "mistral": Family(),
    "mixtral": Family(mixture=MixtureParts(rounds=False, normed=True)),
    "olmo2": Family(norms=_AFTER, form="plain", rounds_tables=False, rounds_products=False),
    "olmo3": Family(norms=_AFTER, form="plain", rounds_tables=False, rounds_products=False),
    "olmo_hybrid": _OLMO_HYBRID,
    "olmoe": Family(mixture=MixtureParts(rounds=True)),
    "phi3": Family(projection=("qkv_proj",), inner=_GATE_UP),
    "qwen2": Family(),
    "qwen2_5_vl_text": Family(),
    "qwen2_vl_text": Family(),
    "qwen3": Family(),
    "qwen3_5_moe_text": _QWEN3_5,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_moe": Family(mixture=MixtureParts(rounds=True)),
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_vl_moe_text": Family(mixture=MixtureParts(rounds=True, normed=True)),
    "qwen3_vl_text": Family(),
    "seed_oss": Family(),
    "smollm3": Family(rotates=lambda one: bool(one.use_rope)),
    "starcoder2": Family(form="centered", inner=("c_fc",), down="c_proj", gated=False),
    "vaultgemma": Family(
        norms=("input_layernorm", None, "pre_feedforward_layernorm", None),
        form="from_one",
        caps_scores=True,
    ),
}
"""The families by model type. The class is the causal language model in the transformers module of
that name.
"""


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
