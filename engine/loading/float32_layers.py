"""Computes a model with its layers in float32, one layer at a time.

    ids ─ embedding ─▶ float32 ─▶ layer ─▶ … ─▶ norm ─▶ in the model's type: output layer ─▶ logits

Parameters are float32 only while their layer is called, so one layer has to fit in memory that way,
and not the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from engine.contract.types import TokenId
from engine.loading.eager import eager_forward
from engine.models.held_layer import HeldLayer

_FORWARD = "forward"


def rounded_and_not(
    model: PreTrainedModel, prompts: Sequence[Sequence[TokenId]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of all tokens of prompts in the model's type, and in float32: [T, V] each.

    Both are of the model's own code.

    Args:
        model: a view, in evaluation mode and not in use. It is left with eager attention.
        prompts: token ids.

    Raises:
        ModelRefusedError: the model's code does not run in float32.
    """
    model.set_attn_implementation("eager")
    ids = [torch.tensor([prompt], device=model.device) for prompt in prompts]

    def logits() -> torch.Tensor:
        found = [eager_forward(model, one, keeps_all=True).logits[0].float() for one in ids]
        return torch.cat(found)

    rounded = logits()
    with in_float32(model):
        return rounded, logits()


@contextmanager
def in_float32(model: PreTrainedModel) -> Iterator[None]:
    """Let a view compute in float32 inside the `with` block; see the module."""
    instead = {one: _instead(one, model) for one in model.modules()}
    with ExitStack() as undo:
        for module, parts in _units(model):
            widened = _Widened([one for one in parts if instead[one] is None])
            undo.callback(module.register_forward_pre_hook(widened.begin).remove)
            undo.callback(module.register_forward_hook(widened.end, always_call=True).remove)
        for module, forward in instead.items():
            if forward is not None and _FORWARD not in vars(module):
                setattr(module, _FORWARD, forward)
                undo.callback(delattr, module, _FORWARD)
        yield


def _instead(module: nn.Module, model: PreTrainedModel) -> Callable[..., torch.Tensor] | None:
    """Return a forward that yields float32, for a module whose parameters are not widened."""
    compute: Callable[..., torch.Tensor] = module.forward
    dtype = model.dtype
    if module is model.get_output_embeddings():
        return lambda x: compute(x.to(dtype)).float()
    if isinstance(module, nn.Embedding) or module is model.get_input_embeddings():
        return lambda ids: compute(ids).float()
    if isinstance(module, HeldLayer):
        bias: Any = module._parameters.get("bias")
        wide = None if bias is None else bias.float()
        return lambda x: linear(x, module.held.unpacked().float(), wide)
    return None


def _units(module: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """Yield layers with all modules inside, and modules outside of layers by themselves."""
    for one in module.children():
        if isinstance(module, nn.ModuleList):
            yield one, list(one.modules())
        else:
            yield from _units(one)
    yield module, [module]


class _Widened:
    """Modules whose parameters are float32 during a call."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._before: list[dict[str, nn.Parameter | None]] = []

    def begin(self, *_: Any) -> None:
        """Replace the parameters by float32 ones."""
        self._before = [dict(one._parameters) for one in self._modules]
        for one, before in zip(self._modules, self._before, strict=True):
            for name, tensor in before.items():
                if tensor is not None and tensor.is_floating_point():
                    one._parameters[name] = nn.Parameter(tensor.detach().float(), False)

    def end(self, *_: Any) -> None:
        """Restore the parameters."""
        for one, before in zip(self._modules, self._before, strict=True):
            one._parameters.update(before)
        self._before = []
