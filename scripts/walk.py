"""Through which rooms a request walks (`python scripts/walk.py`).

    wire ──▶ first interceptor ──▶ … ──▶ the engine's inbox               wire → inbox
    inbox ──▶ scheduler, batch, model ──▶ the sampler                     inbox → sampler
    one decode step of the engine, from its start to the next one's       decode step
    the step's outputs ──▶ delivery ──▶ the message to the client         token → wire

A real server with the demo model runs in this process, with its engine on a separate thread. One
client opens a session and sends one `add`. Every call of one of our functions is recorded and
belongs to a room: a folder of the package (service/delivery), or a module beside such folders
(service/state.py). If a call is in a different room than the previous call, that is a change of
room. A reader who follows the request has to open that many files.

- Values are in no room, since they are only created, compared and read (`VALUES`). Every other call
  counts, including those of data classes.
- A method counts as a call of its module, and so does a resumed coroutine. What Python generates (a
  comprehension, a lambda) belongs to the enclosing function.
- The clock runs normally: periodic measurements happen when they are due.

The script follows the code of the tree on PYTHONPATH, or of its own tree if that is not set. To run
it on another version, use `PYTHONPATH=OTHER python scripts/walk.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import threading
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # behind PYTHONPATH

import engine

ROOT = Path(engine.__file__).resolve().parents[1]
DEMO = ROOT / "models" / "demo"
PACKAGES = ("engine", "service")
PROMPT = "Once upon a time there was a mill by the river"
TOKENS = 16

VALUES = frozenset(
    f"engine/contract/{name}.py"
    for name in ("outputs", "request", "sampling_params", "token_ids", "types")
)
"""The modules of values: ids, parameters, outputs and the request itself."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of one of our functions: its file, relative to the root, and its name in the file."""

    file: str
    function: str

    @property
    def room(self) -> str:
        """The room of the call."""
        return room_of(self.file)


def room_of(file: str) -> str:
    """Return the room of a file, whose path is relative to the root."""
    package, inner, *deeper = file.split("/")
    return f"{package}/{inner}" if deeper else file


def visits(calls: list[Call]) -> list[tuple[str, list[str]]]:
    """Return the rooms in the order in which they are entered, with what is called in each."""
    found: list[tuple[str, list[str]]] = []
    for call in calls:
        if not found or found[-1][0] != call.room:
            found.append((call.room, []))
        found[-1][1].append(call.function)
    return found


def sizes() -> dict[str, int]:
    """Return how many lines each room has."""
    lines: Counter[str] = Counter()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            room = room_of(str(path.relative_to(ROOT)))
            lines[room] += len(path.read_text().splitlines())
    return dict(lines)


