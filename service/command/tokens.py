"""The command `headrace-server token`: makes a token and its entry for the callers' file."""

from __future__ import annotations

import hashlib
import json
import secrets
from typing import Annotated

import typer

_TOKEN_BYTES = 32


def token(
    identity: Annotated[
        str, typer.Option(help="Whose requests the caller's are: a name in \\[A-Za-z0-9._-].")
    ] = "caller",
    service: Annotated[
        list[str], typer.Option(help="A service that the caller may call; * is all of them.")
    ] = ["GenerationService", "ModelService"],  # noqa: B006 - typer copies it
) -> None:
    """Make a random bearer token.

    The token goes to stdout, to be given to the caller. Its entry for the callers' file, which
    holds a digest only, goes to stderr; so do errors, which do not belong in that file:

    headrace-server token --identity search 2>entry && cat entry >>callers.toml
    """
    # Imported here, so that --help is fast.
    from engine.contract.errors import ConfigError
    from service.door.callers_file import parse_callers

    made = "hr_" + secrets.token_urlsafe(_TOKEN_BYTES)
    entry = (
        "[[callers]]\n"
        f"identity = {json.dumps(identity)}\n"
        f'token_sha256 = "{hashlib.sha256(made.encode()).hexdigest()}"\n'
        f"services = {json.dumps(service)}\n"
    )
    try:
        parse_callers(entry)
    except ConfigError as error:
        message = str(error).removeprefix("auth_file: ").removeprefix("callers[0].")
        typer.echo(f"headrace-server: {message}", err=True)
        raise typer.Exit(2) from error
    typer.echo(made)
    typer.echo(entry, err=True)
