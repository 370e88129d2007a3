"""The options of `headrace-server serve`, in groups: for each flag its type, its environment
variable, its help, its place in it and its default. `grouped` makes flags of them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Annotated, Any, get_type_hints

import typer

from engine.errors import ConfigError, HeadraceError

_NETWORK = "Network"
_MODEL = "Model and engine"
_REQUESTS = "Requests and results"
_PROCESS = "Process"


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer wants it: for parameters that are groups of options (the dataclasses of
    this module), one parameter for each of their fields.
    """
    groups: dict[str, type] = {
        name: kind for name, kind in get_type_hints(command).items() if name != "return"
    }
    parameters: list[inspect.Parameter] = []
    for kind in groups.values():
        hints = get_type_hints(kind, include_extras=True)
        parameters += [
            inspect.Parameter(
                one.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=_default(one),
                annotation=hints[one.name],
            )
            for one in fields(kind)
        ]

    def flat(**values: Any) -> None:
        command(
            **{
                name: kind(**{one.name: values[one.name] for one in fields(kind)})
                for name, kind in groups.items()
            }
        )

    flat.__name__, flat.__doc__ = command.__name__, command.__doc__
    flat.__annotations__ = {one.name: one.annotation for one in parameters}
    # Typer asks for it; that functions may have one is not in their type.
    vars(flat)["__signature__"] = inspect.Signature(parameters)
    return flat


def _default(one: Field[Any]) -> Any:
    return one.default if one.default_factory is MISSING else one.default_factory()


