"""Forwards for a model's own modules that compute the operations between matrix products with one
kernel each.

A changed module keeps its parameters, its name, its class, its hooks and everything else that
others read. Only its `forward` is replaced, on that one instance, by a function of this file, which
finds its parameters in the module's attribute PLAN. Elements are rounded to bfloat16 at the same
points as in the module's own forward.

Calls for which there is no kernel (other types, other devices, a cache from transformers, training,
tracing by torch.compile, which fuses by itself) go to the class's own forward. These forwards have
no gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.native.library import HeadsCall
from engine.runner.packed import PANEL, PackedLinear, multiply, native_library

PLAN = "_headrace_plan"
"""The attribute of a changed module with the parameters of its forward."""

_is_compiling = torch.compiler.is_compiling


@dataclass(frozen=True, slots=True)
class NormPlan:
    """How to compute a root-mean-square norm.

    Attributes:
        width: how many elements are normed together.
        eps: added to their mean square.
        form: how the weight is applied: 0, FROM_ONE or ROUNDED_FIRST.
    """

    width: int
    eps: float
    form: int


@dataclass(frozen=True, slots=True)
class Joined:
    """Packed linear layers with the same input and adjacent weights, computed as one.

    Attributes:
        packed: uint8, the weights of all layers; a view.
        scales: for int8.
        bias: see `pad_bias`.
        outputs, inputs: the sum of the layers' N, and K.
    """

    packed: torch.Tensor
    scales: torch.Tensor | None
    bias: torch.Tensor | None
    outputs: int
    inputs: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K] → [..., N], the first layer's outputs first."""
        return multiply(x, self.packed, self.scales, self.bias, self.outputs, self.inputs)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How to compute an attention layer: q_proj, k_proj and v_proj; norms of each head and rotary
    embeddings of its halves, if any; the attention function; o_proj.

    Attributes:
        num_heads, num_kv_heads, head_dim: Hq, Hkv, D; values also have D elements.
        rotary_dim: how many elements of a head are rotated; 0: none.
        joined: q_proj, k_proj and v_proj as one; None: they are separate.
        form: the form of the norms of queries and keys; see NormPlan. None: no norms.
        eps: the eps of both norms.
        options: the options that the layer passes to the attention function: scaling, window, ….
        eager: the attention function in the layer's source file.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    joined: Joined | None
    form: int | None
    eps: tuple[float, float]
    options: dict[str, Any]
    eager: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class GatePlan:
    """How to compute a gated layer: down_proj(activation(gate_proj(x)) * up_proj(x)).

    Attributes:
        activation: SILU or GELU_TANH.
        joined: gate_proj and up_proj as one; None: they are separate.
    """

    activation: int
    joined: Joined | None


def exchange(module: torch.nn.Module, forward: Any, plan: object) -> None:
    """Give a module another forward.

    Args:
        module: the module.
        forward: one of this file's, called as a method of the module.
        plan: the parameters of that forward.
    """
    setattr(module, PLAN, plan)
    # Bound to the module, so that a copy of the module gets its own.
    module.forward = MethodType(forward, module)


def is_exchanged(module: torch.nn.Module) -> bool:
    """Whether a module's forward was replaced."""
    return "forward" in module.__dict__


def restore(module: torch.nn.Module) -> None:
    """Give a changed module its class's forward back."""
    del module.__dict__["forward"], module.__dict__[PLAN]


def join(layers: Sequence[torch.nn.Module]) -> Joined | None:
    """Join packed linear layers; None: they are not packed, or their weights are not adjacent.

    Args:
        layers: the layers, which have the same input.
    """
    packed = [layer for layer in layers if type(layer) is PackedLinear]
    if len(packed) < len(layers):
        return None
    for left, right in itertools.pairwise(packed):
        storages = (one.packed.untyped_storage().data_ptr() for one in (left, right))
        if (
            left.packed.data_ptr() + left.packed.nbytes != right.packed.data_ptr()
            or len(set(storages)) > 1
            or left.in_features != right.in_features
            or left.out_features % PANEL  # multiples of this are whole panels for any kernel
            or (left.scales is None) != (right.scales is None)
        ):
            return None
    sizes = [layer.packed.numel() for layer in packed]
    bias = None
    if any(layer.padded_bias is not None for layer in packed):
        bias = torch.cat([_bias(layer) for layer in packed])
    return Joined(
        packed[0].packed.as_strided((sum(sizes),), (1,)),
        None if packed[0].scales is None else torch.cat([layer.scales for layer in packed]),  # type: ignore[misc]  # all or none
        bias,
        sum(layer.out_features for layer in packed),
        packed[0].in_features,
    )


