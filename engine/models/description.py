"""The description of a plain decoder: what its layers compute, and which modules of the
transformers model hold the parameters.

    ids ─ embedding ─ layer ─ … ─ layer ─ norm ─ output ─ logits

    layer: x ─┬─ norm ─ q, k, v ─ norms ─ rotary ─ attention ─ output ─ norm ─ + ─┐
              └──────────────────────────────────────────────────────────────────┘ │
           ┌───────────────────────────────────────────────────────────────────────┘
           └─┬─ norm ─ MLP ─ norm ─ + ─▶
             └──────────────────────┘

A recurrence may take the place of attention: a short convolution, or a delta net.

A description contains neither tensors nor code, and refers to modules by their path in the model.
`engine.models.describing` makes descriptions, and the decoders, such as
`engine.models.native_decoder`, compute them. A decoder for another device is another class that
takes the same description.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh", "relu_squared"]
NormForm = Literal["plain", "from_one", "rounded_first", "centered"]
"""The variant of a norm.

plain: x divided by its root mean square, times the weight. from_one: the same, but the weight is
stored as its difference from 1. rounded_first: x is rounded before it is multiplied by the weight.
centered: a layer norm; the mean of x is subtracted first.
"""


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """The activation of gpt-oss's experts: (up + 1) · gate · sigmoid(factor · gate). Gate and up
    alternate, and are clamped first: both to at most `limit`, and up to at least its negative.
    """

    factor: float
    limit: float


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm.

    Attributes:
        module: the path of its module.
        width: the number of elements that are normed together.
        eps: added to their mean square.
        form: the variant; see NormForm.
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
        frequencies: the name of its buffer of frequencies, float32 [dim / 2].
        lengths: the name of its buffer of frequencies by length; see `engine.models.length_table`.
            None if they do not depend on the length. If steps do not follow lengths, there is no
            such buffer, and no request is long enough to need it.
        dim: the number of leading elements of a head that are rotated.
        scaling: multiplies cosines and sines.
        paired: whether neighbouring elements are rotated together, rather than elements of the two
            halves.
        rounds_tables: whether cosines and sines are rounded to the model's dtype.
        rounds_products: whether products with them are rounded before they are added.
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
        module: the path of its module.
        heads, kv_heads, head_dim: Hq, Hkv, D.
        projection: the paths of its first linear layers: one for queries, keys and values together,
            or three.
        output: the path of its last linear layer.
        query_norm, key_norm: over each head, or over all heads together.
        norms_last: whether queries and keys are normed after the rotation, each head by itself.
        rotary: the index in Decoder.rotaries, or None if nothing is rotated.
        scaling: multiplies scores.
        softcap: scores become softcap · tanh(score / softcap). None for no cap.
        sinks: the name of the module's parameter [Hq] of logits that take part in the softmax
            without values, or None if there is none.
        gated: whether the projection makes a gate after each head's query, by whose sigmoid the
            head's result is multiplied.
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
    sinks: str | None
    gated: bool


@dataclass(frozen=True, slots=True)
class ShortConvolution:
    """A recurrence: c times the causal convolution of b times x.

    Attributes:
        module: the path of its module.
        projection: the path of its first linear layer, which makes b, c and x.
        convolution: the path of the module with the weights, [channels, 1, width].
        output: the path of its last linear layer.
        channels, width: of the convolution.
    """

    module: str
    projection: tuple[str]
    convolution: str
    output: str
    channels: int
    width: int


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """A recurrence: queries, keys and values are convolved, and a gated delta rule is applied to
    them (`engine.models.recurrence`). Its results are normed head by head, and multiplied by SiLU
    of z.

    Attributes:
        module: the path of its module.
        projection: the paths of its first linear layers. Side by side they make queries, keys and
            values; z; b, of which betas are made; and a, of which decays are made.
        groups: in how many groups of heads these columns come: first each group's queries, keys,
            values and z, and behind all of them each group's b and a. 1 if all stand together.
        convolution: the path of the module with the weights, [channels, 1, width].
        log_rate, rate_bias: the names of the module's parameters [heads]. Decays are
            -exp(log_rate) · softplus(a + rate_bias).
        beta_factor: multiplies sigmoid(b), which gives beta.
        norm: over each head.
        output: the path of its last linear layer.
        key_heads, heads, key_dim, value_dim: Hk, H, K and V. Each of Hk serves H / Hk heads.
        width: of the convolution.
    """

    module: str
    projection: tuple[str, ...]
    groups: int
    convolution: str
    log_rate: str
    rate_bias: str
    beta_factor: float
    norm: Norm
    output: str
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    width: int

    @property
    def channels(self) -> int:
        """The number of channels of the convolution: of queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim


