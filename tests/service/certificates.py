"""Certificates for tests, made with the openssl command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

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
    signer: tuple[Path, Path] | None = None,
) -> tuple[Path, Path]:
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
