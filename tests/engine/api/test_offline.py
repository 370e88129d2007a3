"""generate_batch and managers of a loaded model."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

import engine
from engine.api.offline import LoadedModel, from_model
from engine.contract.config import ContinuousBatchingConfig
from engine.contract.errors import (
    ConfigError,
    HeadraceError,
    InsufficientMemoryError,
    InvalidRequestError,
    UnsupportedFeatureError,
)
from engine.contract.outputs import FinishReason
from engine.contract.request import RequestStatus
from tests.tiny_models import FAMILIES, greedy_reference, make_model, make_prompts

DEMO = Path(__file__).parents[3] / "models" / "demo"
SMALL = ContinuousBatchingConfig(block_size=8, num_blocks=64, max_batch_tokens=64)


@pytest.fixture
def llama(loaded: Callable[[str], LoadedModel]) -> LoadedModel:
    return loaded("llama")


def test_order_and_tokens(llama: LoadedModel) -> None:
    prompts = make_prompts((20, 1, 7, 3))
    outputs = llama.generate_batch(
        prompts, continuous_batching_config=SMALL, max_new_tokens=6, progress_bar=False
    )
    assert list(outputs) == ["req_0", "req_1", "req_2", "req_3"]
    for prompt, output in zip(prompts, outputs.values(), strict=True):
        assert output.prompt_ids == prompt
        assert output.generated_tokens == greedy_reference(llama.model, prompt, 6)
        assert output.timestamps is None


def test_a_refused_prompt_inside_a_batch(llama: LoadedModel) -> None:
    outputs = llama.generate_batch(
        [[5, 6], [], [7]],
        continuous_batching_config=SMALL,
        max_new_tokens=3,
        progress_bar=False,
        record_timestamps=True,
    )
    assert [output.status for output in outputs.values()] == [
        RequestStatus.FINISHED,
        RequestStatus.FAILED,
        RequestStatus.FINISHED,
    ]
    assert outputs["req_1"].error is not None
    assert "empty" in outputs["req_1"].error
    assert outputs["req_0"].timestamps is not None


def test_an_empty_batch(llama: LoadedModel) -> None:
    assert llama.generate_batch([], continuous_batching_config=SMALL, progress_bar=False) == {}


def test_progress_bar(llama: LoadedModel, capsys: pytest.CaptureFixture[str]) -> None:
    options: Any = {"continuous_batching_config": SMALL, "max_new_tokens": 1}
    llama.generate_batch([[5]], progress_bar=False, **options)
    assert capsys.readouterr().err == ""
    llama.generate_batch([[5]], progress_bar=True, **options)
    assert "1/1" in capsys.readouterr().err


def test_a_short_queue_does_not_end_a_batch(llama: LoadedModel) -> None:
    prompts = make_prompts((3,) * 12)
    outputs = llama.generate_batch(
        prompts,
        continuous_batching_config=SMALL,
        max_new_tokens=2,
        progress_bar=False,
        max_queue_size=2,
        max_requests_per_batch=2,
    )
    assert [output.status for output in outputs.values()] == [RequestStatus.FINISHED] * 12


def test_a_persistent_manager(llama: LoadedModel) -> None:
    def run(**options: Any) -> Any:
        llama.generate_batch(
            [[5, 6]],
            continuous_batching_config=SMALL,
            max_new_tokens=2,
            progress_bar=False,
            **options,
        )
        return llama._kept._manager

    first = run(persistent_manager=True)
    assert first is not None
    assert not first.is_running()
    assert first.warmed_up
    assert run(persistent_manager=True, warmup=False) is first
    other = run(persistent_manager=True, block_size=4)
    assert other is not first
    llama.destroy_cached_continuous_batching_manager()
    assert llama._kept._manager is None
    assert run(persistent_manager=False) is None
    llama.destroy_cached_continuous_batching_manager()  # harmless


def test_an_interrupted_batch_leaves_nothing_behind(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: Any = {
        "continuous_batching_config": SMALL,
        "progress_bar": False,
        "persistent_manager": True,
    }
    with monkeypatch.context() as patch:
        patch.setattr("engine.api.batch_generation.tqdm.update", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            llama.generate_batch([[5], [6], [7]], max_new_tokens=50, **options)
    assert llama._kept._manager is None
    outputs = llama.generate_batch([[9]], max_new_tokens=2, **options)
    assert outputs["req_0"].generated_tokens == greedy_reference(llama.model, [9], 2)
    llama.destroy_cached_continuous_batching_manager()


def _interrupt(*args: object) -> None:
    raise KeyboardInterrupt


def test_unknown_keywords(llama: LoadedModel) -> None:
    with pytest.raises(InvalidRequestError, match=r"block_sise.*block_size"):
        llama.generate_batch([[5]], block_sise=3)
    with pytest.raises(InvalidRequestError, match="temperature"):
        llama.generate_batch([[5]], temperature=0.5)


def test_eos_of_the_batch(llama: LoadedModel) -> None:
    tokens = greedy_reference(llama.model, [5, 6, 7], 8)
    outputs = llama.generate_batch(
        [[5, 6, 7]],
        continuous_batching_config=SMALL,
        max_new_tokens=8,
        eos_token_id=tokens[3],
        progress_bar=False,
    )
    assert outputs["req_0"].generated_tokens == tokens[: tokens.index(tokens[3]) + 1]
    assert outputs["req_0"].finish_reason is FinishReason.STOP


def test_default_length_is_generates(llama: LoadedModel) -> None:
    prompt = [5, 6, 7]
    config = GenerationConfig(eos_token_id=None, do_sample=False)
    outputs = llama.generate_batch(
        [prompt],
        generation_config=config,
        eos_token_id=-1,
        continuous_batching_config=SMALL,
        progress_bar=False,
    )
    assert len(outputs["req_0"].generated_tokens) == 20


def test_max_length_counts_the_prompt(llama: LoadedModel) -> None:
    outputs = llama.generate_batch(
        [[5] * 10],
        generation_config=GenerationConfig(max_length=14),
        eos_token_id=-1,
        continuous_batching_config=SMALL,
        progress_bar=False,
    )
    assert len(outputs["req_0"].generated_tokens) == 4


def test_return_logprobs(llama: LoadedModel) -> None:
    """log_softmax of the model's own logits, whatever sampling made of them."""
    prompts = make_prompts((5, 40))
    generation = GenerationConfig(do_sample=True, temperature=2.0, top_k=20, seed=4)
    config = ContinuousBatchingConfig(
        block_size=8, num_blocks=64, max_batch_tokens=16, return_logprobs=True
    )
    outputs = llama.generate_batch(
        prompts,
        generation_config=generation,
        continuous_batching_config=config,
        max_new_tokens=10,
        progress_bar=False,
    )
    for output in outputs.values():
        ids = torch.tensor([output.prompt_ids + output.generated_tokens])
        with torch.inference_mode():
            logprobs = torch.log_softmax(llama.model(ids).logits[0].float(), dim=-1)
        first = len(output.prompt_ids) - 1
        right = [
            logprobs[first + i, token].item() for i, token in enumerate(output.generated_tokens)
        ]
        assert output.logprobs == pytest.approx(right, abs=1e-5)


