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
from headrace.v1 import generation_service_pb2 as rpc

from benchmarks.measures import quantile
from tests.campaign.hostile.sending import GENERATION, OPTIONS, told
from tests.campaign.hostile.server import ATTACKER, Server
from tests.service.helpers import Refused as refusal

CALL_TOKENS = 4
FIRST_RETURN = 0.9
"""The share of refused calls that must be admitted when they retry at the advised time."""
TWICE, MORE_S = 2.0, 0.5
"""Limit on the advised retry time: twice the time until the call's slot was free, plus `MORE_S`.

Slots that become free after the first refusal are assigned to the refused calls in order.
"""
PATIENCE_S = 300.0


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

    def __init__(self, server: Server, calls: int, connections: int) -> None:
        self.tally: Counter[str] = Counter()
        self.refused: list[Refused] = []
        self.ends: list[float] = []
        self._target = server.target
        self._metadata = [("authorization", f"Bearer {server.token(ATTACKER)}")]
        self._calls, self._connections = calls, connections
        self._began = 0.0

    async def run(self) -> None:
        """Run all calls."""
        channels = [
            grpc.aio.insecure_channel(self._target, options=[*OPTIONS, ("headrace.number", number)])
            for number in range(self._connections)
        ]
        await asyncio.gather(*(channel.channel_ready() for channel in channels))
        self._began = time.monotonic()
        await asyncio.gather(
            *(self._call(channels[number % len(channels)], number) for number in range(self._calls))
        )
        await asyncio.gather(*(channel.close() for channel in channels))

    async def _call(self, channel: Any, number: int) -> None:
        # The same call again is known by its id, and goes before those that come first.
        raw = rpc.GenerateRequest(
            spec={
                "request_id": f"storm-{number}",
                "text": {"text": "a"},
                "stop": {"max_tokens": CALL_TOKENS, "ignore_eos": True},
            }
        ).SerializeToString()
        found = await self._try(channel, raw)
        if isinstance(found, Refused):
            self.refused.append(found)
            await asyncio.sleep(found.advice_s)
            again = await self._try(channel, raw)
            found.is_in = again == "OK"
            found = "refused again" if isinstance(again, Refused) else again
        self.tally[found] += 1

    async def _try(self, channel: Any, raw: bytes) -> Refused | str:
        try:
            await channel.unary_unary(GENERATION + "Generate")(
                raw, metadata=self._metadata, timeout=PATIENCE_S
            )
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
        if not self.refused:
            return "none was refused", []
        wrong = []
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


async def non_readers(server: Server, count: int, seconds: float) -> int:
    """Hold streams that nobody reads, each on a separate connection, for the given time.

    Returns how many stayed open.
    """
    raw = rpc.GenerateStreamRequest(
        spec={"text": {"text": "a"}, "stop": {"max_tokens": 1500, "ignore_eos": True}}
    ).SerializeToString()
    metadata = [("authorization", f"Bearer {server.token(ATTACKER)}")]
    channels, calls = [], []
    for number in range(count):
        options = [*OPTIONS, ("headrace.number", number), ("grpc.http2.lookahead_bytes", 0)]
        channel = grpc.aio.insecure_channel(server.target, options=options)
        channels.append(channel)
        stream: Any = channel.unary_stream(GENERATION + "GenerateStream")
        calls.append(stream(raw, metadata=metadata))
    await asyncio.sleep(seconds)
    still = sum(not call.done() for call in calls)
    for call in calls:
        call.cancel()
    await asyncio.gather(*(channel.close() for channel in channels))
    return still
