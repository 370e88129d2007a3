"""Lets each token of a step be rotated for the length of its own request (see `engine.rope`).

    positions [T] ── tokens beyond the original length carry their length in the upper half
        ─▶ model ─▶ its rotary module ─▶ each token by the frequencies of its length ─▶ cos, sin

The model hands position ids on to its rotary module. In the view that steps run on, a stand-in has
that module's place. The frequencies of each length are those of transformers, and the module's own
forward computes cosines and sines from them. If each length has its own frequencies, all are put
into one table when the model is loaded: a step looks nothing up on the host, and can be captured.
Modules that compute fixed frequencies anew in each call, on the host, find them on the device.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.rope import LENGTH_SHIFT, POSITION_MASK, RopeLengths

_DYNAMIC, _LONG = "dynamic", "longrope"
_TRIED_TOKENS = 5
_MAKES = "rope_init_fn"
"""The attribute of a rotary module with the function that computes its frequencies."""

Embeddings = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines: [B, T, D] each."""


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
    followed = [_Rotary(one, rope) for one in rotary]
    for one, forward in zip(rotary, followed, strict=True):
        one.forward = forward
    if rotary and _reach_nothing_else(model, followed, rope.longest):
        return True
    for one, forward in zip(rotary, before, strict=True):
        one.forward = forward
    return False


def _kinds_of(module: torch.nn.Module) -> set[str]:
    kinds = getattr(module, "rope_type", None)
    return set(kinds.values()) if isinstance(kinds, dict) else {str(kinds)}


def _reach_nothing_else(model: PreTrainedModel, rotary: Sequence[_Rotary], longest: int) -> bool:
    """Whether a model computes the same if its positions carry a length within the original one,
    which changes no frequencies, and its rotary modules compute what they should beyond it.
    """
    ids = torch.arange(_TRIED_TOKENS, device=model.device).unsqueeze(0)
    carrying = ids + (_TRIED_TOKENS << LENGTH_SHIFT)
    try:
        with torch.inference_mode():
            plain, other = (
                model(input_ids=ids, position_ids=positions, use_cache=False).logits
                for positions in (ids, carrying)
            )
            if not all(one.agrees(model.device, longest) for one in rotary):
                return False
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError):
        return False
    return torch.equal(plain, other)


def keep_frequencies(model: PreTrainedModel) -> int:
    """Let rotary modules of a view that compute their frequencies in each call, on the host, find
    those on the device of the model. Frequencies that depend on the length are left. Returns how
    many modules these are.
    """
    found = [
        one
        for one in model.modules()
        if _MAKES in inspect.unwrap(type(one).forward).__code__.co_names
        and not _kinds_of(one) & {_DYNAMIC, _LONG}
    ]
    for one in found:
        one.forward = _Kept(one)
    return len(found)


class _Kept:
    """The forward of a rotary module, whose frequencies were made beforehand."""

    def __init__(self, module: Any) -> None:
        frequencies, scaling = module.rope_init_fn(module.config)
        made = frequencies.to(next(module.buffers()).device), scaling
        self._compute = type(module).forward
        self._module = object.__new__(type(module))
        vars(self._module).update(vars(module), **{_MAKES: lambda *given, **named: made})

    def __call__(self, *given: Any, **named: Any) -> Embeddings:
        made: Embeddings = self._compute(self._module, *given, **named)
        return made


class _OfTokens:
    """Takes the place of a module's frequencies [F], with those of each token: [T, F]. Each token
    is a request of its own, so positions are [T, 1].
    """

    def __init__(self, frequencies: torch.Tensor) -> None:
        self._frequencies = frequencies

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """For forwards that multiply them with positions [T, 1, 1]: [T, 1, F]."""
        return self._frequencies.unsqueeze(1).to(*args, **kwargs)

    def __getitem__(self, index: object) -> torch.Tensor:
        """For forwards of transformers before 5.23, `[None, :, None]`, and a product of matrices
        with positions [T, 1, 1]: [T, F, 1].
        """
        return self._frequencies.unsqueeze(-1)


