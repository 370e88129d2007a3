"""Brings one request into a chosen state beside others, and gives access to all that can be
observed.

    neighbour ──▶ runs from the first step on       target ──▶ queued | prefilling | decoding
    blocker ────▶ has the second slot, so that      (each on a connection of its own, the target's
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

from engine.contract.errors import RanksLostError
from tests.campaign.ends.engine import Gate, ScriptedEngine, ScriptedProcess
from tests.engine.fake_runner import expected_tokens
from tests.service.ends import NAME, Caller, Outcome, Scene, of_events
from tests.service.fault_proxy import OWN_CONNECTION, fault_proxy
from tests.service.helpers import serving, spec, until

TEXT = "what the target says, at"
"""The target's prompt. Its 24 tokens take two steps of 16, each of which has one of the neighbour's
tokens.
"""
OTHER_TEXT = "others"
OTHERS_TOKENS = 40
DECODED = 2
"""The number of tokens that the target has in the state `decoding`."""
STEPS_TO = {"queued": 0, "prefilling": 1, "decoding": 3 + DECODED - 1}
"""The number of steps to let pass once the engine has the target. The first one admits it."""


@dataclass(eq=False)
class Stage(Scene):
    """One server and its callers.

    Attributes:
        gate: lets the engine's steps pass.
        undo: what ends a fault.
        others: the requests other than the target, by name.
        ahead_s: how far the service's clock is ahead, in seconds.
    """

    gate: Gate
    undo: contextlib.ExitStack
    others: dict[str, asyncio.Future[Outcome]] = field(default_factory=dict)
    ahead_s: float = 0.0

    async def cancel(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await super().cancel()

    async def pass_limit(self) -> None:
        self.gate.ahead_s += round(LIMIT_S) + 1

    async def error(self) -> None:
        self.gate.break_target(True)

    async def die(self) -> None:
        if self.in_process:

            def die() -> None:
                raise RanksLostError("the device is gone")

            self.at_step(0, die)
        elif self.engine._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.engine._process.kill()

    @property
    def in_process(self) -> bool:
        return isinstance(self.engine, ScriptedEngine)

    def at_step(self, later: int, event: Any) -> None:
        """Run an action in the step at the gate or in a later one."""
        self.engine.at_step[self.gate.begun + later] = event

    async def add_other(self, name: str) -> None:
        """Start a request that is left undisturbed; its outcome is stored in `others`."""
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
        """Let the step at the gate pass and wait for the next one.

        The number to wait for is computed first, because an engine in another process may reach the
        gate immediately.
        """
        number = self.gate.begun + 1
        self.gate.let(1)
        await until(lambda: self.gate.begun >= number)

    async def bring(self, state: str, *, deadline_s: float | None, event: str) -> bool:
        """Bring the target into its state. Returns False if its deadline came first."""
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
"""The target's time limit, if it has one; the test moves the engine's clock ahead to reach it."""


def oracle(name: str) -> list[int]:
    """Return all tokens of one of the requests, computed without the engine."""
    prompt = (TEXT if name == NAME else OTHER_TEXT + name).encode()
    return expected_tokens(list(prompt), OTHERS_TOKENS)


@asynccontextmanager
async def stage(
    kind: str, folder: Path, *, process: bool, hang_timeout_s: float
) -> AsyncIterator[Stage]:
    """Yield a server around a scripted engine, with the target's caller behind a proxy."""
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
        there = Stage(h, engine, proxy, caller, gate, undo)
        found.append(there)
        try:
            yield there
        finally:
            gate.open()
            for task in (*there.tasks, *there.others.values(), caller.other):
                if task is not None:
                    task.cancel()
