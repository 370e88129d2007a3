"""Systems that take turns on one model, within a limit of time.

    start ──▶ each system loads the model, and is stopped
    measure ──▶ turn 0, 1, 2, … of a case, in each of them every system once ──▶ Found

In a turn all systems get the same prompts, and each turn begins with another system, since a
machine's speed drifts. Turn 0 warms up and does not count: long prompts are cut, few tokens are
generated, and all requests arrive at its start. The machine's rates are measured before turns that
count, so that a floor is that of the machine as it was then. Only one system computes at a
time; the others are stopped and keep their memory.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

from benchmarks.measures import decode_figures, turn_figures
from benchmarks.processes import END_S, System, SystemFailure
from benchmarks.rig.measurement import rotated
from benchmarks.systems import SystemSpec
from benchmarks.workloads import AT_ONCE, Lengths, Load, make_prompts

JUDGE, MACHINE = "benchmarks.adapters.judge", "benchmarks.adapters.machine"
MACHINE_S = 120.0
"""The longest that the machine's own process may take."""
PATIENCE_S = 5.0
"""How long a system may take to end once time is over."""
WARMUP = Lengths(prompt=1024, output=8)
"""The most that requests of a warm-up turn have."""


def say(line: str) -> None:
    print(line, flush=True)


class OutOfTime(Exception):
    """Time is over; the message says what was about to be done."""


