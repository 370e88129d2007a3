"""Models through the whole engine with our decoder in torch, all of whose small operations and
attention are Triton kernels: greedy tokens are those of `model.generate`.

Under the interpreter device work is captured by the stand-in of `tests.engine.runner.fake_graphs`.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

pytest.importorskip("triton")

from engine.attention.triton_backend import TritonAttentionBackend
from engine.loading.loader import verify_model
from engine.loading.verified import VerifiedModel
from engine.models import choosing
from engine.models.torch_decoder import TorchDecoder
from engine.models.triton_operations import TritonOperations
from engine.runner.runner_options import StepPath
from tests.engine.models.decoders import make
from tests.engine.runner.fake_graphs import RecordingBackend
from tests.engine.runner.steps import build_verified, make_core, make_request, run, tokens_of
from tests.gpu.conftest import INTERPRETED
from tests.model_recipes import RECIPES
from tests.tiny_models import WINDOW, greedy_reference, make_prompts

pytestmark = pytest.mark.gpu

NEW = 3 if INTERPRETED else 24
LENGTHS = (1, WINDOW + 2) if INTERPRETED else (1, 2, 31, WINDOW + 40, 100)
NAMES = (
    ["gemma3", "gpt_oss", "mixtral"]
    if INTERPRETED
    else [
        *("llama", "qwen3", "gemma2", "gemma3", "olmo2", "cohere2"),
        *("gpt_oss", "mixtral", "olmoe", "qwen3_moe"),
    ]
)


def tiny(name: str) -> PreTrainedModel:
    """A tiny model in float32 on the CPU; for the interpreter one layer of each kind."""
    kinds = sorted(set(getattr(RECIPES[name].config(), "layer_types", None) or [""]))
    few = {"num_hidden_layers": len(kinds), **({"layer_types": kinds} if kinds != [""] else {})}
    return make(name, **(few if INTERPRETED else {})).float()


def load(model: PreTrainedModel, device: torch.device) -> VerifiedModel:
    """Behind the comparison and the load gate."""
    with pytest.MonkeyPatch.context() as patch:
        if device.type == "cpu":
            # Refused on a CPU, of course: only the interpreter can run them there.
            patch.setattr(
                "engine.loading.loader.choose_backend", lambda *wanted: TritonAttentionBackend()
            )
            patch.setattr(choosing, "TORCH_DEVICES", frozenset({"cpu"}))
            patch.setattr(choosing, "operations_for", lambda *wanted: TritonOperations())
        verified = verify_model(
            copy.deepcopy(model).to(device), Path(), lambda line: None, "triton", own_decoder=True
        )
    assert isinstance(verified.backend, TritonAttentionBackend)
    assert isinstance(verified.steps, TorchDecoder)
    return verified


@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", NAMES)
def test_greedy_tokens_equal_generate(family: str, device: torch.device) -> None:
    """Everything is replayed: kernels find all that they need at fixed addresses."""
    model = tiny(family)
    prompts = make_prompts(LENGTHS)
    expected = [greedy_reference(model, prompt, NEW) for prompt in prompts]
    recorder = RecordingBackend() if INTERPRETED else None
    built = build_verified(
        load(model, device),
        graphs=recorder,
        use_cuda_graph=(True, True),
        max_batch_tokens=16 if INTERPRETED else 40,
        max_requests_per_batch=3,
    )
    if not INTERPRETED:
        built.runner.warmup()
        built.runner.steps.clear()
    requests = [make_request(str(i), p, NEW) for i, p in enumerate(prompts)]
    outputs = run(make_core(built), requests)
    for request, tokens in zip(requests, expected, strict=True):
        assert tokens_of(outputs[request.request_id])[: len(tokens)] == tokens
    paths = {(kind.path, kind.is_replayed) for kind in built.runner.steps}
    assert paths == {(path, True) for path in StepPath}