def _option(flag: str, text: str, panel: str, **more: Any) -> Any:
    variable = flag.partition("/")[0].upper().replace("-", "_")
    return typer.Option(
        f"--{flag}", envvar=f"HEADRACE_{variable}", help=text, rich_help_panel=panel, **more
    )


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """Where the server listens, and who may call. Fields as of ServiceConfig."""

    listen: Annotated[
        list[str],
        _option(
            "listen",
            "Where to listen: host:port, \\[IPv6]:port or unix:/path. May be given several times; "
            "in the variable, separated by blanks.",
            _NETWORK,
        ),
    ] = field(default_factory=lambda: ["127.0.0.1:50051"])
    health_listen: Annotated[
        str | None,
        _option(
            "health-listen",
            "Also answer health at this address, and nothing else: in plain text, for probes, "
            "whatever goes on at the other addresses.",
            _NETWORK,
        ),
    ] = None
    insecure: Annotated[
        bool,
        _option(
            "insecure",
            "Allow addresses beyond this machine without TLS.",
            _NETWORK,
        ),
    ] = False
    control: Annotated[
        bool | None,
        _option(
            "control/--no-control",
            "Serve ControlService, which sees and ends everybody's requests and the server itself, "
            "on all addresses, or on none.",
            _NETWORK,
            show_default="with --auth-file everywhere, else on loopback and Unix sockets",
        ),
    ] = None
    tls_cert: Annotated[
        str | None,
        _option("tls-cert", "The certificate chain, a PEM file.", _NETWORK),
    ] = None
    tls_key: Annotated[
        str | None, _option("tls-key", "The certificate's key, a PEM file.", _NETWORK)
    ] = None
    tls_client_ca: Annotated[
        str | None,
        _option(
            "tls-client-ca",
            "Authorities whose certificates clients must show, a PEM file.",
            _NETWORK,
        ),
    ] = None
    auth_file: Annotated[
        str | None,
        _option(
            "auth-file",
            "Who may call, a TOML file; without it everybody may.",
            _NETWORK,
        ),
    ] = None
    keepalive_interval_s: Annotated[
        float,
        _option(
            "keepalive-interval",
            "Seconds after which a quiet connection is asked whether its client is there.",
            _NETWORK,
        ),
    ] = 60.0
    max_connections: Annotated[
        int,
        _option(
            "max-connections",
            "How many connections each address takes at a time.",
            _NETWORK,
        ),
    ] = 1024
    max_streams_per_connection: Annotated[
        int,
        _option(
            "max-streams-per-connection",
            "How many calls of a connection may be open; its client waits with more.",
            _NETWORK,
        ),
    ] = 256
    max_sessions: Annotated[
        int,
        _option(
            "max-sessions",
            "How many sessions may be open.",
            _NETWORK,
        ),
    ] = 1024
    max_sessions_per_identity: Annotated[
        int,
        _option(
            "max-sessions-per-identity",
            "How many of those one identity may have; 0: all of them.",
            _NETWORK,
        ),
    ] = 0
    max_watches: Annotated[
        int,
        _option(
            "max-watches",
            "How many health Watches may be open, and how many WatchStatistics.",
            _NETWORK,
        ),
    ] = 256
    message_timeout_s: Annotated[
        float,
        _option(
            "message-timeout",
            "Seconds within which the message of a call must be there.",
            _NETWORK,
        ),
    ] = 20.0
    max_connection_age_s: Annotated[
        float,
        _option(
            "max-connection-age",
            "Seconds after which clients are told to connect anew; 0: never.",
            _NETWORK,
        ),
    ] = 0.0
    max_connection_age_grace_s: Annotated[
        float,
        _option(
            "max-connection-age-grace",
            "Seconds that calls may go on after that; 0: without limit.",
            _NETWORK,
        ),
    ] = 0.0
    unix_socket_mode: Annotated[
        str,
        _option(
            "unix-socket-mode",
            "Permissions of Unix sockets, octal.",
            _NETWORK,
        ),
    ] = "0660"
    unix_socket_group: Annotated[
        str | None,
        _option(
            "unix-socket-group",
            "The group that Unix sockets belong to, a name or a number.",
            _NETWORK,
            show_default="the process's",
        ),
    ] = None
    max_receive_bytes: Annotated[
        int | None,
        _option(
            "max-receive-bytes",
            "The largest message that is received.",
            _NETWORK,
            show_default="1 MiB, or 8 bytes for each token of the model's context if that is more",
        ),
    ] = None
    max_send_bytes: Annotated[
        int,
        _option(
            "max-send-bytes",
            "The largest message that is sent.",
            _NETWORK,
        ),
    ] = 16 << 20


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The model, and the engine around it."""

    model: Annotated[
        str | None,
        _option(
            "model",
            "A model directory or hub id.",
            _MODEL,
            show_default="the demo model",
        ),
    ] = None
    served_name: Annotated[
        str | None,
        _option("served-name", "The model's name in the model card.", _MODEL),
    ] = None
    dtype: Annotated[
        str,
        _option(
            "dtype",
            "Type of the weights: auto, float32, bfloat16 or float16.",
            _MODEL,
        ),
    ] = "auto"
    device: Annotated[str, _option("device", "auto, cpu, cuda or cuda:N.", _MODEL)] = "auto"
    threads: Annotated[
        int | None,
        _option(
            "threads",
            "CPU threads for the model.",
            _MODEL,
            show_default="the CPUs that are allowed",
        ),
    ] = None
    attention: Annotated[
        str,
        _option(
            "attention",
            "What computes attention: torch, native (the C++ kernels for CPUs), triton (the "
            "kernels for CUDA devices), varlen (torch's own for CUDA devices), or auto: the first "
            "of native, triton and varlen that can be had, else torch.",
            _MODEL,
        ),
    ] = "auto"
    quantization: Annotated[
        str,
        _option(
            "quantization",
            "int8: on a CPU, keep the bfloat16 weights of linear layers in half the memory, for "
            "results that differ a little; or none.",
            _MODEL,
        ),
    ] = "none"
    pack_weights: Annotated[
        bool | None,
        _option(
            "pack-weights/--no-pack-weights",
            "On a CPU, put bfloat16 weights in the order in which its kernel reads them.",
            _MODEL,
            show_default="where it pays",
        ),
    ] = None
    fuse_layers: Annotated[
        bool | None,
        _option(
            "fuse-layers/--no-fuse-layers",
            "Fuse layers: on a CPU bfloat16 norms, gates and rotary embeddings; on CUDA products.",
            _MODEL,
            show_default="on CUDA, and on a CPU where it pays",
        ),
    ] = None
    tensor_parallel: Annotated[
        str,
        _option(
            "tensor-parallel",
            "auto: divide the model among the processes that torchrun started; or none.",
            _MODEL,
        ),
    ] = "none"
    block_size: Annotated[
        int, _option("block-size", "Tokens in a block of the KV cache.", _MODEL)
    ] = 32
    num_blocks: Annotated[
        int | None,
        _option(
            "num-blocks",
            "Blocks of the KV cache.",
            _MODEL,
            show_default="from the memory",
        ),
    ] = None
    max_memory_percent: Annotated[
        float | None,
        _option(
            "max-memory-percent",
            "The part of the free memory that the KV cache may take, above 0 and at most 1.",
            _MODEL,
            show_default="0.5 on a CPU, 0.8 on CUDA",
        ),
    ] = None
    max_batch_tokens: Annotated[
        int | None,
        _option(
            "max-batch-tokens",
            "Most tokens computed in one step.",
            _MODEL,
            show_default="1024 on a CPU, 8192 on CUDA",
        ),
    ] = None
    max_requests_per_batch: Annotated[
        int | None,
        _option(
            "max-requests-per-batch",
            "Most requests that run at the same time.",
            _MODEL,
            show_default="64 on a CPU, 256 on CUDA",
        ),
    ] = None
    scheduler: Annotated[
        str,
        _option(
            "scheduler",
            "In which order requests run: fair (among callers), priority, fifo or prefill_first.",
            _MODEL,
        ),
    ] = "fair"
    target_step_time_s: Annotated[
        float | None,
        _option(
            "target-step-time",
            "About how many seconds a step takes in which requests decode: prompts beside them are "
            "cut in chunks for which that is enough. 0: any.",
            _MODEL,
            show_default="0.25 on a CPU, 0.05 on CUDA",
        ),
    ] = None
    prefix_cache: Annotated[
        bool,
        _option(
            "prefix-cache/--no-prefix-cache",
            "Share the KV cache of common prefixes among requests.",
            _MODEL,
        ),
    ] = True
    cpu_offload_space: Annotated[
        float,
        _option(
            "cpu-offload-space",
            "GiB of host memory for the KV cache of preempted requests; 0: none.",
            _MODEL,
        ),
    ] = 0.0
    async_batching: Annotated[
        bool | None,
        _option(
            "async-batching/--no-async-batching",
            "Prepare the next step while the last one runs.",
            _MODEL,
            show_default="on CUDA only",
        ),
    ] = None
    cuda_graphs: Annotated[
        bool | None,
        _option(
            "cuda-graphs/--no-cuda-graphs",
            "Capture all kinds of steps as CUDA graphs, or none.",
            _MODEL,
            show_default="decode steps on CUDA",
        ),
    ] = None
    compile_level: Annotated[
        int,
        _option(
            "compile-level",
            "How hard torch.compile works on the model, 0 (not at all) to 3.",
            _MODEL,
        ),
    ] = 0


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """What requests may ask for and what is kept of them. Fields as of ServiceConfig."""

    max_choices: Annotated[
        int,
        _option("max-choices", "Most choices (n) of one request.", _REQUESTS),
    ] = 16
    max_queue_size: Annotated[
        int,
        _option(
            "max-queue-size",
            "Most requests that wait; more are refused.",
            _REQUESTS,
        ),
    ] = 1024
    max_open_requests: Annotated[
        int,
        _option(
            "max-open-requests",
            "Most requests that run or are not read to their end.",
            _REQUESTS,
        ),
    ] = 8192
    max_live_bytes: Annotated[
        int,
        _option(
            "max-live-bytes",
            "Most bytes that waiting and running requests hold, in both processes; 0: any.",
            _REQUESTS,
        ),
    ] = 96 << 20
    max_reserved_tokens: Annotated[
        int,
        _option(
            "max-reserved-tokens",
            "Most tokens that running requests reserve, prompts and longest outputs; 0: any.",
            _REQUESTS,
        ),
    ] = 0
    max_reserved_tokens_per_identity: Annotated[
        int,
        _option(
            "max-reserved-tokens-per-identity",
            "Most of those that one identity may reserve; 0: all.",
            _REQUESTS,
        ),
    ] = 0
    max_requests_per_identity: Annotated[
        int,
        _option(
            "max-requests-per-identity",
            "Most of those that one identity may have; 0: all.",
            _REQUESTS,
        ),
    ] = 0
    default_max_tokens: Annotated[
        int,
        _option(
            "default-max-tokens",
            "max_tokens where a request does not say.",
            _REQUESTS,
        ),
    ] = 256
    default_time_limit_s: Annotated[
        float,
        _option(
            "default-time-limit",
            "Seconds a request may take where it does not say; 0: any.",
            _REQUESTS,
        ),
    ] = 3600.0
    max_time_limit_s: Annotated[
        float,
        _option(
            "max-time-limit",
            "The longest time limit of a request, in seconds; 0: any.",
            _REQUESTS,
        ),
    ] = 86400.0
    max_lease_s: Annotated[
        float,
        _option("max-lease", "The longest lease of a session, seconds.", _REQUESTS),
    ] = 300.0
    result_retention_s: Annotated[
        float,
        _option(
            "result-retention",
            "Seconds that results are kept after a request's end.",
            _REQUESTS,
        ),
    ] = 300.0
    max_kept_results: Annotated[
        int,
        _option(
            "max-kept-results",
            "Most ended requests whose results are kept.",
            _REQUESTS,
        ),
    ] = 1000
    max_kept_bytes: Annotated[
        int,
        _option("max-kept-bytes", "Most bytes of kept results.", _REQUESTS),
    ] = 48 << 20
    max_undelivered_bytes: Annotated[
        int,
        _option(
            "max-undelivered-bytes",
            "Most bytes of results that were not read, of all requests; 0: any.",
            _REQUESTS,
        ),
    ] = 96 << 20
    max_unread_tokens: Annotated[
        int,
        _option(
            "max-unread-tokens",
            "Tokens of a request's output that may wait to be read.",
            _REQUESTS,
        ),
    ] = 1024
    max_unread_bytes: Annotated[
        int,
        _option(
            "max-unread-bytes",
            "About how many bytes of it, where that is less.",
            _REQUESTS,
        ),
    ] = 1 << 20
    slow_reader: Annotated[
        str,
        _option(
            "slow-reader",
            "What then becomes of the request: pause (it waits to be read) or end.",
            _REQUESTS,
        ),
    ] = "pause"
    max_pause_s: Annotated[
        float,
        _option(
            "max-pause",
            "Seconds that a paused request waits to be read before it is ended.",
            _REQUESTS,
        ),
    ] = 60.0


@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    """The server's processes."""

    drain_timeout_s: Annotated[
        float,
        _option(
            "drain-timeout",
            "Seconds that live requests may go on after a signal.",
            _PROCESS,
        ),
    ] = 30.0
    in_process: Annotated[
        bool,
        _option(
            "in-process",
            "Run the engine in the server's own process. By default it has one of its own, which "
            "is started again when it dies or hangs.",
            _PROCESS,
        ),
    ] = False
    hang_timeout_s: Annotated[
        float | None,
        _option(
            "hang-timeout",
            "Seconds without a step, with requests to compute, after which the engine's process is "
            "ended and started again (or 20 times the slowest recent step, if that is longer; "
            "with a model on a CPU only if it does not compute meanwhile). Without requests: "
            "seconds without an answer; while it loads: seconds for which it is stopped. 0: never.",
            _PROCESS,
            show_default="10",
        ),
    ] = None
    log_level: Annotated[
        str,
        _option("log-level", "debug, info, warning or error.", _PROCESS),
    ] = "info"
    log_format: Annotated[
        str,
        _option(
            "log-format",
            "How what the server says looks: console, or json (one object a line).",
            _PROCESS,
        ),
    ] = "console"


