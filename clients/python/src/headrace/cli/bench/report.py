"""Presents the measurements as a table and as JSON."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace._channel import CLIENT_VERSION
from headrace.cli.bench.measures import Histogram, Tally
from headrace.model_card import ModelCard

FORMAT = 1
"""The version of the JSON format. It changes when a reader of the old format would misread the new.
"""
_BUSY = 0.8
"""The share of one CPU from which the client itself may have limited the measurement."""

TIMES = (
    ("ttft", "time to first token"),
    ("itl", "token to token"),
    ("stall", "longest wait"),
    ("whole", "whole request"),
    ("late", "sent after due"),
)
"""The histograms of a tally, with their names in the table."""


@dataclass(frozen=True, slots=True)
class Report:
    """A load and its measurements.

    Attributes:
        target: the server's address.
        card: its model card.
        settings: the command's options.
        meaning: how requests were sent, in words.
        tally: the measurements.
        ended: why the load ended early; empty if it did not.
    """

    target: str
    card: ModelCard
    settings: Mapping[str, Any]
    meaning: str
    tally: Tally
    ended: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as JSON values, with times in seconds."""
        tally, card = self.tally, self.card
        return {
            "format": FORMAT,
            "date": datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
            "client": {
                "version": CLIENT_VERSION,
                "cpu_seconds": tally.cpu_seconds,
                "cpus_used": _per_second(tally, tally.cpu_seconds),
            },
            "server": {
                "target": self.target,
                "model": card.name,
                "dtype": card.dtype,
                "quantization": card.quantization,
                "device": card.device,
                "version": card.server_version,
                "instance_id": card.instance_id,
            },
            "load": dict(self.settings),
            "ended_early": self.ended,
            "seconds": tally.seconds,
            "requests": {
                "started": tally.started,
                "done": tally.done,
                "refused": dict(tally.refused),
                "failed": dict(tally.failed),
                "interrupted": tally.interrupted,
                "sent_again": dict(tally.retried),
                "finish_reasons": dict(tally.ends),
            },
            "tokens": {
                "prompt": tally.prompt_tokens,
                "cached": tally.cached_tokens,
                "output": tally.output_tokens,
                "draft": tally.draft_tokens,
                "accepted_draft": tally.accepted_draft_tokens,
            },
            "per_second": {
                "requests": _per_second(tally, tally.done),
                "output_tokens": _per_second(tally, tally.output_tokens),
                "total_tokens": _per_second(tally, tally.prompt_tokens + tally.output_tokens),
            },
            "goodput": {
                "ttft": tally.goals.ttft,
                "itl": tally.goals.itl,
                "good": tally.good,
                "share": tally.good / tally.ended if tally.ended else None,
                "requests_per_second": _per_second(tally, tally.good),
            }
            if tally.goals.are_set
            else None,
            "times": {name: _times(getattr(tally, name)) for name, _ in TIMES},
            "timeline": {
                "cell_seconds": tally.timeline.cell_seconds,
                "output_tokens": tally.timeline.cells,
            },
        }

    def table(self) -> str:
        """Returns the report as a human-readable table."""
        card = self.card
        lines = [
            f"{card.name} ({card.dtype}, {card.device}) at {self.target}",
            f"{self.meaning}; {self.tally.seconds:.1f} s",
            *([f"ended early: {self.ended}"] if self.ended else []),
            "",
            f"{'':20}{'p50':>11}{'p90':>11}{'p99':>11}{'mean':>11}{'max':>11}",
        ]
        rows = TIMES if self.settings["rate"] else TIMES[:-1]  # a closed loop's are never late
        lines += [_row(words, getattr(self.tally, name)) for name, words in rows]
        return "\n".join([*lines, "", *self._counts(), *self._remarks()])

    def _counts(self) -> list[str]:
        tally = self.tally
        refused, failed = tally.refused.total(), tally.failed.total()
        requests = f"{tally.done:,} done, {refused:,} refused, {failed:,} failed"
        if tally.interrupted:
            requests += f", {tally.interrupted:,} interrupted"
        total = tally.prompt_tokens + tally.output_tokens
        counts = [
            ("requests", requests, tally.done),
            ("output tokens", f"{tally.output_tokens:,}", tally.output_tokens),
            (
                "all tokens",
                f"{total:,} ({tally.cached_tokens:,} of the prompts' were cached)",
                total,
            ),
        ]
        if tally.draft_tokens:
            kept = tally.accepted_draft_tokens
            counts.append(("draft tokens", f"{tally.draft_tokens:,} ({kept:,} were right)", kept))
        if tally.goals.are_set:
            share = f"{tally.good / tally.ended:.1%}" if tally.ended else "none ended"
            counts.append(("goodput", f"{share} {self._goals()}", tally.good))
        lines = [
            f"{name:20}{words:<44} {_per_second(tally, number):>9,.1f}/s"
            for name, words, number in counts
        ]
        for name, reasons in (
            ("refused", tally.refused),
            ("failed", tally.failed),
            ("sent again", tally.retried),
            ("ended by", tally.ends),
        ):
            if reasons:
                lines.append(f"{name:20}{_listed(reasons)}")
        return lines

    def _goals(self) -> str:
        goals = self.tally.goals
        words = []
        if goals.ttft is not None:
            words.append(f"first token within {told(goals.ttft)}")
        if goals.itl is not None:
            words.append(f"{told(goals.itl)} a token")
        return ", ".join(words)

    def _remarks(self) -> list[str]:
        tally = self.tally
        used = _per_second(tally, tally.cpu_seconds)
        if used < _BUSY:
            return []
        return [
            "",
            f"This client took {used:.0%} of a CPU: it may be what was measured. Use several "
            "processes, or ask for less.",
        ]


def told(seconds: float | None) -> str:
    """Formats a time with three digits, in ms or s."""
    if seconds is None:
        return "-"
    milliseconds = seconds * 1e3
    if milliseconds >= 1000:
        return f"{seconds:,.2f} s"
    if milliseconds >= 100:
        return f"{milliseconds:.0f} ms"
    return f"{milliseconds:.1f} ms" if milliseconds >= 10 else f"{milliseconds:.2f} ms"


def _row(words: str, times: Histogram) -> str:
    figures = [*(times.percentile(percent) for percent in (50, 90, 99)), times.mean]
    figures.append(times.greatest if times.count else None)
    return f"{words:20}" + "".join(f"{told(figure):>11}" for figure in figures)


def _times(times: Histogram) -> dict[str, Any]:
    return {
        "count": times.count,
        "mean": times.mean,
        "min": times.least if times.count else None,
        "p50": times.percentile(50),
        "p90": times.percentile(90),
        "p99": times.percentile(99),
        "max": times.greatest if times.count else None,
        "buckets": [list(bucket) for bucket in times.buckets()],
    }


def _per_second(tally: Tally, number: float) -> float:
    return number / tally.seconds if tally.seconds else 0.0


def _listed(reasons: Counter[str]) -> str:
    return ", ".join(f"{name} {number:,}" for name, number in reasons.most_common())
