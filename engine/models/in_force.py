"""Finds the functions that compute a model, and those among them that were replaced at run time.

    each module's class ─▶ forward, __call__ ─▶ the functions and methods that they name ─▶ …
                           each: was it written in a file of a library?

A replaced function may compute the same on a short prompt and something else later, so a comparison
does not always show it. The code in force says from which file it was compiled.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType

import torch
import transformers

_LIBRARIES = tuple(
    f"{folder}{os.sep}"
    for folder in (
        Path(str(transformers.__file__)).parent,
        Path(str(torch.__file__)).parent,
        Path(__file__).parents[1],
    )
)
_READ = _LIBRARIES[0]
"""The library whose functions are read for those that they call."""

Found = Iterator[tuple[str, FunctionType]]


def functions_in_force(model: torch.nn.Module) -> Found:
    """Yield the functions that compute a model, with their names.

    These are functions of its classes and of the files of transformers, not those that are set on a
    module.
    """
    seen: set[int] = set()
    for cls in dict.fromkeys(type(one) for one in model.modules()):
        for name in ("__call__", "forward"):
            yield from _method(cls, name, seen)


def replaced_function(model: torch.nn.Module) -> str | None:
    """Return the name of a function of the model that no library wrote, or None."""
    return next(
        (
            name
            for name, function in functions_in_force(model)
            if not function.__code__.co_filename.startswith(_LIBRARIES)
        ),
        None,
    )


def _method(cls: type, name: str, seen: set[int]) -> Found:
    """Yield a method, if the class has one of this name, and what it calls."""
    owner = next((one for one in cls.__mro__ if name in vars(one)), None)
    if owner is not None:
        yield from _function(vars(owner)[name], cls, f"{name} of {owner.__name__}", seen)


def _function(function: object, cls: type, told: str, seen: set[int]) -> Found:
    """Yield a function, what it wraps, and what these call. `told` is its name."""
    while isinstance(function, FunctionType) and id(function) not in seen:
        seen.add(id(function))
        yield told, function
        if function.__code__.co_filename.startswith(_READ):
            for name in _names(function.__code__):
                yield from _method(cls, name, seen)
                yield from _function(function.__globals__.get(name), cls, name, seen)
        function, told = vars(function).get("__wrapped__"), f"what is inside {told}"


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that code refers to, with those of functions inside it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)
