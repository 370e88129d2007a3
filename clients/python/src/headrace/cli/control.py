"""`headrace control …`: an operator's commands."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from google.protobuf.json_format import MessageToDict

from headrace.cli import common
from headrace.control import LogLevel
from headrace.results import CancelStatus
from headrace.v1 import control_service_pb2 as pb
from headrace.v1 import model_service_pb2

app = typer.Typer(
    help="Look at a server and steer it: its operators' commands.", no_args_is_help=True
)

_MAX_SECONDS = 315_576_000_000  # what a protobuf Duration holds: ten thousand years

adapters = typer.Typer(help="Load, unload and list adapters.", no_args_is_help=True)
app.add_typer(adapters, name="adapters")

Reason = Annotated[str, typer.Option(help="Why; other operators see it.")]
Identity = Annotated[str, typer.Option(help="Whose requests.")]


@app.command()
@common.tells_errors
def stats(context: typer.Context) -> None:
    """Write the server's statistics as one JSON object."""
    with common.of(context).open() as client:
        found = MessageToDict(client.control.statistics(), preserving_proto_field_name=True)
    typer.echo(json.dumps(found, indent=2))


@app.command(name="list")
@common.tells_errors
def list_requests(
    context: typer.Context,
    identity: Annotated[str, typer.Option(help="Only the requests of this identity.")] = "",
) -> None:
    """List the live requests, the oldest first, one a line."""
    common.check_text(identity, "--identity")
    with common.of(context).open() as client:
        for one in client.control.requests(identity):
            typer.echo(_line(one))


def _line(one: pb.LiveRequest) -> str:
    state = pb.RequestState.Name(one.state).removeprefix("REQUEST_STATE_").lower()
    age_s = one.age_duration.ToNanoseconds() / 1e9
    labels = (
        f" labels={json.dumps({label.name: label.value for label in one.labels}, sort_keys=True)}"
        if one.labels
        else ""
    )
    return (
        f"{one.identity} {one.request_id} {state} age={age_s:.1f}s "
        f"prompt={one.prompt_tokens} output={one.output_tokens} n={one.n} priority={one.priority}"
        f"{labels}"
    )


@app.command()
@common.tells_errors
def cancel(
    context: typer.Context,
    ids: Annotated[list[str], typer.Argument(help="The requests' ids.")],
    identity: Identity = "anonymous",
) -> None:
    """End requests of any identity. Exit code 1 if one of them is not found."""
    common.check_text(identity, "--identity")
    for name in ids:
        common.check_text(name, "an id")
    with common.of(context).open() as client:
        found = client.control.cancel((identity, name) for name in ids)
    for (_, name), status in found.items():
        typer.echo(f"{name} {status.value}")
    if CancelStatus.NOT_FOUND in found.values():
        raise typer.Exit(common.EXIT_FAILED)


@app.command()
@common.tells_errors
def pause(context: typer.Context, reason: Reason = "") -> None:
    """Stop the engine between two steps; requests stay and wait."""
    common.check_text(reason, "--reason")
    with common.of(context).open() as client:
        answer = client.control.pause(reason)
    typer.echo("paused" + (" (it was already)" if answer.was_paused else ""))


@app.command()
@common.tells_errors
def resume(context: typer.Context) -> None:
    """End the pause."""
    with common.of(context).open() as client:
        typer.echo("resumed" if client.control.resume() else "it was not paused")


@app.command()
@common.tells_errors
def drain(
    context: typer.Context,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds that live requests may go on.")
    ] = None,
    reason: Reason = "",
) -> None:
    """Shut the server down gracefully: live requests finish, new ones are refused."""
    common.check_text(reason, "--reason")
    if timeout is not None:
        common.check_seconds(timeout, "--timeout", 0, _MAX_SECONDS)
    with common.of(context).open() as client:
        answer = client.control.drain(timeout, reason)
    seconds = answer.drain.timeout.ToNanoseconds() / 1e9
    word = "drains already" if answer.was_draining else "drains"
    typer.echo(f"{word}: {answer.live_requests} live requests, at most {seconds:g} s")


@app.command(name="reset-prefix-cache")
@common.tells_errors
def reset_prefix_cache(context: typer.Context) -> None:
    """Make the server forget all cached prefixes of prompts."""
    with common.of(context).open() as client:
        client.control.reset_prefix_cache()
    typer.echo("reset")


@app.command(name="log-level")
@common.tells_errors
def log_level(
    context: typer.Context,
    level: Annotated[LogLevel, typer.Argument(help="debug, info, warning or error.")],
) -> None:
    """Set the server's log level."""
    with common.of(context).open() as client:
        typer.echo(f"{level}; it was {client.control.set_log_level(level)}")


AdapterName = Annotated[str, typer.Argument(help="What requests call it.")]


@adapters.command()
@common.tells_errors
def load(
    context: typer.Context,
    name: AdapterName,
    source: Annotated[
        str, typer.Argument(help="The name of its directory below the server's --adapter-root.")
    ],
    pinned: Annotated[
        bool, typer.Option("--pinned", help="It stays when others need the memory.")
    ] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="It may take the place of one with this name.")
    ] = False,
) -> None:
    """Load an adapter, while requests go on."""
    common.check_text(name, "the name")
    common.check_text(source, "the source")
    with common.of(context).open() as client:
        answer = client.control.load_adapter(name, source, pinned=pinned, replace=replace)
    typer.echo(_adapter_line(answer.adapter))
    for gone in answer.evicted:
        typer.echo(f"{gone} was unloaded, because memory was short")


@adapters.command()
@common.tells_errors
def unload(
    context: typer.Context,
    name: AdapterName,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds that requests that have it may go on.")
    ] = None,
) -> None:
    """Unload an adapter: new requests are refused, live ones finish."""
    common.check_text(name, "the name")
    if timeout is not None:
        common.check_seconds(timeout, "--timeout", 0, _MAX_SECONDS)
    with common.of(context).open() as client:
        live = client.control.unload_adapter(name, timeout)
    typer.echo(f"unloaded: {live} live requests have it")


@adapters.command(name="list")
@common.tells_errors
def list_adapters(context: typer.Context) -> None:
    """List the adapters, one a line."""
    with common.of(context).open() as client:
        for one in client.adapters():
            typer.echo(_adapter_line(one))


def _adapter_line(one: model_service_pb2.Adapter) -> str:
    state = model_service_pb2.AdapterState.Name(one.state).removeprefix("ADAPTER_STATE_").lower()
    return (
        f"{one.name} {state}{' pinned' if one.pinned else ''} digest={one.digest[:16]} "
        f"rank={one.rank} modules={one.modules} bytes={one.size_bytes} "
        f"requests={one.live_requests} base={json.dumps(one.base_model)}"
    )
