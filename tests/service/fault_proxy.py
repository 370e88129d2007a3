"""A proxy between gRPC clients and a server that breaks connections on purpose.

    client ──▶ FaultProxy ──pump──▶ server
           ◀──pump──

It knows nothing of HTTP/2: it copies bytes, over TCP or Unix sockets, and each direction of each
connection (a `Flow`) may be stalled, slowed, delayed, half-closed or cut, by hand or by a
`Schedule`. A schedule counts bytes, not time: "after 713 bytes from the server, cut". So faults
fall in the middle of messages, and do not depend on how fast the machine is.

    async with fault_proxy(server.addresses[0], SeededSchedule(seed=1)) as proxy:
        channel = grpc.aio.insecure_channel(proxy.target, options=OWN_CONNECTION)
        ...
        proxy.cut()
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import random
import socket
import struct
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from service.door.address import Address, parse_address

OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]
"""Options of a channel that shares its connection with no other channel of this process."""

_CHUNK = 16 << 10
_PASSES = 10
"""Passes of the event loop after which a connection that was accepted is known here, and one that
was aborted has closed its socket.
"""
_TICK_S = 0.005


class Fault(enum.Enum):
    """What may happen to a flow."""

    CUT = "cut"  # the whole connection, with a reset
    CLOSE = "close"  # the whole connection, with an orderly end
    HALF_CLOSE = "half-close"  # this direction ends, the other one goes on for a while, then a cut
    STALL = "stall"  # nothing passes for a while, then a cut
    THROTTLE = "throttle"  # few bytes at a time
    DELAY = "delay"  # every piece comes later


@dataclass(frozen=True, slots=True)
class Planned:
    """A fault that is to come, once this many bytes have passed in one direction."""

    fault: Fault
    after_bytes: int
    to_client: bool = True


Schedule = Callable[[int], Planned | None]
"""What happens to the connection of this number (0, 1, 2, …); None: nothing."""


def no_faults(_number: int) -> Planned | None:
    """All connections are left alone."""
    return None


@dataclass(frozen=True, slots=True)
class SeededSchedule:
    """Draws a fault for each connection from (seed, its number).

    Attributes:
        seed: the same seed draws the same faults.
        faults: to draw from.
        after: bounds of the bytes that pass before the fault.
        spared: the part of the connections that are left alone; 0 to 1.
    """

    seed: int
    faults: tuple[Fault, ...] = tuple(Fault)
    after: tuple[int, int] = (0, 4000)
    spared: float = 0.0

    def __call__(self, number: int) -> Planned | None:
        """The fault of a connection."""
        source = random.Random(f"{self.seed}/{number}")
        if source.random() < self.spared:
            return None
        return Planned(
            source.choice(self.faults), source.randint(*self.after), source.random() < 0.8
        )


class Flow:
    """One direction of a connection.

    Attributes:
        passed: how many bytes were passed on.
        delay_s: how long each piece waits.
        piece: how many bytes pass at a time, with a pause after each; 0: any, without pauses.
    """

    def __init__(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, plan: Planned | None
    ) -> None:
        self.passed = 0
        self.delay_s = 0.0
        self.piece = 0
        self._source = source
        self._target = target
        self._plan = plan
        self._ended = False
        self._open = asyncio.Event()
        self._open.set()

    def stall(self) -> None:
        """Let nothing pass: what was not read yet stays with its sender."""
        self._open.clear()

    def go_on(self) -> None:
        """End a stall."""
        self._open.set()

    def half_close(self) -> None:
        """End this direction alone."""
        self._ended = True
        with contextlib.suppress(OSError):
            self._target.write_eof()

    async def pump(self, on_fault: Callable[[Flow, Fault], None]) -> None:
        """Copy until the source ends. A planned fault is reported once it is due."""
        while data := await self._source.read(self.piece or _CHUNK):
            await self._open.wait()
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            plan = self._plan
            if plan is not None and self.passed + len(data) >= plan.after_bytes:
                due = plan.after_bytes - self.passed
                await self._write(data[:due])
                self._plan = None
                on_fault(self, plan.fault)
                await self._open.wait()
                data = data[due:]
            if self._ended:
                return
            await self._write(data)
            if self.piece:
                await asyncio.sleep(_TICK_S)
        self.half_close()

    async def _write(self, data: bytes) -> None:
        if data:
            self._target.write(data)
            await self._target.drain()
            self.passed += len(data)


class Connection:
    """A client's connection, and the one to the server that belongs to it."""

    def __init__(
        self,
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        server: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        plan: Planned | None,
    ) -> None:
        self._writers = (client[1], server[1])
        down = plan if plan is not None and plan.to_client else None
        up = plan if plan is not None and not plan.to_client else None
        self.to_client = Flow(server[0], client[1], down)
        self.to_server = Flow(client[0], server[1], up)
        self._timers: list[asyncio.TimerHandle] = []

    def cut(self, *, reset: bool = True) -> None:
        """End the connection, on both sides at once."""
        for timer in self._timers:
            timer.cancel()
        for writer in self._writers:
            if reset:
                _reset_on_close(writer)
            writer.transport.abort()
        self.to_client.go_on()
        self.to_server.go_on()

    def stall(self) -> None:
        """Let nothing pass in either direction."""
        self.to_client.stall()
        self.to_server.stall()

    def go_on(self) -> None:
        """End a stall."""
        self.to_client.go_on()
        self.to_server.go_on()

    def apply(self, flow: Flow, fault: Fault) -> None:
        """Let a fault happen now. Those that leave a connection useless end with a cut."""
        match fault:
            case Fault.CUT | Fault.CLOSE:
                self.cut(reset=fault is Fault.CUT)
            case Fault.HALF_CLOSE:
                flow.half_close()
                self._cut_later()
            case Fault.STALL:
                flow.stall()
                self._cut_later()
            case Fault.THROTTLE:
                flow.piece = 200
            case Fault.DELAY:
                flow.delay_s = _TICK_S

    async def run(self) -> None:
        """Copy both ways until both have ended."""
        try:
            async with asyncio.TaskGroup() as pumps:
                for flow in (self.to_client, self.to_server):
                    pumps.create_task(self._pump(flow))
        finally:
            self.cut(reset=False)

    async def _pump(self, flow: Flow) -> None:
        with contextlib.suppress(OSError):  # the other side is gone, or a half-closed one writes
            await flow.pump(self.apply)

    def _cut_later(self) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(10 * _TICK_S, self.cut))


