"""The adapters of an engine: those that requests may name, and those that live requests still have.

    put ──▶ loaded ──▶ remove, or another put ──▶ unloading ──▶ its last request ends ──▶ gone
              └─▶ evicted, where another needs the memory, and neither a request nor a pin keeps it

A name means one content at a time. A request gets the content when it is accepted, and has it to
its end. So a change is one assignment, which no step waits for.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from engine.contract.adapters import Adapter, AdapterInfo
from engine.contract.errors import AdapterNotLoadedError, AdapterRoomError


@dataclass(frozen=True, slots=True)
class AdapterBounds:
    """What all adapters together may have: bytes of memory, and names."""

    max_bytes: int
    max_adapters: int


@dataclass(slots=True, eq=False)
class _Record:
    """An adapter in memory. `requests`: how many live requests have it. `used`: when a request last
    got it, as a number that grows.
    """

    adapter: Adapter
    is_pinned: bool
    used: int
    requests: int = 0
    is_loaded: bool = True

    @property
    def may_go(self) -> bool:
        return not self.requests and not self.is_pinned

    def told(self) -> AdapterInfo:
        one = self.adapter
        return AdapterInfo(
            name=one.name,
            digest=one.digest.hex(),
            rank=one.rank,
            nbytes=one.nbytes,
            modules=one.modules,
            base_model=one.base_model,
            state="loaded" if self.is_loaded else "unloading",
            is_pinned=self.is_pinned,
            requests=self.requests,
        )


class LoadedAdapters:
    """See the module. Any thread may use it; nothing here takes longer than looking at all.

    Attributes:
        are_served: whether requests may ever name adapters here.
        bounds: what all of them may have, for the statistics.
        expected_bytes: what all of them may come to have; 0: no others come.
        num_loads, num_evictions: how often one was loaded, and had to go for another.
    """

    def __init__(self) -> None:
        self.are_served = False
        self.bounds = AdapterBounds(0, 0)
        self.expected_bytes = 0
        self.num_loads = 0
        self.num_evictions = 0
        self._lock = threading.Lock()
        self._uses = itertools.count(1)
        self._named: dict[str, _Record] = {}
        self._records: dict[Adapter, _Record] = {}  # in memory: the named ones, and unloading ones

    # ---- requests ------------------------------------------------------------------------------

    def of_request(self, name: str) -> Adapter | None:
        """Return the adapter that a request names, or None if it names none ("").

        Raises:
            AdapterNotLoadedError: no adapter has this name.
        """
        with self._lock:
            record = self._find(name)
        return None if record is None else record.adapter

    @contextmanager
    def begun(self, names: Sequence[str]) -> Iterator[tuple[Adapter | None, ...]]:
        """Give requests the adapters that they name, until `end`. If the block raises, they have
        none.

        Raises:
            AdapterNotLoadedError: no adapter has one of these names.
        """
        with self._lock:
            records = [self._find(name) for name in names]
            for record in records:
                if record is not None:
                    record.requests += 1
                    record.used = next(self._uses)
        adapters = tuple(None if one is None else one.adapter for one in records)
        try:
            yield adapters
        except BaseException:
            self.end(adapters)
            raise

    def end(self, adapters: Iterable[Adapter | None]) -> None:
        """Take the adapters of requests that have ended."""
        with self._lock:
            for adapter in adapters:
                if adapter is not None:
                    record = self._records[adapter]
                    record.requests -= 1
                    self._forget_if_unused(record)

    def _find(self, name: str) -> _Record | None:
        if not name:
            return None
        record = self._named.get(name)
        if record is None:
            raise AdapterNotLoadedError(name)
        return record

    # ---- changes -------------------------------------------------------------------------------

    def put(
        self, adapter: Adapter, bounds: AdapterBounds, *, is_pinned: bool = False
    ) -> tuple[AdapterInfo, tuple[str, ...]]:
        """Let a name mean an adapter from now on. Unpinned ones without requests go if there is no
        room otherwise, the least recently used first.

        Returns:
            The adapter, and the names of those that went.

        Raises:
            AdapterRoomError: there is no room. Nothing has changed.
        """
        with self._lock:
            record = self._known(adapter)
            evicted = self._evict(adapter.name, 0 if record else adapter.nbytes, bounds)
            if record is None:
                record = _Record(adapter, is_pinned, next(self._uses))
                self._records[adapter] = record
            record.is_pinned, record.is_loaded = is_pinned, True
            before, self._named[adapter.name] = self._named.get(adapter.name), record
            if before is not None and before is not record:
                self._unload(before)
            self.num_loads += 1
            return record.told(), evicted

    def remove(self, name: str) -> tuple[Adapter, ...]:
        """Let a name mean nothing from now on.

        Returns:
            What requests still have under this name.

        Raises:
            AdapterNotLoadedError: no adapter has this name.
        """
        with self._lock:
            record = self._named.pop(name, None)
            if record is None:
                raise AdapterNotLoadedError(name, "name")
            self._unload(record)
            return tuple(one for one in self._records if one.name == name)

    def room(self, name: str, bounds: AdapterBounds) -> int:
        """Return how many bytes an adapter with this name could have at most, if others went."""
        with self._lock:
            before = self._named.get(name)
            kept = [one for one in self._records.values() if not one.may_go]
            return bounds.max_bytes - sum(
                one.adapter.nbytes for one in kept if one is not before or one.requests
            )

    def _known(self, adapter: Adapter) -> _Record | None:
        """Return the record of the same content under the same name, if it is in memory."""
        return next(
            (
                one
                for other, one in self._records.items()
                if (other.name, other.digest) == (adapter.name, adapter.digest)
            ),
            None,
        )

    def _evict(self, name: str, nbytes: int, bounds: AdapterBounds) -> tuple[str, ...]:
        """Make room for as many bytes under a name."""
        before = self._named.get(name)
        present = [one for one in self._records.values() if one is not before or one.requests]
        surplus = sum(one.adapter.nbytes for one in present) + nbytes - bounds.max_bytes
        others = len(self._named) + (before is None) - bounds.max_adapters
        gone: list[_Record] = []
        for one in sorted(present, key=lambda record: record.used):
            if surplus <= 0 and others <= 0:
                break
            if one.may_go:
                gone.append(one)
                surplus -= one.adapter.nbytes
                others -= 1
        if surplus > 0 or others > 0:
            raise AdapterRoomError.of(surplus, bounds.max_bytes, bounds.max_adapters)
        for one in gone:
            del self._named[one.adapter.name]
            self._unload(one)
        self.num_evictions += len(gone)
        return tuple(one.adapter.name for one in gone)

    def _unload(self, record: _Record) -> None:
        record.is_loaded = False
        self._forget_if_unused(record)

    def _forget_if_unused(self, record: _Record) -> None:
        if not record.is_loaded and not record.requests:
            del self._records[record.adapter]

    # ---- looking -------------------------------------------------------------------------------

    @property
    def awaited_bytes(self) -> int:
        """The memory that others may take which come later."""
        return max(self.expected_bytes - self.figures()["adapter_bytes"], 0)

    def is_loaded(self, adapter: Adapter) -> bool:
        """Whether requests may name this very content."""
        record = self._named.get(adapter.name)
        return record is not None and record.adapter is adapter

    def __contains__(self, name: str) -> bool:
        return name in self._named

    def all(self) -> tuple[Adapter, ...]:
        """Return the adapters that requests may name, in the order of their names."""
        with self._lock:
            return tuple(one.adapter for _, one in sorted(self._named.items()))

    def told(self) -> tuple[AdapterInfo, ...]:
        """Return all that are in memory."""
        with self._lock:
            return tuple(one.told() for one in self._records.values())

    def figures(self) -> dict[str, int]:
        """Return the statistics of EngineStats."""
        with self._lock:
            return {
                "adapters": len(self._named),
                "max_adapters": self.bounds.max_adapters,
                "adapter_bytes": sum(one.nbytes for one in self._records),
                "max_adapter_bytes": self.bounds.max_bytes,
                "adapter_loads": self.num_loads,
                "adapter_evictions": self.num_evictions,
            }
