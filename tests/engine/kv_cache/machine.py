"""Everything that can happen to a cache, in any order, over the simulation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.contract.request import Request
from engine.contract.types import RequestKey
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.kv_cache.state_slot import StateSlot
from tests.engine.fake_runner import Kind, make_groups
from tests.engine.kv_cache.simulation import Simulation

KINDS: list[tuple[Kind, ...]] = [
    (None,),
    (4,),
    (None, 3),
    (2, 6),
    (None, 1, 5),
    (None, StateSlot()),
    (None, 3, StateSlot()),
    (StateSlot(),),
]
WITH_STATES = [kinds for kinds in KINDS if any(isinstance(one, StateSlot) for one in kinds)]
SEEN: Counter[str] = Counter()
"""What the machines have done, to show that nothing is left out."""


class SharingMachine(RuleBasedStateMachine):
    """Requests with common prefixes, choices, preemptions, failures, overlapped steps."""

    sim: Simulation

    @initialize(
        windows=st.sampled_from(KINDS),
        block_size=st.sampled_from([1, 2, 3]),
        num_blocks=st.sampled_from([30, 16, 9]),
        host_blocks=st.sampled_from([12, 30, 5, 0]),
        cuts=st.booleans(),
    )
    def build(
        self,
        windows: tuple[Kind, ...],
        block_size: int,
        num_blocks: int,
        host_blocks: int,
        cuts: bool,
    ) -> None:
        self.sim = Simulation(
            KVCacheManager(
                make_groups(*windows),
                [num_blocks - i for i in range(len(windows))],
                block_size,
                share_blocks=True,
                host_blocks=[host_blocks] * len(windows),
            ),
            cuts=cuts,
        )

    @rule(
        base=st.sampled_from([1, 1, 1, 2]),
        length=st.sampled_from([12, 12, 9, 4, 1]),
        last=st.integers(0, 1),
        salt=st.sampled_from([b"", b"", b"a"]),
        n=st.sampled_from([1, 1, 3]),
        special=st.sampled_from([None, None, None, "bypass", "prompt_logprobs"]),
        max_tokens=st.integers(1, 8),
    )
    def add(
        self,
        base: int,
        length: int,
        last: int,
        salt: bytes,
        n: int,
        special: str | None,
        max_tokens: int,
    ) -> None:
        self.sim.add(
            [(base * i) % 3 for i in range(length)] + [last],
            salt=salt,
            n=n,
            bypass=special == "bypass",
            prompt_logprobs=0 if special == "prompt_logprobs" else None,
            max_tokens=max_tokens,
        )

    def _pick(self, requests: dict[RequestKey, Request], index: int) -> Request:
        chosen = list(requests.values())
        return chosen[index % len(chosen)]

    @precondition(lambda self: self.sim.waiting)
    @rule(index=st.integers(0, 3), chunk=st.integers(1, 9), spare=st.integers(0, 1))
    def admit(self, index: int, chunk: int, spare: int) -> None:
        self.sim.admit(self._pick(self.sim.waiting, index), chunk, spare)

    @precondition(lambda self: self.sim.waiting)
    @rule(index=st.integers(0, 3))
    def look(self, index: int) -> None:
        self.sim.kv_cache.find_prefix(self._pick(self.sim.waiting, index))

    @precondition(lambda self: self.sim.running)
    @rule(index=st.integers(0, 3), chunk=st.integers(1, 9))
    def extend(self, index: int, chunk: int) -> None:
        self.sim.extend(self._pick(self.sim.running, index), chunk)

    @precondition(lambda self: self.sim.running)
    @rule(index=st.integers(0, 3))
    def preempt(self, index: int) -> None:
        self.sim.preempt(self._pick(self.sim.running, index))

    @precondition(lambda self: self.sim.running)
    @rule(index=st.integers(0, 3), chunk=st.integers(1, 9))
    def preempt_and_return(self, index: int, chunk: int) -> None:
        request = self._pick(self.sim.running, index)
        self.sim.preempt(request)
        self.sim.admit(request, chunk)

    @precondition(lambda self: self.sim.running or self.sim.waiting)
    @rule(index=st.integers(0, 5))
    def cancel(self, index: int) -> None:
        requests = list(self.sim.live())
        self.sim.end(requests[index % len(requests)])

    @rule(
        chunk=st.integers(1, 12),
        newcomers=st.integers(0, 2),
        victims=st.sampled_from([0, 0, 0, 1, 2]),
        idle=st.booleans(),
        overlaps=st.booleans(),
        fails=st.sampled_from([False, False, False, False, True]),
    )
    def step(
        self, chunk: int, newcomers: int, victims: int, idle: bool, overlaps: bool, fails: bool
    ) -> None:
        """As a scheduler does it: victims, then those who run, then newcomers."""
        if not overlaps:
            self.sim.collect()
        for request in list(self.sim.running.values())[-victims:] if victims else []:
            self.sim.preempt(request)
        for request in list(self.sim.running.values())[idle:]:
            self.sim.extend(request, chunk)
        for request in list(self.sim.waiting.values())[:newcomers]:
            self.sim.admit(request, chunk)
        self.sim.launch(fails=fails)

    @rule(chunk=st.integers(1, 12))
    def plain_steps(self, chunk: int) -> None:
        for _ in range(2):
            self.step(chunk, 2, 0, False, False, False)

    @precondition(lambda self: self.sim.running)
    @rule(index=st.integers(0, 3), returns=st.booleans())
    def lose(self, index: int, returns: bool) -> None:
        """A step fails that was to keep a request's KV; it may have come back before that shows."""
        request = self._pick(self.sim.running, index)
        self.sim.preempt(request)
        self.sim.launch(fails=True)
        if returns and request.key in self.sim.waiting:
            self.sim.admit(request, 4)
            self.sim.launch()

    @rule()
    def collect(self) -> None:
        self.sim.collect()

    @rule(really=st.integers(0, 7))
    def reset(self, really: int) -> None:
        if really == 0:
            self.sim.kv_cache.reset_prefix_cache()
            assert all(pool.num_cached == 0 for pool in self.sim.kv_cache.pools)

    @invariant()
    def lawful(self) -> None:
        if hasattr(self, "sim"):
            self.sim.check()

    def teardown(self) -> None:
        if not hasattr(self, "sim"):
            return
        SEEN.update(self.sim.seen)
        while live := list(self.sim.live()):
            for request in live:
                self.sim.end(request)
        self.sim.check()


