"""Block copies: what a step moves between device and host arrives bit by bit, in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api.offline import LoadedModel
from engine.attention.interface import LayerShape
from engine.contract.config import ContinuousBatchingConfig
from engine.contract.types import GroupId
from engine.kv_cache.copies import BlockCopy, StepCopies
from engine.loading.kv_memory import allocate_caches, allocate_host_caches, make_groups
from engine.loading.running import build_runner
from engine.runner.block_copies import BlockCopier
from engine.runner.kv_tensors import KVTensors
from engine.scheduler.scheduled_batch import ScheduledBatch

BLOCKS = 6
SLOTS = 4
SIZE = 4
SHAPES = dict(
    enumerate(
        (
            LayerShape(num_kv_heads=2, key_dim=3, value_dim=5, window=None),
            LayerShape(num_kv_heads=1, key_dim=4, value_dim=4, window=8),
            LayerShape(num_kv_heads=2, key_dim=3, value_dim=5, window=None),
        )
    )
)


def make_tensors(dtype: torch.dtype = torch.float32) -> KVTensors:
    """Caches full of distinct numbers, some of them NaN."""
    groups = make_groups(SHAPES, dtype)
    sizes, slots = [BLOCKS] * 2, [SLOTS] * 2
    caches = allocate_caches(SHAPES, groups, sizes, SIZE, dtype, torch.device("cpu"))
    host = allocate_host_caches(SHAPES, groups, slots, SIZE, dtype, pin_memory=False)
    generator = torch.Generator().manual_seed(0)
    for cache in (*caches.values(), *host.values()):
        for tensor in (cache.keys, cache.values):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
            tensor.view(-1)[::7] = float("nan")
    return KVTensors(groups, caches, host, SIZE)


Contents = dict[tuple[int, int, bool, int], bytes]
"""What every block holds: (layer, keys or values, on the host, block) → bytes."""


def snapshot(kv: KVTensors) -> Contents:
    found = {}
    for is_host, caches in ((False, kv.caches), (True, kv.host_caches)):
        for layer, cache in caches.items():
            for which, tensor in enumerate((cache.keys, cache.values)):
                for block in range(tensor.shape[0] // SIZE):
                    rows = tensor[block * SIZE : (block + 1) * SIZE].contiguous()
                    found[layer, which, is_host, block] = bytes(rows.view(torch.uint8).numpy())
    return found


def apply_one_by_one(kv: KVTensors, state: Contents, copies: StepCopies) -> None:
    """The meaning of copies, one after the other."""
    kinds = ((copies.offloads, False, True), (copies.restores, True, False))
    for moves, from_host, to_host in (*kinds, (copies.forks, False, False)):
        for copy in moves:
            for layer in kv.groups[copy.group].layers:
                for which in (0, 1):
                    state[layer, which, to_host, copy.target] = state[
                        layer, which, from_host, copy.source
                    ]


def _copies(sources: int, targets: int) -> st.SearchStrategy[tuple[BlockCopy, ...]]:
    return st.lists(
        st.builds(
            BlockCopy,
            group=st.sampled_from([GroupId(0), GroupId(1)]),
            source=st.integers(0, sources - 1),
            target=st.integers(0, targets - 1),
        ),
        max_size=8,
    ).map(tuple)


@settings(max_examples=150, deadline=None)
@given(
    copies=st.builds(
        StepCopies,
        offloads=_copies(BLOCKS + 1, SLOTS),
        restores=_copies(SLOTS, BLOCKS + 1),
        forks=_copies(BLOCKS + 1, BLOCKS + 1),
    )
)
def test_copies_are_what_they_are_one_by_one(copies: StepCopies) -> None:
    """Also where a slot is written twice, and where a fork's block was itself just written."""
    kv = make_tensors()
    expected = snapshot(kv)
    apply_one_by_one(kv, expected, copies)
    BlockCopier(kv).run(copies)
    assert snapshot(kv) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_there_and_back_again(dtype: torch.dtype) -> None:
    """In one step a block goes to the host, another takes its place, and it comes back."""
    kv = make_tensors(dtype)
    before = snapshot(kv)
    group = GroupId(0)
    copies = StepCopies(
        offloads=(BlockCopy(group, 3, 2),),
        restores=(BlockCopy(group, 2, 5), BlockCopy(group, 0, 3)),
        forks=(BlockCopy(group, 5, 1),),
    )
    BlockCopier(kv).run(copies)
    after = snapshot(kv)
    for layer in kv.groups[0].layers:
        for which in (0, 1):
            assert after[layer, which, False, 5] == before[layer, which, False, 3]
            assert after[layer, which, False, 1] == before[layer, which, False, 3]
            assert after[layer, which, False, 3] == before[layer, which, True, 0]
    for layer in kv.groups[1].layers:
        assert all(after[k] == before[k] for k in after if k[0] == layer), "the other group"


def test_without_a_host_there_are_forks_alone() -> None:
    kv = make_tensors()
    before = snapshot(kv)
    copies = StepCopies(forks=(BlockCopy(GroupId(1), 2, 4),))
    BlockCopier(replace(kv, host_caches={})).run(copies)
    assert snapshot(kv)[1, 0, False, 4] == before[1, 0, False, 2]


def test_a_step_of_copies_alone(loaded: Callable[[str], LoadedModel]) -> None:
    """A batch without requests moves its blocks and samples nothing."""
    config = ContinuousBatchingConfig(block_size=8, num_blocks=8, cpu_offload_space=0.01)
    built = build_runner(loaded("gemma3")._verified, config, lambda line: None)
    assert len(built.plan.host_blocks) == len(built.groups) == 2
    assert min(built.plan.host_blocks) > 2
    kv = built.runner.kv
    layer = kv.groups[1].layers[0]
    kv.caches[layer].keys[8:16] = 1.5
    copies = StepCopies(
        offloads=(BlockCopy(GroupId(1), 1, 2),), restores=(BlockCopy(GroupId(1), 2, 4),)
    )
    sampled = built.runner.launch(ScheduledBatch((), 0, copies)).result()
    assert sampled.token_ids == ()
    assert bool((kv.caches[layer].keys[32:40] == 1.5).all())
    assert not kv.caches[layer].keys[40:].any()
