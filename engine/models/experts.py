"""Computes a model's experts on CUDA with our own implementation, in models that run as
transformers wrote them. Our decoder has its own mixtures; see `engine.models.torch_decoder`.

It is registered with transformers' interface for experts (`ExpertsInterface`), just as our
attention is with its interface. No module of a model is changed.

transformers' own implementation, `grouped_mm`, waits for the device unless torch has a kernel for
it, that is, in bfloat16 on compute capability 9 or 10. Otherwise torch copies the experts' end
offsets to the host and multiplies one expert after another, which cannot be captured in a graph
(torch, GroupedMMUtils.h). Our implementation replaces it there; see `engine.models.triton_experts`.
The choice is made only in the view that runs steps, so the owner's model is unchanged. It is made
before the comparison of our decoder with the model and before the load gate, so both judge our
experts by the results of the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from engine.attention.interface import AttentionBackend

EXPERTS_NAME = "headrace_experts"
_REPLACED = "grouped_mm"
"""The implementation that transformers uses by default. Any other one was chosen by the owner."""
_KERNEL_CAPABILITIES = (9, 10)
"""The major compute capabilities for which torch has a bfloat16 kernel."""
_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})


def choose_experts(
    model: PreTrainedModel, backend: AttentionBackend, progress: Callable[[str], None]
) -> None:
    """Use our experts in a model where those of transformers would wait for the device.

    This requires that the model's experts have a layout that ours support.

    Args:
        model: a view, on its device.
        backend: the backend that computes attention.
        progress: receives a line that says what computes the experts, and why, if those of
            transformers would wait.
    """
    modules = [one for one in model.modules() if _is_dispatched(one)]
    if not modules or not _waits(model.device, model.dtype):
        return
    reason = _why_not(modules, backend)
    if reason is None:
        from engine.models.triton_experts import experts_forward  # Triton need not be there

        ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, experts_forward)
        model.set_experts_implementation(EXPERTS_NAME)
        if {one.config._experts_implementation for one in modules} != {EXPERTS_NAME}:
            reason = "its class does not let them be set"
    progress("experts: our own" if reason is None else f"experts: transformers', because {reason}")


def _why_not(modules: Iterable[Any], backend: AttentionBackend) -> str | None:
    if backend.name != "triton":  # ours need what these kernels need
        return "attention does not run on the Triton kernels"
    for module in modules:
        chosen = module.config._experts_implementation
        if chosen != _REPLACED:
            return f"the model has {chosen}"
        reason = why_no_form(module)
        if reason is not None:
            return f"{type(module).__name__} {reason}"
    return None


def _waits(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether transformers' own implementation waits for the device."""
    if device.type != "cuda":
        return False
    major, _ = torch.cuda.get_device_capability(device)
    return dtype is not torch.bfloat16 or major not in _KERNEL_CAPABILITIES


def _is_dispatched(module: torch.nn.Module) -> bool:
    """Return whether a module of experts selects its implementation through transformers'
    interface.
    """
    return all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed"))


def why_no_form(module: Any) -> str | None:
    """Return why our experts do not support a module's layout, or None if they do. The reason is
    worded to follow its name.
    """
    if getattr(module, "_is_expert_parallel", False):
        return "has a part of the experts"
    if getattr(module, "has_post_expert_norm", False):
        return "has a norm behind its experts"
    names = ["gate_up_proj" if module.has_gate else "up_proj", "down_proj"]
    weights = [module._parameters.get(name) for name in names]
    biases = [module._parameters.get(f"{name}_bias") for name in names] if module.has_bias else []
    for name, one in zip(names, weights, strict=True):
        if one is None or one.dim() != 3 or len(one) != module.num_experts:
            return f"has no {name} of {module.num_experts} matrices"
        if 1 not in one.stride()[1:]:
            return f"has a {name} that is not in one piece"
    if any(one is None or not one.is_contiguous() for one in biases):
        return "has biases that are not in one piece"
    types = {one.dtype for one in (*weights, *biases) if one is not None}
    if len(types) != 1 or not types <= _DTYPES:
        return f"has weights in {', '.join(sorted(map(str, types)))}"
    return None
