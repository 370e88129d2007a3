"""Attention by torch's varlen function without a CUDA device: a plain implementation of what that
function is documented to do stands in for it.

`tests/gpu/test_varlen_attention.py` makes the comparisons with the function itself.
"""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.attention import varlen as torch_varlen

from engine.attention import registry, triton_launch, varlen_backend
from engine.attention.base import AttentionParams, LayerShape
from engine.attention.torch_backend import TorchAttentionBackend
from engine.attention.varlen_backend import VarlenAttentionBackend
from engine.errors import ConfigError
from engine.loading import gate
from engine.loading.loader import verify_model
from engine.runner.runner_options import StepPath
from tests.engine.attention.varlen_reference import varlen_attn_out
from tests.engine.runner.fake_graphs import RecordingBackend
from tests.engine.runner.steps import build_verified, make_core, make_request, run, tokens_of
from tests.gpu import attention_cases
from tests.gpu.attention_cases import TOLERANCES, Case, Layer, make_layout, shape_for
from tests.tiny_models import FAMILIES, make_model, make_prompts

CPU = torch.device("cpu")
NEW = 8

parts = st.lists(
    st.tuples(st.integers(0, 900), st.one_of(st.just(1), st.integers(2, 300))),
    min_size=1,
    max_size=4,
)
layers = st.builds(
    lambda groups, kv_heads, dim, window: Layer(groups * kv_heads, kv_heads, dim, dim, window),
    groups=st.sampled_from([1, 2, 3, 4, 7]),
    kv_heads=st.sampled_from([1, 2, 3]),
    dim=st.sampled_from([8, 40, 64, 128, 256]),
    window=st.sampled_from([None, 1, 7, 100, 256, 300]),
)
SETTINGS = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(autouse=True)
def _stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_varlen, "varlen_attn_out", varlen_attn_out)
    monkeypatch.setattr(attention_cases, "TritonAttentionBackend", VarlenAttentionBackend)


def check(case: Case, output: torch.Tensor) -> None:
    count = int(case.layout.counts.sum())
    tolerance = TOLERANCES[case.dtype]
    torch.testing.assert_close(
        output[:count].double(), case.reference(), rtol=tolerance, atol=tolerance
    )
    assert not output[count:].any(), "padding is zero"


def make_case(
    parts: list[tuple[int, int]],
    layer: Layer,
    dtype: torch.dtype,
    size: int = 256,
    padding: int = 0,
) -> Case:
    """Where nobody may look is NaN; the null block, which a window's first tile may reach into, is
    finite.
    """
    layout = make_layout(parts, size, padding=padding, window=layer.window, seed=len(parts))
    case = Case(layout, layer, dtype, fill=float("nan"))
    for tensor in (case.keys, case.values):
        tensor[:size] = 1.0
    for row in range(len(layout.counts)):  # within its first block, what the window has left
        for tensor in (case.keys, case.values):
            own = case.slots(row)
            tensor[own] = tensor[own].nan_to_num(3.0)
    return case


@SETTINGS
@given(
    parts=parts,
    layer=layers,
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    size=st.sampled_from([256, 512]),
    padding=st.sampled_from([0, 3]),
)
def test_equals_plain_attention(
    parts: list[tuple[int, int]], layer: Layer, dtype: torch.dtype, size: int, padding: int
) -> None:
    """Decode, prefill, chunks and mixtures; and the cache holds what was written."""
    case = make_case(parts, layer, dtype, size, padding)
    cache = case.cache(CPU)
    check(case, case.run(CPU, cache))
    begin = 0
    for row, count in enumerate(case.layout.counts.tolist()):
        slots = case.slots(row)[-count:]
        own = slice(begin, begin + count)
        begin += count
        for tensor, written in ((cache.keys, case.key), (cache.values, case.value)):
            assert torch.equal(tensor[slots].double(), written[:, own].transpose(0, 1))


