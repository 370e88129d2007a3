"""Declares everything about an option once, at its field.

    max_sessions: int = option(1024, "Most sessions that are open.", low=1, high=1_000_000)

The bounds check and the error text follow from that (`check_bounds`). If the option has a group, so
do the server's flag, the environment variable, the line of help and the row in docs/operations.md
(`service.command.flags`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from engine.contract.errors import ConfigError
from engine.contract.plugins import is_outside

_KEY = "option"
_MAX_SHOWN = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What an option has in addition to its field's type and default.

    Attributes:
        help: a description in a sentence or two.
        more: further text for the documentation, in Markdown.
        low, high: the bounds; None: no bound.
        above: whether values must be strictly above `low`.
        zero: what 0 means if it is allowed although it is below `low`; empty: 0 is refused.
        choices: the allowed values; empty: any.
        outside: the kind of object that package.module:… may name in addition to the choices, such
            as Class; empty: none.
        switch: whether the option is True or False (or None, if that is the default). Implied if
            the default is True or False.
        base: the base in which a flag's number is written, such as 8 for octal.
        group: the heading in the server's help; empty: the server has no such flag.
        bare: the value of the flag when given without one; empty: a value is required.
        flag: the flag's name without dashes; empty: the field's name without its unit. For an
            option without a group, the flag of another config's option that sets this one.
        shown: how the default is displayed, if not as the value itself.
        served: the server's default, if it differs. Wrapped in a tuple because it may be None.
        reloads: what SIGHUP changes it for in a running server, in words; empty: changing it
            requires a restart.
    """

    help: str
    more: str = ""
    low: float | None = None
    high: float | None = None
    above: bool = False
    zero: str = ""
    choices: tuple[str, ...] = ()
    outside: str = ""
    switch: bool = False
    base: int = 10
    group: str = ""
    bare: str = ""
    flag: str = ""
    shown: str = ""
    served: tuple[Any] | None = None
    reloads: str = ""

    def bounds(self, name: str) -> str:
        """Return the bounds in words for an option with this name, or "" if there are none."""
        if self.choices:
            outside = f", or package.module:{self.outside}" if self.outside else ""
            return "one of " + ", ".join(self.choices) + outside
        if self.low is None or self.high is None:
            return ""
        low, high = (_told(bound, name, self.base) for bound in (self.low, self.high))
        text = f"above {low}, at most {high}" if self.above else f"{low} to {high}"
        return f"{text}, or 0: {self.zero}" if self.zero else text


def option(default: Any, help: str = "", **more: Any) -> Any:
    """Declare a dataclass field as an option. `more` sets further fields of Option."""
    return dataclasses.field(default=default, metadata={_KEY: Option(help=help, **more)})


def options_of(config: type[Any]) -> Mapping[str, Option]:
    """Return the options among a dataclass's fields, by field name."""
    return MappingProxyType(
        {one.name: one.metadata[_KEY] for one in dataclasses.fields(config) if _KEY in one.metadata}
    )


def check_bounds(config: Any) -> None:
    """Check the types and bounds of a config's options. None is allowed if it is the default.

    Raises:
        ConfigError: an option has the wrong type or is out of bounds.
    """
    for field in dataclasses.fields(config):
        one: Option | None = field.metadata.get(_KEY)
        if one is None:
            continue
        value = getattr(config, field.name)
        if value is not None or not (field.default is None or one.served == (None,)):
            check_value(field.name, one, value, field.default)


def check_value(name: str, one: Option, value: Any, default: Any) -> None:
    """Check the type and bounds of one option's value.

    Args:
        name: the field's name.
        one: the field's declaration.
        value: the value to check; not None if None is the default.
        default: the field's default.

    Raises:
        ConfigError: the value has the wrong type or is out of bounds.
    """
    shown = f"{value:g}" if isinstance(value, float) else repr(value)
    shown = shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}…"
    if one.choices:
        if value not in one.choices and not (one.outside and is_outside(value)):
            raise ConfigError(name, f"is {shown}; it must be {one.bounds(name)}")
    elif one.switch or isinstance(default, bool):
        if not isinstance(value, bool):
            nothing = " or None" if default is None else ""
            raise ConfigError(name, f"is {shown}; it must be True or False{nothing}")
    elif one.low is not None and one.high is not None and not _is_within(value, one):
        kind = "a whole number, " if isinstance(one.low, int) else ""
        raise ConfigError(name, f"is {shown}; it must be {kind}{one.bounds(name)}")


def _is_within(value: Any, one: Option) -> bool:
    """Whether a number is within an option's bounds; False for any other type of value."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    if one.low is None or one.high is None:
        return True
    if isinstance(one.low, int) and not isinstance(value, int):
        return False
    if one.zero and value == 0:
        return True
    is_low = value > one.low if one.above else value >= one.low
    return is_low and value <= one.high  # false for NaN too


def _told(bound: float, name: str, base: int) -> str:
    """Return a bound as text, with a unit if the option's name has one."""
    if base == 8:
        return f"{int(bound):04o}"
    if name.endswith("_bytes"):
        size, unit = int(bound), 0
        while size and size % 1024 == 0 and unit < 4:
            size, unit = size // 1024, unit + 1
        return f"{size} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"
    if name.endswith("_s") and bound >= 86_400:
        days = bound / 86_400
        return "a day" if days == 1 else f"{days:g} days"
    for power in (31, 53, 64):
        if bound in (1 << power, (1 << power) - 1):
            return f"2^{power}" + (" − 1" if bound < 1 << power else "")
    return f"{bound:,.0f}" if bound == int(bound) else f"{bound:g}"
