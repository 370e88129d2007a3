"""An engine that computes nothing, for measuring what is in front of it, and servers around it.

    python -m benchmarks.scripted_engine together|process|bare COUNT STEPS PER_SECOND --listen …
    python -m benchmarks.scripted_engine paced PINGS_S --listen ADDRESS

`together` runs the service with the scripted engine in the same process. `process` runs the engine
in a separate process, behind the real socket, frames and worker. `bare` has no service at all, only
the minimum that gRPC and protobuf need for the same messages. In these three, the engine waits for
COUNT requests. Then each of STEPS steps gives every request its next token, from a real text in the
demo model's vocabulary. Each request starts at a different position in the text. After that, the
engine waits for the next COUNT requests. PER_SECOND: steps per second; 0 for no pause.

In `paced`, a prompt says what happens to its request, and when (`prompt_of`). The output depends on
how often the request was begun, so a client can check whether it got the whole output of a single
run. `tries_of` is a prompt that asks for this number. PINGS_S: after how many seconds the server
pings a silent connection.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_service_pb2 as rpc
from headrace.v1 import generation_service_pb2_grpc

from benchmarks.models import DEMO, byte_level
from engine.contract.engine_client import Admission, EngineClient, ModelInfo, ProgressSink, StepSink
from engine.contract.outputs import (
    Finish,
    FinishReason,
    RequestOutput,
    StepOutputs,
    StepRecord,
    Timings,
    Usage,
)
from engine.contract.request import GenerationRequest
from engine.contract.sampling_params import SamplingParams
from engine.contract.stats import EngineStats
from engine.contract.types import RequestId, TokenId
from engine.process.process_client import ProcessEngineClient
from engine.text import Tokenizer
from service.command.process import run_to_the_end
from service.config import ServiceConfig
from service.logs.output import Output

_VOCAB_SIZE = 4096
_APART = 97
"""How many tokens of the text lie between the beginnings of two outputs."""
STEP_S = 0.02
"""The time of a step of `paced`."""
_ORDER = re.compile(r"(\S+) wait=(\S+) every=(\S+) ")
_TRIES = re.compile(r"tries (\S+)")
_HEAD = 200
"""The order is within this many tokens of the prompt's beginning."""


def prompt_of(key: str, *, wait_s: float, every_s: float, size: int = 0) -> str:
    """Return the prompt of a request to `paced`: its unique name, the seconds until its first token
    and between two tokens, and the prompt's size in bytes; 0 for the smallest.
    """
    return f"{key} wait={wait_s:g} every={every_s:g} ".ljust(size, ".")


def tries_of(key: str) -> str:
    """Return a prompt that asks how often a request was begun."""
    return f"tries {key}"


def real_tokens() -> list[TokenId]:
    """Return a real text as the demo model's tokens."""
    tokenizer = Tokenizer.load(DEMO, _VOCAB_SIZE)
    text = (DEMO / "text" / "stories.txt").read_text()
    return [TokenId(token_id) for token_id in tokenizer.encode(text)]


async def ticks(per_second: float) -> AsyncIterator[None]:
    """Yield once for each step that is due; late steps follow immediately."""
    due = time.monotonic()
    while True:
        await asyncio.sleep(max(due - time.monotonic(), 0) if per_second else 0)
        yield
        due += 1 / per_second if per_second else 0


class ScriptedEngine(EngineClient):
    """What all scripts share. Methods of the protocol that are not used here do nothing."""

    is_restartable = False
    failure: Exception | None = None

    def __init__(self, running: int) -> None:
        """Create an engine. running: the most requests that run at the same time."""
        self._max_running = running
        self._loop: asyncio.Task[None] | None = None

    async def start(self, sink: StepSink, progress: ProgressSink) -> ModelInfo:
        progress("a scripted engine")
        self._loop = asyncio.create_task(self._run(sink))
        return ModelInfo(
            name="scripted",
            path=str(DEMO),
            architecture="none",
            parameters=0,
            dtype="float32",
            quantization="none",
            device="cpu",
            vocab_size=_VOCAB_SIZE,
            eos_token_ids=(),
            max_context_tokens=1 << 22,
            default_sampling=SamplingParams(),
            max_running_requests=self._max_running,
            max_queue_size=0,
            heeds_priorities=False,
        )

    async def _run(self, sink: StepSink) -> None:
        raise NotImplementedError

    async def cancel(self, request_id: RequestId) -> bool:
        """Do nothing: no request ends early, unless a script says so."""
        return False

    async def stats(self) -> EngineStats:
        return EngineStats()

    async def close(self) -> None:
        if self._loop is not None:
            self._loop.cancel()

    async def wait_failed(self) -> Exception:
        """Wait forever, because the engine never fails."""
        await asyncio.Event().wait()
        raise AssertionError


