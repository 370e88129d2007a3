"""Logs one line every few seconds while there is work: what an operator looks at first.

    engine ── statistics ──┐
    refusals ──────────────┴─▶ Summary ──▶ "12 running, 3 waiting; 1841 tokens/s, …"

Rates cover the time since the previous line. While the server is idle, nothing is logged.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable

from engine.contract.engine_client import EngineClient
from engine.contract.errors import HeadraceError
from engine.contract.stats import EngineStats, statistics_of
from service.errors.refusals import Refusals

logger = logging.getLogger(__name__)

_MOST_REASONS = 3
_LOGGED = {name: one for name, one in statistics_of(EngineStats).items() if one.log}


class Summary:
    """Logs the summary line. Runs as one task while the server serves."""

    def __init__(
        self,
        client: EngineClient,
        refusals: Refusals,
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the summary. `interval_s` is the seconds between lines; `clock` returns monotonic
        seconds.
        """
        self._client = client
        self._refusals = refusals
        self._interval_s = interval_s
        self._clock = clock
        self._before: EngineStats | None = None
        self._refused: Counter[str] = Counter()
        self._at = clock()

    async def run(self) -> None:
        """Log until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                stats = await self._client.stats()
            except HeadraceError as error:  # it has died or is being stopped: reported elsewhere
                logger.debug("no figures from the engine: %s", error)
                self._before = None
            else:
                line = self.line(stats)
                if line:
                    logger.info("%s", line)

    def line(self, stats: EngineStats) -> str:
        """Return the line for the time since the last one; empty if there was no work."""
        now = self._clock()
        seconds, self._at = max(now - self._at, 1e-9), now
        before, self._before = self._before, stats
        if before is None or before.steps > stats.steps:  # another engine, which counts from 0
            before = EngineStats()
        refused = self._refused_since()
        present = stats.running + stats.waiting + stats.held
        if not present and before.steps == stats.steps and not refused:
            return ""
        gauges, rates, counts = [], [], []
        for name, one in _LOGGED.items():
            value, earlier = getattr(stats, name), getattr(before, name)
            told = one.log.format(
                now=value, grown=value - earlier, rate=(value - earlier) / seconds
            )
            if one.kind == "gauge":
                gauges.append(told)
            elif "{rate" in one.log:
                rates.append(told)
            elif value != earlier:
                counts.append(told)
        shares = [f"KV cache {stats.kv_usage:.0%}"]
        if queries := stats.prefix_queries - before.prefix_queries:
            shares.append(f"prefix hits {(stats.prefix_hits - before.prefix_hits) / queries:.0%}")
        parts = [", ".join(gauges), *rates, *shares, *counts]
        if refused:
            told = ", ".join(f"{n} {reason}" for reason, n in refused.most_common(_MOST_REASONS))
            parts.append(f"{refused.total()} refused ({told})")
        return "; ".join(parts)

    def _refused_since(self) -> Counter[str]:
        now: Counter[str] = Counter()
        for refusal, count in self._refusals.counts().items():
            now[refusal.reason] += count
        before, self._refused = self._refused, now
        return now - before
