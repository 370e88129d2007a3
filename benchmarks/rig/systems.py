"""Systems that are measured in turns: each a process that speaks the protocol of `adapters.loop`.
Only one computes at a time; the others are stopped and keep their memory.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from benchmarks.processes import END_S, ROOT, System, SystemFailure
from benchmarks.workloads import Lengths

MACHINE = "benchmarks.adapters.machine"
MACHINE_S = 120.0
"""The longest that the machine's own process may take."""


def turn_order(
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[Lengths],
    *,
    arrivals: Sequence[float] | None = None,
    sampling: Mapping[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Return an adapter's order to run a turn.

    Args:
        prompts, lengths: the requests.
        arrivals: when each arrives, in seconds from the turn's start; None: all do then.
        sampling: options of every request; None for greedy.
        more: see `adapters.loop.Turn`.
    """
    return {
        "requests": [
            {"prompt": prompt, "max_tokens": one.output, "at": at, "sampling": sampling}
            for prompt, one, at in zip(
                prompts, lengths, arrivals or [0.0] * len(prompts), strict=True
            )
        ],
        **more,
    }


def judged(verdicts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sum up what the judge says of some requests' tokens."""
    tokens = sum(verdict["tokens"] for verdict in verdicts)
    return {
        "requests": len(verdicts),
        "tokens": tokens,
        "best": sum(verdict["best"] for verdict in verdicts) / tokens,
        "near": sum(verdict["near"] for verdict in verdicts) / tokens,
        "worst_gap": max(verdict["worst_gap"] for verdict in verdicts),
    }


class Systems:
    """The systems that are loaded, and the process that measures the machine's rates."""

    def __init__(self, logs: Path) -> None:
        """Create it without systems. logs: the folder for their output."""
        logs.mkdir(parents=True, exist_ok=True)
        self._logs = logs
        self._machine: System | None = None
        self._running: list[System] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        if self._machine is not None:
            self._machine.end(5.0)

    def start(
        self,
        name: str,
        module: str,
        order: Mapping[str, Any],
        seconds: float,
        *,
        log: str = "",
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
        root: Path = ROOT,
    ) -> System:
        """Load a system, and stop it until its turn.

        Args:
            name: its name in results.
            module: its adapter.
            order: the adapter's order to load a model.
            seconds: the longest that it may take.
            log: the name of its log; empty for its own.
            python, environment, root: see `System`.

        Raises:
            SystemFailure: it does not load. It has ended then.
        """
        path = self._logs / f"{(log or name).replace(' ', '-')}.log"
        system = System(name, module, python, path, environment or {}, root)
        self._running.append(system)
        try:
            system.load(order, seconds)
        except SystemFailure:
            self.drop(system)
            raise
        system.park()
        return system

    def start_machine(
        self,
        module: str = MACHINE,
        *,
        log: str = "machine",
        environment: Mapping[str, str] | None = None,
        **options: Any,
    ) -> System:
        """Start the process that measures the machine's rates. options: of its order."""
        self._machine = self.start(
            "machine", module, options, MACHINE_S, log=log, environment=environment
        )
        self._running.remove(self._machine)
        return self._machine

    def rates(self, seconds: float = MACHINE_S) -> dict[str, float]:
        """Return the machine's rates now."""
        assert self._machine is not None
        found: dict[str, float] = self._machine.run({"requests": []}, seconds)
        return found

    def drop(self, system: System, patience_s: float = END_S) -> None:
        """End a system."""
        self._running.remove(system)
        system.end(patience_s)

    def close(self, patience_s: float = END_S) -> None:
        """End all systems. The machine's process goes on."""
        for system in list(self._running):
            self.drop(system, patience_s)
