"""Rehearsals: the steps that a plan times are those that an engine then runs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention.small_cache import SmallCache, SmallStep, Span
from engine.contract.config import ContinuousBatchingConfig, LoadConfig
from engine.contract.errors import ModelRefusedError
from engine.loading.loader import load_model
from engine.loading.memory import HostLimits
from engine.models.formats import native
from engine.models.held_layer import HeldLayer, PackedLinear
from engine.models.native_decoder import NativeDecoder
from engine.planning import rehearsal
from engine.planning import synthetic_weights as made_up
from engine.planning.outline import read_outline
from engine.planning.plan import make_plan
from engine.planning.plan_request import Wanted
from engine.planning.rehearsal import Rehearsal
from engine.planning.synthetic_weights import Rings
from tests.quantised_files import quantise
from tests.quantised_recipes import RECIPES as QUANTISED
from tests.tiny_models import FAMILIES, make_model

BLOCK = 8


@pytest.fixture(autouse=True)
def _no_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """With AMX oneDNN packs bfloat16 weights, and hides what they take."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "_LONG", ((0.0, 2),))


def _saved(path: Path, name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    model = make_model(FAMILIES[name](**changes))
    model.to(dtype).save_pretrained(path)  # type: ignore[arg-type]
    return path


def _rehearsal(path: Path, max_batch_tokens: int = 512, **options: Any) -> Rehearsal:
    load_config = LoadConfig(threads=1, **options)
    return Rehearsal(read_outline(path, load_config), load_config, BLOCK, max_batch_tokens)


def _modules(model: torch.nn.Module) -> dict[str, Any]:
    """A model's modules, with the shapes and types of their tensors. (Some buffers are float32 in
    checkpoints alone.)
    """
    return {
        name: (
            type(module).__name__,
            [(key, one.shape, one.dtype) for key, one in module.named_parameters(recurse=False)],
            [(key, one.shape) for key, one in module.named_buffers(recurse=False)],
            module.held.shape if isinstance(module, HeldLayer) else None,
        )
        for name, module in model.named_modules()
    }


def _stand_ins(model: Any) -> dict[str, str]:
    """What computes modules in place of their own forward."""
    return {
        name: type(module.forward).__name__
        for name, module in model.named_modules()
        if "forward" in vars(module)
    }


_FLOAT32 = (torch.float32, {})
_BFLOAT16 = (torch.bfloat16, {})
_INT8 = (torch.bfloat16, {"quantization": "int8"})
_NOT_PACKED = (torch.bfloat16, {"pack_weights": False})
_TRANSFORMERS = (torch.bfloat16, {"decoder": "transformers"})


@pytest.mark.parametrize(
    ("name", "changes", "how"),
    [
        ("llama", {}, _FLOAT32),
        ("llama", {}, _BFLOAT16),
        ("llama", {}, _NOT_PACKED),
        ("llama", {}, _TRANSFORMERS),
        ("llama", {"tie_word_embeddings": True}, _INT8),
        ("llama", {"attention_bias": True}, _INT8),
        ("gemma3", {}, _BFLOAT16),
        ("gemma3", {}, _INT8),
        ("deepseek_v3", {}, _FLOAT32),
        ("deepseek_v3", {}, _BFLOAT16),
        ("mixtral", {}, _BFLOAT16),
        ("mixtral", {}, _INT8),
        ("gpt2", {}, _BFLOAT16),
        ("qwen3_5", {}, _BFLOAT16),
        ("qwen3_next", {}, _TRANSFORMERS),
        ("granitemoehybrid", {}, _FLOAT32),
        ("mamba2", {}, _BFLOAT16),
    ],
)
def test_steps_are_computed_by_what_the_engine_then_has(
    tmp_path: Path, name: str, changes: dict[str, Any], how: tuple[torch.dtype, dict[str, Any]]
) -> None:
    dtype, options = how
    path = _saved(tmp_path / "model", name, dtype, **changes)
    rehearsed = _rehearsal(path, **options)
    assert rehearsed.decode_s(3, 20) > 0
    assert rehearsed.prefill_s(20) > 0
    verified = load_model(str(path), LoadConfig(threads=1, **options), lambda line: None)
    assert type(rehearsed.backend) is type(verified.backend)
    assert type(rehearsed.steps) is type(verified.steps)
    if isinstance(rehearsed.steps, NativeDecoder):
        assert isinstance(verified.steps, NativeDecoder)
        assert rehearsed.steps.description == verified.steps.description
    else:
        assert _stand_ins(rehearsed.steps) == _stand_ins(verified.steps)
    assert _modules(rehearsed.model) == _modules(verified.model)


def test_requests_choose_different_experts(tmp_path: Path) -> None:
    rehearsed = _rehearsal(_saved(tmp_path / "model", "mixtral", torch.bfloat16))
    experts = rehearsed.model.config.num_local_experts
    chosen: list[torch.Tensor] = []

    def note(_module: object, _inputs: object, output: Any) -> None:
        chosen.append(output[-1])  # [T, k]

    routers = [one for one in rehearsed.model.modules() if type(one).__name__.endswith("Router")]
    for one in routers:
        one.register_forward_hook(note)
    rehearsed.decode_s(32, 200)
    assert chosen
    for indices in chosen:
        assert len(indices) == 32
        assert len(indices.unique()) == experts > indices.shape[-1]


class _Launched:
    """The parts of the steps that were computed: start and number of tokens of each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[list[tuple[int, int]]] = []
        right = SmallCache.step

        def noted(small: SmallCache, parts: Sequence[Span], *more: Any) -> SmallStep:
            self.steps.append([(part.start, part.end - part.start) for part in parts])
            return right(small, parts, *more)

        monkeypatch.setattr(SmallCache, "step", noted)


def test_only_the_steps_that_are_timed_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rehearsed = _rehearsal(_saved(tmp_path / "model", "llama"), max_batch_tokens=16)
    launched = _Launched(monkeypatch)
    rehearsed.decode_s(3, 20)
    assert launched.steps[0] == [(20, 1)] * 3
    assert launched.steps == [[(20 + step, 1)] * 3 for step in range(len(launched.steps))]
    launched.steps.clear()
    rehearsed.prefill_s(48)
    parts = [part for step in launched.steps for part in step]
    assert dict.fromkeys(parts) == {(0, 16): None, (32, 16): None}


def test_positions_stay_within_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rehearsed = _rehearsal(_saved(tmp_path / "model", "gpt2"))
    launched = _Launched(monkeypatch)
    length = read_outline(tmp_path / "model", LoadConfig()).context_length
    rehearsed.decode_s(2, length - 1)
    rehearsed.prefill_s(length - 1)
    assert max(start + count for step in launched.steps for start, count in step) <= length


def test_longer_and_more_are_on_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rehearsed = _rehearsal(_saved(tmp_path / "model", "llama"), max_batch_tokens=32)
    run: list[tuple[int, int]] = []

    def decode_s(_: Rehearsal, requests: int, context: int) -> float:
        run.append((requests, context))
        return 3 + 5 * requests + 7 * context

    def chunk_s(_: Rehearsal, tokens: int, start: int) -> float:
        run.append((tokens, start))
        return tokens * (0.001 + 0.002 * start)

    monkeypatch.setattr(Rehearsal, "_decode_s", decode_s)
    monkeypatch.setattr(Rehearsal, "_chunk_s", chunk_s)
    monkeypatch.setattr(rehearsed, "_most_tokens", 128)
    assert rehearsed.decode_s(4, 1000) == 3 + 5 * 4 + 7 * 1000
    assert rehearsed.decode_s(1000, 1) == 3 + 5 * 1000 + 7 * 1
    assert all(requests * context <= 128 and requests <= 64 for requests, context in run)
    run.clear()
    parts = [32 * (0.001 + 0.002 * start) for start in range(0, 320, 32)]
    assert rehearsed.prefill_s(320) == pytest.approx(sum(parts))
    assert all(tokens + start <= 128 for tokens, start in run)


def test_a_prompt_that_takes_long_is_computed_from_its_first_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rehearsed = _rehearsal(_saved(tmp_path / "model", "llama"), max_batch_tokens=512)
    monkeypatch.setattr(Rehearsal, "_chunk_s", lambda _, tokens, start: tokens * 1.0)
    assert rehearsed.prefill_s(512) == 512
    run: list[int] = []
    monkeypatch.setattr(Rehearsal, "_chunk_s", lambda _, tokens, start: run.append(tokens) or 5.0)
    rehearsed.prefill_s(512)
    assert set(run) == {128}


def test_of_each_shape_there_are_only_as_many_as_no_cache_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rings = Rings()
    half = made_up.UNCACHED_BYTES // 2
    given = [rings.take("kind", half, object) for _ in range(5)]
    assert given[0] is not given[1]
    assert given[2:] == [given[0], given[1], given[0]]
    assert rings.take("other", half, object) not in given

    path = _saved(tmp_path / "model", "llama", torch.bfloat16, num_hidden_layers=8)

    def addresses() -> set[int]:
        model = _rehearsal(path).model
        return {layer.mlp.down_proj.held.packed.data_ptr() for layer in model.model.layers}  # type: ignore[union-attr]

    assert len(addresses()) == 8
    monkeypatch.setattr(made_up, "UNCACHED_BYTES", 1)
    assert len(addresses()) == 1


def test_packed_weights_are_in_large_pages_as_those_of_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []

    def ask(packed: torch.Tensor) -> None:
        storage = packed.untyped_storage()
        asked.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))

    monkeypatch.setattr(native, "ask_for_large_pages", ask)
    monkeypatch.setattr(made_up, "_CHUNK_BYTES", 1 << 17)
    model = _rehearsal(_saved(tmp_path / "model", "llama", torch.bfloat16)).model
    packed = [one.held.packed for one in model.modules() if isinstance(one, PackedLinear)]
    assert packed
    assert len(set(asked)) > 1
    addresses = sorted({(one.data_ptr(), one.data_ptr() + one.nbytes) for one in packed})
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(addresses))
    for first, last in addresses:
        assert any(start <= first and last <= end for start, end in asked)


def test_a_model_whose_steps_fail_is_planned_without_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _saved(tmp_path / "model", "llama")

    def fail(*_: object) -> None:
        raise RuntimeError("no step")

    monkeypatch.setattr(SmallStep, "logits", fail)
    with pytest.raises(ModelRefusedError, match="LlamaForCausalLM cannot be run without its"):
        _rehearsal(path).decode_s(1, 8)
    lines: list[str] = []
    wanted = Wanted(memory=2 << 30)
    config = ContinuousBatchingConfig(block_size=BLOCK)
    plan = make_plan(str(path), config, LoadConfig(threads=1), wanted, lines.append)
    assert plan.times is None
    assert lines[-1] == "no times: LlamaForCausalLM cannot be run without its weights"


def test_weights_that_do_not_fit_are_not_made_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _saved(tmp_path / "model", "llama")
    limits = dataclasses.replace(HostLimits.read(), memory_available=1 << 10)
    monkeypatch.setattr(HostLimits, "read", lambda: limits)
    with pytest.raises(ModelRefusedError, match="more than half of the memory that is free here"):
        _rehearsal(path)


def test_a_plan_has_the_times_of_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _saved(tmp_path / "model", "llama")
    launched = _Launched(monkeypatch)
    wanted = Wanted(memory=2 << 30, requests=20, prompt_tokens=30, output_tokens=10)
    config = ContinuousBatchingConfig(block_size=BLOCK)
    plan = make_plan(str(path), config, LoadConfig(threads=1), wanted, lambda line: None)
    assert plan.times is not None
    assert plan.times.rates is None
    assert [one.requests for one in plan.times.decode] == [1, 16, 20]
    assert {len(step) for step in launched.steps} == {1, 16, 20}
    assert plan.times.context == 35
    assert {step[0] for step in launched.steps} >= {(35, 1), (0, 30)}


@pytest.mark.parametrize("name", ["gptq", "gptq-4-order-asym", "awq-lm-head", "gptq-8--1-sym"])
def test_steps_of_quantised_files_are_rehearsed(tmp_path: Path, name: str) -> None:
    quantise(make_model(FAMILIES["llama"]()), tmp_path, QUANTISED[name])
    for options in ({}, {"quantization": "int8"}, {"pack_weights": False}):
        config = LoadConfig(**options)
        outline = read_outline(tmp_path, config)
        steps = Rehearsal(outline, config, 8, 64)
        assert steps.decode_s(2, 16) > 0