@SETTINGS
@given(
    parts=st.one_of(
        parts, st.lists(st.tuples(st.integers(0, 900), st.just(1)), min_size=1, max_size=4)
    ),
    window=st.sampled_from([None, 1, 24, 300]),
    more=st.integers(0, 5),
    blocks=st.integers(0, 3),
)
def test_fixed_places_equal_the_step_as_it_comes(
    parts: list[tuple[int, int]], window: int | None, more: int, blocks: int
) -> None:
    case = make_case(parts, Layer(4, 2, 16, 16, window), torch.bfloat16)
    expected_cache, cache = case.cache(CPU), case.cache(CPU)
    expected = case.run(CPU, expected_cache)
    output = case.run(CPU, cache, shape_for(case.layout, more, blocks))
    check(case, output)
    assert torch.equal(output[: len(expected)], expected)
    for one, other in ((cache.keys, expected_cache.keys), (cache.values, expected_cache.values)):
        assert torch.equal(one[256:].nan_to_num(), other[256:].nan_to_num())


def test_strides_are_taken_as_they_are() -> None:
    case = make_case([(20, 1), (5, 9)], Layer(4, 2, 16, 16), torch.bfloat16)
    expected = case.run(CPU)
    packed = torch.cat([case.query, case.key, case.value]).transpose(0, 1).contiguous()
    case.query, case.key, case.value = packed.transpose(0, 1).split([4, 2, 2])
    assert torch.equal(case.run(CPU), expected)
    case.query = case.query.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(case.run(CPU), expected)


def test_the_operation_is_what_torch_is_told() -> None:
    """Its schema, what it writes, and its stand-in for tracing."""
    case = make_case([(20, 1), (5, 9)], Layer(4, 2, 16, 16), torch.bfloat16)
    seen: list[tuple[object, ...]] = []
    own = varlen_backend.varlen_attention
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            varlen_backend, "varlen_attention", lambda *args: seen.append(args) or own(*args)
        )
        case.run(CPU)
    arguments = tuple(one.clone() if isinstance(one, torch.Tensor) else one for one in seen[0])
    torch.library.opcheck(own, arguments)


def test_it_takes_what_the_installed_torch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function that stands in has the signature of the one that is stood in for."""
    monkeypatch.undo()
    if varlen_backend.missing() is not None:
        pytest.skip("this torch's varlen attention knows no block tables")
    real = inspect.signature(torch_varlen.varlen_attn_out).parameters
    ours = inspect.signature(varlen_attn_out).parameters
    assert list(real) == list(ours)
    assert [one.kind for one in real.values()] == [one.kind for one in ours.values()]
    assert [one.default for one in real.values()] == [one.default for one in ours.values()]
    operation = torch.ops.torch_attn._varlen_attn_out.default._schema
    kinds = {one.name: str(one.type) for one in operation.arguments}
    assert kinds["max_q"] == kinds["max_k"] == "int"
    assert kinds["window_size"] == "Optional[List[int]]"
    assert kinds["num_splits"] == "Optional[int]"
    assert kinds["block_table"] == kinds["seqused_k"] == "Optional[Tensor]"


def test_a_request_has_the_same_result_among_any_neighbours() -> None:
    """As far as it is ours: what the function is given for a request names no neighbour."""
    layer = Layer(4, 2, 16, 16)
    alone = make_case([(300, 1)], layer, torch.bfloat16)
    backend = VarlenAttentionBackend()
    alone_metadata = backend.prepare(alone.layout, None, alone.cache(CPU).keys)
    among = make_case([(300, 1), (700, 1), (4, 30)], layer, torch.bfloat16)
    metadata = backend.prepare(among.layout, None, among.cache(CPU).keys)
    assert metadata.lengths[0] == alone_metadata.lengths[0] == 301
    assert metadata.max_keys == 701
    assert metadata.cu_seqlens_q.tolist() == [0, 1, 2, 32]
    assert metadata.cu_seqlens_k.tolist() == [0, 301, 1002, 1036]
    assert metadata.tables.shape == (3, 3)


# ---- models ----------------------------------------------------------------------------------


@pytest.fixture
def device_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch says that there is a CUDA device; models stay on the CPU, and attention is chosen as it
    would be on the device.
    """
    choose = registry.choose_backend
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(triton_launch, "try_out", _no_compiler)
    monkeypatch.setattr(varlen_backend, "try_out", lambda device: None)
    monkeypatch.setattr(
        "engine.loading.loader.choose_backend",
        lambda device, *others: choose(torch.device("cuda"), *others),
    )


