"""Storms of calls: more calls than the server has room for, more connections than callers, and
callers that do not read.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import grpc

from benchmarks.measures import quantile
from tests.campaign.hostile import encoding as wire
from tests.campaign.hostile.sending import GENERATE, STREAM, Sender, told
from tests.campaign.hostile.server import Server
from tests.campaign.storms.storm import Found, storm
from tests.service.helpers import Refused as refusal

CALL_TOKENS = 4
FIRST_RETURN = 0.9
"""The share of refused calls that must be admitted when they retry at the advised time."""
TWICE, MORE_S = 2.0, 0.5
"""Limit on the advised retry time: twice the time until the call's slot was free, plus `MORE_S`.

Slots that become free after the first refusal are assigned to the refused calls in order.
"""
PATIENCE_S = 300.0
UNREAD_S = 10.0


@dataclass(slots=True)
class Refused:
    """A refused call: when it was refused, since the storm began, and the advised wait; in
    seconds.
    """

    at: float
    advice_s: float
    is_in: bool = False


class Crowd:
    """Concurrent calls on several connections.

    Attributes:
        tally: the number of calls by how they finally ended.
        refused: the calls that were refused at first, in the order of their refusals.
        ends: when calls ended, in seconds since the storm began.
    """

    def __init__(self) -> None:
        self.tally: Counter[str] = Counter()
        self.refused: list[Refused] = []
        self.ends: list[float] = []
        self._began = 0.0

    async def run(self, s: Sender, calls: int, connections: int) -> Found:
        channels = [s.connect() for _ in range(connections)]
        await asyncio.gather(*(channel.channel_ready() for channel in channels))
        self._began = time.monotonic()
        await s.crowd(calls, lambda number: self._call(s, channels[number % connections], number))
        return calls, *self.judge()

    async def _call(self, s: Sender, channel: Any, number: int) -> None:
        # The same call again is known by its id, and goes before those that come first.
        raw = wire.request(
            "a",
            request_id=f"storm-{number}",
            stop={"max_tokens": CALL_TOKENS, "ignore_eos": True},
        )
        found = await self._try(s, channel, raw)
        if isinstance(found, Refused):
            self.refused.append(found)
            await asyncio.sleep(found.advice_s)
            again = await self._try(s, channel, raw)
            found.is_in = again == "OK"
            found = "refused again" if isinstance(again, Refused) else again
        self.tally[found] += 1

    async def _try(self, s: Sender, channel: Any, raw: bytes) -> Refused | str:
        try:
            await channel.unary_unary(GENERATE)(raw, metadata=s.credentials(), timeout=PATIENCE_S)
        except grpc.aio.AioRpcError as error:
            advice = refusal(error).details.get("RetryInfo")
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED or advice is None:
                return told(error)
            advice_s = advice.retry_delay.ToMilliseconds() / 1e3
            return Refused(time.monotonic() - self._began, advice_s)
        self.ends.append(time.monotonic() - self._began)
        return "OK"

    def judge(self) -> tuple[str, list[str]]:
        """Return a summary of the refused calls, and the violations."""
        odd = {
            end: count for end, count in self.tally.items() if end not in ("OK", "refused again")
        }
        wrong = [f"{count} {end}" for end, count in odd.items()]
        if not self.refused:
            return "none was refused", wrong
        share = sum(one.is_in for one in self.refused) / len(self.refused)
        if share < FIRST_RETURN:
            wrong.append(f"{share:.0%} got in at their first return, fewer than {FIRST_RETURN:.0%}")
        ends = sorted(end for end in self.ends if end >= self.refused[0].at)
        beyond = []
        for number, one in enumerate(self.refused):
            free = max(0.0, ends[min(number, len(ends) - 1)] - one.at)
            if one.advice_s > TWICE * free + MORE_S:
                beyond.append(one.advice_s - TWICE * free - MORE_S)
        if beyond:
            wrong.append(
                f"{len(beyond)} were told to wait too long, at worst {max(beyond):.2f} s too long"
            )
        longest = quantile([one.advice_s for one in self.refused], 100)
        return (
            f"{len(self.refused):,} refused, {share:.1%} of them in at their first return, told to "
            f"wait {longest:.1f} s at most"
        ), wrong


@storm("calls at once", 3, 7, 9, whole=3000)
async def calls_at_once(server: Server, s: Sender, calls: int) -> Found:
    """Calls at once on 30 connections, of which those that are refused come again as told."""
    return await Crowd().run(s, calls, 30)


@storm("connections", 3, 7, whole=300, cut=60)
async def calls_apart(server: Server, s: Sender, calls: int) -> Found:
    """Calls at once, each on a connection of its own."""
    return await Crowd().run(s, calls, calls)


@storm("non-readers", 3, 7, whole=50)
async def non_readers(server: Server, s: Sender, count: int) -> Found:
    """Streams of 1,500 tokens that nobody reads.

    Each has a separate connection. How many stayed open is told.
    """
    raw = wire.request("a", stop={"max_tokens": 1500, "ignore_eos": True})
    calls = []
    for _ in range(count):
        channel: Any = s.connect(("grpc.http2.lookahead_bytes", 0))
        stream = channel.unary_stream(STREAM)
        calls.append(stream(raw, metadata=s.credentials()))
    await asyncio.sleep(UNREAD_S)
    still = sum(not call.done() for call in calls)
    for call in calls:
        call.cancel()
    return count, f"{still} were open at the end", []
