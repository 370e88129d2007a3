"""Profiles a CUDA device with torch's profiler, recording only device activity."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.measures import covered

MOST_KERNELS = 25
"""How many kernels are named: those that took the most time."""
NAME_LENGTH = 100


def set_up() -> None:
    """Set the profiler up. The first use takes seconds, so call this before the work to profile
    begins, which would otherwise be over meanwhile.

    Raises:
        RuntimeError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("there is no CUDA device to profile")
    # It stays set up. Taking it down beside graphs, or between two profiles, crashes or hangs in
    # some versions: see PyTorch's pull request 112507 and Kineto's 1554.
    os.environ["TEARDOWN_CUPTI"] = "0"
    with profile(activities=[ProfilerActivity.CUDA]):
        torch.cuda.synchronize()


def profile_device(work: Callable[[], int]) -> dict[str, Any]:
    """Profile `work`, which returns how many steps it ran. Call `set_up` first.

    Returns:
        steps; span_s, from the start of the first kernel or copy to the end of the last; busy_s,
        how much of that time at least one of them ran; launches, the number of kernels and copies;
        kernels, the name, count and seconds of those that took the most time.

    Raises:
        RuntimeError: nothing ran on the device.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        steps = work()
    return {"steps": steps, **summary(trace.events())}


def summary(events: Iterable[Any]) -> dict[str, Any]:
    """Summarise the profiler's events for the device; see `profile_device`."""
    intervals: list[tuple[float, float]] = []
    counts: collections.Counter[str] = collections.Counter()
    seconds: dict[str, float] = collections.defaultdict(float)
    for event in events:
        if event.device_type != torch.autograd.DeviceType.CUDA or getattr(
            event, "is_user_annotation", False
        ):
            continue
        begin, end = event.time_range.start / 1e6, event.time_range.end / 1e6
        intervals.append((begin, end))
        counts[event.name] += 1
        seconds[event.name] += end - begin
    if not intervals:
        raise RuntimeError("the profiler saw nothing on the device")
    return {
        "span_s": max(end for _, end in intervals) - min(begin for begin, _ in intervals),
        "busy_s": covered(intervals),
        "launches": len(intervals),
        "kernels": [
            {"name": name[:NAME_LENGTH], "count": counts[name], "seconds": taken}
            for name, taken in sorted(seconds.items(), key=lambda item: -item[1])[:MOST_KERNELS]
        ],
    }
