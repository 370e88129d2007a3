"""Plans: what is told without weights is what an engine then has."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import PreTrainedModel

from engine.attention.step_states import Recurrence, StateShape
from engine.contract.config import ContinuousBatchingConfig, LoadConfig
from engine.contract.errors import ConfigError, InsufficientMemoryError, ModelRefusedError
from engine.loading.loader import load_model
from engine.loading.memory import HostLimits
from engine.loading.running import build_runner
from engine.models.formats.native import native_library
from engine.models.held_layer import held_layers
from engine.planning import memory_plan as memory
from engine.planning.expected_times import ExpectedTimes, Rates
from engine.planning.memory_plan import plan_memory, room, step_bytes
from engine.planning.outline import read_outline
from engine.planning.plan import make_plan
from engine.planning.plan_request import Wanted
from tests.model_recipes import RECIPES
from tests.tiny_models import CONTEXT, FAMILIES, make_model

SHAPES = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "mistral": {},
    "gemma3": {},
    "deepseek_v3": {},
    "mixtral": {},
    "gpt2": {},
}
BLIND = {"dbrx", "jetmoe", "longcat_flash", "xmod"}
"""Their experts, or adapters, are chosen by looking at numbers, which are not there."""
UNSTABLE = {("deepseek_v3", "int8"), ("deepseek_v3", "int4-64")}
"""Refused by the load gate: with random weights, rounding lets tokens go to other experts."""


def _saved(path: Path, name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    family = "llama" if name == "tied" else name
    model = make_model(FAMILIES[family](**SHAPES.get(name, {}), **changes))
    model.to(dtype).save_pretrained(path)  # type: ignore[arg-type]
    return path


def _held_bytes(model: PreTrainedModel) -> int:
    """The memory of a loaded model's parameters and buffers."""
    found: dict[int, int] = {}
    packed = [tensor for one in held_layers(model) for tensor in one.held.tensors().values()]
    for tensor in (*model.parameters(), *model.buffers(), *packed):
        for address in (tensor.data_ptr(),):
            if tensor.numel():
                found[address] = max(found.get(address, 0), tensor.nbytes)
    return sum(found.values())


