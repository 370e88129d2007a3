"""The largest step is run before the cache is sized, and what it takes is left free."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.api.offline import LoadedModel
from engine.contract.config import ContinuousBatchingConfig
from engine.contract.errors import InsufficientMemoryError
from engine.loading import running
from engine.loading.memory import GIB, StepLimits, step_limits
from engine.loading.profiling import (
    CudaMemory,
    DeviceMemory,
    HostMemory,
    device_memory,
    largest_requests,
    measure_step,
)
from engine.loading.running import LoadedRunner, build_runner
from tests.engine.runner.fake_attention import CapturableAttention
from tests.engine.runner.fake_graphs import RecordingBackend
from tests.tiny_models import CONTEXT

MIB = 1 << 20


class FakeMemory:
    """A device whose free memory and peak are what they are said to be.

    Attributes:
        runs: how often something was measured.
    """

    def __init__(self, available: int, peak: int | Exception) -> None:
        self._available, self._peak = available, peak
        self.runs = 0

    def available(self) -> int:
        return self._available

    def peak(self, run: Callable[[], None]) -> int:
        self.runs += 1
        if isinstance(self._peak, Exception):
            raise self._peak
        run()
        return self._peak


def build(loaded: LoadedModel, memory: DeviceMemory, **options: Any) -> LoadedRunner:
    config = ContinuousBatchingConfig(**{"block_size": 8, **options})
    fresh = dataclasses.replace(loaded._verified, step_bytes={})
    return build_runner(fresh, config, lambda line: None, memory=memory)


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3", "mixtral"])
def test_the_largest_step_is_run(
    loaded: Callable[[str], LoadedModel], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a real forward: all its tokens, and logits of all its requests, which are sampled."""
    seen: list[tuple[int, int]] = []
    model = loaded(family)._verified.model  # what steps run
    forward = model.forward

    def watched(*arguments: Any, **named: Any) -> Any:
        output = forward(*arguments, **named)
        seen.append((named["input_ids"].shape[1], output.logits.shape[1]))
        return output

    monkeypatch.setattr(model, "forward", watched)
    memory = FakeMemory(64 * MIB, 0)
    build(loaded(family), memory, max_batch_tokens=700, max_requests_per_batch=5)
    assert memory.runs == 1
    assert seen == [(700, 5)]


