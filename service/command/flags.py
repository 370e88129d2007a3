"""Derives the options of `headrace-server serve`, some of which `plan` shares, from the config
fields that declare them.

    a field of a config (`option_fields`) ──▶ flag, variable, line of help     `command_of`
                                          ──▶ key of a config file             `config_file`
                                          ──▶ the configs, from what was given `Given.config`
                                          ──▶ an error in terms of flags       `describe`
                                          ──▶ tables in docs/                  `TABLES`

`python -m service.command.flags` writes the tables.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from engine.contract.config import ContinuousBatchingConfig, LoadConfig
from engine.contract.errors import ConfigError, HeadraceError
from engine.contract.option_fields import Option, options_of
from engine.contract.stats import STATISTICS
from service.config import ProcessConfig, ServiceConfig

CONFIGS: tuple[type[Any], ...] = (
    ServiceConfig,
    ProcessConfig,
    ContinuousBatchingConfig,
    LoadConfig,
)
"""The configs whose options with a group are flags."""
FILE = "config"
"""The field that names the config file. It is not a key of the file."""
_FIXED = ("COMMANDLINE", "ENVIRONMENT")
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")

_Config = TypeVar("_Config")


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of the server.

    Attributes:
        field: the config's field.
        option: its declaration.
        kind: its type.
        default: the server's default.
    """

    field: str
    option: Option
    kind: Any
    default: Any

    @property
    def name(self) -> str:
        """The name without dashes, such as max-sessions."""
        return self.option.flag or self.field.removesuffix("_s").replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable."""
        return "HEADRACE_" + self.name.upper().replace("-", "_")

    @property
    def section(self) -> str:
        """The section of a config file: the heading in the help, in lowercase with dashes."""
        return self.option.group.lower().replace(" ", "-")

    @property
    def place(self) -> str:
        """The section and key in a config file."""
        return f"[{self.section}] {self.name}"

    def parameter(self) -> inspect.Parameter:
        """Return the parameter from which typer makes the flag."""
        kind, default = self.kind, self.default
        name = f"--{self.name}"
        if bool in (kind, *get_args(kind)):
            kind = bool if default is not None else bool | None
            name += f"/--no-{self.name}"
        elif kind == tuple[str, ...]:
            kind, default = list[str], list(default)
        elif self.option.base == 8:
            kind, default = str, f"{default:04o}"
        elif default is None and type(None) not in get_args(kind):
            kind = kind | None
        given = typer.Option(
            name,
            envvar=self.variable,
            help=plain(self.told()).replace("[", "\\["),  # which are markup there
            rich_help_panel=self.option.group,
            show_default=self.option.shown or True,
        )
        return inspect.Parameter(
            self.field,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[kind, given],
        )

    def read(self, given: Any) -> Any:
        """Convert a given value to the field's type. Raises ConfigError."""
        if isinstance(given, list):
            return tuple(given)
        if self.option.base != 8:
            return given
        try:
            return int(given, 8)
        except ValueError as error:
            raise ConfigError(
                self.field,
                f"is {given!r}; it must be an octal number, {self.option.bounds(self.field)}",
            ) from error

    def told(self) -> str:
        """Return the help text with the bounds. Choices are already in the text."""
        bounds = "" if self.option.choices else self.option.bounds(self.field)
        return f"{self.option.help} {bounds[:1].upper()}{bounds[1:]}.".removesuffix(" .")

    @property
    def absent(self) -> str:
        """The text to show for a flag that has no value."""
        return self.option.shown or "none"

    def row(self) -> str:
        """Return the flag's row of the table."""
        option, default = self.option, self.default
        if option.shown or default is None:
            shown = self.absent
        elif isinstance(default, bool):
            shown = "on" if default else "off"
        elif isinstance(default, tuple):
            shown = f"`{default[0]}`" if default else "none"
        else:
            text = f"{default:04o}" if option.base == 8 else default
            shown = f"`{text:g}`" if isinstance(text, float) else f"`{text}`"
        meaning = " ".join(part for part in (self.told(), option.more) if part)
        return f"| `--{self.name}` | `{self.variable}` | {shown} | {meaning} |\n"


