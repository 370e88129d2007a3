"""Adapters that are loaded and unloaded while the engine runs.

    load ──▶ its turn ──▶ a thread: files, checks, packing ──▶ LoadedAdapters.put
    unload ──▶ LoadedAdapters.remove ──▶ its requests go on ──▶ after a while: cancelled

One is read at a time, on a thread that ends with it. No step waits for that, and requests see the
one assignment at its end.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from engine.contract.adapters import AdapterInfo, AdapterLoad, AdapterLoaded
from engine.contract.errors import (
    AdapterExistsError,
    AdapterNotLoadedError,
    AdapterRefusedError,
    AdapterRoomError,
)
from engine.contract.loaded_adapters import LoadedAdapters
from engine.core.loop import EngineLoop
from engine.core.threads import await_on_own_thread

if TYPE_CHECKING:
    from engine.loading.adapters.adapter_loading import AdapterLoader

MAX_LOADING = 16
"""How many adapters may be read, or wait for that."""


class AdapterLoads:
    """The loads in progress. All methods run on one event loop."""

    def __init__(
        self, engine: EngineLoop, adapters: LoadedAdapters, loader: AdapterLoader | None
    ) -> None:
        """`loader`: None if none are loaded after the start."""
        self._engine = engine
        self._adapters = adapters
        self._loader = loader
        self._loading: dict[str, AdapterLoad] = {}  # without those that are given up
        self._present = 0
        self._turn = asyncio.Lock()

    async def load(self, load: AdapterLoad) -> AdapterLoaded:
        """Load an adapter; see EngineVerbs.load_adapter."""
        if self._loader is None:
            raise AdapterRefusedError(
                "source: this server was given no directory of adapters; start it with "
                "--adapter-root DIR"
            )
        if load.name in self._loading:
            raise AdapterExistsError(load.name, "is being loaded; wait for that, or unload it")
        if load.name in self._adapters and not load.replaces:
            raise AdapterExistsError(load.name, "is loaded; set replace, or unload it first")
        if self._present >= MAX_LOADING:
            raise AdapterRoomError(
                f"{self._present} adapters are being loaded, and no more may; try again when some "
                "are"
            )
        self._loading[load.name] = load
        self._present += 1
        try:
            async with self._turn:
                self._check_wanted(load)
                began = time.monotonic()
                read = partial(self._loader.read, load)
                adapter = await await_on_own_thread(read, "headrace-adapter")
                self._check_wanted(load)
                loaded = self._loader.put(adapter, load)
                return replace(loaded, took_s=time.monotonic() - began)
        finally:
            self._present -= 1
            if self._loading.get(load.name) is load:
                del self._loading[load.name]

    def _check_wanted(self, load: AdapterLoad) -> None:
        if self._loading.get(load.name) is not load:
            raise AdapterRefusedError(f"{load.name!r} was unloaded while it was being loaded")

    def unload(self, name: str, timeout_s: float | None) -> int:
        """Unload an adapter; see EngineVerbs.unload_adapter."""
        given_up = self._loading.pop(name, None)
        try:
            gone = self._adapters.remove(name)
        except AdapterNotLoadedError:
            if given_up is None:
                raise
            return 0
        requests = sum(one.requests for one in self._adapters.told() if one.name == name)
        if timeout_s is not None:
            cancel = partial(self._engine.cancel_of, gone)
            asyncio.get_running_loop().call_later(timeout_s, cancel)
        return requests

    def told(self) -> tuple[AdapterInfo, ...]:
        """Return all adapters; see EngineVerbs.list_adapters."""
        loading = [
            AdapterInfo(name=one.name, state="loading", is_pinned=one.is_pinned)
            for one in self._loading.values()
        ]
        return (*self._adapters.told(), *loading)
