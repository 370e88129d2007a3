"""The experts of a model's steps on CUDA: our own implementation behind transformers' interface for
them (`ExpertsInterface`), as attention has one. No module of a model is changed.

transformers' own, `grouped_mm`, waits for the device unless torch has a kernel for it: that is in
bfloat16 on compute capability 9 and 10. Otherwise torch copies the experts' ends to the host and
multiplies one expert after the other, which no graph can hold (torch, GroupedMMUtils.h). Ours takes
its place there; see `engine.models.triton_experts`. Only the view that steps run is told so, and
the model's owner keeps what the model had. It is set before our decoder is compared with the model
and before the load gate, so both judge it by what the model's own experts computed.
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
"""What transformers takes where nobody chose: another one is the owner's choice."""
_KERNEL_CAPABILITIES = (9, 10)
"""The major compute capabilities for which torch has a kernel, in bfloat16."""
_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})


def choose_experts(
    model: PreTrainedModel, backend: AttentionBackend, progress: Callable[[str], None]
) -> None:
    """Have a model's experts computed by ours where transformers' would wait for the device, if
    their form is one that ours computes.

    Args:
        model: a view, on its device.
        backend: what computes attention.
        progress: gets a line that says what computes them, and why, if transformers' would wait.
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
        reason = _why_no_form(module)
        if reason is not None:
            return f"{type(module).__name__} {reason}"
    return None


def _waits(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether transformers' own implementation does."""
    if device.type != "cuda":
        return False
    major, _ = torch.cuda.get_device_capability(device)
    return dtype is not torch.bfloat16 or major not in _KERNEL_CAPABILITIES


def _is_dispatched(module: torch.nn.Module) -> bool:
    """Whether a module of experts asks transformers' interface what computes it."""
    return all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed"))


def _why_no_form(module: Any) -> str | None:
    """Why a module's form is none of those that ours computes; None: it is one."""
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
