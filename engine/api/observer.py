"""Who is told what a manager does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from engine.contract.outputs import StepOutputs
from engine.contract.request import GenerationRequest
from engine.contract.stats import EngineStats
from engine.core.loop import StepSink

logger = logging.getLogger(__name__)


class Observer(Protocol):
    """Is told what a manager does (`engine.telemetry`). None of it may block or raise."""

    def started(self, stats: Callable[[], EngineStats]) -> None:
        """The manager's thread was started; `stats` may be called from any thread."""
        ...

    def ended(self) -> None:
        """The manager's thread ends."""
        ...

    def submitting(self, requests: Sequence[GenerationRequest], arrival: float) -> None:
        """Requests go to the engine; called by the thread that adds them. `arrival`: monotonic
        seconds.
        """
        ...

    def refused(self, requests: Sequence[GenerationRequest]) -> None:
        """The engine has refused these."""
        ...

    def on_step(self, step: StepOutputs) -> None:
        """One step's outputs; called on the engine's thread."""
        ...


def observed(sink: StepSink, observer: Observer) -> StepSink:
    """A sink whose steps are told to an observer, too."""

    def accept(step: StepOutputs) -> None:
        # First: once a result is there, its caller may add another request of the same name.
        try:
            observer.on_step(step)
        except Exception:
            logger.exception("the telemetry of a step failed")
        sink(step)

    return accept