def _no_compiler(device: torch.device) -> None:
    raise RuntimeError("no compiler\nand more")


def _generate(model: Any, attention: Any, **options: Any) -> tuple[list[list[int]], Any]:
    verified = verify_model(model, Path(), lambda line: None, attention)
    built = build_verified(verified, block_size=256, num_blocks=8, max_batch_tokens=40, **options)
    prompts = make_prompts((1, 31, 100))
    outputs = run(make_core(built), [make_request(str(i), p, NEW) for i, p in enumerate(prompts)])
    return [tokens_of(outputs[str(i)]) for i in range(len(prompts))], built


@pytest.mark.usefixtures("device_of_nobody")
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3"])
def test_models_pass_the_gate_and_generate(family: str) -> None:
    """The gate compares it in the model's own type; tokens are those of attention in torch, but
    where two are nearly as likely.
    """
    model = make_model(FAMILIES[family]()).to(torch.bfloat16)
    expected, _ = _generate(model, "torch")
    tokens, built = _generate(model, "auto", use_cuda_graph=(True, True), graphs=RecordingBackend())
    assert isinstance(built.runner._forward.backend, VarlenAttentionBackend)
    assert {kind.path for kind in built.runner.steps if kind.is_replayed} == set(StepPath)
    pairs = [
        one == other
        for row, others in zip(tokens, expected, strict=True)
        for one, other in zip(row, others, strict=True)
    ]
    assert sum(pairs) >= 0.75 * len(pairs)


