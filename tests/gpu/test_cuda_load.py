"""What is done when a model is loaded on a device: our decoder is compared, a large step is run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from engine.attention.triton_backend import TritonAttentionBackend
from engine.contract.config import ContinuousBatchingConfig
from engine.loading.loader import verify_model
from engine.loading.profiling import CudaMemory
from engine.loading.running import build_runner
from engine.models.describing import describe
from engine.models.torch_decoder import TorchDecoder
from engine.models.triton_operations import TritonOperations
from tests.engine.runner.steps import build_verified, make_core, make_request, run, tokens_of
from tests.tiny_models import FAMILIES, greedy_reference, make_model, make_prompts

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]

NEW = 12


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("attention", ["triton", "torch"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3", "olmo2", "cohere2"])
def test_our_decoder_equals_generate_on_a_cpu(family: str, attention: str, graphs: bool) -> None:
    prompts = make_prompts((1, 31, 100))
    reference = [
        greedy_reference(make_model(FAMILIES[family]()), prompt, NEW) for prompt in prompts
    ]
    lines: list[str] = []
    model = make_model(FAMILIES[family]()).to("cuda")
    verified = verify_model(model, Path(), lines.append, attention, own_decoder=True)
    assert isinstance(verified.steps, TorchDecoder)
    built = build_verified(verified, use_cuda_graph=graphs, max_requests_per_batch=6)
    built.runner.warmup()
    requests = [make_request(str(i), p, NEW) for i, p in enumerate(prompts)]
    outputs = run(make_core(built, overlap=built.overlap), requests)
    for request, expected in zip(requests, reference, strict=True):
        assert tokens_of(outputs[request.request_id])[: len(expected)] == expected


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3", "olmo2", "phi3"])
def test_our_decoder_in_bfloat16(family: str) -> None:
    """It passes the comparison with the model on this device, and is taken."""
    lines: list[str] = []
    model = make_model(FAMILIES[family]()).to("cuda", torch.bfloat16)
    verified = verify_model(model, Path(), lines.append, "triton", own_decoder=True)
    assert f"decoder: our own, for {model.config.model_type}" in lines
    assert isinstance(verified.steps, TorchDecoder)


def test_joining_holds_no_weight_twice() -> None:
    """What torch has taken from the device grows by a layer's weights at most, and goes back. Every
    matrix is more than 10 MiB: torch packs smaller ones into pieces of memory, which stay.
    """
    config = FAMILIES["llama"](
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=256,
    )
    model = make_model(config).to("cuda", torch.bfloat16)
    described = describe(model)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    decoder = TorchDecoder(model, described, TritonOperations(), TritonAttentionBackend())
    assert len(decoder.layers) == 4
    one = 2 * 8192 * 2048 * 2
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
