"""Models through the whole engine with the Triton kernels: greedy tokens are those of
`model.generate`, whatever way a step takes.

Under the interpreter device work is captured by the stand-in of `tests.engine.runner.fake_graphs`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

pytest.importorskip("triton")

from engine.attention.triton_backend import TritonAttentionBackend
from engine.contract.request import GenerationRequest
from engine.loading.loader import verify_model
from engine.loading.verified import VerifiedModel
from engine.models.experts import EXPERTS_NAME
from engine.runner.runner_options import StepPath
from tests.engine.runner.fake_graphs import RecordingBackend
from tests.engine.runner.steps import build_verified, make_core, make_request, run, tokens_of
from tests.gpu.conftest import INTERPRETED
from tests.long_rope import ORIGINAL, alone, make_lengthened
from tests.tiny_models import FAMILIES, WINDOW, greedy_reference, make_model, make_prompts

pytestmark = pytest.mark.gpu

NEW = 4 if INTERPRETED else 24
LENGTHS = (1, WINDOW + 2, 9) if INTERPRETED else (1, 2, 31, WINDOW + 40, 100)
# Beside the plain one: softcap and window; sinks and window; values of another size than keys.
NAMES = ["llama", "gpt_oss"] if INTERPRETED else ["llama", "gemma2", "gpt_oss", "deepseek_v3"]
WITH_EXPERTS = {"gpt_oss", "deepseek_v3"}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def tiny(family: str) -> PreTrainedModel:
    """A tiny model in float32 on the CPU; for the interpreter, one with as few layers as it has
    kinds of them.
    """
    config = FAMILIES[family]()
    if INTERPRETED:
        kinds = getattr(config, "layer_types", None) or ["full_attention"]
        config.num_hidden_layers = len(set(kinds))
        config.layer_types = kinds[: config.num_hidden_layers]
        assert len(set(config.layer_types)) == len(set(kinds))
    return make_model(config)


@cache
def expected(family: str) -> list[list[int]]:
    return [greedy_reference(tiny(family), prompt, NEW) for prompt in make_prompts(LENGTHS)]


@cache
def load(family: str, device: torch.device) -> VerifiedModel:
    """A tiny model behind the load gate, with the Triton kernels."""
    model = copy.deepcopy(tiny(family)).to(device)
    with pytest.MonkeyPatch.context() as patch:
        if device.type == "cpu":
            # Refused on a CPU, of course: only the interpreter can run them there.
            patch.setattr(
                "engine.loading.loader.choose_backend", lambda *wanted: TritonAttentionBackend()
            )
            patch.setattr("engine.models.experts._waits", lambda *given: True)
        verified = verify_model(model, Path(), lambda line: None, "triton")
    assert isinstance(verified.backend, TritonAttentionBackend)
    experts = verified.model.config._experts_implementation
    assert (experts == EXPERTS_NAME) == (family in WITH_EXPERTS)
    return verified


def requests() -> list[GenerationRequest]:
    return [make_request(str(i), p, NEW) for i, p in enumerate(make_prompts(LENGTHS))]


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_greedy_tokens_equal_generate(
    family: str, graphs: bool, overlap: bool, device: torch.device
) -> None:
    """Prompts in chunks, so that one-token and longer parts mix; with graphs all is replayed, also
    by models with experts, which are ours in float32.

    On a device tf32 would be other arithmetic; torch leaves it off.
    """
    if INTERPRETED and graphs != overlap:
        pytest.skip("the interpreter is slow: both or none")
    recorder = RecordingBackend() if INTERPRETED and graphs else None
    built = build_verified(
        load(family, device),
        graphs=recorder,
        use_cuda_graph=graphs,
        use_async_batching=overlap,
        max_batch_tokens=16 if INTERPRETED else 40,
        max_requests_per_batch=6,
    )
    assert built.overlap == overlap
    if not INTERPRETED:
        built.runner.warmup()
        built.runner.steps.clear()
    outputs = run(make_core(built, overlap=overlap), requests())
    for index, tokens in enumerate(expected(family)):  # `generate` ends at the model's own end
        assert tokens_of(outputs[str(index)])[: len(tokens)] == tokens
    paths = {(kind.path, kind.is_replayed) for kind in built.runner.steps}
    assert paths == {(path, graphs) for path in StepPath}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_of_16_bits_pass_the_load_gate(dtype: torch.dtype, cuda: torch.device) -> None:
    """Their tokens may differ by rounding; the gate compares layers and logits within bounds."""
    model = make_model(FAMILIES["llama"]()).to(cuda, dtype)
    verified = verify_model(model, Path(), lambda line: None, "triton")
    built = build_verified(verified, max_requests_per_batch=6)
    built.runner.warmup()
    built.runner.steps.clear()
    outputs = run(make_core(built, overlap=True), requests())
    assert [len(tokens_of(outputs[str(i)])) for i in range(len(LENGTHS))] == [NEW] * len(LENGTHS)
    assert {(kind.path, kind.is_replayed) for kind in built.runner.steps} == {
        (path, True) for path in StepPath
    }


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("name", ["llama, dynamic", "llama, longrope", "phi3, longrope"])
def test_lengths_beyond_the_original_one_are_replayed(
    name: str, own: bool, cuda: torch.device
) -> None:
    """By our decoder, and by the model as transformers wrote it."""
    model = make_lengthened(name)
    prompts = make_prompts((5, ORIGINAL - 1, ORIGINAL, 90))
    right = [alone(model, prompt, NEW) for prompt in prompts]
    told: list[str] = []
    verified = verify_model(model.to(cuda), Path(), told.append, "triton", own_decoder=own)
    assert (verified.decoder is not None) == own, told
    built = build_verified(verified, max_batch_tokens=40, max_requests_per_batch=6)
    built.runner.warmup()
    built.runner.steps.clear()
    core = make_core(built, overlap=built.overlap, rope=verified.rope)
    outputs = run(core, [make_request(str(i), p, NEW) for i, p in enumerate(prompts)])
    assert [tokens_of(outputs[str(index)]) for index in range(len(prompts))] == right
    assert {kind.is_replayed for kind in built.runner.steps} == {True}
