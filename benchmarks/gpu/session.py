"""What all parts need: systems as processes, turns, the device's rates, and the remaining time.

A separate process measures the rates before every row, so a floor reflects the device at that time.
Only one system computes at a time; the others are stopped and keep their memory.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.floors import Rates, Shape, prompts_s, step_s
from benchmarks.gpu import predict
from benchmarks.gpu.record import Part
from benchmarks.measures import decode_figures, medians, paired_ratio, turn_figures
from benchmarks.processes import END_S, System
from benchmarks.rig.systems import Systems, turn_order
from benchmarks.workloads import Lengths, Load, make_prompts

DTYPE = "bfloat16"
LEAST_S = 20.0
"""If less time is left, nothing is begun."""
PATIENCE_S = 5.0
"""How long a system that ran out of time may take to end."""
SPARE_BLOCKS = 8


class OutOfTime(Exception):
    """The part's time is over; the message says what was about to be done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is measured. Prompts and outputs are in tokens.

    Attributes:
        batches: the batch sizes of the decode parts.
        prompt, output: the tokens of each request.
        prompts: how many prompts are computed to measure prefill.
        pair: the batch size where systems are compared with each other.
        pair_output: the output tokens of each request there.
        session: the requests of the session through gRPC.
        rates, seconds: for the open loop: requests per second, and for how long they arrive.
        budgets: the token budgets of a step there; None for the engine's default.
        profiled: the batches whose decode steps are profiled, and how many steps.
        block: tokens per block of the KV cache.
        turns: the number of turns that count.
    """

    batches: tuple[int, ...]
    prompt: int
    output: int
    prompts: int
    pair: tuple[int, ...]
    pair_output: int
    session: int
    rates: tuple[float, ...]
    seconds: float
    budgets: tuple[int | None, ...]
    profiled: tuple[int, ...]
    profile_steps: int
    block: int
    turns: int = 3

    def blocks(self, count: int, total: int) -> int:
        """Return the number of blocks for this many requests of this many tokens, including the
        reserve for their growth.
        """
        from engine.planning.memory_plan import (
            blocks_for,
        )  # needs torch, which the command does not

        return blocks_for(count, total, self.block) + SPARE_BLOCKS


GPU_SIZES = Sizes(
    batches=(1, 8, 32, 64, 128, 256),
    prompt=1024,
    output=128,
    prompts=32,
    pair=(1, 32),
    pair_output=64,
    session=128,
    rates=(4.0, 16.0),
    seconds=10.0,
    budgets=(None, 2048, 1024, 512),
    profiled=(1, 32, 128),
    profile_steps=30,
    block=256,
)
CPU_SIZES = Sizes(
    batches=(1, 4),
    prompt=48,
    output=12,
    prompts=4,
    pair=(2,),
    pair_output=8,
    session=8,
    rates=(8.0,),
    seconds=1.0,
    budgets=(None, 32),
    profiled=(),
    profile_steps=0,
    block=32,
    turns=1,
)
"""Small sizes, to show that the command works."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A system as a part needs it: its adapter and the adapter's options."""

    name: str
    module: str = "benchmarks.adapters.headrace_engine"
    options: Mapping[str, Any] | None = None
    directory: Path | None = None
    """A checkpoint; None if the model is made in memory."""


class Turn(NamedTuple):
    """A turn of a system: its results, prompts and replies."""

    figures: dict[str, float]
    prompts: list[list[int]]
    replies: list[dict[str, Any]]


