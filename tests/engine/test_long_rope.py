"""Requests beyond a model's original length, whose rotary frequencies depend on their own length:
each as `model.generate` computes it alone, whatever else is in the batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from engine.api.offline import LoadedModel, from_model, load
from engine.api.results import GenerationOutput
from engine.contract.config import ContinuousBatchingConfig
from engine.contract.outputs import FinishReason
from engine.contract.request import RequestStatus
from engine.contract.rope import LENGTH_SHIFT
from engine.loading.verified import VerifiedModel
from engine.models import choosing
from engine.models.native_decoder import NativeDecoder
from engine.models.torch_decoder import TorchDecoder
from tests.engine.runner.fake_graphs import RecordingBackend
from tests.engine.runner.steps import build, make_core, make_request, run, tokens_of
from tests.long_rope import MODELS, ORIGINAL, alone, make_lengthened
from tests.tiny_models import greedy_reference, make_prompts

BLOCK = 8
BUDGET = 48
NEW = 24
# Within the original length, up to it, beyond it as they grow, and beyond it from the beginning.
LENGTHS = (5, 33, 50, ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, 90, 130)


def _run(
    loaded: LoadedModel, prompts: list[list[int]], one_by_one: bool = False, **options: Any
) -> list[GenerationOutput]:
    config = ContinuousBatchingConfig(
        **{"block_size": BLOCK, "max_batch_tokens": BUDGET, **options}
    )
    with loaded.continuous_batching_context_manager(continuous_batching_config=config) as manager:
        results: dict[str, GenerationOutput] = {}
        names: list[str] = []
        for group in [[one] for one in prompts] if one_by_one else [prompts]:
            names += manager.add_requests(group, max_new_tokens=NEW)
            while len(results) < len(names):
                output = manager.get_result(timeout=60)
                assert output is not None
                assert output.status is RequestStatus.FINISHED, output.error
                results[output.request_id] = output
        manager._loop._core.scheduler.kv_cache.check_integrity()
    return [results[name] for name in names]


def _check_tables(verified: VerifiedModel) -> None:
    """Our decoder's cosines and sines are those of the view's modules, bit by bit."""
    decoder, view = verified.decoder, cast("Any", verified.model)
    assert decoder is not None
    places = torch.arange(4 * ORIGINAL).repeat(2)
    lengths = torch.cat((places[: 4 * ORIGINAL] + 1, torch.full((4 * ORIGINAL,), 4 * ORIGINAL)))
    carried = places + (torch.where(lengths > ORIGINAL, lengths, 0) << LENGTH_SHIFT)
    kinds = [
        one.frequencies.partition("original_inv_freq")[0] for one in decoder.description.rotaries
    ]
    for kind, ours in zip(kinds, decoder.tables(carried), strict=True):
        named = {"layer_type": kind.removesuffix("inv_freq").rstrip("_")} if kind else {}
        theirs = view.model.rotary_emb(torch.zeros(1, 1), carried.unsqueeze(0), **named)
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other[0, :, : one.shape[-1]])


_FAST = ("llama, dynamic", "phi3, longrope")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in _FAST else pytest.mark.slow) for name in MODELS],
)
def test_each_request_is_computed_for_its_own_length(name: str) -> None:
    model = make_lengthened(name)
    prompts = make_prompts(LENGTHS)
    right = [alone(model, prompt, NEW) for prompt in prompts]
    assert len({token for tokens in right for token in tokens}) >= 5
    loaded = from_model(model)
    few = -(-(max(LENGTHS) + NEW) // BLOCK) + 4
    for options in (
        {"num_blocks": 256, "max_batch_tokens": 1024},
        {"num_blocks": 256},
        {"num_blocks": 256, "use_async_batching": True},
        {"num_blocks": few, "allow_block_sharing": False},
        {"num_blocks": few, "cpu_offload_space": 0.01},
        {"num_blocks": few, "use_async_batching": True},
    ):
        outputs = _run(loaded, prompts, **options)
        assert [output.generated_tokens for output in outputs] == right, options
        assert {output.finish_reason for output in outputs} == {FinishReason.LENGTH}


@pytest.mark.parametrize("name", ["llama, dynamic", "llama, longrope", "phi3, longrope"])
def test_a_prefix_is_shared_only_where_its_keys_are_equal(name: str) -> None:
    model = make_lengthened(name)
    (whole,) = make_prompts((130,))
    prompts = [whole[:50], whole[:60], whole[:100], whole[:130], whole[:100], whole[:60]]
    loaded = from_model(model)
    outputs = _run(loaded, prompts, one_by_one=True, num_blocks=256)
    right = [alone(model, prompt, NEW) for prompt in prompts]
    assert [output.generated_tokens for output in outputs] == right
    cached = [output.cached_tokens for output in outputs]
    # With dynamic embeddings, the keys of each length beyond the original one are its own; Phi-3
    # has computed the second request anew when it grew, and so keys of the long kind.
    assert cached == [0, 48, 56 if "phi3" in name else 0, 0 if "dynamic" in name else 96, 96, 56]


def test_the_owner_s_calls_and_the_steps_do_not_disturb_each_other() -> None:
    model = make_lengthened("llama, dynamic")
    prompts = make_prompts((100, 20, 70))
    right = [alone(model, prompt, NEW) for prompt in prompts]
    loaded = from_model(model)
    for _ in range(2):
        assert [output.generated_tokens for output in _run(loaded, prompts)] == right
        assert greedy_reference(model, prompts[1], NEW) == right[1]
        assert greedy_reference(model, prompts[0], NEW) == right[0]


@pytest.mark.parametrize("choices", [1, 3])
def test_choices_that_outgrow_the_original_length(choices: int) -> None:
    model = make_lengthened("phi3, longrope")
    (prompt,) = make_prompts((ORIGINAL,))
    right = alone(model, prompt, NEW)
    config = ContinuousBatchingConfig(block_size=BLOCK, num_blocks=128)
    with from_model(model).continuous_batching_context_manager(
        continuous_batching_config=config
    ) as manager:
        manager.add_request(
            prompt, request_id="a", max_new_tokens=NEW, num_return_sequences=choices
        )
        for _ in range(choices):
            output = manager.get_result(timeout=60)
            assert output is not None
            assert output.generated_tokens == right
        assert manager.stats().preemptions == choices  # each was computed anew, once


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in _FAST else pytest.mark.slow)
        for name in MODELS
        if not name.startswith("phimoe")
    ],
)
@pytest.mark.parametrize("device", ["of the CPU", "of CUDA"])
def test_our_decoder(
    name: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the native kernels, and as on CUDA with plain operations: as `generate`, of a checkpoint
    that is loaded.
    """
    model = make_lengthened(name)
    model.save_pretrained(tmp_path)
    prompts = make_prompts(LENGTHS)
    right = [alone(model, prompt, NEW) for prompt in prompts]
    if device == "of CUDA":
        monkeypatch.setattr(choosing, "TORCH_DEVICES", frozenset({"cpu"}))
        loaded = load(
            str(tmp_path), dtype="float32", device="cpu", attention="torch", pack_weights=False
        )
        assert isinstance(loaded._verified.steps, TorchDecoder)
    else:
        loaded = load(str(tmp_path), dtype="float32", device="cpu")
        assert isinstance(loaded._verified.steps, NativeDecoder)
    _check_tables(loaded._verified)
    outputs = _run(loaded, prompts, num_blocks=256)
    assert [output.generated_tokens for output in outputs] == right


