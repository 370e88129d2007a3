"""A seeded request's tokens are its own: among any neighbours, batches, chunks and preemptions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.api.manager import ContinuousBatchingManager
from engine.api.offline import LoadedModel
from engine.api.results import GenerationOutput
from engine.contract.config import ContinuousBatchingConfig
from engine.contract.outputs import FinishReason
from tests.tiny_models import VOCAB, greedy_reference, make_prompts

PROMPT = make_prompts((30,), seed=77)[0]
OPTIONS: dict[str, Any] = {
    "temperature": 1.2,
    "top_k": 40,
    "top_p": 0.95,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.2,
    "typical_p": 0.97,
    "no_repeat_ngram_size": 2,
    "banned_token_ids": [4, 7],
    "seed": 12345,
}


def _manager(loaded: LoadedModel, **options: Any) -> ContinuousBatchingManager:
    config = ContinuousBatchingConfig(
        **{
            "block_size": 8,
            "num_blocks": 100,
            "max_batch_tokens": 256,
            "per_request_processors": True,
            **options,
        }
    )
    manager = loaded.init_continuous_batching(continuous_batching_config=config)
    manager.start()
    return manager


def _tokens(manager: ContinuousBatchingManager, neighbours: int, **options: Any) -> list[int]:
    """The seeded request's tokens, with neighbours before and behind it in the queue."""
    prompts = make_prompts(tuple(7 + 5 * i for i in range(neighbours)), seed=neighbours)
    for index, prompt in enumerate(prompts):
        if index == neighbours // 2:
            break
        manager.add_request(
            prompt, max_new_tokens=20, temperature=0.5 + index, top_p=0.8, ignore_eos=True
        )
    manager.add_request(
        PROMPT, request_id="seeded", max_new_tokens=20, ignore_eos=True, **{**OPTIONS, **options}
    )
    for prompt in prompts[neighbours // 2 :]:
        manager.add_request(prompt, max_new_tokens=20, ignore_eos=True)
    manager.stop()
    return {output.request_id: output for output in manager}["seeded"].generated_tokens


@pytest.fixture
def model(loaded: Callable[[str], LoadedModel]) -> LoadedModel:
    return loaded("gemma3")


def test_the_same_seed_gives_the_same_tokens_anywhere(model: LoadedModel) -> None:
    alone = _tokens(_manager(model), 0)
    assert len(alone) == 20
    assert len(set(alone)) > 5
    assert _tokens(_manager(model), 0) == alone
    assert _tokens(_manager(model), 3) == alone
    assert _tokens(_manager(model), 31) == alone
    assert _tokens(_manager(model, max_batch_tokens=16), 6) == alone, "in chunks"
    crowded = _manager(model, num_blocks=14, max_batch_tokens=40)
    assert _tokens(crowded, 8) == alone, "after preemptions"
    assert crowded.stats().preemptions > 0
    assert _tokens(_manager(model), 0, seed=54321) != alone


def test_without_a_seed_draws_differ(model: LoadedModel) -> None:
    manager = _manager(model)
    for index in range(4):
        manager.add_request(
            PROMPT, request_id=str(index), max_new_tokens=12, temperature=1.5, ignore_eos=True
        )
    manager.stop()
    assert len({tuple(output.generated_tokens) for output in manager}) == 4


def test_the_engines_seed_repeats_all_requests(model: LoadedModel) -> None:
    def run(seed: int) -> list[list[int]]:
        manager = _manager(model, seed=seed)
        for index in range(3):
            manager.add_request(
                PROMPT, request_id=str(index), max_new_tokens=12, temperature=1.5, ignore_eos=True
            )
        manager.stop()
        outputs = {output.request_id: output.generated_tokens for output in manager}
        return [outputs[str(index)] for index in range(3)]

    first = run(5)
    assert run(5) == first
    assert run(6) != first
    assert len(set(map(tuple, first))) == 3


def _one(model: LoadedModel, prompt: list[int], **options: Any) -> GenerationOutput:
    manager = _manager(model)
    manager.add_request(prompt, **options)
    manager.stop()
    output = manager.get_result()
    assert output is not None
    return output


def test_ends(model: LoadedModel) -> None:
    """Stop ids, a request's own eos, ignore_eos and min_new_tokens, on the same greedy tokens."""
    free = _one(model, PROMPT, max_new_tokens=12, eos_token_id=-1).generated_tokens
    assert free == greedy_reference(model.model, PROMPT, 12)
    chosen = free[4]
    cut = free[: free.index(chosen) + 1]
    for options in ({"stop_token_ids": [chosen]}, {"eos_token_id": [chosen, 1]}):
        output = _one(model, PROMPT, max_new_tokens=12, **options)
        assert output.generated_tokens == cut
        assert output.finish_reason is FinishReason.STOP
    output = _one(model, PROMPT, max_new_tokens=12, eos_token_id=chosen, ignore_eos=True)
    assert output.generated_tokens == free
    assert output.finish_reason is FinishReason.LENGTH
    both = _one(
        model, PROMPT, max_new_tokens=12, stop_token_ids=[chosen], ignore_eos=True, eos_token_id=3
    )
    assert both.generated_tokens == cut, "stop ids act although eos is ignored"
    held = _one(model, PROMPT, max_new_tokens=12, eos_token_id=chosen, min_new_tokens=8)
    assert len(held.generated_tokens) >= 8
    assert chosen not in held.generated_tokens[:8]


def _generated(model: LoadedModel, prompt: list[int], **options: Any) -> list[int]:
    """What `generate` gives, greedily."""
    ids = torch.tensor([prompt])
    right = model.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **options
    )
    tokens: list[int] = right[0, len(prompt) :].tolist()
    return tokens


