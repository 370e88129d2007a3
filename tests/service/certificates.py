"""Certificates for tests, made with the openssl command."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.service.helpers import Harness

Pair = tuple[Path, Path]
needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="needs the openssl command"
)
_NEW_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
_SERVER_NAMES = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]


def make_certificate(
    folder: Path,
    name: str = "",
    *,
    subject: str = "localhost",
    alternative: str = "",
    signer: Pair | None = None,
) -> Pair:
    """A certificate and its key, the files' names beginning with `name`.

    Args:
        folder: where to put them.
        name: of the files.
        subject: the common name.
        alternative: the alternative names, as openssl writes them; by default this machine's.
        signer: the certificate and key that sign it; None: its own.
    """
    cert, key = folder / f"{name}cert.pem", folder / f"{name}key.pem"
    names = ["-addext", f"subjectAltName={alternative}"] if alternative else _SERVER_NAMES
    signed = ["-CA", str(signer[0]), "-CAkey", str(signer[1])] if signer is not None else []
    if signer is not None:
        signed += ["-addext", "basicConstraints=critical,CA:FALSE"]
    command = ["openssl", "req", "-x509", *_NEW_KEY, "-keyout", str(key), "-out", str(cert)]
    subprocess.run(
        [*command, "-subj", f"/CN={subject}", *names, *signed], check=True, capture_output=True
    )
    return cert, key


def port_of(h: Harness, place: int = 0) -> int:
    return int(h.server.addresses[place].rpartition(":")[2])


async def shown(port: int) -> str:
    """The certificate that the server shows to a new connection."""
    return await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port))


def secure(port: int, trusted: Pair, own: Pair | None = None) -> Any:
    credentials = grpc.ssl_channel_credentials(
        trusted[0].read_bytes(),
        own[1].read_bytes() if own is not None else None,
        own[0].read_bytes() if own is not None else None,
    )
    # Else two channels to one port would share a connection.
    options = [("grpc.use_local_subchannel_pool", 1)]
    return grpc.aio.secure_channel(f"localhost:{port}", credentials, options)
