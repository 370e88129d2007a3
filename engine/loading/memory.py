"""Finds out how much memory and how many CPUs this process may use, and sizes the KV cache.

The container's limits apply, but psutil only shows the host's. Both cgroup versions are read, for
the process's own cgroups and all their ancestors.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from engine.contract.config import ContinuousBatchingConfig, block_size_on
from engine.contract.errors import InsufficientMemoryError
from engine.kv_cache.groups import LayerGroup

logger = logging.getLogger(__name__)

GIB = 1 << 30
_CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60
"""The threshold for "no limit", which cgroup v1 reports as a huge number."""

CPU_MEMORY_PERCENT = 0.5
CUDA_MEMORY_PERCENT = 0.9
CUDA_PROCESSORS_MEMORY_PERCENT = 0.8


def _read_number(path: Path) -> int | None:
    """Return the number in a file, or None if there is none or it says "max"."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _groups(root: Path, own: Path, controller: str) -> Iterator[Path]:
    """Yield the directories of this process's cgroups and of their parents, up to the mount point.

    This covers cgroup v2 and one controller of v1. Inside a container, the path may be one of the
    host's that is not mounted there. In that case, the mount point itself is the group.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = []
    paths = {"": "/", controller: "/"}
    mounts = {"": root, controller: root / controller}
    for line in lines:
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        for name in mounts.keys() & set(names.split(",")):
            paths[name] = path
            if name and not mounts[name].is_dir():
                mounts[name] = root / names  # as in "cpu,cpuacct"
    for name, mount in mounts.items():
        directory = mount / paths[name].lstrip("/")
        if ".." in directory.parts or not directory.is_dir():
            directory = mount
        for level in (directory, *directory.parents):
            yield level
            if level == mount:
                break


@dataclass(frozen=True, slots=True)
class HostLimits:
    """The memory and CPUs that this process may use.

    Attributes:
        memory_limit: the container's limit in bytes, or None if there is none.
        memory_available: bytes that can still be allocated, within the container's limit and the
            host's free memory.
        cpus: the number of CPUs by affinity and by the container's quota; at least 1.
        cpu_source: what limits the CPUs, for the log.
    """

    memory_limit: int | None
    memory_available: int
    cpus: int
    cpu_source: str

    @classmethod
    def read(cls, root: Path = _CGROUP, own: Path = Path("/proc/self/cgroup")) -> HostLimits:
        """Read the limits of this process."""
        available = psutil.virtual_memory().available
        limit, used = _memory_limit(root, own)
        if limit is not None:
            available = min(available, max(0, limit - used))
        cpus = len(os.sched_getaffinity(0))
        source = "CPU affinity"
        quota = _cpu_quota(root, own)
        if quota is not None and quota < cpus:
            cpus, source = math.ceil(quota), f"the container's quota of {quota:g} CPUs"
        return cls(limit, available, cpus, source)


def _memory_limit(root: Path, own: Path) -> tuple[int | None, int]:
    """Return the lowest memory limit of the cgroups and their parents, and its usage, in bytes.

    The file names differ between the cgroup versions.
    """
    tightest: tuple[int, int] | None = None
    for group in _groups(root, own, "memory"):
        for limited, current, cached in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit = _read_number(group / limited)
            if limit is None or limit >= _UNLIMITED:
                continue
            used = (_read_number(group / current) or 0) - _reclaimable(group, cached)
            if tightest is None or limit - used < tightest[0] - tightest[1]:
                tightest = (limit, used)
    return tightest or (None, 0)


def _reclaimable(group: Path, entry: str) -> int:
    """Return the bytes of a cgroup's cached files, which the kernel frees when memory is short.

    A checkpoint that was just read counts there as well as in the model. `entry` is the name of
    this value.
    """
    try:
        entries = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(entries.get(entry, 0))
    except (OSError, ValueError):
        return 0


def _cpu_quota(root: Path, own: Path) -> float | None:
    """Return the lowest CPU quota of the cgroups and their parents, in CPUs."""
    quotas: list[float] = []
    for group in _groups(root, own, "cpu"):
        try:
            words = (group / "cpu.max").read_text().split()
        except OSError:
            words = []
        quota, period = (int(word) if word.isdigit() else 0 for word in (*words, "", "")[:2])
        if not quota:
            quota = _read_number(group / "cpu.cfs_quota_us") or 0
            period = _read_number(group / "cpu.cfs_period_us") or 0
        if quota and period:
            quotas.append(quota / period)
    return min(quotas) if quotas else None


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The size of the KV cache.

    Attributes:
        num_blocks: blocks per layer group, without null blocks.
        block_size: tokens per block.
        max_batch_tokens, max_requests: the largest step.
        total_bytes: bytes on the device.
        host_blocks: blocks per layer group that the host keeps for preempted requests. 0 if nothing
            is offloaded.
        host_bytes: bytes on the host.
        reason: why the cache has this size, in a few words.
    """

    num_blocks: tuple[int, ...]
    block_size: int
    max_batch_tokens: int
    max_requests: int
    total_bytes: int
    host_blocks: tuple[int, ...]
    host_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step.

    Attributes:
        max_batch_tokens: the maximum number of tokens of all requests together.
        max_requests: the maximum number of requests that run at the same time.
    """

    max_batch_tokens: int
    max_requests: int


def step_limits(config: ContinuousBatchingConfig, device: torch.device) -> StepLimits:
    """Return the largest step that the options allow on a device."""
    on_cuda = device.type == "cuda"
    return StepLimits(
        config.max_batch_tokens or (8192 if on_cuda else 1024),
        config.max_requests_per_batch or (256 if on_cuda else 64),
    )


def _default_percent(config: ContinuousBatchingConfig, on_cuda: bool) -> float:
    """Return the default of max_memory_percent.

    Processors need vocabulary-sized temporaries for every row, which matters on a GPU.
    """
    if not on_cuda:
        return CPU_MEMORY_PERCENT
    if config.per_request_processors:
        return CUDA_PROCESSORS_MEMORY_PERCENT
    return CUDA_MEMORY_PERCENT


@dataclass(frozen=True, slots=True)
class _Sizing:
    """Computes a cache's size from its number of blocks for the layers with full attention, and of
    slots for those that carry states.
    """

    groups: tuple[LayerGroup, ...]
    block_size: int
    limits: StepLimits
    slots: int

    def blocks(self, num_blocks: int) -> tuple[int, ...]:
        """Return the blocks of each group."""
        limits = self.limits
        requests, tokens = limits.max_requests, limits.max_batch_tokens
        return tuple(
            group.kind.pool_blocks(num_blocks, requests, tokens, self.block_size)
            if group.kind.grows
            else self.slots
            for group in self.groups
        )

    def total_bytes(self, num_blocks: int) -> int:
        """Return the bytes of all groups, including their null blocks."""
        return sum(
            (count + 1) * group.block_bytes(self.block_size)
            for count, group in zip(self.blocks(num_blocks), self.groups, strict=True)
        )


def plan_cache(
    config: ContinuousBatchingConfig,
    groups: tuple[LayerGroup, ...],
    *,
    device: torch.device,
    model_context: int,
    available: int,
    host_available: int,
    step_bytes: int = 0,
) -> CachePlan:
    """Decide the cache's size, and log the reason.

    Args:
        model_context: the longest request that the model allows, in tokens.
        available: free bytes on the device, with the model loaded.
        host_available: free bytes on the host, within the container's limit.
        step_bytes: how much of `available` the largest step needs, as measured.

    Raises:
        InsufficientMemoryError: not even one block of each group fits, or `num_blocks` do not fit.
    """
    on_cuda = device.type == "cuda"
    limits = step_limits(config, device)
    percent = config.max_memory_percent or _default_percent(config, on_cuda)
    budget = int(max(0, available - step_bytes) * percent)
    free = f"{available / GIB:.2f} GiB free"
    if step_bytes:
        free += f", less {step_bytes / GIB:.2f} GiB that a step needs"
    block_size = block_size_on(config, device.type)
    slots = _state_slots(groups, limits, budget, config.kept_states)
    sizing = _Sizing(groups, block_size, limits, slots)
    wanted = math.ceil(model_context / block_size) * limits.max_requests
    reason = f"{limits.max_requests} requests of {model_context} tokens"
    if config.num_blocks is not None:
        num_blocks, reason = config.num_blocks, "num_blocks"
    elif on_cuda or sizing.total_bytes(wanted) > budget:
        num_blocks = _largest(sizing.total_bytes, budget, 1 << 24 if on_cuda else wanted)
        reason = f"{percent:.0%} of {free}"
    else:
        num_blocks = wanted
    if num_blocks < 1 or sizing.total_bytes(num_blocks) > budget:
        needed = sizing.total_bytes(max(1, num_blocks))
        raise _does_not_fit(
            f"the KV cache needs {needed / GIB:.2f} GiB, and {budget / GIB:.2f} "
            f"GiB may be used ({percent:.0%} of {free.replace(' free', f' free on {device}')}): "
            f"{_largest(sizing.total_bytes, budget, num_blocks) * block_size} tokens would fit; "
            f"{_remedies(percent, step_bytes, config.kept_states if slots else 0)}"
        )
    device_bytes = sizing.total_bytes(num_blocks)
    host_blocks, host_bytes = _plan_host(
        config,
        groups,
        block_size,
        longest=min(model_context, num_blocks * block_size),
        available=host_available if on_cuda else host_available - device_bytes,
    )
    plan = CachePlan(
        num_blocks=sizing.blocks(num_blocks),
        block_size=block_size,
        max_batch_tokens=limits.max_batch_tokens,
        max_requests=limits.max_requests,
        total_bytes=device_bytes,
        host_blocks=host_blocks,
        host_bytes=host_bytes,
        reason=reason,
    )
    _tell(plan, groups, device)
    return plan


def _state_slots(
    groups: tuple[LayerGroup, ...], limits: StepLimits, budget: int, kept: int | None
) -> int:
    """Return how many states there is room for: those of running requests and kept ones.

    By default, as many are kept as requests may run, and up to four times as many in a tenth of the
    budget; together they take at most half of it. Requests wait if that is too few.
    """
    size = sum(group.slot_bytes for group in groups)
    if not size:
        return 0
    most, requests = max(1, budget // (2 * size) - 1), limits.max_requests
    if kept is not None:
        return min(requests, most) + kept
    return min(most, requests + max(requests, min(4 * requests, budget // (10 * size))))


def _does_not_fit(message: str) -> InsufficientMemoryError:
    """Create the error, which names the options that determine the cache's size."""
    return InsufficientMemoryError(message).naming(
        "num_blocks",
        "block_size",
        "max_batch_tokens",
        "max_requests_per_batch",
        "max_memory_percent",
        "kept_states",
    )


