"""The gateway's own metrics, as a page that Prometheus scrapes."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""The upper bounds of the histogram buckets, in seconds."""


class DoorMetrics:
    """Counts requests by route and status.

    Attributes:
        active: the number of requests being answered.
        streams: how many of the active requests are streams.
    """

    def __init__(self) -> None:
        self.active = 0
        self.streams = 0
        self._requests: Counter[tuple[str, int]] = Counter()
        self._buckets: dict[str, list[int]] = {}
        self._seconds: Counter[str] = Counter()

    def ended(self, route: str, status: int, seconds: float) -> None:
        """Records the end of a request. The status is 499 if its client disconnected."""
        self._requests[route, status] += 1
        buckets = self._buckets.setdefault(route, [0] * (len(BOUNDS) + 1))
        buckets[bisect_left(BOUNDS, seconds)] += 1
        self._seconds[route] += seconds  # type: ignore[assignment]

    def page(self) -> str:
        """Returns the text of all metrics."""
        name = "headrace_openai"
        lines = [f"# TYPE {name}_requests_total counter"]
        lines += [
            f'{name}_requests_total{{route="{route}",status="{status}"}} {count}'
            for (route, status), count in sorted(self._requests.items())
        ]
        for gauge, value in (("active_requests", self.active), ("streams", self.streams)):
            lines += [f"# TYPE {name}_{gauge} gauge", f"{name}_{gauge} {value}"]
        lines.append(f"# TYPE {name}_request_seconds histogram")
        for route, buckets in sorted(self._buckets.items()):
            total, seconds = 0, self._seconds[route]
            for bound, count in zip((*BOUNDS, "+Inf"), buckets, strict=True):
                total += count
                lines.append(
                    f'{name}_request_seconds_bucket{{route="{route}",le="{bound}"}} {total}'
                )
            lines.append(f'{name}_request_seconds_sum{{route="{route}"}} {seconds:.6f}')
            lines.append(f'{name}_request_seconds_count{{route="{route}"}} {total}')
        return "\n".join(lines) + "\n"
