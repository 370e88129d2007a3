"""The server's TLS credentials, from files."""

from __future__ import annotations

from pathlib import Path

import grpc

from engine.errors import ConfigError
from service.config import ServiceConfig


def server_credentials(config: ServiceConfig) -> grpc.ServerCredentials | None:
    """The credentials that the configuration names; None: plain text.

    Raises:
        ConfigError: a file cannot be read, or holds something else.
    """
    if config.tls_cert is None or config.tls_key is None:
        return None
    certificate = _read("tls_cert", config.tls_cert, b"CERTIFICATE-----")
    key = _read("tls_key", config.tls_key, b"PRIVATE KEY-----")
    return grpc.ssl_server_credentials([(key, certificate)])


def _read(option: str, path: str, mark: bytes) -> bytes:
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(option, f"{path} cannot be read: {error.strerror}") from error
    if mark not in content:
        raise ConfigError(option, f"{path} is not a PEM file of the right kind")
    return content