_RENAMED = {
    "hang_timeout": "hang_timeout_s",
    "target_step_time": "target_step_time_s",
    "default_compile_level": "compile_level",
    "scheduler_type": "scheduler",
    "allow_block_sharing": "prefix_cache",
    "use_async_batching": "async_batching",
    "use_cuda_graph": "cuda_graphs",
}
"""Options of the engine whose fields here have other names."""
_FLAGS = {
    one.name: "--" + one.name.removesuffix("_s").replace("_", "-")
    for group in (NetworkOptions, EngineOptions, RequestOptions, ProcessOptions)
    for one in fields(group)
}
_FLAGS |= {name: _FLAGS[own] for name, own in _RENAMED.items()}
_COMPOUND = re.compile(r"(?<![-\w])(?:" + "|".join(name for name in _FLAGS if "_" in name) + r")\b")


def describe(error: HeadraceError) -> str:
    """An error of the start, in the words of whoever typed the command: flags stand in place of the
    names that the engine's and the service's configs have for them (num_blocks → --num-blocks).
    """
    message = str(error)
    if isinstance(error, ConfigError):  # it begins with the option, which may be any word
        flag = _FLAGS.get(error.option, error.option)
        message = flag + message.removeprefix(error.option)
    return _COMPOUND.sub(lambda found: _FLAGS[found[0]], message)
