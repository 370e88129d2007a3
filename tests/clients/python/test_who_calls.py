"""Tokens and certificates of the client, against the service itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import headrace
import pytest
from headrace import AsyncClient, Client
from headrace.cli.app import app
from headrace.v1.generation_service_pb2 import StreamResultResponse
from typer.testing import CliRunner

from tests.service.certificates import make_certificate, needs_openssl
from tests.service.conftest import callers
from tests.service.door.callers_file import TOKENS, entry, guarded, replace
from tests.service.fake_engine import FakeEngine, says
from tests.service.helpers import Harness, serving

__all__ = ["callers"]  # a fixture


def command(*arguments: str, **environment: str) -> Any:
    return CliRunner().invoke(app, [*arguments, "generate", "hi"], env=environment)


def generate(target: str, **options: Any) -> str:
    with Client(target, **options) as client:
        text = client.generate("hi").text
        with client.stream("hi") as stream:
            assert "".join(chunk.text for chunk in stream) == text
        with client.session() as session:
            assert session.submit("hi").result().text == text
    return text


def streamed(target: str, token: str | None) -> None:
    with Client(target, token=token) as client, client.stream("hi") as stream:
        stream.result()


def submitted(target: str, token: str | None) -> None:
    with Client(target, token=token) as client, client.session() as session:
        session.submit("hi").result()


async def test_a_token_is_sent_with_every_call(callers: Path) -> None:
    async with guarded(callers, FakeEngine(script=says("x"))) as h:
        target, alice = h.server.addresses[0], TOKENS["alice"]
        assert await asyncio.to_thread(generate, target, token=alice) == "x"
        async with AsyncClient(target, token=alice) as client:
            assert (await client.generate("hi")).text == "x"
            assert (await client.model()).name
            async with client.session() as session:
                assert (await session.submit("hi")).text == "x"
        for wrong in (None, "wrong"):
            async with AsyncClient(target, token=wrong) as client:
                await client.wait_until_ready()  # health is everybody's
                with pytest.raises(headrace.UnauthenticatedError) as caught:
                    await client.generate("hi")
                assert caught.value.reason == ("TOKEN_INVALID" if wrong else "TOKEN_MISSING")
                with pytest.raises(headrace.UnauthenticatedError):
                    async with client.stream("hi") as stream:
                        await stream.result()
                with pytest.raises(headrace.UnauthenticatedError):
                    async with client.session() as session:
                        await session.submit("hi")
            for call in (streamed, submitted):
                with pytest.raises(headrace.UnauthenticatedError):
                    await asyncio.to_thread(call, target, wrong)
        async with AsyncClient(target, token=TOKENS["probe"]) as client:
            with pytest.raises(headrace.PermissionDeniedError):
                await client.generate("hi")


async def test_identities_of_two_clients(callers: Path) -> None:
    async with guarded(callers, FakeEngine(script=says("x"))) as h:
        target = h.server.addresses[0]
        async with (
            AsyncClient(target, token=TOKENS["alice"]) as alice,
            AsyncClient(target, token=TOKENS["bob"]) as bob,
        ):
            await alice.add_request("hi", request_id="a")
            with pytest.raises(headrace.NotFoundError):
                await bob.get_result("a", timeout=10)
            assert await bob.cancel(["a"]) == {"a": headrace.CancelStatus.NOT_FOUND}
            assert (await alice.get_result("a", timeout=10)).text == "x"


async def test_the_command_s_token(callers: Path) -> None:
    async with guarded(callers, FakeEngine(script=says("x"))) as h:
        to = ("--target", h.server.addresses[0])
        given = await asyncio.to_thread(command, *to, "--token", TOKENS["alice"])
        assert given.stdout == "x\n"
        found = await asyncio.to_thread(command, *to, HEADRACE_TOKEN=TOKENS["alice"])
        assert found.stdout == "x\n"
        none = await asyncio.to_thread(command, *to)
        assert (none.exit_code, "HEADRACE_TOKEN" in none.stderr) == (1, True)


class _Unwritten:
    """A session's call that ended while its first command was being written, as gRPC's asyncio
    tells of it.
    """

    def __init__(self, *_commands: Any, **_options: Any) -> None:
        self.is_over = False

    async def __aiter__(self) -> AsyncIterator[Any]:
        raise grpc.aio.AioRpcError(
            grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata(), _CORE
        )
        yield

    def cancel(self) -> None:
        self.is_over = True


_CORE = "Internal error from Core"


@pytest.mark.parametrize(
    ("caller", "error"),
    [
        (None, headrace.UnauthenticatedError),
        ("probe", headrace.PermissionDeniedError),
        ("alice", headrace.UnavailableError),
    ],
)
async def test_a_session_whose_refusal_grpc_forgot_is_told_why(
    callers: Path, caller: str | None, error: type[headrace.HeadraceError]
) -> None:
    replace(
        callers,
        entry("alice", '"*"', TOKENS["alice"])
        + entry("probe", '["ModelService"]', TOKENS["probe"]),
    )
    async with guarded(callers, FakeEngine()) as h:
        token = TOKENS[caller] if caller else None
        async with AsyncClient(h.server.addresses[0], token=token) as client:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(client._servers.link.generation, "StreamResult", _Unwritten)
                async with client.session() as session:
                    with pytest.raises(error) as caught:
                        await session.submit("hi")
        assert (_CORE in str(caught.value)) == (caller == "alice")


class _Cut(_Unwritten):
    """The same, of a call that has brought something."""

    async def __aiter__(self) -> AsyncIterator[Any]:
        yield StreamResultResponse()
        async for response in super().__aiter__():
            yield response


async def test_a_session_that_was_served_is_not_asked_about() -> None:
    asked: list[Any] = []
    async with serving(FakeEngine()) as h, AsyncClient(h.server.addresses[0]) as client:
        with pytest.MonkeyPatch.context() as patch:
            generation = client._servers.link.generation
            patch.setattr(generation, "StreamResult", _Cut)
            patch.setattr(generation, "GetResult", lambda *given, **more: asked.append(given))
            async with client.session() as session:
                with pytest.raises(headrace.UnavailableError, match=_CORE):
                    await session.submit("hi")
    assert not asked


def port_of(h: Harness) -> str:
    return h.server.addresses[0].rpartition(":")[2]


@needs_openssl
async def test_certificates_on_both_sides(tmp_path: Path) -> None:
    ca = await asyncio.to_thread(make_certificate, tmp_path, "ca-", subject="an authority")
    cert, key = await asyncio.to_thread(make_certificate, tmp_path, "server-", signer=ca)
    own = await asyncio.to_thread(
        make_certificate, tmp_path, "own-", subject="carol.example", signer=ca
    )
    callers = tmp_path / "callers.toml"
    replace(callers, entry("carol", '"*"', None, "carol.example"))
    options = {"tls_cert": str(cert), "tls_key": str(key), "tls_client_ca": str(ca[0])}
    engine = FakeEngine(script=says("x"))
    async with serving(engine, auth_file=str(callers), **options) as h:
        target = f"localhost:{port_of(h)}"
        files = {"client_cert": own[0], "client_key": own[1]}
        assert await asyncio.to_thread(generate, target, ca=ca[0], **files) == "x"
        async with AsyncClient(target, ca=ca[0].read_bytes(), **files) as client:
            assert (await client.generate("hi")).text == "x"
        async with AsyncClient(target, ca=ca[0], retries=0) as client:
            with pytest.raises(headrace.UnavailableError):
                await client.generate("hi")
        flags = ("--client-cert", str(own[0]), "--client-key", str(own[1]))
        to = ("--target", target, "--ca", str(ca[0]))
        assert (await asyncio.to_thread(command, *to, *flags)).stdout == "x\n"
        variables = {"HEADRACE_CLIENT_CERT": str(own[0]), "HEADRACE_CLIENT_KEY": str(own[1])}
        assert (await asyncio.to_thread(command, *to, **variables)).stdout == "x\n"
        half = await asyncio.to_thread(command, *to, "--client-cert", str(own[0]))
        assert (half.exit_code, "go together" in half.stderr) == (2, True)