def test_min_new_tokens_is_generates(model: LoadedModel) -> None:
    free = greedy_reference(model.model, PROMPT, 12)
    options = {"max_new_tokens": 12, "min_new_tokens": 6, "eos_token_id": free[2]}
    assert _one(model, PROMPT, **options).generated_tokens == _generated(model, PROMPT, **options)


def test_history_is_generates_through_chunks_and_preemptions(model: LoadedModel) -> None:
    """Repetition penalty, n-grams and banned ids over the whole prompt and output, with a prompt
    cut in chunks and a cache that does not hold all requests.
    """
    prompts = [prompt * 2 for prompt in make_prompts((18, 9, 14, 11, 20, 16), seed=3)]
    banned = greedy_reference(model.model, prompts[0], 3)
    manager = _manager(model, num_blocks=16, max_batch_tokens=24)
    options = {"no_repeat_ngram_size": 2, "repetition_penalty": 1.05, "suppress_tokens": banned}
    for index, prompt in enumerate(prompts):
        manager.add_request(
            prompt, request_id=str(index), max_new_tokens=24, min_new_tokens=24, **options
        )
    manager.stop()
    outputs = {output.request_id: output.generated_tokens for output in manager}
    assert manager.stats().preemptions > 0
    plain = greedy_reference(model.model, prompts[0], 24)
    assert outputs["0"] != plain
    for index, prompt in enumerate(prompts):
        assert outputs[str(index)] == _generated(
            model, prompt, max_new_tokens=24, min_new_tokens=24, **options
        )


def test_logit_bias(model: LoadedModel) -> None:
    forced = _one(model, PROMPT, max_new_tokens=3, eos_token_id=-1, logit_bias={VOCAB - 1: 100.0})
    assert forced.generated_tokens == [VOCAB - 1] * 3


def test_frequency_penalty_ends_a_repetition(model: LoadedModel) -> None:
    output = _one(
        model,
        PROMPT,
        max_new_tokens=8,
        eos_token_id=-1,
        logit_bias={9: 60.0},
        presence_penalty=2.0,
        frequency_penalty=2.0,
    )
    assert output.generated_tokens[0] == 9
