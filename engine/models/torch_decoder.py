"""A decoder in torch for CUDA devices. Products of the same input are joined, and consecutive small
operations are one operation.

    ids ─ embedding ─ x ─ norm ─▶ layer ─▶ … ─▶ layer ─▶ output ─▶ logits of the wanted tokens

    layer:  [q k v] ─ turn ─ attention ─ output ─ add, norm ─ [gate up] ─ gate ─ down ─ add, norm

Each sum is computed together with the norm that follows it. So a layer launches 9 operations in a
step with prompts, and 9 or 10 in a decode step, where attention may take two; see
`engine.models.operations`. A mixture of experts takes 7 instead of the MLP's 3. No state is kept
between calls and no tensor is read on the host, so steps can be captured.

The decoder reads the weights of the transformers model. [Wq Wk Wv] and [Wgate Wup] are joined layer
by layer, and the model's parameters become views of them, so that they are stored only once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from typing_extensions import override

from engine.attention.interface import AttentionBackend, AttentionContext, AttentionParams
from engine.attention.registry import CONTEXT_KEYWORD
from engine.attention.step_states import StepStates
from engine.models import description as described
from engine.models.decoder_frame import DecoderFrame, DecoderOutput
from engine.models.experts import why_no_form
from engine.models.joined_tensors import join_tensors
from engine.models.layer_parts import Kind, UnboundError, run_experts
from engine.models.operations import (
    BoundMixture,
    BoundNorm,
    Heads,
    KVPlaces,
    Operations,
    Tables,
)

TORCH_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})
"""The supported dtypes of models."""


@dataclass(frozen=True, slots=True)
class Product:
    """Linear layers with the same input.

    weight: [N, K]; bias: [N], or None if there is none; operations: computes the product.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    operations: Operations

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the product: [T, K] → [T, N]."""
        return self.operations.multiply(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class TorchMlp:
    """The products of an MLP."""

    inner: Product
    down: Product


@dataclass(frozen=True, slots=True)
class TorchLayer:
    """A layer with its tensors.

    Attributes:
        description: the description of the layer.
        projection, output: the products of its attention.
        mlp: its MLP, its mixture of experts, or the model's own module that computes one.
        before_attention, after_attention, before_mlp, after_mlp: its norms.
        heads: how queries and keys are processed.
        params: the parameters of its attention.
        operations: computes everything else.
    """

    description: described.Layer
    projection: Product
    output: Product
    mlp: TorchMlp | BoundMixture | torch.nn.Module
    before_attention: BoundNorm | None
    after_attention: BoundNorm | None
    before_mlp: BoundNorm | None
    after_mlp: BoundNorm | None
    heads: Heads
    params: AttentionParams
    operations: Operations

    # ---- part by part, for a comparison: see `engine.models.layer_parts.LayerParts`

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        if name not in ("query_norm", "key_norm"):
            return self.operations.add_norm(x, before=getattr(self, name))[1]
        width = self.heads.head_dim * (
            self.heads.heads if name == "query_norm" else self.heads.kv_heads
        )
        plain = replace(self.heads, query_norm=None, key_norm=None)
        other = x.new_zeros((len(x), self._width - width))
        q, k = (x, other) if name == "query_norm" else (other, x)
        own = replace(plain, **{name: getattr(self.heads, name)})
        return self._rotate(q, k, own, None)[name == "key_norm"]

    def multiply(self, name: str, x: torch.Tensor) -> torch.Tensor:
        product: Product = getattr(self if name in ("projection", "output") else self.mlp, name)
        return product(x)

    def rotate(
        self, q: torch.Tensor, k: torch.Tensor, tables: Tables
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._rotate(q, k, replace(self.heads, query_norm=None, key_norm=None), tables)

    def recur(self, projected: torch.Tensor, states: StepStates) -> torch.Tensor:
        raise TypeError(f"{self.description.module} has no recurrence of ours")

    def gate_mixed(self, mixed: torch.Tensor, projected: torch.Tensor) -> torch.Tensor:
        raise TypeError(f"{self.description.module} has no gated attention of ours")

    def gate(self, inner: torch.Tensor) -> torch.Tensor:
        one = self.description.mlp
        if not isinstance(one, described.Mlp):
            raise TypeError(f"{one.module} has no gate of ours")
        return self.operations.gate(inner, one.activation, gated=one.gated)

    def add(self, x: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        return self.operations.add_norm(x, (made,), factor=self.description.residual)[0]

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.mlp, TorchMlp):
            raise TypeError(f"{self.description.module} has no experts")
        if isinstance(self.mlp, BoundMixture):
            return self.operations.mix(x, self.mlp)
        return run_experts(self.mlp, x)

    @property
    def _width(self) -> int:
        return (self.heads.heads + self.heads.kv_heads) * self.heads.head_dim

    def _rotate(
        self, q: torch.Tensor, k: torch.Tensor, heads: Heads, tables: Tables | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate queries and keys by the operation that is also used for whole layers."""
        keys, values = k.new_empty((2, len(k), heads.kv_heads, heads.head_dim)).unbind(0)
        projected = torch.cat((q, k, torch.zeros_like(k)), -1)
        queries = self.operations.rotate(projected, heads, tables, KVPlaces(keys, values))
        return queries.flatten(1), keys.flatten(1)


