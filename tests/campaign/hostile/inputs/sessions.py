"""Large numbers of sessions, and sessions with large numbers of commands."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from typing import Any

from tests.campaign.hostile import encoding as wire
from tests.campaign.hostile.inputs.kinds import OK, Group
from tests.campaign.hostile.sending import GENERATION, Sender

ADD = GENERATION + "AddRequest"
OPEN = wire.field(2, wire.field(1, wire.count(1, 300)))  # a lease of 300 s


async def _sent(*messages: bytes) -> AsyncIterator[Any]:
    for raw in messages:
        yield raw


SESSIONS = Group("sessions")


@SESSIONS.sends()
async def session_cancels(s: Sender) -> None:
    """Cancels of unknown ids on four sessions, as fast as they are taken."""
    commands = [wire.field(5, wire.field(1, f"none-{number}")) for number in range(1000)]
    await s.crowd(4, lambda _: s.session(itertools.cycle(commands)))


@SESSIONS.sends()
async def session_refusals(s: Sender) -> None:
    """Adds that are refused on four sessions, as fast as they are taken."""
    command = wire.add(wire.text_input("") + wire.max_tokens(1))
    await s.crowd(4, lambda _: s.session(itertools.repeat(command)))


@SESSIONS.sends()
async def session_unread_refusals(s: Sender) -> None:
    """The same, and nobody reads the answers."""
    command = wire.add(wire.text_input("") + wire.max_tokens(1))
    await s.crowd(4, lambda _: s.session(itertools.repeat(command), read=False))


@SESSIONS.sends()
async def session_adds(s: Sender) -> None:
    """Requests of one token on four sessions, as fast as they are taken."""
    command = wire.add(wire.text_input("hi") + wire.max_tokens(1))
    await s.crowd(4, lambda _: s.session(itertools.repeat(command)))


@SESSIONS.sends()
async def session_credits(s: Sender) -> None:
    """Credits on four sessions, as fast as they are taken."""
    opened = wire.field(2, wire.count(2, 1))
    credit = wire.field(6, wire.field(1, "none") + wire.count(2, 1))
    await s.crowd(4, lambda _: s.session(itertools.chain([opened], itertools.repeat(credit))))


@SESSIONS.sends()
async def attach_storm(s: Sender) -> None:
    """Eight sessions that take a request from each other."""
    name = wire.field(1, "wanted")
    spec = name + wire.text_input("Once upon a time") + wire.max_tokens(1500, ignore_eos=True)
    await s.call(ADD, wire.request(spec))
    attach = wire.field(4, name + wire.count(2, 1))
    await s.crowd(8, lambda _: s.session(itertools.repeat(attach)))


@SESSIONS.sends(answers=(OK,))
async def session_storm(s: Sender) -> None:
    """Sessions that begin and end, 64 at once."""

    async def one(_: int) -> None:
        await s.session([OPEN])

    await s.again(64, one)


@SESSIONS.sends()
async def lost_leases(s: Sender) -> None:
    """Sessions with a lease and a long request, lost at once, 16 at once."""

    async def one(_: int) -> None:
        spec = wire.text_input("Once upon a time") + wire.max_tokens(1000, ignore_eos=True)
        call: Any = s.channel.stream_stream(GENERATION + "StreamResult")(
            _sent(OPEN, wire.add(spec)),
            metadata=[("authorization", f"Bearer {s.token}")],
        )
        async for _message in call:
            break
        call.cancel()
        s.count("sessions lost")

    await s.again(16, one)


@SESSIONS.sends()
async def long_polls(s: Sender) -> None:
    """500 GetResult calls that wait a minute."""
    name = wire.field(1, "slow")
    spec = name + wire.text_input("Once upon a time") + wire.max_tokens(1500, ignore_eos=True)
    await s.call(ADD, wire.request(spec))
    poll = name + wire.field(3, wire.count(1, 60)) + wire.count(4, 1)
    await s.crowd(500, lambda _: s.call(GENERATION + "GetResult", poll))


@SESSIONS.sends()
async def idle_sessions(s: Sender) -> None:
    """3,000 idle sessions with a lease on 40 connections."""
    channels = [s.connect() for _ in range(40)]
    await s.crowd(3000, lambda n: s.session([OPEN], stay=True, channel=channels[n % len(channels)]))
