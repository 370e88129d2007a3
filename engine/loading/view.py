"""A view of a model: separate modules with the same weights.

It keeps the engine's steps and the model's owner from interfering with each other.

    owner ─▶ model ── modules, config ──┐
                                        ├── parameters: held once
    steps ─▶ view ─── modules, config ──┘

Steps need our attention implementation in the config, evaluation mode, and sometimes a different
forward. The owner may generate, train and save with any attention, even at the same time on another
thread. Settings on one side do not affect the other, so nothing needs to be restored. A module of
the view has the same class, tensors and hooks as its original. The engine sees elements that are
written in place from the next step on.

`refresh` copies other changes to the owner's modules: replaced parameters, buffers, attributes and
hooks. It does not copy buffers that a rotary embedding replaces itself to follow the length of its
input. Replaced modules are refused, because they have not been verified.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from engine.contract.errors import ModelChangedError
from engine.loading.rotary import replaces_itself

_OWN = frozenset({"_modules", "_buffers", "_non_persistent_buffers_set", "training"})
"""Attributes of torch.nn.Module that a module of a view does not share with its original."""
_COPIED = "_parameters"
_HOOKS = "_hooks"
"""Dictionaries with this in their name contain hooks. Their entries are copied, so that what the
owner adds has no effect on steps before it is checked.
"""
_COMPILED = "_compiled_call_impl"
"""The attribute that holds a module's compiled call, which would call the original."""

_UNCOMPILED = "_torchdynamo_orig_callable"
"""The attribute in which a function made by torch.compile keeps the original function."""


@dataclass(frozen=True, slots=True)
class ModelView:
    """A model and its view.

    Attributes:
        original: the owner's model, which is never changed.
        model: the view, in evaluation mode.
        twins: the counterpart of each module of the original, by id.
        configs: the copy of each config of the original, by id, and of other objects that the
            copies refer to.
        modules: the original's modules, kept alive so that their ids are not reused.
    """

    original: PreTrainedModel
    model: PreTrainedModel
    twins: dict[int, torch.nn.Module]
    configs: dict[int, Any]
    modules: tuple[torch.nn.Module, ...]

    @classmethod
    def of(cls, original: PreTrainedModel) -> ModelView:
        """Create a view. It takes a few kilobytes per module and does not copy weights."""
        modules = tuple(original.modules())
        twins = {id(one): object.__new__(type(one)) for one in modules}
        view: Any = twins[id(original)]
        self = cls(original, view, twins, {}, modules)
        for one in modules:
            own = vars(twins[id(one)])
            own["_buffers"] = dict(one._buffers)  # also those that modules replace themselves
            own["_non_persistent_buffers_set"] = set(one._non_persistent_buffers_set)
            own["training"] = False
            own["_modules"] = {
                name: None if child is None else twins[id(child)]
                for name, child in one._modules.items()
            }
            for name, value in vars(one).items():
                if isinstance(value, PreTrainedConfig):
                    # One memo for all, so that configs shared in the original are shared in the
                    # view.
                    own[name] = copy.deepcopy(value, self.configs)
        self.refresh()
        return self

    def check(self) -> None:
        """Refuse changes that have not been verified.

        Raises:
            ModelChangedError: a module was replaced, or given a forward that is not its own method.
        """
        for one in self.modules:
            twin = self.twins[id(one)]
            found = {
                name: None if child is None else self.twins.get(id(child), child)
                for name, child in one._modules.items()
            }
            if found != twin._modules:
                names = sorted(
                    name
                    for name in found.keys() | twin._modules.keys()
                    if found.get(name) is not twin._modules.get(name)
                )
                raise ModelChangedError(
                    f"{type(one).__name__}.{names[0]} is another module than when the model was "
                    "verified"
                )
            forward = vars(one).get("forward")
            is_foreign = forward is not None and self._bound(forward) is forward
            if is_foreign and forward is not vars(twin).get("forward"):
                raise ModelChangedError(
                    f"{type(one).__name__}.forward is another function than when the model was "
                    "verified"
                )

    def refresh(self) -> None:
        """Apply changes of the original's modules to the view. Safe while steps run."""
        for one in self.modules:
            own = vars(self.twins[id(one)])
            for name, value in vars(one).items():
                if isinstance(value, dict) and (name == _COPIED or _HOOKS in name):
                    own[name] = value.copy()
                elif name not in _OWN and not isinstance(value, PreTrainedConfig):
                    own[name] = self._bound(value)
            own["_buffers"].update(
                (name, buffer)
                for name, buffer in one._buffers.items()
                if not replaces_itself(one, name)
            )
            own[_COMPILED] = None

    def _bound(self, value: object) -> object:
        """Rebind a method of one of the original's modules to the module's counterpart.

        Other values are returned unchanged. A compiled method was traced through the original's
        modules, so its uncompiled version is used.
        """
        value = getattr(value, _UNCOMPILED, value) if callable(value) else value
        if isinstance(value, MethodType):
            twin = self.twins.get(id(value.__self__))
            return value if twin is None else MethodType(value.__func__, twin)
        if isinstance(value, functools.partial):
            arguments = [self.twins.get(id(one), one) for one in value.args]
            return functools.partial(value.func, *arguments, **value.keywords)
        return value
