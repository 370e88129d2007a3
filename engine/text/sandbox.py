"""The sandbox for chat templates: a Jinja environment with only what transformers offers.

A template comes from the model's directory, so the operator chose it, but a stranger wrote it. It
runs in Jinja's immutable sandbox (no private attributes, no changes to its inputs), sees only plain
values, and cannot build huge values by repetition. In addition to plain Jinja it may use
`raise_exception`, `strftime_now`, `dict`, `namespace`, the filter `tojson` (which does not escape
HTML), `break` and `continue`, and `{% generation %}` blocks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_REPEATED = 1_000_000
"""The longest string or list that a template may create with `*`, and the most bits of the result
of `**`.
"""


class RaisedByTemplateError(TemplateError):
    """The template called raise_exception; its message is for the caller."""


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks the model's own text, for training. Here only
    the content of the block matters.
    """

    tags = {"generation"}  # noqa: RUF012 (declared by Jinja as an instance's)

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse a block. It has its own scope: names set in it are not visible after it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _DictMaker:
    """`dict` for templates: creates dictionaries, and has no attributes that lead out of the
    sandbox.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        """Return a dictionary with the same value for all keys."""
        return dict.fromkeys(keys, value)


class _PlainNamespace(Namespace):
    """`namespace` for templates, without attributes whose names begin with an underscore."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        values = dict(*args, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError("a namespace's names must not begin with an underscore")


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The Jinja environment; each model has a separate one."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, clock: Callable[[], datetime] = datetime.now) -> None:
        """`clock`: returns the time for templates that print it."""
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        self.filters["tojson"] = _to_json
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda layout: clock().strftime(layout),
            "dict": _DictMaker(),
            "namespace": _PlainNamespace,
        }

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Multiply or raise to a power, unless the result would be huge."""
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            size = left.bit_length() * right
        else:
            lengths = [
                len(value) for value in (left, right) if isinstance(value, str | list | tuple)
            ]
            counts = [value for value in (left, right) if isinstance(value, int)]
            size = lengths[0] * counts[0] if len(lengths) == len(counts) == 1 else 0
        if size > MAX_REPEATED:
            raise SecurityError(f"the result of {operator} would be too large")
        return super().call_binop(context, operator, left, right)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> NoReturn:
    raise RaisedByTemplateError(str(message))