def test_logprobs_are_off_unless_asked_for(llama: LoadedModel) -> None:
    outputs = llama.generate_batch(
        [[5]], continuous_batching_config=SMALL, max_new_tokens=2, progress_bar=False
    )
    assert outputs["req_0"].logprobs == []


def test_unsupported_processors_are_dropped_or_refused(
    llama: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    generation = GenerationConfig(epsilon_cutoff=0.1)
    llama.init_continuous_batching(generation, SMALL)
    assert "epsilon_cutoff" in caplog.text
    strict = ContinuousBatchingConfig(num_blocks=4, drop_unsupported_processors=False)
    with pytest.raises(UnsupportedFeatureError, match="epsilon_cutoff"):
        llama.init_continuous_batching(generation, strict)


def test_a_cache_that_does_not_fit(llama: LoadedModel) -> None:
    with pytest.raises(InsufficientMemoryError, match="num_blocks"):
        llama.generate_batch([[5]], num_blocks=2**31 - 1, progress_bar=False)
    with pytest.raises(InsufficientMemoryError, match="num_blocks"):
        llama.generate_batch([[5]], num_blocks=1, block_size=1, progress_bar=False)


def test_an_eos_outside_the_vocabulary_is_no_ones_fault() -> None:
    """Configs that keep another tokenizer's eos are common; requests must not be refused for it."""
    config = FAMILIES["llama"]()
    config.eos_token_id = 50256
    model = make_model(config)
    assert model.generation_config.eos_token_id == 50256
    outputs = from_model(model).generate_batch(
        [[5, 6]], continuous_batching_config=SMALL, max_new_tokens=3, progress_bar=False
    )
    assert outputs["req_0"].error is None
    assert len(outputs["req_0"].generated_tokens) == 3


def test_repetition_penalty_equals_generates_under_chunks_and_preemption(
    llama: LoadedModel,
) -> None:
    prompts = make_prompts((3, 20, 45, 33, 60, 52))
    generation = GenerationConfig(repetition_penalty=1.7, max_new_tokens=14, do_sample=False)
    config = ContinuousBatchingConfig(block_size=4, num_blocks=24, max_batch_tokens=16)
    manager = llama.init_continuous_batching(generation, config)
    manager.start()
    with manager.pause():  # so that all of them are there at once
        for index, prompt in enumerate(prompts):
            manager.add_request(prompt, request_id=str(index), eos_token_id=-1)
    manager.stop()
    assert manager.stats().preemptions > 0
    outputs = {output.request_id: output.generated_tokens for output in manager}
    for index, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        right = llama.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=14,
            min_new_tokens=14,
            do_sample=False,
            repetition_penalty=1.7,
            pad_token_id=0,
        )
        free = right[0, len(prompt) :].tolist()
        ours = outputs[str(index)]
        if 2 not in ours:  # min_new_tokens keeps the eos out of the reference
            assert ours == free


