"""How an attacker sends: plain gRPC with messages as bytes, and a tally of the answers."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any

import grpc
from google.rpc import code_pb2, status_pb2
from headrace.v1 import generation_service_pb2 as rpc
from headrace.v1.model_service_pb2 import ModelCard

from service.convert.inputs import MIN_MOST_TEXT_BYTES, TEXT_BYTES_OF_TOKEN
from service.servicers.model_servicer import MIN_MOST_TOKENS
from tests.service.helpers import details

GENERATION = "/headrace.v1.GenerationService/"
MODEL = "/headrace.v1.ModelService/"
CONTROL = "/headrace.v1.ControlService/"
HEALTH = "/grpc.health.v1.Health/"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
GENERATE, STREAM = GENERATION + "Generate", GENERATION + "GenerateStream"
SESSION, CANCEL = GENERATION + "StreamResult", GENERATION + "Cancel"
ADD, GET = GENERATION + "AddRequest", GENERATION + "GetResult"
TOKENIZE, DETOKENIZE = MODEL + "Tokenize", MODEL + "Detokenize"
STREAMED = frozenset({STREAM, HEALTH + "Watch", CONTROL + "WatchStatistics"})
SESSIONS = frozenset({SESSION, REFLECTION})
OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_metadata_size", 16 << 20),
    ("grpc.enable_retries", 0),
]
NO_ANSWER = "no answer"
"""The tally's key for calls that were still open when time was up."""
KEPT_KINDS = 40
"""The number of distinct answers in a tally; all further ones are counted together."""
UNEXPECTED = "unexpected: "
"""The prefix of unexpected answers in a tally."""
GZIP_BYTES = 64 << 10
"""Messages longer than this are sent compressed; the server still receives the full length."""
_INDEX = re.compile(r"\[\d+\]")


