"""Several servers around engines whose tokens are known beforehand, in a thread beside the test's:
real gRPC over loopback, each server behind a proxy that can break its connections.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from typing import Any, TypeVar

import grpc

from service.config import ServiceConfig
from service.server import HeadraceServer
from tests.service.fake_engine import FakeEngine, byte_tokenizer, model_info
from tests.service.fault_proxy import FaultProxy, fault_proxy

WAIT_S = 30.0
"""No single wait takes longer: what does is stuck."""

_T = TypeVar("_T")


class Member:
    """One server of a farm.

    Attributes:
        target: where clients reach it.
        engine: what generates its tokens; use it by `Farm.run` alone where it must not run itself.
    """

    def __init__(self, farm: Farm, engine: FakeEngine) -> None:
        self._farm = farm
        self._ends = AsyncExitStack()
        self._proxy: FaultProxy | None = None
        self._proxies: dict[str, FaultProxy] = {}  # by where they listen
        self._is_gone = False
        self.engine = engine
        self.target = ""

    async def _start(self, address: str, behind_proxy: bool, options: dict[str, Any]) -> None:
        config = ServiceConfig(**{"listen": (address,), "drain_timeout_s": WAIT_S, **options})
        self.server = HeadraceServer(
            config, self.engine, tokenizer_loader=lambda _info: byte_tokenizer(), jitter=lambda: 0.0
        )
        await self.server.start()
        self._ends.push_async_callback(self.server.stop)
        if self.engine.load_gate is None:
            await self.server.ready()
        self.target = self.server.addresses[0]
        if behind_proxy:
            self._proxy = await self._ends.enter_async_context(fault_proxy(self.target))
            self.target = self._proxy.target
            self._proxies[self.target] = self._proxy

    @property
    def instance_id(self) -> str:
        """Its process, as it tells clients."""
        return self.server.state.instance_id

    @property
    def names(self) -> list[str]:
        """The ids of the requests that its engine got, in order; as clients name them."""
        own = [str(one.request_id) for one in self.engine.submitted]  # identity/name#number
        return [name.partition("/")[2].rpartition("#")[0] for name in own]

    @property
    def connections(self) -> int:
        """How many clients' connections its proxies have."""
        return sum(len(proxy.connections) for proxy in self._proxies.values())

    @property
    def count(self) -> int:
        """How many requests its engine got."""
        return len(self.engine.submitted)

    def step(self, times: int = 1) -> None:
        """Has the engine make some steps."""
        self._farm.call(lambda: [self.engine.step() for _ in range(times)])

    def go_on(self) -> None:
        """Has an engine that was made to stand still run by itself from now on."""

        async def run() -> None:
            self.engine.auto = True
            self.engine.loop = asyncio.create_task(self.engine._run_loop())
            self.engine._work.set()

        self._farm.run(run())

    def second_target(self) -> str:
        """Another address at which clients reach it, behind a proxy of its own."""

        async def begin() -> str:
            proxy = await self._ends.enter_async_context(fault_proxy(self.server.addresses[0]))
            self._proxies[proxy.target] = proxy
            return proxy.target

        return self._farm.run(begin())

    def give_address_to(self, other: Member, target: str) -> None:
        """Another server has this address of it from now on."""
        proxy = self._proxies[target]
        proxy.lead_to(other.server.addresses[0])
        self._farm.call(proxy.cut)

    def drain(self) -> None:
        """Begin a drain."""
        self._farm.call(lambda: self.server.begin_drain() and None)

    def cut(self) -> None:
        """Break all connections; new ones are taken."""
        assert self._proxy is not None
        self._farm.call(self._proxy.cut)

    def unplug(self) -> None:
        """The network is away: all connections break, and new ones lead nowhere."""
        assert self._proxy is not None
        self._proxy.lead_to("127.0.0.1:1")  # a port at which nobody listens
        self.cut()

    def plug_in(self) -> None:
        """The network is back."""
        assert self._proxy is not None
        self._proxy.lead_to(self.server.addresses[0])

    def kill(self) -> None:
        """The process dies: nothing listens, all connections break, all requests are lost."""
        if not self._is_gone:
            self._is_gone = True
            self._farm.run(self._ends.aclose())


class Farm:
    """The servers, and their thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.members: list[Member] = []

    def start(
        self,
        *,
        auto: bool = True,
        address: str = "127.0.0.1:0",
        behind_proxy: bool = True,
        engine: FakeEngine | None = None,
        info: dict[str, Any] | None = None,
        **options: Any,
    ) -> Member:
        """One more server; `auto`: whether its engine runs by itself; `options`: of its service."""

        async def begin() -> Member:
            member = Member(self, engine or FakeEngine(auto=auto, info=model_info(**(info or {}))))
            await member._start(address, behind_proxy, options)
            return member

        member = self.run(begin())
        self.members.append(member)
        return member

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Does something in the servers' thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)

    def call(self, act: Callable[[], Any]) -> Any:
        """Calls something there."""

        async def work() -> Any:
            found = act()
            return await found if isinstance(found, Awaitable) else found

        return self.run(work())

    def until(self, condition: Callable[[], Any]) -> None:
        """Waits until something is true of the servers."""

        async def wait() -> None:
            async with asyncio.timeout(WAIT_S):
                while not condition():  # noqa: ASYNC110 - what is waited for has no event
                    await asyncio.sleep(0.001)

        self.run(wait())

    def close(self) -> None:
        """Ends all servers and the thread."""
        for member in self.members:
            member.kill()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()


class SilentServer(grpc.GenericRpcHandler):  # type: ignore[misc]
    """A server that takes every call, and never answers.

    Attributes:
        target: where clients reach it.
        calls: the methods of the calls that it has taken.
    """

    def __init__(self) -> None:
        self.target = ""
        self.calls: list[str] = []
        self.over = threading.Event()

    def service(self, details: Any) -> Any:
        """The handler of every method."""

        def wait(_request: Any, _context: Any) -> None:
            self.calls.append(details.method.rpartition("/")[2])
            self.over.wait(WAIT_S)

        return grpc.unary_unary_rpc_method_handler(wait)


@contextmanager
def silent_server() -> Iterator[SilentServer]:
    """A server that never answers."""
    silent = SilentServer()
    with ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads, handlers=[silent])
        silent.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            yield silent
        finally:
            silent.over.set()
            server.stop(0).wait()