def drive(
    seed: int, num_calls: int, choices: Sequence[tuple[Kind, ...]] = tuple(KINDS)
) -> Counter[str]:
    """The machine's calls in a long random row; Hypothesis prefers short ones.

    choices: of the kinds of groups.

    Returns:
        How often what was done.
    """
    random = Random(seed)
    machine = SharingMachine()
    machine.build(
        random.choice(choices),
        random.choice([1, 2, 3]),
        random.choice([30, 16, 9]),
        random.choice([12, 30, 5, 0]),
        cuts=seed % 2 == 1,
    )
    sim = machine.sim

    def flip(chance: float) -> bool:
        return random.random() < chance

    for _ in range(num_calls):
        call = random.choice(["step"] * 6 + ["add"] * 3 + ["cancel", "look", "collect", "odd"])
        if call == "add" and len(list(sim.live())) < 6:
            machine.add(
                random.choice([1, 1, 1, 2]),
                random.choice([12, 12, 9, 4, 1]),
                random.randrange(2),
                random.choice([b"", b"", b"a"]),
                random.choice([1, 1, 3]),
                random.choice([None] * 6 + ["bypass", "prompt_logprobs"]),
                random.randint(1, 8),
            )
        elif call == "step":
            victims = random.choice([0, 0, 0, 1, 2])
            machine.step(
                random.randint(1, 12), random.randrange(3), victims, flip(0.5), flip(0.5), flip(0.1)
            )
        elif call == "collect":
            sim.collect()
        elif call == "cancel" and flip(0.5) and list(sim.live()):
            machine.cancel(random.randrange(6))
        elif call == "look" and sim.waiting:
            machine.look(random.randrange(6))
        elif call == "odd" and sim.running and flip(0.2):
            machine.lose(random.randrange(6), flip(0.5))
        elif call == "odd" and sim.running:
            odd = random.choice([machine.preempt_and_return, machine.extend])
            odd(random.randrange(6), random.randint(1, 9))
            if flip(0.3):
                machine.reset(random.randrange(8))
        sim.check()
    machine.teardown()
    return Counter(sim.seen | sim.kv_cache.state_figures())
