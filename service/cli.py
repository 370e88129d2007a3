"""The command `headrace-server`. Every option is also an environment variable; a flag wins over
its variable.

Nothing heavy is imported before `serve` runs: `--help` and `--version` answer at once, without
torch.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service import options, tokens

if TYPE_CHECKING:
    from engine.client import EngineClient
    from engine.config import LoadConfig
    from service.config import ServiceConfig

app = typer.Typer(
    name="headrace-server",
    help="Headrace: a gRPC server for text generation, with continuous batching.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def default_model() -> str:
    """The demo model of the repository."""
    return str(Path(__file__).resolve().parent.parent / "models" / "demo")


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


@app.command()
@options.grouped
def serve(
    network: options.NetworkOptions,
    engine: options.EngineOptions,
    requests: options.RequestOptions,
    process: options.ProcessOptions,
) -> None:
    """Serve a model until a signal comes."""
    # Imported here: --help is to be fast.
    from engine.errors import ConfigError

    try:
        config = _service_config(network, engine, requests, process)
        load = _load_config(engine)
        rank = _rank(load)
        client = _engine_client(config, load, engine, process)
    except ConfigError as error:
        typer.echo(f"headrace-server: {options.describe(error)}", err=True)
        raise typer.Exit(2) from error

    from service.logs.output import Output

    with Output(config.log_format, config.log_level) as output:
        # Imports take a while on a cold machine: say something before.
        if rank:
            output.say(f"headrace-server {_version()}: rank {rank} follows rank 0")
            from service.follower import follow_to_the_end

            model = engine.model or default_model()
            follow_to_the_end(model, load, engine.block_size, rank, output)
        output.say(f"headrace-server {_version()}: starting")
        from service.process import run_to_the_end

        run_to_the_end(config, client, output)


def _service_config(
    network: options.NetworkOptions,
    engine: options.EngineOptions,
    requests: options.RequestOptions,
    process: options.ProcessOptions,
) -> ServiceConfig:
    from service.config import ServiceConfig
    from service.receiving import default_receive_bytes

    receive = network.max_receive_bytes
    given = {
        **vars(network),
        "max_receive_bytes": (
            default_receive_bytes(engine.model or default_model()) if receive is None else receive
        ),
        "listen": tuple(network.listen),
        "unix_socket_mode": _mode(network.unix_socket_mode),
        **vars(requests),
    }
    return ServiceConfig(
        **given,
        served_name=engine.served_name,
        scheduler=engine.scheduler,
        prefix_cache=engine.prefix_cache,
        drain_timeout_s=process.drain_timeout_s,
        log_level=process.log_level.lower(),
        log_format=process.log_format.lower(),
    )


def _load_config(engine: options.EngineOptions) -> LoadConfig:
    from engine.config import LoadConfig

    return LoadConfig(
        dtype=engine.dtype,  # type: ignore[arg-type]
        device=engine.device,
        threads=engine.threads,
        attention=engine.attention,  # type: ignore[arg-type]
        quantization=engine.quantization,  # type: ignore[arg-type]
        pack_weights=engine.pack_weights,
        fuse_layers=engine.fuse_layers,
        tensor_parallel=engine.tensor_parallel,  # type: ignore[arg-type]
    )


def _rank(load: LoadConfig) -> int:
    """This process's number among those that share the model; 0: it serves.

    Raises:
        ConfigError: torchrun started several processes, and they do not share a model.
    """
    from engine.config import RankPlace
    from engine.errors import ConfigError

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
    config: ServiceConfig,
    load: LoadConfig,
    engine: options.EngineOptions,
    process: options.ProcessOptions,
) -> EngineClient:
    from engine.config import ContinuousBatchingConfig
    from engine.errors import ConfigError
    from engine.local_client import LocalEngineClient
    from engine.process.client import DEFAULT_HANG_TIMEOUT_S, ProcessEngineClient

    batching = ContinuousBatchingConfig(
        block_size=engine.block_size,
        num_blocks=engine.num_blocks,
        max_batch_tokens=engine.max_batch_tokens,
        max_memory_percent=engine.max_memory_percent,
        max_requests_per_batch=engine.max_requests_per_batch,
        max_queue_size=config.max_queue_size,
        scheduler_type=config.scheduler,
        target_step_time=engine.target_step_time_s,
        allow_block_sharing=config.prefix_cache,
        cpu_offload_space=engine.cpu_offload_space,
        use_async_batching=engine.async_batching,
        use_cuda_graph=engine.cuda_graphs,
        default_compile_level=engine.compile_level,
        per_request_processors=True,
    )
    model = engine.model or default_model()
    hang_timeout_s = process.hang_timeout_s
    if process.in_process:
        if hang_timeout_s is not None:
            raise ConfigError(
                "hang_timeout_s",
                "is of an engine in a process of its own, which can be ended when it hangs; leave "
                "it out, or in_process",
            )
        return LocalEngineClient(model, batching, load)
    return ProcessEngineClient(
        model,
        batching,
        load,
        log_level=config.log_level,
        hang_timeout_s=DEFAULT_HANG_TIMEOUT_S if hang_timeout_s is None else hang_timeout_s,
    )


app.command("token")(tokens.token)


def _mode(text: str) -> int:
    from engine.errors import ConfigError

    try:
        return int(text, 8)
    except ValueError as error:
        raise ConfigError(
            "unix_socket_mode", f"is {text!r}; it must be an octal number such as 0660"
        ) from error


def main() -> None:
    """The entry point."""
    from service.logs.output import open_standard_files

    open_standard_files()
    app()
