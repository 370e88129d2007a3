"""Our decoder in torch, as it runs on a CUDA device, here on a CPU with plain operations: what it
yields, and how it holds the weights.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from engine.attention.small_cache import SmallCache, Span, zeros
from engine.attention.torch_backend import TorchAttentionBackend
from engine.loading import gate
from engine.loading.loader import verify_model
from engine.loading.verified import VerifiedModel
from engine.models import choosing
from engine.models.describing import describe
from engine.models.description import Experts
from engine.models.layer_parts import Walk
from engine.models.operations import BoundMixture, TorchOperations
from engine.models.torch_decoder import TorchDecoder, TorchMlp
from engine.runner.runner_options import StepPath
from tests.engine.models.decoders import ATTENDING, _gaps, difference, make, most_gap
from tests.engine.runner.fake_graphs import RecordingBackend
from tests.engine.runner.steps import build_verified, make_core, make_request, run, tokens_of
from tests.tiny_models import WINDOW, greedy_reference, make_prompts

LENGTHS = (1, 31, WINDOW + 20)
PROMPTS = make_prompts(LENGTHS)
NEW = 6


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(choosing, "TORCH_DEVICES", frozenset({"cpu"}))
    return


def verify(model: PreTrainedModel, lines: list[str] | None = None) -> VerifiedModel:
    """Through the load gate, with our decoder if it can be."""
    told = [] if lines is None else lines
    return verify_model(model, Path(), told.append, "torch", own_decoder=True)


def generate(verified: VerifiedModel, **options: Any) -> tuple[list[list[int]], Any]:
    """The tokens of PROMPTS, and the runner that made them."""
    built = build_verified(
        verified, max_batch_tokens=40, max_requests_per_batch=6, q_padding_interval_size=8,
        kv_padding_interval_size=48, **options,
    )  # fmt: skip
    requests = [make_request(str(i), p, NEW) for i, p in enumerate(PROMPTS)]
    outputs = run(make_core(built), requests)
    return [tokens_of(outputs[request.request_id]) for request in requests], built.runner


@pytest.mark.parametrize("family", ATTENDING)
def test_every_family_of_the_table(family: str) -> None:
    """It passes the comparison with the model, and yields its tokens: in float32 the same ones, in
    bfloat16 such as the model finds most likely.
    """
    model, lines = make(family), []
    judge = copy.deepcopy(model).float()
    verified = verify(model, lines)
    assert f"decoder: our own, for {model.config.model_type}" in lines
    assert isinstance(verified.steps, TorchDecoder)
    for prompt, tokens in zip(PROMPTS, generate(verified)[0], strict=True):
        assert _gaps(judge, prompt, tokens).max() <= most_gap(family)
    expected = [greedy_reference(judge, prompt, NEW) for prompt in PROMPTS]
    verified = verify(judge)
    assert isinstance(verified.steps, TorchDecoder)
    for tokens, wanted in zip(generate(verified)[0], expected, strict=True):
        assert tokens[: len(wanted)] == wanted, "up to the end of sequence, where it stops"


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5"])
def test_recurrences_run_as_transformers_wrote_them(family: str) -> None:
    lines: list[str] = []
    verified = verify(make(family), lines)
    assert verified.decoder is None
    reason = "recurrences and gated attention have native kernels alone, for a CPU"
    assert f"decoder: transformers', because {reason}" in lines


@pytest.mark.parametrize("family", ["gemma2", "olmo2", "qwen3"])
def test_float16(family: str) -> None:
    """Inputs in other magnitudes say nothing where they are too large for the model itself: here
    for the last layers of olmo2, whose products have no norm before them.
    """
    model, lines = make(family).half(), []
    judge = copy.deepcopy(model).float()
    verified = verify(model, lines)
    assert f"decoder: our own, for {model.config.model_type}" in lines
    for prompt, tokens in zip(PROMPTS, generate(verified)[0], strict=True):
        assert _gaps(judge, prompt, tokens).max() <= 0.02


@pytest.mark.parametrize("family", ["gemma3", "qwen3"])
def test_captured_steps_equal_generate(family: str) -> None:
    """There is no state, and no tensor is looked at: everything is replayed."""
    model = make(family).float()
    expected = [greedy_reference(model, prompt, NEW) for prompt in PROMPTS]
    graphs = RecordingBackend()
    tokens, runner = generate(verify(model), graphs=graphs, use_cuda_graph=(True, True))
    assert tokens == expected
    assert {kind.path for kind in runner.steps if kind.is_replayed} == set(StepPath)


@pytest.mark.parametrize("family", ["cohere2", "gemma2", "olmo2", "qwen3"])
def test_a_step_is_its_parts(family: str) -> None:
    """Bit by bit, where its products have the same rows."""
    verified = verify(make(family))
    decoder, tokens = verified.steps, 7
    assert isinstance(decoder, TorchDecoder)
    positions = torch.arange(tokens)
    tables = decoder.tables(positions)
    with torch.inference_mode():
        expected = x = decoder.embed(positions + 3)
        shapes = verified.probe.shapes
        allocate = zeros(decoder.dtype, decoder.device)
        small = SmallCache(decoder.backend, shapes, [tokens], 8, allocate)
        context = small.step([Span(0, 0, tokens)]).context
        for layer in decoder.layers:

            def attend(*given: torch.Tensor, layer: Any = layer) -> Any:
                query, key, value = (one.transpose(0, 1) for one in given)
                return context.attend(layer.description.index, query, key, value, layer.params)

            rotary = layer.description.attention.rotary
            own = None if rotary is None else tables[rotary]
            walk = Walk(layer, {})
            walk.run(expected, own, attend, lambda _: pytest.fail("it recurs"), layer.mix)
            expected = walk.parts[-1].made
        assert torch.equal(decoder.run(decoder.layers, x, tables, context), expected)


# ---- weights -----------------------------------------------------------------------------------


def held(model: nn.Module) -> int:
    """Bytes of all that a model holds."""
    tensors = [*model.parameters(), *model.buffers()]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in tensors}
    return sum(one.nbytes() for one in storages.values())


@pytest.mark.parametrize("family", ["qwen2", "phi3"])
def test_weights_are_held_once(family: str) -> None:
    model = make(family)
    size, before = held(model), {name: one.clone() for name, one in model.state_dict().items()}
    decoder = verify(model).steps
    assert isinstance(decoder, TorchDecoder)
    assert held(model) == size
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], one) for name, one in before.items())
    of_model = {one.untyped_storage().data_ptr() for one in model.parameters()}
    for layer in decoder.layers:
        assert isinstance(layer.mlp, TorchMlp)
        for product in (layer.projection, layer.output, layer.mlp.inner, layer.mlp.down):
            assert product.weight.untyped_storage().data_ptr() in of_model
            if product.bias is not None:
                assert product.bias.untyped_storage().data_ptr() in of_model


def test_what_is_written_in_place_is_computed() -> None:
    model = make("llama")
    verified = verify(model)
    before, _ = generate(verified)
    with torch.no_grad():
        model.get_submodule("model.layers.1.self_attn.q_proj").weight.neg_()
        model.get_submodule("model.layers.0.mlp.up_proj").weight.neg_()
    assert generate(verified)[0] != before


# ---- which models it takes ---------------------------------------------------------------------


def _shared(model: PreTrainedModel) -> None:
    mlp: Any = model.get_submodule("model.layers.1.mlp")
    mlp.up_proj.weight = mlp.gate_proj.weight


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_shared, "model.layers.1.mlp.gate_proj shares a parameter with another layer"),
    ],
)
def test_another_model_runs_as_it_was_written(change: Any, reason: str) -> None:
    """Its linear layers are joined then, but for those that are not alone with their weights."""
    model, lines = make("llama"), []
    change(model)
    verified = verify(model, lines)
    assert verified.decoder is None
    assert f"decoder: transformers', because {reason}" in lines
    assert "joined: 5 products of linear layers that have the same input" in lines
    generate(verified)


# ---- on a device that is not here --------------------------------------------------------------


@pytest.mark.parametrize("capability", [(9, 0), (7, 5)])
def test_operations_are_kernels_where_triton_works(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("triton")
    from engine.attention import triton_launch
    from engine.models.triton_operations import TritonOperations

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(triton_launch, "try_out", lambda device: None)
    found = choosing.operations_for(torch.device("cuda"), torch.bfloat16)
    if capability == (9, 0):
        assert isinstance(found, TritonOperations)
        assert not caplog.records
    else:
        assert isinstance(found, TorchOperations)
        assert "8.0 or more, and this one has 7.5" in caplog.text
    assert isinstance(choosing.operations_for(torch.device("cpu"), torch.bfloat16), TorchOperations)


def test_it_is_compared_with_sums_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded and compared: cuBLAS may otherwise sum parts of a product in the model's type."""
    seen = []
    settings = torch.backends.cuda.matmul

    def reduced() -> tuple[bool, bool]:
        return (
            settings.allow_bf16_reduced_precision_reduction,
            settings.allow_fp16_reduced_precision_reduction,
        )

    for room, name in ((gate, "observe"), (choosing, "compare")):
        right = getattr(room, name)

        def noting(*given: Any, right: Any = right) -> Any:
            seen.append(reduced())
            return right(*given)

        monkeypatch.setattr(room, name, noting)
    assert reduced() == (True, True)
    verify(make("llama"))
    assert seen == [(False, False)] * 2
    assert reduced() == (True, True)