class TextEngine(ScriptedEngine):
    """Gives COUNT requests a text, all in the same steps; see the module."""

    def __init__(self, count: int, steps: int, per_second: float) -> None:
        super().__init__(count)
        self._count = count
        self._steps = steps
        self._per_second = per_second
        self._tokens = real_tokens()
        self._waiting: list[tuple[GenerationRequest, float]] = []
        self._full = asyncio.Event()

    async def submit(self, request: GenerationRequest) -> Admission:
        arrival = time.monotonic()
        self._waiting.append((request, arrival))
        if len(self._waiting) == self._count:
            self._full.set()
        return Admission(len(self._waiting) - 1, arrival)

    async def _run(self, sink: StepSink) -> None:
        while True:
            await self._full.wait()
            self._full.clear()
            requests, self._waiting = self._waiting, []
            clock = ticks(self._per_second)
            for step in range(self._steps):
                await anext(clock)
                sink(self._step(requests, step))

    def _step(self, requests: list[tuple[GenerationRequest, float]], step: int) -> StepOutputs:
        tokens, now = self._tokens, time.monotonic()
        first, last = step == 0, step == self._steps - 1
        outputs = []
        for index, (request, arrival) in enumerate(requests):
            token = tokens[(index * _APART + step) % len(tokens)]
            if not (first or last):
                outputs.append(RequestOutput(request.request_id, 0, (token,)))
                continue
            finish = None
            if last:
                finish = Finish(
                    FinishReason.LENGTH,
                    Usage(len(request.prompt), 0, self._steps),
                    Timings(arrival, arrival, arrival, now, now, 0),
                )
            outputs.append(
                RequestOutput(
                    request.request_id,
                    token_ids=(token,),
                    prompt_done=0 if first else None,
                    finish=finish,
                    ends_request=last,
                )
            )
        return StepOutputs(now, tuple(outputs), StepRecord(0.01, len(requests), 0, len(requests)))


@dataclass(slots=True)
class _Live:
    """A request of `PacedEngine`: when its tokens come, and what they are, over and over again."""

    request: GenerationRequest
    arrival: float
    wait_s: float
    every_s: float
    tokens: Sequence[TokenId]
    most: int
    generated: int = 0
    is_cancelled: bool = False

    def next_output(self, now: float) -> RequestOutput | None:
        """Return what a step produces for it; None if nothing."""
        name = self.request.request_id
        if self.is_cancelled:
            return RequestOutput(
                name, finish=self._end(FinishReason.CANCELLED, now), ends_request=True
            )
        if now < self.arrival + self.wait_s + self.every_s * self.generated:
            return None
        token = self.tokens[self.generated % len(self.tokens)]
        self.generated += 1
        is_last = self.generated == self.most
        return RequestOutput(
            name,
            token_ids=(token,),
            prompt_done=0 if self.generated == 1 else None,
            finish=self._end(FinishReason.LENGTH, now) if is_last else None,
            ends_request=is_last,
        )

    def _end(self, reason: FinishReason, now: float) -> Finish:
        usage = Usage(len(self.request.prompt), 0, self.generated)
        first = self.arrival + self.wait_s if self.generated else None
        return Finish(
            reason, usage, Timings(self.arrival, self.arrival, first, first and now, now, 0)
        )


