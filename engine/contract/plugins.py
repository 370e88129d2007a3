"""Loads objects from outside the source tree that operators name as package.module:NAME.

Such a name comes from a flag, an environment variable or a config, never from a request. The module
must be importable: installed, or on PYTHONPATH. A server does not import from its working
directory.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any, TypeVar

from engine.contract.errors import ConfigError

_T = TypeVar("_T")


def is_outside(name: str) -> bool:
    """Whether this is a package.module:NAME rather than one of Headrace's own names."""
    return ":" in name


def outside_class(option: str, name: str, base: type[Any], needs: str) -> type[Any]:
    """Import the class with a given name.

    Args:
        option: the option whose value this is.
        name: package.module:Class.
        base: the required base class.
        needs: what the class must define, for the message.

    Raises:
        ConfigError: the class cannot be imported, or is not a complete subclass.
    """
    found = _imported(option, name, "Class")
    if not (isinstance(found, type) and issubclass(found, base)) or inspect.isabstract(found):
        raise ConfigError(
            option, f"is {name!r}, which is no subclass of {base.__name__} with {needs}"
        )
    return found


def outside_object(option: str, name: str, kind: type[_T]) -> _T:
    """Import the object with a given name.

    Args:
        option: the option whose value this is.
        name: package.module:NAME.
        kind: what it must be an instance of.

    Raises:
        ConfigError: the object cannot be imported, or has another type.
    """
    found = _imported(option, name, "NAME")
    if not isinstance(found, kind):
        raise ConfigError(option, f"is {name!r}, which is no {kind.__name__}")
    return found


def _imported(option: str, name: str, kind: str) -> object:
    module, _, attribute = name.partition(":")
    try:
        return inspect.getattr_static(importlib.import_module(module), attribute)
    except Exception as error:  # a module's own code may raise anything
        raise ConfigError(
            option,
            f"is {name!r}, and that cannot be imported ({type(error).__name__}: {error}); write "
            f"package.module:{kind}, of a module that is installed or on PYTHONPATH",
        ) from error
