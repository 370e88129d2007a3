"""Finds the modules of a model for which we have an equivalent forward, and replaces their
forwards.

    choose_fusing ─▶ how: our kernels, or joined products (`fusing_products`), or not at all
    fuse_model    ─▶ norms, attention layers, gated layers, whole layers: watch, compare, exchange

A class's name proves nothing, so a module's own forward is run on random input. Its tensor
operations are recorded, and if there is an unknown one, the module stays as it is. Our forward must
give the same values, except for a few that are rounded the other way. Modules that are not changed
work as before: a wrong replacement is far worse than a missed one. Only models that Headrace has
loaded itself are changed; others belong to their owners.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from engine.errors import ConfigError
from engine.native.library import (
    FROM_ONE,
    GELU_TANH,
    ROUNDED_FIRST,
    SILU,
    NativeUnavailableError,
)
from engine.runner.fused import (
    GatePlan,
    NormPlan,
    apply_gate,
    exchange,
    gate_forward,
    is_exchanged,
    join,
    norm_forward,
    restore,
    rms_norm,
)
from engine.runner.fusing_attention import fuse_attention
from engine.runner.fusing_chains import chain_layers
from engine.runner.fusing_layers import fuse_layers
from engine.runner.likeness import (
    FAILURES,
    FLOAT32,
    LINEARS,
    VIEWS,
    Likeness,
    Operations,
    Probe,
    agree,
    has_hooks,
    random_numbers,
    takes_one_argument,
)
from engine.runner.packed import native_library

Fusing = Literal["kernels", "products"]

_EPS_NAMES = ("eps", "variance_epsilon", "epsilon")
_MOST_DISTANT = 1e-2
"""The largest relative difference of results after a matrix product, if its inputs agree."""
_NORM_OPERATIONS = VIEWS | {
    *("_to_copy", "pow", "square", "mul", "mean", "add", "add_", "rsqrt", "sqrt", "div"),
    *("reciprocal", "rms_norm", "_fused_rms_norm"),
}


@dataclass(frozen=True, slots=True)
class FusingReport:
    """What was replaced.

    Attributes:
        norms, gates, attentions: how many of each.
        layers: how many whole layers that consist of these.
        chained: how many of these layers are computed together with others, in one call.
        left: similar classes of which some modules were not changed.
    """

    norms: int
    gates: int
    attentions: int
    layers: int
    chained: int
    left: tuple[str, ...]

    def __str__(self) -> str:
        """A line for the log."""
        text = f"fused: {self.norms} norms, {self.gates} gated layers, {self.attentions} attentions"
        if self.layers:
            text += f", {self.layers} whole layers"
        if self.chained:
            text += f" ({self.chained} of them in one call)"
        return f"{text}; left as they are: {', '.join(self.left)}" if self.left else text


def choose_fusing(device: torch.device, dtype: torch.dtype, wanted: bool | None) -> Fusing | None:
    """Choose how a model's layers are fused, for a device and dtype; None: not at all.

    In bfloat16 on a CPU, kernels compute the operations between products. Otherwise products are
    joined.

    Args:
        device, dtype: the model's.
        wanted: True: fuse or refuse; None: fuse on CUDA, and on processors where the kernels were
            measured to pay.

    Raises:
        ConfigError: the layers are to be fused, and cannot be.
    """
    if wanted is False:
        return None
    if device.type != "cpu" or dtype != torch.bfloat16:
        return "products" if wanted or device.type == "cuda" else None
    try:
        if native_library().isa == "portable" and not wanted:
            return None  # it was not measured on this kind of processor
    except NativeUnavailableError as error:
        if wanted:
            raise ConfigError("fuse_layers", f"is True, but {error}") from error
        return None
    return "kernels"


def fuse_model(model: PreTrainedModel) -> FusingReport:
    """Replace every forward that can be replaced. Earlier replacements stay.

    Args:
        model: in evaluation mode, with packed linear layers, not in use.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the work of each is so small that threads would only wait
    try:
        return _fuse(model)
    finally:
        torch.set_num_threads(threads)


def _fuse(model: PreTrainedModel) -> FusingReport:
    left: set[str] = set()
    likeness = Likeness()
    # Not in inference mode, in which operations are recorded before they are decomposed.
    with torch.inference_mode(False), torch.no_grad():
        for module in model.modules():
            if is_exchanged(module) or not _looks_like_a_norm(module):
                continue
            if not _fuse_norm(module, likeness):
                left.add(type(module).__name__)
        attentions, others = fuse_attention(model, likeness)
        left |= others
        for module in model.modules():
            if is_exchanged(module) or not _looks_gated(module):
                continue
            if not _fuse_gate(module, likeness):
                left.add(type(module).__name__)
        layers = fuse_layers(model, likeness)
        chained = chain_layers(model)
    return FusingReport(
        norms=_count(model, norm_forward),
        gates=_count(model, gate_forward),
        attentions=attentions,
        layers=layers,
        chained=chained,
        left=tuple(sorted(left)),
    )