@pytest.fixture(autouse=True)
def _no_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """With AMX oneDNN packs bfloat16 weights, and hides what they take."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.bfloat16, {}),
        (torch.bfloat16, {"quantization": "int8"}),
        (torch.bfloat16, {"quantization": "int4"}),
        (torch.bfloat16, {"quantization": "int4-64"}),
    ],
    ids=["float32", "bfloat16", "int8", "int4", "int4-64"],
)
def test_a_plan_is_what_the_engine_then_has(
    tmp_path: Path, name: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    load_config = LoadConfig(threads=1, **options)
    if (name, load_config.quantization) in UNSTABLE:
        pytest.skip("the load gate refuses these random weights")
    path = _saved(tmp_path / "model", name, dtype)
    config = ContinuousBatchingConfig(block_size=8, max_batch_tokens=64)
    outline = read_outline(path, load_config)
    planned = plan_memory(outline, config, 4 << 30)

    verified = load_model(str(path), load_config, lambda line: None)
    loaded = build_runner(verified, config, lambda line: None)
    assert outline.groups == loaded.groups
    assert outline.shapes == verified.probe.shapes
    assert planned.cache.num_blocks == loaded.plan.num_blocks
    assert planned.cache.total_bytes == loaded.plan.total_bytes
    assert (outline.context_length, outline.vocab_size) == (
        verified.context_length,
        verified.vocab_size,
    )
    assert outline.parameters == verified.parameters
    assert outline.weight_bytes == pytest.approx(_held_bytes(verified.original), rel=0.02)


@pytest.mark.parametrize("name", [name for name, one in RECIPES.items() if one.is_known])
def test_families_are_planned_without_weights(tmp_path: Path, name: str) -> None:
    RECIPES[name].config().save_pretrained(tmp_path)
    if name in BLIND:
        with pytest.raises(ModelRefusedError, match="cannot be planned: what its layers keep"):
            read_outline(tmp_path, LoadConfig())
        return
    outline = read_outline(tmp_path, LoadConfig())
    windows = {group.window for group in outline.groups if group.kind.grows} or {None}
    kinds = {
        "full": {None},
        "sliding": windows - {None},
        "sliding and full": {None, *windows},
        "none": {None},
    }
    assert windows == kinds[RECIPES[name].attention]


def test_a_context_that_rotary_embeddings_extend(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
    }
    path = _saved(tmp_path / "model", "llama", rope_parameters=rope)
    outline = read_outline(path, LoadConfig())
    assert outline.context_length == CONTEXT
    verified = load_model(str(path), LoadConfig(threads=1), lambda line: None)
    assert verified.context_length == CONTEXT
    assert outline.own_decoder
    assert verified.decoder is not None


def test_requests_fit_as_the_cache_says(tmp_path: Path) -> None:
    outline = read_outline(_saved(tmp_path / "model", "llama"), LoadConfig())
    config = ContinuousBatchingConfig(block_size=8, num_blocks=100, max_requests_per_batch=64)
    cache = plan_memory(outline, config, 4 << 30).cache
    # 30 + 11 tokens take 6 blocks of 8; 10 blocks stay free for growth.
    found = room(outline, cache, 30, 11)
    assert (found.cache_requests, found.requests) == (15, 15)
    assert found.request_bytes == 6 * 8 * outline.groups[0].bytes_per_token
    few = dataclasses.replace(cache, max_requests=5)
    assert room(outline, few, 30, 11).requests == 5


def test_a_sliding_group_limits_no_request(tmp_path: Path) -> None:
    outline = read_outline(_saved(tmp_path / "model", "gemma3"), LoadConfig())
    config = ContinuousBatchingConfig(block_size=8, num_blocks=660, max_requests_per_batch=10)
    cache = plan_memory(outline, config, 4 << 30).cache
    assert room(outline, cache, 500, 12).cache_requests == 10


def test_wanted_requests_become_blocks(tmp_path: Path) -> None:
    path = str(_saved(tmp_path / "model", "llama"))
    config = ContinuousBatchingConfig(block_size=8)

    def plan(wanted: Wanted, config: ContinuousBatchingConfig = config) -> Any:
        return make_plan(path, config, LoadConfig(threads=1), wanted, lambda line: None)

    wanted = Wanted(requests=7, prompt_tokens=30, output_tokens=11, memory=2 << 30, measures=False)
    found = plan(wanted)
    assert found.memory.cache.num_blocks == (7 * 6 + 5,)
    assert found.room.requests == found.memory.cache.max_requests == 7
    assert found.times is None
    with pytest.raises(InsufficientMemoryError, match="the KV cache needs"):
        plan(dataclasses.replace(wanted, memory=1 << 20))
    with pytest.raises(ConfigError, match="num_blocks: follows from requests"):
        plan(wanted, ContinuousBatchingConfig(num_blocks=4))
    with pytest.raises(ConfigError, match="more than the 512 tokens that the model allows"):
        plan(Wanted(prompt_tokens=500, output_tokens=13, measures=False))
    with pytest.raises(ConfigError, match="bandwidth: and matrix_rate belong together"):
        Wanted(bandwidth=1.0)


def test_a_plan_of_a_split_model_is_refused(tmp_path: Path) -> None:
    path = _saved(tmp_path / "model", "llama")
    with pytest.raises(ConfigError, match="tensor_parallel: is auto, and a plan is for"):
        read_outline(path, LoadConfig(tensor_parallel="auto"))


def test_a_cuda_device_need_not_be_there(tmp_path: Path) -> None:
    path = str(_saved(tmp_path / "model", "llama"))
    wanted = Wanted(memory=2 << 30, bandwidth=3e12, rate=8e14)
    config = ContinuousBatchingConfig(block_size=8)
    found = make_plan(path, config, LoadConfig(device="cuda"), wanted, lambda line: None)
    assert found.memory.cache.total_bytes <= 2 << 30
    assert found.memory.cache.total_bytes > 1 << 30
    assert found.times is not None


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16"])
def test_our_decoder_is_planned_for_a_cuda_device(tmp_path: Path, dtype: Any) -> None:
    path = _saved(tmp_path / "model", "llama")
    ours = read_outline(path, LoadConfig(device="cuda", dtype=dtype))
    theirs = read_outline(path, LoadConfig(device="cuda", dtype=dtype, decoder="transformers"))
    assert ours.own_decoder
    assert not theirs.own_decoder
    assert ours.operations < theirs.operations


def test_times_follow_the_rates(tmp_path: Path) -> None:
    path = tmp_path / "model"
    FAMILIES["llama"](hidden_size=1024, intermediate_size=4096).save_pretrained(path)
    outline = read_outline(path, LoadConfig())
    slow, fast = (ExpectedTimes(outline, Rates(rate, rate * 10), 16) for rate in (1e6, 2e6))
    assert slow.decode_s(1, 100) == pytest.approx(2 * fast.decode_s(1, 100), rel=0.01)
    assert slow.prefill_s(64) == pytest.approx(2 * fast.prefill_s(64), rel=0.01)
    # One row is the time of reading all weights but the embedding.
    read = outline.linear.held + outline.head.held
    assert slow.decode_s(1, 0) == pytest.approx(read / 1e6, rel=0.1)
    # A window bounds what is read.
    assert slow.decode_s(1, 512) > slow.decode_s(1, 256)


def test_rows_are_sampled(tmp_path: Path) -> None:
    outline = read_outline(_saved(tmp_path / "model", "llama"), LoadConfig())
    larger = dataclasses.replace(outline, vocab_size=outline.vocab_size + 10**9)
    without, with_it = (ExpectedTimes(one, Rates(8e9, 1e12), 16) for one in (outline, larger))
    assert outline.dtype is torch.float32
    assert with_it.decode_s(3, 0) - without.decode_s(3, 0) == pytest.approx(3)
    assert with_it.prefill_s(64) - without.prefill_s(64) == pytest.approx(1)


def test_states_are_read_and_written(tmp_path: Path) -> None:
    outline = read_outline(_saved(tmp_path / "model", "llama"), LoadConfig())
    state = StateShape(0, "recurrent", 0, (10**9,), torch.float32)
    larger = dataclasses.replace(outline, recurrence=Recurrence("past_key_values", (state,)))
    without, with_it = (ExpectedTimes(one, Rates(8e9, 1e12), 16) for one in (outline, larger))
    assert with_it.decode_s(3, 9) - without.decode_s(3, 9) == pytest.approx(3)


def test_chosen_experts_alone_are_read(tmp_path: Path) -> None:
    path = tmp_path / "model"
    FAMILIES["mixtral"](hidden_size=256, intermediate_size=1024).save_pretrained(path)
    outline = read_outline(path, LoadConfig())
    assert {(one.total, one.chosen) for one in outline.experts} == {(4, 2)}
    times = ExpectedTimes(outline, Rates(1e6, 1e12), 16)
    assert outline.linear.held + outline.head.held + outline.experts_bytes / 2 == pytest.approx(
        times.decode_s(1, 0) * 1e6, rel=0.02
    )


def test_no_more_is_free_than_the_container_s_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Part of this process's memory may count in another group, as a library's that was there."""
    limits = HostLimits(memory_limit=4 << 30, memory_available=4 << 30, cpus=1, cpu_source="")
    monkeypatch.setattr(HostLimits, "read", lambda: limits)
    outline = read_outline(_saved(tmp_path / "model", "llama"), LoadConfig(device="cpu"))
    assert plan_memory(outline, ContinuousBatchingConfig(), None).total == 4 << 30


