"""Large numbers of sessions, and sessions with large numbers of commands."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from typing import Any

from headrace.v1 import generation_service_pb2 as rpc

from tests.campaign.hostile import encoding as wire
from tests.campaign.hostile.inputs.kinds import OK, Group
from tests.campaign.hostile.sending import ADD, GET, SESSION, Sender


def _command(**command: Any) -> bytes:
    return rpc.StreamResultRequest(**command).SerializeToString()


def _long(tokens: int = 1500) -> dict[str, Any]:
    return {"max_tokens": tokens, "ignore_eos": True}


OPEN = _command(open={"lease": {"seconds": 300}})
REFUSED = wire.add("", stop={"max_tokens": 1})


async def _sent(*messages: bytes) -> AsyncIterator[Any]:
    for raw in messages:
        yield raw


SESSIONS = Group("sessions")


@SESSIONS.sends()
async def session_cancels(s: Sender) -> None:
    """Cancels of unknown ids on four sessions, as fast as they are taken."""
    commands = [_command(cancel={"request_id": f"none-{number}"}) for number in range(1000)]
    await s.crowd(4, lambda _: s.session(itertools.cycle(commands)))


@SESSIONS.sends()
async def session_refusals(s: Sender) -> None:
    """Adds that are refused on four sessions, as fast as they are taken."""
    await s.crowd(4, lambda _: s.session(itertools.repeat(REFUSED)))


@SESSIONS.sends()
async def session_unread_refusals(s: Sender) -> None:
    """The same, and nobody reads the answers."""
    await s.crowd(4, lambda _: s.session(itertools.repeat(REFUSED), read=False))


@SESSIONS.sends()
async def session_adds(s: Sender) -> None:
    """Requests of one token on four sessions, as fast as they are taken."""
    command = wire.add("hi", stop={"max_tokens": 1})
    await s.crowd(4, lambda _: s.session(itertools.repeat(command)))


@SESSIONS.sends()
async def session_credits(s: Sender) -> None:
    """Credits on four sessions, as fast as they are taken."""
    opened = _command(open={"initial_credit": 1})
    credit = _command(credit={"request_id": "none", "tokens": 1})
    await s.crowd(4, lambda _: s.session(itertools.chain([opened], itertools.repeat(credit))))


@SESSIONS.sends()
async def attach_storm(s: Sender) -> None:
    """Eight sessions that take a request from each other."""
    await s.call(ADD, wire.request(request_id="wanted", stop=_long()))
    attach = _command(attach={"request_id": "wanted", "from_seq": 1})
    await s.crowd(8, lambda _: s.session(itertools.repeat(attach)))


@SESSIONS.sends(answers=(OK,))
async def session_storm(s: Sender) -> None:
    """Sessions that begin and end, 64 at once."""
    await s.again(64, lambda _: s.session([OPEN]))


@SESSIONS.sends()
async def lost_leases(s: Sender) -> None:
    """Sessions with a lease and a long request, lost at once, 16 at once."""

    async def one(_: int) -> None:
        call: Any = s.channel.stream_stream(SESSION)(
            _sent(OPEN, wire.add(stop=_long(1000))), metadata=s.credentials()
        )
        async for _message in call:
            break
        call.cancel()
        s.count("sessions lost")

    await s.again(16, one)


@SESSIONS.sends()
async def long_polls(s: Sender) -> None:
    """500 GetResult calls that wait a minute."""
    await s.call(ADD, wire.request(request_id="slow", stop=_long()))
    poll = rpc.GetResultRequest(request_id="slow", wait={"seconds": 60}, until_done=True)
    raw = poll.SerializeToString()
    await s.crowd(500, lambda _: s.call(GET, raw))


@SESSIONS.sends()
async def idle_sessions(s: Sender) -> None:
    """3,000 idle sessions with a lease on 40 connections."""
    channels = [s.connect() for _ in range(40)]
    await s.crowd(3000, lambda n: s.session([OPEN], stay=True, channel=channels[n % len(channels)]))