class TorchDecoder(DecoderFrame):
    """Computes a model's steps in torch."""

    layers: tuple[TorchLayer, ...]
    one_call: Kind = "attention"
    """The order of the sums in a product may depend on the number of rows."""

    def __init__(
        self,
        model: torch.nn.Module,
        decoder: described.Decoder,
        operations: Operations,
        backend: AttentionBackend,
    ) -> None:
        """Bind a description to the tensors of a model, some of which are joined.

        Raises:
            UnboundError: the tensors are not as this decoder needs them. In this case nothing is
                joined.
        """
        first = next(model.parameters())
        super().__init__(model, decoder, first.dtype)
        self.device = first.device
        self.backend = backend
        self._operations = operations
        binding = _Binding(model, self.dtype, operations)
        for one in decoder.layers:
            binding.check(one)
        self.layers = tuple(binding.layer(decoder, one) for one in decoder.layers)
        self._norm = binding.norm(decoder.norm)

    def __call__(self, **inputs: Any) -> DecoderOutput:
        """Return a step's logits; see `engine.runner.forward.CausalModel`."""
        x = self.embed(inputs["input_ids"][0])
        tables = self.tables(inputs["position_ids"][0])
        _, x = self._run(self.layers, x, tables, inputs[CONTEXT_KEYWORD], self._norm)
        rows = inputs["logits_to_keep"]
        if isinstance(rows, torch.Tensor):
            x = x.index_select(0, rows)
        return DecoderOutput(self.finish(self.output(x)).unsqueeze(0))

    @override
    def norm(self, x: torch.Tensor) -> torch.Tensor:
        return self._operations.add_norm(x, before=self._norm)[1]

    @override
    def run(
        self,
        layers: Sequence[TorchLayer],
        x: torch.Tensor,
        tables: Sequence[Tables],
        context: AttentionContext,
    ) -> torch.Tensor:
        return self._run(layers, x, tables, context, None)[0]

    def _run(
        self,
        layers: Sequence[TorchLayer],
        x: torch.Tensor,
        tables: Sequence[Tables],
        context: AttentionContext,
        last: BoundNorm | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the result of some layers, without and with the norm that follows."""
        add_norm = self._operations.add_norm
        norms = [*(one.before_attention for one in layers), last]
        x, normed = add_norm(x, before=norms[0])
        for layer, following in zip(layers, norms[1:], strict=True):
            one = layer.description
            attended = layer.output(self._attend(layer, normed, tables, context))
            if one.parallel:
                both = (attended, self._mlp(layer, normed))
                x, normed = add_norm(x, both, None, one.residual, following)
                continue
            x, normed = add_norm(
                x, (attended,), layer.after_attention, one.residual, layer.before_mlp
            )
            made = self._mlp(layer, normed)
            x, normed = add_norm(x, (made,), layer.after_mlp, one.residual, following)
        return x, normed

    def _attend(
        self,
        layer: TorchLayer,
        x: torch.Tensor,
        tables: Sequence[Tables],
        context: AttentionContext,
    ) -> torch.Tensor:
        """Compute a layer's attention, without its output layer: [T, K] → [T, Hq · D]."""
        heads, rotate = layer.heads, self._operations.rotate
        projected = layer.projection(x)
        rotary = layer.description.attention.rotary
        own = None if rotary is None else tables[rotary]
        cache = context.caches[layer.description.index]
        metadata, backend = context.metadata[cache.group], context.backend
        slots = backend.slots(metadata)
        if slots is None:
            shape = (len(x), heads.kv_heads, heads.head_dim)
            keys, values = projected.new_empty(shape), projected.new_empty(shape)
            query = rotate(projected, heads, own, KVPlaces(keys, values))
            query, keys, values = (one.transpose(0, 1) for one in (query, keys, values))
            return backend.forward(query, keys, values, cache, metadata, layer.params).flatten(1)
        output = projected.new_empty((len(x), heads.heads, heads.head_dim))
        places = KVPlaces(cache.keys, cache.values, slots)
        query = rotate(projected, heads, own, places).transpose(0, 1)
        backend.attend(query, output, cache, metadata, layer.params)
        return output.flatten(1)

    def _mlp(self, layer: TorchLayer, x: torch.Tensor) -> torch.Tensor:
        """Compute a layer's MLP or experts: [T, K] → [T, K]."""
        one = layer.mlp
        return one.down(layer.gate(one.inner(x))) if isinstance(one, TorchMlp) else layer.mix(x)


class _Binding:
    """Finds and joins a model's tensors."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype, operations: Operations) -> None:
        self._model = model
        self._dtype = dtype
        self._operations = operations
        holders: dict[int, int] = {}
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                holders[id(parameter)] = holders.get(id(parameter), 0) + 1
        self._shared = {key for key, count in holders.items() if count > 1}

    def check(self, layer: described.Layer) -> None:
        """Raise UnboundError if a layer's tensors cannot be used."""
        attention, mlp = layer.mixer, layer.mlp
        if not isinstance(attention, described.Attention) or attention.gated:
            raise UnboundError(
                "recurrences and gated attention have native kernels alone, for a CPU"
            )
        query = attention.heads * attention.head_dim
        keys = attention.kv_heads * attention.head_dim
        self._check_linears(attention.projection, query + 2 * keys)
        self._check_linears([attention.output], None)
        if isinstance(mlp, described.Mlp):
            down = self._check_linears([mlp.down], None)
            self._check_linears(mlp.inner, (1 + mlp.gated) * down[0].in_features)
        for norm, whole in ((attention.query_norm, query), (attention.key_norm, keys)):
            if norm is not None and norm.width not in (attention.head_dim, whole):
                raise UnboundError(f"{norm.module} norms {norm.width} elements together")
        for norm in layer.norms.values():
            self.norm(norm)
        if attention.head_dim % 2:
            raise UnboundError("heads have an odd number of elements")
        if layer.parallel and (layer.after_attention or layer.before_mlp or layer.after_mlp):
            raise UnboundError("layers in parallel have norms of their own")

    def _check_linears(self, paths: Sequence[str], outputs: int | None) -> list[torch.nn.Linear]:
        """Check linear layers that have the same input. outputs: their total width."""
        layers = []
        for path in paths:
            module = self._model.get_submodule(path)
            if type(module) is not torch.nn.Linear:
                raise UnboundError(f"{path} is {type(module).__name__}, not Linear")
            for parameter in module.parameters():
                if parameter.dtype != self._dtype or not parameter.is_contiguous():
                    raise UnboundError(f"{path} is {parameter.dtype}, not {self._dtype}")
                if len(paths) > 1 and id(parameter) in self._shared:
                    raise UnboundError(f"{path} shares a parameter with another layer")
            layers.append(module)
        if len({one.in_features for one in layers}) != 1 or outputs not in (
            None,
            sum(one.out_features for one in layers),
        ):
            raise UnboundError(f"{paths[0]} has other sizes than its neighbours")
        return layers

    def layer(self, decoder: described.Decoder, layer: described.Layer) -> TorchLayer:
        """Bind a layer, and join its products."""
        attention = layer.attention
        rotary = None if attention.rotary is None else decoder.rotaries[attention.rotary]
        return TorchLayer(
            description=layer,
            projection=self._product(attention.projection),
            output=self._product([attention.output]),
            mlp=self._mlp(layer.mlp),
            before_attention=self._norm_or_none(layer.before_attention),
            after_attention=self._norm_or_none(layer.after_attention),
            before_mlp=self._norm_or_none(layer.before_mlp),
            after_mlp=self._norm_or_none(layer.after_mlp),
            heads=Heads(
                heads=attention.heads,
                kv_heads=attention.kv_heads,
                head_dim=attention.head_dim,
                query_norm=self._norm_or_none(attention.query_norm),
                key_norm=self._norm_or_none(attention.key_norm),
                norms_last=attention.norms_last,
                rotary_dim=0 if rotary is None else rotary.dim,
                paired=rotary is not None and rotary.paired,
                rounds_products=rotary is not None and rotary.rounds_products,
            ),
            params=AttentionParams(attention.scaling, attention.softcap, self._sinks(attention)),
            operations=self._operations,
        )

    def _sinks(self, one: described.Attention) -> torch.Tensor | None:
        if one.sinks is None:
            return None
        return self._model.get_parameter(f"{one.module}.{one.sinks}").detach()

    def norm(self, one: described.Norm) -> BoundNorm:
        """Return a norm with its tensors."""
        parameters = self._model.get_submodule(one.module)._parameters
        weight, bias = parameters["weight"], parameters.get("bias")
        if weight is None or weight.shape != (one.width,) or weight.dtype != self._dtype:
            raise UnboundError(f"{one.module} has no weight of {one.width} x {self._dtype}")
        return BoundNorm(
            weight.detach(), None if bias is None else bias.detach(), one.eps, one.form
        )

    def _mlp(
        self, one: described.Mlp | described.Experts
    ) -> TorchMlp | BoundMixture | torch.nn.Module:
        if isinstance(one, described.Mlp):
            return TorchMlp(self._product(one.inner), self._product([one.down]))
        mixture = None if one.routing is None else self._mixture(one.routing)
        return self._model.get_submodule(one.module) if mixture is None else mixture

    def _mixture(self, routing: described.Routing) -> BoundMixture | None:
        """Bind a mixture. Return None if only the model's own module supports its tensors."""
        experts: Any = self._model.get_submodule(routing.experts)
        router = self._model.get_submodule(routing.router)._parameters
        weight, bias = router.get("weight"), router.get("bias")
        known = [one for one in (weight, bias) if one is not None]
        is_ours = why_no_form(experts) is None and experts.down_proj.dtype is self._dtype
        if weight is None or not is_ours or any(not self._is_plain(one) for one in known):
            return None
        return BoundMixture(
            weight.detach(), None if bias is None else bias.detach(), experts, routing
        )

    def _is_plain(self, tensor: torch.Tensor) -> bool:
        return tensor.dtype is self._dtype and tensor.is_contiguous()

    def _norm_or_none(self, one: described.Norm | None) -> BoundNorm | None:
        return None if one is None else self.norm(one)

    def _product(self, paths: Sequence[str]) -> Product:
        layers: list[Any] = [self._model.get_submodule(path) for path in paths]
        weights = [one.weight for one in layers]
        if len(layers) == 1:
            bias = layers[0].bias
            known = weights[0].detach(), None if bias is None else bias.detach()
            return Product(*known, self._operations)
        return Product(*join_tensors(layers), self._operations)
