"""Rotates each token of a step for the length of its own request (`engine.contract.rope`).

    positions [T] ── tokens beyond the original length carry their length in the upper half
        ─▶ model ─▶ its rotary module ─▶ each token by the frequencies of its length ─▶ cos, sin

The model passes position ids to its rotary module. In the view that steps run on, a stand-in
replaces that module's forward. The frequencies of each length are those of transformers, and the
module's own forward computes cosines and sines from them. A table of frequencies is computed when
the model is loaded. For `dynamic` embeddings it covers all lengths. For `longrope` it has two rows:
up to the original length, and beyond it. So a step looks nothing up on the host, and can be
captured. Modules that recompute fixed frequencies on the host in each call instead find them on the
device.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.contract.rope import LENGTH_SHIFT, POSITION_MASK, RopeLengths
from engine.models.length_table import FROM, LengthTable, table_name

_DYNAMIC, _LONG = "dynamic", "longrope"
_OF_LENGTHS = frozenset({_DYNAMIC, _LONG})
_TRIED_TOKENS = 5
_FORWARD = "forward"
_MAKES = "rope_init_fn"
"""The attribute that holds the function with which a rotary module computes its frequencies."""
_SCALINGS = "scalings_of_lengths"
"""The buffer with the factors of cosines and sines, if they depend on the length."""

Embeddings = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines: [B, T, D] each."""


def read_rope(model: PreTrainedModel) -> RopeLengths | None:
    """Return how the model's rotary frequencies depend on the length, or None if they do not."""
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
    """Yield the kinds of rotary embeddings that depend on the length, with their parameters."""
    parameters = getattr(config, "rope_parameters", None) or {}
    # Either one set of parameters, or one for each kind of layer.
    nested = [entry for entry in parameters.values() if isinstance(entry, dict)]
    for rope in nested or [parameters]:
        kind = rope.get("rope_type")
        if kind in _OF_LENGTHS:
            yield kind, rope


def _restarts(model_class: type[PreTrainedModel]) -> bool:
    """Return whether a model drops its cache when a request grows beyond the original length.

    Such a model refers to original_max_position_embeddings when it prepares a step.
    """
    code = model_class.prepare_inputs_for_generation.__code__
    return "original_max_position_embeddings" in (*code.co_names, *code.co_consts)


def follow_lengths(model: PreTrainedModel, rope: RopeLengths) -> bool:
    """Install stand-ins in the rotary modules of a view, and test that lengths affect nothing else.

    Returns:
        Whether the view now takes position ids that carry lengths. If not, it is unchanged.
    """
    rotary = [one for one in model.modules() if _kinds_of(one) & _OF_LENGTHS]
    if any(_FORWARD in vars(one) for one in rotary):
        return False  # the owner's: what it computes is not known
    with ExitStack() as undo:
        try:
            for one in rotary:
                stand_in = _Rotary(one, rope)
                undo.callback(stand_in.leave)
            follows = bool(rotary) and _reach_nothing_else(model, rotary, rope)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError):
            return False
        if follows:
            undo.pop_all()
        return follows


def _kinds_of(module: torch.nn.Module) -> set[str]:
    kinds = getattr(module, "rope_type", None)
    return set(kinds.values()) if isinstance(kinds, dict) else {str(kinds)}


def replaces_itself(module: torch.nn.Module, name: str) -> bool:
    """Return whether a rotary module itself sets its buffer or attribute of this name.

    It does so to follow the length that it is called with.
    """
    is_set = name.endswith(("inv_freq", "max_seq_len_cached"))
    is_set = is_set and not name.endswith("original_inv_freq")
    return is_set and bool(_kinds_of(module) & _OF_LENGTHS)


def is_made_beforehand(module: torch.nn.Module) -> bool:
    """Return whether a module is a rotary one for which a view has a stand-in."""
    return bool(_kinds_of(module) & _OF_LENGTHS) or _makes(module)


def has_own_frequencies(module: torch.nn.Module, twin: torch.nn.Module) -> bool:
    """Return whether a rotary module's frequencies are ones that it has set itself.

    `module` belongs to the owner. `twin` is its counterpart in a view, and has the tables.
    """
    for name, buffer in module._buffers.items():
        table = twin._buffers.get(table_name(name))
        if buffer is not None and table is not None and replaces_itself(module, name):
            original: Any = getattr(twin, name.replace("inv_freq", "original_inv_freq"))
            known = torch.cat([table, original.to(table).unsqueeze(0)])
            near = torch.isclose(known, buffer.to(known), rtol=1e-4, atol=0.0).all(-1)
            if not bool(near.any()):
                return False
    return True


