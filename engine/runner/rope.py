"""Lets each token of a step be rotated for the length of its own request (see `engine.rope`).

    positions [T] ── tokens beyond the original length carry their length in the upper half
        ─▶ model ─▶ its rotary module ─▶ for each length: transformers' own forward ─▶ cos, sin

The model hands position ids on to its rotary module; steps give them to a stand-in there, in the
view alone, which asks the module once for each length: it appends the last position of that length,
so that the module computes what it would in a forward pass of that length.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from engine.rope import RopeLengths

_SHIFT = 32
_POSITION = (1 << _SHIFT) - 1
_DYNAMIC, _LONG = "dynamic", "longrope"
_TRIED_TOKENS = 5

Embeddings = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines: [B, T, D] each."""


def with_lengths(
    positions: npt.NDArray[np.int64], rope_lengths: npt.NDArray[np.int64], original: int
) -> npt.NDArray[np.int64]:
    """Position ids that carry the lengths beyond the original one: int64 [T].

    rope_lengths: of each token's request, int64 [T].
    """
    lengths = np.maximum(rope_lengths, positions + 1)
    return positions + (np.where(lengths > original, lengths, 0) << _SHIFT)


def without_lengths(positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The positions alone."""
    return positions & _POSITION


def read_rope(model: PreTrainedModel) -> RopeLengths | None:
    """How the model's rotary frequencies depend on the length; None: they do not."""
    config = model.config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None)
    kinds = dict(_kinds(config))
    if not longest or not kinds:
        return None
    originals = [longest]
    if _LONG in kinds:
        original = kinds[_LONG].get("original_max_position_embeddings")
        originals.append(original or getattr(config, "original_max_position_embeddings", longest))
    elif _DYNAMIC in kinds:
        longest = int(longest * max(1.0, kinds[_DYNAMIC].get("factor") or 1.0))
    if longest <= min(originals):
        return None
    return RopeLengths(min(originals), longest, _DYNAMIC in kinds, _restarts(type(model)))


def _kinds(config: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The kinds of rotary embeddings that depend on the length, with their parameters."""
    parameters = getattr(config, "rope_parameters", None) or {}
    # Either one set of parameters, or one for each kind of layer.
    nested = [entry for entry in parameters.values() if isinstance(entry, dict)]
    for rope in nested or [parameters]:
        kind = rope.get("rope_type")
        if kind in (_DYNAMIC, _LONG):
            yield kind, rope


def _restarts(model_class: type[PreTrainedModel]) -> bool:
    """Whether a model drops its cache when a request grows beyond the original length. Those that
    do compare with that option when they prepare a step.
    """
    code = model_class.prepare_inputs_for_generation.__code__
    return "original_max_position_embeddings" in (*code.co_names, *code.co_consts)


def follow_lengths(model: PreTrainedModel, rope: RopeLengths) -> bool:
    """Put stand-ins into the rotary modules of a view, and try whether lengths reach nothing else.

    Returns:
        Whether the view now takes position ids that carry lengths. If not, it is as before.
    """
    rotary = [one for one in model.modules() if _kinds_of(one) & {_DYNAMIC, _LONG}]
    before = [one.forward for one in rotary]
    for one in rotary:
        one.forward = _Rotary(one, rope)
    if rotary and _reach_nothing_else(model):
        return True
    for one, forward in zip(rotary, before, strict=True):
        one.forward = forward
    return False


def _kinds_of(module: torch.nn.Module) -> set[str]:
    kinds = getattr(module, "rope_type", None)
    return set(kinds.values()) if isinstance(kinds, dict) else {str(kinds)}


def _reach_nothing_else(model: PreTrainedModel) -> bool:
    """Whether a model computes the same if its positions carry a length within the original one,
    which changes no frequencies.
    """
    ids = torch.arange(_TRIED_TOKENS, device=model.device).unsqueeze(0)
    carrying = ids + (_TRIED_TOKENS << _SHIFT)
    try:
        with torch.inference_mode():
            plain, other = (
                model(input_ids=ids, position_ids=positions, use_cache=False).logits
                for positions in (ids, carrying)
            )
    except (IndexError, KeyError, TypeError, ValueError, RuntimeError):
        return False
    return torch.equal(plain, other)


class _Rotary:
    """The forward of a rotary module in a view."""

    def __init__(self, module: torch.nn.Module, rope: RopeLengths) -> None:
        # With state of its own, because transformers keeps the frequencies of the last length in
        # the module: neither the owner's calls nor a refresh of the view may change them here.
        self._module = object.__new__(type(module))
        buffers = {name: copy.deepcopy(one) for name, one in module._buffers.items()}
        vars(self._module).update(vars(module), _buffers=buffers)
        self._compute = type(module).forward
        self._original = rope.original
        self._is_graded = _DYNAMIC in _kinds_of(module)
        self._lock = threading.Lock()

    def __call__(
        self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Embeddings:
        """See the module: cosines and sines for position ids [B, T] that may carry lengths."""

        def rotate(positions: torch.Tensor, length: int) -> Embeddings:
            last = positions.new_full((positions.shape[0], 1), length - 1)
            ids = torch.cat((positions, last), -1)
            cos, sin = self._compute(self._module, x, ids, *args, **kwargs)
            return cos[:, :-1], sin[:, :-1]

        lengths, positions = position_ids >> _SHIFT, position_ids & _POSITION
        with self._lock:
            if self._is_graded:
                # A length of 1 brings the original frequencies back.
                self._compute(self._module, x, position_ids.new_zeros((1, 1)), *args, **kwargs)
                return _by_length(rotate, lengths, positions)
            # The same operations for any lengths, so that they can be captured.
            short = rotate(positions.clamp(max=self._original - 1), self._original)
            long = rotate(positions, self._original + 1)
        is_long = (lengths > self._original).unsqueeze(-1)
        return torch.where(is_long, long[0], short[0]), torch.where(is_long, long[1], short[1])


def _by_length(
    rotate: Callable[[torch.Tensor, int], Embeddings],
    lengths: torch.Tensor,
    positions: torch.Tensor,
) -> Embeddings:
    """Rotate the tokens of each length by themselves, in ascending order of lengths: the module's
    frequencies only grow with the length until they are brought back.
    """
    cos = sin = torch.empty(0)
    for count, length in enumerate(torch.unique(lengths).tolist()):
        rows = (lengths == length)[0]
        part = positions[:, rows]
        found = rotate(part, length or 1)
        if not count:
            shape = (*lengths.shape, found[0].shape[-1])
            cos, sin = (one.new_empty(shape) for one in found)
        cos[:, rows], sin[:, rows] = found
    return cos, sin