def _bias(layer: PackedLinear) -> torch.Tensor:
    if layer.padded_bias is None:
        return torch.zeros(-(-layer.out_features // PANEL) * PANEL)
    return layer.padded_bias


def rms_norm(x: torch.Tensor, weight: torch.Tensor, plan: NormPlan) -> torch.Tensor:
    """x divided by the root of its mean square, times the weight.

    Args:
        x: bfloat16 [..., width], contiguous.
        weight: bfloat16 [width].
        plan: see NormPlan.
    """
    y = torch.empty_like(x)
    width = plan.width
    native_library().rms_norm(
        weight.data_ptr(),
        width,
        plan.eps,
        plan.form,
        x.data_ptr(),
        y.data_ptr(),
        x.numel() // width,
        torch.get_num_threads(),
    )
    return y


def norm_forward(
    self: torch.nn.Module, x: torch.Tensor | None = None, **named: torch.Tensor
) -> torch.Tensor:
    """Forward of a root-mean-square norm: [..., width] → [..., width]. x may also be passed by the
    name that the class has for it.
    """
    if x is None:
        (x,) = named.values()
    plan: NormPlan = self.__dict__[PLAN]
    if (
        _is_compiling()
        or x.dtype is not torch.bfloat16
        or not x.is_cpu
        or x.shape[-1] != plan.width
        or not x.is_contiguous()
    ):
        return type(self).forward(self, x)  # type: ignore[no-any-return]
    return rms_norm(x, self._parameters["weight"], plan)  # type: ignore[arg-type]  # it has one


def apply_gate(gate: torch.Tensor, up: torch.Tensor, stride: int, activation: int) -> None:
    """Replace gate by activation(gate) * up, in place.

    Args:
        gate, up: bfloat16 [..., N], each row contiguous.
        stride: elements from one row to the next, in both.
        activation: SILU or GELU_TANH.
    """
    width = gate.shape[-1]
    native_library().gate(
        activation,
        gate.data_ptr(),
        up.data_ptr(),
        stride,
        gate.data_ptr(),
        stride,
        gate.numel() // width,
        width,
        torch.get_num_threads(),
    )


def gate_forward(
    self: torch.nn.Module, x: torch.Tensor | None = None, **named: torch.Tensor
) -> torch.Tensor:
    """Forward of a gated layer: [..., K] → [..., K]. x may also be passed by the name that the
    class has for it.
    """
    if x is None:
        (x,) = named.values()
    plan: GatePlan = self.__dict__[PLAN]
    layers: dict[str, Any] = self._modules
    if _is_compiling() or x.dtype is not torch.bfloat16 or not x.is_cpu:
        return type(self).forward(self, x)  # type: ignore[no-any-return]
    if plan.joined is None:
        gate, up = layers["gate_proj"](x).contiguous(), layers["up_proj"](x).contiguous()
        apply_gate(gate, up, gate.shape[-1], plan.activation)
    else:
        both = plan.joined(x)
        width = both.shape[-1] // 2
        gate, up = both.narrow(-1, 0, width), both.narrow(-1, width, width)
        apply_gate(gate, up, 2 * width, plan.activation)
    return layers["down_proj"](gate)  # type: ignore[no-any-return]


def attention_forward(
    self: torch.nn.Module,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    attention_mask: torch.Tensor | None = None,
    past_key_values: object | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Forward of an attention layer.

    Args:
        hidden_states: [B, T, K].
        position_embeddings: cosines and sines, [B, T, rotary_dim] each.
        attention_mask: passed on.
        past_key_values: a cache from transformers.
        kwargs: passed on.

    Returns:
        [B, T, K], and the weights, if the attention function returns them.
    """
    plan: AttentionPlan = self.__dict__[PLAN]
    if (
        _is_compiling()
        or past_key_values is not None
        or self.training
        or hidden_states.dtype is not torch.bfloat16
        or not hidden_states.is_cpu
        or not has_embeddings(position_embeddings, hidden_states, plan.rotary_dim)
    ):
        return type(self).forward(  # type: ignore[no-any-return]
            self,
            hidden_states,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            **kwargs,
        )
    query, key, value = _project(self._modules, hidden_states, position_embeddings, plan)
    config: Any = self.config
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, plan.eager)
    output, weights = attend(self, query, key, value, attention_mask, **plan.options, **kwargs)
    output = output.reshape(*hidden_states.shape[:-1], -1)
    return self._modules["o_proj"](output), weights  # type: ignore[misc]  # it has one


def has_embeddings(
    embeddings: tuple[torch.Tensor, torch.Tensor] | None,
    hidden_states: torch.Tensor,
    rotary_dim: int,
) -> bool:
    """Whether the cosines and sines of each token are in the kernel's format, or none are
    needed.
    """
    if not rotary_dim:
        return True
    if embeddings is None:
        return False
    shape = (*hidden_states.shape[:-1], rotary_dim)
    return all(
        one.dtype is torch.bfloat16 and one.is_contiguous() and one.shape == shape
        for one in embeddings
    )


def _project(
    layers: dict[str, Any],
    x: torch.Tensor,
    embeddings: tuple[torch.Tensor, torch.Tensor] | None,
    plan: AttentionPlan,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [B, Hq, T, D], keys and values [B, Hkv, T, D], normed and rotated."""
    heads, kv_heads, width = plan.num_heads, plan.num_kv_heads, plan.head_dim
    batch, tokens, _ = x.shape
    if plan.joined is None:
        parts = [layers[name](x).contiguous() for name in ("q_proj", "k_proj", "v_proj")]
        query, key, value = (one.view(batch, tokens, -1, width).transpose(1, 2) for one in parts)
        strides = (heads * width, kv_heads * width)
        addresses = (parts[0].data_ptr(), parts[1].data_ptr())
    else:
        whole = plan.joined(x)
        together = whole.view(batch, tokens, -1, width).transpose(1, 2)
        query, key, value = together.split_with_sizes((heads, kv_heads, kv_heads), 1)
        address = whole.data_ptr()
        addresses = (address, address + heads * width * 2)
        strides = (plan.joined.outputs, plan.joined.outputs)
    if plan.rotary_dim or plan.form is not None:
        norms = None
        if plan.form is not None:
            norms = tuple(layers[f"{name}_norm"]._parameters["weight"] for name in "qk")
        rotate_heads(addresses, strides, batch * tokens, embeddings, norms, plan)
    return query, key, value


def rotate_heads(
    addresses: tuple[int, int],
    strides: tuple[int, int],
    tokens: int,
    embeddings: tuple[torch.Tensor, torch.Tensor] | None,
    norms: tuple[torch.Tensor, ...] | None,
    plan: AttentionPlan,
) -> None:
    """Norm the heads of queries and keys, and rotate them, in place.

    Args:
        addresses: those of queries and keys, bfloat16 [tokens, H * D].
        strides: elements from one token to the next, in both.
        tokens: how many tokens.
        embeddings: cosines and sines, bfloat16 [tokens, rotary_dim] each, if they are rotated.
        norms: the weights of both, bfloat16 [D]; None: there are no norms.
        plan: see AttentionPlan.
    """
    call = HeadsCall(
        *addresses,
        *strides,
        *((None, None) if embeddings is None else [one.data_ptr() for one in embeddings]),
        tokens,
        plan.num_heads,
        plan.num_kv_heads,
        plan.head_dim,
        plan.rotary_dim,
        *((None, None) if norms is None else [one.data_ptr() for one in norms]),
        *plan.eps,
        plan.form or 0,
    )
    native_library().heads(call, torch.get_num_threads())
