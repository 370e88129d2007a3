"""How an attacker sends: plain gRPC with messages as bytes, and a tally of what was answered."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.rpc import code_pb2, error_details_pb2, status_pb2
from headrace.v1 import generation_service_pb2 as rpc

from service.convert.inputs import MIN_MOST_TEXT_BYTES, TEXT_BYTES_OF_TOKEN
from service.servicers.model_servicer import MIN_MOST_TOKENS

GENERATION = "/headrace.v1.GenerationService/"
MODEL = "/headrace.v1.ModelService/"
CONTROL = "/headrace.v1.ControlService/"
HEALTH = "/grpc.health.v1.Health/"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
STREAMED = frozenset(
    {
        GENERATION + "GenerateStream",
        HEALTH + "Watch",
        CONTROL + "WatchStatistics",
    }
)
SESSIONS = frozenset({GENERATION + "StreamResult", REFLECTION})
OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_metadata_size", 16 << 20),
    ("grpc.enable_retries", 0),
]
NO_ANSWER = "no answer"
"""In a tally: calls that were still open when the time was over."""
KEPT_KINDS = 40
"""Of answers in a tally; the others count as one."""
UNEXPECTED = "unexpected: "
"""Before an answer in a tally that is not the one that is known."""
GZIP_BYTES = 64 << 10
"""Longer messages are compressed: what arrives is as long."""
_INDEX = re.compile(r"\[\d+\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What an attacker knows of the server.

    Attributes:
        context, vocabulary: tokens.
        limit: the largest message that it receives, bytes.
        choices, logprobs, logit_bias, stop_strings, stop_string_bytes: the most of a request.
    """

    context: int
    vocabulary: int
    limit: int
    choices: int
    logprobs: int
    logit_bias: int
    stop_strings: int
    stop_string_bytes: int