def test_all_errors_are_ours(llama: LoadedModel) -> None:
    with pytest.raises(HeadraceError):
        llama.generate_batch([[5]], block_size=0)


def test_context_manager_finishes_what_is_live(llama: LoadedModel) -> None:
    prompt = make_prompts((9,))[0]
    with llama.continuous_batching_context_manager(
        GenerationConfig(max_new_tokens=6), continuous_batching_config=SMALL
    ) as manager:
        name = manager.add_request(prompt)
    output = manager.get_result(name)
    assert output is not None
    assert output.generated_tokens == greedy_reference(llama.model, prompt, 6)
    assert not manager.is_running()


# ---- kept managers -----------------------------------------------------------------------------


def test_a_kept_manager_comes_again_with_its_cache(llama: LoadedModel) -> None:
    prompt = make_prompts((9,))[0]
    right = greedy_reference(llama.model, prompt, 4)
    first = llama.init_continuous_batching(continuous_batching_config=SMALL)
    first.start()
    name = first.add_request(prompt, max_new_tokens=4)
    first.num_return_sequences = 3
    first.stop(keep_for_next_session=True)
    assert llama.init_continuous_batching(continuous_batching_config=SMALL) is first
    assert first.num_return_sequences == 1  # the next session's configs say nothing of three
    output = first.get_result(name)
    assert output is not None
    assert output.generated_tokens == right
    # It is in use: another session gets one of its own, which takes the kept one's place.
    first.start()
    other = llama.init_continuous_batching(continuous_batching_config=SMALL)
    assert other is not first
    first.stop(keep_for_next_session=True)
    other.stop(keep_for_next_session=True)  # it never ran
    assert llama.init_continuous_batching(continuous_batching_config=SMALL) is other
    llama.destroy_cached_continuous_batching_manager()


def test_a_kept_manager_is_dropped_for_other_configs(llama: LoadedModel) -> None:
    def keep(**options: Any) -> Any:
        manager = llama.init_continuous_batching(**options)
        manager.start()
        manager.stop(block=False, keep_for_next_session=True)
        manager.join(60)
        return manager

    options: Any = {"continuous_batching_config": SMALL}
    first = keep(**options)
    assert llama.init_continuous_batching(GenerationConfig(max_new_tokens=3), SMALL) is not first
    assert llama._kept._manager is None
    first = keep(**options)
    first.start()  # by its owner, who still has it
    assert llama._kept._manager is None
    first.stop()
    assert llama._kept._manager is None, "it was not asked to be kept this time"


