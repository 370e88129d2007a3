"""Inputs that end other engines' loops, each among eight neighbours that run on undisturbed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from engine.api.manager import ContinuousBatchingManager
from engine.api.offline import LoadedModel
from engine.api.results import GenerationOutput
from engine.contract.config import ContinuousBatchingConfig
from engine.contract.errors import (
    DuplicateRequestError,
    InvalidRequestError,
    QueueFullError,
    UnsupportedFeatureError,
)
from engine.contract.outputs import FinishReason
from engine.contract.request import RequestStatus
from tests.tiny_models import CONTEXT, VOCAB, greedy_reference, make_prompts

WAIT = 60.0
NEIGHBOURS = make_prompts((1, 3, 7, 12, 20, 33, 40, 50))
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def right(loaded: Callable[[str], LoadedModel]) -> list[list[int]]:
    model = loaded("qwen3").model
    return [greedy_reference(model, prompt, NEW_TOKENS) for prompt in NEIGHBOURS]


class Neighbourhood:
    """A running manager, and eight requests that must come out right."""

    def __init__(self, manager: ContinuousBatchingManager, right: list[list[int]]) -> None:
        self.manager = manager
        self._right = right
        manager.start()
        for index, prompt in enumerate(NEIGHBOURS):
            manager.add_request(prompt, request_id=f"n{index}", max_new_tokens=NEW_TOKENS)

    def result(self, name: str) -> GenerationOutput:
        output = self.manager.get_result(name, timeout=WAIT)
        assert output is not None
        return output

    def check(self) -> None:
        for index, right in enumerate(self._right):
            output = self.result(f"n{index}")
            assert output.status is RequestStatus.FINISHED
            assert output.generated_tokens == right
        assert self.manager.is_running()


@pytest.fixture
def near(loaded: Callable[[str], LoadedModel], right: list[list[int]]) -> Iterator[Neighbourhood]:
    config = ContinuousBatchingConfig(
        block_size=8, num_blocks=80, max_batch_tokens=64, per_request_processors=True
    )
    manager = loaded("qwen3").init_continuous_batching(continuous_batching_config=config)
    yield Neighbourhood(manager, right)
    manager.stop(hard_stop=True)
    kv_cache = manager._loop._core.scheduler.kv_cache
    kv_cache.check_integrity()
    assert kv_cache.num_used_blocks == 0


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"input_ids": [5] * (CONTEXT + 1)}, "model's context is 512"),
        ({"input_ids": [5] * CONTEXT}, "at most 511"),
        ({"input_ids": []}, "prompt: is empty"),
        ({"input_ids": [3, VOCAB]}, r"prompt\[1\]: is 128"),
        ({"input_ids": [3, 4, -1]}, r"prompt\[2\]"),
        ({"input_ids": ["three"]}, r"prompt\[0\]"),
        ({"max_new_tokens": -1}, "max_tokens"),
        ({"unknown_option": 1}, "unknown_option"),
    ],
)
def test_wrong_requests_are_refused_at_once(
    near: Neighbourhood, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(InvalidRequestError, match=match):
        near.manager.add_request(**{"input_ids": [5], **options})
    near.check()


def test_longer_than_the_cache(
    loaded: Callable[[str], LoadedModel], right: list[list[int]]
) -> None:
    config = ContinuousBatchingConfig(block_size=8, num_blocks=10, max_batch_tokens=64)
    manager = loaded("qwen3").init_continuous_batching(continuous_batching_config=config)
    near = Neighbourhood(manager, right)
    with pytest.raises(InvalidRequestError, match=r"at most 79 fit.*\(num_blocks, block_size\)"):
        manager.add_request([5] * 80, max_new_tokens=1)
    manager.add_request([5] * 70, request_id="grows", max_new_tokens=100)
    output = near.result("grows")
    assert output.finish_reason is FinishReason.CONTEXT
    assert len(output.generated_tokens) == 10
    near.check()
    manager.stop()


def test_output_up_to_the_models_context(near: Neighbourhood) -> None:
    near.manager.add_request(
        [5] * (CONTEXT - 3), request_id="long", max_new_tokens=50, ignore_eos=True
    )
    output = near.result("long")
    assert output.finish_reason is FinishReason.CONTEXT
    assert len(output.generated_tokens) == 3
    near.check()


def test_duplicate_id(near: Neighbourhood) -> None:
    with pytest.raises(DuplicateRequestError):
        near.manager.add_request([5], request_id="n0")
    near.check()


def test_no_new_tokens(near: Neighbourhood) -> None:
    near.manager.add_request([5, 6, 7], request_id="none", max_new_tokens=0)
    output = near.result("none")
    assert output.status is RequestStatus.FINISHED
    assert output.generated_tokens == []
    near.check()


def test_temperature_zero_is_greedy(near: Neighbourhood, right: list[list[int]]) -> None:
    near.manager.add_request(
        NEIGHBOURS[3], request_id="t", max_new_tokens=NEW_TOKENS, temperature=0.0, do_sample=True
    )
    assert near.result("t").generated_tokens == right[3]
    near.check()


def test_temperature_none_says_nothing(near: Neighbourhood, right: list[list[int]]) -> None:
    near.manager.add_request(
        NEIGHBOURS[3], request_id="t", max_new_tokens=NEW_TOKENS, temperature=None
    )
    assert near.result("t").generated_tokens == right[3]
    near.check()


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 100.0])
def test_extreme_temperatures(
    near: Neighbourhood, right: list[list[int]], temperature: float
) -> None:
    near.manager.add_request(
        NEIGHBOURS[3], request_id="t", max_new_tokens=NEW_TOKENS, temperature=temperature
    )
    output = near.result("t")
    assert output.status is RequestStatus.FINISHED
    if temperature < 1:
        assert output.generated_tokens == right[3]
    near.check()


def test_top_k_above_the_vocabulary(near: Neighbourhood) -> None:
    for name, top_k in (("clamped", 10**12), ("all", VOCAB)):
        near.manager.add_request(
            [5, 9], request_id=name, max_new_tokens=8, temperature=1.0, top_k=top_k, seed=3
        )
    assert near.result("clamped").generated_tokens == near.result("all").generated_tokens
    near.check()


def test_several_beams_are_refused(near: Neighbourhood) -> None:
    with pytest.raises(UnsupportedFeatureError, match="num_beams"):
        near.manager.add_request([5], num_beams=3)
    near.check()


def test_exception_in_forward(
    near: Neighbourhood, right: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    near.check()
    runner: Any = near.manager._loop._core.runner
    forward, left = runner._forward.as_it_comes, 1

    def failing(*arguments: Any) -> Any:
        nonlocal left
        if left:
            left -= 1
            raise torch.OutOfMemoryError("CUDA out of memory: 1234 GiB of /secret/path")
        return forward(*arguments)

    monkeypatch.setattr(runner._forward, "as_it_comes", failing)
    near.manager.add_request([5], request_id="unlucky", max_new_tokens=3)
    output = near.result("unlucky")
    assert output.status is RequestStatus.FAILED
    assert output.finish_reason is FinishReason.ERROR
    assert output.error is not None
    assert "the model failed" in output.error
    assert "secret" not in output.error
    for index, prompt in enumerate(NEIGHBOURS):
        near.manager.add_request(prompt, request_id=f"n{index}", max_new_tokens=NEW_TOKENS)
    near.check()


def test_a_request_without_finite_logits_fails_alone(
    near: Neighbourhood, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner: Any = near.manager._loop._core.runner
    begin = runner._sampler.begin

    def poisoned(logits: torch.Tensor, requests: Any, lengths: Any) -> Any:
        logits = logits.clone()
        for row, request in enumerate(requests):
            if request.request_id == "poisoned":
                logits[row, request.num_output_tokens :] = float("nan")
            if request.request_id == "infinite":
                logits[row, 3] = float("inf")
            if request.request_id == "sampled":
                logits[row] = float("-inf")
        return begin(logits, requests, lengths)

    monkeypatch.setattr(runner._sampler, "begin", poisoned)
    near.manager.add_request([5], request_id="poisoned", max_new_tokens=3)
    near.manager.add_request([5], request_id="infinite", max_new_tokens=3, logprobs=2)
    near.manager.add_request(
        [5], request_id="sampled", max_new_tokens=3, temperature=1.0, top_k=5, seed=1
    )
    for name in ("poisoned", "infinite", "sampled"):
        output = near.result(name)
        assert output.status is RequestStatus.FAILED
        assert output.error is not None
        assert "finite logits" in output.error
    near.check()


def test_options_that_leave_no_token(near: Neighbourhood) -> None:
    near.manager.add_request(
        [5, 6], request_id="a", max_new_tokens=9, allowed_token_ids=[7, 8], no_repeat_ngram_size=1
    )
    output = near.result("a")
    assert (output.finish_reason, len(output.generated_tokens)) == (FinishReason.ERROR, 2)
    assert output.error is not None
    assert "no_repeat_ngram_size would leave after 2 tokens" in output.error
    near.check()


def test_nan_left_in_freed_blocks_reaches_nobody(
    loaded: Callable[[str], LoadedModel], right: list[list[int]]
) -> None:
    config = ContinuousBatchingConfig(block_size=8, num_blocks=80, max_batch_tokens=64)
    manager = loaded("qwen3").init_continuous_batching(continuous_batching_config=config)
    runner: Any = manager._loop._core.runner
    for cache in runner.kv.caches.values():
        cache.keys[8:] = float("nan")  # all but the null block
        cache.values[8:] = float("nan")
    near = Neighbourhood(manager, right)
    near.check()
    manager.stop()


def test_a_closed_loop_loses_alone(near: Neighbourhood) -> None:
    loop = asyncio.new_event_loop()

    async def register() -> None:
        near.manager.register_result_handler("deaf", print)

    near.manager.add_request([5], request_id="deaf", max_new_tokens=300, streaming=True)
    loop.run_until_complete(register())
    loop.close()
    near.check()


def test_cancel_and_the_same_id_again(near: Neighbourhood, right: list[list[int]]) -> None:
    near.manager.add_request([5], request_id="again", max_new_tokens=400, ignore_eos=True)
    assert near.manager.cancel_request("again")
    assert near.result("again").status is RequestStatus.CANCELLED
    near.manager.add_request(NEIGHBOURS[2], request_id="again", max_new_tokens=NEW_TOKENS)
    assert near.result("again").generated_tokens == right[2]
    near.check()


def test_preemption_keeps_all_timestamps(
    loaded: Callable[[str], LoadedModel], right: list[list[int]]
) -> None:
    config = ContinuousBatchingConfig(block_size=4, num_blocks=18, max_batch_tokens=32)
    manager = loaded("qwen3").init_continuous_batching(continuous_batching_config=config)
    manager.start()
    for index, prompt in enumerate(NEIGHBOURS):
        manager.add_request(
            prompt, request_id=f"n{index}", max_new_tokens=NEW_TOKENS, record_timestamps=True
        )
    manager.stop()
    assert manager.stats().preemptions > 0
    outputs = {output.request_id: output for output in manager}
    for index, tokens in enumerate(right):
        output = outputs[f"n{index}"]
        assert output.generated_tokens == tokens
        assert output.timestamps is not None
        assert len(output.timestamps) == len(tokens)
        assert output.timestamps == sorted(output.timestamps)


def test_a_full_queue(loaded: Callable[[str], LoadedModel], right: list[list[int]]) -> None:
    config = ContinuousBatchingConfig(
        block_size=8, num_blocks=80, max_requests_per_batch=2, max_queue_size=8
    )
    manager = loaded("qwen3").init_continuous_batching(continuous_batching_config=config)
    near = Neighbourhood(manager, right)
    refused: list[QueueFullError] = []
    for index in range(30):
        try:
            manager.add_request([5, 6], request_id=f"more{index}", max_new_tokens=1)
        except QueueFullError as error:
            refused.append(error)
    assert refused
    assert all(error.retry_after_s > 0 for error in refused)
    assert "max_queue_size" in str(refused[0])
    near.check()
    manager.stop()


def test_two_thousand_queued(near: Neighbourhood) -> None:
    for index in range(2000):
        near.manager.add_request([3 + index % 100], request_id=f"q{index}", max_new_tokens=1)
    near.check()
    ended = [near.manager.get_result(timeout=WAIT) for _ in range(2000)]
    assert len({output.request_id for output in ended if output is not None}) == 2000