def _count(model: torch.nn.Module, forward: object) -> int:
    return sum(
        is_exchanged(module) and getattr(module.forward, "__func__", None) is forward
        for module in model.modules()
    )


def _eps(module: torch.nn.Module) -> float | None:
    found = [getattr(module, name) for name in _EPS_NAMES if hasattr(module, name)]
    return found[0] if len(found) == 1 and isinstance(found[0], float) else None


def _looks_like_a_norm(module: torch.nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 1 and _eps(module) is not None


def _fuse_norm(module: torch.nn.Module, likeness: Likeness) -> bool:
    """Replace a norm's forward if ours is equivalent. Returns whether it was replaced."""
    weight, eps = module._parameters["weight"], _eps(module)
    if (
        weight is None
        or eps is None
        or len(module._parameters) != 1
        or module._buffers
        or module._modules
        or weight.dtype != torch.bfloat16
        or weight.device.type != "cpu"
        or not weight.is_contiguous()
        or not takes_one_argument(module)
    ):
        return False
    plans = [NormPlan(len(weight), eps, form) for form in (ROUNDED_FIRST, 0, FROM_ONE)]
    # The form of other norms of its kind is tried first.
    plans.sort(key=lambda plan: not likeness.has((type(module), plan)))
    for plan in plans:
        kind = (type(module), plan)
        probes, probed = likeness.probes(kind), [module]
        if not likeness.has(kind):
            # A checkpoint's weights may all be 1, which does not show how they are applied.
            other = copy.deepcopy(module)
            other.weight = torch.nn.Parameter(random_numbers(*weight.shape, seed=1).bfloat16())
            probed.insert(0, other)
        if all(_is_norm(one, plan, probes) for one in probed):
            exchange(module, norm_forward, plan)
            likeness.passed(kind)
            return True
    return False


def _is_norm(module: torch.nn.Module, plan: NormPlan, probes: Sequence[Probe]) -> bool:
    """Whether a norm is equivalent to ours."""
    for magnitude, alone in probes:
        shape = (1, 1) if alone else (2, 1, 3)
        x = (random_numbers(*shape, plan.width) * magnitude).bfloat16()
        try:
            with Operations() as operations:
                expected = type(module).forward(module, x)
        except FAILURES:
            return False
        if not operations.seen.keys() <= _NORM_OPERATIONS:
            return False
        if not agree(rms_norm(x, module._parameters["weight"], plan), expected):  # type: ignore[arg-type]
            return False
    return True


def _looks_gated(module: torch.nn.Module) -> bool:
    return {"gate_proj", "up_proj", "down_proj"} <= module._modules.keys()


def _fuse_gate(module: torch.nn.Module, likeness: Likeness) -> bool:
    """Replace a gated layer's forward if ours is equivalent. Returns whether it was replaced."""
    layers: dict[str, Any] = dict(module._modules)
    gate, up, down = (layers.pop(f"{name}_proj") for name in ("gate", "up", "down"))
    if (
        len(layers) != 1
        or module._parameters
        or module._buffers
        or any(type(one) not in LINEARS for one in (gate, up, down))
        or any(has_hooks(one) for one in module.children())
        or not takes_one_argument(module)
        or not gate.in_features == up.in_features == down.out_features
        or not gate.out_features == up.out_features == down.in_features
    ):
        return False
    function = next(iter(layers.values()))
    activation = _activation(function)
    if activation is None:
        return False
    kind = (type(module), type(function), activation, gate.in_features, gate.out_features)
    exchange(module, gate_forward, GatePlan(activation, join((gate, up))))
    for magnitude, alone in likeness.probes(kind):
        shape = (1, 1) if alone else (2, 3)
        x = (random_numbers(*shape, gate.in_features) * magnitude).bfloat16()
        if not _is_gate(module, x):
            restore(module)
            return False
    likeness.passed(kind)
    return True


def _is_gate(module: torch.nn.Module, x: torch.Tensor) -> bool:
    """Whether a gated layer with our forward gives the results of its class's own."""
    gated: list[torch.Tensor] = []
    hook = module.get_submodule("down_proj").register_forward_pre_hook(
        lambda _, arguments: gated.append(arguments[0].clone())
    )
    try:
        with Operations() as operations, operations.without(list(module.children())):
            expected = type(module).forward(module, x)
        actual = module.forward(x)
    except FAILURES:
        return False
    finally:
        hook.remove()
    return (
        operations.computing == {"mul": 1}
        and len(gated) == 2
        and agree(gated[1], gated[0])
        and bool((actual - expected).norm() <= _MOST_DISTANT * expected.norm())
    )


def _activation(module: torch.nn.Module) -> int | None:
    """Which of the kernel's activations a module computes, checked for every bfloat16 value; None:
    none of them.
    """
    if module._parameters or module._buffers or module._modules:
        return None
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).view(64, 1024)
    try:
        expected = module(x)
    except FAILURES:
        return None
    ones = torch.ones_like(x)
    for activation in (SILU, GELU_TANH):
        actual = x.clone()
        apply_gate(actual, ones, 1024, activation)
        if agree(actual, expected, x.float().abs() * FLOAT32):
            return activation
    return None
