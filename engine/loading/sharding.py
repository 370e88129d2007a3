"""Splits a model across ranks, with transformers and the model's own tensor-parallel plan.

    q, k, v, gate, up    by outputs     each rank has some heads, and their share of the KV cache
    o, down              by inputs      partial results, which are summed over the ranks
    embedding, lm_head   by vocabulary  summed and gathered: every rank has all logits

Weights are DTensors. Tensors between layers are plain tensors, the same on every rank. A plan that
does not match its model would give plausible but wrong results. So the load gate compares the split
model with the whole model, which runs module by module with weights gathered for each call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig

from engine.contract.errors import ModelRefusedError
from engine.loading.eager import eager_logits
from engine.loading.gate import logits_error, logits_tolerance
from engine.models.recording import Observation

_HEADS = {
    "q_proj": "num_attention_heads",
    "k_proj": "num_key_value_heads",
    "v_proj": "num_key_value_heads",
}
"""Projections whose outputs are heads, and the config field with the number of heads."""


def check_plan(config: Any, model_class: type[PreTrainedModel], size: int) -> None:
    """Refuse a model that cannot be split, before any weight is read.

    Args:
        config, model_class: the model's config and class.
        size: the number of ranks.

    Raises:
        ModelRefusedError: transformers has no plan for it, or its heads cannot be split evenly.
    """
    name = model_class.__name__
    text_config = config.get_text_config()
    plan = getattr(text_config, "base_model_tp_plan", None) or {}
    if not plan:
        raise ModelRefusedError(
            f"{name} has no tensor-parallel plan in this version of transformers, so it cannot be "
            "divided; set tensor_parallel to none"
        ).naming("tensor_parallel")
    for rule, style in plan.items():
        option = _HEADS.get(rule.rpartition(".")[2])
        heads = getattr(text_config, option, None) if option else None
        if style == "colwise" and isinstance(heads, int) and heads % size:
            raise ModelRefusedError(
                f"{name} has {heads} heads ({option}), which {size} ranks cannot share evenly; "
                "start as many ranks as divide it"
            )


def sharding(size: int) -> dict[str, Any]:
    """Return the `from_pretrained` arguments that split a model across the connected ranks."""
    return {"distributed_config": DistributedConfig(tp_size=size, tp_plan="auto")}


def whole_logits(model: PreTrainedModel, probe: Observation) -> tuple[torch.Tensor, ...]:
    """Return the whole model's logits after the probe's prompts, [V] each.

    All ranks call this. The model is left with eager attention.

    Raises:
        ModelRefusedError: the split model gives different logits, or fails.
    """
    with _undivided(model):
        whole = eager_logits(model, probe.prompts)
    if whole[0].shape != probe.logits[0].shape:
        raise ModelRefusedError(
            f"{type(model).__name__}, divided, gives logits of {probe.logits[0].shape[0]} of "
            f"{whole[0].shape[0]} token ids: its plan does not gather them"
        )
    error = max(map(logits_error, probe.logits, whole))
    if not error < logits_tolerance(probe.dtype):
        raise ModelRefusedError(
            f"{type(model).__name__}, divided as its plan in this version of transformers says, "
            f"computes logits that differ from the undivided model's by {error:.2%}; it would be "
            "run wrongly; set tensor_parallel to none"
        ).naming("tensor_parallel")
    return whole


@contextlib.contextmanager
def _undivided(model: PreTrainedModel) -> Iterator[None]:
    """Make the model compute as if it were not split, during the block.

    The plan's wrappers of forward methods are removed. Modules with partial weights gather them for
    each call.
    """
    wrappers: list[tuple[torch.nn.Module, Any]] = []
    hooks = []
    for module in model.modules():
        if getattr(module, "_is_hooked", False) and "forward" in vars(module):
            wrappers.append((module, vars(module).pop("forward")))
        divided = _divided(module)
        if divided:
            whole = _Whole(divided)
            hooks.append(module.register_forward_pre_hook(whole.gather))
            hooks.append(module.register_forward_hook(whole.restore, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, forward in wrappers:
            module.forward = forward


def _divided(module: torch.nn.Module) -> dict[str, DTensor]:
    """Return a module's own parameters that are split across ranks."""
    return {
        name: parameter
        for name, parameter in module.named_parameters(recurse=False)
        if isinstance(parameter, DTensor)
    }


class _Whole:
    """Gathers a module's parameters for a call."""

    def __init__(self, divided: dict[str, DTensor]) -> None:
        self._divided = divided

    def gather(self, module: torch.nn.Module, _inputs: object) -> None:
        """Replace this rank's shards with the whole weights."""
        for name, parameter in self._divided.items():
            module._parameters[name] = parameter.full_tensor()  # type: ignore[assignment]

    def restore(self, module: torch.nn.Module, _inputs: object, _output: object) -> None:
        """Put this rank's shards back."""
        module._parameters.update(self._divided)  # type: ignore[arg-type]