class TimeLimit:
    """How long may be measured, from now on."""

    def __init__(self, seconds: float = math.inf, least_s: float = 0.0) -> None:
        """Begin. least_s: if less is left, nothing is begun."""
        self._deadline = time.monotonic() + seconds
        self.least_s = least_s

    def left_s(self) -> float:
        return self._deadline - time.monotonic()

    def is_over(self) -> bool:
        """Whether too little is left to begin anything."""
        return self.left_s() < self.least_s

    def need(self, what: str) -> None:
        """Raise OutOfTime if too little is left to begin this."""
        if self.is_over():
            raise OutOfTime(what)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Requests whose turns are measured.

    Attributes:
        name: the name in what is said, and the seed of the prompts.
        load: how they arrive.
        sampling: options of every request; None for greedy.
        is_repeated: whether the prompts are the same in every turn, so that a prefix cache has
            them.
        at_once: the most requests that a system may have to run at the same time; 0: all of them.
    """

    name: str
    lengths: list[Lengths]
    meaning: str = ""
    load: Load = AT_ONCE
    sampling: Mapping[str, Any] | None = None
    is_repeated: bool = False
    at_once: int = 0

    @property
    def most_at_once(self) -> int:
        """The most requests that a system may have to run at the same time."""
        return self.at_once or len(self.lengths)


class Turn(NamedTuple):
    """A turn of a system: its results, prompts and replies."""

    figures: dict[str, float]
    prompts: list[list[int]]
    replies: list[dict[str, Any]]


@dataclass(slots=True)
class Found:
    """What came of a case so far.

    Attributes:
        turns: the results of the turns that count, by system.
        machine: the machine's rates and its load before turns.
        last: each system's last turn.
        failures: why systems are left out.
    """

    case: Case
    turns: dict[str, list[dict[str, float]]]
    machine: list[dict[str, float]] = field(default_factory=list)
    last: dict[str, Turn] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, case: Case, names: Sequence[str]) -> Found:
        """Return that nothing was found of these systems yet."""
        return cls(case, {name: [] for name in names})


@dataclass(slots=True, kw_only=True)
class Bench:
    """Systems on one model. They end with the block.

    Attributes:
        machine: the process that measures the machine's rates (`machine_process`).
        logs: the folder for the systems' output.
        about: what each of them is told when it loads the model, besides its own options.
        time: how long may be measured.
        load_s, turn_s: the longest that loading and a turn may take; None: what is left of the
            time.
        environment: variables of every process.
        log: what the names of logs begin with.
        running: the systems that are loaded, by name.
    """

    machine: System
    logs: Path
    about: Mapping[str, Any]
    vocab_size: int
    time: TimeLimit
    say: Callable[[str], None] = say
    load_s: float | None = None
    turn_s: float | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    log: str = ""
    running: dict[str, System] = field(default_factory=dict)
    _verdicts: dict[tuple[tuple[int, ...], tuple[int, ...]], dict[str, Any]] = field(
        default_factory=dict
    )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, spec: SystemSpec, limits: Mapping[str, int]) -> System:
        """Load a system, and stop it until its turn. limits: see `limits_of`. Raises SystemFailure
        if it does not load; it has ended then.
        """
        self.say(f"loading {spec.name}")
        own_model = {"model": spec.model, "build": None} if spec.model else {}
        options = {"options": dict(spec.options), "limits": dict(limits)}
        log = self.logs / f"{self.log}{spec.name}.log".replace(" ", "-")
        variables = {**self.environment, **spec.environment}
        system = System(spec.name, spec.module, spec.python, log, variables, spec.root)
        self.running[spec.name] = system
        try:
            system.load({**self.about, **own_model, **options}, self._within(self.load_s))
        except SystemFailure:
            self.drop(spec.name)
            raise
        system.park()
        self.say(f"  ready after {system.start_s:.1f} s")
        return system

    def drop(self, name: str) -> None:
        self.running.pop(name).end(PATIENCE_S if self.time.is_over() else END_S)

    def close(self) -> None:
        for name in list(self.running):
            self.drop(name)

    # ---- turns ---------------------------------------------------------------------------------

    def measure(
        self,
        found: Found,
        count: int,
        save: Callable[[Found], None] = lambda found: None,
        *,
        rates_each_turn: bool = False,
        leaves_out: bool = False,
    ) -> None:
        """Let systems take turns.

        Args:
            found: what there is of a case; results are added to it.
            count: how many turns of each system count.
            save: is given what there is after each turn that counts.
            rates_each_turn: whether the machine's rates are measured before each turn, not only
                before the first one.
            leaves_out: whether the others go on without a system that fails.

        Raises:
            OutOfTime: too little time is left for the next turn.
            SystemFailure: a system failed.
        """
        for number in range(count + 1):
            self.time.need(found.case.name)
            if number and (rates_each_turn or not found.machine):
                found.machine.append({**self.rates(), "load_average": os.getloadavg()[0]})
            for name in rotated(list(found.turns), number):
                try:
                    turn = self.turn(name, found.case, number)
                except SystemFailure as failure:
                    if not leaves_out:
                        raise
                    self.say(f"  {name} is left out: {failure}")
                    found.failures[name] = str(failure).splitlines()[0]
                    del found.turns[name]
                    self.drop(name)
                    continue
                if number:
                    found.turns[name].append(turn.figures)
                    found.last[name] = turn
                    self.say(f"  turn {number}: {name:20} {_told(turn.figures)}")
            if not found.turns:
                break
            if number:
                save(found)

    def turn(self, name: str, case: Case, number: int) -> Turn:
        """Run one turn of a system. Raises SystemFailure."""
        order = self.order(case, number)
        replies = self.ask(name, order)
        prompts = [request["prompt"] for request in order["requests"]]
        tokens = list(map(len, prompts))
        figures = turn_figures(tokens, replies)
        if case.load == AT_ONCE:
            figures |= decode_figures(tokens, replies) or {}
            figures["prefill_rate"] = sum(tokens) / max(reply["times"][0] for reply in replies)
        return Turn(figures, prompts, replies)

    def order(self, case: Case, number: int, **more: Any) -> dict[str, Any]:
        """Return an adapter's order to run a turn. more: see `adapters.loop.Turn`."""
        seed = case.name if case.is_repeated else f"{case.name}, turn {number}"
        prompts, lengths = make_prompts(case.lengths, self.vocab_size, seed), case.lengths
        arrivals = case.load.arrivals(len(prompts), seed=number)
        if not number:
            prompts = [prompt[: WARMUP.prompt] for prompt in prompts]
            lengths = [Lengths(one.prompt, min(one.output, WARMUP.output)) for one in lengths]
            arrivals = [0.0] * len(prompts)
        requests = [
            {"prompt": prompt, "max_tokens": one.output, "at": at, "sampling": case.sampling}
            for prompt, one, at in zip(prompts, lengths, arrivals, strict=True)
        ]
        return {"requests": requests, "concurrency": case.load.concurrency, **more}

    def ask(self, name: str, order: Mapping[str, Any]) -> Any:
        """Let a system run a turn. Returns its answer. Raises SystemFailure."""
        return self.running[name].run(order, self._within(self.turn_s))

    def rates(self) -> dict[str, float]:
        """Return the machine's rates now."""
        found: dict[str, float] = self.machine.run(
            {"requests": []}, min(MACHINE_S, self._within(None))
        )
        return found

    # ---- tokens --------------------------------------------------------------------------------

    def judge(self, turn: Turn, count: int) -> dict[str, Any]:
        """Return what transformers says in float32 of the tokens of a turn's first requests."""
        if "judge" not in self.running:
            self.start(SystemSpec("judge", module=JUDGE), {})
        verdicts = []
        for prompt, reply in list(zip(turn.prompts, turn.replies, strict=True))[:count]:
            key = (tuple(prompt), tuple(reply["tokens"]))
            if key not in self._verdicts:  # most systems say the same
                order = {"requests": [{"prompt": prompt, "tokens": reply["tokens"]}]}
                [self._verdicts[key]] = self.ask("judge", order)
            verdicts.append(self._verdicts[key])
        return judged(verdicts)

    def _within(self, most_s: float | None) -> float:
        """Return how long something may take."""
        return max(self.time.least_s, self.time.left_s()) if most_s is None else most_s