class Session:
    """Runs one part: manages its systems, turns and time limit."""

    def __init__(
        self,
        part: Part,
        *,
        model: str,
        shape: Shape,
        device: str,
        sizes: Sizes,
        systems: Systems,
        seconds: float,
        say: Callable[[str], None],
    ) -> None:
        self.part = part
        self.model = model
        self.shape = shape
        self.device = device
        self.sizes = sizes
        self.say = say
        self._systems = systems
        self._deadline = time.monotonic() + seconds

    # ---- time ----------------------------------------------------------------------------------

    def left_s(self) -> float:
        """Return the seconds that are left."""
        return self._deadline - time.monotonic()

    def need_time(self, what: str) -> None:
        """Raise OutOfTime if too little time is left to begin something."""
        if self.left_s() < LEAST_S:
            raise OutOfTime(what)

    # ---- systems -------------------------------------------------------------------------------

    def start(self, engine: Engine, *needs: tuple[int, int]) -> System:
        """Load a system.

        Args:
            engine: the system.
            needs: what its cache must hold: the number of requests, and the tokens of each.

        Raises:
            SystemFailure: it does not start.
            OutOfTime: too little time is left.
        """
        self.need_time(engine.name)
        total = max(tokens for _, tokens in needs)
        self.say(f"  loading {engine.name}")
        order = {
            "model": str(engine.directory or self.model),
            "build": None if engine.directory else self.model,
            "device": self.device,
            "dtype": DTYPE,
            "threads": 1,
            "cache": "",
            "options": {
                "block_size": self.sizes.block,
                "num_blocks": max(self.sizes.blocks(*need) for need in needs),
                **(engine.options or {}),
            },
            "limits": {
                "kv_tokens": max(count * tokens for count, tokens in needs),
                "max_requests": max(count for count, _ in needs),
                "max_request_tokens": total,
                "max_prompt_tokens": total,
            },
        }
        system = self._systems.start(
            engine.name,
            engine.module,
            order,
            self.left_s(),
            log=f"{self.part.name}-{engine.name}",
            environment={"HF_HUB_OFFLINE": "1"},
        )
        self.say(f"    ready after {system.start_s:.1f} s")
        return system

    def drop(self, system: System) -> None:
        """End a system."""
        self._systems.drop(system, self._patience_s())

    def close(self) -> None:
        """End all running systems."""
        self._systems.close(self._patience_s())

    def _patience_s(self) -> float:
        return PATIENCE_S if self.left_s() < LEAST_S else END_S

    # ---- measurements --------------------------------------------------------------------------

    def rates(self) -> dict[str, float]:
        """Return the device's current rates."""
        return self._systems.rates(max(LEAST_S, self.left_s()))

    def ask(self, system: System, order: Mapping[str, Any]) -> Any:
        """Let a system run a turn within the time that is left. Returns its answer."""
        return system.run(order, max(LEAST_S, self.left_s()))

    def turn(
        self,
        system: System,
        lengths: Sequence[Lengths],
        seed: int,
        load: Load | None = None,
        sampling: Mapping[str, Any] | None = None,
    ) -> Turn:
        """Run one turn. sampling: options of every request; None for greedy. Raises SystemFailure,
        OutOfTime.
        """
        self.need_time(system.name)
        prompts = make_prompts(list(lengths), self.shape.vocab_size, seed)
        arrivals = (load or Load()).arrivals(len(prompts), seed)
        order = turn_order(prompts, lengths, arrivals=arrivals, sampling=sampling)
        replies = self.ask(system, order)
        tokens = [one.prompt for one in lengths]
        figures = turn_figures(tokens, replies)
        if load is None:
            figures |= decode_figures(tokens, replies) or {}
            figures["prefill_rate"] = sum(tokens) / max(reply["times"][0] for reply in replies)
        return Turn(figures, prompts, replies)

    def warm(
        self,
        system: System,
        lengths: Sequence[Lengths],
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        """Run a warm-up turn that does not count: the same prompts, few tokens."""
        short = [Lengths(one.prompt, min(one.output, 4)) for one in lengths]
        self.turn(system, short, seed=999, sampling=sampling)

    def lengths(self, count: int, output: int) -> list[Lengths]:
        """Return the lengths of this many requests."""
        return [Lengths(self.sizes.prompt, output)] * count

    def measure(
        self,
        key: str,
        system: System,
        lengths: Sequence[Lengths],
        *,
        load: Load | None = None,
        sampling: Mapping[str, Any] | None = None,
        reference: System | None = None,
    ) -> tuple[dict[str, Any], Turn]:
        """Measure a row over several turns, saved after each. Returns it, and the last turn.

        Args:
            key, system, lengths: see `row`.
            load, sampling: see `turn`.
            reference: a system that runs the same turns, with which it is compared.
        """
        rates, turns, others = self.rates(), [], []
        more: dict[str, Any] = {} if reference else {"sampling": sampling}
        more = {"load": load.name} if load else more
        for number in range(self.sizes.turns):
            if reference is not None:
                others.append(self.turn(reference, lengths, 1000 + number).figures)
            last = self.turn(system, lengths, 1000 + number, load, sampling)
            turns.append(last.figures)
            row = self.row(key, system, lengths, turns, rates, **more)
            if reference is not None:
                row["reference"] = self.row("", reference, lengths, others, rates)
                row["ratio"] = {
                    name: paired_ratio([one[name] for one in others], [one[name] for one in turns])
                    for name in ("output_rate", "decode_rate")
                    if all(name in figures for figures in (*others, *turns))
                }
            if load is not None:
                row.pop("of_floor")  # as many tokens come as are asked for
            is_last = number + 1 == self.sizes.turns
            self.part.put(row if is_last else {**row, "partial": True})
        return row, last

    # ---- rows ----------------------------------------------------------------------------------

    def row(
        self,
        key: str,
        system: System,
        lengths: Sequence[Lengths],
        turns: list[dict[str, float]],
        rates: dict[str, float],
        **more: Any,
    ) -> dict[str, Any]:
        """Return a row of the record: medians, and their shares of the floor."""
        median = medians(turns)
        limits = Rates(rates["bandwidth"], rates["matrix"])
        floor = {
            "prefill_rate": sum(one.prompt for one in lengths)
            / prompts_s(self.shape, list(lengths), limits)
        }
        if "context" in median:
            floor["step_s"] = step_s(self.shape, DTYPE, len(lengths), median["context"], limits)
            floor["decode_rate"] = len(lengths) / floor["step_s"]
            found = predict.decode(self.model, len(lengths), median["context"], limits)
            more = {"predicted": dataclasses.asdict(found), **more}
        return {
            "key": key,
            "system": system.name,
            "requests": len(lengths),
            "prompt": lengths[0].prompt,
            "output": lengths[0].output,
            "rates": rates,
            "turns": turns,
            "median": median,
            "floor": floor,
            "of_floor": {
                name: median[name] / floor[name]
                for name in ("prefill_rate", "decode_rate")
                if name in floor and name in median
            },
            "settings": system.ready.get("settings", {}),
            "start_s": system.start_s,
            **more,
        }
