"""Recurrent modules of a view that our kernels compute for all requests of a step at once.

    module's own forward ─┬─ projections, gates, norms ─▶ its own code, for all rows
                          ├─ causal_conv1d_fn ──────────▶ short_convolution ─┐ slots of all
                          └─ chunk_gated_delta_rule ────▶ gated_delta_rule ──┘ requests

transformers' modules read a state from the model's cache, pass it with their rows to a function of
their file, and write the state back. Here such a module's forward runs as it is, once for all rows,
with other functions under these names: kernels that know which rows are whose. A module is computed
so only if a trial of several requests in several steps gives what its stand-in gives, which calls
its unmodified forward for each request.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.attention.step_states import (
    Recurrence,
    StateKind,
    StateShape,
    StepStates,
    allocate_states,
    find_states,
)
from engine.models.formats.native import DTYPES, why_missing
from engine.models.recurrence import gated_delta_rule, short_convolution

_CONVOLUTION = "causal_conv1d_fn"
_DELTA_RULES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
_TRIAL = (
    # The start and the number of rows of two requests, in each step.
    ((0, 70), (0, 3)),
    ((70, 1), (3, 1)),
    ((71, 2), (4, 66)),
)
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""The largest error of a trial's results and states, relative to the largest element."""


def use_kernels(model: PreTrainedModel, found: Recurrence) -> str:
    """Let our kernels compute the recurrent modules of a view that they can, in place of stand-ins.

    Args:
        model: a view with stand-ins, on its device.
        found: what was observed of its recurrent layers.

    Returns:
        A line that says what computes them.
    """
    reasons: dict[str, int] = {}
    for path in found.modules:
        why_not = _use(model, model.get_submodule(path), found)
        if why_not is not None:
            reasons[why_not] = reasons.get(why_not, 0) + 1
    count, slow = len(found.modules), sum(reasons.values())
    line = f"recurrent modules: our kernels compute {count - slow} of {count}"
    if reasons:
        line += "; the others are computed request by request, which is slower: "
        line += "; ".join(f"{why} ({number})" for why, number in reasons.items())
    return line