@contextmanager
def machine_process(
    log: Path, environment: Mapping[str, str] | None = None, **options: Any
) -> Iterator[System]:
    """Run the process that measures the machine's rates during the block. options: of its order."""
    with System("machine", MACHINE, sys.executable, log, environment or {}) as machine:
        machine.load(options, MACHINE_S)
        machine.park()
        yield machine


def limits_of(cases: Sequence[Case], room: float = 1.0) -> dict[str, int]:
    """Return what a system must have room for. room: the tokens that its cache has, in those that
    the cases need at most.
    """
    needs = [
        sum(sorted((one.total for one in case.lengths), reverse=True)[: case.most_at_once])
        for case in cases
    ]
    every = [one for case in cases for one in case.lengths]
    return {
        "kv_tokens": int(room * max(needs)),
        "max_requests": max(case.most_at_once for case in cases),
        "max_request_tokens": max(one.total for one in every),
        "max_prompt_tokens": max(one.prompt for one in every),
    }


def judged(verdicts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sum up what the judge says of some requests' tokens."""

    def share(name: str) -> float:
        found: float = sum(verdict[name] for verdict in verdicts) / tokens
        return found

    tokens = sum(verdict["tokens"] for verdict in verdicts)
    found: dict[str, Any] = {
        "requests": len(verdicts),
        "tokens": tokens,
        **{name: share(name) for name in ("best", "near", "distinct")},
        "worst_gap": max(verdict["worst_gap"] for verdict in verdicts),
    }
    if "equal" in verdicts[0]:
        found["equal_requests"] = sum(verdict["equal"] for verdict in verdicts)
        found["is_right"] = found["equal_requests"] == len(verdicts)
    else:
        found["is_right"] = found["best"] >= 0.98 and found["near"] == 1.0
    return found


def _told(figures: Mapping[str, float]) -> str:
    text = (
        f"{figures['output_rate']:8.1f} tok/s   TTFT {figures['ttft_p50_s'] * 1e3:7.1f} ms"
        f"   TPOT {figures.get('tpot_s', 0.0) * 1e3:7.2f} ms"
    )
    if "decode_rate" in figures:
        text += f"   decode {figures['decode_rate']:8.1f} tok/s"
    return text
