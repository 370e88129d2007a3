"""The scheduling policies by name, for ContinuousBatchingConfig.scheduler_type. Policies that are
not registered are imported as package.module:Class (`engine.contract.plugins`).

The registry is process-wide. It is filled when modules are imported or a program starts, and read
when an engine is assembled.
"""

from __future__ import annotations

import inspect

from engine.contract.errors import ConfigError
from engine.contract.plugins import is_outside, outside_class
from engine.scheduler.base import Scheduler
from engine.scheduler.fair import FairScheduler
from engine.scheduler.fifo import FIFOScheduler
from engine.scheduler.prefill_first import PrefillFirstScheduler
from engine.scheduler.priority import PriorityScheduler

_OPTION = "scheduler_type"
_SCHEDULERS: dict[str, type[Scheduler]] = {
    "fifo": FIFOScheduler,
    "prefill_first": PrefillFirstScheduler,
    "priority": PriorityScheduler,
    "fair": FairScheduler,
}


def register_scheduler(name: str, cls: type[Scheduler]) -> None:
    """Register a policy under a name. Its constructor takes the same arguments as Scheduler's.

    Raises:
        ConfigError: the name is empty or taken, or the class is not a subclass of Scheduler that
            defines `choose`.
    """
    given: object = cls  # not all callers check types
    if not name or is_outside(name):
        raise ConfigError(_OPTION, f"{name!r} is no name; give one without a colon")
    if not (isinstance(given, type) and issubclass(given, Scheduler)) or inspect.isabstract(given):
        raise ConfigError(
            _OPTION, f"{given!r} is no scheduler; give a subclass of Scheduler that has `choose`"
        )
    if name in _SCHEDULERS:
        raise ConfigError(_OPTION, f"{name!r} is registered already; choose another name")
    _SCHEDULERS[name] = given


def scheduler_class(name: str) -> type[Scheduler]:
    """Return the policy with the given name, or the class at package.module:Class.

    Raises:
        ConfigError: there is no such policy.
    """
    if is_outside(name):
        return outside_class(_OPTION, name, Scheduler, "a `choose`")
    if name not in _SCHEDULERS:
        raise ConfigError(
            _OPTION,
            f"is {name!r}; it must be one of {', '.join(sorted(_SCHEDULERS))}, or "
            "package.module:Class",
        )
    return _SCHEDULERS[name]