def _reach_nothing_else(
    model: PreTrainedModel, rotary: Sequence[torch.nn.Module], rope: RopeLengths
) -> bool:
    """Return whether lengths in positions affect only the rotary modules, and those correctly.

    The model must compute the same if positions carry a length within the original one, which
    changes no frequencies. Beyond it, the rotary modules must agree with transformers.
    """
    ids = torch.arange(_TRIED_TOKENS, device=model.device).unsqueeze(0)
    carrying = ids + (_TRIED_TOKENS << LENGTH_SHIFT)
    with torch.inference_mode():
        plain, other = (
            model(input_ids=ids, position_ids=positions, use_cache=False).logits
            for positions in (ids, carrying)
        )
        return torch.equal(plain, other) and all(_agrees(one, rope) for one in rotary)


def keep_frequencies(model: PreTrainedModel) -> int:
    """Keep on the device the frequencies that rotary modules compute on the host in each call.

    This applies to the modules of a view whose frequencies do not depend on the length. Returns the
    number of such modules.
    """
    found = [one for one in model.modules() if _makes(one) and not _kinds_of(one) & _OF_LENGTHS]
    for one in found:
        one.forward = _Kept(one)
    return len(found)


def _makes(module: torch.nn.Module) -> bool:
    """Return whether a rotary module computes its frequencies in each call."""
    return _MAKES in inspect.unwrap(type(module).forward).__code__.co_names


class _Kept:
    """The forward of a rotary module with precomputed frequencies."""

    def __init__(self, module: Any) -> None:
        frequencies, scaling = module.rope_init_fn(module.config)
        made = frequencies.to(next(module.buffers()).device), scaling
        self._compute = type(module).forward
        self._module = _other(module, {_MAKES: lambda *given, **named: made})

    def __call__(self, *given: Any, **named: Any) -> Embeddings:
        made: Embeddings = self._compute(self._module, *given, **named)
        return made


class _OfTokens:
    """Replaces a module's frequencies [F] with those of each token, [T, F].

    Each token is a separate request, so positions are [T, 1].
    """

    def __init__(self, frequencies: torch.Tensor) -> None:
        self._frequencies = frequencies

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return [T, 1, F] for forwards that multiply by positions [T, 1, 1]."""
        return self._frequencies.unsqueeze(1).to(*args, **kwargs)

    def __getitem__(self, index: object) -> torch.Tensor:
        """Return [T, F, 1] for forwards of transformers before 5.23.

        They index with `[None, :, None]` and use a matrix product with positions [T, 1, 1].
        """
        return self._frequencies.unsqueeze(-1)


class _Rotary:
    """The forward of a rotary module in a view.

    Its tables are buffers of the module, so they are on the same device as the model.
    """

    def __init__(self, module: Any, rope: RopeLengths) -> None:
        self._module = module
        self._compute = type(module).forward
        # As transformers wrote it, without what it does first: to follow the longest position.
        self._rotate = inspect.unwrap(self._compute)
        self._plain = _without_kind(module.config) if _makes(module) else None
        tables: dict[str, torch.Tensor] = {}
        for layer_type, kind in _by_layer_type(module).items():
            name = table_name(_frequencies(layer_type))
            if kind == _DYNAMIC:
                tables[name] = _dynamic(module, rope, layer_type)
            elif kind == _LONG:
                tables[name], scalings = _long(module, rope, layer_type)
                if self._plain is not None:
                    tables[_SCALINGS] = scalings
        for name, table in tables.items():
            module.register_buffer(name, table, persistent=False)
        self._own = (*tables, FROM, _FORWARD)
        setattr(module, FROM, rope.original)
        module.forward = self

    def leave(self) -> None:
        """Restore the module as it was."""
        for name in self._own:
            delattr(self._module, name)

    def __call__(
        self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
    ) -> Embeddings:
        """Return cosines and sines for position ids [1, T] that may carry lengths."""
        named, buffers = _named(layer_type), self._module._buffers
        positions = position_ids & POSITION_MASK
        table = LengthTable.of(self._module, table_name(_frequencies(layer_type)))
        if table is None:
            fixed: Embeddings = self._compute(self._module, x, positions, **named)
            return fixed
        rows = table.rows(position_ids[0])
        frequencies = _OfTokens(table.frequencies.index_select(0, rows))
        changed: dict[str, Any] = {"_buffers": {**buffers, _frequencies(layer_type): frequencies}}
        if self._plain is not None:
            made = frequencies, buffers[_SCALINGS].index_select(0, rows)
            changed |= {"config": self._plain, _MAKES: lambda *given, **named: made}
        cos, sin = self._rotate(
            _other(self._module, changed), x, positions.transpose(0, 1), **named
        )
        return cos.transpose(0, 1), sin.transpose(0, 1)


def _without_kind(config: Any) -> Any:
    """Return a copy of a config with the default kind of rotary embedding.

    With it, a forward that computes its frequencies also takes their scaling from the function that
    computes them. With other kinds, it compares the longest position on the host.
    """
    plain = copy.deepcopy(config)
    plain.rope_parameters["rope_type"] = "default"
    return plain


def _dynamic(module: Any, rope: RopeLengths, layer_type: str | None) -> torch.Tensor:
    """Return the frequencies of each length from the original to the longest, [lengths, F]."""
    name, device = _frequencies(layer_type), _device(module)
    lengths = torch.arange(rope.original, rope.longest + 1).unsqueeze(-1)
    found: torch.Tensor
    found, _ = ROPE_INIT_FUNCTIONS[_DYNAMIC](
        module.config, "cpu", seq_len=lengths, **_named(layer_type)
    )
    found = found.to(device)
    first = torch.zeros((1, 1), dtype=torch.int64, device=device)
    found[0] = _at(module, first, rope.original, layer_type)[0]._buffers[name]  # may be rounded
    return found


def _long(
    module: Any, rope: RopeLengths, layer_type: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the frequencies and scalings up to the original length and beyond it.

    The frequencies are [2, F]. The scalings [2, 1, 1] are the factors of cosines and sines.
    """
    frequencies, scalings = [], []
    for length in (rope.original, rope.original + 1):
        first = torch.zeros((1, 1), dtype=torch.int64, device=_device(module))
        one, cos, _ = _at(module, first, length, layer_type)
        made = one.rope_init_fn(one.config)[0] if _makes(module) else None
        own = one._buffers[_frequencies(layer_type)] if made is None else made
        frequencies.append(own.to(first.device, torch.float32))
        scalings.append(cos[..., :1])  # the cosine of 0 is 1
    return torch.stack(frequencies), torch.cat(scalings)