class FaultProxy:
    """Listens, connects on, and breaks. Made by `fault_proxy`.

    Attributes:
        target: where clients connect, as gRPC writes it.
        connections: those that are open, in the order in which they came.
        accepted: how many there were.
    """

    def __init__(self, upstream: Address, schedule: Schedule) -> None:
        self.target = ""
        self.connections: list[Connection] = []
        self.accepted = 0
        self._upstream = upstream
        self._schedule = schedule
        self._tasks: set[asyncio.Task[None]] = set()
        self._clients: set[asyncio.StreamWriter] = set()

    def lead_to(self, upstream: str) -> None:
        """Connect new clients to another server."""
        self._upstream = parse_address(upstream)

    def cut(self, *, reset: bool = True) -> None:
        """End all connections."""
        for connection in list(self.connections):
            connection.cut(reset=reset)

    def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A client has connected."""
        plan = self._schedule(self.accepted)
        self.accepted += 1
        self._clients.add(writer)
        task = asyncio.create_task(self._carry(reader, writer, plan))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, plan: Planned | None
    ) -> None:
        upstream = self._upstream
        try:
            if upstream.path is not None:
                server = await asyncio.open_unix_connection(upstream.path)
            else:
                server = await asyncio.open_connection(upstream.host, upstream.port)
            connection = Connection((reader, writer), server, plan)
            self.connections.append(connection)
            try:
                await connection.run()
            finally:
                self.connections.remove(connection)
        except OSError:
            pass  # nobody listens there: the client learns that its connection ended
        finally:
            writer.transport.abort()
            self._clients.discard(writer)

    async def close(self) -> None:
        """End all connections and wait for that. Nothing listens any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in self._clients:  # whose tasks had not begun
            client.transport.abort()
        await _passes()


@asynccontextmanager
async def fault_proxy(
    upstream: str, schedule: Schedule = no_faults, *, unix: bool = False
) -> AsyncIterator[FaultProxy]:
    """A proxy before the server at `upstream` (as gRPC writes it), on a free TCP port or on a Unix
    socket of its own.
    """
    proxy = FaultProxy(parse_address(upstream), schedule)
    with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
        if unix:
            path = Path(folder) / "proxy"
            listener: asyncio.Server = await asyncio.start_unix_server(proxy.serve, path)
            proxy.target = f"unix:{path}"
        else:
            listener = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
            proxy.target = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        try:
            yield proxy
        finally:
            # Accept no more, and let what was accepted get here: asyncio forgets a connection that
            # it was about to hand to a listener that is closed.
            for one in listener.sockets:
                asyncio.get_running_loop().remove_reader(one)
            await _passes()
            listener.close()
            await proxy.close()


async def _passes() -> None:
    for _ in range(_PASSES):
        await asyncio.sleep(0)


def _reset_on_close(writer: asyncio.StreamWriter) -> None:
    """Let the kernel send a reset instead of an orderly end. Unix sockets know no such thing."""
    raw: socket.socket | None = writer.get_extra_info("socket")
    if raw is not None and raw.family != socket.AF_UNIX and raw.fileno() >= 0:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