def _remedies(percent: float, step_bytes: int, kept_states: int | None) -> str:
    remedies = ["lower num_blocks or block_size"]
    if kept_states:
        remedies.append("lower kept_states")
    if step_bytes:
        remedies.append("lower max_batch_tokens or max_requests_per_batch")
    if percent < 1:
        remedies.append("raise max_memory_percent")
    return ", or ".join(remedies)


def cache_sizes(groups: tuple[LayerGroup, ...], counts: tuple[int, ...], block_size: int) -> str:
    """Say how many blocks and states there are, in a few words."""
    blocks, states = (
        " + ".join(
            str(count)
            for group, count in zip(groups, counts, strict=True)
            if bool(group.slot_bytes) == of_states
        )
        for of_states in (False, True)
    )
    told = [f"{blocks} blocks of {block_size} tokens"] if blocks else []
    size = sum(group.slot_bytes for group in groups)
    return ", ".join(told + [f"{states} states of {size / 2**20:.2f} MiB"] * bool(states))


def _tell(plan: CachePlan, groups: tuple[LayerGroup, ...], device: torch.device) -> None:
    logger.info(
        "KV cache: %.2f GiB on %s, %s, because of %s; "
        "steps of up to %d tokens, %d requests at a time",
        plan.total_bytes / GIB,
        device,
        cache_sizes(groups, plan.num_blocks, plan.block_size),
        plan.reason,
        plan.max_batch_tokens,
        plan.max_requests,
    )


