"""The description of a plain decoder: what its layers compute, and where a transformers model has
the parameters for it.

    ids ─ embedding ─ layer ─ … ─ layer ─ norm ─ output ─ logits

    layer: x ─┬─ norm ─ q, k, v ─ norms ─ rotary ─ attention ─ output ─ norm ─ + ─┐
              └──────────────────────────────────────────────────────────────────┘ │
           ┌───────────────────────────────────────────────────────────────────────┘
           └─┬─ norm ─ MLP ─ norm ─ + ─▶
             └──────────────────────┘

A description has no tensors and no code: modules are named by their path in the model. It is made
by `engine.models.table`; `engine.models.native_decoder` computes what it says. A decoder for
another device is another class that takes the same description.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh", "relu_squared"]
NormForm = Literal["plain", "from_one", "rounded_first", "centered"]
"""plain: x over the root of its mean square, times the weight. from_one: the weight's elements are
distances from 1. rounded_first: x is rounded before it is multiplied by the weight. centered: a
layer norm, x's mean is subtracted first.
"""


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm.

    Attributes:
        module: its path.
        width: how many elements are normed together.
        eps: added to their mean square.
        form: see NormForm.
    """

    module: str
    width: int
    eps: float
    form: NormForm


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary embeddings.

    Attributes:
        module: the path of the module that has the frequencies.
        frequencies: its buffer of them, float32 [dim / 2].
        lengths: its buffer of those of each length, if they depend on it; see
            `engine.models.length_table`. Where steps do not follow lengths, there is none, and no
            request is so long.
        dim: how many elements of a head are rotated, the first ones.
        scaling: multiplies cosines and sines.
        paired: neighbouring elements are rotated together; else those of the two halves.
        rounds_tables: cosines and sines are rounded to the model's type.
        rounds_products: products with them are rounded before they are added.
    """

    module: str
    frequencies: str
    lengths: str | None
    dim: int
    scaling: float
    paired: bool
    rounds_tables: bool
    rounds_products: bool


@dataclass(frozen=True, slots=True)
class Attention:
    """An attention layer.

    Attributes:
        module: its path.
        heads, kv_heads, head_dim: Hq, Hkv, D.
        projection: the paths of its linear layers: one for queries, keys and values together, or
            three.
        output: the path of its last linear layer.
        query_norm, key_norm: over each head, or over all heads together.
        norms_last: queries and keys are normed after they were rotated, each head by itself.
        rotary: index of Decoder.rotaries; None: nothing is rotated.
        scaling: multiplies scores.
        softcap: scores become softcap · tanh(score / softcap); None: they do not.
    """

    module: str
    heads: int
    kv_heads: int
    head_dim: int
    projection: tuple[str, ...]
    output: str
    query_norm: Norm | None
    key_norm: Norm | None
    norms_last: bool
    rotary: int | None
    scaling: float
    softcap: float | None


@dataclass(frozen=True, slots=True)
class Mlp:
    """The layer between two layers' attention.

    Attributes:
        inner: the paths of its first linear layers: gate and up together or apart; or one without
            a gate.
        down: the path of its last linear layer.
        activation: of the gate, or of the one inner layer.
        gated: whether the activation is multiplied by `up`.
    """

    inner: tuple[str, ...]
    down: str
    activation: Activation
    gated: bool


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in the place of an MLP. The model's own module computes it.

    Attributes:
        module: its path.
    """

    module: str


@dataclass(frozen=True, slots=True)
class Layer:
    """A decoder layer.

    Attributes:
        module: its path.
        index: of its cache.
        attention, mlp: see there.
        before_attention, after_attention, before_mlp, after_mlp: its norms.
        parallel: the MLP reads what attention reads.
        residual: multiplies what attention and the MLP add.
    """

    module: str
    index: int
    attention: Attention
    mlp: Mlp | Experts
    before_attention: Norm | None
    after_attention: Norm | None
    before_mlp: Norm | None
    after_mlp: Norm | None
    parallel: bool
    residual: float


@dataclass(frozen=True, slots=True)
class Decoder:
    """A plain decoder.

    Attributes:
        family: the model type, for messages.
        embedding: the path of the module that embeds ids, with whatever scales them.
        embedding_factor: multiplies what it returns.
        layers: in order.
        rotaries: those of its layers.
        norm: the last one.
        output: the path of the linear layer that computes logits.
        logits_factor: multiplies them.
        logits_divisor: divides them.
        logits_softcap: logits become softcap · tanh(logit / softcap); None: they do not.
    """

    family: str
    embedding: str
    embedding_factor: float | None
    layers: tuple[Layer, ...]
    rotaries: tuple[Rotary, ...]
    norm: Norm
    output: str
    logits_factor: float | None
    logits_divisor: float | None
    logits_softcap: float | None
