"""Large numbers of sessions, and sessions with large numbers of commands."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from typing import Any

from benchmarks.hostile import encoding as wire
from benchmarks.hostile.inputs.kinds import OK, Group, Input
from benchmarks.hostile.sending import GENERATION, Sender

ADD = GENERATION + "AddRequest"
OPEN = wire.field(2, wire.field(1, wire.count(1, 300)))  # a lease of 300 s


async def session_cancels(s: Sender) -> None:
    """Send cancels of unknown request ids on four sessions."""
    commands = [wire.field(5, wire.field(1, f"none-{number}")) for number in range(1000)]
    await s.crowd(4, lambda _: s.session(itertools.cycle(commands)))


async def session_refusals(s: Sender) -> None:
    """Send adds that the server refuses, on four sessions."""
    command = wire.add(wire.text_input("") + wire.max_tokens(1))
    await s.crowd(4, lambda _: s.session(itertools.repeat(command)))


async def session_unread_refusals(s: Sender) -> None:
    """Send adds that the server refuses, on four sessions, without reading the answers."""
    command = wire.add(wire.text_input("") + wire.max_tokens(1))
    await s.crowd(4, lambda _: s.session(itertools.repeat(command), read=False))


async def session_adds(s: Sender) -> None:
    """Add short requests on four sessions as fast as the server accepts them."""
    command = wire.add(wire.text_input("hi") + wire.max_tokens(1))
    await s.crowd(4, lambda _: s.session(itertools.repeat(command)))


async def session_credits(s: Sender) -> None:
    """Send one-token credits for unknown requests, on four sessions."""
    opened = wire.field(2, wire.count(2, 1))
    credit = wire.field(6, wire.field(1, "none") + wire.count(2, 1))
    await s.crowd(4, lambda _: s.session(itertools.chain([opened], itertools.repeat(credit))))


async def attach_storm(s: Sender) -> None:
    """Let eight sessions repeatedly attach to the same request and take it from each other."""
    name = wire.field(1, "wanted")
    spec = name + wire.text_input("Once upon a time") + wire.max_tokens(1500, ignore_eos=True)
    await s.call(ADD, wire.request(spec))
    attach = wire.field(4, name + wire.count(2, 1))
    await s.crowd(8, lambda _: s.session(itertools.repeat(attach)))


async def idle_sessions(s: Sender) -> None:
    """Keep 3,000 idle sessions with a lease open on 40 connections."""
    channels = [s.connect() for _ in range(40)]
    await s.crowd(3000, lambda n: s.session([OPEN], stay=True, channel=channels[n % len(channels)]))


async def session_storm(s: Sender) -> None:
    """Open sessions that ask for a lease and are then cut off."""

    async def one(_: int) -> None:
        await s.session([OPEN])

    await s.again(64, one)


async def lost_leases(s: Sender) -> None:
    """Open sessions with a lease and a request, and cancel each after its first message."""

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


async def long_polls(s: Sender) -> None:
    """Start 500 long-polling reads of a result that never arrives."""
    name = wire.field(1, "slow")
    spec = name + wire.text_input("Once upon a time") + wire.max_tokens(1500, ignore_eos=True)
    await s.call(ADD, wire.request(spec))
    poll = name + wire.field(3, wire.count(1, 60)) + wire.count(4, 1)
    await s.crowd(500, lambda _: s.call(GENERATION + "GetResult", poll))


async def _sent(*messages: bytes) -> AsyncIterator[Any]:
    for raw in messages:
        yield raw


SESSIONS = Group(
    "sessions",
    (
        Input(
            name="session-cancels",
            meaning="cancels of unknown ids on four sessions, as fast as they are taken",
            send=session_cancels,
            fields=("CancelCommand.request_id",),
        ),
        Input(
            name="session-refusals",
            meaning="adds that are refused on four sessions, as fast as they are taken",
            send=session_refusals,
        ),
        Input(
            name="session-unread-refusals",
            meaning="the same, and nobody reads the answers",
            send=session_unread_refusals,
        ),
        Input(
            name="session-adds",
            meaning="requests of one token on four sessions, as fast as they are taken",
            send=session_adds,
        ),
        Input(
            name="session-credits",
            meaning="credits on four sessions, as fast as they are taken",
            send=session_credits,
            fields=(
                "CreditCommand.request_id",
                "CreditCommand.tokens",
                "OpenCommand.initial_credit",
            ),
        ),
        Input(
            name="attach-storm",
            meaning="eight sessions that take a request from each other",
            send=attach_storm,
            fields=("AttachCommand.request_id", "AttachCommand.from_seq"),
        ),
        Input(
            name="session-storm",
            meaning="sessions that begin and end, 64 at once",
            send=session_storm,
            answers=(OK,),
            fields=("OpenCommand.lease",),
        ),
        Input(
            name="lost-leases",
            meaning="sessions with a lease and a long request, lost at once, 16 at once",
            send=lost_leases,
        ),
        Input(
            name="long-polls",
            meaning="500 GetResult calls that wait a minute",
            send=long_polls,
            fields=("GetResultRequest.wait", "GetResultRequest.until_done"),
        ),
        Input(
            name="idle-sessions",
            meaning="3,000 idle sessions with a lease on 40 connections",
            send=idle_sessions,
            fields=("OpenCommand.lease",),
        ),
    ),
)
