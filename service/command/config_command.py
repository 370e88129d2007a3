"""The command `headrace-server config`: prints a config file, or checks one for a server.

flags and variables of `serve` ─┐
a config file ──────────────────┴─▶ `config_file.filled` ─▶ the configs, and the files they name
                                                         ─▶ what a reload would and would not change
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from engine.contract.errors import ConfigError
from service.command import flags
from service.command.config_file import compare, document, filled
from service.command.serve_options import options_of

_GROUP = "Config file"
_WRONG = 2
_LEFT = 3


def _own() -> Iterator[inspect.Parameter]:
    def one(name: str, kind: Any, default: Any, help: str) -> inspect.Parameter:
        told = typer.Option(f"--{name}", help=help, rich_help_panel=_GROUP)
        keyword = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(name, keyword, default=default, annotation=Annotated[kind, told])

    yield one("print", bool, False, "Print a file with all options, their values and meanings.")
    yield one(
        "check",
        str | None,
        None,
        "A file to check, with the files that it names: the exit code is 0 if a server could read "
        "it, else 2.",
    )
    yield one(
        "against",
        str | None,
        None,
        "With --check: the file that a server has read. Says what SIGHUP would change, and what "
        "needs a restart: the exit code is then 3.",
    )


def _config(given: flags.Given) -> None:
    """Print a config file, or check one.

    Flags and variables of serve are heeded as serve heeds them: they win over the file.
    """
    try:
        if given["check"] is not None:
            code = _check(given)
        elif given["print"] and given["against"] is None:
            typer.echo(document(filled(given)), nl=False)
            code = 0
        else:
            raise ConfigError(
                "config", "give --print or --check FILE; --against OLD goes with --check"
            )
    except ConfigError as error:
        typer.echo(f"headrace-server: {flags.describe(error)}", err=True)
        code = _WRONG
    raise typer.Exit(code)


def _check(given: flags.Given) -> int:
    """Report what is wrong with a file and what a reload could not change. Return an exit code."""
    # Imported here, so that --help is fast.
    from service.server import credentials_of

    new = filled(given, given["check"])
    try:
        credentials_of(options_of(new).service)
    except ConfigError as error:
        typer.echo(f"headrace-server: {flags.describe(error, new)}", err=True)
        return _WRONG
    typer.echo(f"{new.path} is in order and sets {len(new.from_file)} options.")
    fixed = [flag.name for name, flag in flags.flags().items() if given.is_fixed(name)]
    if fixed:
        typer.echo(f"Flags or variables here win over what it says of: {', '.join(fixed)}.")
    if given["against"] is None:
        return 0
    old = filled(given, given["against"])
    changes = compare(old, new)
    typer.echo(f"SIGHUP would change: {changes.told(changes.now) or 'nothing'}.")
    if not changes.later:
        return 0
    typer.echo(f"A restart would be needed for: {changes.told(changes.later)}.")
    return _LEFT


config = flags.command_of(_config, more=tuple(_own()))
