"""The table of model classes that can be described: how a family's classes name and combine their
modules. `engine.models.describing` reads a model's description by it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from engine.models.description import Activation, NormForm

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
