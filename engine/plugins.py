"""Loads classes from outside the source tree that operators name as package.module:Class.

Such a name comes from a flag, an environment variable or a config, never from a request. The module
must be importable by the engine: installed, or on PYTHONPATH. A server's engine does not import
from its working directory.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from engine.errors import ConfigError


def is_outside(name: str) -> bool:
    """Whether this is package.module:Class rather than one of our own names."""
    return ":" in name


def outside_class(option: str, name: str, base: type[Any], needs: str) -> type[Any]:
    """Import the class that a name stands for.

    Args:
        option: the option that has this value.
        name: package.module:Class.
        base: what it must be a subclass of.
        needs: what the class must define, for the message.

    Raises:
        ConfigError: it cannot be imported, or is not a complete subclass.
    """
    module, _, attribute = name.partition(":")
    try:
        found = inspect.getattr_static(importlib.import_module(module), attribute)
    except Exception as error:  # a module's own code may raise anything
        raise ConfigError(
            option,
            f"is {name!r}, and that cannot be imported ({type(error).__name__}: {error}); write "
            "package.module:Class, of a module that is installed or on PYTHONPATH",
        ) from error
    if not (isinstance(found, type) and issubclass(found, base)) or inspect.isabstract(found):
        raise ConfigError(
            option, f"is {name!r}, which is no subclass of {base.__name__} with {needs}"
        )
    return found
