"""The server's network options: addresses, TLS, callers, and limits on connections.

`service.config.ServiceConfig` combines them with the other options, and is passed to all code.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.contract.errors import ConfigError
from engine.contract.option_fields import option
from service.door.address import Address, parse_address
from service.door.receiving import MIN_RECEIVE_BYTES

DEFAULT_OPENAI = "127.0.0.1:8000"
MIB = 1 << 20
DAY_S = 86_400.0
NETWORK = "Network"


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkOptions:
    """The network options. Raises ConfigError for a value that contradicts another."""

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
        reloads="for connections that come then",
        group=NETWORK,
    )
    tls_key: str | None = option(
        None,
        "The certificate's key, a PEM file.",
        more="Needs `--tls-cert`.",
        reloads="for connections that come then",
        group=NETWORK,
    )
    tls_client_ca: str | None = option(
        None,
        "Certificate authorities, a PEM file: every client must present a certificate that one "
        "of them signed.",
        more="Needs TLS.",
        reloads="for connections that come then",
        group=NETWORK,
    )
    auth_file: str | None = option(
        None,
        "The callers and what they may call, a TOML file: see [Callers](#callers).",
        more="Without it every client may call everything.",
        reloads="for all calls, those that run included",
        group=NETWORK,
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
        reloads="for sessions that come then",
        group=NETWORK,
    )
    max_sessions_per_identity: int = option(
        0,
        "Most open sessions of one identity; more are refused. 0: no limit per identity.",
        low=0,
        high=1_000_000,
        reloads="for sessions that come then",
        group=NETWORK,
    )
    max_watches: int = option(
        256,
        "Most open health Watches, and most open WatchStatistics; more are refused (see [each "
        "caller's share](#each-callers-share)).",
        low=1,
        high=1_000_000,
        reloads="for Watches that come then",
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
        self._check_exposure()

    @property
    def uses_tls(self) -> bool:
        """Whether TCP addresses use TLS."""
        return self.tls_cert is not None

    def serves_control(self, address: Address) -> bool:
        """Return whether ControlService is served on an address. With a callers' file, its
        permissions decide who may call it. Without one, only this machine may, unless configured
        otherwise.
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
