"""The command `headrace-server`. Every option is also an environment variable and a key of a config
file. A flag takes precedence over its variable, and the variable over the file.

Nothing heavy is imported before `serve` runs, so `--help` and `--version` answer immediately,
without torch.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Annotated

import typer

from engine.contract.config import ContinuousBatchingConfig, LoadConfig
from engine.contract.environment import RankPlace
from engine.contract.errors import ConfigError
from service.command import config_command, flags, models, planning, tokens
from service.command.config_file import filled
from service.command.serve_options import options_of
from service.config import ProcessConfig, ServiceConfig, notify_socket
from service.telemetry.telemetry_config import TelemetryConfig

if TYPE_CHECKING:
    from engine.contract.engine_client import EngineClient

app = typer.Typer(
    name="headrace-server",
    help="Headrace: a gRPC server for text generation, with continuous batching.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _version() -> str:
    try:
        return version("headrace-server")
    except PackageNotFoundError:
        return "(not installed)"


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headrace-server {_version()}")
        raise typer.Exit


@app.callback()
def root(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Headrace: a gRPC server for text generation, with continuous batching."""


@app.command(cls=flags.BareFlags)
@flags.command_of
def serve(given: flags.Given) -> None:
    """Serve a model until a signal comes."""
    try:
        given = filled(given)
        process, model, config, load, batching = options_of(given)
        telemetry = TelemetryConfig.read()
        rank = _rank(load)
        client = _engine_client(process, model, config, batching, load)
    except ConfigError as error:
        typer.echo(f"headrace-server: {flags.describe(error, given)}", err=True)
        raise typer.Exit(2) from error

    # Imported here, so that --help is fast.
    from service.logs.output import Output

    with Output(config.log_format, config.log_level, config.log_level_of) as output:
        # Imports take a while on a cold machine, so print something first.
        if rank:
            output.say(f"headrace-server {_version()}: rank {rank} follows rank 0")
            from service.command.follow import follow_to_the_end

            follow_to_the_end(model, load, rank, output)
        output.say(f"headrace-server {_version()}: starting")
        client.launch()  # before what serving imports: the engine's process has more to import
        from service.command.process import run_to_the_end
        from service.command.reloading import ConfigSource

        run_to_the_end(
            config,
            client,
            output,
            telemetry_config=telemetry,
            source=ConfigSource(given, lambda again: options_of(again).service),
            notify=notify_socket(),
        )


def _rank(load: LoadConfig) -> int:
    """Return this process's rank among those that share the model. Rank 0 serves.

    Raises:
        ConfigError: torchrun started several processes, but they do not share a model.
    """
    place = RankPlace.read()
    if load.tensor_parallel != "none":
        return 0 if place is None else place.rank
    if place is not None and place.world_size > 1:
        raise ConfigError(
            "tensor_parallel",
            f"is none, and torchrun started {place.world_size} processes, which would be as many "
            "servers on the same addresses; set it to auto",
        )
    return 0


def _engine_client(
    process: ProcessConfig,
    model: str,
    config: ServiceConfig,
    batching: ContinuousBatchingConfig,
    load: LoadConfig,
) -> EngineClient:
    if process.in_process:
        from engine.process.local_client import LocalEngineClient

        return LocalEngineClient(model, batching, load)
    from engine.process.process_client import DEFAULT_HANG_TIMEOUT_S, ProcessEngineClient

    hang_timeout_s = process.hang_timeout_s
    return ProcessEngineClient(  # type: ignore[abstract]  # `sends_the_rest` makes those verbs
        model,
        batching,
        load,
        log_level=config.log_level,
        log_level_of=config.log_level_of,
        hang_timeout_s=DEFAULT_HANG_TIMEOUT_S if hang_timeout_s is None else hang_timeout_s,
    )


app.command("plan")(planning.plan)
app.command("config", cls=flags.BareFlags)(config_command.config)
app.command("pull")(models.pull)
app.command("models")(models.models)
app.command("rm")(models.rm)
app.command("token")(tokens.token)


def main() -> None:
    """The entry point."""
    from service.logs.output import open_standard_files

    open_standard_files()
    _check_command(sys.argv[1:])
    app()


def _check_command(arguments: list[str]) -> None:
    """If an option of `serve` precedes the subcommand, tell the user where it belongs."""
    name = arguments[0].split("=")[0] if arguments else ""
    if name.startswith("--") and name[2:] in {flag.name for flag in flags.flags().values()}:
        typer.echo(
            f"headrace-server: {name} is an option of serve: headrace-server serve {name} ...",
            err=True,
        )
        sys.exit(2)