def test_what_is_captured_is_measured_too(
    loaded: Callable[[str], LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest of each path, after the largest step; both are left free."""
    seen: list[tuple[int, int]] = []
    verified = dataclasses.replace(
        loaded("llama")._verified, step_bytes={}, backend=CapturableAttention()
    )
    forward = verified.model.forward

    def watched(*arguments: Any, **named: Any) -> Any:
        output = forward(*arguments, **named)
        seen.append((named["input_ids"].shape[1], output.logits.shape[1]))
        return output

    monkeypatch.setattr(verified.model, "forward", watched)
    memory = FakeMemory(64 * MIB, 16 * MIB)
    config = ContinuousBatchingConfig(
        block_size=8, max_batch_tokens=700, max_requests_per_batch=9, num_blocks=1 << 20
    )
    graphs = RecordingBackend()
    with pytest.raises(InsufficientMemoryError, match=r"less 0\.03 GiB that a step"):
        build_runner(verified, config, lambda line: None, memory=memory, graphs=graphs)
    assert memory.runs == 2
    # The largest step; then each once for the size of its logits, and once as it is captured.
    assert seen == [(700, 9), (1024, 9), (1024, 9), (16, 16)]
    config = dataclasses.replace(config, num_blocks=64)
    build_runner(verified, config, lambda line: None, memory=memory, graphs=graphs)
    assert memory.runs == 2, "once for a model and its options"
    assert not graphs.graphs, "nothing is captured before the cache is there"


def test_a_model_s_largest_step_is_run_once(loaded: Callable[[str], LoadedModel]) -> None:
    fresh = dataclasses.replace(loaded("llama")._verified, step_bytes={})
    memory = FakeMemory(64 * MIB, MIB)
    for tokens, block_size, runs in ((64, 8, 1), (64, 8, 1), (32, 8, 2), (64, 16, 3), (32, 8, 3)):
        config = ContinuousBatchingConfig(block_size=block_size, max_batch_tokens=tokens)
        build_runner(fresh, config, lambda line: None, memory=memory)
        assert memory.runs == runs


def test_what_it_takes_is_left_free(loaded: Callable[[str], LoadedModel]) -> None:
    plans = [
        build(loaded("llama"), FakeMemory(8 * MIB, peak), max_batch_tokens=64).plan
        for peak in (0, 4 * MIB)
    ]
    assert plans[0].total_bytes <= 8 * MIB * 0.5
    assert plans[1].total_bytes <= 4 * MIB * 0.5
    assert plans[1].num_blocks[0] == pytest.approx(plans[0].num_blocks[0] / 2, rel=0.01)


def test_a_cache_that_does_not_fit_beside_it(loaded: Callable[[str], LoadedModel]) -> None:
    with pytest.raises(InsufficientMemoryError) as caught:
        build(loaded("llama"), FakeMemory(3 * GIB, 2 * GIB), num_blocks=1 << 20)
    message = str(caught.value)
    assert "0.50 GiB may be used" in message
    assert "(50% of 3.00 GiB free on cpu, less 2.00 GiB that a step needs)" in message
    assert "tokens would fit; lower num_blocks or block_size, or lower max_batch_tokens" in message
    assert message.endswith("or raise max_memory_percent")


def test_a_step_that_needs_more_than_there_is(loaded: Callable[[str], LoadedModel]) -> None:
    with pytest.raises(InsufficientMemoryError, match="0 tokens would fit"):
        build(loaded("llama"), FakeMemory(GIB, 2 * GIB))


def test_a_step_that_cannot_be_run(loaded: Callable[[str], LoadedModel]) -> None:
    memory = FakeMemory(GIB, torch.OutOfMemoryError("CUDA out of memory, and much more"))
    with pytest.raises(InsufficientMemoryError) as caught:
        build(loaded("llama"), memory, max_batch_tokens=4096, max_requests_per_batch=9)
    assert str(caught.value) == (
        "a step of 4096 tokens of 9 requests needs more than the 1.00 GiB that are free on cpu "
        "beside the model, before there is any KV cache; lower max_batch_tokens or "
        "max_requests_per_batch"
    )


class SteadyMemory(FakeMemory):
    """A device on which a step takes so many bytes a token, and which may be too small for it."""

    def __init__(self, available: int, token_bytes: int) -> None:
        super().__init__(available, 0)
        self._token_bytes = token_bytes
        self.tokens: list[int] = []

    def peak(self, run: Callable[[], None]) -> int:
        needed = self._token_bytes * self.tokens[-1]
        if needed > self._available:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return needed


@pytest.mark.parametrize(
    ("token_bytes", "tried"),
    [
        (MIB // 4, [8192]),  # 2 of 8 GiB
        (MIB // 4 + 1, [8192, 4096]),
        (3 * MIB // 2, [8192, 4096, 2048, 1024]),  # the first does not fit at all
        (6 * MIB, [8192, 4096, 2048, 1024, 512]),  # no fewer, though it takes 3 GiB
    ],
)
def test_a_step_s_size_that_is_not_given_comes_from_the_memory(
    loaded: Callable[[str], LoadedModel],
    token_bytes: int,
    tried: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = SteadyMemory(8 * GIB, token_bytes)

    def begin_with(config: ContinuousBatchingConfig, device: torch.device) -> StepLimits:
        return StepLimits(config.max_batch_tokens or 8192, 64)  # as on CUDA

    def measure(*arguments: Any, limits: StepLimits, **named: Any) -> int:
        memory.tokens.append(limits.max_batch_tokens)
        return measure_step(*arguments, limits=limits, **named)

    monkeypatch.setattr(running, "step_limits", begin_with)
    monkeypatch.setattr(running, "measure_step", measure)
    assert build(loaded("llama"), memory, num_blocks=64).plan.max_batch_tokens == tried[-1]
    assert memory.tokens == tried


def test_a_step_s_size_that_is_given_is_kept(loaded: Callable[[str], LoadedModel]) -> None:
    memory = FakeMemory(GIB, GIB // 2)
    assert build(loaded("llama"), memory, max_batch_tokens=4096).plan.max_batch_tokens == 4096
    assert memory.runs == 1


def test_nothing_is_run_on_a_cpu() -> None:
    memory = device_memory(torch.device("cpu"))
    assert isinstance(memory, HostMemory)
    assert memory.peak(lambda: pytest.fail("it was run")) == 0
    assert memory.available() > 0


@pytest.mark.parametrize(
    ("tokens", "requests", "counts"),
    [
        (64, 4, [1, 1, 1, 61]),
        (CONTEXT + 50, 4, [1, 1, CONTEXT, 48]),
        (3, 8, [1, 1, 1]),
        (1, 1, [1]),
        (10_000, 2, [CONTEXT, CONTEXT]),
    ],
)
def test_the_largest_requests(tokens: int, requests: int, counts: list[int]) -> None:
    found = [one.num_tokens for one in largest_requests(StepLimits(tokens, requests), CONTEXT, 50)]
    assert found == counts
    assert sum(found) == min(tokens, requests * CONTEXT)
    assert len(found) == min(tokens, requests)
    assert found == sorted(found, key=lambda count: count > 1), "one token first"


def test_limits() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert step_limits(ContinuousBatchingConfig(), cpu) == StepLimits(1024, 64)
    assert step_limits(ContinuousBatchingConfig(), cuda) == StepLimits(8192, 256)
    config = ContinuousBatchingConfig(max_batch_tokens=5, max_requests_per_batch=6)
    assert step_limits(config, cuda) == StepLimits(5, 6)


def test_a_cuda_device_is_asked_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept for later is given back before anything is read; the peak counts from there."""
    asked: list[str] = []
    reserved = {"now": 700 * MIB, "peak": 0}

    def empty_cache() -> None:
        asked.append("empty")
        reserved["now"] = 500 * MIB

    def free(device: torch.device) -> tuple[int, int]:
        asked.append("free")
        return 1000 * MIB - reserved["now"], 1000 * MIB

    def run() -> None:
        asked.append("run")
        reserved["peak"] = 650 * MIB

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(torch.cuda, "mem_get_info", free)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: asked.append("wait"))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved["now"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: asked.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: reserved["peak"])
    memory = device_memory(torch.device("cuda"))
    assert isinstance(memory, CudaMemory)
    assert memory.peak(run) == 150 * MIB
    assert asked == ["wait", "empty", "reset", "run", "wait"]
    asked.clear()
    reserved["now"] = 900 * MIB
    assert memory.available() == 500 * MIB
    assert asked == ["empty", "free"]
