"""The service's options: what each means, its default and its bounds.

Every option is a flag of `headrace-server serve`, an environment variable HEADRACE_… (read only by
`service.command.cli`) and a key of a config file (`service.command.config_file`). The engine's
options are in `engine.contract.config`. Configs are immutable and checked when they are created, so
every config is valid.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from engine.contract.errors import ConfigError
from engine.contract.option_fields import check_bounds, option
from engine.contract.sampling_params import MAX_CHOICES
from service.door.network_config import DAY_S, MIB, NetworkOptions
from service.logs.form import LOG_FORMATS
from service.replies.families import FORMATS

SCHEDULERS = ("fair", "priority", "fifo", "prefill_first")
SLOW_READERS = ("hold", "end")
LOG_LEVELS = ("debug", "info", "warning", "error")
MAX_ALIASES = 16
MAX_ALIAS = 128
MODEL = "Model and engine"
REQUESTS = "Requests and results"
PROCESS = "Process"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig(NetworkOptions):
    """The options of the server. Raises ConfigError if a value is out of bounds."""

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
        "(the one that the chat template is proved to write), `response_template` (as the "
        "tokenizer declares it) or `none`; or a format of your own, as `package.module:NAME`.",
        choices=("auto", "none", "response_template", *FORMATS),
        outside="NAME",
        group=MODEL,
    )
    chat_template: str | None = option(
        None,
        "A file with the chat template (Jinja) that lays out [conversations](chat.md), in place of "
        "the model's own.",
        more="Its name is in the model card. Which format of replies it writes is proved as of any "
        "template.",
        group=MODEL,
    )
    max_requests_per_identity: int = option(
        0,
        "Most open requests of one identity; more are refused. 0: no limit per identity.",
        low=0,
        high=1_000_000,
        reloads="for requests that come then",
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
        reloads="for requests that come then",
        group=REQUESTS,
    )
    max_reserved_tokens_per_identity: int = option(
        0,
        "Most tokens that one identity may reserve.",
        more="Must be above `--default-max-tokens`.",
        low=1,
        high=2**53,
        zero="all of them",
        reloads="for requests that come then",
        group=REQUESTS,
    )
    drain_timeout_s: float = option(
        30.0,
        "Seconds that live requests may go on after a signal.",
        low=0.0,
        high=DAY_S,
        reloads="for a drain that begins then",
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
        reloads="for requests that come then",
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
        reloads="for requests that come then",
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
    log_level: str = option(
        "info",
        "`debug`, `info`, `warning` or `error`.",
        choices=LOG_LEVELS,
        reloads="in both processes; unchanged, it leaves what an operator has set",
        group=PROCESS,
    )
    log_level_of: tuple[str, ...] = option(
        (),
        "The log level of a module and those below it, as `MODULE=LEVEL`, such as "
        "`engine.scheduler=debug`, in both processes.",
        more="The flag may be given several times; in the variable, they are separated by blanks. "
        "An operator's SetLogLevel leaves them as they are.",
        reloads="in both processes; a module that is no longer named has the general level",
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
        NetworkOptions.__post_init__(self)  # super() does not work in a class with slots
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig:
    """Which model is served, and in which processes. Raises ConfigError if a value is out of
    bounds.
    """

    config: str | None = option(
        None,
        "A [TOML file](configuration.md) with options; flags and variables win over it.",
        group=PROCESS,
    )
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


def notify_socket(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the socket on which systemd is told the server's state; None if systemd did not start
    it.
    """
    return environ.get("NOTIFY_SOCKET") or None