def test_the_vocabulary_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outline = read_outline(_saved(tmp_path / "model", "llama"), LoadConfig())
    config = ContinuousBatchingConfig(block_size=8)
    without = plan_memory(outline, config, 4 << 30)
    monkeypatch.setattr(memory, "tokenizer_bytes", lambda outline: (50 << 20, 30 << 20))
    with_it = plan_memory(outline, config, 4 << 30)
    assert with_it.front_end - without.front_end == 50 << 20
    assert with_it.engine - without.engine == pytest.approx(80 << 20, abs=4 << 20)


@pytest.mark.parametrize(
    ("name", "dtype", "pack", "counted"),
    [
        ("llama", torch.bfloat16, None, False),
        ("llama", torch.bfloat16, False, True),
        ("llama", torch.float32, None, False),
        ("mixtral", torch.bfloat16, None, True),
    ],
)
def test_compiled_products_are_counted_where_torch_multiplies(
    tmp_path: Path, name: str, dtype: torch.dtype, pack: bool | None, counted: bool
) -> None:
    asked: Literal["bfloat16", "float32"] = "float32" if dtype is torch.float32 else "bfloat16"
    load = LoadConfig(pack_weights=pack, dtype=asked)  # auto is float32 on some processors
    outline = read_outline(_saved(tmp_path / "m", name, dtype), load)
    assert (memory.kernel_bytes(outline) > 0) == counted


def test_int8_needs_the_kernels(tmp_path: Path) -> None:
    path = _saved(tmp_path / "model", "llama")
    assert native_library().isa
    with pytest.raises(ConfigError, match="quantization: is int8, but it is for bfloat16"):
        read_outline(path, LoadConfig(quantization="int8"))


def test_graphs_have_memory_of_their_own(tmp_path: Path) -> None:
    outline = read_outline(_saved(tmp_path / "model", "llama"), LoadConfig(device="cuda"))
    config = ContinuousBatchingConfig(max_batch_tokens=2048, max_requests_per_batch=64)
    eager = step_bytes(outline, dataclasses.replace(config, use_cuda_graph=False))
    logits = 64 * outline.vocab_size * outline.dtype.itemsize
    assert step_bytes(outline, config) > eager + logits


def test_what_captured_draws_need_has_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels have the same memory for each row, whatever the type; without them, so many logits
    are looked at, whatever a step has.
    """
    saved = _saved(tmp_path / "model", "llama", torch.bfloat16)
    outline = read_outline(saved, LoadConfig(device="cuda"))
    has_kernels = True
    monkeypatch.setattr("engine.sampling.plain._has_kernels", lambda *_: has_kernels)

    def draws(requests: int) -> int:
        config = ContinuousBatchingConfig(max_batch_tokens=2048, max_requests_per_batch=requests)
        captured = step_bytes(outline, config)
        captured -= requests * outline.vocab_size * 2 * outline.dtype.itemsize
        return captured - step_bytes(outline, dataclasses.replace(config, use_cuda_graph=False))

    assert draws(65) - draws(1) == 64 * (112 << 10)
    monkeypatch.setattr("engine.sampling.plain.DRAWN_AT_ONCE", 100 * outline.vocab_size)
    outline, has_kernels = dataclasses.replace(outline, dtype=torch.float32), False
    assert draws(65) - draws(1) == 64 * outline.vocab_size * 45
    assert draws(101) == draws(300) > draws(65)
