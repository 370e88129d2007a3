"""What all parts need: systems as processes, turns, the device's rates, and the remaining time.

A separate process measures the rates before every row, so a floor reflects the device at that time.
Only one system computes at a time; the others are stopped and keep their memory.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.floors import Rates, Shape, prompts_s, step_s
from benchmarks.gpu import predict
from benchmarks.gpu.record import Part
from benchmarks.measures import decode_figures, medians, turn_figures
from benchmarks.processes import System, SystemFailure
from benchmarks.workloads import Lengths, Load, make_prompts
from engine.planning.memory_plan import blocks_for

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
        machine: System,
        seconds: float,
        logs: Path,
        say: Callable[[str], None],
    ) -> None:
        self.part = part
        self.model = model
        self.shape = shape
        self.device = device
        self.sizes = sizes
        self.say = say
        self._machine = machine
        self._deadline = time.monotonic() + seconds
        self._logs = logs
        self._systems: list[System] = []

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
        requests = max(count for count, _ in needs)
        total = max(tokens for _, tokens in needs)
        self.say(f"  loading {engine.name}")
        system = System(
            engine.name,
            engine.module,
            sys.executable,
            self._logs / f"{self.part.name}-{engine.name.replace(' ', '-')}.log",
            {"HF_HUB_OFFLINE": "1"},
        )
        self._systems.append(system)
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
                "max_requests": requests,
                "max_request_tokens": total,
                "max_prompt_tokens": total,
            },
        }
        try:
            system.load(order, self.left_s())
        except SystemFailure:
            self.drop(system)
            raise
        system.park()
        self.say(f"    ready after {system.start_s:.1f} s")
        return system

    def drop(self, system: System) -> None:
        """End a system."""
        self._systems.remove(system)
        system.end(PATIENCE_S if self.left_s() < LEAST_S else 60.0)

    def close(self) -> None:
        """End all running systems."""
        for system in list(self._systems):
            self.drop(system)

    # ---- measurements --------------------------------------------------------------------------

    def rates(self) -> dict[str, float]:
        """Return the device's current rates."""
        found: dict[str, float] = self._machine.run({"requests": []}, max(LEAST_S, self.left_s()))
        return found

    def turn(
        self,
        system: System,
        lengths: Sequence[Lengths],
        seed: int,
        load: Load | None = None,
        sampling: Mapping[str, Any] | None = None,
    ) -> tuple[dict[str, float], list[list[int]], list[dict[str, Any]]]:
        """Run one turn; returns its results, prompts and replies. sampling: options of every
        request; None for greedy. Raises SystemFailure, OutOfTime.
        """
        self.need_time(system.name)
        prompts = make_prompts(list(lengths), self.shape.vocab_size, seed)
        arrivals = (load or Load()).arrivals(len(prompts), seed)
        order = {
            "requests": [
                {"prompt": prompt, "max_tokens": one.output, "at": at, "sampling": sampling}
                for prompt, one, at in zip(prompts, lengths, arrivals, strict=True)
            ],
            "concurrency": None,
        }
        replies = system.run(order, max(LEAST_S, self.left_s()))
        tokens = [one.prompt for one in lengths]
        figures = turn_figures(tokens, replies)
        if load is None:
            figures |= decode_figures(tokens, replies) or {}
            figures["prefill_rate"] = sum(tokens) / max(reply["times"][0] for reply in replies)
        return figures, prompts, replies

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
