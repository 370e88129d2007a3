"""Limits read from cgroups of both versions, and the size of the KV cache that follows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from engine.contract.config import ContinuousBatchingConfig
from engine.contract.errors import InsufficientMemoryError
from engine.contract.types import GroupId
from engine.kv_cache.group_kinds import FullAttention, SlidingAttention
from engine.kv_cache.groups import LayerGroup
from engine.kv_cache.state_slot import StateSlot
from engine.loading import running
from engine.loading.memory import GIB, CachePlan, HostLimits, plan_cache

MIB = 1 << 20


class Tree:
    """A fake /sys/fs/cgroup and /proc/self/cgroup."""

    def __init__(self, root: Path) -> None:
        self.root = root / "cgroup"
        self.own = root / "self"
        self.root.mkdir()
        self.own.write_text("0::/\n")

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def read(self) -> HostLimits:
        return HostLimits.read(self.root, self.own)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_no_cgroup(tree: Tree) -> None:
    limits = tree.read()
    assert limits.memory_limit is None
    assert limits.memory_available > 0
    assert limits.cpus == len(os.sched_getaffinity(0))
    assert limits.cpu_source == "CPU affinity"


def test_no_files_at_all(tmp_path: Path) -> None:
    assert HostLimits.read(tmp_path / "none", tmp_path / "neither").memory_limit is None


def test_v2_memory(tree: Tree) -> None:
    tree.write("memory.max", str(64 * MIB))
    tree.write("memory.current", str(24 * MIB))
    limits = tree.read()
    assert limits.memory_limit == 64 * MIB
    assert limits.memory_available == 40 * MIB


def test_v2_cached_files_count_as_free(tree: Tree) -> None:
    """A checkpoint that was just read fills the page cache; that must not starve the KV cache."""
    tree.write("memory.max", str(64 * MIB))
    tree.write("memory.current", str(60 * MIB))
    tree.write("memory.stat", f"anon {20 * MIB}\nfile {40 * MIB}\ninactive_file {30 * MIB}")
    assert tree.read().memory_available == 34 * MIB


def test_v2_without_a_limit(tree: Tree) -> None:
    tree.write("memory.max", "max")
    tree.write("cpu.max", "max 100000")
    limits = tree.read()
    assert limits.memory_limit is None
    assert limits.cpus == len(os.sched_getaffinity(0))


def test_v2_over_the_limit_leaves_nothing(tree: Tree) -> None:
    tree.write("memory.max", str(10 * MIB))
    tree.write("memory.current", str(11 * MIB))
    assert tree.read().memory_available == 0


def test_v2_nested_groups_the_tightest_counts(tree: Tree) -> None:
    tree.own.write_text("12:pids:/x\n0::/outer/inner\n")
    tree.write("outer/memory.max", str(64 * MIB))
    tree.write("outer/memory.current", str(60 * MIB))
    tree.write("outer/inner/memory.max", str(32 * MIB))
    tree.write("outer/inner/memory.current", str(1 * MIB))
    tree.write("outer/cpu.max", "100000 100000")
    tree.write("outer/inner/cpu.max", "max 100000")
    limits = tree.read()
    assert limits.memory_available == 4 * MIB
    assert limits.memory_limit == 64 * MIB
    assert limits.cpus == 1


def test_v2_group_outside_the_mount(tree: Tree) -> None:
    tree.own.write_text("0::/not/here\n")
    tree.write("memory.max", str(64 * MIB))
    assert tree.read().memory_limit == 64 * MIB


@pytest.mark.parametrize(("quota", "cpus"), [("50000", 1), ("100000", 1), ("5000", 1)])
def test_v2_cpu_quota(tree: Tree, quota: str, cpus: int) -> None:
    tree.write("cpu.max", f"{quota} 100000")
    limits = tree.read()
    assert limits.cpus == cpus
    if int(quota) < 100000 * len(os.sched_getaffinity(0)):
        assert f"quota of {int(quota) / 100000:g} CPUs" in limits.cpu_source


def test_a_quota_above_the_affinity_does_not_count(tree: Tree) -> None:
    tree.write("cpu.max", "100000000 100000")
    assert tree.read().cpus == len(os.sched_getaffinity(0))


def test_v1(tree: Tree) -> None:
    tree.own.write_text("4:memory:/docker/x\n")
    tree.write("memory/memory.limit_in_bytes", str(48 * MIB))
    tree.write("memory/memory.usage_in_bytes", str(8 * MIB))
    tree.write("cpu/cpu.cfs_quota_us", "100000")
    tree.write("cpu/cpu.cfs_period_us", "100000")
    limits = tree.read()
    assert limits.memory_limit == 48 * MIB
    assert limits.memory_available == 40 * MIB
    assert limits.cpus == 1


@pytest.mark.parametrize("cpu", ["cpu", "cpu,cpuacct"])
def test_v1_nested_groups_the_tightest_counts(tree: Tree, cpu: str) -> None:
    """As under Slurm, LXC and slices of systemd: the limit is of a parent, or of the own group."""
    tree.own.write_text("9:memory:/slurm/job/step\n4:cpu,cpuacct:/slurm/job/step\n0::/\n")
    for group, limit, used, quota in (
        ("", (1 << 63) - 4096, 9000 * MIB, "-1"),
        ("slurm/", (1 << 63) - 4096, 8000 * MIB, "-1"),
        ("slurm/job/", 64 * MIB, 60 * MIB, "100000"),
        ("slurm/job/step/", 32 * MIB, 1 * MIB, "-1"),
    ):
        tree.write(f"memory/{group}memory.limit_in_bytes", str(limit))
        tree.write(f"memory/{group}memory.usage_in_bytes", str(used))
        tree.write(f"{cpu}/{group}cpu.cfs_quota_us", quota)
        tree.write(f"{cpu}/{group}cpu.cfs_period_us", "100000")
    limits = tree.read()
    assert limits.memory_limit == 64 * MIB
    assert limits.memory_available == 4 * MIB
    assert limits.cpus == 1
    tree.write("memory/slurm/job/step/memory.usage_in_bytes", str(30 * MIB))
    limits = tree.read()
    assert limits.memory_limit == 32 * MIB
    assert limits.memory_available == 2 * MIB


def test_v1_cached_files_count_as_free(tree: Tree) -> None:
    tree.write("memory/memory.limit_in_bytes", str(64 * MIB))
    tree.write("memory/memory.usage_in_bytes", str(60 * MIB))
    tree.write("memory/memory.stat", f"inactive_file {MIB}\ntotal_inactive_file {30 * MIB}")
    assert tree.read().memory_available == 34 * MIB


def test_v1_group_that_is_the_hosts_the_mount_is_the_group(tree: Tree) -> None:
    tree.own.write_text("9:memory:/../elsewhere\n")
    tree.write("elsewhere/memory.limit_in_bytes", str(8 * MIB))
    tree.write("memory/memory.limit_in_bytes", str(64 * MIB))
    assert tree.read().memory_limit == 64 * MIB


def test_v1_without_limits(tree: Tree) -> None:
    tree.write("memory/memory.limit_in_bytes", "9223372036854771712")
    tree.write("cpu/cpu.cfs_quota_us", "-1")
    tree.write("cpu/cpu.cfs_period_us", "100000")
    limits = tree.read()
    assert limits.memory_limit is None
    assert limits.cpus == len(os.sched_getaffinity(0))


# ---- the cache -------------------------------------------------------------------------------

FULL = LayerGroup(group_id=GroupId(0), kind=FullAttention(), layers=(0,), bytes_per_token=1024)
SLIDING = LayerGroup(
    group_id=GroupId(1), kind=SlidingAttention(64), layers=(1,), bytes_per_token=1024
)

STATES = LayerGroup(group_id=GroupId(1), kind=StateSlot(), layers=(1,), slot_bytes=4096)


def plan(
    available: int = GIB,
    *,
    groups: tuple[LayerGroup, ...] = (FULL,),
    device: str = "cpu",
    context: int = 4096,
    host_available: int | None = None,
    **options: object,
) -> CachePlan:
    config = ContinuousBatchingConfig(**{"block_size": 16, **options})  # type: ignore[arg-type]
    return plan_cache(
        config,
        groups,
        device=torch.device(device),
        model_context=context,
        available=available,
        host_available=available if host_available is None else host_available,
    )


@pytest.mark.parametrize(("kept", "slots"), [(None, 20), (0, 4), (7, 11)])
def test_states_have_room_beside_the_blocks(kept: int | None, slots: int) -> None:
    found = plan(
        1000 * GIB, groups=(FULL, STATES), max_requests_per_batch=4, kept_states=kept, num_blocks=9
    )
    assert found.num_blocks == (9, slots)
    assert found.total_bytes == 10 * 16 * 1024 + (slots + 1) * 4096


def test_with_little_memory_half_of_it_is_for_states() -> None:
    found = plan(1 << 20, groups=(FULL, STATES))
    assert found.num_blocks[1] == (1 << 18) // 4096 - 1
    assert found.total_bytes <= 1 << 19


def test_more_kept_states_than_memory_are_refused_by_name() -> None:
    with pytest.raises(InsufficientMemoryError, match="or lower kept_states, or") as raised:
        plan(1 << 20, groups=(FULL, STATES), kept_states=1000)
    assert "kept_states" in raised.value.mentions
    with pytest.raises(InsufficientMemoryError) as raised:
        plan(1 << 10)
    assert "kept_states" not in str(raised.value)


def test_models_without_states_keep_none() -> None:
    assert plan(kept_states=1000).num_blocks == plan().num_blocks


def test_states_are_told_apart_from_blocks(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        plan(groups=(FULL, STATES), num_blocks=9, max_requests_per_batch=2, kept_states=1)
    assert "9 blocks of 16 tokens, 3 states of 0.00 MiB" in caplog.text


def test_on_a_cpu_the_cache_is_what_the_concurrency_needs() -> None:
    assert plan(1000 * GIB, max_requests_per_batch=4).num_blocks == (4 * 4096 // 16,)
    assert plan(1000 * GIB).max_requests == 64


def test_processors_leave_headroom_on_cuda() -> None:
    found = plan(10 * MIB, device="cuda", per_request_processors=True)
    assert found.total_bytes <= 0.8 * 10 * MIB
    assert found.total_bytes < plan(10 * MIB, device="cuda").total_bytes


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("percent", [None, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("available", [MIB, 10 * MIB, 300 * MIB])
@pytest.mark.parametrize(
    "groups", [(FULL,), (FULL, SLIDING), (SLIDING,), (FULL, STATES), (STATES,)]
)
def test_the_cache_stays_within_its_part(
    device: str, percent: float | None, available: int, groups: tuple[LayerGroup, ...]
) -> None:
    found = plan(available, groups=groups, device=device, max_memory_percent=percent)
    part = percent or (0.5 if device == "cpu" else 0.9)
    assert 0 < found.total_bytes <= available * part
    assert found.total_bytes == sum(
        (count + 1) * group.block_bytes(16)
        for count, group in zip(found.num_blocks, groups, strict=True)
    )
    if groups == (FULL,) and (device == "cuda" or found.num_blocks[0] < 64 * 256):
        assert found.total_bytes + 16 * 1024 > available * part, "and takes what it may"


def test_a_higher_percentage_gives_more() -> None:
    assert (
        plan(10 * MIB, max_memory_percent=0.8).num_blocks
        > plan(10 * MIB, max_memory_percent=0.4).num_blocks
    )


def test_sliding_groups_are_small() -> None:
    full, sliding = plan(
        groups=(FULL, SLIDING), max_requests_per_batch=4, max_batch_tokens=128
    ).num_blocks
    assert full == 1024
    assert sliding < 64


def test_num_blocks_is_what_it_says() -> None:
    assert plan(num_blocks=77).num_blocks == (77,)
    assert plan(num_blocks=77).block_size == 16
    assert plan(num_blocks=77, max_batch_tokens=33).max_batch_tokens == 33
    assert plan(num_blocks=77, max_requests_per_batch=3).max_requests == 3


def test_too_little_memory_says_what_to_do() -> None:
    with pytest.raises(InsufficientMemoryError) as caught:
        plan(4 * GIB, num_blocks=1 << 20)
    message = str(caught.value)
    assert "needs 16.00 GiB" in message
    assert "2.00 GiB may be used (50% of 4.00 GiB free on cpu)" in message
    fits = (2 * GIB // (16 * 1024) - 1) * 16
    assert f"{fits} tokens would fit" in message
    assert "num_blocks" in message
    assert "max_memory_percent" in message
    assert plan(4 * GIB, num_blocks=fits // 16).total_bytes <= 2 * GIB


def test_no_room_for_a_single_block() -> None:
    with pytest.raises(InsufficientMemoryError, match="0 tokens would fit"):
        plan(1000)


# ---- the host's side -------------------------------------------------------------------------


def test_nothing_is_offloaded_unless_asked() -> None:
    found = plan(groups=(FULL, SLIDING))
    assert found.host_blocks == (0, 0)
    assert found.host_bytes == 0


def test_the_offload_space_is_divided_as_requests_divide_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO", logger="engine.loading.memory"):
        found = plan(100 * GIB, groups=(FULL, SLIDING), cpu_offload_space=1)
    full, sliding = found.host_blocks
    # The longest request has 256 blocks with full attention, and 5 in the window of 64 tokens.
    assert full / sliding == pytest.approx(256 / 5, rel=1e-2)
    assert found.host_bytes == (full + sliding) * 16 * 1024
    assert GIB - 2 * 16 * 1024 <= found.host_bytes <= GIB
    assert "KV offload: 1.00 GiB" in caplog.text
    assert "because of cpu_offload_space" in caplog.text


@pytest.mark.parametrize(("device", "left"), [("cuda", 8 * GIB), ("cpu", 4 * GIB)])
def test_the_offload_space_is_cut_to_its_part_of_the_host(
    device: str, left: int, caplog: pytest.LogCaptureFixture
) -> None:
    """On a CPU, what the cache itself takes is not there for it."""
    with caplog.at_level("INFO", logger="engine.loading.memory"):
        found = plan(
            8 * GIB,
            host_available=8 * GIB,
            device=device,
            num_blocks=4 * GIB // (16 * 1024) - 1,
            cpu_offload_space=100,
            cpu_offload_space_safety_threshold=0.25,
        )
    assert left / 4 - 16 * 1024 <= found.host_bytes <= left / 4
    assert "cpu_offload_space_safety_threshold: 25%" in caplog.text


def test_too_little_space_for_a_block_turns_offloading_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = plan(groups=(FULL, SLIDING), cpu_offload_space=0.00001)
    assert found.host_blocks == (0, 0)
    assert "KV offload is off" in caplog.text


def test_the_longest_request_is_bounded_by_blocks_and_not_by_slots() -> None:
    found = plan(
        1000 * GIB, groups=(FULL, STATES), max_requests_per_batch=4, kept_states=0, num_blocks=9
    )
    assert found.num_blocks == (9, 4)
    assert running._longest_in_blocks((FULL, STATES), found, 10**6) == 9
    assert running._longest_in_blocks((FULL, STATES), found, 3 * found.block_size) == 3
