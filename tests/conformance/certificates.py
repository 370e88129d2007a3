"""An authority, and a certificate for `localhost` and 127.0.0.1 that it has signed, made by the
openssl command. One for both would not do: rustls takes no authority for a server.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import grpc


class Certificates:
    """Made in a folder."""

    def __init__(self, folder: Path) -> None:
        self.authority = folder / "authority.pem"
        certificate, key = folder / "cert.pem", folder / "key.pem"
        authority_key = folder / "authority.key"
        _make(self.authority, authority_key, "/CN=an authority of one's own")
        signed = ("-CA", str(self.authority), "-CAkey", str(authority_key))
        names = ("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
        leaf = ("-addext", "basicConstraints=critical,CA:FALSE")
        _make(certificate, key, "/CN=localhost", *signed, *names, *leaf)
        self.credentials = grpc.ssl_server_credentials(
            [(key.read_bytes(), certificate.read_bytes())]
        )


def _make(certificate: Path, key: Path, subject: str, *options: str) -> None:
    command = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
        "-nodes", "-days", "2", "-keyout", str(key), "-out", str(certificate),
        "-subj", subject, *options,
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
