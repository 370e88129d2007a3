"""Changes that an operator makes under load: tokens, certificates, the disk that holds the log."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from collections import Counter
from typing import Any

import grpc
from headrace.v1 import generation_service_pb2 as rpc
from headrace.v1.generation_service_pb2_grpc import GenerationServiceStub

from tests.campaign.hostile.sending import GENERATION, OPTIONS, told
from tests.campaign.hostile.server import ATTACKER, OPERATOR, WITNESS, Server

SOON_S = 10.0
"""The time limit for a change of the callers file or of a certificate to take effect."""
AT_ONCE = 8
_RAW = rpc.GenerateRequest(
    spec={"text": {"text": "a"}, "stop": {"max_tokens": 3}}
).SerializeToString()


async def _call(channel: Any, token: str) -> str:
    metadata = [("authorization", f"Bearer {token}")]
    try:
        await channel.unary_unary(GENERATION + "Generate")(_RAW, metadata=metadata, timeout=30)
    except grpc.aio.AioRpcError as error:
        return told(error)
    return "OK"


async def _until(wanted: str, channel: Any, token: str) -> float | None:
    """Return how long it takes until calls end as wanted; None if not in time."""
    began = time.monotonic()
    while time.monotonic() - began < SOON_S:
        if await _call(channel, token) == wanted:
            return time.monotonic() - began
        await asyncio.sleep(0.05)
    return None


async def rotate_callers(server: Server, times: int) -> tuple[int, str, list[str]]:
    """Change the callers file under load: one caller comes and goes, and the others notice nothing.

    Returns the number of calls, the longest time until a change took effect, and the violations.
    """
    staying: Counter[str] = Counter()
    over = asyncio.Event()
    wrong, longest = [], 0.0

    async def call_on(number: int) -> None:
        options = [*OPTIONS, ("headrace.number", number)]
        async with grpc.aio.insecure_channel(server.target, options=options) as own:
            while not over.is_set():
                staying[await _call(own, server.token(ATTACKER))] += 1

    callers = [asyncio.create_task(call_on(number)) for number in range(AT_ONCE)]
    async with grpc.aio.insecure_channel(server.target, options=OPTIONS) as channel:
        for turn in range(times):
            for names, wanted in (
                ((WITNESS, ATTACKER), "UNAUTHENTICATED TOKEN_INVALID"),
                ((WITNESS, ATTACKER, OPERATOR), "OK"),
            ):
                server.grant(names)
                took = await _until(wanted, channel, server.token(OPERATOR))
                if took is None:
                    wrong.append(f"change {turn + 1}: not {wanted} within {SOON_S:.0f} s")
                longest = max(longest, took or SOON_S)
    over.set()
    await asyncio.gather(*callers)
    odd = {end: count for end, count in staying.items() if end != "OK"}
    wrong += [f"{count} calls of who stayed: {end}" for end, count in odd.items()]
    return sum(staying.values()), f"a change is in force after {longest:.1f} s", wrong


async def rotate_certificates(server: Server, times: int) -> tuple[int, str, list[str]]:
    """Renew the certificate under load.

    Every new connection must succeed with the old or the new certificate, and soon only with the
    new one.
    """
    wrong, made, longest = [], 0, 0.0
    for turn in range(times):
        before, after = server.certificate, server.renew_certificate()
        began = time.monotonic()
        while True:
            made += 1
            if await _over_tls(server, after, made):
                break
            if not await _over_tls(server, before, made):
                # It may have changed between the two.
                if not await _over_tls(server, after, made):
                    wrong.append(f"renewal {turn + 1}: neither certificate is served")
                break
            if time.monotonic() - began > SOON_S:
                wrong.append(f"renewal {turn + 1}: the old one after {SOON_S:.0f} s")
                break
        longest = max(longest, time.monotonic() - began)
    return made, f"a renewal is in force after {longest:.1f} s", wrong


async def _over_tls(server: Server, certificate: bytes, number: int) -> bool:
    credentials = grpc.ssl_channel_credentials(certificate)
    options = [*OPTIONS, ("headrace.number", number)]
    async with grpc.aio.secure_channel(server.tls_target, credentials, options=options) as channel:
        with contextlib.suppress(grpc.aio.AioRpcError):
            metadata = [("authorization", f"Bearer {server.token(ATTACKER)}")]
            call = channel.unary_unary(GENERATION + "Generate")
            await call(_RAW, metadata=metadata, timeout=10)
            return True
    return False


async def revoke(server: Server, sessions: int) -> tuple[int, str, list[str]]:
    """Revoke the tokens of callers with open sessions; the next command must end each session."""
    wrong: list[str] = []
    channels, calls = [], []
    metadata = [("authorization", f"Bearer {server.token(OPERATOR)}")]
    for number in range(sessions):
        options = [*OPTIONS, ("headrace.number", number)]
        channel = grpc.aio.insecure_channel(server.target, options=options)
        channels.append(channel)
        stub: Any = GenerationServiceStub(channel)
        call = stub.StreamResult(metadata=metadata)
        await call.write(rpc.StreamResultRequest(add=_add(f"s{number}")))
        await call.read()
        calls.append(call)
    server.grant((WITNESS, ATTACKER))
    took = await _until("UNAUTHENTICATED TOKEN_INVALID", channels[0], server.token(OPERATOR))
    if took is None:
        wrong.append(f"the token is still good after {SOON_S:.0f} s")
    accepted = 0
    for number, call in enumerate(calls):
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await call.write(rpc.StreamResultRequest(command_id=9, add=_add(f"late{number}")))
        with contextlib.suppress(grpc.aio.AioRpcError):
            while (message := await call.read()) is not grpc.aio.EOF:
                accepted += any(
                    event.accepted.request_id.startswith("late") for event in message.events
                )
        if await call.code() is not grpc.StatusCode.UNAUTHENTICATED:
            wrong.append(f"session {number} ended with {await call.code()}")
    if accepted:
        wrong.append(f"{accepted} commands of revoked sessions were carried out")
    await asyncio.gather(*(channel.close() for channel in channels))
    return sessions, f"known after {took or SOON_S:.1f} s", wrong


def _add(name: str) -> rpc.AddCommand:
    spec = {"request_id": name, "text": {"text": "a"}, "stop": {"max_tokens": 2}}
    return rpc.AddCommand(spec=spec)


async def full_disk(server: Server, calls: int) -> tuple[int, str, list[str]]:
    """Stop the log file from growing, as on a full disk, while strangers cause log messages."""
    for pid in server.pids.values():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (server.log_bytes(), server.log_bytes()))
    size = server.log_bytes()
    ends: Counter[str] = Counter()
    async with grpc.aio.insecure_channel(server.target, options=OPTIONS) as channel:
        for number in range(calls):
            token = "nobody" if number % 2 else server.token(ATTACKER)
            ends[await _call(channel, token)] += 1
    wrong = []
    if ends["OK"] != (calls + 1) // 2:
        wrong.append(f"known callers got {dict(ends)}")
    if server.log_bytes() > size:
        wrong.append("the log grew: nothing was tried")
    return calls, "", wrong
