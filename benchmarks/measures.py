"""Times calls, computes the results of a turn from the times of its tokens, and medians over turns,
and formats numbers.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

QUANTILES = (50, 90, 99)


def seconds_of(call: Callable[[], object], times: int) -> list[float]:
    """Return how long each of some calls takes."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return found


def quantile(values: Sequence[float], percent: float) -> float:
    """Return a percentile, interpolated between neighbours. Raises ValueError without values."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def turn_figures(prompts: Sequence[int], replies: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the results of one system's turn.

    Args:
        prompts: the number of tokens in each request's prompt.
        replies: for each request, "arrived" and "times" in seconds since the turn's start.

    Returns:
        wall_s (to the last token), output_rate and total_rate (tokens per second), percentiles of
        ttft_s and itl_s, and tpot_s (median). tpot_s and itl_s are absent if no request has two
        tokens.
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


def medians(turns: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return, for each result that every turn has, its median over the turns."""
    names = [name for name in turns[0] if all(name in turn for turn in turns)]
    return {name: statistics.median(turn[name] for turn in turns) for name in names}


def compared(
    turns: Sequence[Mapping[str, float]], others: Sequence[Mapping[str, float]], name: str
) -> dict[str, Any]:
    """Return the turns' ratios of a result, "ratios", in which the machine's drift cancels out, and
    their "median".
    """
    ratios = [one[name] / other[name] for one, other in zip(turns, others, strict=True)]
    return {"ratios": ratios, "median": statistics.median(ratios)}


def ratio_span(ratios: Sequence[float], form: str = ".3f") -> str:
    """Format the turns' ratios: their median, the smallest and the largest."""
    middle, least, most = (
        format(one, form) for one in (statistics.median(ratios), min(ratios), max(ratios))
    )
    return f"{middle} ({least}–{most})"


def decode_figures(
    prompts: Sequence[int], replies: Sequence[dict[str, Any]]
) -> dict[str, float] | None:
    """Measure steady decoding in a turn whose requests all arrived at its start. It lasts from the
    last request's first token until the first request ends.

    Args:
        prompts: the number of tokens in each request's prompt.
        replies: see `turn_figures`.

    Returns:
        decode_rate, the tokens per second of all requests; step_s, the seconds in which each gets
        one; context, the mean number of tokens before a request's new one. None if there is no such
        period, because a request ended before another began, or if it is shorter than two steps.
    """
    begin = max(reply["times"][0] for reply in replies)
    end = min(reply["times"][-1] for reply in replies)
    inside = [[moment for moment in reply["times"] if begin < moment <= end] for reply in replies]
    count = sum(map(len, inside))
    if min(map(len, inside)) < 2 or end <= begin:
        return None
    contexts = 0.0
    for prompt, reply, own in zip(prompts, replies, inside, strict=True):
        before = sum(1 for moment in reply["times"] if moment <= begin)
        # Its n-th token (from 0) is computed behind the prompt and n - 1 others, and itself.
        contexts += len(own) * (prompt + before + (len(own) - 1) / 2)
    return {
        "decode_rate": count / (end - begin),
        "step_s": (end - begin) * len(replies) / count,
        "context": contexts / count,
    }


def covered(intervals: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of intervals (begin, end)."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def figure(value: float) -> str:
    """Format a number for a table with three significant digits, but never cut the integer part."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