Recurrence = ShortConvolution | DeltaNet


@dataclass(frozen=True, slots=True)
class Mlp:
    """The MLP of a layer.

    Attributes:
        inner: the paths of its first linear layers: gate and up, together or separate, or a single
            layer without a gate.
        down: the path of its last linear layer.
        activation: applied to the gate, or to the single inner layer.
        gated: whether the activation is multiplied by `up`.
    """

    inner: tuple[str, ...]
    down: str
    activation: Activation
    gated: bool


@dataclass(frozen=True, slots=True)
class Routing:
    """How a mixture chooses each token's experts, and what these compute.

    Attributes:
        router: the path of the module whose weight [E, K] and bias [E], if any, score all experts.
        experts: the path of the module with the weights of all experts.
        chosen: the number of experts of a token, those with the largest scores.
        normed: whether the weights of a token's experts, which are the softmax of all scores, are
            divided by their sum.
        rounds: whether weights, and results times weights, are rounded to the model's dtype.
        activation: between the two products of an expert.
    """

    router: str
    experts: str
    chosen: int
    normed: bool
    rounds: bool
    activation: Activation | ClampedGate


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts instead of an MLP.

    Attributes:
        module: the path of the module that computes it.
        routing: what it computes. None if only the module itself knows.
    """

    module: str
    routing: Routing | None


@dataclass(frozen=True, slots=True)
class Layer:
    """A decoder layer.

    Attributes:
        module: the path of its module.
        index: the index of its cache.
        mixer: attention, or what takes its place.
        mlp: see Mlp and Experts.
        before_attention, after_attention, before_mlp, after_mlp: its norms. The first two are
            before and after the mixer, whatever it is.
        parallel: whether the MLP reads the same input as attention.
        residual: multiplies what the mixer and the MLP add.
    """

    module: str
    index: int
    mixer: Attention | Recurrence
    mlp: Mlp | Experts
    before_attention: Norm | None
    after_attention: Norm | None
    before_mlp: Norm | None
    after_mlp: Norm | None
    parallel: bool
    residual: float

    @property
    def attention(self) -> Attention:
        """The layer's attention.

        Raises:
            TypeError: it has a recurrence instead.
        """
        if not isinstance(self.mixer, Attention):
            raise TypeError(f"{self.module} does not attend")
        return self.mixer

    @property
    def norms(self) -> dict[str, Norm]:
        """The norms that it has, those of its attention too, by the names of the fields. The norm
        of a delta net is not among them, because it also takes a gate.
        """
        of_layer = ("before_attention", "after_attention", "before_mlp", "after_mlp")
        norms = {name: getattr(self, name) for name in of_layer}
        if isinstance(self.mixer, Attention):
            norms |= {name: getattr(self.mixer, name) for name in ("query_norm", "key_norm")}
        return {name: norm for name, norm in norms.items() if norm is not None}


@dataclass(frozen=True, slots=True)
class Decoder:
    """A plain decoder.

    Attributes:
        family: the model type, for messages.
        embedding: the path of the module that embeds ids, including any scaling of its own.
        embedding_factor: multiplies the embedding's output.
        layers: the layers in order.
        rotaries: the rotary embeddings of the layers.
        norm: the last norm.
        output: the path of the linear layer that computes logits.
        logits_factor: multiplies the logits.
        logits_divisor: divides the logits.
        logits_softcap: logits become softcap · tanh(logit / softcap). None for no cap.
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