class _Rotary:
    """The forward of a rotary module in a view."""

    def __init__(self, module: torch.nn.Module, rope: RopeLengths) -> None:
        # With state of its own, because transformers keeps the frequencies of the last length in
        # the module: neither the owner's calls nor a refresh of the view may change them here.
        buffers = {name: copy.deepcopy(one) for name, one in module._buffers.items()}
        self._module = _with_buffers(module, buffers)
        self._compute = type(module).forward
        self._original = rope.original
        self._kinds: Any = module.rope_type
        kinds = self._kinds.items() if isinstance(self._kinds, dict) else [(None, self._kinds)]
        self._tables = {
            layer_type: _table(module, rope, layer_type)
            for layer_type, kind in kinds
            if kind == _DYNAMIC
        }
        self._lock = threading.Lock()

    def __call__(
        self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
    ) -> Embeddings:
        """See the module: cosines and sines for position ids [1, T] that may carry lengths."""
        named = {} if layer_type is None else {"layer_type": layer_type}
        lengths, positions = position_ids >> LENGTH_SHIFT, position_ids & POSITION_MASK
        kind = self._kinds if layer_type is None else self._kinds[layer_type]
        if kind == _DYNAMIC:
            table = self._tables[layer_type]
            rows = (lengths[0] - self._original).clamp(0, len(table) - 1)
            name = _frequencies(layer_type)
            buffers = {**self._module._buffers, name: _OfTokens(table.index_select(0, rows))}
            module = _with_buffers(self._module, buffers)
            # As transformers wrote it, without what it does first: to follow the longest position.
            forward = inspect.unwrap(self._compute)
            cos, sin = forward(module, x, positions.transpose(0, 1), **named)
            return cos.transpose(0, 1), sin.transpose(0, 1)
        if kind != _LONG:
            return self._own(x, positions, named)
        with self._lock:
            # The same operations for any lengths, so that they can be captured.
            short = self.at(x, positions.clamp(max=self._original - 1), self._original, named)
            long = self.at(x, positions, self._original + 1, named)
        is_long = (lengths > self._original).unsqueeze(-1)
        return torch.where(is_long, long[0], short[0]), torch.where(is_long, long[1], short[1])

    def at(
        self, x: torch.Tensor, positions: torch.Tensor, length: int, named: dict[str, str]
    ) -> Embeddings:
        """As transformers rotates in a forward pass of this length."""
        last = positions.new_full((positions.shape[0], 1), length - 1)
        cos, sin = self._own(x, torch.cat((positions, last), -1), named)
        return cos[:, :-1], sin[:, :-1]

    def _own(self, x: torch.Tensor, positions: torch.Tensor, named: dict[str, str]) -> Embeddings:
        found: Embeddings = self._compute(self._module, x, positions, **named)
        return found

    def agrees(self, device: torch.device, longest: int) -> bool:
        """Whether each token is rotated as transformers does, for some lengths beyond the original
        one.
        """
        x = torch.zeros((1, 1, 1), device=device)
        for layer_type in self._tables:
            named = {} if layer_type is None else {"layer_type": layer_type}
            for length in (self._original + 1, longest):
                positions = torch.tensor([[0, 1, self._original // 2, length - 1]], device=device)
                ours = self(x, positions + (length << LENGTH_SHIFT), **named)
                bound = 1e-4 + 1e-6 * length  # the last bit of a frequency, times a position
                for one, other in zip(ours, self.at(x, positions, length, named), strict=True):
                    if not torch.allclose(one, other, rtol=0.0, atol=bound):
                        return False
        return True


def _with_buffers(module: torch.nn.Module, buffers: dict[str, Any]) -> torch.nn.Module:
    """The same module with other buffers."""
    other = object.__new__(type(module))
    vars(other).update(vars(module), _buffers=buffers)
    return other


def _frequencies(layer_type: str | None) -> str:
    """The name of a module's frequencies."""
    return "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"


def _table(module: Any, rope: RopeLengths, layer_type: str | None) -> torch.Tensor:
    """The frequencies of each length from the original one to the longest: [lengths, F]."""
    own = module._buffers[_frequencies(layer_type)]
    lengths = torch.arange(rope.original, rope.longest + 1).unsqueeze(-1)
    named = {} if layer_type is None else {"layer_type": layer_type}
    found: torch.Tensor
    found, _ = ROPE_INIT_FUNCTIONS[_DYNAMIC](module.config, "cpu", seq_len=lengths, **named)
    return found.to(own.device)
