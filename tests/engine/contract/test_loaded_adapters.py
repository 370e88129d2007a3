"""The adapters of an engine: what a name means, who keeps what, and who has to go."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.contract.adapters import Adapter
from engine.contract.errors import AdapterNotLoadedError, AdapterRoomError
from engine.contract.loaded_adapters import AdapterBounds, LoadedAdapters

BOUNDS = AdapterBounds(max_bytes=1000, max_adapters=4)
NAMES = ("a", "b", "c", "d", "e", "f")


def made(name: str, content: int = 0, nbytes: int = 300) -> Adapter:
    digest = f"{content:x}/{nbytes}".encode().ljust(32)
    return Adapter(name, digest, 8, nbytes, 1, "base", None)


def begin(adapters: LoadedAdapters, name: str) -> Adapter | None:
    with adapters.begun([name]) as [adapter]:
        return adapter


def states(adapters: LoadedAdapters) -> dict[str, str]:
    return {one.name: one.state for one in adapters.told()}


def test_the_least_recently_used_goes_first() -> None:
    adapters = LoadedAdapters()
    for name in ("a", "b", "c"):
        adapters.put(made(name), BOUNDS)
    adapters.end([begin(adapters, "a")])
    assert adapters.put(made("d"), BOUNDS)[1] == ("b",)
    assert sorted(states(adapters)) == ["a", "c", "d"]
    assert adapters.figures() == {
        "adapters": 3, "max_adapters": 0, "adapter_bytes": 900, "max_adapter_bytes": 0,
        "adapter_loads": 4, "adapter_evictions": 1,
    }  # fmt: skip


def test_pins_and_requests_keep_what_they_keep() -> None:
    adapters = LoadedAdapters()
    adapters.put(made("pinned"), BOUNDS, is_pinned=True)
    adapters.put(made("used"), BOUNDS)
    adapters.put(made("idle"), BOUNDS)
    had = begin(adapters, "used")
    assert adapters.room("new", BOUNDS) == 400
    with pytest.raises(AdapterRoomError, match="101 bytes are missing") as raised:
        adapters.put(made("new", nbytes=501), BOUNDS)
    assert raised.value.missing_bytes == 101
    assert "idle" in adapters, "it went for nothing"
    assert adapters.put(made("new", nbytes=400), BOUNDS)[1] == ("idle",)
    adapters.end([had])
    assert adapters.room("other", BOUNDS) == 700


def test_there_may_be_too_many() -> None:
    adapters = LoadedAdapters()
    for name in NAMES[:4]:
        adapters.put(made(name, nbytes=1), BOUNDS, is_pinned=name != "b")
    assert adapters.put(made("e", nbytes=1), BOUNDS, is_pinned=True)[1] == ("b",)
    with pytest.raises(AdapterRoomError, match="max_adapters is 4") as raised:
        adapters.put(made("f", nbytes=1), BOUNDS)
    assert raised.value.missing_bytes == 0
    adapters.put(made("e", 1, nbytes=1), BOUNDS)  # takes its own place


def test_requests_that_are_refused_have_nothing() -> None:
    adapters = LoadedAdapters()
    adapters.put(made("a"), BOUNDS)
    with pytest.raises(AdapterNotLoadedError), adapters.begun(["a", "gone"]):
        pass

    def no_room() -> None:
        with adapters.begun(["a", ""]) as found:
            assert found[1] is None
            raise KeyError

    with pytest.raises(KeyError):
        no_room()
    assert [one.requests for one in adapters.told()] == [0]


def test_a_replaced_content_goes_with_its_last_request() -> None:
    adapters = LoadedAdapters()
    adapters.put(made("a", 1), BOUNDS)
    before = [begin(adapters, "a") for _ in range(2)]
    adapters.put(made("a", 2), BOUNDS)
    after = begin(adapters, "a")
    assert after is not before[0]
    assert adapters.figures()["adapter_bytes"] == 600
    assert {one.state: one.requests for one in adapters.told()} == {"unloading": 2, "loaded": 1}
    adapters.end(before)
    assert states(adapters) == {"a": "loaded"}


def test_the_same_content_takes_no_more_memory() -> None:
    adapters = LoadedAdapters()
    adapters.put(made("a", 1), BOUNDS)
    first = begin(adapters, "a")
    assert first is not None
    assert adapters.remove("a") == (first,)
    assert not adapters.is_loaded(first)
    adapters.put(made("a", 1), BOUNDS, is_pinned=True)
    assert adapters.is_loaded(first)
    assert begin(adapters, "a") is first
    [one] = adapters.told()
    assert (one.requests, one.is_pinned, one.nbytes) == (2, True, 300)


@dataclass
class Live:
    name: str
    adapter: Adapter


class Machine(RuleBasedStateMachine):
    """Whatever operators and requests do: memory is bounded, a name means what was put last, and
    what a request has is there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.adapters = LoadedAdapters()
        self.named: dict[str, tuple[bytes, bool]] = {}
        self.live: list[Live] = []

    @rule(
        name=st.sampled_from(NAMES),
        content=st.integers(0, 2),
        nbytes=st.sampled_from([100, 300, 600]),
        pinned=st.booleans(),
    )
    def put(self, name: str, content: int, nbytes: int, pinned: bool) -> None:
        one = made(name, content, nbytes)
        had = {(other.name, other.adapter.digest) for other in self.live}
        before = self.adapters.told()
        try:
            _, evicted = self.adapters.put(one, BOUNDS, is_pinned=pinned)
        except AdapterRoomError:
            assert self.adapters.told() == before
            return
        for gone in evicted:
            digest, was_pinned = self.named.pop(gone)
            assert not was_pinned
            assert (gone, digest) not in had
        self.named[name] = one.digest, pinned

    @rule(name=st.sampled_from(NAMES))
    def remove(self, name: str) -> None:
        if name not in self.named:
            with pytest.raises(AdapterNotLoadedError):
                self.adapters.remove(name)
            return
        del self.named[name]
        found = self.adapters.remove(name)
        assert set(found) == {one.adapter for one in self.live if one.name == name}

    @rule(name=st.sampled_from(NAMES))
    def begin(self, name: str) -> None:
        if name not in self.named:
            with pytest.raises(AdapterNotLoadedError):
                begin(self.adapters, name)
            return
        adapter = begin(self.adapters, name)
        assert adapter is not None
        assert adapter.digest == self.named[name][0]
        self.live.append(Live(name, adapter))

    @rule(index=st.integers(0, 5))
    def end(self, index: int) -> None:
        if index < len(self.live):
            self.adapters.end([self.live.pop(index).adapter])

    @invariant()
    def all_is_there(self) -> None:
        told = self.adapters.told()
        loaded = {one.name: one.digest for one in told if one.state == "loaded"}
        assert loaded == {name: digest.hex() for name, (digest, _) in self.named.items()}
        assert len(loaded) <= BOUNDS.max_adapters
        assert sum(one.nbytes for one in told) <= BOUNDS.max_bytes
        had = [(one.name, one.adapter.digest.hex()) for one in self.live]
        for one in told:
            assert one.requests == had.count((one.name, one.digest))
            assert one.requests or one.state == "loaded"
        assert set(had) <= {(one.name, one.digest) for one in told}


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
