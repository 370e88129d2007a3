"""What is done when a model is loaded on a device: products are joined, the largest step is run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.config import ContinuousBatchingConfig
from engine.loading.joining import join_products
from engine.loading.loader import build_runner, verify_model
from engine.loading.profiling import CudaMemory
from tests.engine.runner.steps import build_verified, make_core, make_request, run, tokens_of
from tests.tiny_models import FAMILIES, greedy_reference, make_model, make_prompts

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]

NEW = 12


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_joined_products_equal_generate_on_a_cpu(family: str, graphs: bool) -> None:
    prompts = make_prompts((1, 31, 100))
    reference = [
        greedy_reference(make_model(FAMILIES[family]()), prompt, NEW) for prompt in prompts
    ]
    lines: list[str] = []
    model = make_model(FAMILIES[family]()).to("cuda")
    verified = verify_model(model, Path(), lines.append, "torch", join=True)
    assert any(line.startswith("joined: ") for line in lines)
    built = build_verified(verified, use_cuda_graph=graphs, max_requests_per_batch=6)
    built.runner.warmup()
    requests = [make_request(str(i), p, NEW) for i, p in enumerate(prompts)]
    outputs = run(make_core(built, overlap=built.overlap), requests)
    assert [tokens_of(outputs[request.request_id]) for request in requests] == reference


def test_joining_holds_no_weight_twice() -> None:
    """What torch has taken from the device grows by a module's weights at most, and goes back."""
    config = FAMILIES["llama"](hidden_size=1024, intermediate_size=4096, num_hidden_layers=8)
    model = make_model(config).to("cuda", torch.bfloat16)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    assert join_products(model).gates == 8
    one = 2 * 4096 * 1024 * 2
    assert torch.cuda.max_memory_reserved() - before <= 4 * one
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before <= one


def test_the_largest_step_is_measured() -> None:
    model = make_model(FAMILIES["llama"]()).to("cuda")
    verified = verify_model(model, Path(), lambda line: None, "torch")
    measured: list[int] = []

    class Noting(CudaMemory):
        def peak(self, run):  # type: ignore[no-untyped-def]
            measured.append(super().peak(run))
            return measured[-1]

    config = ContinuousBatchingConfig(block_size=16, max_batch_tokens=2048)
    memory = Noting(torch.device("cuda:0"))
    plan = build_runner(verified, config, lambda line: None, memory=memory).plan
    assert measured[0] > 2048 * model.config.hidden_size * 4
    assert plan.total_bytes > 0