@pytest.mark.parametrize(
    "name",
    [
        "llama, longrope",
        "phi3, longrope",
        "llama, dynamic",
        "gemma3, dynamic for full layers",
    ],
)
def test_captured_steps(name: str) -> None:
    """As on CUDA: they take the same operations for any lengths, and look at none of them."""
    model = make_lengthened(name)
    loaded = from_model(model, attention="torch")
    built = build(
        loaded,
        graphs=RecordingBackend(),
        use_cuda_graph=(True, True),
        max_batch_tokens=BUDGET,
        max_requests_per_batch=6,
        q_padding_interval_size=8,
    )
    prompts = make_prompts(LENGTHS)
    requests = [make_request(str(index), prompt, NEW) for index, prompt in enumerate(prompts)]
    outputs = run(make_core(built, rope=loaded._verified.rope), requests)
    tokens = [tokens_of(outputs[request.request_id]) for request in requests]
    assert tokens == [alone(model, prompt, NEW) for prompt in prompts]
    replayed = {kind.is_replayed for kind in built.runner.steps}
    assert replayed == {True}


def test_the_longest_request_of_a_model() -> None:
    for name, longest in (("llama, dynamic", 4 * ORIGINAL), ("phi3, longrope", 4 * ORIGINAL)):
        assert from_model(make_lengthened(name))._verified.context_length == longest


def test_positions_that_go_elsewhere_keep_the_original_length(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A model that uses positions for more than its rotary module."""
    model: Any = make_lengthened("llama, longrope")
    forward = model.model.layers[0].mlp.forward
    seen: list[torch.Tensor] = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["position_ids"]), with_kwargs=True
    )
    model.model.layers[0].mlp.forward = lambda states: (
        forward(states) * (1 + seen[-1].float().unsqueeze(-1) / 100)
    )
    assert from_model(model)._verified.context_length == ORIGINAL
    assert f"context limited to {ORIGINAL} of {4 * ORIGINAL} tokens" in caplog.text
