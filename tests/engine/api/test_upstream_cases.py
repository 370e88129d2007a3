"""What transformers tests of its continuous batching, on tiny models: the same promises here."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from engine.api.manager import ContinuousBatchingManager
from engine.api.offline import LoadedModel
from engine.api.results import GenerationOutput, choice_name
from engine.contract.config import ContinuousBatchingConfig
from engine.contract.request import RequestStatus
from tests.engine.rig import WAIT
from tests.tiny_models import WINDOW, greedy_reference, make_prompts

Load = Callable[[str], LoadedModel]

PROMPTS = make_prompts((1, 9, 30, 17, 64))
NEW_TOKENS = 24
FEW_BLOCKS = {"block_size": 32, "num_blocks": 4, "max_batch_tokens": 48}
"""128 tokens in all, for five requests that need 241."""

CONFIGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "blocks of 4": {"block_size": 4, "num_blocks": 96, "max_batch_tokens": 16},
    "blocks of 16": {"block_size": 16, "num_blocks": 24, "max_batch_tokens": 40},
    "few blocks": FEW_BLOCKS,
    "few blocks, no sharing": {**FEW_BLOCKS, "allow_block_sharing": False},
    "no sharing": {"block_size": 8, "num_blocks": 64, "allow_block_sharing": False},
    "one request at a time": {"block_size": 8, "num_blocks": 64, "max_requests_per_batch": 1},
    "a step ahead": {"block_size": 8, "num_blocks": 64, "use_async_batching": True},
    "no step ahead": {"block_size": 8, "num_blocks": 64, "use_async_batching": False},
    "few blocks, a step ahead": {**FEW_BLOCKS, "use_async_batching": True},
    "prefill first": {"scheduler_type": "prefill_first", "block_size": 8, "num_blocks": 64},
    "few blocks, prefill first": {**FEW_BLOCKS, "scheduler_type": "prefill_first"},
    "few blocks, priority": {**FEW_BLOCKS, "scheduler_type": "priority"},
    "few blocks, offload": {**FEW_BLOCKS, "cpu_offload_space": 0.001},
    "few blocks, offload, a step ahead": {
        **FEW_BLOCKS,
        "cpu_offload_space": 0.001,
        "use_async_batching": True,
    },
}


def generate(model: LoadedModel, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    """Greedy outputs in the order of the prompts."""
    outputs = model.generate_batch(
        prompts, progress_bar=False, **{"max_new_tokens": NEW_TOKENS, **options}
    )
    for output in outputs.values():
        assert output.status is RequestStatus.FINISHED
    return [output.generated_tokens for output in outputs.values()]


def read(manager: ContinuousBatchingManager, name: str) -> GenerationOutput:
    output = manager.get_result(name, timeout=WAIT)
    assert output is not None
    return output


# ---- parity ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.slow), "gemma2"])
@pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS)
def test_equal_to_generate_under_any_config(
    loaded: Load, family: str, options: dict[str, Any]
) -> None:
    model = loaded(family)
    config = ContinuousBatchingConfig(**options)
    ours = generate(model, PROMPTS, continuous_batching_config=config)
    assert ours == [greedy_reference(model.model, prompt, NEW_TOKENS) for prompt in PROMPTS]


def test_few_blocks_do_preempt(loaded: Load) -> None:
    """Or the cases above with few blocks would show nothing."""
    model = loaded("llama")
    manager = model.init_continuous_batching(
        continuous_batching_config=ContinuousBatchingConfig(**FEW_BLOCKS)
    )
    manager.start()
    manager.add_requests(PROMPTS, max_new_tokens=NEW_TOKENS)
    manager.stop()
    assert manager.stats().preemptions > 0


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3", "gpt_oss"])
def test_crossing_the_sliding_window(loaded: Load, family: str) -> None:
    model = loaded(family)
    prompts = make_prompts((WINDOW - 10, WINDOW + 100))
    ours = generate(
        model,
        prompts,
        continuous_batching_config=ContinuousBatchingConfig(
            block_size=8, num_blocks=64, max_batch_tokens=40
        ),
    )
    assert ours == [greedy_reference(model.model, prompt, NEW_TOKENS) for prompt in prompts]


@pytest.mark.parametrize("options", [{}, FEW_BLOCKS], ids=["plenty", "few blocks"])
def test_log_probabilities(loaded: Load, options: dict[str, Any]) -> None:
    model = loaded("qwen3")
    config = ContinuousBatchingConfig(**options, return_logprobs=True)
    outputs = model.generate_batch(
        PROMPTS, continuous_batching_config=config, max_new_tokens=NEW_TOKENS, progress_bar=False
    )
    for output in outputs.values():
        ids = torch.tensor([output.prompt_ids + output.generated_tokens])
        with torch.inference_mode():
            logprobs = torch.log_softmax(model.model(ids).logits[0].float(), dim=-1)
        first = len(output.prompt_ids) - 1
        right = [
            logprobs[first + i, token].item() for i, token in enumerate(output.generated_tokens)
        ]
        assert output.logprobs == pytest.approx(right, abs=1e-5)


# ---- streams and handlers ------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("streaming", [True, False])
def test_streams_and_their_lengths(loaded: Load, length: int, streaming: bool) -> None:
    model = loaded("llama")
    right = greedy_reference(model.model, PROMPTS[2], length)
    with model.continuous_batching_context_manager(
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=8), warmup=False
    ) as manager:
        name = manager.add_request(
            PROMPTS[2], max_new_tokens=length, streaming=streaming, eos_token_id=-1
        )
        outputs = list(manager.request_id_iter(name))
    wanted = [right[:end] for end in range(1, length + 1)] if streaming else [right]
    assert [output.generated_tokens for output in outputs] == wanted
    assert [output.is_finished() for output in outputs] == [False] * (len(wanted) - 1) + [True]


@pytest.mark.parametrize("streaming", [True, False])
async def test_handlers_are_called_for_every_result(loaded: Load, streaming: bool) -> None:
    model = loaded("llama")
    manager = model.init_continuous_batching(
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=16, block_size=16)
    )
    manager.start()
    seen: dict[str, list[int]] = {"a": [], "b": []}
    ended = asyncio.Event()
    with manager.pause():  # so that no result comes before the handlers
        for name in seen:

            def take(output: GenerationOutput, name: str = name) -> None:
                assert output.request_id == name
                seen[name].append(len(output.generated_tokens))
                if output.is_finished() and all(seen.values()) and name == "b":
                    ended.set()

            length = 4 if name == "a" else 9
            manager.add_request(
                PROMPTS[1],
                request_id=name,
                max_new_tokens=length,
                streaming=streaming,
                eos_token_id=-1,
            )
            manager.register_result_handler(name, take)
    await asyncio.wait_for(ended.wait(), WAIT)
    assert all(lengths == sorted(set(lengths)) for lengths in seen.values())
    assert [lengths[-1] for lengths in seen.values()] == [4, 9]
    assert all((len(lengths) > 1) == streaming for lengths in seen.values())
    manager.stop()


def test_no_stream_is_shortened_by_preemption(loaded: Load) -> None:
    model = loaded("llama")
    manager = model.init_continuous_batching(
        continuous_batching_config=ContinuousBatchingConfig(**FEW_BLOCKS)
    )
    manager.start()
    names = manager.add_requests(
        PROMPTS, max_new_tokens=NEW_TOKENS, streaming=True, record_timestamps=True
    )
    manager.stop()
    assert manager.stats().preemptions > 0
    for name, prompt in zip(names, PROMPTS, strict=True):
        outputs = list(manager.request_id_iter(name))
        right = greedy_reference(model.model, prompt, NEW_TOKENS)
        lengths = [len(output.generated_tokens) for output in outputs]
        assert lengths == sorted(set(lengths))
        assert lengths[-1] == len(right)
        for output, length in zip(outputs, lengths, strict=True):
            assert output.generated_tokens == right[:length]
        times = outputs[-1].timestamps
        assert times is not None
        assert len(times) == len(right)
        assert times == sorted(times)


# ---- processors ------------------------------------------------------------------------------


def test_processors_of_single_requests(loaded: Load) -> None:
    """Each request gets in company what it gets alone."""
    model = loaded("llama")
    own: list[dict[str, Any]] = [
        {},
        {"temperature": 0.7, "seed": 5},
        {"temperature": 1.5, "top_k": 4, "seed": 6},
        {"temperature": 1.0, "top_p": 0.6, "seed": 7},
        {"repetition_penalty": 1.9},
    ]
    config = ContinuousBatchingConfig(
        block_size=8, num_blocks=80, max_batch_tokens=40, per_request_processors=True
    )
    with model.continuous_batching_context_manager(continuous_batching_config=config) as manager:
        alone = []
        for prompt, options in zip(PROMPTS, own, strict=True):
            name = manager.add_request(prompt, max_new_tokens=NEW_TOKENS, **options)
            alone.append(read(manager, name).generated_tokens)
        names = [
            manager.add_request(prompt, max_new_tokens=NEW_TOKENS, **options)
            for prompt, options in zip(PROMPTS, own, strict=True)
        ]
        together = [read(manager, name).generated_tokens for name in names]
    assert together == alone
    plain = [greedy_reference(model.model, prompt, NEW_TOKENS) for prompt in PROMPTS]
    assert together[0] == plain[0]
    assert all(ours != greedy for ours, greedy in zip(together[1:], plain[1:], strict=True))


HISTORY: dict[str, dict[str, Any]] = {
    "repetition penalty": {"repetition_penalty": 1.6},
    "no repeated n-gram": {"no_repeat_ngram_size": 2},
}


@pytest.mark.parametrize("processor", HISTORY.values(), ids=HISTORY)
@pytest.mark.parametrize("options", [{"max_batch_tokens": 8}, FEW_BLOCKS], ids=["chunks", "few"])
def test_history_counts_across_chunks_and_preemption(
    loaded: Load, processor: dict[str, Any], options: dict[str, Any]
) -> None:
    model = loaded("llama")
    generation = GenerationConfig(**processor, do_sample=False, eos_token_id=2)
    config = ContinuousBatchingConfig(**{"block_size": 8, "num_blocks": 64, **options})
    ours = generate(model, PROMPTS, generation_config=generation, continuous_batching_config=config)
    for prompt, tokens in zip(PROMPTS, ours, strict=True):
        ids = torch.tensor([prompt])
        right = model.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=generation,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=0,
        )
        assert tokens == right[0, len(prompt) :].tolist()
    assert ours != [greedy_reference(model.model, prompt, NEW_TOKENS) for prompt in PROMPTS]


# ---- prefixes and choices ------------------------------------------------------------------------


@pytest.mark.parametrize("shares", [True, False])
def test_a_common_prefix_is_computed_once(loaded: Load, shares: bool) -> None:
    model = loaded("llama")
    start, *ends = make_prompts((40, 3, 1, 12))
    prompts = [start + end for end in ends]
    config = ContinuousBatchingConfig(block_size=8, num_blocks=64, allow_block_sharing=shares)
    with model.continuous_batching_context_manager(continuous_batching_config=config) as manager:
        first = read(manager, manager.add_request(prompts[0], max_new_tokens=6))
        others = [
            read(manager, name) for name in manager.add_requests(prompts[1:], max_new_tokens=6)
        ]
    assert first.cached_tokens == 0
    assert [output.cached_tokens for output in others] == ([40, 40] if shares else [0, 0])
    for prompt, output in zip(prompts, [first, *others], strict=True):
        assert output.generated_tokens == greedy_reference(model.model, prompt, 6)


def test_several_sequences_of_each_prompt(loaded: Load) -> None:
    """Of four blocks, in which not even two prompts' choices find room together, too."""
    model = loaded("llama")
    prompts = [PROMPTS[4], PROMPTS[0], PROMPTS[2]]
    generation = GenerationConfig(
        num_return_sequences=3, do_sample=True, temperature=1.3, seed=11, max_new_tokens=12
    )
    names = [choice_name(f"req_{i}", choice) for i in range(3) for choice in range(3)]
    results = []
    for options in ({"block_size": 8, "num_blocks": 96}, FEW_BLOCKS):
        outputs = model.generate_batch(
            prompts,
            generation,
            ContinuousBatchingConfig(**options, seed=5),
            progress_bar=False,
            record_timestamps=True,
        )
        assert list(outputs) == names
        assert {output.status for output in outputs.values()} == {RequestStatus.FINISHED}
        for index, output in enumerate(outputs.values()):
            assert output.prompt_ids == prompts[index // 3]
            assert output.choice == index % 3
            assert len(output.timestamps or ()) == len(output.generated_tokens)
        results.append([output.generated_tokens for output in outputs.values()])
    assert results[0] == results[1]
    for first in range(0, 9, 3):
        assert len({tuple(tokens) for tokens in results[0][first : first + 3]}) == 3


@pytest.mark.parametrize("max_new_tokens", [0, 1, 9])
def test_greedy_sequences_are_all_the_same(loaded: Load, max_new_tokens: int) -> None:
    model = loaded("llama")
    outputs = model.generate_batch(
        PROMPTS,
        GenerationConfig(num_return_sequences=2, do_sample=True, top_k=1, eos_token_id=2),
        ContinuousBatchingConfig(block_size=4, num_blocks=96),
        max_new_tokens=max_new_tokens,
        progress_bar=False,
    )
    right = [greedy_reference(model.model, prompt, 9)[:max_new_tokens] for prompt in PROMPTS]
    ours = [output.generated_tokens for output in outputs.values()]
    assert ours[::2] == ours[1::2] == right


# ---- windows ---------------------------------------------------------------------------------


def test_several_threads_use_the_model_in_windows(loaded: Load) -> None:
    """The model's own forward, on other threads, in the middle of a batch: both come out right."""
    model = loaded("llama")
    right = [greedy_reference(model.model, prompt, 60) for prompt in PROMPTS]
    manager = model.init_continuous_batching(
        continuous_batching_config=ContinuousBatchingConfig(block_size=8, num_blocks=96)
    )
    manager.start()
    first = manager.add_request(PROMPTS[0], max_new_tokens=60, streaming=True)
    names = [first, *manager.add_requests(PROMPTS[1:], max_new_tokens=60)]
    assert not read(manager, first).is_finished()
    inside = threading.Barrier(2, timeout=WAIT)
    own: list[list[int]] = []
    lock = threading.Lock()

    def use() -> None:
        with manager.pause():
            inside.wait()
            with lock:
                own.append(greedy_reference(model.model, PROMPTS[2], 5))

    threads = [threading.Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    manager.stop()
    assert own == [right[2][:5]] * 2
    outputs = {output.request_id: output.generated_tokens for output in manager}
    assert [outputs[name] for name in names] == right


def test_weights_that_are_changed_in_a_window_act_behind_it(loaded: Load) -> None:
    model = loaded("llama")
    manager = model.init_continuous_batching(
        continuous_batching_config=ContinuousBatchingConfig(block_size=8, num_blocks=96)
    )
    manager.start()
    before = greedy_reference(model.model, PROMPTS[2], 8)
    name = manager.add_request(PROMPTS[2], max_new_tokens=8)
    assert read(manager, name).generated_tokens == before
    head = model.model.get_output_embeddings().weight
    try:
        with manager.pause(), torch.no_grad():
            head.copy_(head.roll(7, dims=0).clone())
            manager.reset_prefix_cache()
        after = greedy_reference(model.model, PROMPTS[2], 8)
        assert after != before
        name = manager.add_request(PROMPTS[2], max_new_tokens=8)
        output = read(manager, name)
        assert output.generated_tokens == after
        assert output.cached_tokens == 0
    finally:
        manager.stop(hard_stop=True)
        with torch.no_grad():
            head.copy_(head.roll(-7, dims=0).clone())
