"""The observer interface, which reports what a manager does."""

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
    """Receives notifications about a manager (`engine.telemetry`). Its methods must not block or
    raise.
    """

    def started(self, stats: Callable[[], EngineStats]) -> None:
        """The manager's thread was started; `stats` may be called from any thread."""
        ...

    def ended(self) -> None:
        """The manager's thread is ending."""
        ...

    def submitting(self, requests: Sequence[GenerationRequest], arrival: float) -> None:
        """Requests are about to be submitted to the engine.

        Called on the thread that adds them. `arrival` is in monotonic seconds.
        """
        ...

    def refused(self, requests: Sequence[GenerationRequest]) -> None:
        """The engine has refused these requests."""
        ...

    def on_step(self, step: StepOutputs) -> None:
        """A step has produced these outputs. Called on the engine's thread."""
        ...


def observed(sink: StepSink, observer: Observer) -> StepSink:
    """Return a sink that also passes each step to an observer."""

    def accept(step: StepOutputs) -> None:
        # First: once a result is there, its caller may add another request of the same name.
        try:
            observer.on_step(step)
        except Exception:
            logger.exception("the telemetry of a step failed")
        sink(step)

    return accept
