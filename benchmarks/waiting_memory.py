"""What waiting requests take in memory, beside what admission counts them as.

    python -m benchmarks.waiting_memory --model $(python -m benchmarks model long)

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
import datetime
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import headrace
from headrace import HeadraceError
from headrace.errors import error_from_rpc
from headrace.v1 import control_service_pb2 as control
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_service_pb2 as rpc
from headrace.v1 import model_service_pb2 as model
from headrace.v1.control_service_pb2_grpc import ControlServiceStub
from headrace.v1.generation_service_pb2_grpc import GenerationServiceStub
from headrace.v1.model_service_pb2_grpc import ModelServiceStub

from benchmarks.stalled_readers import engine_of, figures, free_port, until
from benchmarks.witness.memory import resident

WAIT_S = 240.0
COUNT = 80
WARMING = 3
OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]

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

    def __init__(self, channel: grpc.aio.Channel, kind: str, shape: Shape) -> None:
        self._stub: Any = GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
        self._channel = channel
        self._kind = kind
        self._shape = shape
        self._calls: list[Any] = []  # kept: a call that is collected is cancelled

    async def add(self, seed: int) -> HeadraceError | None:
        """Add a request; returns None if it was admitted, otherwise the reason."""
        spec = make_spec(self._kind, self._shape, seed)
        try:
            if self._kind in CALLS:
                await self._call(spec)
            else:
                await self._stub.AddRequest(rpc.AddRequestRequest(spec=spec), timeout=WAIT_S)
        except grpc.aio.AioRpcError as error:
            return error_from_rpc(error)
        return None

    async def _call(self, spec: pb.GenerationSpec) -> None:
        """Begin a call that lasts as long as its request; return when the request is accepted."""
        before = (await figures(self._channel)).front_end.live_requests
        call = self._stub.Generate(rpc.GenerateRequest(spec=spec))

        def is_decided(now: Any) -> bool:
            return bool(call.done()) or now.front_end.live_requests > before

        await until(self._channel, is_decided, every_s=0.02)
        if call.done():
            await call
        self._calls.append(call)

    async def fill(self, seeds: range) -> tuple[int, int]:
        """Add requests until no more are admitted. Returns how many were admitted, and how many
        bytes admission counts then.
        """
        for admitted, seed in enumerate(seeds):
            if (refused := await self.add(seed)) is None:
                continue
            if refused.reason != "TOO_MANY_LIVE_BYTES":
                raise refused
            return admitted, int(refused.metadata["present"])
        raise RuntimeError("all of them were admitted")

    async def cancel(self, seeds: range) -> None:
        """Cancel some requests."""
        ids = [f"{self._kind}-{seed}" for seed in seeds]
        await self._stub.Cancel(rpc.CancelRequest(request_ids=ids), timeout=WAIT_S)


async def measure(kind: str, target: str, server: int, count: int) -> dict[str, Any]:
    """Measure one kind."""
    engine = engine_of(server)
    async with grpc.aio.insecure_channel(target, options=OPTIONS) as channel:
        stubs: Any = ModelServiceStub(channel)  # type: ignore[no-untyped-call]
        card = (await stubs.GetModel(model.GetModelRequest())).model
        shape = Shape(card.vocab_size, card.limits.max_prompt_tokens)
        stubs = ControlServiceStub(channel)  # type: ignore[no-untyped-call]
        await stubs.Pause(control.PauseRequest(reason="requests are to wait"))
        asker = Asker(channel, kind, shape)
        for seed in range(WARMING):
            if (refused := await asker.add(seed)) is not None:
                raise refused
        await asker.cancel(range(WARMING))
        await until(channel, lambda now: now.front_end.live_requests == 0)
        before = resident(server)[0], resident(engine)[0]
        admitted, refused = 0, None
        while admitted < count and refused is None:
            refused = await asker.add(WARMING + admitted)
            admitted += refused is None
        if refused is not None and refused.reason != "TOO_MANY_LIVE_BYTES":
            raise refused
        await asyncio.sleep(1.0)
        after = resident(server)[0], resident(engine)[0]
        if refused is not None:
            counted = int(refused.metadata["present"])
        else:
            filler = Asker(channel, FILLER, shape)
            more, full = await filler.fill(range(1000, 2000))
            await filler.cancel(range(1000, 1000 + more))
            await asker.cancel(range(WARMING, WARMING + admitted))
            await until(channel, lambda now: now.front_end.live_requests == 0)
            alone, full_alone = await filler.fill(range(2000, 3000))
            counted = full - round(more * full_alone / alone)
    each = [(now - then) / admitted for then, now in zip(before, after, strict=True)]
    return {
        "requests": admitted,
        "is_full": refused is not None,
        "counted_bytes_each": round(counted / admitted),
        "front_end_bytes_each": round(each[0]),
        "engine_bytes_each": round(each[1]),
        "measured_by_counted": round(sum(each) * admitted / counted, 3),
    }


def start_server(arguments: argparse.Namespace, address: str) -> subprocess.Popen[bytes]:
    """Start a server with default settings."""
    command = [
        str(Path(sys.executable).with_name("headrace-server")), "serve",
        "--model", arguments.model, "--listen", address, "--log-level", "warning",
    ]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def run(arguments: argparse.Namespace, kind: str) -> dict[str, Any]:
    """Measure one kind in a separate server."""
    address = f"127.0.0.1:{free_port()}"
    server = start_server(arguments, address)
    try:
        with headrace.Client(address) as client:
            client.wait_until_ready(timeout=WAIT_S)
        return asyncio.run(measure(kind, address, server.pid, arguments.requests))
    finally:
        server.send_signal(signal.SIGKILL)
        server.wait(60)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="models/demo", help="a model directory")
    parser.add_argument("--requests", type=int, default=COUNT)
    parser.add_argument("--kinds", nargs="*", choices=sorted(KINDS), default=list(KINDS))
    parser.add_argument(
        "--output", type=Path, default=Path("benchmarks/results/waiting_memory.json")
    )
    arguments = parser.parse_args()
    found = {}
    for kind in arguments.kinds:
        found[kind] = one = run(arguments, kind)
        print(kind, one, flush=True)
    record = {
        "date": datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
        "model": Path(arguments.model).name,
        "kinds": found,
        "load_average": os.getloadavg(),
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version()},
        "versions": {
            name: importlib.metadata.version(name)
            for name in ("grpcio", "protobuf", "llguidance", "headrace-server")
        },
    }
    arguments.output.write_text(json.dumps(record, indent=2) + "\n")
    print(f"\nwritten to {arguments.output}")


if __name__ == "__main__":
    main()
