"""What only a CUDA device can show: real graphs, events and pinned copies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.contract.types import GroupId
from engine.kv_cache.copies import BlockCopy, StepCopies
from engine.loading.loader import verify_model
from engine.loading.verified import VerifiedModel
from tests.engine.runner.steps import build_verified, make_core, make_request, run, tokens_of
from tests.tiny_models import FAMILIES, greedy_reference, make_model, make_prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("cuda"),
]

LENGTHS = (1, 31, 64, 100)
NEW = 12


def on_cuda(family: str) -> VerifiedModel:
    model = make_model(FAMILIES[family]()).to("cuda")
    return verify_model(model, Path(), lambda line: None)


@pytest.mark.parametrize("graphs", [None, False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_tokens_equal_generate_on_a_cpu(family: str, graphs: bool | None) -> None:
    built = build_verified(on_cuda(family), use_cuda_graph=graphs, max_requests_per_batch=6)
    assert built.overlap, "the default on CUDA"
    built.runner.warmup()
    prompts = make_prompts(LENGTHS)
    requests = [make_request(str(i), p, NEW) for i, p in enumerate(prompts)]
    outputs = run(make_core(built, overlap=True), requests)
    model = make_model(FAMILIES[family]())
    for index, prompt in enumerate(prompts):
        assert tokens_of(outputs[str(index)]) == greedy_reference(model, prompt, NEW)
    assert any(kind.is_replayed for kind in built.runner.steps) == (graphs is not False)


def test_blocks_go_to_pinned_memory_and_back() -> None:
    built = build_verified(on_cuda("llama"), cpu_offload_space=0.01)
    kv = built.runner.kv
    assert kv.host_caches[0].keys.is_pinned()
    for cache in kv.caches.values():
        cache.keys.normal_()
    before = kv.caches[2].keys[8:24].clone()
    group = GroupId(0)
    copies = StepCopies(
        offloads=(BlockCopy(group, 1, 3), BlockCopy(group, 2, 4)),
        restores=(BlockCopy(group, 4, 9), BlockCopy(group, 3, 7)),
    )
    built.runner._copier.run(copies)
    torch.cuda.synchronize()
    assert torch.equal(kv.caches[2].keys[56:64], before[:8])
    assert torch.equal(kv.caches[2].keys[72:80], before[8:])