@pytest.mark.usefixtures("device_of_nobody")
def test_the_gate_sees_what_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 16 bits, too: a window that is one token too long, and a softcap that nobody refused."""
    own = varlen_attn_out

    def longer(*arguments: Any, window_size: tuple[int, int], **named: Any) -> torch.Tensor:
        return own(*arguments, window_size=(window_size[0] + (window_size[0] > 0), 0), **named)

    monkeypatch.setattr(varlen_backend, "missing", lambda: None)
    monkeypatch.setattr(torch_varlen, "varlen_attn_out", longer)
    model = make_model(FAMILIES["gemma3"]()).to(torch.bfloat16)
    with pytest.raises(gate.ModelRefusedError, match="paged attention differs"):
        verify_model(model, Path(), lambda line: None, "varlen")
    monkeypatch.setattr(torch_varlen, "varlen_attn_out", own)
    monkeypatch.setattr(VarlenAttentionBackend, "why_not", lambda *arguments: None)
    model = make_model(FAMILIES["gemma2"]()).to(torch.bfloat16)
    with pytest.raises(gate.ModelRefusedError, match="paged attention differs"):
        verify_model(model, Path(), lambda line: None, "varlen")


@pytest.mark.usefixtures("device_of_nobody")
@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gemma2", "Gemma2Attention, layer 0, has a softcap, which torch's varlen"),
        ("gpt_oss", "GptOssAttention, layer 0, has attention sinks, which torch's varlen"),
        ("deepseek_v3", "DeepseekV3Attention, layer 0, has keys of 24 elements and values of 20"),
    ],
)
def test_layers_it_cannot_do(family: str, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    """Asked for, it is refused; else torch computes, and the log says why."""
    model = make_model(FAMILIES[family]()).to(torch.bfloat16)
    with pytest.raises(ConfigError, match=f"attention: is varlen, but {reason}"):
        verify_model(model, Path(), lambda line: None, "varlen")
    with caplog.at_level(logging.WARNING):
        verified = verify_model(model, Path(), lambda line: None)
    assert isinstance(verified.backend, TorchAttentionBackend)
    assert f"attention runs in torch, more slowly than it could: {reason}" in caplog.text


def test_sizes_of_heads() -> None:
    backend, params = VarlenAttentionBackend(), AttentionParams(scaling=1.0)
    for dim in (8, 64, 80, 256):
        assert backend.why_not(LayerShape(2, dim, dim, None), params) is None
    for dim in (4, 20, 264):
        reason = backend.why_not(LayerShape(2, dim, dim, None), params)
        assert reason == (
            f"has heads of {dim} elements, and torch's varlen attention takes multiples of 8 up to "
            "256"
        )


# ---- the choice ------------------------------------------------------------------------------

CUDA = torch.device("cuda")


@pytest.mark.usefixtures("device_of_nobody")
def test_the_order(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        chosen = registry.choose_backend(CUDA, torch.bfloat16)
    assert isinstance(chosen, VarlenAttentionBackend)
    assert (
        "attention runs by varlen: Triton does not work here (RuntimeError: no compiler); it needs "
        "a C compiler"
    ) in caplog.text
    monkeypatch.setattr(triton_launch, "try_out", lambda device: None)
    assert registry.choose_backend(CUDA, torch.bfloat16).name == "triton"
    assert registry.choose_backend(CUDA, torch.bfloat16, "varlen").name == "varlen"


@pytest.mark.usefixtures("device_of_nobody")
@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("block size", "takes blocks of a multiple of 256 tokens, and block_size is 32"),
        ("dtype", "torch's varlen attention does not compute in torch.float32"),
        ("old torch", r"torch .* does not know block_table, num_splits, which that of torch 2.12"),
        ("older torch", r"torch .* does not know varlen_attn_out, which that of torch 2.12 does"),
        ("build", r"does not work here \(RuntimeError: no FlashAttention\)"),
        ("device", "needs a device of compute capability 8.0 or more, and this one has 7.5"),
    ],
)
def test_refused_by_name_and_passed_over_else(
    case: str, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dtype = torch.float32 if case == "dtype" else torch.bfloat16
    size = 32 if case == "block size" else 512
    if case == "old torch":

        def old(out: Any, scale: Any, window_size: Any, enable_gqa: Any, seqused_k: Any) -> None:
            raise AssertionError

        monkeypatch.setattr(torch_varlen, "varlen_attn_out", old)
    elif case == "older torch":
        monkeypatch.delattr(torch_varlen, "varlen_attn_out")
    elif case == "build":

        def without(device: torch.device) -> None:
            raise RuntimeError("no FlashAttention")

        monkeypatch.setattr(varlen_backend, "try_out", without)
    elif case == "device":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ConfigError, match=f"attention: is varlen, but .*{reason}"):
        registry.choose_backend(CUDA, dtype, "varlen", size)
    with caplog.at_level(logging.WARNING):
        chosen = registry.choose_backend(CUDA, dtype, "auto", size)
    assert isinstance(chosen, TorchAttentionBackend)
    assert "attention runs in torch" in caplog.text


def test_refused_on_a_cpu() -> None:
    with pytest.raises(ConfigError, match=r"is varlen, but torch's varlen attention is for CUDA"):
        registry.choose_backend(CPU, torch.bfloat16, "varlen")


@pytest.mark.usefixtures("device_of_nobody")
def test_a_cache_of_other_blocks_is_refused() -> None:
    """The size is known when a model is loaded for a server, but offline it may come later."""
    model = make_model(FAMILIES["llama"]()).to(torch.bfloat16)
    verified = verify_model(model, Path(), lambda line: None, "varlen")
    with pytest.raises(ConfigError, match=r"block_size: is 32, and .* by varlen, which takes mult"):
        build_verified(verified, block_size=32)
    verified = verify_model(model, Path(), lambda line: None, block_size=32)
    assert isinstance(verified.backend, TorchAttentionBackend)


def test_trying_it_out() -> None:
    varlen_backend.try_out(CPU)
