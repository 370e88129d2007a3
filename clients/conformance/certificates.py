"""A server's certificate for `localhost` and 127.0.0.1, made by the openssl command, which signs it
itself: it is the authority, too.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import grpc


class Certificates:
    """Made in a folder."""

    def __init__(self, folder: Path) -> None:
        self.authority = folder / "cert.pem"
        key = folder / "key.pem"
        command = [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
            "-nodes", "-days", "2", "-keyout", str(key), "-out", str(self.authority),
            "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True)
        self.credentials = grpc.ssl_server_credentials(
            [(key.read_bytes(), self.authority.read_bytes())]
        )
