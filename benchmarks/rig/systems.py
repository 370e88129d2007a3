"""Systems that are measured in turns: each a process that speaks the protocol of `adapters.loop`.
Only one computes at a time; the others are stopped and keep their memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from benchmarks.processes import END_S, System, SystemFailure
from benchmarks.systems import SystemSpec

MACHINE = "benchmarks.adapters.machine"
MACHINE_S = 120.0
"""The longest that the machine's own process may take."""


class Systems:
    """The systems that are loaded, and the process that measures the machine's rates.

    Attributes:
        running: the systems, by name.
    """

    def __init__(self, logs: Path) -> None:
        """Create it without systems. logs: the folder for their output."""
        logs.mkdir(parents=True, exist_ok=True)
        self._logs = logs
        self._machine: System | None = None
        self.running: dict[str, System] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        if self._machine is not None:
            self._machine.end(5.0)

    def start(
        self,
        spec: SystemSpec,
        order: Mapping[str, Any],
        seconds: float,
        *,
        log: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> System:
        """Load a system, and stop it until its turn.

        Args:
            spec: the system.
            order: its adapter's order to load a model.
            seconds: the longest that it may take.
            log: the name of its log; empty for its own.
            environment: variables of its process, besides those of the system.

        Raises:
            SystemFailure: it does not load. It has ended then.
        """
        path = self._logs / f"{(log or spec.name).replace(' ', '-')}.log"
        variables = {**(environment or {}), **spec.environment}
        system = System(spec.name, spec.module, spec.python, path, variables, spec.root)
        self.running[spec.name] = system
        try:
            system.load(order, seconds)
        except SystemFailure:
            self.drop(spec.name)
            raise
        system.park()
        return system

    def start_machine(
        self, *, log: str = "", environment: Mapping[str, str] | None = None, **options: Any
    ) -> System:
        """Start the process that measures the machine's rates. options: of its order."""
        spec = SystemSpec("machine", module=MACHINE)
        self._machine = self.start(spec, options, MACHINE_S, log=log, environment=environment)
        return self.running.pop(spec.name)

    def rates(self, seconds: float = MACHINE_S) -> dict[str, float]:
        """Return the machine's rates now."""
        assert self._machine is not None
        found: dict[str, float] = self._machine.run({"requests": []}, seconds)
        return found

    def drop(self, name: str, patience_s: float = END_S) -> None:
        """End a system."""
        self.running.pop(name).end(patience_s)

    def close(self, patience_s: float = END_S) -> None:
        """End all systems. The machine's process goes on."""
        for name in list(self.running):
            self.drop(name, patience_s)
