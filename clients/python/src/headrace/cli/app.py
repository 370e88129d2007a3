"""The command: the options before the subcommand, and the list of subcommands.

`headrace_command` runs it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace._channel import CLIENT_VERSION
from headrace._targets import DEFAULT_TARGET
from headrace.cli import control
from headrace.cli.batch import batch
from headrace.cli.bench.command import bench
from headrace.cli.chat import chat
from headrace.cli.common import Connection
from headrace.cli.generate import generate
from headrace.cli.openai import openai
from headrace.cli.top import top
from headrace.cli.tour import tour

_EPILOG = (
    "Exit codes: 0 done; 1 a request was refused or failed; 2 wrong usage; "
    "3 the server cannot be reached or is not ready; 130 interrupted."
)

app = typer.Typer(
    name="headrace",
    help="Talk to a Headrace text-generation server.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=_EPILOG,
)
app.command(epilog=_EPILOG)(generate)
app.command(epilog=_EPILOG)(chat)
app.command(epilog=_EPILOG)(batch)
app.command(epilog=_EPILOG)(bench)
app.command(epilog=_EPILOG)(top)
app.command(epilog=_EPILOG)(tour)
app.command(epilog=_EPILOG)(openai)
app.add_typer(control.app, name="control", epilog=_EPILOG)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headrace {CLIENT_VERSION}")
        raise typer.Exit


@app.callback()
def connect(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Option(
            envvar="HEADRACE_TARGET",
            help="The server: host:port or unix:/path. Several: dns:///host:port, a name each of "
            "whose addresses is one, or a list with commas.",
        ),
    ] = DEFAULT_TARGET,
    tls: Annotated[
        bool | None,
        typer.Option("--tls/--insecure", help="Encrypted, or in clear text even with a token."),
    ] = None,
    ca: Annotated[
        Path | None,
        typer.Option(envvar="HEADRACE_CA", help="The certificate authority to trust (PEM)."),
    ] = None,
    token: Annotated[
        str | None, typer.Option(envvar="HEADRACE_TOKEN", help="Sent as a bearer token.")
    ] = None,
    client_cert: Annotated[
        Path | None,
        typer.Option(envvar="HEADRACE_CLIENT_CERT", help="This client's certificate (PEM)."),
    ] = None,
    client_key: Annotated[
        Path | None,
        typer.Option(envvar="HEADRACE_CLIENT_KEY", help="The certificate's key (PEM)."),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(help="Seconds that a call may take, kept whatever the server does."),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            envvar="HEADRACE_TOKEN_FILE",
            help="The file that has the token, read again when it changes; comes before --token.",
        ),
    ] = None,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Talk to a Headrace text-generation server."""
    context.obj = Connection(
        target=target,
        tls=tls,
        ca=ca,
        token=None if token_file else token,
        token_file=token_file,
        client_cert=client_cert,
        client_key=client_key,
        timeout=timeout,
    )
