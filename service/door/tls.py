"""The server's TLS credentials, from files that may be replaced while it runs.

gRPC asks for new credentials before each handshake, so a renewed certificate is used for the next
connection. Open connections are not affected. A new pair is used only if the key matches the
certificate.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import Any

import grpc

from engine.contract.errors import ConfigError
from service.door.network_config import NetworkOptions
from service.door.watched_files import WatchedFiles, read


@dataclass(frozen=True, slots=True)
class _Files:
    certificate: str
    key: str
    client_ca: str | None

    def load(self) -> grpc.ServerCertificateConfiguration:
        """Read the files.

        Raises:
            ConfigError: a file cannot be read or has the wrong content, or the key does not match.
        """
        certificate = _pem("tls_cert", self.certificate, b"CERTIFICATE-----")
        key = _pem("tls_key", self.key, b"PRIVATE KEY-----")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # gRPC would only report failed handshakes. No password: nobody is there to enter it.
            context.load_cert_chain(self.certificate, self.key, password="")
        except (ssl.SSLError, OSError, ValueError) as error:
            raise ConfigError(
                "tls_cert", f"{self.certificate} and {self.key} do not fit together: {error}"
            ) from error
        client_ca = None
        if self.client_ca is not None:
            client_ca = _pem("tls_client_ca", self.client_ca, b"CERTIFICATE-----")
            try:
                # The file, not its text, because comments need not be ASCII.
                context.load_verify_locations(cafile=self.client_ca)
            except (ssl.SSLError, OSError, ValueError) as error:
                raise ConfigError(
                    "tls_client_ca", f"{self.client_ca} cannot be used: {error}"
                ) from error
        return grpc.ssl_server_certificate_configuration(
            [(key, certificate)], root_certificates=client_ca
        )


class Tls:
    """The configured TLS files."""

    def __init__(self, config: NetworkOptions) -> None:
        """Read the files.

        Raises:
            ConfigError: a file cannot be read, or has the wrong content.
        """
        self._watched: WatchedFiles[grpc.ServerCertificateConfiguration] | None = None
        self._client_certificates = config.tls_client_ca is not None
        if config.tls_cert is not None and config.tls_key is not None:
            files = _Files(config.tls_cert, config.tls_key, config.tls_client_ca)
            paths: tuple[str, ...] = (files.certificate, files.key)
            if files.client_ca is not None:
                paths = (*paths, files.client_ca)
            self._watched = WatchedFiles("TLS files", paths, files.load, private=(files.key,))

    @property
    def is_used(self) -> bool:
        """Whether TLS files are configured."""
        return self._watched is not None

    def reload(self) -> None:
        """Read the files again now. If they cannot be used, this is logged, and nothing changes."""
        if self._watched is not None:
            self._watched.reload()

    def become(self, other: Tls) -> None:
        """Use the files of `other` for new connections from now on."""
        if self._watched is not None and other._watched is not None:
            self._watched.become(other._watched)

    def credentials(self) -> grpc.ServerCredentials | None:
        """Return the credentials for one port, or None for plain text. Each port needs separate
        credentials, because a change is reported to each only once.
        """
        watched = self._watched
        if watched is None:
            return None
        used = watched.current()

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal used
            current = watched.current()
            if current is used:
                return None  # unchanged: gRPC keeps its own copy
            used = current
            return current

        fetcher: Any = renewed  # its stub does not allow None for "nothing new"
        return grpc.dynamic_ssl_server_credentials(used, fetcher, self._client_certificates)


def _pem(option: str, path: str, mark: bytes) -> bytes:
    content = read(option, path)
    if mark not in content:
        raise ConfigError(option, f"{path} is not a PEM file of the right kind")
    return content
