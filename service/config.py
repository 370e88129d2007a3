"""The service's options: what each means, its default and its bounds.

Every option is a flag of `headrace-server serve` and an environment variable HEADRACE_… (only
`service.cli` reads them). The engine's options are in `engine.config`. Configs are immutable and
checked when they are created, so every config is valid.
"""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ConfigError
from engine.option_fields import check_bounds, option
from engine.sampling_params import MAX_CHOICES
from service.address import Address, parse_address
from service.logs.form import LOG_FORMATS
from service.receiving import MIN_RECEIVE_BYTES

SCHEDULERS = ("fair", "priority", "fifo", "prefill_first")
SLOW_READERS = ("hold", "end")
FORMATS = tuple(
    sorted(
        module.name
        for module in pkgutil.iter_modules([str(Path(__file__).parent / "replies" / "formats")])
    )
)
"""The formats of replies: the names of their modules, which are not imported for it."""
LOG_LEVELS = ("debug", "info", "warning", "error")
MAX_ALIASES = 16
MAX_ALIAS = 128
DEFAULT_OPENAI = "127.0.0.1:8000"
MIB = 1 << 20
DAY_S = 86_400.0
NETWORK = "Network"
MODEL = "Model and engine"
REQUESTS = "Requests and results"
PROCESS = "Process"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """Options of the server. Raises ConfigError for a value out of bounds."""

    listen: tuple[str, ...] = option(
        ("127.0.0.1:50051",),
        "Addresses to listen on: `host:port`, `[IPv6]:port` or `unix:/path`; port 0 takes a free "
        "one.",
        more="The flag may be given several times; in the variable, addresses are separated by "
        "blanks.",
        group=NETWORK,
    )
    health_listen: str | None = option(
        None,
        "Serve health, and nothing else, also at this address, with threads of its own: in plain "
        "text, for probes.",
        group=NETWORK,
    )
    served_name: str | None = option(
        None,
        "The model's name in the model card; without it, the last part of the path.",
        group=MODEL,
    )
    served_alias: tuple[str, ...] = option(
        (),
        "Another name by which requests may call the model.",
        more="The flag may be given several times; in the variable, names are separated by blanks. "
        "At most 16, each of at most 128 characters without blanks.",
        group=MODEL,
    )
    reply_parser: str = option(
        "auto",
        "How the model writes reasoning and tool calls, so that they come apart from the text of "
        "[replies to conversations](chat.md): [a format](chat.md#what-replies-come-to), `auto` "
        "(by the chat template), `response_template` (as the tokenizer declares it) or `none`; or "
        "a format of your own, as `package.module:NAME`.",
        choices=("auto", "none", "response_template", *FORMATS),
        outside="NAME",
        group=MODEL,
    )
    gateway: bool = option(
        False,
        "Serve also `vllm.grpc.engine.VllmEngine`, by which [a gateway](gateway.md) such as smg "
        "calls engines, on all addresses.",
        more="Needs the extra `gateway`: `pip install 'headrace-server[gateway]'`.",
        group=NETWORK,
    )
    openai: str | None = option(
        None,
        "Serve OpenAI's HTTP API too, at this address: `host:port`; `--openai` alone: "
        f"`{DEFAULT_OPENAI}`.",
        more="By a process of its own, `headrace openai` ([OpenAI's API](#openais-api)); with TLS "
        "where the server has it. Needs the extra `openai`: `pip install 'headrace[openai]'`.",
        bare=DEFAULT_OPENAI,
        group=NETWORK,
    )
    openai_host: tuple[str, ...] = option(
        (),
        "A name that HTTP requests may have in `Host`, besides addresses and `localhost`: that of "
        "a proxy or of a Kubernetes service; `*`: any.",
        more="The flag may be given several times; in the variable, names are separated by blanks. "
        "So no page of a browser reaches the server by a name that its owner has turned.",
        group=NETWORK,
    )
    openai_origin: tuple[str, ...] = option(
        (),
        "A web page's origin, such as `https://app.example`, that may ask by HTTP (CORS); `*`: "
        "any.",
        more="The flag may be given several times; in the variable, they are separated by blanks.",
        group=NETWORK,
    )
    openai_ignore_unknown: bool = option(
        False,
        "Pass over members of HTTP requests that are unknown, instead of refusing them.",
        group=NETWORK,
    )
    insecure: bool = option(
        False,
        "Allow addresses that other machines can reach without TLS.",
        group=NETWORK,
    )
    control: bool | None = option(
        None,
        "Serve [ControlService](#watching-and-steering), which can see and end everybody's "
        "requests and stop the server, on all addresses; `--no-control`: on none.",
        group=NETWORK,
        shown="with --auth-file everywhere, else on loopback and Unix sockets",
    )
    tls_cert: str | None = option(
        None,
        "The certificate chain, a PEM file.",
        more="Needs `--tls-key`.",
        group=NETWORK,
    )
    tls_key: str | None = option(
        None,
        "The certificate's key, a PEM file.",
        more="Needs `--tls-cert`.",
        group=NETWORK,
    )
    tls_client_ca: str | None = option(
        None,
        "Certificate authorities, a PEM file: every client must present a certificate that one "
        "of them signed.",
        more="Needs TLS.",
        group=NETWORK,
    )
    auth_file: str | None = option(
        None,
        "The callers and what they may call, a TOML file: see [Callers](#callers).",
        more="Without it every client may call everything.",
        group=NETWORK,
    )
    max_requests_per_identity: int = option(
        0,
        "Most open requests of one identity; more are refused. 0: no limit per identity.",
        low=0,
        high=1_000_000,
        group=REQUESTS,
    )
    max_reserved_tokens: int = option(
        0,
        "Most tokens that running requests may reserve together; more are refused. A request "
        "reserves its prompt and the longest output of each of its choices.",
        more="A server with one caller needs no limit, since the queue and the cache limit it. "
        "Must be above `--default-max-tokens`.",
        low=1,
        high=2**53,
        zero="any number",
        group=REQUESTS,
    )
    max_reserved_tokens_per_identity: int = option(
        0,
        "Most tokens that one identity may reserve.",
        more="Must be above `--default-max-tokens`.",
        low=1,
        high=2**53,
        zero="all of them",
        group=REQUESTS,
    )
    keepalive_interval_s: float = option(
        60.0,
        "Seconds after which an idle connection is pinged; without an answer for 20 s it is "
        "closed.",
        low=10.0,
        high=DAY_S,
        group=NETWORK,
    )
    max_connections: int = option(
        1024,
        "Most concurrent connections of each address; one more is closed at once.",
        more="Fewer if the limit of open files is too low: 64 files are kept for the server "
        "itself, so that the connections of strangers cannot prevent a restart of the engine.",
        low=1,
        high=1_000_000,
        group=NETWORK,
    )
    max_streams_per_connection: int = option(
        256,
        "Most concurrent calls of one connection; its client holds further calls back.",
        low=1,
        high=1_000_000,
        group=NETWORK,
    )
    max_sessions: int = option(
        1024,
        "Most open sessions; more are refused. Some places are reserved for callers without one "
        "([each caller's share](#each-callers-share)).",
        low=1,
        high=1_000_000,
        group=NETWORK,
    )
    max_sessions_per_identity: int = option(
        0,
        "Most open sessions of one identity; more are refused. 0: no limit per identity.",
        low=0,
        high=1_000_000,
        group=NETWORK,
    )
    max_watches: int = option(
        256,
        "Most open health Watches, and most open WatchStatistics; more are refused (see [each "
        "caller's share](#each-callers-share)).",
        low=1,
        high=1_000_000,
        group=NETWORK,
    )
    message_timeout_s: float = option(
        20.0,
        "Seconds within which the message of a call that needs one must arrive.",
        low=0.1,
        high=3600.0,
        group=NETWORK,
    )
    max_connection_age_s: float = option(
        0.0,
        "Seconds after which a client is told to reconnect for further calls, so that "
        "connections spread over new replicas and clients authenticate again.",
        low=1.0,
        high=20 * DAY_S,
        zero="never",
        group=NETWORK,
    )
    max_connection_age_grace_s: float = option(
        0.0,
        "Seconds that the calls of such a connection may still go on; 0: no limit, which suits "
        "long streams.",
        low=0.0,
        high=20 * DAY_S,
        group=NETWORK,
    )
    drain_timeout_s: float = option(
        30.0,
        "Seconds that live requests may go on after a signal.",
        low=0.0,
        high=DAY_S,
        group=PROCESS,
    )
    max_queue_size: int = option(
        1024,
        "Most waiting requests; more are refused. Some places are reserved for callers without "
        "one ([each caller's share](#each-callers-share)).",
        low=1,
        high=1_000_000,
        group=REQUESTS,
    )
    max_choices: int = option(
        16,
        "Most choices (`n`) of one request.",
        more="Each takes a place among the running requests.",
        low=1,
        high=MAX_CHOICES,
        group=REQUESTS,
    )
    scheduler: str = option(
        "fair",
        "The order in which requests run: `fair` (the caller that has received the least service "
        "for its weight first, so that none waits for another's backlog; within a caller by "
        "`scheduling.priority`, then by arrival), `priority` (higher `scheduling.priority` "
        "first, of all callers, then by arrival; preempts lower ones), `fifo` (by arrival), or "
        "`prefill_first` (prompts before outputs); or a policy of your own, as "
        "`package.module:Class`.",
        more="The first two end a waiting request whose time limit cannot be met; the last two "
        "refuse priorities. [How they work](schedulers.md).",
        choices=SCHEDULERS,
        outside="Class",
        group=MODEL,
    )
    prefix_cache: bool = option(
        True,
        "Requests share the KV cache of common prefixes; `--no-prefix-cache` turns it off.",
        more="Only full blocks are shared, and only among requests with the same identity and "
        "`cache.salt`.",
        group=MODEL,
    )
    max_open_requests: int = option(
        8192,
        "Most requests that run or have unread results; more are refused. Some places are "
        "reserved for callers without one ([each caller's share](#each-callers-share)).",
        low=1,
        high=1_000_000,
        group=REQUESTS,
    )
    default_max_tokens: int = option(
        256,
        "`max_tokens` of requests that do not set it.",
        low=1,
        high=2**31 - 1,
        group=REQUESTS,
    )
    default_time_limit_s: float = option(
        3600.0,
        "Time limit of requests that do not set one, in seconds; 0: none, which needs "
        "`--max-time-limit 0` too.",
        low=0.0,
        high=365 * DAY_S,
        group=REQUESTS,
    )
    max_time_limit_s: float = option(
        DAY_S,
        "The longest time limit that a request may ask for, in seconds; 0: no maximum.",
        low=0.0,
        high=365 * DAY_S,
        group=REQUESTS,
    )
    max_receive_bytes: int = option(
        MIN_RECEIVE_BYTES,
        "The largest message that the server receives.",
        more="The context is that of the model's `config.json`; for a hub id that is not on this "
        "machine yet the default is 8 MiB. Parsing a message blocks every stream, at worst for "
        "about 30 ms per MiB.",
        low=64 << 10,
        high=1 << 30,
        served=(None,),
        group=NETWORK,
        shown="1 MiB, or 8 bytes for each token of the model's context if that is more",
    )
    max_send_bytes: int = option(
        16 * MIB,
        "The largest message that the server sends.",
        more="Clients accept 4 MiB by default; the server's messages have at most about 3 MiB, "
        "except prompts with details of each token, which may take half of this limit.",
        low=4 * MIB,
        high=1 << 30,
        group=NETWORK,
    )
    max_lease_s: float = option(
        300.0,
        "The longest lease of a session, in seconds.",
        low=0.0,
        high=DAY_S,
        group=REQUESTS,
    )
    result_retention_s: float = option(
        300.0,
        "Seconds that results of AddRequest, of Generate with a request id, and of leased sessions "
        "are kept after a request's end.",
        low=0.0,
        high=DAY_S,
        group=REQUESTS,
    )
    max_kept_results: int = option(
        1000,
        "Most ended requests whose results are kept; beyond it the caller with the most kept "
        "results loses its oldest.",
        low=0,
        high=1_000_000,
        group=REQUESTS,
    )
    max_kept_bytes: int = option(
        48 * MIB,
        "About how many bytes of memory kept results may take, with what live requests keep of "
        "what was read; beyond it the caller with the most bytes kept loses its oldest.",
        low=0,
        high=64 << 30,
        group=REQUESTS,
    )
    max_live_bytes: int = option(
        96 * MIB,
        "About how many bytes waiting and running requests may hold, in the front end and the "
        "engine's process together (see [Memory](#memory)); beyond it new ones are refused "
        "before any work is done for them.",
        low=MIB,
        high=1 << 40,
        zero="any number",
        group=REQUESTS,
    )
    max_undelivered_bytes: int = option(
        96 * MIB,
        "About how many bytes of memory the unread results of all requests may take (what is "
        "kept counts for `--max-kept-bytes` instead); beyond it, new requests of callers with "
        "more than their share are refused until results are read, and their running ones are "
        "held, or end.",
        low=MIB,
        high=1 << 40,
        zero="any number",
        group=REQUESTS,
    )
    max_unread_tokens: int = option(
        1024,
        "Most unread tokens of a request's output, all its choices together; see "
        "[sessions](sessions.md#clients-that-do-not-read).",
        low=1,
        high=1_000_000_000,
        group=REQUESTS,
    )
    max_unread_bytes: int = option(
        MIB,
        "About the most bytes of unread output of a request, if reached before "
        "`--max-unread-tokens` (tokens with many candidates).",
        low=1 << 10,
        high=1 << 30,
        group=REQUESTS,
    )
    slow_reader: str = option(
        "hold",
        "What happens to a request at that limit: `hold` computes no more of it until its output "
        "is read, `end` ends it.",
        choices=SLOW_READERS,
        group=REQUESTS,
    )
    max_hold_s: float = option(
        60.0,
        "Seconds that a held request waits to be read; then it ends with `RESULTS_NOT_READ`.",
        low=0.1,
        high=DAY_S,
        group=REQUESTS,
    )
    unix_socket_mode: int = option(
        0o660,
        "Permissions of Unix sockets, octal.",
        low=0,
        high=0o777,
        base=8,
        group=NETWORK,
    )
    unix_socket_group: str | None = option(
        None,
        "The group of Unix sockets, a name or a number; the server's user must be in it.",
        group=NETWORK,
        shown="the process's",
    )
    log_level: str = option(
        "info",
        "`debug`, `info`, `warning` or `error`.",
        choices=LOG_LEVELS,
        group=PROCESS,
    )
    log_level_of: tuple[str, ...] = option(
        (),
        "The log level of a module and those below it, as `MODULE=LEVEL`, such as "
        "`engine.scheduler=debug`, in both processes.",
        more="The flag may be given several times; in the variable, they are separated by blanks. "
        "An operator's SetLogLevel leaves them as they are.",
        group=PROCESS,
    )
    log_summary_s: float = option(
        10.0,
        "Seconds between [summary lines](#logs) in the log while there is work.",
        low=1.0,
        high=DAY_S,
        zero="none",
        group=PROCESS,
    )
    log_format: str = option(
        "console",
        "The format of the log: `console`, or `json`, [one object a line](#logs).",
        choices=LOG_FORMATS,
        group=PROCESS,
    )

    def __post_init__(self) -> None:
        if not self.listen:
            raise ConfigError(
                "listen", "is empty; give at least one address, such as 127.0.0.1:50051"
            )
        for address in self.listen:
            parse_address(address)
        if self.health_listen is not None:
            parse_address(self.health_listen, "health_listen")
        if self.openai is not None and parse_address(self.openai, "openai").path is not None:
            raise ConfigError(
                "openai", f"is {self.openai!r}; it must be host:port, since HTTP is served by TCP"
            )
        if self.openai is not None and self.tls_client_ca is not None:
            raise ConfigError(
                "openai",
                "cannot ask its clients for certificates, as tls_client_ca wants of every client; "
                "leave one of them out",
            ).naming("tls_client_ca")
        check_bounds(self)
        if len(self.served_alias) > MAX_ALIASES:
            raise ConfigError(
                "served_alias",
                f"has {len(self.served_alias)} names; at most {MAX_ALIASES} are allowed",
            )
        for alias in self.served_alias:
            if not (1 <= len(alias) <= MAX_ALIAS and alias.isprintable() and " " not in alias):
                raise ConfigError(
                    "served_alias",
                    f"is {alias[:MAX_ALIAS]!r}; a name must be 1 to {MAX_ALIAS} printable "
                    "characters without blanks",
                )
        for one in self.log_level_of:
            name, _, level = one.partition("=")
            if level not in LOG_LEVELS or not name.isascii() or not name.isprintable() or not name:
                raise ConfigError(
                    "log_level_of",
                    f"is {one[:MAX_ALIAS]!r}; it must be a module and one of "
                    f"{', '.join(LOG_LEVELS)}, such as engine.scheduler=debug",
                )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError(
                "tls_cert",
                "and tls_key belong together; give both files, or neither",
            ).naming("tls_key")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ConfigError(
                "tls_client_ca",
                "needs TLS; give tls_cert and tls_key too",
            ).naming("tls_cert", "tls_key")
        if self.max_connection_age_grace_s and not self.max_connection_age_s:
            raise ConfigError(
                "max_connection_age_grace_s",
                "needs max_connection_age_s",
            ).naming("max_connection_age_s")
        for name in ("max_reserved_tokens", "max_reserved_tokens_per_identity"):
            # A lower value would refuse every request that does not set max_tokens.
            if 0 < getattr(self, name) <= self.default_max_tokens:
                raise ConfigError(
                    name,
                    f"is {getattr(self, name)}; it must be above default_max_tokens, which is "
                    f"{self.default_max_tokens}, or 0",
                ).naming("default_max_tokens")
        if self.max_time_limit_s and not 0 < self.default_time_limit_s <= self.max_time_limit_s:
            raise ConfigError(
                "default_time_limit_s",
                f"is {self.default_time_limit_s:g}, where 0 is none, and max_time_limit_s is "
                f"{self.max_time_limit_s:g}; it must not be above it, unless that is 0 too",
            ).naming("max_time_limit_s")
        self._check_exposure()

    @property
    def uses_tls(self) -> bool:
        """Whether TCP addresses use TLS."""
        return self.tls_cert is not None

    def serves_control(self, address: Address) -> bool:
        """Whether ControlService is served on an address. With a callers' file, its permissions
        decide who may call it. Without one, only this machine may, unless configured otherwise.
        """
        if self.control is not None:
            return self.control
        return address.is_local or self.auth_file is not None

    def _check_exposure(self) -> None:
        """Refuse addresses where prompts and outputs would leave the machine unencrypted, unless
        the operator allows it.
        """
        if self.insecure or self.uses_tls:
            return
        listened = [("listen", text) for text in self.listen]
        if self.openai is not None:
            listened.append(("openai", self.openai))
        for option_name, text in listened:
            if not parse_address(text, option_name).is_local:
                raise ConfigError(
                    option_name,
                    f"{text} can be reached from other machines; give tls_cert and tls_key, or "
                    "allow plain text there with insecure",
                ).naming("tls_cert", "tls_key", "insecure")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig:
    """Which model is served, and in which processes. Raises ConfigError for a value out of
    bounds.
    """

    model: str | None = option(
        None,
        "A directory with `config.json`, safetensors and `tokenizer.json` (without: token ids "
        "only), or a hub id.",
        group=MODEL,
        shown="the demo model",
    )
    in_process: bool = option(
        False,
        "Run the engine in the server's own process instead of a separate one.",
        group=PROCESS,
    )
    hang_timeout_s: float | None = option(
        None,
        "The engine's process is ended and started again after this many seconds without a step "
        "while there are requests to compute, or after 20 times the slowest recent step if that "
        "is longer.",
        more="With a model on a CPU, only if the process uses no CPU time meanwhile, since steps "
        "may be long there. The same time applies to an idle engine that does not answer, and to "
        "a process that is stopped while it loads. 0: never. Not with `--in-process`.",
        low=0.0,
        high=DAY_S,
        group=PROCESS,
        shown="10",
    )

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.in_process and self.hang_timeout_s is not None:
            raise ConfigError(
                "hang_timeout_s",
                "is of an engine in a process of its own, which can be ended when it hangs; leave "
                "it out, or in_process",
            ).naming("in_process")
