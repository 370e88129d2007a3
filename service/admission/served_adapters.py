"""The adapters that requests may name, as the front end knows them.

    LoadAdapter, UnloadAdapter ──▶ ServedAdapters ◀── requests: is there one with this name?
                                        └──▶ EngineClient.list_adapters, for ListAdapters

The engine has the last word: it gives a request its adapter, or refuses it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from engine.contract.adapters import AdapterInfo, AdapterLoaded, why_no_name
from engine.contract.engine_client import EngineVerbs, ModelInfo
from engine.contract.errors import ConfigError
from service.errors.call_errors import FieldError

MAX_AGE_S = 0.1
"""The age up to which a list answers other calls, so that callers cannot keep the engine busy."""

_OF_MODEL = "a name of the served model, which requests would mean; choose another"

MayUse = Callable[[str], bool]
"""Says whether a caller may use the adapter with a name."""


class ServedAdapters:
    """The adapters of one started engine; see the module. All methods run on one event loop.

    Attributes:
        are_served: whether requests may ever name adapters here.
    """

    def __init__(
        self,
        client: EngineVerbs,
        info: ModelInfo,
        model_names: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`info`: what the engine started with. `model_names`: those of the served model. `clock`:
        returns monotonic seconds.

        Raises:
            ConfigError: an adapter has a name of the model, which requests would mean.
        """
        self.are_served = info.serves_adapters
        self._client = client
        self._model_names = tuple(model_names)
        self._clock = clock
        # Replaced as a whole: the thread of the metrics' page reads them.
        self._names = frozenset(one.name for one in info.adapters)
        self._told: tuple[AdapterInfo, ...] = ()
        self._asked_at = self._changed_at = -MAX_AGE_S
        self._asking = asyncio.Lock()
        if shadowed := self._names.intersection(model_names):
            raise ConfigError("adapters", f"has {min(shadowed)!r}, {_OF_MODEL}")

    def check_name(self, name: str) -> None:
        """Check the name of an adapter that is to be loaded.

        Raises:
            FieldError: it cannot be the name of an adapter.
        """
        if reason := why_no_name(name):
            raise FieldError("name", reason)
        if name in self._model_names:
            raise FieldError("name", f"is {name!r}, {_OF_MODEL}")

    @property
    def names(self) -> frozenset[str]:
        """The adapters that requests may name. May be read on any thread."""
        return self._names

    def has(self, name: str, may_use: MayUse) -> bool:
        """Return whether requests of a caller may name this adapter."""
        return name in self._names and may_use(name)

    def loaded(self, loaded: AdapterLoaded) -> None:
        """Record that an adapter was loaded, and others had to go."""
        self._names = self._names.difference(loaded.evicted) | {loaded.adapter.name}
        self._changed_at = self._clock()

    def unloaded(self, name: str) -> None:
        """Record that an adapter was unloaded."""
        self._names = self._names.difference((name,))
        self._changed_at = self._clock()

    async def all(self) -> tuple[AdapterInfo, ...]:
        """Return all adapters, in the order of their names.

        Raises:
            EngineUnavailableError: the engine is being started again, or has stopped.
        """
        async with self._asking:
            now = self._clock()
            if self._asked_at <= self._changed_at or now - self._asked_at > MAX_AGE_S:
                told = await self._client.list_adapters()
                self._told = tuple(sorted(told, key=lambda one: (one.name, one.digest)))
                self._asked_at = now
            return self._told
