"""Recurrent layers: what the model's own code shows of them, and their stand-ins in a view.

    prompt ─▶ forward with a watched cache ─▶ which modules use states, their shapes and types
    step ─▶ stand-in ─┬─ rows of request a, a's slot ─▶ the module's own forward ─┬─▶ rows of all
                      └─ rows of request b, b's slot ─▶ the module's own forward ─┘

transformers has no interface for recurrent layers as it has one for attention, and over a flat row
of several requests their code would run one request's state into the next. So in the view that
steps run, a stand-in calls the forward of each such module once for each request, with the
request's rows and a cache that reads and writes the request's slot. Everything around it, such as
experts and norms, is computed for all rows together.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle
from transformers import DynamicCache, PreTrainedModel

from engine.attention.step_states import (
    NOTHING_RECURS,
    Recurrence,
    RequestStates,
    StateKind,
    StateShape,
    StepStates,
    allocate_states,
    find_states,
)
from engine.contract.errors import ModelRefusedError

STATE_KINDS = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})
"""The kinds of layers, in transformers' words, that carry a state."""
ATTENTION_KINDS = frozenset({"full_attention", "sliding_attention", "hybrid", "hybrid_sliding"})
"""The kinds of layers that attend."""
STATELESS_KINDS = frozenset({"moe", "mlp"})
"""The kinds of layers that neither attend nor carry a state, in models with others that do."""
_KEYWORDS = ("past_key_values", "cache_params")
_ASKS = ("update_conv_state", "update_recurrent_state")


def layer_kinds(model: PreTrainedModel) -> Sequence[str]:
    """Return the kind of each layer as the config tells it; empty if it does not."""
    return getattr(model.config.get_text_config(), "layer_types", None) or ()


def recurs(kinds: Iterable[str]) -> bool:
    """Return whether any layer carries a state."""
    return not STATE_KINDS.isdisjoint(kinds)


def uses_states(model_class: type[nn.Module]) -> bool:
    """Return whether the file of a class reads and writes states through transformers' cache, not
    through one of its own.
    """
    module = inspect.getmodule(model_class)
    source = "" if module is None else inspect.getsource(module)
    return any(f".{name}(" in source for name in _ASKS)


class _WatchedCache(DynamicCache):  # type: ignore[misc]  # has no types
    """transformers' own cache, which tells who reads and writes states."""

    def __init__(self, watch: RecurrentWatch, config: Any) -> None:
        super().__init__(config=config)
        self._watch = watch

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *rest: Any) -> Any:
        self._watch.told_layer = layer_idx
        return super().update(key_states, value_states, layer_idx, *rest)

    def get_conv_state(self, *args: Any, **kwargs: Any) -> Any:
        self._watch.note_use()
        return super().get_conv_state(*args, **kwargs)

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Any:
        self._watch.note_use()
        return super().update_conv_state(*args, **kwargs)

    def get_recurrent_state(self, *args: Any, **kwargs: Any) -> Any:
        self._watch.note_use()
        return super().get_recurrent_state(*args, **kwargs)

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Any:
        self._watch.note_use()
        return super().update_recurrent_state(*args, **kwargs)


