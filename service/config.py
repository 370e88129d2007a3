"""The service's options: what each means, its default and its bounds.

Every option is a flag of `headrace-server serve` and an environment variable HEADRACE_…
(`service.cli` is the only place that reads them). The engine's options are in `engine.config`.
Frozen and checked when made: a config that exists is valid.
"""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from urllib.parse import quote

from engine.errors import ConfigError
from engine.sampling_params import MAX_CHOICES
from service.logs.form import LOG_FORMATS
from service.receiving import MIN_RECEIVE_BYTES

SCHEDULERS = ("fair", "priority", "fifo", "prefill_first")
SLOW_READERS = ("pause", "end")
LOG_LEVELS = ("debug", "info", "warning", "error")
MIB = 1 << 20
DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """Options of the server. Raises ConfigError for a value out of bounds.

    Attributes:
        listen: addresses to listen on, at least one: "host:port", "[::]:port" or "unix:/path"; port
            0 takes a free one.
        health_listen: an address at which health alone is answered, in plain text, by threads of
            its own (`service.health_listener`); None: there is none.
        served_name: the model's name in the model card; None: the last part of its path.
        insecure: allow addresses beyond loopback without TLS.
        control: on which addresses ControlService is served; None: on those that only this machine
            can reach; True: on all; False: on none.
        tls_cert, tls_key: PEM files of the certificate chain and its key; both or none. TLS is
            then used on all TCP addresses. They may be exchanged while the server runs.
        tls_client_ca: PEM file of the authorities whose certificates clients must show; needs
            tls_cert. None: clients show none.
        auth_file: who may call (see `service.callers`); None: everybody may call everything.
        max_requests_per_identity: how many of max_open_requests one identity may have; 0: all of
            them; at most 1,000,000.
        max_reserved_tokens, max_reserved_tokens_per_identity: how many tokens the running requests
            of all, and of one identity, may reserve: prompts, and the longest outputs. 0: any
            number; else above default_max_tokens, at most 2^53.
        keepalive_interval_s: how often a quiet connection is asked whether its client is still
            there; 10 s to a day.
        max_connections: how many connections each address takes at a time; one more is closed. 1 to
            1,000,000.
        max_streams_per_connection: how many calls of a connection may be open; its client waits
            with more. 1 to 1,000,000.
        max_sessions, max_sessions_per_identity: how many sessions may be open, of all and of one
            identity; 1 to 1,000,000; 0 to 1,000,000, 0: all of them.
        max_watches: how many health Watches may be open, and how many WatchStatistics; 1 to
            1,000,000.
        message_timeout_s: within what time the message of a call that has one must be there; 0.1 s
            to an hour.
        max_connection_age_s: after about how long a connection is closed to new calls, so that
            its client connects anew; 0: never; else a second to 20 days.
        max_connection_age_grace_s: how long the calls of such a connection may go on; 0: as long
            as they like; at most 20 days.
        drain_timeout_s: how long live requests may go on after the first signal; 0 to a day.
        max_queue_size: how many requests may wait in the engine; one more is refused. 1 to
            1,000,000.
        max_choices: the most choices (n) of one request; 1 to 128.
        scheduler: in which order requests run: "fair" (the least served caller's first), "priority"
            (the highest first, of all callers), "fifo" or "prefill_first". The last two do not heed
            scheduling.priority, and refuse it.
        prefix_cache: whether requests may share the blocks of a common prefix.
        max_open_requests: how many requests may run, or have results that their stream has not
            read. 1 to 1,000,000.
        default_max_tokens: max_tokens where a request does not say; 1 to 2^31 − 1.
        default_time_limit_s: the time limit where a request does not say; 0: none; at most
            max_time_limit_s.
        max_time_limit_s: the longest time limit of a request; 0: any.
        max_receive_bytes: the largest message that is received; 64 KiB to 1 GiB. It is parsed on
            the event loop, at worst about 30 ms a MiB (`service.receiving`).
        max_send_bytes: the largest message that is sent; 4 MiB (a session's messages come to 2 MiB
            and one event more) to 1 GiB.
        max_lease_s: the longest lease of a session; 0 to a day.
        result_retention_s: how long an ended request's results are kept; 0 to a day.
        max_kept_results, max_kept_bytes: how many ended requests are kept, and about how many
            bytes of results; beyond them the oldest go. 0 to 1,000,000; 0 to 64 GiB.
        max_live_bytes: about how many bytes the requests that wait or run may hold, in the front
            end and in the engine's process together (`service.footprint`); beyond it new ones are
            refused. 0: any number; else 1 MiB to 1 TiB.
        max_undelivered_bytes: about how much memory results may take that wait to be read, of all
            requests together, but for ended ones that are kept; beyond it new requests are
            refused. 0: any number; else 1 MiB to 1 TiB.
        max_unread_tokens, max_unread_bytes: how many tokens of a request's output may wait to be
            read, and about how many bytes; the first one counts. 1 to 1,000,000,000; 1 KiB to
            1 GiB.
        slow_reader: what then becomes of the request: "pause" holds it until it is read, "end" ends
            it.
        max_pause_s: how long a held request may wait before it is ended; 0.1 s to a day.
        unix_socket_mode: the permissions of Unix sockets.
        unix_socket_group: whose group they belong to, a name or a number; None: the process's.
        log_level: debug, info, warning or error.
        log_format: how what the server says looks: "console", or "json" (one object a line).
    """

    listen: tuple[str, ...] = ("127.0.0.1:50051",)
    health_listen: str | None = None
    served_name: str | None = None
    insecure: bool = False
    control: bool | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    auth_file: str | None = None
    max_requests_per_identity: int = 0
    max_reserved_tokens: int = 0
    max_reserved_tokens_per_identity: int = 0
    keepalive_interval_s: float = 60.0
    max_connections: int = 1024
    max_streams_per_connection: int = 256
    max_sessions: int = 1024
    max_sessions_per_identity: int = 0
    max_watches: int = 256
    message_timeout_s: float = 20.0
    max_connection_age_s: float = 0.0
    max_connection_age_grace_s: float = 0.0
    drain_timeout_s: float = 30.0
    max_queue_size: int = 1024
    max_choices: int = 16
    scheduler: str = "fair"
    prefix_cache: bool = True
    max_open_requests: int = 8192
    default_max_tokens: int = 256
    default_time_limit_s: float = 3600.0
    max_time_limit_s: float = DAY_S
    max_receive_bytes: int = MIN_RECEIVE_BYTES
    max_send_bytes: int = 16 * MIB
    max_lease_s: float = 300.0
    result_retention_s: float = 300.0
    max_kept_results: int = 1000
    max_kept_bytes: int = 48 * MIB
    max_live_bytes: int = 96 * MIB
    max_undelivered_bytes: int = 96 * MIB
    max_unread_tokens: int = 1024
    max_unread_bytes: int = MIB
    slow_reader: str = "pause"
    max_pause_s: float = 60.0
    unix_socket_mode: int = 0o660
    unix_socket_group: str | None = None
    log_level: str = "info"
    log_format: str = "console"

    def __post_init__(self) -> None:
        if not self.listen:
            raise ConfigError(
                "listen", "is empty; give at least one address, such as 127.0.0.1:50051"
            )
        for address in self.listen:
            parse_address(address)
        if self.health_listen is not None:
            parse_address(self.health_listen, "health_listen")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError(
                "tls_cert", "and tls_key belong together; give both files, or neither"
            )
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ConfigError("tls_client_ca", "needs TLS; give tls_cert and tls_key too")
        _within("max_requests_per_identity", self.max_requests_per_identity, 0, 1_000_000)
        _within("keepalive_interval_s", self.keepalive_interval_s, 10, DAY_S)
        _within("max_connections", self.max_connections, 1, 1_000_000)
        _within("max_streams_per_connection", self.max_streams_per_connection, 1, 1_000_000)
        _within("max_sessions", self.max_sessions, 1, 1_000_000)
        _within("max_sessions_per_identity", self.max_sessions_per_identity, 0, 1_000_000)
        _within("max_watches", self.max_watches, 1, 1_000_000)
        _within("message_timeout_s", self.message_timeout_s, 0.1, 3600)
        if self.max_connection_age_s:
            _within("max_connection_age_s", self.max_connection_age_s, 1, 20 * DAY_S)
        _within("max_connection_age_grace_s", self.max_connection_age_grace_s, 0, 20 * DAY_S)
        if self.max_connection_age_grace_s and not self.max_connection_age_s:
            raise ConfigError("max_connection_age_grace_s", "needs max_connection_age_s")
        _within("drain_timeout_s", self.drain_timeout_s, 0, DAY_S)
        _within("max_queue_size", self.max_queue_size, 1, 1_000_000)
        _within("max_choices", self.max_choices, 1, MAX_CHOICES)
        if self.scheduler not in SCHEDULERS:
            raise ConfigError(
                "scheduler", f"is {self.scheduler!r}; it must be one of {', '.join(SCHEDULERS)}"
            )
        _within("max_open_requests", self.max_open_requests, 1, 1_000_000)
        _within("default_max_tokens", self.default_max_tokens, 1, 2**31 - 1)
        for option in ("max_reserved_tokens", "max_reserved_tokens_per_identity"):
            if getattr(self, option):  # less would refuse every request that does not say
                _within(option, getattr(self, option), self.default_max_tokens + 1, 2**53)
        _within("max_time_limit_s", self.max_time_limit_s, 0, 365 * DAY_S)
        _within(
            "default_time_limit_s",
            self.default_time_limit_s,
            0,
            self.max_time_limit_s or 365 * DAY_S,
        )
        if self.max_time_limit_s and not self.default_time_limit_s:
            raise ConfigError(
                "default_time_limit_s",
                "is 0 (none), above max_time_limit_s; set max_time_limit_s to 0 too",
            )
        _within("max_receive_bytes", self.max_receive_bytes, 64 << 10, 1 << 30)
        _within("max_send_bytes", self.max_send_bytes, 4 * MIB, 1 << 30)
        _within("max_lease_s", self.max_lease_s, 0, DAY_S)
        _within("result_retention_s", self.result_retention_s, 0, DAY_S)
        _within("max_kept_results", self.max_kept_results, 0, 1_000_000)
        _within("max_kept_bytes", self.max_kept_bytes, 0, 64 << 30)
        for option in ("max_live_bytes", "max_undelivered_bytes"):
            if getattr(self, option):
                _within(option, getattr(self, option), MIB, 1 << 40)
        _within("max_unread_tokens", self.max_unread_tokens, 1, 1_000_000_000)
        _within("max_unread_bytes", self.max_unread_bytes, 1 << 10, 1 << 30)
        if self.slow_reader not in SLOW_READERS:
            raise ConfigError(
                "slow_reader",
                f"is {self.slow_reader!r}; it must be one of {', '.join(SLOW_READERS)}",
            )
        _within("max_pause_s", self.max_pause_s, 0.1, DAY_S)
        _within("unix_socket_mode", self.unix_socket_mode, 0, 0o777)
        if self.log_level not in LOG_LEVELS:
            raise ConfigError(
                "log_level", f"is {self.log_level!r}; it must be one of {', '.join(LOG_LEVELS)}"
            )
        if self.log_format not in LOG_FORMATS:
            raise ConfigError(
                "log_format", f"is {self.log_format!r}; it must be one of {', '.join(LOG_FORMATS)}"
            )
        self._check_exposure()

    @property
    def uses_tls(self) -> bool:
        """Whether TCP addresses speak TLS."""
        return self.tls_cert is not None

    def serves_control(self, address: Address) -> bool:
        """Whether ControlService is served on an address. Where callers are known, permissions say
        who may call it; where they are not, only this machine may, unless told otherwise.
        """
        if self.control is not None:
            return self.control
        return address.is_local or self.auth_file is not None

    def _check_exposure(self) -> None:
        """Prompts and outputs do not leave the machine in the clear unless somebody said so."""
        if self.insecure or self.uses_tls:
            return
        for text in self.listen:
            if not parse_address(text).is_local:
                raise ConfigError(
                    "listen",
                    f"{text} can be reached from other machines; give tls_cert and tls_key, or "
                    "allow plain text there with insecure",
                )


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen. `path`: of a Unix socket; else host and port."""

    host: str = ""
    port: int = 0
    path: str | None = None

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        if self.path is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def target(self) -> str:
        """The address as gRPC writes it, for servers and clients: a path's characters that mean
        something in a URI are escaped, since it takes `unix:` for one.
        """
        if self.path is not None:
            return f"unix:{quote(os.fsencode(self.path))}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, option: str = "listen") -> Address:
    """Read an address.

    Raises:
        ConfigError: it is not one; of the option that it was given by.
    """
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if path.startswith("//"):
            path = path[2:]
        # The kernel's sockaddr_un has room for 107 bytes of path.
        if not path or "\0" in path or len(os.fsencode(path)) > 107:
            raise ConfigError(
                option, f"{text!r} is not a path of 1 to 107 bytes, as in unix:/run/headrace.sock"
            )
        return Address(path=path)
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    if (
        not colon
        or not host
        or (":" in host) != bracketed
        or not (port.isascii() and port.isdigit())
    ):
        raise ConfigError(
            option, f"{text!r} is not an address; write host:port, [IPv6]:port or unix:/path"
        )
    if int(port) > 65535:
        raise ConfigError(option, f"{text!r} has the port {port}; ports go up to 65535")
    return Address(host=host, port=int(port))


def _within(option: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # false for NaN too
        raise ConfigError(option, f"is {value}; it must be between {low:g} and {high:g}")
