"""What waiting requests take in memory, beside what admission counts them as.

    python -m benchmarks waiting_memory --model $(python -m benchmarks model long)

For each kind of request, a separate server is started with default settings. Its engine is paused,
so that all requests wait. Some warm-up requests are added first and cancelled. Then 80 requests are
added, or as many as are admitted, and the resident memory of the front end and of the engine's
process is read before and after. How many bytes admission counts for them is determined from its
limit: long prompts are added until it refuses one, with the requests and without them.

Resident memory is imprecise: a process keeps what it has freed, and its allocators take more than
they give out. For small requests it says little.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import headrace
from headrace import HeadraceError
from headrace.v1 import generation_pb2 as pb

from benchmarks.records import Record
from benchmarks.rig.load import connect, until
from benchmarks.rig.measurement import MODEL, Measurement, option
from benchmarks.rig.serving import WAIT_S, Process, serve

COUNT = 80
WARMING = 3

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Shape:
    """The model's vocabulary size and longest prompt."""

    vocab: int
    prompt: int

    def ids(self, count: int, seed: int = 0) -> list[int]:
        """Return token ids, all different as far as the vocabulary allows."""
        return [3 + (seed + 7919 * index) % (self.vocab - 3) for index in range(count)]


def _schema(properties: int) -> str:
    said = {"type": "string", "description": "x" * 400}
    fields = {f"property_{index:04}": said for index in range(properties)}
    return json.dumps({"type": "object", "properties": fields})


KINDS: dict[str, Callable[[Shape, int], Fields]] = {
    "plain": lambda shape, seed: {},
    "choices": lambda shape, seed: {"n": 16},
    "prompt": lambda shape, seed: {"tokens": {"ids": shape.ids(shape.prompt, seed)}},
    "prompt_choices": lambda shape, seed: {
        "tokens": {"ids": shape.ids(shape.prompt // 8, seed)},
        "n": 16,
    },
    "lists": lambda shape, seed: {
        "sampling": {
            "allowed_token_ids": range(shape.vocab),
            "banned_token_ids": range(1, shape.vocab),
        }
    },
    "biases": lambda shape, seed: {
        "sampling": {"logit_bias": dict.fromkeys(shape.ids(1024, seed), 1.5)}
    },
    "stop_strings": lambda shape, seed: {
        "n": 16,
        "stop": {
            "stop_strings": [f"{seed:05}{index:03}" + "x" * 248 for index in range(16)],
            "stop_token_ids": shape.ids(256, seed),
            "eos_token_ids": shape.ids(256, seed + 1),
        },
    },
    "schema": lambda shape, seed: {
        "structured_output": {"json_schema": _schema(480 - seed % 5)},
    },
    "schema_choices": lambda shape, seed: {
        "structured_output": {"json_schema": _schema(480 - seed % 5)},
        "n": 16,
    },
    "echo": lambda shape, seed: {
        "text": {"text": "word " * (shape.prompt // 6)},
        "output": {"echo": True},
    },
    "waiting_call": lambda shape, seed: {"tokens": {"ids": shape.ids(shape.prompt, seed)}},
}
"""The fields of a spec for each kind, given a model and a number."""
FILLER = "prompt"
CALLS = ("waiting_call",)
"""The kinds that use Generate, whose message gRPC keeps; the others use AddRequest."""


def make_spec(kind: str, shape: Shape, seed: int) -> pb.GenerationSpec:
    """Return a request of a kind, unlike that of any other number."""
    fields = {"text": {"text": f"Number {seed}"}, **KINDS[kind](shape, seed)}
    if "tokens" in fields:
        del fields["text"]
    stop = {"max_tokens": 1, **fields.pop("stop", {})}
    return pb.GenerationSpec(request_id=f"{kind}-{seed}", stop=stop, **fields)


class Asker:
    """Adds requests of a kind to a server."""

    def __init__(self, client: headrace.AsyncClient, kind: str, shape: Shape) -> None:
        self._client = client
        self._kind = kind
        self._shape = shape
        self._calls: list[asyncio.Task[Any]] = []

    async def add(self, seed: int) -> HeadraceError | None:
        """Add a request; returns None if it was admitted, otherwise the reason."""
        spec = make_spec(self._kind, self._shape, seed)
        try:
            if self._kind in CALLS:
                await self._call(spec)
            else:
                await self._client.add_request(spec, timeout=WAIT_S)
        except HeadraceError as error:
            return error
        return None

    async def _call(self, spec: pb.GenerationSpec) -> None:
        """Begin a call that lasts as long as its request; return when the request is accepted."""
        before = (await self._client.control.statistics()).front_end.live_requests
        call = asyncio.ensure_future(self._client.generate(spec))

        def is_decided(now: Any) -> bool:
            return call.done() or now.front_end.live_requests > before

        await until(self._client, is_decided, every_s=0.02)
        if call.done():
            await call
        self._calls.append(call)

    async def fill(self, seeds: range) -> tuple[int, int | None]:
        """Add requests until no more are admitted. Returns how many were admitted, and how many
        bytes admission counts then; None if all were.
        """
        for admitted, seed in enumerate(seeds):
            if (refused := await self.add(seed)) is None:
                continue
            if refused.reason != "TOO_MANY_LIVE_BYTES":
                raise refused
            return admitted, int(refused.metadata["present"])
        return len(seeds), None

    async def cancel(self, seeds: range) -> None:
        await self._client.cancel(f"{self._kind}-{seed}" for seed in seeds)
        await asyncio.gather(*self._calls, return_exceptions=True)
        self._calls.clear()


async def measure_kind(kind: str, server: Process, count: int) -> dict[str, Any]:
    async with connect(server) as client:
        card = await client.model()
        shape = Shape(card.vocab_size, card.limits.max_prompt_tokens)
        await client.control.pause("requests are to wait")
        asker = Asker(client, kind, shape)
        await asker.fill(range(WARMING))
        await asker.cancel(range(WARMING))
        await until(client, lambda now: now.front_end.live_requests == 0)
        before = server.memory()
        admitted, counted = await asker.fill(range(WARMING, WARMING + count))
        await asyncio.sleep(1.0)
        after = server.memory()
        if not (is_full := counted is not None):
            filler = Asker(client, FILLER, shape)
            more, full = await filler.fill(range(1000, 2000))
            await filler.cancel(range(1000, 1000 + more))
            await asker.cancel(range(WARMING, WARMING + admitted))
            await until(client, lambda now: now.front_end.live_requests == 0)
            alone, full_alone = await filler.fill(range(2000, 3000))
            if full is None or full_alone is None:
                raise RuntimeError("all of them were admitted")
            counted = full - round(more * full_alone / alone)
    each = {name: (after[name] - size) / admitted for name, size in before.items()}
    return {
        "requests": admitted,
        "is_full": is_full,
        "counted_bytes_each": round(counted / admitted),
        "front_end_bytes_each": round(each["front_end"]),
        "engine_bytes_each": round(each["engine"]),
        "measured_by_counted": round(sum(each.values()) * admitted / counted, 3),
    }


def measure(options: argparse.Namespace, record: Record) -> None:
    for kind in options.kinds:
        with serve("--log-level", "warning", model=options.model) as server:
            found = asyncio.run(measure_kind(kind, server, options.requests))
        record.put(found, "kinds", kind)


MEASUREMENT = Measurement(
    measure=measure,
    options=(
        MODEL,
        option("requests", COUNT),
        option("kinds", list(KINDS), nargs="*", choices=sorted(KINDS)),
    ),
)