class RecurrentWatch:
    """Watches forwards of a model with recurrent layers.

    Each forward gets a cache of its own, as `generate` gives it one.

    Attributes:
        told_layer: the index that the last layer to attend has told its cache.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Prepare to watch a model. One without recurrent layers costs nothing."""
        self.told_layer: int | None = None
        self._model, self._kinds = model, layer_kinds(model)
        self._is_on = recurs(self._kinds)
        self._cache: _WatchedCache | None = None
        self._tokens, self._rows = 0, 1
        self._inside: list[nn.Module] = []
        self._users: set[nn.Module] = set()
        self._dims: dict[nn.Module, list[set[int]]] = {}
        self._found: dict[tuple[int, StateKind, int], StateShape] = {}
        self._given: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def begin(self, tokens: int, rows: int = 1) -> dict[str, Any]:
        """Begin a forward of a prompt, and return its arguments for the model's cache.

        Args:
            tokens: the number of its tokens.
            rows: the number of rows that each layer computes.

        Raises:
            ModelRefusedError: the model's forward takes no cache.
        """
        if not self._is_on:
            return {}
        self._cache = _WatchedCache(self, self._model.config)
        self._tokens, self._rows = tokens, rows
        return {self._keyword(): self._cache}

    def hooks(self) -> list[RemovableHandle]:
        """Hook the modules that may be given a cache."""
        if not self._is_on:
            return []
        found: list[RemovableHandle] = []
        for one in self._model.modules():
            found.append(one.register_forward_pre_hook(self._enter, with_kwargs=True))
            found.append(one.register_forward_hook(self._leave, with_kwargs=True))
        return found

    def _keyword(self) -> str:
        known = inspect.signature(self._model.forward).parameters
        for name in _KEYWORDS:
            if name in known:
                return name
        raise ModelRefusedError(
            f"{type(self._model).__name__} has layers that carry a state, and its forward takes "
            "no cache for them"
        )

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._holds_cache(args, kwargs):
            self._inside.append(module)

    def _leave(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: object
    ) -> None:
        if not self._holds_cache(args, kwargs):
            return
        self._inside.pop()
        if module not in self._users:
            return
        self._given[module] = _of_first_row((args, kwargs), self._rows)
        found = [
            {dim for dim, size in enumerate(one.shape) if size == self._tokens}
            for one in pytree.tree_leaves(result)
            if isinstance(one, torch.Tensor)
        ]
        before = self._dims.setdefault(module, found)
        self._dims[module] = [one & other for one, other in zip(before, found, strict=True)]

    def _holds_cache(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        return any(one is self._cache for one in (*args, *kwargs.values()))

    def note_use(self) -> None:
        """Note that the module which runs now reads or writes a state."""
        if self._inside:
            self._users.add(self._inside[-1])

    def end(self) -> None:
        """Note the states that the last forward left.

        Raises:
            ModelRefusedError: they differ from those of another forward, or from the config.
        """
        if self._cache is None:
            return
        for layer, one in enumerate(self._cache.layers):
            states: dict[StateKind, Mapping[int, torch.Tensor | None]] = {
                "conv": getattr(one, "conv_states", {}),
                "recurrent": getattr(one, "recurrent_states", {}),
            }
            for kind, by_index in states.items():
                for index, state in by_index.items():
                    if state is not None:
                        self._note_state(layer, kind, index, state)
        carrying = {layer for layer, _, _ in self._found}
        told = {layer for layer, kind in enumerate(self._kinds) if kind in STATE_KINDS}
        if carrying != told:
            odd = min(carrying ^ told)
            raise ModelRefusedError(
                f"{type(self._model).__name__}, layer {odd}: the config says {self._kinds[odd]}, "
                f"but the layer carries {'a' if odd in carrying else 'no'} state"
            )

    def _note_state(self, layer: int, kind: StateKind, index: int, state: torch.Tensor) -> None:
        shape = StateShape(layer, kind, index, tuple(state.shape[1:]), state.dtype)
        if self._found.setdefault((layer, kind, index), shape) != shape:
            raise ModelRefusedError(
                f"{type(self._model).__name__}, layer {layer}: the size of a state depends on the "
                "prompt, and each request has one slot of a fixed size"
            )

    def found(self) -> Recurrence:
        """Return what was seen, and let go of the model.

        Raises:
            ModelRefusedError: a module's result does not tell its tokens apart.
        """
        try:
            return self._described() if self._is_on else NOTHING_RECURS
        finally:
            self._given, self._cache = {}, None
            self._users.clear()
            self._dims.clear()
            del self._model

    def _described(self) -> Recurrence:
        modules: dict[str, tuple[int, ...]] = {}
        for path, one in self._model.named_modules():
            if one not in self._users:
                continue
            dims = self._dims[one]
            if not all(dims):
                raise ModelRefusedError(
                    f"{path} ({type(one).__name__}) makes something of a state that has no place "
                    "for each token, so requests cannot be told apart"
                )
            modules[path] = tuple(min(found) for found in dims)
        forgetting = frozenset(path for path in modules if self._forgets(path))
        return Recurrence(self._keyword(), tuple(self._found.values()), modules, forgetting)

    @torch.inference_mode()
    def _forgets(self, path: str) -> bool:
        """Return whether a module computes the same of the last prompt whatever recurrent state it
        finds.
        """
        module = self._model.get_submodule(path)
        layer = getattr(module, "layer_idx", None)
        uses = any(one.kind == "recurrent" and one.layer == layer for one in self._found.values())
        if not uses or self._model.device.type == "meta":
            return False
        args, kwargs = self._given[module]
        results = []
        for state in (0.0, 1.0):
            tensors = allocate_states(self._found.values(), 1, self._model.device)
            for shape, tensor in tensors.items():
                tensor.fill_(state * (shape.kind == "recurrent"))
            cache = RequestStates(tensors, 0, is_first=False)
            own_args, own_kwargs = pytree.tree_map(
                lambda one, cache=cache: cache if one is self._cache else one, (args, kwargs)
            )
            made = type(module).forward(module, *own_args, **own_kwargs)
            results.append(pytree.tree_leaves(made)[0])
        return bool(torch.equal(*results))


def _of_first_row(given: Any, rows: int) -> Any:
    """Return a module's arguments for the first of some rows of tokens."""

    def first(one: Any) -> Any:
        has_rows = isinstance(one, torch.Tensor) and one.dim() > 1 and len(one) == rows
        return one[:1] if has_rows else one

    return given if rows == 1 else pytree.tree_map(first, given)


def follow_states(model: PreTrainedModel, found: Recurrence) -> None:
    """Put stand-ins into a view's recurrent modules. See the module's docstring."""
    for path, dims in found.modules.items():
        module: Any = model.get_submodule(path)
        module.forward = _StandIn(module, dims, forgets=path in found.forgetting)


class _StandIn:
    """The forward of a recurrent module in a view."""

    def __init__(self, module: nn.Module, dims: tuple[int, ...], *, forgets: bool) -> None:
        self._compute, self._module, self._dims = type(module).forward, module, dims
        self._forgets = forgets

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        states = find_states(args, kwargs)
        if states is None:
            return self._compute(self._module, *args, **kwargs)
        total = next(one.shape[1] for one in pytree.tree_leaves((args, kwargs))
                     if isinstance(one, torch.Tensor))  # fmt: skip
        results, begin = [], 0
        for start, count, request in zip(
            states.starts, states.counts, states.requests, strict=True
        ):
            end, size = begin + count, 1 if self._forgets and start else count
            for first in range(begin, end, size):
                rows = slice(first, first + size)
                own_args, own_kwargs = _of_request((args, kwargs), states, request, rows, total)
                results.append(self._compute(self._module, *own_args, **own_kwargs))
            begin = end
        return self._joined(results, total - begin)

    def _joined(self, results: list[Any], num_padding: int) -> Any:
        """Join the requests' results, and add zeros for padding."""
        if len(results) == 1 and not num_padding:
            return results[0]
        leaves = [pytree.tree_flatten(one) for one in results]
        joined, dims = [], iter(self._dims)
        for parts in zip(*(found for found, _ in leaves), strict=True):
            first = parts[0]
            if not isinstance(first, torch.Tensor):
                joined.append(first)
                continue
            dim = next(dims)
            padding = []
            if num_padding:
                shape = list(first.shape)
                shape[dim] = num_padding
                padding = [first.new_zeros(shape)]
            joined.append(torch.cat([*parts, *padding], dim=dim))
        return pytree.tree_unflatten(joined, leaves[0][1])


def _of_request(
    given: Any, states: StepStates, request: RequestStates, rows: slice, total: int
) -> Any:
    """Return a module's arguments for one request's rows."""

    def part(one: Any) -> Any:
        if one is states:
            return request
        if isinstance(one, torch.Tensor) and one.dim() > 1 and one.shape[1] == total:
            return one[:, rows]
        return one

    return pytree.tree_map(part, given)
