"""Through which rooms a request walks before the engine has it (`python scripts/walk.py`).

    a client's add ──wire──▶ first interceptor ──calls──▶ … ──▶ the engine's inbox

A real server with the demo model runs in this process; one client opens a session and sends one
`add`. Every call of a function of ours on the event loop is noted, from the first interceptor to
the inbox, and each is in a room: a folder of the package (service/delivery), or a module beside
such folders (service/server.py). Where one call is in another room than the call before, that is a
change of room. A reader who follows the request opens as many doors.

- Methods of data classes are in no room.
- A function of a class counts as a call of its module, as does a coroutine that goes on; what
  Python makes (a comprehension, a lambda) belongs to the function that it stands in.

The code that is walked is that of the tree on PYTHONPATH, or else of the one the script is in; so
it can be run on another version: `PYTHONPATH=OTHER python scripts/walk.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # behind PYTHONPATH

import engine

ROOT = Path(engine.__file__).resolve().parents[1]
DEMO = ROOT / "models" / "demo"
PACKAGES = ("engine", "service")
PROMPT = "Once upon a time there was a mill by the river"


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function of ours: its file, from the root, and its name there."""

    file: str
    function: str

    @property
    def room(self) -> str:
        """Where it is."""
        return room_of(self.file)


def room_of(file: str) -> str:
    """The room of a file, which is given from the root."""
    package, inner, *deeper = file.split("/")
    return f"{package}/{inner}" if deeper else file


def visits(calls: list[Call]) -> list[tuple[str, list[str]]]:
    """The rooms in the order in which they are entered, with what is called in each."""
    found: list[tuple[str, list[str]]] = []
    for call in calls:
        if not found or found[-1][0] != call.room:
            found.append((call.room, []))
        found[-1][1].append(call.function)
    return found


def sizes() -> dict[str, int]:
    """How many lines each room has."""
    lines: Counter[str] = Counter()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            room = room_of(str(path.relative_to(ROOT)))
            lines[room] += len(path.read_text().splitlines())
    return dict(lines)


class Trace:
    """The calls of this thread while it is entered. `begin`, `end`: the qualified names of the
    first and the last function that count.
    """

    def __init__(self, begin: str, end: str) -> None:
        self.calls: list[Call] = []
        self._begin = begin
        self._end = end
        self._is_on = False
        self._is_over = False
        self._files: dict[str, str | None] = {}

    def __enter__(self) -> Trace:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _argument: object) -> None:
        if event != "call" or self._is_over:
            return
        code = frame.f_code
        file = self._file(code)
        if file is None or code.co_name.startswith("<") or _is_of_data(frame):
            return
        self._is_on = self._is_on or code.co_qualname.endswith(self._begin)
        if self._is_on:
            self.calls.append(Call(file, code.co_qualname))
            self._is_over = code.co_qualname == self._end

    def _file(self, code: CodeType) -> str | None:
        """Where the code stands, from the root; None: it is not ours."""
        name = code.co_filename
        if name not in self._files:
            path = Path(name)
            inside = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES
            self._files[name] = str(path.relative_to(ROOT)) if inside else None
        return self._files[name]


def _is_of_data(frame: FrameType) -> bool:
    """Whether a data class's method is called."""
    arguments = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    if not arguments or arguments[0] not in ("self", "cls"):
        return False
    return dataclasses.is_dataclass(frame.f_locals.get(arguments[0]))


async def walk() -> list[Call]:
    """The calls of one add, after another one has loaded what is loaded only once."""
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
    # Its clock stands still: what is measured now and then is measured with the first add.
    server = HeadraceServer(config, client, progress=lambda _line: None, clock=lambda: 0.0)
    await server.start()
    try:
        await server.ready()
        async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
            stub: Any = GenerationServiceStub(channel)

            async def add() -> None:
                spec = pb.GenerationSpec(text={"text": PROMPT}, stop={"max_tokens": 4})
                session = stub.StreamResult()
                await session.write(rpc.StreamResultRequest(add=rpc.AddCommand(spec=spec)))
                await session.done_writing()
                async for _ in session:
                    pass

            await add()
            with Trace("intercept_service", "Inbox.put") as trace:
                await add()
            return trace.calls
    finally:
        await server.stop()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print it for programs")
    options = parser.parse_args()
    calls = asyncio.run(walk())
    entered, lines = visits(calls), sizes()
    counts = Counter(room for room, _ in entered)
    if options.json:
        found = {
            "changes": len(entered) - 1,
            "calls": len(calls),
            "files": len({call.file for call in calls}),
            "visits": entered,
            "rooms": {room: {"visits": counts[room], "lines": lines[room]} for room in counts},
            "largest_room": max(lines.values()),
        }
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        return
    for number, (room, functions) in enumerate(entered, 1):
        sys.stdout.write(f"{number:3} {room:28} {', '.join(functions)}\n")
    sys.stdout.write("\nvisits  lines  room\n")
    for room, count in counts.most_common():
        sys.stdout.write(f"{count:6} {lines[room]:6}  {room}\n")
    sys.stdout.write(
        f"\n{len(calls)} calls in {len({call.file for call in calls})} files; {len(entered)} "
        f"visits to {len(counts)} rooms: {len(entered) - 1} changes of room\n"
    )


if __name__ == "__main__":
    main()