def _at(
    module: Any, positions: torch.Tensor, length: int, layer_type: str | None
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Rotate positions [1, T] as transformers does in a forward pass of this length.

    Returns a copy of the module after the pass, the cosines, and the sines. A copy is needed
    because transformers keeps the frequencies of the last length in the module.
    """
    buffers = {name: copy.deepcopy(one) for name, one in module._buffers.items()}
    one, named = _other(module, {"_buffers": buffers}), _named(layer_type)
    compute, x = type(module).forward, torch.zeros((1, 1, 1), device=positions.device)
    compute(one, x, positions.new_zeros((1, 1)), **named)  # forgets the last length of the owner
    last = positions.new_full((1, 1), length - 1)
    cos, sin = compute(one, x, torch.cat((positions, last), -1), **named)
    return one, cos[:, :-1], sin[:, :-1]


def _agrees(module: torch.nn.Module, rope: RopeLengths) -> bool:
    """Return whether a stand-in rotates tokens of several lengths as transformers does.

    For `longrope`, the results must be equal bit for bit.
    """
    device = _device(module)
    x = torch.zeros((1, 1, 1), device=device)
    lengths = (rope.original, rope.original + 1, rope.longest)
    tried = [
        torch.tensor([[0, 1, rope.original // 2, length - 1]], device=device) for length in lengths
    ]
    of_tokens = torch.tensor(lengths, device=device).repeat_interleave(tried[0].shape[1])
    carrying = torch.cat(tried, -1) + (of_tokens << LENGTH_SHIFT)
    for layer_type, kind in _by_layer_type(module).items():
        if kind not in _OF_LENGTHS:
            continue
        made = [_at(module, *one, layer_type)[1:] for one in zip(tried, lengths, strict=True)]
        theirs = [torch.cat(both, 1) for both in zip(*made, strict=True)]
        ours = module.forward(x, carrying, **_named(layer_type))
        # the last bit of a frequency, times a position
        bound = (1e-4 + 1e-6 * of_tokens) * (kind == _DYNAMIC)
        for one, other in zip(ours, theirs, strict=True):
            if not bool(((one - other).abs() <= bound[:, None]).all()):
                return False
    return True


def _by_layer_type(module: Any) -> dict[str | None, str]:
    """Return a rotary module's kinds by layer type. The key None means all layers."""
    kinds = module.rope_type
    return dict(kinds) if isinstance(kinds, dict) else {None: str(kinds)}


def _named(layer_type: str | None) -> dict[str, str]:
    return {} if layer_type is None else {"layer_type": layer_type}


def _device(module: torch.nn.Module) -> torch.device:
    return next(module.buffers()).device


def _other(module: torch.nn.Module, changed: dict[str, Any]) -> Any:
    """Return a copy of the module with some attributes changed."""
    other = object.__new__(type(module))
    vars(other).update(vars(module), **changed)
    return other


def _frequencies(layer_type: str | None) -> str:
    """Return the name of the buffer with a module's frequencies."""
    return "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