def test_a_dropped_manager_frees_its_cache_at_once(llama: LoadedModel) -> None:
    manager = llama.init_continuous_batching(continuous_batching_config=SMALL)
    manager.start()
    manager.add_request([5, 6], max_new_tokens=2)
    manager.stop()
    runner: Any = manager._loop._core.runner
    cache = weakref.ref(runner.kv.caches[0].keys)
    gc.collect()
    gc.disable()
    try:
        del manager, runner
        assert cache() is None
    finally:
        gc.enable()


def test_a_batch_reads_its_own_results_only(llama: LoadedModel) -> None:
    prompt = make_prompts((5,))[0]
    right = greedy_reference(llama.model, prompt, 3)
    manager = llama.init_continuous_batching(continuous_batching_config=SMALL)
    manager.start()
    manager.add_request([7], request_id="req_0", max_new_tokens=1)
    manager.stop(keep_for_next_session=True)
    outputs = llama.generate_batch(
        [prompt], continuous_batching_config=SMALL, max_new_tokens=3, progress_bar=False
    )
    assert {name: output.generated_tokens for name, output in outputs.items()} == {"req_1": right}
    left = manager.get_result()
    assert left is not None
    assert left.request_id == "req_0"
    assert manager.get_result() is None


def test_a_persistent_context(llama: LoadedModel) -> None:
    with llama.continuous_batching_context_manager(
        continuous_batching_config=SMALL, persistent_manager=True
    ) as first:
        assert first.warmed_up
    with llama.continuous_batching_context_manager(continuous_batching_config=SMALL) as second:
        assert second is first
    assert llama._kept._manager is None


def test_death_in_a_batch_gives_what_there_is(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise RuntimeError("a bug")

    manager = llama.init_continuous_batching(continuous_batching_config=SMALL)
    monkeypatch.setattr(manager._loop._core.scheduler, "schedule", broken)
    monkeypatch.setattr(manager._loop._core, "fail_all", broken)
    manager.stop(keep_for_next_session=True)
    outputs = llama.generate_batch(
        [[5], [6], [7]], continuous_batching_config=SMALL, max_new_tokens=3, progress_bar=False
    )
    assert list(outputs) == ["req_0", "req_1", "req_2"]
    assert {output.status for output in outputs.values()} == {RequestStatus.FAILED}
    assert all(output.error for output in outputs.values())
    assert llama._kept._manager is None, "a dead manager is not kept"


@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_prompts_may_be_arrays(llama: LoadedModel, dtype: str) -> None:
    prompt = make_prompts((7,))[0]
    right = greedy_reference(llama.model, prompt, 3)
    array, tensor = np.array(prompt, dtype), torch.tensor(prompt, dtype=getattr(torch, dtype))
    options: Any = {"continuous_batching_config": SMALL, "max_new_tokens": 3, "progress_bar": False}
    for inputs in ([array, tensor, list(array), list(tensor)], tensor[None, :], array[None, :]):
        for output in llama.generate_batch(inputs, **options).values():
            assert output.generated_tokens == right
            assert output.prompt_ids == prompt
            assert {type(token) for token in output.prompt_ids} == {int}
    bad = llama.generate_batch([array / 2, tensor[None, :]], **options)
    assert [output.error is not None for output in bad.values()] == [True, True]
    assert "prompt[0]" in str(bad["req_0"].error)


def test_what_from_pretrained_takes_is_taken_or_explained() -> None:
    loaded = engine.load(str(DEMO), dtype=torch.float32, device=torch.device("cpu"))
    assert loaded.model.dtype is torch.float32
    for name, instead in (
        ("attn_implementation", "attention"),
        ("device_map", "use device"),
        ("torch_dtype", "use dtype"),
        ("nonsense", "options are dtype, device"),
    ):
        with pytest.raises(ConfigError, match=instead):
            engine.load(str(DEMO), **{name: "auto"})
    with pytest.raises(ConfigError, match="float64"):
        engine.load(str(DEMO), dtype=torch.float64)


def test_a_model_without_a_path_has_no_tokenizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the current directory holds."""
    monkeypatch.chdir(DEMO)
    model = from_model(make_model(FAMILIES["llama"]()))
    assert model.tokenizer is None
    assert from_model(model.model, tokenizer_path=DEMO).tokenizer is not None


def test_what_users_import() -> None:
    for name in engine.__all__:
        assert getattr(engine, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        engine.nonsense  # noqa: B018
