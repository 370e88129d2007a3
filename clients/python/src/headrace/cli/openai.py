"""`headrace openai`: OpenAI's HTTP API in front of servers."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli import common

_MISSING = "OpenAI's HTTP API needs {}: pip install 'headrace[openai]'"


@common.tells_errors
def openai(
    context: typer.Context,
    *,
    listen: Annotated[
        str, typer.Option(help="Where HTTP is spoken: host:port.")
    ] = "127.0.0.1:8000",
    target: Annotated[
        list[str] | None,
        typer.Option(
            help="A server, or a fleet (with commas, or dns:///…). Several times: servers with "
            "different models."
        ),
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="HTTPS: the certificate (PEM).")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="HTTPS: its key (PEM).")] = None,
    insecure: Annotated[
        bool, typer.Option("--plain", help="Allow plain HTTP beyond loopback addresses.")
    ] = False,
    openai_host: Annotated[
        list[str] | None,
        typer.Option(
            help="A name that requests may have in Host, besides addresses and localhost."
        ),
    ] = None,
    openai_origin: Annotated[
        list[str] | None,
        typer.Option(help="A page's origin, such as https://app.example, that may ask (CORS)."),
    ] = None,
    openai_ignore_unknown: Annotated[
        bool, typer.Option("--openai-ignore-unknown", help="Pass over members that are unknown.")
    ] = False,
    drain: Annotated[
        float, typer.Option(help="Seconds that what runs may go on after SIGTERM.")
    ] = 30.0,
    supervised: Annotated[bool, typer.Option("--supervised", hidden=True)] = False,
) -> None:
    """Serve OpenAI's HTTP API (chat, completions, models) in front of Headrace servers.

    A caller's bearer token is passed on to the server as it is. Needs the extra: pip install
    'headrace[openai]'.
    """
    try:
        from headrace.openai.callers import Callers
        from headrace.openai.door import Door
        from headrace.openai.guard import Guard
        from headrace.openai.run import Listening, log_to_stderr, serve
    except ModuleNotFoundError as error:
        if not error.name or error.name.startswith("headrace"):
            raise
        common.fail(_MISSING.format(error.name), common.EXIT_USAGE)
    common.check_seconds(drain, "--drain", 0.0, 86_400.0)
    if bool(tls_cert) != bool(tls_key):
        common.fail("--tls-cert and --tls-key go together", common.EXIT_USAGE)
    listening = Listening(listen, tls_cert, tls_key, drain)
    connection = common.of(context)
    secret = sys.stdin.readline().strip() or None if supervised else None
    callers = Callers(
        target or [connection.target],
        lambda one, metadata, number: connection.open_async(
            target=one, metadata=metadata, channel_options=(("headrace.connection", number),)
        ),
        secret,
    )
    guard = Guard(openai_host or (), openai_origin or ())
    door = Door(callers, guard, ignore_unknown=openai_ignore_unknown)
    log_to_stderr(supervised)
    log = logging.getLogger("headrace.openai")
    parent = sys.stdin.fileno() if supervised else None
    try:
        if not (listening.is_local or insecure or tls_cert):
            raise ValueError(
                f"{listen} is reached from other machines in plain text, tokens too: give "
                "--tls-cert and --tls-key, or --plain to allow it"
            )
        asyncio.run(serve(door, listening, lambda: log.info("ready: %s", listening.url), parent))
    except (ValueError, OSError) as error:
        common.fail(f"cannot listen on {listen}: {error}", common.EXIT_USAGE)
