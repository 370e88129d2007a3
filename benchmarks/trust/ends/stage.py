"""Where one request is brought into a state, beside others, and everything that can be seen of it
afterwards.

    neighbour ──▶ runs from the first step on       target ──▶ queued | prefilling | decoding
    blocker ────▶ has the second place, so that     (each on a connection of its own, the target's
                  the target waits                   through a proxy)
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from headrace.v1 import generation_service_pb2 as rpc
from headrace.v1.generation_service_pb2_grpc import GenerationServiceStub

from benchmarks.trust.ends.engine import Gate, ScriptedEngine, ScriptedProcess
from tests.engine.fake_runner import expected_tokens
from tests.service.ends import NAME, Caller, Outcome, of_events
from tests.service.fault_proxy import OWN_CONNECTION, FaultProxy, fault_proxy
from tests.service.helpers import Harness, serving, spec, until

TEXT = "what the target says, at"
"""24 tokens: two steps of 16, of which the neighbour has one."""
OTHER_TEXT = "others"
OTHERS_TOKENS = 40
DECODED = 2
"""How many tokens the target has in the state `decoding`."""
STEPS_TO = {"queued": 0, "prefilling": 1, "decoding": 3 + DECODED - 1}
"""How many steps the gate lets pass once the target is with the engine: the first carries it in."""


@dataclass(eq=False)
class Stage:
    """One server, and who uses it.

    Attributes:
        ahead_s: how far the service's clock is ahead.
        others: the requests beside the target, by name.
        tasks: what is to be awaited at the end.
    """

    h: Harness
    engine: Any
    gate: Gate
    proxy: FaultProxy
    caller: Caller
    undo: contextlib.ExitStack
    others: dict[str, asyncio.Future[Outcome]] = field(default_factory=dict)
    tasks: list[asyncio.Future[Any]] = field(default_factory=list)
    ahead_s: float = 0.0

    @property
    def in_process(self) -> bool:
        """Whether the engine is in this process."""
        return isinstance(self.engine, ScriptedEngine)

    def at_step(self, later: int, event: Any) -> None:
        """Let something happen in the step that is at the gate, or in one that comes later."""
        self.engine.at_step[self.gate.begun + later] = event

    async def add_other(self, name: str) -> None:
        """A request that nothing is done to; what becomes of it is in `others`."""
        wanted = spec(
            OTHER_TEXT + name,
            request_id=name,
            stop={"max_tokens": OTHERS_TOKENS, "ignore_eos": True},
        )
        await self.h.generation.AddRequest(rpc.AddRequestRequest(spec=wanted))
        self.others[name] = asyncio.ensure_future(self._end_of(name))
        request = self.h.registry.find("anonymous", name)
        await until(lambda: request.readers or not request.state.is_live)

    async def _end_of(self, name: str) -> Outcome:
        question = rpc.GetResultRequest(request_id=name, until_done=True, wait={"seconds": 60})
        try:
            answer = await self.h.generation.GetResult(question)
        except grpc.aio.AioRpcError as error:
            return Outcome(error.code().name)
        return of_events(list(answer.events), "OK")

    async def _pass_one(self) -> None:
        """Let the step at the gate pass, and wait for the next one. What is waited for is known
        before: an engine in another process may have it there at once.
        """
        number = self.gate.begun + 1
        self.gate.let(1)
        await until(lambda: self.gate.begun >= number)

    async def bring(self, state: str, *, deadline_s: float | None, event: str) -> bool:
        """Bring the target into its state; False: its deadline was there first."""
        gate = self.gate
        gate.shut()
        begun = gate.begun
        await self.add_other("neighbour")
        await until(lambda: gate.begun > begun)
        if state == "queued":
            await self.add_other("blocker")
            await self._pass_one()
        try:
            await self.caller.start(
                deadline_s=deadline_s,
                lease="lease" in event,
                another="another waits" in event,
                limit_s=LIMIT_S if event == "its time limit" else 0.0,
            )
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            if deadline_s is None:
                raise
            return False
        if not self.engine.holds(NAME):
            return False
        await self._pass_one()
        for _ in range(STEPS_TO[state] - 1):
            await self._pass_one()
        return deadline_s is None or not self.caller.call.done()


LIMIT_S = 5.0
"""The target's time limit, where it has one: the engine's clock is put ahead."""


def oracle(name: str) -> list[int]:
    """All tokens of one of the requests, by hand."""
    prompt = (TEXT if name == NAME else OTHER_TEXT + name).encode()
    return expected_tokens(list(prompt), OTHERS_TOKENS)


@asynccontextmanager
async def stage(
    kind: str, folder: Path, *, process: bool, hang_timeout_s: float
) -> AsyncIterator[Stage]:
    """A server around a scripted engine, with the target's caller behind a proxy."""
    path = folder / "gate"
    path.unlink(missing_ok=True)
    gate = Gate(path)
    found: list[Stage] = []
    engine: Any = (
        ScriptedProcess(gate, target=NAME, hang_timeout_s=hang_timeout_s)
        if process
        else ScriptedEngine(gate, target=NAME)
    )

    def clock() -> float:
        return asyncio.get_running_loop().time() + (found[0].ahead_s if found else 0.0)

    async with AsyncExitStack() as stack:
        undo = stack.enter_context(contextlib.ExitStack())
        stack.callback(gate.open)
        h = await stack.enter_async_context(
            serving(engine, result_retention_s=60, drain_timeout_s=60, clock=clock)
        )
        proxy = await stack.enter_async_context(fault_proxy(h.server.addresses[0]))
        channel = await stack.enter_async_context(
            grpc.aio.insecure_channel(proxy.target, options=OWN_CONNECTION)
        )
        caller = Caller(kind, h, GenerationServiceStub(channel), text=TEXT)
        there = Stage(h, engine, gate, proxy, caller, undo)
        found.append(there)
        try:
            yield there
        finally:
            gate.open()
            for task in (*there.tasks, *there.others.values(), caller.other):
                if task is not None:
                    task.cancel()
