"""TLS: certificates that are renewed while the server runs, and clients that show their own."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import grpc
import pytest
from headrace.v1 import generation_service_pb2 as rpc
from headrace.v1.generation_service_pb2_grpc import GenerationServiceStub

from engine.contract.errors import ConfigError
from service.config import ServiceConfig
from service.door.tls import Tls
from tests.service.certificates import Pair, needs_openssl, port_of, secure, shown
from tests.service.door.callers_file import CALLERS, bearer, entry, replace
from tests.service.fake_engine import FakeEngine, says
from tests.service.helpers import DEADLINE_S, Harness, Session, check_course, refused, serving, spec

pytestmark = needs_openssl


@pytest.fixture
def served(tmp_path: Path, pairs: dict[str, Pair]) -> dict[str, str]:
    """The server's options: copies of the first pair, to be exchanged."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    install(pairs["first"][0], cert)
    install(pairs["first"][1], key)
    return {"tls_cert": str(cert), "tls_key": str(key)}


def install(source: Path, target: Path | str) -> None:
    """Put a copy in a file's place."""
    new = f"{target}.new"
    shutil.copy(source, new)
    os.chmod(new, 0o600)
    os.replace(new, target)


async def generate(channel: Any, **more: Any) -> str:
    """Generate something; returns the text."""
    message = rpc.GenerateRequest(spec=spec())
    stub: Any = GenerationServiceStub(channel)
    result = await stub.Generate(message, timeout=DEADLINE_S, **more)
    return str(result.choices[0].text)