# ---- planted faults ----------------------------------------------------------------------------


def _one_row(model: Any) -> None:
    """An error of 1 % in one row of a product that is joined."""
    model.model.layers[1].mlp.up_proj.weight[17] *= 1.01


def _one_norm(model: Any) -> None:
    model.model.layers[2].self_attn.k_norm.weight[5] *= 1.05


def _a_bias(model: Any) -> None:
    model.model.layers[0].self_attn.v_proj.bias[3] += 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("family", "change", "said"),
    [
        ("qwen3", _one_row, r"layer 1, inner, .* in output 113, 1 of 192 outputs"),
        ("qwen3", _one_norm, r"layer 2, key_norm, .* element (5|21); "),
        ("qwen2", _a_bias, r"layer 0, projection, .* in output 99, 1 of 128 outputs"),
    ],
)
def test_wrong_weights_are_found(
    family: str, change: Any, said: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that change between the record and the comparison."""

    def changed(model: Any, *others: Any) -> TorchDecoder:
        with torch.no_grad():
            change(model)
        return TorchDecoder(model, *others)

    monkeypatch.setattr(choosing, "TorchDecoder", changed)
    assert re.search(said, difference(make(family).to(dtype), verify))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mixtral", {"normed": False}),
        ("gpt_oss", {"normed": False}),
        ("qwen3_moe", {"chosen": 1}),
        ("olmoe", {"router": "model.layers.1.mlp.gate"}),
    ],
)
def test_another_routing_is_found(
    family: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def described(model: Any) -> Any:
        found = describe(model)
        layers = []
        for layer in found.layers:
            assert isinstance(layer.mlp, Experts)
            assert layer.mlp.routing is not None
            routing = dataclasses.replace(layer.mlp.routing, **changes)
            mlp = dataclasses.replace(layer.mlp, routing=routing)
            layers.append(dataclasses.replace(layer, mlp=mlp))
        return dataclasses.replace(found, layers=tuple(layers))

    monkeypatch.setattr(choosing, "describe", described)
    assert re.search(r"layer \d, experts, ", difference(make(family), verify))


def test_experts_of_another_form_are_the_models_own() -> None:
    model = make("mixtral").float()
    experts: Any = model.get_submodule("model.layers.1.mlp.experts")
    experts.has_post_expert_norm = True  # what only their own module would apply
    decoder = TorchDecoder(model, describe(model), TorchOperations(), TorchAttentionBackend())
    kinds = [type(one.mlp) for one in decoder.layers]
    assert kinds[:2] == [BoundMixture, type(model.get_submodule("model.layers.1.mlp"))]


class _Wrong(TorchOperations):
    """Operations, one of which is wrong."""

    def __init__(self, fault: str) -> None:
        self._fault = fault

    def add_norm(self, x: Any, made: Any = (), *others: Any, **named: Any) -> Any:
        both = others[-1:] != () or "before" in named
        if self._fault == "a sum forgets x, where a norm follows" and made and both:
            return super().add_norm(torch.zeros_like(x), made, *others, **named)
        return super().add_norm(x, made, *others, **named)

    def rotate(self, projected: Any, heads: Any, tables: Any, places: Any) -> Any:
        query = super().rotate(projected, heads, tables, places)
        if self._fault == "values are cached a head late":
            places.values.copy_(places.values.roll(1, 1))
        if self._fault == "large queries are cut off":
            query.clamp_(-1.5, 1.5)
        return query

    def gate(self, inner: Any, activation: Any, *, gated: bool) -> Any:
        if self._fault == "another activation":
            activation = "gelu_tanh"
        return super().gate(inner, activation, gated=gated)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("a sum forgets x, where a norm follows", r"layer 0, in one call, "),
        ("values are cached a head late", r"layer 0, in one call, "),
        ("large queries are cut off", r"layer \d, quer\w+, "),
        ("another activation", r"layer 0, activation, "),
    ],
)
def test_wrong_operations_are_found(fault: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One part alone, or only where several are computed at once."""
    monkeypatch.setattr(choosing, "operations_for", lambda *_: _Wrong(fault))
    assert re.search(said, difference(make("qwen3"), verify))


@pytest.mark.parametrize("newer", [False, True])
def test_a_model_is_judged_without_tf32(newer: bool) -> None:
    """Whatever the process has set, by torch's older setting or by its newer one."""
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    try:
        if newer:
            settings.fp32_precision = "tf32"
        else:
            settings.allow_tf32 = True
        with choosing.exact_sums():
            assert settings.fp32_precision == "ieee"
        assert settings.fp32_precision == "tf32"
    finally:
        settings.fp32_precision = before
