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

app = typer.Typer(
    name="headrace-server",
    help="Headrace: a gRPC server for text generation, with continuous batching.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


_RENAMED = {"default_compile_level": "compile_level"}
"""Options of the engine whose flags have other names."""


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
def serve(
    listen: options.Listen = ["127.0.0.1:50051"],  # noqa: B006 - typer copies it
    insecure: options.Insecure = False,
    control: options.Control = None,
    tls_cert: options.TlsCert = None,
    tls_key: options.TlsKey = None,
    tls_client_ca: options.TlsClientCa = None,
    auth_file: options.AuthFile = None,
    keepalive_interval: options.KeepaliveInterval = 60.0,
    max_connection_age: options.MaxConnectionAge = 0.0,
    max_connection_age_grace: options.MaxConnectionAgeGrace = 0.0,
    unix_socket_mode: options.UnixSocketMode = "0660",
    unix_socket_group: options.UnixSocketGroup = None,
    max_message_bytes: options.MaxMessageBytes = 16 << 20,
    model: options.Model = None,
    served_name: options.ServedName = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
    attention: options.Attention = "auto",
    block_size: options.BlockSize = 32,
    num_blocks: options.NumBlocks = None,
    max_memory_percent: options.MaxMemoryPercent = None,
    max_batch_tokens: options.MaxBatchTokens = None,
    max_requests_per_batch: options.MaxRequestsPerBatch = None,
    scheduler: options.Scheduler = "priority",
    prefix_cache: options.PrefixCache = True,
    cpu_offload_space: options.CpuOffloadSpace = 0.0,
    async_batching: options.AsyncBatching = None,
    cuda_graphs: options.CudaGraphs = None,
    compile_level: options.CompileLevel = 0,
    max_choices: options.MaxChoices = 16,
    max_queue_size: options.MaxQueueSize = 1024,
    max_open_requests: options.MaxOpenRequests = 8192,
    max_requests_per_identity: options.MaxRequestsPerIdentity = 0,
    default_max_tokens: options.DefaultMaxTokens = 256,
    default_time_limit: options.DefaultTimeLimit = 3600.0,
    max_time_limit: options.MaxTimeLimit = 86400.0,
    max_lease: options.MaxLease = 300.0,
    result_retention: options.ResultRetention = 300.0,
    max_kept_results: options.MaxKeptResults = 1000,
    max_kept_bytes: options.MaxKeptBytes = 64 << 20,
    drain_timeout: options.DrainTimeout = 30.0,
    in_process: options.InProcess = False,
    hang_timeout: options.HangTimeout = 10.0,
    log_level: options.LogLevel = "info",
) -> None:
    """Serve a model until a signal comes."""
    # Imported here: --help is to be fast.
    from engine.config import ContinuousBatchingConfig, LoadConfig
    from engine.errors import ConfigError
    from engine.local_client import LocalEngineClient
    from engine.process.client import ProcessEngineClient
    from service.config import ServiceConfig

    try:
        config = ServiceConfig(
            listen=tuple(listen),
            served_name=served_name,
            insecure=insecure,
            control=control,
            tls_cert=tls_cert,
            tls_key=tls_key,
            tls_client_ca=tls_client_ca,
            auth_file=auth_file,
            max_requests_per_identity=max_requests_per_identity,
            keepalive_interval_s=keepalive_interval,
            max_connection_age_s=max_connection_age,
            max_connection_age_grace_s=max_connection_age_grace,
            drain_timeout_s=drain_timeout,
            max_choices=max_choices,
            scheduler=scheduler,
            prefix_cache=prefix_cache,
            max_queue_size=max_queue_size,
            max_open_requests=max_open_requests,
            default_max_tokens=default_max_tokens,
            default_time_limit_s=default_time_limit,
            max_time_limit_s=max_time_limit,
            max_message_bytes=max_message_bytes,
            max_lease_s=max_lease,
            result_retention_s=result_retention,
            max_kept_results=max_kept_results,
            max_kept_bytes=max_kept_bytes,
            unix_socket_mode=_mode(unix_socket_mode),
            unix_socket_group=unix_socket_group,
            log_level=log_level.lower(),
        )
        batching = ContinuousBatchingConfig(
            block_size=block_size,
            num_blocks=num_blocks,
            max_batch_tokens=max_batch_tokens,
            max_memory_percent=max_memory_percent,
            max_requests_per_batch=max_requests_per_batch,
            max_queue_size=config.max_queue_size,
            scheduler_type=config.scheduler,
            allow_block_sharing=config.prefix_cache,
            cpu_offload_space=cpu_offload_space,
            use_async_batching=async_batching,
            use_cuda_graph=cuda_graphs,
            default_compile_level=compile_level,
            per_request_processors=True,
        )
        load = LoadConfig(
            dtype=dtype,  # type: ignore[arg-type]
            device=device,
            threads=threads,
            attention=attention,  # type: ignore[arg-type]
        )
        client: EngineClient
        if in_process:
            client = LocalEngineClient(model or default_model(), batching, load)
        else:
            client = ProcessEngineClient(
                model or default_model(),
                batching,
                load,
                log_level=config.log_level,
                hang_timeout_s=hang_timeout,
            )
    except ConfigError as error:
        # Named as the flag: the rest of the message is the option's own.
        option = _RENAMED.get(error.option, error.option)
        flag = option.removesuffix("_s").replace("_", "-")
        message = str(error).removeprefix(f"{error.option}: ")
        typer.echo(f"headrace-server: --{flag}: {message}", err=True)
        raise typer.Exit(2) from error

    # Imports take a while on a cold machine: say something before.
    typer.echo(f"headrace-server {_version()}: starting", err=True)
    from service.process import run

    raise typer.Exit(run(config, client))


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
    app()
