"""The server's figures at one moment, as ControlService reports them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.contract.stats import EngineStats
from service.admission.phases import Drain, Phase
from service.delivery.registry import RegistryStats


@dataclass(frozen=True, slots=True)
class OperatorPause:
    """A pause of the engine. `since`: wall-clock seconds."""

    reason: str
    since: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The server's statistics at one moment.

    Attributes:
        taken_at, moment: wall-clock and monotonic seconds.
        uptime_s: how long the server has run.
        model: its name; empty while it loads.
        engine: the engine's statistics, or None if it did not answer.
        figures: the values of Figures, by name.
    """

    instance_id: str
    model: str
    taken_at: float
    moment: float
    uptime_s: float
    phase: Phase
    pause: OperatorPause | None
    drain: Drain | None
    log_level: str
    front_end: RegistryStats
    engine: EngineStats | None
    figures: Mapping[str, Any]