@cache
def flags() -> dict[str, Flag]:
    """Return all flags by field name, in the order of the help's groups."""
    found: list[Flag] = []
    for config in CONFIGS:
        hints = get_type_hints(config)
        for field in dataclasses.fields(config):
            option = options_of(config).get(field.name)
            if option is not None and option.group:
                default = field.default if option.served is None else option.served[0]
                found.append(Flag(field.name, option, _simple(hints[field.name]), default))
    groups = list(dict.fromkeys(flag.option.group for flag in found))
    found.sort(key=lambda flag: groups.index(flag.option.group))
    return {flag.field: flag for flag in found}


def _simple(hint: Any) -> Any:
    """Return a field's type for the command line: str instead of literals, and no pairs."""
    if get_origin(hint) is Literal:
        return str
    if get_origin(hint) in (UnionType, Union):
        parts = [part for part in get_args(hint) if get_origin(part) is not tuple]
        return Union[tuple(parts)]  # noqa: UP007  # made of values
    return hint


class Given:
    """The values of the flags by field name, and their sources. A flag takes precedence over its
    variable, the variable over the config file, and the file over the default.

    Attributes:
        path: the config file, or None if there is none.
        from_file: the fields whose values come from the file.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        fixed: frozenset[str] = frozenset(),
        path: str | None = None,
        read: Mapping[str, Any] | None = None,
    ) -> None:
        """`values`: from flags, variables and defaults. `fixed`: the fields that a flag or variable
        sets. `path`, `read`: the config file, and the values that it sets.
        """
        self.path = path
        self.from_file = frozenset(read or ()) - fixed
        self._own, self._fixed = values, fixed
        self._values = {**values, **{name: (read or {})[name] for name in self.from_file}}

    def __getitem__(self, field: str) -> Any:
        return self._values[field]

    def is_fixed(self, field: str) -> bool:
        """Whether a flag or a variable sets the field, so that the file cannot."""
        return field in self._fixed

    def with_file(self, path: str, read: Mapping[str, Any]) -> Given:
        """Return a copy with the values of a config file instead of those of any earlier file."""
        known = {name: value for name, value in read.items() if name in self._own}
        return Given(self._own, self._fixed, path, known)

    def config(self, kind: type[_Config], **more: Any) -> _Config:
        """Make a config from these values.

        Args:
            kind: one of CONFIGS.
            more: values for fields that are not flags of this config, or that override them.

        Raises:
            ConfigError: an option is out of bounds.
        """
        given = {
            name: flags()[name].read(self._values[name])
            for name, option in options_of(kind).items()
            if option.group and name not in more and name in self._values
        }
        return kind(**given, **more)

    def line(self) -> list[str]:
        """Return the command line of the flags whose values differ from the defaults."""
        words: list[str] = []
        for name, flag in flags().items():
            value = self._values.get(name, flag.default)
            if value in (None, flag.default):
                continue
            if isinstance(value, bool):
                words.append(f"--{flag.name}" if value else f"--no-{flag.name}")
            else:
                words += [
                    f"--{flag.name}",
                    f"{value:g}" if isinstance(value, float) else str(value),
                ]
        return words


class BareFlags(TyperCommand):
    """A command some of whose flags may be given without a value (`Option.bare`), which typer
    cannot declare.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give bare flags their values."""
        bare = {f"--{flag.name}": flag.option.bare for flag in flags().values()}
        filled: list[str] = []
        for word, following in zip_longest(args, args[1:], fillvalue="-"):
            filled.append(word)
            if following.startswith("-") and bare.get(word):
                filled.append(bare[word])
        return super().parse_args(ctx, filled)


def command_of(
    run: Callable[[Given], None],
    *,
    only: Sequence[str] = (),
    more: Sequence[inspect.Parameter] = (),
) -> Callable[..., None]:
    """Make a command for typer, with a parameter for each flag.

    Args:
        run: the function that the command runs.
        only: the fields whose flags the command has; empty for all.
        more: the command's additional parameters.
    """
    taken = [flag.parameter() for name, flag in flags().items() if not only or name in only]
    context = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    parameters = [context, *more, *taken]

    def command(ctx: typer.Context, **values: Any) -> None:
        sources = {name: ctx.get_parameter_source(name) for name in values}
        fixed = {name for name, one in sources.items() if one is not None and one.name in _FIXED}
        run(Given(values, frozenset(fixed)))

    command.__name__, command.__doc__ = run.__name__, run.__doc__
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    # Typer reads the signature; the type of functions does not have one.
    vars(command)["__signature__"] = inspect.Signature(parameters)
    return command


def describe(error: HeadraceError, given: Given | None = None) -> str:
    """Describe a start-up error to the user of the command. Names of options are replaced by flags,
    or by keys of the config file if `given` takes their values from it. The rest of the text is
    unchanged.
    """
    names = _names()
    start, message = "", str(error)
    if isinstance(error, ConfigError):
        start, message = error.option, message.removeprefix(error.option)
    path = ""
    if given is not None and given.from_file:
        names |= {field: flags()[field].place for field in given.from_file}
        path = f"{given.path}: " if start in given.from_file else ""
    for name in error.mentions:
        message = message.replace(name, names.get(name, name))
    return path + names.get(start, start) + message


def _names() -> dict[str, str]:
    """Return the flags with dashes, by the names of the fields that they set."""
    names = {field: f"--{flag.name}" for field, flag in flags().items()}
    for config in CONFIGS:
        for field, one in options_of(config).items():
            if one.flag:
                names[field] = f"--{one.flag}"
    return names


def table() -> str:
    """Return the table of options, in Markdown."""
    head = "| flag | variable | default | meaning |\n|---|---|---|---|\n"
    return head + "".join(flag.row() for flag in flags().values())


def reloads() -> str:
    """Return the table of what SIGHUP changes, in Markdown."""
    head = "| section | key | what SIGHUP changes |\n|---|---|---|\n"
    return head + "".join(
        f"| `[{flag.section}]` | `{flag.name}` | {flag.option.reloads} |\n"
        for flag in flags().values()
        if flag.option.reloads
    )


def statistics() -> str:
    """Return the table of the engine's statistics, in Markdown."""
    head = "| name | kind | unit | meaning |\n|---|---|---|---|\n"
    return head + "".join(
        f"| `{one.name}` | {one.kind} | {one.unit.strip('{}')} | {one.text} |\n"
        for one in STATISTICS.values()
    )


TABLES = (
    ("operations.md", "options", table),
    ("operations.md", "statistics of the engine", statistics),
    ("configuration.md", "what SIGHUP changes", reloads),
)
"""The tables of documents in docs/: the document, the table's name, and its text."""


def with_table(document: str, name: str, text: str) -> str:
    """Return the document with its table of this name replaced by `text`."""
    mark, end_mark = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    before, begin, rest = document.partition(mark)
    _, end, after = rest.partition(end_mark)
    if not begin or not end:
        raise ValueError(f"the document has no place for the table: {name}")
    return f"{before}{begin}{text}{end}{after}"


def plain(text: str) -> str:
    """Return Markdown as plain text."""
    return _LINK.sub(r"\1", text).replace("`", "")


def main() -> None:
    """Write the tables to the documents."""
    for document, name, text in TABLES:
        path = Path(__file__).resolve().parents[2] / "docs" / document
        path.write_text(with_table(path.read_text("utf-8"), name, text()), encoding="utf-8")


if __name__ == "__main__":
    main()
