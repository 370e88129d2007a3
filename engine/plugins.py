"""Classes from outside the tree, by the names that operators give: package.module:Class.

Only a flag, an environment variable or a config of the program names one, never a request. The
module must be importable where the engine runs: installed, or on PYTHONPATH; a server's engine
does not import from its working directory.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from engine.errors import ConfigError


def is_outside(name: str) -> bool:
    """Whether this names a class by its place, not by a name of ours."""
    return ":" in name


def outside_class(option: str, name: str, base: type[Any], needs: str) -> type[Any]:
    """The class of such a name.

    Args:
        option: the option that it is the value of.
        name: package.module:Class.
        base: what it must be a subclass of.
        needs: what such a class has, for the message.

    Raises:
        ConfigError: it cannot be imported, or is no finished subclass.
    """
    module, _, attribute = name.partition(":")
    try:
        found = inspect.getattr_static(importlib.import_module(module), attribute)
    except Exception as error:  # a module's own code raises what it likes
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