class Sender:
    """One attacker's connections and its tally of answers.

    Attributes:
        tls_target: the server's TCP address with TLS; empty if it has none.
        token: the attacker's token; empty for a stranger.
        operator: a token that may call ControlService.
        card: the model's card, and `limits`, the server's limits on it.
        source: the random generator for everything that is drawn.
        channel: the default connection of all calls.
    """

    def __init__(
        self,
        target: str,
        card: ModelCard,
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
        self.limits = card.limits
        self.source = random.Random(seed)
        self.tally: Counter[str] = Counter()
        self.connections = 0
        self._channels: list[grpc.aio.Channel] = []
        self.channel = self.connect()

    @property
    def below(self) -> int:
        """A payload size that keeps a message just below the server's size limit."""
        return self.limits.max_message_bytes - (4 << 10)

    @property
    def above(self) -> int:
        """A payload size far above the server's size limit."""
        return min(4 * self.limits.max_message_bytes, self.limits.max_message_bytes + (4 << 20))

    @property
    def sizes(self) -> tuple[int, int]:
        return self.below, self.above

    @property
    def longest_text(self) -> int:
        """The length in bytes of the longest text that the server accepts within the message size
        limit.
        """
        return min(
            self.below,
            max(MIN_MOST_TEXT_BYTES, TEXT_BYTES_OF_TOKEN * self.limits.max_context_tokens),
        )

    @property
    def most_ids(self) -> int:
        """The most ids that the server detokenizes within the message size limit."""
        return min(self.below // 3, max(MIN_MOST_TOKENS, self.limits.max_context_tokens))

    def connect(self, *more: tuple[str, int], certificate: bytes | None = None) -> grpc.aio.Channel:
        """Return a new channel, with more options. It connects on first use and stays open until
        `close`. certificate: the server's, to connect by TLS.
        """
        self.connections += 1
        options = [*OPTIONS, ("headrace.number", self.connections), *more]
        if certificate is None:
            channel = grpc.aio.insecure_channel(self.target, options=options)
        else:
            trusted = grpc.ssl_channel_credentials(certificate)
            channel = grpc.aio.secure_channel(self.tls_target, trusted, options=options)
        self._channels.append(channel)
        return channel

    def credentials(self, token: str | None = None) -> list[tuple[str, str | bytes]]:
        """Return the metadata with a token: None for the attacker's own, empty for none."""
        token = self.token if token is None else token
        return [("authorization", f"Bearer {token}")] if token else []

    def count(self, what: str, number: int = 1) -> None:
        known = what in self.tally or len(self.tally) < KEPT_KINDS
        self.tally[what if known else "other answers"] += number

    async def call(self, method: str, raw: bytes = b"", **more: Any) -> bytes | None:
        """Send one message, read all answers and tally how the call ended. Returns the first
        answer. `more`: as of `called`.
        """
        found, answer = await self.called(method, raw, **more)
        self.count(found)
        return answer

    async def called(
        self,
        method: str,
        raw: bytes,
        *,
        gzip: bool = False,
        token: str | None = None,
        channel: grpc.aio.Channel | None = None,
        patience_s: float | None = None,
        metadata: Sequence[tuple[str, str | bytes]] = (),
    ) -> tuple[str, bytes | None]:
        """Send one message and read all answers. Returns how the call ended and its first answer;
        only a cancelled call is tallied here.

        token: None for the attacker's own, empty for none. channel: None for the default one.
        patience_s: the call's timeout.
        """
        metadata = [*metadata, *self.credentials(token)]
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

    async def ask(self, method: str, raw: bytes, answers: Sequence[str], **more: Any) -> str:
        """Send one message, which may be a session's command, and compare the answer with those
        expected. A refusal for lack of room with a retry time is always expected. Returns the
        answer. `more`: as of `called`.
        """
        found, _ = await self.called(method, raw, gzip=len(raw) > GZIP_BYTES, **more)
        is_full = found.startswith("RESOURCE_EXHAUSTED ") and not found.endswith(")")
        if is_full or any(map(partial(fits, found), answers)):
            self.count(found)
        else:
            self.count(f"{UNEXPECTED}{found}, not {' or '.join(answers)}")
        return found

    async def session(
        self,
        messages: Iterable[bytes],
        *,
        method: str = SESSION,
        read: bool = True,
        stay: bool = False,
        channel: grpc.aio.Channel | None = None,
    ) -> None:
        """Send messages on one stream, as fast as the server accepts them, and tally how it ended.
        read: whether the answers are read. stay: whether the stream stays open after the last
        message.
        """

        async def sent() -> AsyncIterator[bytes]:
            for number, raw in enumerate(messages):
                yield raw
                if number % 100 == 99:
                    await asyncio.sleep(0)
            if stay:
                await asyncio.Event().wait()

        via: Any = channel or self.channel
        call = via.stream_stream(method)(sent(), metadata=self.credentials())
        came = 0
        try:
            if not read:
                await asyncio.Event().wait()
            async for _ in call:
                came += 1
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
        await asyncio.gather(*(one(index) for index in range(number)))

    async def again(self, number: int, one: Callable[[int], Awaitable[object]]) -> None:
        """Run `number` workers that each repeat a coroutine until time is up."""

        async def on(index: int) -> None:
            while True:
                before = time.monotonic()
                await one(index)
                if time.monotonic() - before < 0.001:  # refused before it was sent
                    await asyncio.sleep(0.001)

        await self.crowd(number, on)

    async def __aenter__(self) -> Sender:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels))


async def _once(raw: bytes) -> AsyncIterator[bytes]:
    yield raw


def _refusal(message: bytes) -> str:
    """Return the refusal or failure that a session's message reports."""
    answer = rpc.StreamResultResponse.FromString(message)
    failed = [one.failed for one in answer.events if one.HasField("failed")]
    for one in (*answer.rejections, *failed):
        return status_told(code_pb2.Code.Name(one.status.code), one.status)
    return ""


def fits(answer: str, expected: str) -> bool:
    """Whether an answer is the expected one; `*` ends a prefix."""
    is_prefix = expected.endswith("*")
    return answer.startswith(expected[:-1]) if is_prefix else answer == expected


def told(error: grpc.aio.AioRpcError) -> str:
    """Format an error as code, reason and field, with a note if a retry time is missing."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            return status_told(error.code().name, status_pb2.Status.FromString(value))
    return f"{error.code().name} (bare)"


def status_told(code: str, status: status_pb2.Status) -> str:
    """Format a status that came in a message in the same way as `told`."""
    found = details(status)
    if "ErrorInfo" not in found:
        return f"{code} (bare)"
    info = found["ErrorInfo"]
    field = _INDEX.sub("[]", info.metadata.get("field", ""))
    late = code in ("RESOURCE_EXHAUSTED", "UNAVAILABLE") and "RetryInfo" not in found
    return f"{code} {info.reason}" + f" {field}" * bool(field) + " (no retry time)" * late
