"""Loads and unloads of adapters beside each other: in turn, in bounds, and given up."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any, cast

import pytest

from engine.contract.adapters import Adapter, AdapterLoad, AdapterLoaded
from engine.contract.errors import (
    AdapterExistsError,
    AdapterNotLoadedError,
    AdapterRefusedError,
    AdapterRoomError,
)
from engine.contract.loaded_adapters import AdapterBounds, LoadedAdapters
from engine.core.loop import EngineLoop
from engine.loading.adapters.adapter_loading import AdapterLoader
from engine.process.adapter_loads import MAX_LOADING, AdapterLoads

DEADLINE_S = 30.0


class Loader:
    """Reads an adapter when it is let."""

    def __init__(self, adapters: LoadedAdapters) -> None:
        self.adapters = adapters
        self.may_read = threading.Event()
        self.threads: list[threading.Thread] = []
        self.most = 0
        self._reading = 0

    def read(self, load: AdapterLoad) -> Adapter:
        self.threads.append(threading.current_thread())
        self._reading += 1
        self.most = max(self.most, self._reading)
        assert self.may_read.wait(DEADLINE_S)
        self._reading -= 1
        if load.source == "broken":
            raise AdapterRefusedError("it is damaged")
        return Adapter(load.name, load.source.encode().ljust(32), 8, 1, 1, "", None)

    def put(self, adapter: Adapter, load: AdapterLoad) -> AdapterLoaded:
        told, evicted = self.adapters.put(adapter, AdapterBounds(100, 100))
        return AdapterLoaded(told, evicted)


class Engine:
    """Notes whose requests are to end."""

    def __init__(self) -> None:
        self.cancelled: list[Adapter] = []
        self.is_cancelled = asyncio.Event()

    def cancel_of(self, adapters: tuple[Adapter, ...]) -> None:
        self.cancelled += adapters
        self.is_cancelled.set()


class Rig:
    def __init__(self, *, open: bool = True) -> None:
        self.adapters = LoadedAdapters()
        self.loader = Loader(self.adapters)
        self.engine = Engine()
        if open:
            self.loader.may_read.set()
        self.loads = AdapterLoads(
            cast(EngineLoop, self.engine), self.adapters, cast(AdapterLoader, self.loader)
        )

    def load(self, name: str, source: str = "s", **more: Any) -> asyncio.Task[AdapterLoaded]:
        load = AdapterLoad(name=name, source=source, **more)
        return asyncio.ensure_future(self.loads.load(load))

    async def begun(self, count: int) -> None:
        """Wait until this many wait to be read, or are."""
        async with asyncio.timeout(DEADLINE_S):
            while len(self.loads.told()) < count:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0)


async def test_one_at_a_time_beside_everything_else() -> None:
    rig = Rig(open=False)
    tasks = [rig.load(f"n{i}") for i in range(4)]
    await rig.begun(4)
    assert {one.state for one in rig.loads.told()} == {"loading"}
    rig.loader.may_read.set()
    async with asyncio.timeout(DEADLINE_S):
        found = await asyncio.gather(*tasks)
    assert [one.adapter.name for one in found] == ["n0", "n1", "n2", "n3"]
    assert rig.loader.most == 1
    assert threading.current_thread() not in rig.loader.threads
    assert {one.state for one in rig.loads.told()} == {"loaded"}


async def test_a_load_tells_its_own_time() -> None:
    """The time in which it waited for another is not its own."""
    rig = Rig(open=False)
    began = time.monotonic()
    first, second = rig.load("a"), rig.load("b")
    await rig.begun(2)
    rig.loader.may_read.set()
    async with asyncio.timeout(DEADLINE_S):
        found = [await first, await second]
    took = time.monotonic() - began
    assert all(one.took_s > 0 for one in found)
    assert sum(one.took_s for one in found) <= took


async def test_a_storm_of_loads_is_bounded() -> None:
    rig = Rig(open=False)
    tasks = [rig.load(f"n{i}") for i in range(MAX_LOADING)]
    await rig.begun(MAX_LOADING)
    with pytest.raises(AdapterRoomError, match="16 adapters are being loaded"):
        await rig.load("another")
    for name in ("n0", "n15"):  # what is given up still has its place
        assert rig.loads.unload(name, None) == 0
    with pytest.raises(AdapterRoomError):
        await rig.load("another")
    rig.loader.may_read.set()
    async with asyncio.timeout(DEADLINE_S):
        found = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(one, AdapterRefusedError) for one in found] == [
        name in ("n0", "n15") for name in (f"n{i}" for i in range(MAX_LOADING))
    ]
    assert len(rig.loader.threads) == MAX_LOADING - 1, "what was given up in time is not read"
    assert len(rig.loads.told()) == MAX_LOADING - 2
    await rig.load("another")


async def test_a_name_that_is_taken() -> None:
    rig = Rig()
    await rig.load("a", "one")
    with pytest.raises(AdapterExistsError, match="is loaded; set replace"):
        await rig.load("a", "two")
    assert len(rig.loader.threads) == 1, "it was read for nothing"
    await rig.load("a", "two", replaces=True)
    rig.loader.may_read.clear()
    first = rig.load("a", "three", replaces=True)
    await rig.begun(2)
    with pytest.raises(AdapterExistsError, match="is being loaded"):
        await rig.load("a", "four", replaces=True)
    rig.loader.may_read.set()
    assert (await first).adapter.name == "a"


async def test_an_unload_gives_up_what_loads_and_takes_what_is_loaded() -> None:
    rig = Rig()
    await rig.load("a", "one")
    rig.loader.may_read.clear()
    second = rig.load("a", "two", replaces=True)
    await rig.begun(2)
    assert rig.loads.unload("a", None) == 0
    assert rig.loads.told() == ()
    third = rig.load("a", "three")
    await rig.begun(1)
    rig.loader.may_read.set()
    with pytest.raises(AdapterRefusedError, match="was unloaded while it was being loaded"):
        await second
    assert (await third).adapter.digest == b"three".ljust(32).hex()
    with pytest.raises(AdapterNotLoadedError, match="name: no adapter"):
        rig.loads.unload("b", None)


async def test_one_that_cannot_be_read_leaves_nothing() -> None:
    rig = Rig()
    with pytest.raises(AdapterRefusedError, match="it is damaged"):
        await rig.load("a", "broken")
    assert rig.loads.told() == ()
    await rig.load("a")


@pytest.mark.parametrize("timeout_s", [None, 0.0])
async def test_requests_go_on_until_the_timeout(timeout_s: float | None) -> None:
    rig = Rig()
    await rig.load("a")
    with rig.adapters.begun(["a", "a"]) as [had, _]:
        pass
    assert rig.loads.unload("a", timeout_s) == 2
    if timeout_s is not None:
        async with asyncio.timeout(DEADLINE_S):
            await rig.engine.is_cancelled.wait()
        assert rig.engine.cancelled == [had]
    else:
        await asyncio.sleep(0)
        assert not rig.engine.cancelled
    assert [one.state for one in rig.loads.told()] == ["unloading"]


async def test_without_a_root_none_is_loaded() -> None:
    adapters = LoadedAdapters()
    loads = AdapterLoads(cast(EngineLoop, Engine()), adapters, None)
    with pytest.raises(AdapterRefusedError, match="--adapter-root DIR"):
        await loads.load(AdapterLoad(name="a", source="s"))
