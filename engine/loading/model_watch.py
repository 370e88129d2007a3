"""Detects changes that an owner makes to a model, because they invalidate the KV cache.

torch counts how often a tensor is written in place. This includes an optimizer's step,
`load_state_dict`, and `copy_` under `no_grad`, but not writes through `tensor.data`. Attributes
that are numbers or strings are compared by value, containers element by element, and other objects
by identity, as are the functions that compute the model. A change inside such an object is not
detected.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, PreTrainedConfig

from engine.models.formats.weight_format import WeightFormat
from engine.models.held_layer import writes
from engine.models.in_force import functions_in_force

_TENSORS = ("_parameters", "_buffers")
_NOT_OF_STEPS = frozenset(
    {
        "training", "gradient_checkpointing", "_gradient_checkpointing_func", "_modules",
        "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks", "was_asked", "guard", "_seen",
    }
)  # fmt: skip
"""Attributes that do not affect steps, or that are checked elsewhere."""
_MOST_ELEMENTS = 1000
"""For containers with more elements, only the length is compared."""
_DEPTH = 4
"""The depth to which nested containers are compared."""
_PLAIN = frozenset({bool, int, str, bytes, complex, type(None), torch.dtype, torch.device})
_CONTAINERS = frozenset({dict, OrderedDict, list, tuple, set, frozenset})


class Noticed(NamedTuple):
    """How many times changes were noticed.

    Attributes:
        values: changes to elements of tensors.
        parts: changes to anything else.
    """

    values: int = 0
    parts: int = 0


@dataclass(frozen=True, slots=True)
class ModelChanges:
    """The changes that were found, by full name.

    Attributes:
        written: tensors with elements that were written.
        replaced: parameters and buffers that are now different tensors, have moved, or are gone.
        attributes: attributes of modules, including hooks, and functions in force.
    """

    written: Sequence[str]
    replaced: Sequence[str]
    attributes: Sequence[str]

    @property
    def names(self) -> Sequence[str]:
        """The names of all changes."""
        return [*self.replaced, *self.attributes, *self.written]


class ModelWatch:
    """Watches the parameters, buffers, attributes, hooks and functions of a model. Thread-safe."""

    def __init__(
        self, model: torch.nn.Module, is_own: Callable[[torch.nn.Module, str], bool]
    ) -> None:
        """Remember the model as it is now.

        Args:
            model: the owner's model.
            is_own: whether a module itself sets its buffer or attribute of this name when it is
                called.
        """
        self._model = model
        self._is_own = is_own
        self._lock = threading.Lock()
        self._noticed = Noticed()
        self._tensors, self._rest = self._look()

    def look(self, check: Callable[[ModelChanges], None]) -> Noticed:
        """Look for changes since the last call, or since construction.

        Args:
            check: called with the changes if there are any. If it raises, the next call finds the
                same changes again.

        Returns:
            The counts up to now.
        """
        with self._lock:
            tensors, rest = self._look()
            changes = ModelChanges(
                written=_differing(self._tensors, tensors, _Tensor.was_written),
                replaced=_differing(self._tensors, tensors, _Tensor.was_replaced),
                attributes=_differing(self._rest, rest, operator.ne),
            )
            if changes.names:
                check(changes)
                values, parts = self._noticed
                has_parts = bool(changes.replaced or changes.attributes)
                self._noticed = Noticed(values + bool(changes.written), parts + has_parts)
            self._tensors, self._rest = tensors, rest
            return self._noticed

    def _look(self) -> tuple[dict[str, _Tensor], dict[str, object]]:
        tensors: dict[str, _Tensor] = {}
        rest = {name: _known(function, 0) for name, function in functions_in_force(self._model)}
        for path, module in self._model.named_modules():
            prefix = f"{path}." if path else ""
            for name, value in vars(module).items():
                if name in _TENSORS or isinstance(value, WeightFormat):
                    for key, tensor in (value if name in _TENSORS else value.tensors()).items():
                        if tensor is not None and not self._is_own(module, key):
                            tensors[prefix + key] = _Tensor.of(tensor)
                elif name not in _NOT_OF_STEPS and not self._is_own(module, name):
                    rest[prefix + name] = _known(value, _DEPTH)
        return tensors, rest


def _differing(
    before: Mapping[str, Any], now: Mapping[str, Any], differs: Callable[[Any, Any], bool]
) -> list[str]:
    """Return the names whose entries differ, or that only one side has.

    For writes, names that one side lacks do not count.
    """
    lacking = [] if differs is _Tensor.was_written else sorted(before.keys() ^ now.keys())
    return [name for name in before if name in now and differs(before[name], now[name])] + lacking


@dataclass(frozen=True, slots=True)
class _Tensor:
    """The observed state of a tensor.

    It holds a reference, because an address is not enough: a new tensor may get the address of a
    freed one.
    """

    seen: weakref.ref[torch.Tensor]
    writes: int
    place: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Tensor:
        has_place = tensor.layout is torch.strided and not tensor.is_meta
        return cls(weakref.ref(tensor), writes(tensor), tensor.data_ptr() if has_place else 0)

    def was_replaced(self, now: _Tensor) -> bool:
        return self.seen() is not now.seen() or self.place != now.place

    def was_written(self, now: _Tensor) -> bool:
        return self.seen() is now.seen() and self.writes != now.writes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Tensor) and not (
            self.was_replaced(other) or self.was_written(other)
        )


class _Object:
    """An object that equals only itself. It is not kept alive if that can be avoided."""

    __slots__ = ("_get",)

    def __init__(self, value: object) -> None:
        try:
            self._get: Callable[[], object] = weakref.ref(value)
        except TypeError:
            self._get = lambda: value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Object) and self._get() is other._get() is not None


def _known(value: object, depth: int) -> object:
    """Return what to remember of an attribute's value. Equal values give equal results."""
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    if kind in _CONTAINERS and not value:
        return kind  # most are: dictionaries without hooks
    if isinstance(value, float):
        return repr(value)  # NaN equals itself
    if isinstance(value, torch.Tensor):
        return _Tensor.of(value)
    if isinstance(value, (PreTrainedConfig, GenerationConfig)):
        return None  # steps have their own copy
    if isinstance(value, (dict, list, tuple, set, frozenset)):
        if not depth or len(value) > _MOST_ELEMENTS:
            return type(value), len(value)
        if isinstance(value, (set, frozenset)):
            return type(value), frozenset(map(repr, value))
        parts = value if not isinstance(value, dict) else [*value, *value.values()]
        return type(value), [_known(one, depth - 1) for one in parts]
    return _Object(value)
