"""Changes that an operator makes under load: tokens, certificates, the disk that holds the log."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from collections import Counter

import grpc
from headrace.v1 import generation_service_pb2 as rpc
from headrace.v1.generation_service_pb2_grpc import GenerationServiceStub

from tests.campaign.hostile import encoding as wire
from tests.campaign.hostile.sending import GENERATE, Sender
from tests.campaign.hostile.server import ATTACKER, OPERATOR, WITNESS, Server
from tests.campaign.storms.storm import Found, storm
from tests.service.helpers import Session, spec

SOON_S = 10.0
"""The time limit for a change of the callers file or of a certificate to take effect."""
AT_ONCE = 8


async def _call(
    s: Sender, token: str, channel: grpc.aio.Channel | None = None, patience_s: float = 30.0
) -> str:
    found, _ = await s.called(
        GENERATE,
        wire.request("a", stop={"max_tokens": 3}),
        token=token,
        channel=channel,
        patience_s=patience_s,
    )
    return found


async def _until(wanted: str, s: Sender) -> float | None:
    """Return how long it takes until the operator's calls end as wanted; None if not in time."""
    began = time.monotonic()
    while time.monotonic() - began < SOON_S:
        if await _call(s, s.operator) == wanted:
            return time.monotonic() - began
        await asyncio.sleep(0.05)
    return None


@storm("callers rotated", 10, whole=10)
async def rotate_callers(server: Server, s: Sender, times: int) -> Found:
    """Calls while the callers' file changes: one caller comes and goes.

    The others notice nothing.
    """
    staying: Counter[str] = Counter()
    over = asyncio.Event()
    wrong, longest = [], 0.0

    async def call_on() -> None:
        own = s.connect()
        while not over.is_set():
            staying[await _call(s, s.token, own)] += 1

    callers = [asyncio.create_task(call_on()) for _ in range(AT_ONCE)]
    for turn in range(times):
        for names, wanted in (
            ((WITNESS, ATTACKER), "UNAUTHENTICATED TOKEN_INVALID"),
            ((WITNESS, ATTACKER, OPERATOR), "OK"),
        ):
            server.grant(names)
            took = await _until(wanted, s)
            if took is None:
                wrong.append(f"change {turn + 1}: not {wanted} within {SOON_S:.0f} s")
            longest = max(longest, took or SOON_S)
    over.set()
    await asyncio.gather(*callers)
    odd = {end: count for end, count in staying.items() if end != "OK"}
    wrong += [f"{count} calls of who stayed: {end}" for end, count in odd.items()]
    return sum(staying.values()), f"a change is in force after {longest:.1f} s", wrong


@storm("certificates rotated", 10, whole=10, tls=True)
async def rotate_certificates(server: Server, s: Sender, times: int) -> Found:
    """TLS connections while the certificate is renewed.

    Every new connection must succeed with the old or the new certificate, and soon only with the
    new one.
    """
    wrong, made, longest = [], 0, 0.0

    async def is_served(certificate: bytes) -> bool:
        async with s.connect(certificate=certificate) as channel:
            return await _call(s, s.token, channel, 10.0) == "OK"

    for turn in range(times):
        before, after = server.certificate, server.renew_certificate()
        began = time.monotonic()
        while True:
            made += 1
            if await is_served(after):
                break
            if not await is_served(before):
                # It may have changed between the two.
                if not await is_served(after):
                    wrong.append(f"renewal {turn + 1}: neither certificate is served")
                break
            if time.monotonic() - began > SOON_S:
                wrong.append(f"renewal {turn + 1}: the old one after {SOON_S:.0f} s")
                break
        longest = max(longest, time.monotonic() - began)
    return made, f"a renewal is in force after {longest:.1f} s", wrong


@storm("tokens revoked", 10, whole=50, cut=5)
async def revoke(server: Server, s: Sender, sessions: int) -> Found:
    """Open sessions whose caller's token is taken away.

    The next command must end each session.
    """
    wrong: list[str] = []
    opened = []
    for number in range(sessions):
        stub = GenerationServiceStub(s.connect())
        session = Session(stub.StreamResult(metadata=s.credentials(s.operator)))
        await session.add(spec("a", request_id=f"s{number}", stop={"max_tokens": 2}))
        await session.read()
        opened.append(session)
    server.grant((WITNESS, ATTACKER))
    took = await _until("UNAUTHENTICATED TOKEN_INVALID", s)
    if took is None:
        wrong.append(f"the token is still good after {SOON_S:.0f} s")
    accepted = 0
    for number, session in enumerate(opened):
        late = spec("a", request_id=f"late{number}", stop={"max_tokens": 2})
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await session.add(late, command_id=9)
        with contextlib.suppress(grpc.aio.AioRpcError):
            while (message := await session.call.read()) is not grpc.aio.EOF:
                accepted += _has_accepted_late(message)
        if await session.call.code() is not grpc.StatusCode.UNAUTHENTICATED:
            wrong.append(f"session {number} ended with {await session.call.code()}")
    if accepted:
        wrong.append(f"{accepted} commands of revoked sessions were carried out")
    return sessions, f"known after {took or SOON_S:.1f} s", wrong


def _has_accepted_late(message: rpc.StreamResultResponse) -> bool:
    return any(event.accepted.request_id.startswith("late") for event in message.events)


@storm("full disk", 11, whole=400)
async def full_disk(server: Server, s: Sender, calls: int) -> Found:
    """Calls of known and unknown callers while the log's file takes nothing more."""
    for pid in server.pids.values():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (server.log_bytes(), server.log_bytes()))
    size = server.log_bytes()
    ends: Counter[str] = Counter()
    for number in range(calls):
        ends[await _call(s, "nobody" if number % 2 else s.token)] += 1
    wrong = []
    if ends["OK"] != (calls + 1) // 2:
        wrong.append(f"known callers got {dict(ends)}")
    if server.log_bytes() > size:
        wrong.append("the log grew: nothing was tried")
    return calls, "", wrong