class PacedEngine(ScriptedEngine):
    """Does what prompts say; see the module. Its tokens are those of `byte_tokenizer`."""

    def __init__(self) -> None:
        super().__init__(4096)
        self._tokenizer = byte_tokenizer()
        self._begun: Counter[str] = Counter()
        self._live: dict[RequestId, _Live] = {}

    async def submit(self, request: GenerationRequest) -> Admission:
        head = self._tokenizer.decode(request.prompt[:_HEAD])
        wait_s, every_s, most = 0.0, 0.0, request.stop.max_tokens or 1
        if asked := _TRIES.match(head):
            text = f"{self._begun[asked[1]]}"
            most = len(text)
        elif order := _ORDER.match(head):
            self._begun[order[1]] += 1
            text = f"{self._begun[order[1]] % 10}"
            wait_s, every_s = float(order[2]), float(order[3])
        else:
            text, most = ".", 1
        tokens = [TokenId(token) for token in self._tokenizer.encode(text)]
        arrival = time.monotonic()
        self._live[request.request_id] = _Live(request, arrival, wait_s, every_s, tokens, most)
        return Admission(0, arrival)

    async def cancel(self, request_id: RequestId) -> bool:
        """End a request with the next step."""
        if live := self._live.get(request_id):
            live.is_cancelled = True
        return live is not None

    async def _run(self, sink: StepSink) -> None:
        async for _ in ticks(1 / STEP_S):
            now = time.monotonic()
            outputs = [one for live in self._live.values() if (one := live.next_output(now))]
            for output in outputs:
                if output.ends_request:
                    del self._live[output.request_id]
            if outputs:
                record = StepRecord(STEP_S, len(outputs), 0, len(outputs))
                sink(StepOutputs(now, tuple(outputs), record))


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer whose tokens are bytes."""
    return Tokenizer(byte_level(_VOCAB_SIZE), vocab_size=_VOCAB_SIZE)


def in_a_process(count: int, steps: int, per_second: float) -> ProcessEngineClient:
    """Return the real client of an engine's process, whose worker drives a scripted engine."""
    root = str(Path(__file__).parents[1])
    client = ProcessEngineClient(str(DEMO), log_level="warning")
    client._program = (
        f"import sys; sys.path.insert(0, {root!r})\n"
        "from engine.process import worker\n"
        "from benchmarks.scripted_engine import TextEngine\n"
        f"worker.LocalEngineClient = lambda *_, **__: TextEngine({count}, {steps}, {per_second})\n"
        "worker.main()"
    )
    return client


class Bare(generation_service_pb2_grpc.GenerationServiceServicer):
    """A session without a service behind it: it reads adds and answers with steps of events."""

    def __init__(self, count: int, steps: int, per_second: float) -> None:
        self._count = count
        self._steps = steps
        self._per_second = per_second
        tokenizer = Tokenizer.load(DEMO, _VOCAB_SIZE)
        self._pieces = [(token, tokenizer.token_text(token)) for token in real_tokens()]

    async def StreamResult(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        for _ in range(self._count):
            await anext(request_iterator)
        clock, numbers = ticks(self._per_second), itertools.count(1)
        for step in range(self._steps):
            await anext(clock)
            yield rpc.StreamResultResponse(events=self._events(step, next(numbers)))

    def _events(self, step: int, number: int) -> Iterator[pb.ResultEvent]:
        for index in range(self._count):
            token, text = self._pieces[(index * _APART + step) % len(self._pieces)]
            delta = pb.Delta(token_ids=(token,), text=text)
            yield pb.ResultEvent(request_number=index + 1, seq=number, delta=delta)


async def serve_bare(address: str, count: int, steps: int, per_second: float) -> None:
    server = grpc.aio.server()
    generation_service_pb2_grpc.add_GenerationServiceServicer_to_server(
        Bare(count, steps, per_second), server
    )
    server.add_insecure_port(address)
    await server.start()
    sys.stderr.write("Stop it with SIGKILL\n")
    await server.wait_for_termination()


def serve_paced(address: str, pings_s: float) -> None:
    config = ServiceConfig(
        listen=(address,), max_receive_bytes=8 << 20, keepalive_interval_s=pings_s
    )
    with Output(config.log_format, config.log_level) as output:
        run_to_the_end(
            config, PacedEngine(), output, tokenizer_loader=lambda _info: byte_tokenizer()
        )


def main() -> None:
    kind, *numbers, _, address = sys.argv[1:]
    if kind == "paced":
        serve_paced(address, float(numbers[0]))
    count, steps, per_second = int(numbers[0]), int(numbers[1]), float(numbers[2])
    if kind == "bare":
        asyncio.run(serve_bare(address, count, steps, per_second))
        return
    config = ServiceConfig(listen=(address,), default_time_limit_s=0, max_time_limit_s=0)
    client = (in_a_process if kind == "process" else TextEngine)(count, steps, per_second)
    with Output(config.log_format, config.log_level) as output:
        run_to_the_end(config, client, output)


if __name__ == "__main__":
    main()
