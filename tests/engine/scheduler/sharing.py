"""Callers that come and go, always with requests waiting while they are there; and what a fair
policy promises each of them, whatever the others do.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.contract.stats import CallerStats
from engine.scheduler.base import Scheduler
from engine.scheduler.fair import LEAD
from engine.scheduler.live_callers import OUTPUT_COST
from engine.scheduler.scheduled_batch import ScheduledBatch
from tests.engine.fake_runner import make_core, make_request

QUEUED = 20
"""How many of its requests wait while a caller is there: more than a step can begin."""


@dataclass(frozen=True)
class Client:
    """A caller.

    Attributes:
        stays: when it is there: from a step, for a number of steps.
        group: whose weight it shares; "": its own.
        prompt, output: its requests' longest, in tokens; at least 1.
    """

    weight: float = 1.0
    stays: Sequence[tuple[int, int]] = ((0, 10**9),)
    prompt: int = 24
    output: int = 6
    group: str = ""

    def is_there(self, step: int) -> bool:
        return any(begin <= step < begin + length for begin, length in self.stays)


@dataclass
class Sharing:
    """A core whose callers keep QUEUED requests waiting.

    Attributes:
        service: by caller, what it was given.
        first_waits: for each caller that came for the first time, after how many steps it was in
            one.
        return_waits: the same for each time that one came back with nothing in the engine: it may
            have been given more than the others, and waits until they have caught up.
        num_swaps: how often a request was set aside.
    """

    clients: Sequence[Client]
    seed: int = 0
    max_requests: int = 8
    max_batch_tokens: int = 32
    num_blocks: int = 256
    policy: str = "fair"
    overlap: bool = False
    service: list[int] = field(default_factory=list)
    first_waits: list[int] = field(default_factory=list)
    return_waits: list[int] = field(default_factory=list)
    num_swaps: int = 0

    def __post_init__(self) -> None:
        self.core, self.runner, _ = make_core(
            policy=self.policy,
            num_blocks=self.num_blocks,
            max_requests=self.max_requests,
            max_batch_tokens=self.max_batch_tokens,
            overlap=self.overlap,
            verify=False,
        )
        self.service = [0] * len(self.clients)
        self.runner.hook = self._note
        self._chance = random.Random(self.seed)
        self._count = self._steps = 0
        self._came: dict[str, int] = {}
        self._known: set[str] = set()
        self._spread: dict[tuple[int, int], tuple[float, float]] = {}
        self.widest: dict[tuple[int, int], float] = {}
        set_aside = self.core.scheduler.set_aside

        def counted(*args: object) -> None:
            self.num_swaps += 1
            set_aside(*args)  # type: ignore[arg-type]

        self.core.scheduler.set_aside = counted  # type: ignore[method-assign]

    def _note(self, batch: ScheduledBatch) -> None:
        for part in batch.requests:
            caller = part.request.spec.caller
            came = self._came.pop(caller, None)
            if came is not None:
                waits = self.return_waits if caller in self._known else self.first_waits
                waits.append(self._steps - came)
                self._known.add(caller)

    def rows(self) -> dict[str, CallerStats]:
        return {one.caller: one for one in self.core.stats().callers}

    def run(self, steps: int) -> Sharing:
        for _ in range(steps):
            self.step()
        return self

    def step(self) -> None:
        rows = self.rows()
        for index, client in enumerate(self.clients):
            name = f"c{index}"
            row = rows.get(name, CallerStats())
            if not client.is_there(self._steps):
                continue
            if not row.running and not row.waiting:
                self._came[name] = self._steps
            for _ in range(QUEUED - row.waiting):
                self.add(name, client)
        self.core.step()
        rows = self.rows()
        self.service = [
            rows[name].service if (name := f"c{index}") in rows else 0
            for index in range(len(self.clients))
        ]
        self._compare([client.is_there(self._steps) for client in self.clients])
        self._steps += 1

    def add(self, name: str, client: Client) -> None:
        self._count += 1
        length = self._chance.randint(1, client.prompt)
        first = self._chance.randrange(90)
        spec = make_request(
            f"r{self._count}",
            [(first + 7 * index) % 101 for index in range(length)],
            self._chance.randint(1, client.output),
            caller=name,
            weight=client.weight,
            group=client.group,
        )
        self.core.add(spec, self.core.clock())

    def _compare(self, there: list[bool]) -> None:
        """How far two that are there at the same time come apart meanwhile."""
        for one, client in enumerate(self.clients):
            for other in range(one):
                pair = other, one
                if not (there[one] and there[other]):
                    self._spread.pop(pair, None)
                    continue
                apart = self.service[one] / client.weight
                apart -= self.service[other] / self.clients[other].weight
                low, high = self._spread.get(pair, (apart, apart))
                low, high = min(low, apart), max(high, apart)
                self._spread[pair] = low, high
                self.widest[pair] = max(self.widest.get(pair, 0.0), high - low)

    # ---- the promises ----------------------------------------------------------------------------

    def check(self) -> None:
        """Two that want more than they get are given alike; who comes begins at once; places do not
        change hands for nothing.
        """
        for (other, one), widest in self.widest.items():
            weight = min(self.clients[one].weight, self.clients[other].weight)
            assert widest <= 2 * self._most(one, other) / weight, (other, one)
        soon = len(self.clients) + 1
        assert max(self.first_waits, default=0) <= soon
        # While it waits, all places are taken, and so many steps let the others catch up.
        weights = [client.weight for client in self.clients]
        lead = 2 * self._most(*range(len(self.clients))) * sum(weights) / min(weights)
        late = lead / (OUTPUT_COST * self.max_requests)
        assert max(self.return_waits, default=0) <= soon + late
        total, num_waits = sum(self.service), len(self.first_waits) + len(self.return_waits)
        assert self.num_swaps <= num_waits + self._count + total / LEAD

    def _most(self, *clients: int) -> int:
        """What runs already goes on: at most all places, to the end; and a step's prompts."""
        longest = max(self.clients[one].output for one in clients)
        return self.max_batch_tokens + OUTPUT_COST * self.max_requests * longest

    def drain(self) -> None:
        """Everybody's requests end once nobody comes any more."""
        left = 50 * self._count + 200
        while self.core.has_work:
            self.core.step()
            left -= 1
            assert left, "some request waits for ever"

    @property
    def scheduler(self) -> Scheduler:
        return self.core.scheduler
