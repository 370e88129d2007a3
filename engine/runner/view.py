"""A view of a model: the same weights behind modules of its own, so that the engine's steps and the
model's owner do not meet.

    owner ─▶ model ── modules, config ──┐
                                        ├── parameters: held once
    steps ─▶ view ─── modules, config ──┘

Steps need our attention implementation in the config, evaluation mode, and here and there another
forward. The owner generates, trains and saves, with the attention that he chooses, perhaps at the
same time on another thread. Nothing that is set on one side is seen on the other, and there is
nothing to restore. A module of the view is of the same class, and has the very parameters of its
original: weights that are changed in place, and parameters that are exchanged, are the engine's
from the next step on. Hooks are shared, too. Buffers are the same tensors until one side replaces
its own, as rotary embeddings do.

What is set on the owner's modules later is taken over by `refresh`. Modules that are exchanged are
not: nobody has compared what they compute.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from engine.errors import ModelChangedError

_OWN = frozenset({"_modules", "_buffers", "_non_persistent_buffers_set", "training"})
"""Attributes of torch.nn.Module that a module of a view has for itself."""
_COMPILED = "_compiled_call_impl"
"""Where a module keeps its call as `compile` made it: it would call the original."""

_UNCOMPILED = "_torchdynamo_orig_callable"
"""Where a function that torch.compile made keeps the one that it was made of."""


@dataclass(frozen=True, slots=True)
class ModelView:
    """A model and its view.

    Attributes:
        original: the owner's. Nothing of it is changed.
        model: the view, in evaluation mode.
        twins: of each module of the original its counterpart, by id.
        configs: of each config of the original its copy, by id, and what else the copies refer to.
        modules: the original's modules; their ids are not given to others while these are here.
    """

    original: PreTrainedModel
    model: PreTrainedModel
    twins: dict[int, torch.nn.Module]
    configs: dict[int, Any]
    modules: tuple[torch.nn.Module, ...]

    @classmethod
    def of(cls, original: PreTrainedModel) -> ModelView:
        """Make a view. It costs some kilobytes a module, and no weights."""
        modules = tuple(original.modules())
        twins = {id(one): object.__new__(type(one)) for one in modules}
        view: Any = twins[id(original)]
        self = cls(original, view, twins, {}, modules)
        for one in modules:
            own = vars(twins[id(one)])
            own["_buffers"] = dict(one._buffers)
            own["_non_persistent_buffers_set"] = set(one._non_persistent_buffers_set)
            own["training"] = False
            own["_modules"] = {
                name: None if child is None else twins[id(child)]
                for name, child in one._modules.items()
            }
            for name, value in vars(one).items():
                if isinstance(value, PreTrainedConfig):
                    # One memo for all: configs that are one in the original are one in the view.
                    own[name] = copy.deepcopy(value, self.configs)
        self._take_over()
        return self

    def refresh(self) -> None:
        """Take over what was set on the original's modules since. Harmless while steps run.

        Raises:
            ModelChangedError: a module was exchanged, or given a forward that is no method of it.
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
        self._take_over()

    def _take_over(self) -> None:
        for one in self.modules:
            own = vars(self.twins[id(one)])
            for name, value in vars(one).items():
                if name not in _OWN and not isinstance(value, PreTrainedConfig):
                    own[name] = self._bound(value)
            own[_COMPILED] = None

    def _bound(self, value: object) -> object:
        """A method of one of the original's modules as that of its counterpart; else the value. A
        compiled one was traced through the original's modules: it is taken as it was before.
        """
        value = getattr(value, _UNCOMPILED, value) if callable(value) else value
        if isinstance(value, MethodType):
            twin = self.twins.get(id(value.__self__))
            return value if twin is None else MethodType(value.__func__, twin)
        if isinstance(value, functools.partial):
            arguments = [self.twins.get(id(one), one) for one in value.args]
            return functools.partial(value.func, *arguments, **value.keywords)
        return value
