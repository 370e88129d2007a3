"""Greedy output equals `model.generate`'s, whatever is done to the batch: block sizes and budgets.
The families are swept in test_families.py.
"""

from __future__ import annotations

from functools import cache

import pytest

from engine.api.offline import LoadedModel, from_model
from engine.api.results import GenerationOutput
from engine.contract.config import ContinuousBatchingConfig
from engine.contract.errors import ModelRefusedError
from engine.contract.request import GenerationRequest, Request, RequestStatus
from engine.contract.sampling_params import SamplingParams, StopParams
from engine.contract.token_ids import TokenIds
from engine.contract.types import CallerKey, RequestId
from engine.kv_cache.group_kinds import SlidingAttention
from engine.scheduler.step_plan import StepPlan
from tests.tiny_models import (
    FAMILIES,
    WINDOW,
    greedy_reference,
    make_model,
    make_prompts,
)

LENGTHS = (1, 2, WINDOW - 10, 31, 64, WINDOW + 100, 197, 300)
NEW_TOKENS = 16


@cache
def _reference(family: str, length: int) -> tuple[int, ...]:
    model = make_model(FAMILIES[family](eos_token_id=None))
    (prompt,) = make_prompts((length,), seed=length)
    return tuple(greedy_reference(model, prompt, NEW_TOKENS))


@cache
def _loaded(family: str) -> LoadedModel:
    return from_model(make_model(FAMILIES[family](eos_token_id=None)))


def _prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    return [make_prompts((length,), seed=length)[0] for length in lengths]


def _run(
    loaded: LoadedModel, config: ContinuousBatchingConfig, prompts: list[list[int]]
) -> tuple[list[GenerationOutput], int, int]:
    """All outputs in order, how often a request was preempted, and the longest step in tokens."""
    manager = loaded.init_continuous_batching(continuous_batching_config=config)
    execute, longest = manager._loop._core.runner.launch, 0

    def watch(batch):  # type: ignore[no-untyped-def]
        nonlocal longest
        longest = max(longest, batch.num_tokens)
        return execute(batch)

    manager._loop._core.runner.launch = watch  # type: ignore[method-assign]
    manager.start()
    for index, prompt in enumerate(prompts):
        manager.add_request(prompt, request_id=str(index), max_new_tokens=NEW_TOKENS)
    manager.stop()
    outputs = {output.request_id: output for output in manager}
    kv_cache = manager._loop._core.scheduler.kv_cache
    kv_cache.check_integrity()
    assert kv_cache.num_used_blocks == 0
    assert all(pool.num_free == pool.num_blocks for pool in kv_cache.pools)
    ordered = [outputs[str(index)] for index in range(len(prompts))]
    return ordered, manager.stats().preemptions, longest


@pytest.mark.parametrize(
    "block_size",
    [pytest.param(1, marks=pytest.mark.slow), 8, pytest.param(32, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("family", ["mistral", "gemma3", "gpt_oss", "deepseek_v3"])
def test_greedy_equals_generate(family: str, block_size: int) -> None:
    """Chunks of 48 tokens, and so few blocks that requests give them up while they run."""
    lengths = {
        1: (1, 2, WINDOW - 10, 31, 64, WINDOW + 100, 90, 33),
        8: LENGTHS,
        32: (1, 2, WINDOW - 10, 31, 32, WINDOW + 100, 64, 33),
    }[block_size]
    longest = max(lengths) + NEW_TOKENS
    num_blocks = -(-longest // block_size)
    if family == "mistral":  # all layers slide: it needs far fewer
        num_blocks = SlidingAttention(WINDOW).most_blocks(longest, 48, block_size)
    config = ContinuousBatchingConfig(
        block_size=block_size, num_blocks=num_blocks, max_batch_tokens=48
    )
    outputs, preemptions, longest_step = _run(_loaded(family), config, _prompts(lengths))
    for length, output in zip(lengths, outputs, strict=True):
        assert output.status is RequestStatus.FINISHED
        assert tuple(output.generated_tokens) == _reference(family, length), length
    assert longest_step <= 48 < max(lengths), "prompts were cut in chunks"
    assert preemptions > 0


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "deepseek_v3"])
def test_without_pressure_too(family: str) -> None:
    config = ContinuousBatchingConfig(block_size=16, num_blocks=128, max_batch_tokens=1024)
    outputs, preemptions, _ = _run(_loaded(family), config, _prompts())
    assert preemptions == 0
    for length, output in zip(LENGTHS, outputs, strict=True):
        assert tuple(output.generated_tokens) == _reference(family, length)


def test_a_budget_of_one_token() -> None:
    config = ContinuousBatchingConfig(block_size=4, num_blocks=32, max_batch_tokens=1)
    lengths = (1, 2, WINDOW - 10, 31)
    outputs, _, longest_step = _run(_loaded("mistral"), config, _prompts(lengths))
    assert longest_step == 1
    for length, output in zip(lengths, outputs, strict=True):
        assert tuple(output.generated_tokens) == _reference("mistral", length)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_who_gives_a_place_up_goes_on_where_it_was(family: str, overlap: bool) -> None:
    """One caller has both places, and another comes and goes: its requests are set aside."""
    config = ContinuousBatchingConfig(
        block_size=8,
        num_blocks=256,
        max_requests_per_batch=2,
        scheduler_type="fair",
        use_async_batching=overlap,
    )
    core = _loaded(family).init_continuous_batching(continuous_batching_config=config)._loop._core
    set_aside, kept = core.scheduler.set_aside, []

    def watch(plan: StepPlan, request: Request) -> None:
        kept.append(request.num_computed_tokens)
        set_aside(plan, request)

    core.scheduler.set_aside = watch  # type: ignore[method-assign]
    lengths = (64, 31, 90, 2, 1, 33)
    tokens: dict[str, list[int]] = {str(length): [] for length in lengths}

    def step() -> None:
        for output in core.step().outputs:
            tokens[output.request_id] += output.token_ids

    for index, length in enumerate(lengths):
        spec = GenerationRequest(
            request_id=RequestId(str(length)),
            prompt=TokenIds.of(make_prompts((length,), seed=length)[0]),
            sampling=SamplingParams(temperature=0.0),
            stop=StopParams(max_tokens=NEW_TOKENS),
            caller=CallerKey("many" if index < 3 else f"few{index}"),
        )
        core.add(spec, float(index))
        if index > 1:
            for _ in range(4):
                step()
    while core.has_work:
        step()
    assert core.stats().preemptions == 0
    assert len([one for one in kept if one]) >= 2
    for length in lengths:
        assert tuple(tokens[str(length)]) == _reference(family, length), length


def test_a_model_in_training_mode_is_refused() -> None:
    model = make_model(FAMILIES["llama"]())
    model.train()
    with pytest.raises(ModelRefusedError, match=r"eval\(\)"):
        from_model(model)