async def test_files_are_read_again_when_somebody_asks_for_it(
    served: dict[str, str], pairs: dict[str, Pair], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with serving(FakeEngine(), **served) as h:
        h.server.reload()
        assert "TLS files were read again" in caplog.text  # though nothing has changed
        install(pairs["second"][1], served["tls_key"])
        h.server.reload()
        assert "TLS files stay as they were" in caplog.text
        assert await shown(port_of(h)) == pairs["first"][0].read_text()
        install(pairs["second"][0], served["tls_cert"])
        h.server.reload()
        assert caplog.text.count("TLS files were read again") == 2
        assert await shown(port_of(h)) == pairs["second"][0].read_text()


async def test_a_renewed_certificate_is_used_by_the_next_connection(
    served: dict[str, str], pairs: dict[str, Pair], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    first, second = (pairs[name][0].read_text() for name in ("first", "second"))
    listen = ("127.0.0.1:0", "127.0.0.1:0")
    engine = FakeEngine(script=says("abc"), auto=False)
    async with serving(engine, listen=listen, **served) as h:
        ports = [port_of(h, place) for place in (0, 1)]
        assert [await shown(port) for port in ports] == [first, first]
        async with secure(ports[0], pairs["first"]) as channel:
            other = Harness(h.server, engine, channel)
            session = other.session()
            await session.add(spec(request_id="a"))
            await session.read()
            install(pairs["second"][0], served["tls_cert"])  # its key is not there yet
            assert [await shown(port) for port in ports] == [first, first]
            assert caplog.text.count("TLS files stay as they were") == 1
            install(pairs["second"][1], served["tls_key"])
            assert [await shown(port) for port in ports] == [second, second]
            assert caplog.text.count("TLS files were read again") == 1
            for broken in ("", "-----BEGIN PRIVATE KEY-----\nx", "PRIVATE KEY-----"):
                replace(Path(served["tls_key"]), broken)
                assert await shown(ports[0]) == second
            os.unlink(served["tls_cert"])
            assert await shown(ports[1]) == second
            install(pairs["first"][0], served["tls_cert"])
            install(pairs["first"][1], served["tls_key"])
            assert [await shown(port) for port in ports] == [first, first]
            engine.run()  # the open connection has seen nothing of it
            await session.end()
            check_course(session.events()["a"])
    assert "PRIVATE" not in caplog.text


async def test_client_certificates_tell_who_calls(
    tmp_path: Path, served: dict[str, str], pairs: dict[str, Pair]
) -> None:
    callers = tmp_path / "callers.toml"
    replace(
        callers,
        CALLERS
        + entry("carol", '["GenerationService"]', None, "alice.example")
        + entry("dave", '["ModelService"]', None, "spiffe://example/bob"),
    )
    options = {**served, "tls_client_ca": str(pairs["ca"][0]), "auth_file": str(callers)}
    engine = FakeEngine(script=says("x"))
    async with serving(engine, listen=("127.0.0.1:0", f"unix:{tmp_path}/s"), **options) as h:

        async def outcome(own: str | None, **more: Any) -> str:
            pair = pairs[own] if own is not None else None
            async with secure(port_of(h), pairs["first"], pair) as channel:
                try:
                    return await generate(channel, **more)
                except grpc.aio.AioRpcError as error:
                    return error.code().name

        assert await outcome("alice") == "x"
        assert await outcome("sans") == "PERMISSION_DENIED"
        for unknown in ("nobody", "both"):
            assert await outcome(unknown) == "UNAUTHENTICATED"
        for refused_by_tls in ("stranger", None):
            assert await outcome(refused_by_tls) == "UNAVAILABLE"
            assert await outcome(refused_by_tls, metadata=bearer("bob")) == "UNAVAILABLE"
        # A token decides alone.
        assert await outcome("nobody", metadata=bearer("bob")) == "x"
        wrong = (("authorization", "Bearer wrong"),)
        assert await outcome("alice", metadata=wrong) == "UNAUTHENTICATED"

        async with secure(port_of(h), pairs["first"], pairs["alice"]) as channel:
            other = Harness(h.server, engine, channel)
            session: Session = other.session()
            await session.add(spec(request_id="a"))
            await session.end()
            check_course(session.events()["a"])
            add = rpc.AddRequestRequest(spec=spec(request_id="b"))
            await other.generation.AddRequest(add)
            assert h.registry.find("carol", "b")
        # On the Unix socket nobody shows a certificate.
        async with grpc.aio.insecure_channel(h.server.addresses[1]) as channel:
            error = await refused(generate(channel))
            assert error.code is grpc.StatusCode.UNAUTHENTICATED
            assert await generate(channel, metadata=bearer("bob")) == "x"


async def test_a_session_ends_when_its_certificate_counts_no_longer(
    tmp_path: Path, served: dict[str, str], pairs: dict[str, Pair]
) -> None:
    callers = tmp_path / "callers.toml"
    replace(callers, CALLERS + entry("carol", '["GenerationService"]', None, "alice.example"))
    options = {**served, "tls_client_ca": str(pairs["ca"][0]), "auth_file": str(callers)}
    engine = FakeEngine(script=says("x"), auto=False)
    async with (
        serving(engine, **options) as h,
        secure(port_of(h), pairs["first"], pairs["alice"]) as channel,
    ):
        session: Session = Harness(h.server, engine, channel).session()
        await session.add(spec(request_id="a"))
        await session.read_until(lambda message: message.events)
        replace(callers, CALLERS)
        await session.add(spec(request_id="b"))
        assert (await session.read_until(lambda message: message.rejections)).rejections
        assert (await refused(session.rest())).code is grpc.StatusCode.UNAUTHENTICATED
        assert len(engine.submitted) == 1


async def test_authorities_are_renewed_too(
    tmp_path: Path, served: dict[str, str], pairs: dict[str, Pair]
) -> None:
    authorities = tmp_path / "ca.pem"
    install(pairs["ca"][0], authorities)
    engine = FakeEngine(script=says("x"))
    options = {**served, "tls_client_ca": str(authorities)}
    async with serving(engine, **options) as h:  # without callers, any certificate will do
        for trusted, works, fails in (
            ("ca", "nobody", "stranger"),
            ("stranger",) * 2 + ("nobody",),
        ):
            install(pairs[trusted][0], authorities)
            async with secure(port_of(h), pairs["first"], pairs[works]) as channel:
                assert await generate(channel) == "x"
            async with secure(port_of(h), pairs["first"], pairs[fails]) as channel:
                assert (await refused(generate(channel))).code is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
async def test_authorities_with_comments(
    tmp_path: Path, served: dict[str, str], pairs: dict[str, Pair], encoding: str
) -> None:
    authorities = tmp_path / "ca.pem"
    comment = "# Prüfstelle: größte\n".encode(encoding)
    texts = [pairs[name][0].read_bytes() for name in ("second", "ca")]
    authorities.write_bytes(comment + texts[0] + comment + texts[1] + comment)
    engine = FakeEngine(script=says("x"))
    async with serving(engine, **served, tls_client_ca=str(authorities)) as h:
        for own, works in (("alice", True), ("second", True), ("stranger", False)):
            async with secure(port_of(h), pairs["first"], pairs[own]) as channel:
                if works:
                    assert await generate(channel) == "x"
                else:
                    error = await refused(generate(channel))
                    assert error.code is grpc.StatusCode.UNAVAILABLE


def test_files_that_do_not_fit(pairs: dict[str, Pair], tmp_path: Path) -> None:
    (cert, key), other_key = pairs["first"], pairs["second"][1]
    junk = tmp_path / "junk.pem"
    junk.write_text("-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n")
    half = tmp_path / "half.pem"
    half.write_text(cert.read_text() + junk.read_text())
    for option, files in (
        ("tls_cert", {"tls_cert": cert, "tls_key": other_key}),
        ("tls_cert", {"tls_cert": junk, "tls_key": key}),
        ("tls_client_ca", {"tls_cert": cert, "tls_key": key, "tls_client_ca": junk}),
        ("tls_client_ca", {"tls_cert": cert, "tls_key": key, "tls_client_ca": half}),
        ("tls_client_ca", {"tls_cert": cert, "tls_key": key, "tls_client_ca": key}),
    ):
        with pytest.raises(ConfigError) as caught:
            Tls(ServiceConfig(**{name: str(path) for name, path in files.items()}))  # type: ignore[arg-type]
        assert caught.value.option == option


def test_a_key_that_others_can_read(
    served: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    Tls(ServiceConfig(**served))  # type: ignore[arg-type]
    assert not caplog.text
    os.chmod(served["tls_key"], 0o644)
    Tls(ServiceConfig(**served))  # type: ignore[arg-type]
    assert f"{served['tls_key']} can be read or written by every user" in caplog.text
