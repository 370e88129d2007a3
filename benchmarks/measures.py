"""From the times at which tokens came to the figures of a turn, and from turns to medians."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

QUANTILES = (50, 90, 99)


def quantile(values: Sequence[float], percent: float) -> float:
    """A percentile, between neighbours by their distance. Raises ValueError without values."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def turn_figures(prompts: Sequence[int], replies: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The figures of one system's turn.

    Args:
        prompts: tokens in each request's prompt.
        replies: of each request: "arrived" and "times", seconds since the turn's start.

    Returns:
        wall_s (to the last token), output_rate and total_rate (tokens a second), ttft_s and itl_s
        percentiles, tpot_s (median; absent where no request has two tokens, as itl_s).
    """
    wall = max(reply["times"][-1] for reply in replies)
    output = sum(len(reply["times"]) for reply in replies)
    ttft = [reply["times"][0] - reply["arrived"] for reply in replies]
    gaps = [
        later - earlier
        for reply in replies
        for earlier, later in itertools.pairwise(reply["times"])
    ]
    tpot = [
        (reply["times"][-1] - reply["times"][0]) / (len(reply["times"]) - 1)
        for reply in replies
        if len(reply["times"]) > 1
    ]
    figures = {
        "wall_s": wall,
        "output_rate": output / wall,
        "total_rate": (output + sum(prompts)) / wall,
    }
    figures |= {f"ttft_p{percent}_s": quantile(ttft, percent) for percent in QUANTILES}
    if gaps:
        figures["tpot_s"] = statistics.median(tpot)
        figures |= {f"itl_p{percent}_s": quantile(gaps, percent) for percent in QUANTILES}
    return figures


def medians(turns: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of each figure over the turns."""
    return {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}


def paired_ratio(one: Sequence[float], other: Sequence[float]) -> float:
    """The median of the ratios of each turn: what the machine did meanwhile cancels out."""
    return statistics.median(a / b for a, b in zip(one, other, strict=True))
