"""Plans of adapters: their layers and bytes are what a server has, and steps run with them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.contract.adapters import AdapterRows
from engine.contract.config import ContinuousBatchingConfig, LoadConfig
from engine.contract.errors import ConfigError, InsufficientMemoryError
from engine.loading.adapters import adapted_modules
from engine.loading.loader import load_model
from engine.models import native_decoder
from engine.planning import memory_plan as memory
from engine.planning.adapter_plan import AdapterPlan
from engine.planning.expected_times import OPERATION_S, ExpectedTimes, Rates
from engine.planning.memory_plan import plan_memory
from engine.planning.outline import Outline, read_outline
from engine.planning.plan import make_plan
from engine.planning.plan_request import DEFAULT_RANK, Wanted
from engine.planning.rehearsal import Rehearsal
from tests.adapter_files import PeftAdapter
from tests.model_recipes import RECIPES
from tests.tiny_models import FAMILIES, make_model

KINDS = (
    # our decoder; modules as they are; latent attention; experts; recurrent, by kernels and apart
    "llama", "gemma3", "gpt2", "phi", "deepseek_v3", "mixtral", "qwen3_next", "kimi_linear",
    "lfm3", "mamba2", "falcon_h1", "jamba",
)  # fmt: skip


def saved(path: Path, name: str = "llama") -> Path:
    make_model(RECIPES[name].config()).save_pretrained(path)  # type: ignore[arg-type]
    return path


def planned(outline: Outline, **changes: Any) -> AdapterPlan:
    options = {"count": 1, "rank": 4, "layers": outline.adaptable, "dtype": outline.dtype}
    return AdapterPlan(**{**options, **changes})


@pytest.mark.parametrize("name", [name for name in KINDS if RECIPES[name].is_known])
def test_the_layers_are_those_that_a_server_lets_adapters_change(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path / "model", name)
    config = LoadConfig(threads=1, dtype="float32")
    outline = read_outline(path, config)
    adapted = load_model(str(path), config, lambda line: None).adapted
    assert adapted is not None
    assert outline.adaptable == {
        path: shape for path, shape in adapted.shapes.items() if adapted.why_not(path) is None
    }


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "mixtral", "phi"])
@pytest.mark.parametrize(
    ("dtype", "held"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32),
        (torch.float16, torch.float32),
    ],
    ids=["bfloat16", "float32", "float16"],
)
def test_bytes_are_those_that_a_server_takes(
    tmp_path: Path, name: str, dtype: torch.dtype, held: torch.dtype
) -> None:
    model = make_model(RECIPES[name].config())
    model.save_pretrained(tmp_path / "model")  # type: ignore[arg-type]
    outline = read_outline(tmp_path / "model", LoadConfig())
    # An odd rank, so that tensors have padding.
    targets = sorted({path.rpartition(".")[2] for path in outline.adaptable})
    options: dict[str, Any] = {"r": 3, "target_modules": targets, "dtype": dtype}
    options["fan_in_fan_out"] = name == "gpt2"
    for index in range(2):
        PeftAdapter(model, tmp_path / f"a{index}", seed=index, **options)
    adapters = tuple(f"a{index}={tmp_path / f'a{index}'}" for index in range(2))
    config = LoadConfig(threads=1, dtype="float32", adapters=adapters)
    verified = load_model(str(tmp_path / "model"), config, lambda line: None)
    plan = planned(outline, count=2, rank=3, dtype=held)
    assert verified.adapters.figures()["adapter_bytes"] == plan.total_bytes == 2 * plan.each_bytes
    assert plan.each_bytes >= plan.elements * held.itemsize
    [modules] = {one.modules for one in verified.adapters.told()}
    assert modules == len(plan.layers)


def test_room_is_left_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "own_bytes", lambda: 100 << 20)
    outline = read_outline(saved(tmp_path / "model"), LoadConfig())
    config = ContinuousBatchingConfig(block_size=8, max_memory_percent=0.9)
    base = plan_memory(outline, config, 1 << 30)
    less = plan_memory(outline, config, (1 << 30) - (64 << 20))
    found = plan_memory(outline, config, 1 << 30, 64 << 20)
    assert (found.adapters, base.adapters) == (64 << 20, 0)
    assert found.cache == less.cache
    fixed = dataclasses.replace(config, num_blocks=max(base.cache.num_blocks))
    plan_memory(outline, fixed, 1 << 30)
    with pytest.raises(InsufficientMemoryError):
        plan_memory(outline, fixed, 1 << 30, 1 << 30)


def test_they_are_read_once_and_computed_by_row(tmp_path: Path) -> None:
    outline = read_outline(saved(tmp_path / "model"), LoadConfig())
    plan = planned(outline, count=3)
    rates = Rates(1e6, 1e30)

    def more(requests: int, **changes: Any) -> float:
        """What adapters add to a step, without the small operations."""
        one = dataclasses.replace(plan, **changes)
        without, with_them = (ExpectedTimes(outline, rates, 16, of) for of in (None, one))
        added = with_them.decode_s(requests, 9) - without.decode_s(requests, 9)
        return added - len(plan.layers) * OPERATION_S

    each_s = plan.each_bytes / 1e6
    assert more(1) == pytest.approx(each_s)
    assert more(2) == pytest.approx(2 * each_s)
    assert more(16) == pytest.approx(3 * each_s)
    rates = Rates(1e30, 1e6)
    assert more(16) == pytest.approx(16 * 2 * plan.elements / 1e6)
    without, with_them = (ExpectedTimes(outline, rates, 16, one) for one in (None, plan))
    assert with_them.prefill_s(40) - without.prefill_s(40) == pytest.approx(
        40 * 2 * plan.elements / 1e6 + 3 * len(plan.layers) * OPERATION_S
    )


@pytest.mark.parametrize(
    ("name", "decoder", "module", "function"),
    [
        ("llama", "own", native_decoder, "layer_tables"),
        ("llama", "transformers", adapted_modules, "add_to"),
        ("gpt2", "own", adapted_modules, "add_to"),
    ],
)
def test_steps_are_run_with_them(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    decoder: Any,
    module: Any,
    function: str,
) -> None:
    """By the code that a server runs: each request has one, and each another while there are."""
    config = LoadConfig(threads=1, dtype="float32", decoder=decoder)
    outline = read_outline(saved(tmp_path / "model", name), config)
    steps = Rehearsal(outline, config, 8, 64, planned(outline, count=3))
    seen: list[tuple[int, int]] = []
    original = getattr(module, function)

    def note(rows: AdapterRows, *more: Any) -> Any:
        seen.append((len(rows.adapters), len(rows.rows)))
        return original(rows, *more)

    monkeypatch.setattr(module, function, note)
    for requests, different in ((1, 1), (2, 2), (5, 3)):
        seen.clear()
        assert steps.decode_s(requests, 16) > 0
        assert set(seen) == {(different, requests)}
    seen.clear()
    assert steps.prefill_s(40) > 0
    assert {groups for groups, _ in seen} == {1}
    assert max(rows for _, rows in seen) == 40
    seen.clear()
    assert Rehearsal(outline, config, 8, 64).decode_s(2, 16) > 0
    assert not seen


def plan_of(path: Path, load_config: LoadConfig | None = None, **wanted: Any) -> Any:
    config = ContinuousBatchingConfig(block_size=8)
    load_config = load_config or LoadConfig(threads=1)
    asked = Wanted(**{"memory": 2 << 30, "measures": False, **wanted})
    return make_plan(str(path), config, load_config, asked, lambda line: None)


def test_a_plan_has_them_if_they_are_wanted(tmp_path: Path) -> None:
    path = saved(tmp_path / "model")
    found = plan_of(path, num_adapters=5)
    assert (found.adapters.count, found.adapters.rank) == (5, DEFAULT_RANK)
    assert found.memory.adapters == 5 * found.adapters.each_bytes > 0
    assert (
        plan_of(path, num_adapters=5, adapter_rank=32).memory.adapters == 2 * found.memory.adapters
    )
    without = plan_of(path)
    assert without.adapters is None
    assert without.memory.adapters == 0


def test_what_a_server_refuses_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "model")
    with pytest.raises(ConfigError, match="adapter_rank: is that of adapters, and there are none"):
        Wanted(adapter_rank=8)
    for config, reason in (
        (LoadConfig(device="cuda"), "computed on a CPU alone"),
        (LoadConfig(dtype="float16"), "choose bfloat16 or float32"),
    ):
        with pytest.raises(ConfigError, match=f"num_adapters: cannot be served here: .*{reason}"):
            plan_of(path, config, num_adapters=1)
    FAMILIES["llama"]().save_pretrained(tmp_path / "ok")
    assert plan_of(tmp_path / "ok", num_adapters=1).adapters is not None
