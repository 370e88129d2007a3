"""Models with recurrent layers: their states are begun, kept, found, copied and given up as blocks
are, and no request sees another's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine.api.manager import ContinuousBatchingManager
from engine.api.offline import LoadedModel, from_model
from engine.attention.step_states import StepStates
from engine.attention.torch_backend import TorchAttentionBackend
from engine.contract.config import ContinuousBatchingConfig
from engine.contract.errors import ConfigError, ModelRefusedError
from engine.contract.request import RequestStatus
from engine.kv_cache.group_kinds import KeptMark
from engine.kv_cache.state_slot import StateSlot
from engine.loading.loader import _prepare
from engine.loading.memory import StepLimits, _state_slots
from engine.loading.recurrent import RecurrentWatch
from tests.engine.mode_sweep import BLOCK, NEW_TOKENS, load_family, managed, run
from tests.model_recipes import RECIPES
from tests.tiny_models import greedy_reference, make_model, make_prompts

FORMS = ("qwen3_next", "lfm2", "granitemoehybrid", "jamba", "mamba2", "falcon_h1")
"""A family of each form of recurrence, one without attention and one with both in each layer."""
OURS = ("lfm2, ours", "qwen3_5, ours", "qwen3_next, ours")
"""Families that our decoder computes."""


def _model(family: str, **settings: Any) -> PreTrainedModel:
    return make_model(RECIPES[family].config(eos_token_id=None, **settings))


@pytest.fixture(scope="module")
def models() -> dict[str, tuple[PreTrainedModel, LoadedModel]]:
    found = {name: _model(name) for name in FORMS}
    ours = {name: load_family(name.removesuffix(", ours"), "own")[:2] for name in OURS}
    return {name: (model, from_model(model)) for name, model in found.items()} | ours


Models = dict[str, tuple[PreTrainedModel, LoadedModel]]


def _states(manager: ContinuousBatchingManager) -> dict[Any, torch.Tensor]:
    states: Any = manager._loop._core.runner.kv.states  # type: ignore[attr-defined]
    return dict(states)


def _ask(manager: ContinuousBatchingManager, prompts: list[list[int]]) -> list[list[int]]:
    names = manager.add_requests(prompts, max_new_tokens=NEW_TOKENS)
    found = {}
    for _ in names:
        output = manager.get_result(timeout=60)
        assert output is not None
        assert output.status is RequestStatus.FINISHED, output.error
        found[output.request_id] = list(output.generated_tokens)
    return [found[name] for name in names]


@pytest.mark.parametrize("family", [*FORMS, *OURS])
def test_what_a_slot_held_before_reaches_no_request(models: Models, family: str) -> None:
    """Every slot, also the null slot, is full of NaN when requests begin, go on and end."""
    model, loaded = models[family]
    prompts = make_prompts((1, 2, 9, 40))
    expected = [greedy_reference(model, prompt, NEW_TOKENS) for prompt in prompts]
    with managed(loaded, num_blocks=64, max_batch_tokens=16) as manager:
        for tensor in _states(manager).values():
            tensor.fill_(float("nan"))
        assert _ask(manager, prompts) == expected


@pytest.mark.parametrize("chunk", [1, 63, 64, 65])
@pytest.mark.parametrize("family", [*FORMS, *OURS])
def test_chunks_of_any_size(models: Models, family: str, chunk: int) -> None:
    model, loaded = models[family]
    prompts = make_prompts((5, 131) if chunk > 1 else (5, 33))
    expected = [greedy_reference(model, prompt, NEW_TOKENS) for prompt in prompts]
    tokens, _ = run(loaded, prompts, num_blocks=64, max_batch_tokens=chunk)
    assert tokens == expected


@pytest.mark.parametrize("budget", [512, 64])
@pytest.mark.parametrize("length", [20, 100, 300])
@pytest.mark.parametrize("family", ["qwen3_next", "mamba2", *OURS])
def test_the_same_prompt_is_found_up_to_its_last_block(
    models: Models, family: str, length: int, budget: int
) -> None:
    model, loaded = models[family]
    (prompt,) = make_prompts((length,))
    expected = greedy_reference(model, prompt, NEW_TOKENS)
    tokens, stats = run(
        loaded, [prompt, prompt], one_by_one=True, num_blocks=128, max_batch_tokens=budget
    )
    assert tokens == [expected] * 2
    assert stats.prefix_hits == (length - 1) // BLOCK * BLOCK


def test_a_conversation_computes_less_than_two_blocks_anew(models: Models) -> None:
    model, loaded = models["qwen3_next"]
    (history,) = make_prompts((60,))
    questions = make_prompts((9,) * 5, seed=3)
    with managed(loaded, num_blocks=256, max_batch_tokens=512) as manager:
        for question in questions:
            before, hits = len(history), manager.stats().prefix_hits
            history = history + question
            (reply,) = _ask(manager, [history])
            assert reply == greedy_reference(model, history, NEW_TOKENS)
            if question is not questions[0]:
                assert before - (manager.stats().prefix_hits - hits) < 2 * BLOCK
            history = history + reply


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2"])
def test_a_state_is_kept_where_prompts_part(models: Models, family: str) -> None:
    """The second prompt shows where; the third goes on from there."""
    model, loaded = models[family]
    (common,) = make_prompts((5 * BLOCK,))
    prompts = [common + tail for tail in make_prompts((20, 21, 22), seed=4)]
    expected = [greedy_reference(model, prompt, NEW_TOKENS) for prompt in prompts]
    tokens, stats = run(loaded, prompts, one_by_one=True, num_blocks=128, max_batch_tokens=512)
    assert tokens == expected
    assert stats.prefix_hits == len(common)


@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_requests_wait_for_a_slot(
    models: Models, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, loaded = models["lfm2"]
    monkeypatch.setattr("engine.loading.memory._state_slots", lambda *_: slots)
    prompts = make_prompts((5, 33, 9, 20, 7))
    expected = [greedy_reference(model, prompt, NEW_TOKENS) for prompt in prompts]
    tokens, _ = run(loaded, prompts, num_blocks=64, max_batch_tokens=32)
    assert tokens == expected


@pytest.mark.parametrize("family", [*FORMS, *OURS])
def test_choices_of_a_request_go_on_from_a_copy(models: Models, family: str) -> None:
    model, loaded = models[family]
    prompts = make_prompts((3, 29))
    config = ContinuousBatchingConfig(block_size=BLOCK, num_blocks=64, max_batch_tokens=48)
    for prompt in prompts:
        expected = greedy_reference(model, prompt, NEW_TOKENS)
        with managed(loaded, num_blocks=config.num_blocks, max_batch_tokens=48) as manager:
            manager.add_request(prompt, max_new_tokens=NEW_TOKENS, num_return_sequences=3)
            for _ in range(3):
                output = manager.get_result(timeout=60)
                assert output is not None
                assert list(output.generated_tokens) == expected


def test_memory_has_room_for_the_states_of_running_requests_and_kept_ones() -> None:
    loaded = from_model(_model("lfm2"))
    with managed(loaded, num_blocks=64, max_requests_per_batch=6) as manager:
        (slots,) = {len(one) for one in _states(manager).values()}
        kv_cache = manager._loop._core.scheduler.kv_cache
        assert isinstance(kv_cache.groups[-1].kind, StateSlot)
        assert slots == 5 * 6 + 1
    size = kv_cache.groups[-1].slot_bytes
    found = [_state_slots(kv_cache.groups, StepLimits(64, 6), n * size, None) for n in (4, 26, 60)]
    assert found == [1, 12, 12]
    found = [_state_slots(kv_cache.groups, StepLimits(64, 6), 99 * size, n) for n in (0, 3)]
    assert found == [6, 9]


# ---- faults that must be found -------------------------------------------------------------------


def _tell(model: PreTrainedModel, loaded: LoadedModel, **options: Any) -> bool:
    """Whether requests, and the next turns of their conversations, get other tokens than alone."""
    prompts = make_prompts((20, 33, 5))
    replies = [greedy_reference(model, prompt, NEW_TOKENS) for prompt in prompts]
    turns = [one + reply + [7, 8] for one, reply in zip(prompts, replies, strict=True)]
    expected = replies + [greedy_reference(model, turn, NEW_TOKENS) for turn in turns]
    with managed(loaded, num_blocks=64, max_batch_tokens=16, **options) as manager:
        return _ask(manager, prompts) + _ask(manager, turns) != expected


@pytest.mark.parametrize(
    ("fault", "family"),
    [
        *(
            (fault, family)
            for family in ("qwen3_next", "qwen3_5, ours")
            for fault in ("none", "stale", "neighbour", "one late", "not copied")
        ),
        *((fault, "granitemoehybrid") for fault in ("none", "stale", "neighbour")),  # a stand-in
    ],
)
def test_faults_are_found(
    models: Models, fault: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {}
    if fault == "stale":  # a new request goes on from what its slot held
        begin = StepStates.__init__

        def stale(self: Any, tensors: Any, slots: Any, starts: Any, counts: Any) -> None:
            begin(self, tensors, slots, [max(1, one) for one in starts], counts)

        monkeypatch.setattr(StepStates, "__init__", stale)
        options = {"allow_block_sharing": False}
    elif fault == "neighbour":
        own = StepStates.__init__

        def swapped(self: Any, tensors: Any, slots: Any, *rest: Any) -> None:
            own(self, tensors, list(reversed(slots)), *rest)

        monkeypatch.setattr(StepStates, "__init__", swapped)
    elif fault == "one late":
        keep = StateSlot.keep

        def late(self: Any, pool: Any, table: Any, mark: KeptMark, size: int) -> Any:
            blocks, late = divmod(mark.tokens - 1, size)
            is_due = blocks and not late
            return keep(self, pool, table, mark._replace(blocks=blocks), 1) if is_due else []

        monkeypatch.setattr(StateSlot, "keep", late)
    elif fault == "not copied":
        start = StateSlot.start

        def alone(self: Any, pool: Any, match: Any) -> Any:
            table, copies = start(self, pool, match)
            pool.free(source for source, _ in copies)
            return table, []

        monkeypatch.setattr(StateSlot, "start", alone)
    assert _tell(*models[family], **options) == (fault != "none")


def test_a_module_that_begins_anew_with_every_row_goes_on_token_by_token(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgetting = {
        name: one[1]._verified.probe.recurrence.forgetting for name, one in models.items()
    }
    assert {name for name, paths in forgetting.items() if paths} == {"jamba"}
    monkeypatch.setattr(RecurrentWatch, "_forgets", lambda self, path: False)
    with pytest.raises(ModelRefusedError, match="differ from the model's own"):
        from_model(_model("mamba"))


# ---- what is refused, and what is off ------------------------------------------------------------


def test_kinds_of_layers_that_differ_from_the_modules_are_refused() -> None:
    model = _model("lfm2")
    model.config.layer_types = ["full_attention", "conv", "conv"]
    with pytest.raises(ModelRefusedError):
        from_model(model)


def test_compilation_is_refused_by_name(models: Models) -> None:
    _, loaded = models["lfm2"]
    config = ContinuousBatchingConfig(block_size=BLOCK, num_blocks=16, default_compile_level=1)
    with pytest.raises(ConfigError, match="recurrent layers are not compiled"):
        loaded.init_continuous_batching(continuous_batching_config=config).start()


def test_a_division_among_processes_is_refused_by_name() -> None:
    model, backend = _model("lfm2"), TorchAttentionBackend()
    with pytest.raises(ModelRefusedError, match="leave tensor_parallel out"):
        _prepare(model, backend, "torch", None, False, True, lambda line: None)


def test_speculation_is_off(models: Models) -> None:
    model, loaded = models["qwen3_next"]
    prompts = [one * 3 for one in make_prompts((10, 12))]
    expected = [greedy_reference(model, prompt, NEW_TOKENS) for prompt in prompts]
    tokens, _ = run(loaded, prompts, num_blocks=64, speculation="auto")
    assert tokens == expected
