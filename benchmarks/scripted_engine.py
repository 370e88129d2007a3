"""An engine that computes nothing, for measuring what is in front of it, and servers around it.

    python -m benchmarks.scripted_engine ADDRESS KIND COUNT STEPS PER_SECOND

KIND: `together` runs the service with the scripted engine in the same process. `process` runs the
engine in a separate process, behind the real socket, frames and worker. `bare` has no service at
all, only the minimum that gRPC and protobuf need for the same messages.

The engine waits for COUNT requests. Then each of STEPS steps gives every request its next token,
from a real text in the demo model's vocabulary. Each request starts at a different position in the
text. After that, the engine waits for the next COUNT requests. PER_SECOND: steps per second; 0 for
no pause.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_service_pb2 as rpc
from headrace.v1 import generation_service_pb2_grpc

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

DEMO = Path(__file__).parents[1] / "models" / "demo"
_VOCAB_SIZE = 4096
_APART = 97
"""How many tokens of the text lie between the beginnings of two outputs."""


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
    """The scripted engine; see the module. Methods of the protocol that are not used here do
    nothing.
    """

    is_restartable = False
    failure: Exception | None = None

    def __init__(self, count: int, steps: int, per_second: float) -> None:
        self._count = count
        self._steps = steps
        self._per_second = per_second
        self._tokens = real_tokens()
        self._waiting: list[tuple[GenerationRequest, float]] = []
        self._full = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    async def start(self, sink: StepSink, progress: ProgressSink) -> ModelInfo:
        """Start waiting for requests."""
        progress("a scripted engine")
        self._running = asyncio.create_task(self._run(sink))
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
            max_context_tokens=1 << 20,
            default_sampling=SamplingParams(),
            max_running_requests=self._count,
            max_queue_size=0,
            heeds_priorities=False,
        )

    async def submit(self, request: GenerationRequest) -> Admission:
        """Accept a request."""
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

    async def cancel(self, request_id: RequestId) -> bool:
        """Do nothing, because no request ends early here."""
        return False

    async def stats(self) -> EngineStats:
        """Return no statistics."""
        return EngineStats()

    async def close(self) -> None:
        """Close the engine."""
        if self._running is not None:
            self._running.cancel()

    async def wait_failed(self) -> Exception:
        """Wait forever, because the engine never fails."""
        await asyncio.Event().wait()
        raise AssertionError


def in_a_process(count: int, steps: int, per_second: float) -> ProcessEngineClient:
    """Return the real client of an engine's process, whose worker drives a scripted engine."""
    root = str(Path(__file__).parents[1])
    client = ProcessEngineClient(str(DEMO), log_level="warning")
    client._program = (
        f"import sys; sys.path.insert(0, {root!r})\n"
        "from engine.process import worker\n"
        "from benchmarks.scripted_engine import ScriptedEngine\n"
        "worker.LocalEngineClient = "
        f"lambda *_, **__: ScriptedEngine({count}, {steps}, {per_second})\n"
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
        """Send one message per step."""
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
    """Serve until killed."""
    server = grpc.aio.server()
    generation_service_pb2_grpc.add_GenerationServiceServicer_to_server(
        Bare(count, steps, per_second), server
    )
    server.add_insecure_port(address)
    await server.start()
    sys.stderr.write("Stop it with SIGKILL\n")
    await server.wait_for_termination()


def main() -> None:
    """Run the command."""
    address, kind = sys.argv[1:3]
    count, steps, per_second = int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5])
    if kind == "bare":
        asyncio.run(serve_bare(address, count, steps, per_second))
        return
    config = ServiceConfig(listen=(address,), default_time_limit_s=0, max_time_limit_s=0)
    client: EngineClient = (
        in_a_process(count, steps, per_second)
        if kind == "process"
        else ScriptedEngine(count, steps, per_second)
    )
    with Output(config.log_format, config.log_level) as output:
        run_to_the_end(config, client, output)


if __name__ == "__main__":
    main()
