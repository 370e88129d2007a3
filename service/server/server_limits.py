"""The server's limits, from its options: what may be open, held, kept, and unread."""

from __future__ import annotations

from collections.abc import Callable

from service.admission.admission_control import AdmissionBounds, AdmissionControl
from service.admission.bounds import Kind
from service.admission.places import Places
from service.config import ServiceConfig
from service.convert.converter import RequestLimits
from service.delivery.flow import FlowOptions, WholeLimits
from service.delivery.kept import Retention


class ServerLimits:
    """What callers may have at the same time. All methods run on one event loop.

    Attributes:
        admission: limits requests, their tokens and bytes.
        sessions, watches, health_watches: limit the streams that may stay open.
    """

    def __init__(
        self,
        config: ServiceConfig,
        clock: Callable[[], float],
        jitter: Callable[[], float],
        freed: Callable[[int], None],
    ) -> None:
        """Create the limits.

        Args:
            clock, jitter: see DrainRate.
            freed: called with the number of bytes that were released.
        """
        self.admission = AdmissionControl(_of_requests(config), clock, jitter, freed)
        self.sessions = Places(_of_sessions(config), clock, jitter)
        self.watches = Places(_of_watches(config, "WatchStatistics"), clock, jitter)
        self.health_watches = Places(_of_watches(config, "health Watches"), clock, jitter)

    def change(self, config: ServiceConfig) -> None:
        """Apply the limits of another config. What already exceeds them is kept."""
        self.admission.change(_of_requests(config))
        self.sessions.change(_of_sessions(config))
        self.watches.change(_of_watches(config, "WatchStatistics"))
        self.health_watches.change(_of_watches(config, "health Watches"))


def _of_requests(config: ServiceConfig) -> AdmissionBounds:
    return AdmissionBounds(
        max_open=config.max_open_requests,
        max_open_of_identity=config.max_requests_per_identity or None,
        max_tokens=config.max_reserved_tokens or None,
        max_tokens_of_identity=config.max_reserved_tokens_per_identity or None,
        max_undelivered_bytes=config.max_undelivered_bytes or None,
        max_live_bytes=config.max_live_bytes or None,
    )


def retention_of(config: ServiceConfig) -> Retention:
    """Return how many results are kept, and for how long."""
    return Retention(
        retention_s=config.result_retention_s,
        max_results=config.max_kept_results,
        max_bytes=config.max_kept_bytes,
    )


def flow_of(config: ServiceConfig) -> FlowOptions:
    """Return how much of a request's output may wait to be read, and what happens beyond that."""
    return FlowOptions(
        max_unread_tokens=config.max_unread_tokens,
        max_unread_bytes=config.max_unread_bytes,
        ends=config.slow_reader == "end",
        max_hold_s=config.max_hold_s,
    )


def _of_sessions(config: ServiceConfig) -> Kind:
    return Kind(
        what="{present} sessions{of} are open",
        remedy="end one",
        reason="TOO_MANY_SESSIONS",
        option="max_sessions",
        limit=config.max_sessions,
        reason_of_identity="TOO_MANY_SESSIONS_OF_IDENTITY",
        option_of_identity="max_sessions_per_identity",
        limit_of_identity=config.max_sessions_per_identity or None,
    )


def _of_watches(config: ServiceConfig, name: str) -> Kind:
    return Kind(
        what=f"{{present}} {name} are open",
        remedy="end one",
        reason="TOO_MANY_WATCHES",
        option="max_watches",
        limit=config.max_watches,
    )


def request_limits_of(config: ServiceConfig) -> RequestLimits:
    """Return what one request may ask for, and its defaults."""
    return RequestLimits(
        default_max_tokens=config.default_max_tokens,
        default_time_limit_s=config.default_time_limit_s or None,
        max_time_limit_s=config.max_time_limit_s or None,
        max_choices=config.max_choices,
        max_send_bytes=config.max_send_bytes,
        whole=WholeLimits(
            max_undelivered_bytes=config.max_undelivered_bytes or None,
            max_kept_bytes=config.max_kept_bytes,
            max_send_bytes=config.max_send_bytes,
        ),
    )
