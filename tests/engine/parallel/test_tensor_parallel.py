"""Models that are divided among processes: what they compute, what is refused, and how they end.

Two ranks on a CPU, started as users start them. Nothing here needs a GPU, and nothing is measured.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from engine.api.offline import from_model, load
from engine.contract.config import LoadConfig
from engine.contract.environment import RankPlace
from engine.contract.errors import ConfigError, InsufficientMemoryError, ModelRefusedError
from engine.loading.memory import CachePlan
from engine.loading.sharding import check_plan
from engine.parallel.leader import Leader
from engine.parallel.ranks import Ranks, join
from engine.runner.kv_tensors import KVTensors
from tests.engine.parallel.ranks_cases import CASES, GREEDY, NEW_TOKENS, run
from tests.engine.parallel.ranks_rig import ROOT, launched, needs_ranks, ranks, torchrun
from tests.multimodal_recipes import SERVED, make_whole
from tests.tiny_models import FAMILIES, greedy_reference, make_model

WORK = ROOT / "tests" / "engine" / "parallel" / "ranks_work.py"
TROUBLE = ROOT / "tests" / "engine" / "parallel" / "ranks_trouble.py"
BOUND_S = 30.0
"""How soon a rank ends when another one has."""


def _save(path: Path, family: str) -> Path:
    make_model(FAMILIES[family](eos_token_id=None)).save_pretrained(path)
    return path


def test_who_leaves_waits_until_nobody_else_has_its_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gloo's thread, here a list, needs the interpreter to let go of it."""
    leaving = Ranks(RankPlace(0, 2, 0, 2), torch.device("cpu"), cast(Any, None), cast(Any, None))
    holders = [leaving._frame]
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            holders.clear()

    monkeypatch.setattr("engine.parallel.ranks.time.sleep", sleep)
    leaving.leave()
    assert len(slept) == 3
    leaving.leave()
    assert len(slept) == 3, "nobody has it"


# ---- what they compute ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", [pytest.param("qwen3", marks=pytest.mark.slow), "llama"])
def test_every_case_equals_one_process(family: str, tmp_path: Path) -> None:
    needs_ranks()
    path, results = _save(tmp_path / "model", family), tmp_path / "results.json"
    with launched(torchrun(str(WORK), str(path), str(results))) as process:
        family_of_processes = process.family()
        assert process.ended() == 0, process.said
        said: dict[str, Any] = json.loads(results.read_text())
        assert not any(one.is_running() for one in family_of_processes)
    assert said["kv_heads"] == [1, 1, 1], "each rank has one of the two"

    model = make_model(FAMILIES[family](eos_token_id=None))
    for name in GREEDY:
        tokens = said[name]["tokens"]
        for index, prompt in enumerate(CASES[name].prompts):
            assert tokens[str(index)] == greedy_reference(model, prompt, NEW_TOKENS), name
    alone = from_model(model)
    expected = run(alone, CASES["choices"])["tokens"]
    assert len(set(map(tuple, expected.values()))) == len(expected), "it says nothing"
    assert said["choices"]["tokens"] == expected
    assert all(not said[name]["errors"] for name in CASES)
    assert said["prefix shared"]["prefix_hits"] > 0
    assert said["preempted"]["preemptions"] > 0
    assert said["offloaded"]["offloads"] > 0
    assert said["offloaded"]["restores"] > 0

    refused = said["refused"]
    assert all(refused[option].startswith(f"ConfigError: {option}: is ") for option in (
        "use_cuda_graph", "use_async_batching", "default_compile_level",
        "use_default_compile_configs",
    )), refused  # fmt: skip
    assert refused["num_blocks"].startswith("InsufficientMemoryError: ")
    first, second, third = said["errors"]
    assert (first, third) == (None, None)
    assert second.startswith("the model failed on this request's batch")
    assert said["second load"].startswith("tensor_parallel: is auto, and this process belongs to")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "mistral3"])
def test_a_text_part_equals_the_whole_model_with_its_towers(name: str, tmp_path: Path) -> None:
    needs_ranks()
    whole, results = make_whole(SERVED[name].config(eos_token_id=None)), tmp_path / "results.json"
    whole.save_pretrained(tmp_path / "model")
    with launched(torchrun(str(WORK), str(tmp_path / "model"), str(results))) as process:
        assert process.ended() == 0, process.said
    said: dict[str, Any] = json.loads(results.read_text())
    for case in GREEDY:
        for index, prompt in enumerate(CASES[case].prompts):
            expected = greedy_reference(whole, prompt, NEW_TOKENS)
            assert said[case]["tokens"][str(index)] == expected, case


