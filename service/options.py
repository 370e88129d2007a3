"""The options of `headrace-server serve`: for each flag its type, its environment variable, its
help and its place in it. The defaults stand in the signature of `service.cli.serve`.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

_NETWORK = "Network"
_MODEL = "Model and engine"
_REQUESTS = "Requests and results"
_PROCESS = "Process"


def _option(name: str, variable: str, text: str, panel: str, **more: Any) -> Any:
    return typer.Option(
        f"--{name}", envvar=f"HEADRACE_{variable}", help=text, rich_help_panel=panel, **more
    )


Listen = Annotated[
    list[str],
    _option(
        "listen",
        "LISTEN",
        "Where to listen: host:port, \\[IPv6]:port or unix:/path. May be given several times; in "
        "the variable, separated by blanks.",
        _NETWORK,
    ),
]
Insecure = Annotated[
    bool,
    _option(
        "insecure",
        "INSECURE",
        "Allow addresses beyond this machine without TLS.",
        _NETWORK,
    ),
]
Control = Annotated[
    bool | None,
    _option(
        "control/--no-control",
        "CONTROL",
        "Serve ControlService, which sees and ends everybody's requests and the server itself, on "
        "all addresses, or on none.",
        _NETWORK,
        show_default="with --auth-file everywhere, else on loopback and Unix sockets",
    ),
]
TlsCert = Annotated[
    str | None,
    _option("tls-cert", "TLS_CERT", "The certificate chain, a PEM file.", _NETWORK),
]
TlsKey = Annotated[
    str | None, _option("tls-key", "TLS_KEY", "The certificate's key, a PEM file.", _NETWORK)
]
TlsClientCa = Annotated[
    str | None,
    _option(
        "tls-client-ca",
        "TLS_CLIENT_CA",
        "Authorities whose certificates clients must show, a PEM file.",
        _NETWORK,
    ),
]
AuthFile = Annotated[
    str | None,
    _option(
        "auth-file",
        "AUTH_FILE",
        "Who may call, a TOML file; without it everybody may.",
        _NETWORK,
    ),
]
KeepaliveInterval = Annotated[
    float,
    _option(
        "keepalive-interval",
        "KEEPALIVE_INTERVAL",
        "Seconds after which a quiet connection is asked whether its client is there.",
        _NETWORK,
    ),
]
MaxConnectionAge = Annotated[
    float,
    _option(
        "max-connection-age",
        "MAX_CONNECTION_AGE",
        "Seconds after which clients are told to connect anew; 0: never.",
        _NETWORK,
    ),
]
MaxConnectionAgeGrace = Annotated[
    float,
    _option(
        "max-connection-age-grace",
        "MAX_CONNECTION_AGE_GRACE",
        "Seconds that calls may go on after that; 0: without limit.",
        _NETWORK,
    ),
]
UnixSocketMode = Annotated[
    str,
    _option(
        "unix-socket-mode",
        "UNIX_SOCKET_MODE",
        "Permissions of Unix sockets, octal.",
        _NETWORK,
    ),
]
UnixSocketGroup = Annotated[
    str | None,
    _option(
        "unix-socket-group",
        "UNIX_SOCKET_GROUP",
        "The group that Unix sockets belong to, a name or a number.",
        _NETWORK,
        show_default="the process's",
    ),
]
MaxMessageBytes = Annotated[
    int,
    _option(
        "max-message-bytes",
        "MAX_MESSAGE_BYTES",
        "The largest message, either way.",
        _NETWORK,
    ),
]
Model = Annotated[
    str | None,
    _option(
        "model",
        "MODEL",
        "A model directory or hub id.",
        _MODEL,
        show_default="the demo model",
    ),
]
ServedName = Annotated[
    str | None,
    _option("served-name", "SERVED_NAME", "The model's name in the model card.", _MODEL),
]
Dtype = Annotated[
    str,
    _option(
        "dtype",
        "DTYPE",
        "Type of the weights: auto, float32, bfloat16 or float16.",
        _MODEL,
    ),
]
Device = Annotated[str, _option("device", "DEVICE", "auto, cpu, cuda or cuda:N.", _MODEL)]
Threads = Annotated[
    int | None,
    _option(
        "threads",
        "THREADS",
        "CPU threads for the model.",
        _MODEL,
        show_default="the CPUs that are allowed",
    ),
]
Attention = Annotated[
    str,
    _option(
        "attention",
        "ATTENTION",
        "What computes attention: torch, native (the C++ kernels for CPUs), or auto: the fastest "
        "that there is.",
        _MODEL,
    ),
]
BlockSize = Annotated[
    int, _option("block-size", "BLOCK_SIZE", "Tokens in a block of the KV cache.", _MODEL)
]
NumBlocks = Annotated[
    int | None,
    _option(
        "num-blocks",
        "NUM_BLOCKS",
        "Blocks of the KV cache.",
        _MODEL,
        show_default="from the memory",
    ),
]
MaxMemoryPercent = Annotated[
    float | None,
    _option(
        "max-memory-percent",
        "MAX_MEMORY_PERCENT",
        "The part of the free memory that the KV cache may take, above 0 and at most 1.",
        _MODEL,
        show_default="0.5 on a CPU, 0.8 on CUDA",
    ),
]
MaxBatchTokens = Annotated[
    int | None,
    _option(
        "max-batch-tokens",
        "MAX_BATCH_TOKENS",
        "Most tokens computed in one step.",
        _MODEL,
        show_default="1024 on a CPU, 8192 on CUDA",
    ),
]
MaxRequestsPerBatch = Annotated[
    int | None,
    _option(
        "max-requests-per-batch",
        "MAX_REQUESTS_PER_BATCH",
        "Most requests that run at the same time.",
        _MODEL,
        show_default="64 on a CPU, 256 on CUDA",
    ),
]
Scheduler = Annotated[
    str,
    _option(
        "scheduler",
        "SCHEDULER",
        "In which order requests run: priority, fifo or prefill_first.",
        _MODEL,
    ),
]
PrefixCache = Annotated[
    bool,
    _option(
        "prefix-cache/--no-prefix-cache",
        "PREFIX_CACHE",
        "Share the KV cache of common prefixes among requests.",
        _MODEL,
    ),
]
CpuOffloadSpace = Annotated[
    float,
    _option(
        "cpu-offload-space",
        "CPU_OFFLOAD_SPACE",
        "GiB of host memory for the KV cache of preempted requests; 0: none.",
        _MODEL,
    ),
]
AsyncBatching = Annotated[
    bool | None,
    _option(
        "async-batching/--no-async-batching",
        "ASYNC_BATCHING",
        "Prepare the next step while the last one runs.",
        _MODEL,
        show_default="on CUDA only",
    ),
]
CudaGraphs = Annotated[
    bool | None,
    _option(
        "cuda-graphs/--no-cuda-graphs",
        "CUDA_GRAPHS",
        "Capture all kinds of steps as CUDA graphs, or none.",
        _MODEL,
        show_default="decode steps on CUDA",
    ),
]
CompileLevel = Annotated[
    int,
    _option(
        "compile-level",
        "COMPILE_LEVEL",
        "How hard torch.compile works on the model, 0 (not at all) to 3.",
        _MODEL,
    ),
]
MaxChoices = Annotated[
    int,
    _option("max-choices", "MAX_CHOICES", "Most choices (n) of one request.", _REQUESTS),
]
MaxQueueSize = Annotated[
    int,
    _option(
        "max-queue-size",
        "MAX_QUEUE_SIZE",
        "Most requests that wait; more are refused.",
        _REQUESTS,
    ),
]
MaxOpenRequests = Annotated[
    int,
    _option(
        "max-open-requests",
        "MAX_OPEN_REQUESTS",
        "Most requests that run or are not read to their end.",
        _REQUESTS,
    ),
]
MaxRequestsPerIdentity = Annotated[
    int,
    _option(
        "max-requests-per-identity",
        "MAX_REQUESTS_PER_IDENTITY",
        "Most of those that one identity may have; 0: all.",
        _REQUESTS,
    ),
]
DefaultMaxTokens = Annotated[
    int,
    _option(
        "default-max-tokens",
        "DEFAULT_MAX_TOKENS",
        "max_tokens where a request does not say.",
        _REQUESTS,
    ),
]
DefaultTimeLimit = Annotated[
    float,
    _option(
        "default-time-limit",
        "DEFAULT_TIME_LIMIT",
        "Seconds a request may take where it does not say; 0: any.",
        _REQUESTS,
    ),
]
MaxTimeLimit = Annotated[
    float,
    _option(
        "max-time-limit",
        "MAX_TIME_LIMIT",
        "The longest time limit of a request, in seconds; 0: any.",
        _REQUESTS,
    ),
]
MaxLease = Annotated[
    float,
    _option("max-lease", "MAX_LEASE", "The longest lease of a session, seconds.", _REQUESTS),
]
ResultRetention = Annotated[
    float,
    _option(
        "result-retention",
        "RESULT_RETENTION",
        "Seconds that results are kept after a request's end.",
        _REQUESTS,
    ),
]
MaxKeptResults = Annotated[
    int,
    _option(
        "max-kept-results",
        "MAX_KEPT_RESULTS",
        "Most ended requests whose results are kept.",
        _REQUESTS,
    ),
]
MaxKeptBytes = Annotated[
    int,
    _option("max-kept-bytes", "MAX_KEPT_BYTES", "Most bytes of kept results.", _REQUESTS),
]
DrainTimeout = Annotated[
    float,
    _option(
        "drain-timeout",
        "DRAIN_TIMEOUT",
        "Seconds that live requests may go on after a signal.",
        _PROCESS,
    ),
]
InProcess = Annotated[
    bool,
    _option(
        "in-process",
        "IN_PROCESS",
        "Run the engine in the server's own process. By default it has one of its own, which is "
        "started again when it dies or hangs.",
        _PROCESS,
    ),
]
HangTimeout = Annotated[
    float,
    _option(
        "hang-timeout",
        "HANG_TIMEOUT",
        "Seconds without a step, with requests to compute, after which the engine's process is "
        "ended and started again (or 20 times the slowest recent step, if that is longer; "
        "with a model on a CPU only if it does not compute meanwhile). 0: never.",
        _PROCESS,
    ),
]
LogLevel = Annotated[
    str,
    _option("log-level", "LOG_LEVEL", "debug, info, warning or error.", _PROCESS),
]