def why_no_kernels(
    module: Any, found: Recurrence, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Return why our kernels cannot compute a module, or None if they can, which a trial then
    confirms.

    Args:
        module: a recurrent module, which may be on the meta device.
        found: what was observed of the model's recurrent layers.
        device, dtype: those of the model when it runs.
    """
    if device.type != "cpu" or dtype not in DTYPES:
        return f"there is no kernel for {dtype} on {device.type}"
    missing = why_missing()
    if missing is not None:
        return missing
    shapes = _shapes_of(module, found)
    code = inspect.unwrap(type(module).forward).__code__
    if not shapes or not _knows(code, {one.kind for one in shapes}):
        return f"there is no kernel for {type(module).__name__}"
    return None


def _shapes_of(module: Any, found: Recurrence) -> list[StateShape]:
    return [one for one in found.shapes if one.layer == getattr(module, "layer_idx", None)]


def _use(model: PreTrainedModel, module: Any, found: Recurrence) -> str | None:
    """Let our kernels compute a module. Return why they do not, or None if they do."""
    dtype = model.dtype
    reason = why_no_kernels(module, found, model.device, dtype)
    if reason is not None:
        return reason
    shapes = _shapes_of(module, found)
    kernels, stand_in = _KernelForward(module), module.forward
    width = model.config.get_text_config().hidden_size
    try:
        error = _error_of_trial(kernels, stand_in, shapes, width, dtype)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as failure:
        return f"{type(module).__name__}: {failure}"
    if not error <= _TOLERANCES[dtype]:  # it may be NaN
        return f"{type(module).__name__}: a trial differs by {error:.1e} from its own code"
    module.forward = kernels
    return None


def _knows(code: CodeType, kinds: set[StateKind]) -> bool:
    """Return whether a forward passes its states to functions that the kernels replace."""
    return (_CONVOLUTION in code.co_names or "conv" not in kinds) and (
        not set(_DELTA_RULES).isdisjoint(code.co_names) or "recurrent" not in kinds
    )


@torch.inference_mode()
def _error_of_trial(
    kernels: Callable[..., torch.Tensor],
    stand_in: Callable[..., torch.Tensor],
    shapes: Sequence[StateShape],
    width: int,
    dtype: torch.dtype,
) -> float:
    """Return by how much results and states of two requests differ, relative to the largest."""
    slots = (2, 1)
    generator = torch.Generator().manual_seed(0)
    states = [allocate_states(shapes, 3, torch.device("cpu")) for _ in range(2)]
    worst = 0.0
    for parts in _TRIAL:
        starts, counts = zip(*parts, strict=True)
        rows = torch.randn(1, sum(counts), width, generator=generator).to(dtype)
        found, expected = (
            compute(rows, StepStates(tensors, slots, starts, counts))
            for compute, tensors in zip((kernels, stand_in), states, strict=True)
        )
        pairs = [(found, expected), *((states[0][one], states[1][one]) for one in shapes)]
        for one, other in pairs:
            difference = (one.float() - other.float()).abs().max()
            error = float(difference / other.float().abs().max())
            worst = worst if error <= worst else error  # also if it is NaN
    return worst


class _KernelForward:
    """The forward of a recurrent module in a view, for all rows of a step at once."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._own = type(module).forward
        plain: Any = inspect.unwrap(self._own)
        self._code, self._globals, self._defaults = (
            plain.__code__,
            plain.__globals__,
            plain.__defaults__,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        states = find_states(args, kwargs)
        if states is None:
            return self._own(self._module, *args, **kwargs)
        rows = _StepRows(states)
        names = {**self._globals, _CONVOLUTION: rows.convolve}
        names.update(dict.fromkeys(_DELTA_RULES, rows.apply_delta_rule))
        forward = FunctionType(self._code, names, argdefs=self._defaults)
        return forward(
            self._module,
            *(rows if one is states else one for one in args),
            **{name: rows if one is states else one for name, one in kwargs.items()},
        )


@dataclass
class _Asked:
    """The state that a module has just asked for: the layer and the state's index."""

    conv: tuple[int, int] | None = None
    recurrent: tuple[int, int] | None = None


class _StepRows:
    """The rows of a step's requests. To a module it is an empty cache, and its functions are those
    that the module passes its rows to.
    """

    def __init__(self, states: StepStates) -> None:
        self._tensors = {
            (shape.layer, shape.kind, shape.index): tensor
            for shape, tensor in states.tensors.items()
        }
        self._places = tuple(
            torch.tensor(numbers) for numbers in (states.starts, states.counts, states.slots)
        )
        self._asked = _Asked()

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None, because `convolve` reads the state."""

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None, because `apply_delta_rule` reads the state, which is noted."""
        self._asked.recurrent = layer_idx, state_idx

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> torch.Tensor:
        """Return the rows as they are, because `convolve` writes the state, which is noted."""
        self._asked.conv = layer_idx, state_idx
        return conv_states

    def update_recurrent_state(self, *_: object, **__: object) -> None:
        """Do nothing, because `apply_delta_rule` has written the state."""

    def convolve(
        self,
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **_: object,
    ) -> torch.Tensor:
        """Compute `causal_conv1d_fn`: [1, C, T] → [1, C, T]."""
        if activation not in (None, "silu", "swish"):
            raise ValueError(f"there is no kernel for a convolution with {activation}")
        state = self._state("conv", self._asked.conv)
        rows = hidden_states[0].T
        has_silu = activation is not None
        return short_convolution(rows, weight, bias, has_silu, state, *self._places).T[None]

    def apply_delta_rule(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **_: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute a chunked delta rule: [1, T, ...] → [1, T, H, V], and the state of all slots."""
        state = self._state("recurrent", self._asked.recurrent)
        made = gated_delta_rule(
            *(query[0], key[0], value[0], g[0], beta[0]),
            use_qk_l2norm_in_kernel,
            state,
            *self._places,
        )
        return made[None], state

    def _state(self, kind: StateKind, asked: tuple[int, int] | None) -> torch.Tensor:
        if asked is None:
            raise KeyError(f"the module has not said which {kind} state it needs")
        layer, index = asked
        return self._tensors[layer, kind, index]