class Sender:
    """One attacker.

    Attributes:
        target: the server, as gRPC writes it.
        tls_target: its TCP address that speaks TLS; empty where there is none.
        token: the attacker's own; empty: a stranger.
        operator: a token that ControlService is granted to.
        card: the server's limits.
        source: of what is drawn.
        tally: how often what was answered.
        connections: how many were opened.
        channel: a connection that all calls use that name no other.
    """

    def __init__(
        self,
        target: str,
        card: Card,
        *,
        token: str = "",
        operator: str = "",
        tls_target: str = "",
        seed: str = "",
    ) -> None:
        self.target = target
        self.tls_target = tls_target
        self.token = token
        self.operator = operator
        self.card = card
        self.source = random.Random(seed)
        self.tally: Counter[str] = Counter()
        self.connections = 0
        self.channel = self.connect()
        self._channels = [self.channel]

    @property
    def below(self) -> int:
        """A size that leaves a message just below what the server receives."""
        return self.card.limit - (4 << 10)

    @property
    def above(self) -> int:
        """A size far beyond it."""
        return min(4 * self.card.limit, self.card.limit + (4 << 20))

    @property
    def sizes(self) -> tuple[int, int]:
        """Both."""
        return self.below, self.above

    @property
    def longest_text(self) -> int:
        """The bytes of the longest text that is taken in, in a message that is."""
        return min(self.below, max(MIN_MOST_TEXT_BYTES, TEXT_BYTES_OF_TOKEN * self.card.context))

    @property
    def most_ids(self) -> int:
        """The most ids that are turned into a text, in a message that is taken in."""
        return min(self.below // 3, max(MIN_MOST_TOKENS, self.card.context))

    def connect(self) -> grpc.aio.Channel:
        """A connection of its own, once it is used; open until the end."""
        self.connections += 1
        channel = grpc.aio.insecure_channel(
            self.target, options=[*OPTIONS, ("headrace.number", self.connections)]
        )
        if self.connections > 1:
            self._channels.append(channel)
        return channel

    def count(self, what: str, number: int = 1) -> None:
        """Note what was answered."""
        known = what in self.tally or len(self.tally) < KEPT_KINDS
        self.tally[what if known else "other answers"] += number

    async def call(
        self,
        method: str,
        raw: bytes = b"",
        *,
        gzip: bool = False,
        token: str | None = None,
        channel: grpc.aio.Channel | None = None,
        patience_s: float | None = None,
        metadata: Sequence[tuple[str, str | bytes]] = (),
    ) -> bytes | None:
        """Send one message, read all that comes, and tally how it ended; the first answer.

        Args:
            method: its path.
            raw: the message.
            gzip: whether it is compressed.
            token: None: the attacker's own; empty: none.
            channel: None: the one that all share.
            patience_s: the caller goes after so long.
            metadata: more of it.
        """
        found, answer = await self._called(
            method, raw, gzip=gzip, token=token, channel=channel, patience_s=patience_s,
            metadata=metadata,
        )  # fmt: skip
        self.count(found)
        return answer

    async def _called(
        self,
        method: str,
        raw: bytes,
        *,
        gzip: bool,
        token: str | None,
        channel: grpc.aio.Channel | None = None,
        patience_s: float | None,
        metadata: Sequence[tuple[str, str | bytes]],
    ) -> tuple[str, bytes | None]:
        """How a call ended, and its first answer; one that is cut is tallied here."""
        token = self.token if token is None else token
        if token:
            metadata = [*metadata, ("authorization", f"Bearer {token}")]
        options: dict[str, Any] = {"metadata": metadata, "timeout": patience_s}
        if gzip:
            options["compression"] = grpc.Compression.Gzip
        via: Any = channel or self.channel
        answer: bytes | None = None
        try:
            if method in STREAMED:
                async for message in via.unary_stream(method)(raw, **options):
                    answer = answer or message
            elif method in SESSIONS:
                refusal = ""
                async for message in via.stream_stream(method)(_once(raw), **options):
                    refusal, answer = refusal or _refusal(message), answer or message
                return refusal or "OK", answer
            else:
                answer = await via.unary_unary(method)(raw, **options)
        except grpc.aio.AioRpcError as error:
            return told(error), answer
        except asyncio.CancelledError:
            self.count(NO_ANSWER)
            raise
        return "OK", answer

    async def ask(
        self,
        method: str,
        raw: bytes,
        answers: Sequence[str],
        *,
        token: str | None = None,
        patience_s: float | None = None,
        metadata: Sequence[tuple[str, str | bytes]] = (),
    ) -> str:
        """Send one message, of a session too, of which the answer is known; how it was answered.

        Args:
            method: its path.
            raw: the message.
            answers: what may be answered. So may be that there is no room, if it is told when.
            token, patience_s, metadata: as of `call`.
        """
        found, _ = await self._called(
            method, raw, gzip=len(raw) > GZIP_BYTES, token=token, patience_s=patience_s,
            metadata=metadata,
        )  # fmt: skip
        is_full = found.startswith("RESOURCE_EXHAUSTED ") and not found.endswith(")")
        if found in answers or is_full:
            self.count(found)
        else:
            self.count(f"{UNEXPECTED}{found}, not {' or '.join(answers)}")
        return found

    async def session(
        self,
        messages: Iterable[bytes],
        *,
        method: str = GENERATION + "StreamResult",
        read: bool = True,
        stay: bool = False,
        token: str | None = None,
        channel: grpc.aio.Channel | None = None,
        heard: Callable[[bytes], None] | None = None,
    ) -> None:
        """Send messages on one stream, and tally how it ended.

        Args:
            messages: what is sent, as fast as it is taken.
            method: its path.
            read: whether what comes is read.
            stay: whether the stream is kept open after the last message.
            token, channel: as of `call`.
            heard: called with each message that comes.
        """
        token = self.token if token is None else token
        metadata = [("authorization", f"Bearer {token}")] if token else []

        async def sent() -> AsyncIterator[bytes]:
            for number, raw in enumerate(messages):
                yield raw
                if number % 100 == 99:
                    await asyncio.sleep(0)
            if stay:
                await asyncio.Event().wait()

        via: Any = channel or self.channel
        call = via.stream_stream(method)(sent(), metadata=metadata)
        came = 0
        try:
            if not read:
                await asyncio.Event().wait()
            async for message in call:
                came += 1
                if heard is not None:
                    heard(message)
            self.count("OK")
        except grpc.aio.AioRpcError as error:
            self.count(told(error))
        except asyncio.CancelledError:
            self.count("stayed open")
            raise
        finally:
            call.cancel()
            if came:
                self.count("messages of sessions", came)

    async def crowd(self, number: int, one: Callable[[int], Awaitable[object]]) -> None:
        """So many at once."""
        await asyncio.gather(*(one(index) for index in range(number)))

    async def again(self, number: int, one: Callable[[int], Awaitable[object]]) -> None:
        """So many at once, each again and again, until the time is over."""

        async def on(index: int) -> None:
            while True:
                before = time.monotonic()
                await one(index)
                if time.monotonic() - before < 0.001:  # refused before it was sent
                    await asyncio.sleep(0.001)

        await self.crowd(number, on)

    async def close(self) -> None:
        """End all connections."""
        await asyncio.gather(*(channel.close() for channel in self._channels))


@asynccontextmanager
async def sender(target: str, card: Card, **more: str) -> AsyncIterator[Sender]:
    """A sender, whose connections are ended."""
    found = Sender(target, card, **more)
    try:
        yield found
    finally:
        await found.close()


async def _once(raw: bytes) -> AsyncIterator[bytes]:
    yield raw


def _refusal(message: bytes) -> str:
    """What a session's message says of a command that was refused, or a request that failed."""
    answer = rpc.StreamResultResponse.FromString(message)
    failed = [one.failed for one in answer.events if one.HasField("failed")]
    for one in (*answer.rejections, *failed):
        return status_told(code_pb2.Code.Name(one.status.code), one.status)
    return ""


def told(error: grpc.aio.AioRpcError) -> str:
    """What an error said: code, reason and field, and whether it lacked a time to try again."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            return status_told(error.code().name, status_pb2.Status.FromString(value))
    return f"{error.code().name} (bare)"


def status_told(code: str, status: status_pb2.Status) -> str:
    """The same of a status that came in a message."""
    reason, field, retry = "", "", False
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            reason = info.reason
            field = _INDEX.sub("[]", info.metadata.get("field", ""))
        retry = retry or detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR)
    if not reason:
        return f"{code} (bare)"
    late = code in ("RESOURCE_EXHAUSTED", "UNAVAILABLE") and not retry
    return (
        f"{code} {reason}" + (f" {field}" if field else "") + (" (no retry time)" if late else "")
    )
