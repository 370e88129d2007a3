"""TLS mistakes: the message says what to change, in the client and in its command."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import headrace
import pytest

from tests.service.certificates import make_certificate, needs_openssl

pytestmark = needs_openssl
_COMMAND = "from headrace_command import main; main()"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate that the server does not have."""
    return make_certificate(tmp_path_factory.mktemp("other"), subject="other")[0]


@pytest.fixture(scope="module")
def plain() -> Iterator[str]:
    """The address of a server without TLS."""
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


@pytest.fixture(scope="module")
def secure(certificate: tuple[Path, Path]) -> Iterator[str]:
    """The address of a server with TLS."""
    cert, key = certificate
    server = grpc.server(ThreadPoolExecutor(1))
    pair = (key.read_bytes(), cert.read_bytes())
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


def _message(target: str, **options: object) -> str:
    with (
        headrace.Client(target, retries=0, **options) as client,  # type: ignore[arg-type]
        pytest.raises(headrace.UnavailableError) as caught,
    ):
        client.model()
    return str(caught.value)


def _command(target: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _COMMAND, "--target", target, *options, "generate", "hi"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_tls_to_a_server_without_it(plain: str, certificate: tuple[Path, Path]) -> None:
    text = _message(plain, ca=certificate[0])
    assert f"at {plain}: it does not use TLS; leave out ca, tls" in text
    assert "SSL" not in text


def test_plain_text_to_a_server_with_tls(secure: str) -> None:
    text = _message(secure)
    assert f"at {secure}: it closed the connection as soon as it was opened" in text
    assert "ask for TLS with tls=True or ca (--tls, --ca)" in text


def test_a_certificate_of_another_authority(secure: str, other: Path) -> None:
    assert "give that authority, or a certificate that signed itself, as ca" in _message(
        secure, ca=other
    )


def test_a_certificate_of_another_name(secure: str, certificate: tuple[Path, Path]) -> None:
    text = _message(secure, ca=certificate[0], server_name="somewhere.example")
    assert "its certificate is for another name" in text


def test_a_client_certificate_that_is_missing_or_foreign(
    certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    cert, key = (path.read_bytes() for path in certificate)
    foreign = make_certificate(tmp_path)
    wants = grpc.ssl_server_credentials([(key, cert)], cert, require_client_auth=True)
    server = grpc.server(ThreadPoolExecutor(1))
    target = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', wants)}"
    server.start()
    try:
        text = _message(target, ca=cert)
        assert "it may want a certificate of this client, given with client_cert" in text
        assert "ask for TLS" not in text
        text = _message(target, ca=cert, client_cert=foreign[0], client_key=foreign[1])
        assert "may be of an authority that the server does not trust" in text
        assert "ask for TLS" not in text
    finally:
        server.stop(None)


def test_the_command_says_it_in_one_message(
    plain: str, secure: str, certificate: tuple[Path, Path]
) -> None:
    for target, options, words in (
        (plain, ("--ca", str(certificate[0])), "it does not use TLS"),
        (secure, (), "ask for TLS"),
    ):
        found = _command(target, *options)
        assert (found.returncode, found.stdout) == (3, "")
        assert words in found.stderr
        assert "Traceback" not in found.stderr
        assert not re.search(r"^[IWE]\d{4} ", found.stderr, re.MULTILINE)  # gRPC's own lines
        assert "start one" not in found.stderr  # one is there