# ---- how they end --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _save(tmp_path_factory.mktemp("models") / "llama", "llama")


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_who_is_left_when_a_rank_is_killed_ends(victim: int, saved: Path) -> None:
    needs_ranks()
    with ranks(TROUBLE, str(saved), "killed") as both:
        both[0].wait_for("running\n")
        both[victim].process.kill()
        began = time.monotonic()
        code = both[1 - victim].ended()
        assert time.monotonic() - began < BOUND_S
        said = both[1 - victim].said
    if victim == 0:
        assert code == 3
        assert "RanksLostError: rank 1 ends" in said
    else:
        assert "last: FAILED the engine failed" in said
        assert "afterwards: RanksLostError: " in said
        assert code == 0, "its script went on"


@pytest.mark.slow
def test_a_step_that_fails_on_another_rank_ends_all(saved: Path) -> None:
    needs_ranks()
    with ranks(TROUBLE, str(saved), "a follower fails") as (first, second):
        assert second.ended() == 3
        first.ended(BOUND_S)
        assert "(RuntimeError: as the test wants it)" in second.said
        assert "last: FAILED the engine failed" in first.said


@pytest.mark.slow
def test_a_refusal_on_another_rank_refuses_all(saved: Path) -> None:
    """The first rank is in the middle of the gate meanwhile."""
    needs_ranks()
    with ranks(TROUBLE, str(saved), "a follower refuses") as (first, second):
        assert (second.ended(), first.ended(BOUND_S)) == (3, 3)
        assert "not loaded: ModelRefusedError: not as the test wants it" in second.said
        assert "not loaded: ModelRefusedError: rank 1: not as the test wants it" in first.said


# ---- what is refused before anything is started --------------------------------------------------


@pytest.mark.parametrize(
    ("family", "size", "reason"),
    [
        ("gpt2", 2, "has no tensor-parallel plan"),
        ("llama", 4, r"2 heads \(num_key_value_heads\), which 4 ranks cannot share"),
        ("llama", 3, r"4 heads \(num_attention_heads\), which 3 ranks cannot share"),
    ],
)
def test_models_that_cannot_be_divided(family: str, size: int, reason: str) -> None:
    model = make_model(FAMILIES[family]())
    with pytest.raises(ModelRefusedError, match=reason):
        check_plan(model.config, type(model), size)


def test_a_text_part_without_a_plan() -> None:
    whole = make_whole(SERVED["qwen3_vl"].config())
    with pytest.raises(ModelRefusedError, match="has no tensor-parallel plan"):
        check_plan(whole.config, type(whole), 2)


def test_models_that_can_be() -> None:
    for family in ("llama", "qwen3", "deepseek_v3", "phi3"):
        config = FAMILIES[family]()
        check_plan(config, type(make_model(config)), 2)


def test_torchrun_is_needed(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="tensor_parallel: is auto, and torchrun did not start"):
        load(str(saved), tensor_parallel="auto", threads=1)


def test_one_rank_has_the_whole_model() -> None:
    assert join(LoadConfig(tensor_parallel="auto"), RankPlace(0, 1, 0, 1)) is None


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("quantization", "int8"),
        ("pack_weights", True),
        ("device", "cuda:1"),
    ],
)
def test_options_of_loading_that_go_with_one_process_alone(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{option}: is .*tensor_parallel is auto"):
        LoadConfig(tensor_parallel="auto", **{option: value})  # type: ignore[arg-type]


def test_an_unknown_word() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel: is 'two'; it must be one of none, aut"):
        LoadConfig(tensor_parallel="two")  # type: ignore[arg-type]


class _OtherRanks:
    """Those of a leader that has none: all agree with it."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def send(self, message: object) -> None:
        self.told.append(type(message).__name__)

    def least(self, values: list[int]) -> tuple[int, ...]:
        return tuple(int(value) for value in values)

    def leave(self) -> None:
        pytest.fail("a cache that does not fit ends no rank")


def test_a_cache_that_does_not_fit_on_rank_0_ends_no_rank() -> None:
    ranks = _OtherRanks()
    leader = Leader(cast(Ranks, ranks))
    plan = CachePlan((4,), 8, 8, 1, total_bytes=64, host_blocks=(0,), host_bytes=0, reason="")

    def make() -> KVTensors:
        raise torch.OutOfMemoryError("none left")

    number, *_ = leader.begin(1, 1)
    with pytest.raises(InsufficientMemoryError, match=r"on rank 0 \(none left\); lower num_blocks"):
        leader.allocate(number, plan, make)
    assert leader.begin(1, 1)[0] == number + 1
    assert ranks.told == ["Begin", "Allocate", "Begin"]