class Trace:
    """Records the calls of the thread that enters it, and of all threads that start while it is
    entered.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[int, Call]] = []
        self.is_on = False
        self._files: dict[str, str | None] = {}

    def __enter__(self) -> Trace:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, _argument: object) -> None:
        if event != "call" or not self.is_on:
            return
        code = frame.f_code
        file = self._file(code)
        if file is None or file in VALUES or code.co_name.startswith("<"):
            return
        self.calls.append((threading.get_ident(), Call(file, code.co_qualname)))

    def _file(self, code: CodeType) -> str | None:
        """Return the file of the code, relative to the root; None if it is not ours."""
        name = code.co_filename
        if name not in self._files:
            path = Path(name)
            inside = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES
            self._files[name] = str(path.relative_to(ROOT)) if inside else None
        return self._files[name]


def cut(calls: list[Call], *marks: str) -> list[Call]:
    """Return the calls from the first call that matches the first mark, through the next call for
    each further mark in turn. A mark is the end of a function's qualified name, or a file.
    """
    places: list[int] = []
    for mark in marks:
        first = places[-1] + 1 if places else 0
        places.append(
            next(
                index
                for index, call in enumerate(calls[first:], first)
                if call.file == mark or f".{call.function}".endswith(f".{mark}")
            )
        )
    return calls[places[0] : places[-1] + 1]


async def walks() -> dict[str, list[Call]]:
    """Record one add, after another one has loaded everything that is loaded only once."""
    with Trace() as trace:
        front = threading.get_ident()
        await _serve(trace)
    here = [call for thread, call in trace.calls if thread == front]
    there = [call for thread, call in trace.calls if thread != front]
    step = [index for index, call in enumerate(there) if call.function == "EngineCore.step"]
    told = [index for index, call in enumerate(here) if call.function == "Registry.on_step"]
    return {
        "wire → inbox": cut(here, "intercept_service", "Inbox.put"),
        "inbox → sampler": cut(there, "EngineLoop._add", "engine/sampling/sampler.py"),
        "decode step": _usual([there[i:j] for i, j in pairwise(step)]),
        "token → wire": _usual(
            [
                cut(here[i:], "Registry.on_step", "Responder.batch", "ResultStream.finished")
                for i in told[:-1]
            ]
        ),
    }


def _usual(walked: list[list[Call]]) -> list[Call]:
    """Return the median by changes of room. A request's first step has a prompt, and its last step
    ends it. Some tokens reach the front end while another one is being sent.
    """
    return sorted(walked, key=lambda calls: len(visits(calls)))[len(walked) // 2]


async def _serve(trace: Trace) -> None:
    """Send two adds to a server and record the calls of the second one."""
    import grpc
    from headrace.v1 import generation_pb2 as pb
    from headrace.v1 import generation_service_pb2 as rpc
    from headrace.v1.generation_service_pb2_grpc import GenerationServiceStub

    from engine.contract.config import ContinuousBatchingConfig, LoadConfig
    from engine.process.local_client import LocalEngineClient
    from service.config import ServiceConfig
    from service.server import HeadraceServer

    config = ServiceConfig(listen=("127.0.0.1:0",))
    batching = ContinuousBatchingConfig(
        block_size=32,
        num_blocks=64,
        max_requests_per_batch=2,
        max_queue_size=config.max_queue_size,
    )
    client = LocalEngineClient(str(DEMO), batching, LoadConfig(device="cpu", threads=1))
    server = HeadraceServer(config, client, progress=lambda _line: None)
    await server.start()
    try:
        await server.ready()
        async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
            stub: Any = GenerationServiceStub(channel)

            async def add() -> None:
                spec = pb.GenerationSpec(text={"text": PROMPT}, stop={"max_tokens": TOKENS})
                session = stub.StreamResult()
                await session.write(rpc.StreamResultRequest(add=rpc.AddCommand(spec=spec)))
                await session.done_writing()
                async for _ in session:
                    pass

            await add()
            trace.is_on = True
            await add()
            trace.is_on = False
    finally:
        await server.stop()


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print it for programs")
    options = parser.parse_args()
    found = asyncio.run(walks())
    if options.json:
        told = {
            name: {
                "changes": len(visits(calls)) - 1,
                "calls": len(calls),
                "files": len({call.file for call in calls}),
                "visits": visits(calls),
            }
            for name, calls in found.items()
        }
        sys.stdout.write(json.dumps({"walks": told, "lines": sizes()}, indent=2) + "\n")
        return
    for name, calls in found.items():
        entered = visits(calls)
        sys.stdout.write(f"\n{name}\n")
        for number, (room, functions) in enumerate(entered, 1):
            sys.stdout.write(f"{number:3} {room:20} {', '.join(functions)}\n")
    sys.stdout.write("\n")
    for name, calls in found.items():
        sys.stdout.write(
            f"{name:16} {len(visits(calls)) - 1:3} changes of room, {len(calls)} calls in "
            f"{len({call.file for call in calls})} files of {len(Counter(c.room for c in calls))} "
            "rooms\n"
        )


if __name__ == "__main__":
    main()