def _plan_host(
    config: ContinuousBatchingConfig,
    groups: tuple[LayerGroup, ...],
    block_size: int,
    *,
    longest: int,
    available: int,
) -> tuple[tuple[int, ...], int]:
    """Return the number of blocks of each group on the host and their size in bytes.

    The space is divided in the proportions of the longest request (in tokens), so that the groups
    fill up together. The reason for the size is logged.
    """
    none = (0,) * len(groups), 0
    if config.cpu_offload_space == 0:
        return none
    asked = int(config.cpu_offload_space * GIB)
    allowed = int(max(0, available) * config.cpu_offload_space_safety_threshold)
    space = min(asked, allowed)
    needs = [group.kind.most_blocks(longest, 1, block_size) for group in groups]
    block_bytes = [group.block_bytes(block_size) for group in groups]
    request_bytes = sum(need * size for need, size in zip(needs, block_bytes, strict=True))
    counts = tuple(need * space // request_bytes for need in needs)
    if 0 in counts:
        logger.warning(
            "KV offload is off: cpu_offload_space is %.2f GiB, of which %.2f GiB may be used "
            "(%.0f%% of %.2f GiB free), and that is less than a block of each layer group",
            config.cpu_offload_space,
            space / GIB,
            100 * config.cpu_offload_space_safety_threshold,
            max(0, available) / GIB,
        )
        return none
    host_bytes = sum(count * size for count, size in zip(counts, block_bytes, strict=True))
    logger.info(
        "KV offload: %.2f GiB on the host, %s, because of %s",
        host_bytes / GIB,
        cache_sizes(groups, counts, block_size),
        "cpu_offload_space"
        if asked <= allowed
        else "cpu_offload_space_safety_threshold: "
        f"{config.cpu_offload_space_safety_threshold:.0%} of {max(0, available) / GIB:.2f} GiB "
        f"free, and {config.cpu_offload_space:g} GiB were asked for",
    )
    return counts, host_bytes


def _largest(cost: Callable[[int], int], budget: int, upper: int) -> int:
    """Return the largest number of blocks, up to `upper`, whose cost is within the budget.

    The result is 0 if there is none.
    """
    low, high = 0, upper
    while low < high:
        middle = (low + high + 1) // 2
        if cost(middle) <= budget:
            low = middle
        else:
            high = middle - 1
    return low
