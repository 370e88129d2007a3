"""Every option acts; every bound holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformers import GenerationConfig

from engine.api.offline import LoadedModel
from engine.contract.config import (
    CPU_TARGET_STEP_TIME,
    ContinuousBatchingConfig,
    LoadConfig,
    block_size_on,
)
from engine.contract.environment import RankPlace, engine_environ
from engine.contract.errors import ConfigError, UnsupportedFeatureError
from engine.loading.profiling import HostMemory


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("block_size", 0),
        ("block_size", 4097),
        ("block_size", 16.5),
        ("block_size", "16"),
        ("block_size", True),
        ("num_blocks", 0),
        ("num_blocks", 2**31),
        ("max_batch_tokens", 0),
        ("max_batch_tokens", 2**20 + 1),
        ("max_requests_per_batch", 0),
        ("max_requests_per_batch", 65537),
        ("max_queue_size", -1),
        ("max_unread_results", 0),
        ("max_unread_results", 2**20 + 1),
        ("max_unread_requests", 0),
        ("max_unread_requests", 2**24 + 1),
        ("max_memory_percent", 0.0),
        ("max_memory_percent", 1.01),
        ("max_memory_percent", float("nan")),
        ("max_memory_percent", "half"),
        ("return_logprobs", "no"),
        ("per_request_processors", 1),
        ("drop_unsupported_processors", None),
        ("page_size", 0),
        ("page_size", 4097),
        ("max_blocks_per_request", -1),
        ("allow_block_sharing", 1),
        ("allow_block_sharing", None),
        ("use_async_batching", "yes"),
        ("use_cuda_graph", "yes"),
        ("use_cuda_graph", (True,)),
        ("use_cuda_graph", (True, 1)),
        ("use_cuda_graph", [True, False]),
        ("q_padding_interval_size", -1),
        ("kv_padding_interval_size", -1),
        ("max_cached_graphs", -1),
        ("default_compile_level", 4),
        ("use_default_compile_configs", 3),
        ("target_step_time", -0.1),
        ("target_step_time", 0.00001),
        ("target_step_time", 3601),
        ("target_step_time", float("nan")),
        ("target_step_time", True),
        ("target_step_time", "1s"),
        ("safety_margin", 1.1),
        ("safety_margin", -0.1),
        ("safety_margin", float("nan")),
        ("seed", -1),
        ("seed", 2**64),
        ("cpu_offload_space", -1.0),
        ("cpu_offload_space", float("inf")),
        ("cpu_offload_space_safety_threshold", 0.0),
        ("cpu_offload_space_safety_threshold", 1.5),
    ],
)
def test_refused_with_the_options_name(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=option) as caught:
        ContinuousBatchingConfig(**{option: value})  # type: ignore[arg-type]
    assert caught.value.option == option


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("block_size", 1),
        ("block_size", 4096),
        ("num_blocks", 1),
        ("max_batch_tokens", 2**20),
        ("max_requests_per_batch", 65536),
        ("max_memory_percent", 1.0),
        ("max_queue_size", 0),
        ("max_unread_results", 1),
        ("max_unread_requests", 1),
        ("max_blocks_per_request", 0),
        ("use_cuda_graph", False),
        ("use_cuda_graph", (False, True)),
        ("use_async_batching", False),
        ("default_compile_level", 3),
        ("target_step_time", 0),
        ("target_step_time", 0.0001),
        ("target_step_time", 3600.0),
        ("target_step_time", None),
        ("safety_margin", 0.0),
        ("seed", 2**64 - 1),
        ("cpu_offload_space_safety_threshold", 1.0),
    ],
)
def test_bounds_are_allowed(option: str, value: object) -> None:
    config = ContinuousBatchingConfig(**{option: value})  # type: ignore[arg-type]
    assert getattr(config, option) == value


def test_the_block_size_where_none_is_given_depends_on_the_device() -> None:
    served = ContinuousBatchingConfig(block_size=None)
    assert [block_size_on(served, device) for device in ("cpu", "cuda")] == [32, 64]
    assert block_size_on(ContinuousBatchingConfig(), "cuda") == 256
    assert block_size_on(ContinuousBatchingConfig(block_size=None, page_size=16), "cpu") == 16


def test_page_size_is_block_size() -> None:
    assert ContinuousBatchingConfig(page_size=16) == ContinuousBatchingConfig(block_size=16)
    assert ContinuousBatchingConfig(block_size=16, page_size=16).block_size == 16
    with pytest.raises(ConfigError, match="same option"):
        ContinuousBatchingConfig(block_size=32, page_size=16)


def test_compile_levels_do_not_contradict() -> None:
    with pytest.raises(ConfigError, match="give one"):
        ContinuousBatchingConfig(use_default_compile_configs=True, default_compile_level=1)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("dtype", "int8"),
        ("device", "tpu"),
        ("device", "cuda:x"),
        ("device", "cuda:"),
        ("device", "cpu:"),
        ("device", "cpu:0"),
        ("threads", 0),
        ("threads", 1025),
        ("quantization", "int3"),
        ("quantization", None),
        ("pack_weights", 1),
        ("decoder", "ours"),
    ],
)
def test_load_options_are_bounded(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=option):
        LoadConfig(**{option: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:3"])
def test_devices(device: str) -> None:
    assert LoadConfig(device=device).device == device


# ---- each option acts ------------------------------------------------------------------------


def _run(loaded: LoadedModel, **options: Any) -> tuple[Any, list[Any]]:
    """The manager, and the batches of twelve short requests."""
    config = ContinuousBatchingConfig(
        **{"block_size": 8, "num_blocks": 64, "max_batch_tokens": 32, **options}
    )
    manager = loaded.init_continuous_batching(continuous_batching_config=config)
    batches: list[Any] = []
    runner: Any = manager._loop._core.runner
    execute = runner.launch

    def watch(batch: Any) -> Any:
        batches.append((len(batch.requests), batch.num_tokens))
        return execute(batch)

    runner.launch = watch
    manager.start()
    for index in range(12):
        manager.add_request([5 + index] * 20, request_id=str(index), max_new_tokens=6)
    manager.stop()
    return manager, batches


@pytest.fixture
def llama(loaded: Callable[[str], LoadedModel]) -> LoadedModel:
    return loaded("llama")


def test_block_size_and_num_blocks_act(llama: LoadedModel) -> None:
    manager, _ = _run(llama)
    kv_cache = manager._loop._core.scheduler.kv_cache
    assert kv_cache.block_size == 8
    assert kv_cache.num_blocks == 64
    assert manager._loop._core.runner.kv.caches[0].keys.shape[0] == 65 * 8
    few, _ = _run(llama, num_blocks=6)
    assert few.stats().preemptions > manager.stats().preemptions == 0


def test_max_batch_tokens_acts(llama: LoadedModel) -> None:
    for budget in (7, 32, 100):
        _, batches = _run(llama, max_batch_tokens=budget)
        assert max(tokens for _, tokens in batches) == budget


def test_max_requests_per_batch_acts(llama: LoadedModel) -> None:
    for limit in (1, 3):
        _, batches = _run(llama, max_requests_per_batch=limit)
        assert max(requests for requests, _ in batches) == limit


def test_max_memory_percent_acts(llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostMemory, "available", lambda memory: 4 << 20)
    sizes = [
        llama.init_continuous_batching(
            continuous_batching_config=ContinuousBatchingConfig(
                block_size=8, max_memory_percent=percent
            )
        )
        .stats()
        .blocks_total
        for percent in (0.25, 0.5)
    ]
    assert sizes[1] == pytest.approx(2 * sizes[0], rel=0.05)


def test_allow_block_sharing_acts(llama: LoadedModel) -> None:
    hits = []
    for allowed in (True, False):
        again = llama.init_continuous_batching(
            continuous_batching_config=ContinuousBatchingConfig(
                block_size=8, num_blocks=64, allow_block_sharing=allowed
            )
        )
        again.start()
        for turn in range(2):
            again.add_request([9] * 20, request_id=str(turn), max_new_tokens=2)
            assert again.get_result(str(turn), timeout=60) is not None
        again.stop()
        hits.append(again.stats().prefix_hits)
    assert hits == [16, 0]


def test_use_async_batching_acts(llama: LoadedModel) -> None:
    """A step is launched before the one before it was collected."""
    for overlap in (True, False):
        config = ContinuousBatchingConfig(block_size=8, num_blocks=64, use_async_batching=overlap)
        manager = llama.init_continuous_batching(continuous_batching_config=config)
        runner: Any = manager._loop._core.runner
        launch, open_steps, most = runner.launch, 0, 0

        def watch(batch: Any) -> Any:
            nonlocal open_steps, most
            step = launch(batch)  # noqa: B023  # called while this turn lasts
            open_steps += 1
            most = max(most, open_steps)

            class Watched:
                def sample(self) -> None:
                    step.sample()

                def result(self) -> Any:
                    nonlocal open_steps
                    open_steps -= 1
                    return step.result()

            return Watched()

        runner.launch = watch
        manager.start()
        manager.add_request([5] * 20, max_new_tokens=6)
        manager.stop()
        assert most == (2 if overlap else 1)
        assert open_steps == 0


def test_cpu_offload_space_acts(llama: LoadedModel) -> None:
    manager, _ = _run(llama, num_blocks=6, cpu_offload_space=0.001)
    stats = manager.stats()
    assert stats.host_blocks_total > 0
    assert stats.offloads > 0
    assert stats.restores > 0
    without, _ = _run(llama, num_blocks=6)
    assert (without.stats().host_blocks_total, without.stats().offloads) == (0, 0)


def test_scheduler_type_acts(llama: LoadedModel) -> None:
    kinds = {
        name: type(_run(llama, scheduler_type=name)[0]._loop._core.scheduler).__name__
        for name in ("fifo", "prefill_first", "priority", "fair")
    }
    assert kinds == {
        "fifo": "FIFOScheduler",
        "prefill_first": "PrefillFirstScheduler",
        "priority": "PriorityScheduler",
        "fair": "FairScheduler",
    }
    with pytest.raises(ConfigError, match="scheduler_type"):
        _run(llama, scheduler_type="lifo")


@pytest.mark.parametrize("name", ["fifo", "prefill_first", "priority", "fair"])
def test_priorities_are_heeded_or_refused(llama: LoadedModel, name: str) -> None:
    config = ContinuousBatchingConfig(block_size=8, num_blocks=64, scheduler_type=name)
    manager = llama.init_continuous_batching(None, config)
    manager.start()
    try:
        manager.add_request([5, 6], max_new_tokens=1, priority=0)
        if name in ("priority", "fair"):
            manager.add_request([5, 6], max_new_tokens=1, priority=1)
        else:
            with pytest.raises(UnsupportedFeatureError, match="priority: "):
                manager.add_request([5, 6], max_new_tokens=1, priority=1)
    finally:
        manager.stop()


def test_target_step_time_acts(llama: LoadedModel) -> None:
    def target_s(**options: Any) -> float | None:
        pace = _run(llama, **options)[0]._loop._core.scheduler.pace
        return None if pace is None else pace.target_s

    assert target_s() is None
    assert target_s(target_step_time=0) is None
    assert target_s(target_step_time=0.5) == 0.5
    assert target_s(target_step_time=None) == CPU_TARGET_STEP_TIME


def test_safety_margin_acts(llama: LoadedModel) -> None:
    _, eager = _run(llama, num_blocks=16, safety_margin=0.0)
    _, careful = _run(llama, num_blocks=16, safety_margin=0.7)
    assert max(requests for requests, _ in careful) < max(requests for requests, _ in eager)


def test_graphs_need_a_device_that_has_them(llama: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="use_cuda_graph"):
        _run(llama, use_cuda_graph=True)


def test_seed_acts(llama: LoadedModel) -> None:
    def tokens(seed: int | None) -> list[list[int]]:
        manager = llama.init_continuous_batching(
            GenerationConfig(do_sample=True, temperature=1.0),
            ContinuousBatchingConfig(block_size=8, num_blocks=64, seed=seed),
        )
        manager.start()
        names = [manager.add_request([5, 6], max_new_tokens=12) for _ in range(2)]
        manager.stop()
        outputs = {output.request_id: output.generated_tokens for output in manager}
        return [outputs[name] for name in names]

    first = tokens(3)
    assert first[0] != first[1], "requests have seeds of their own"
    assert tokens(3) == first
    assert tokens(4) != first


PLACE = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def test_where_torchrun_put_this_process() -> None:
    assert RankPlace.read(PLACE) == RankPlace(3, 4, 1, 2)
    assert RankPlace.read({"RANK": "0", "WORLD_SIZE": "2"}) == RankPlace(0, 2, 0, 2)
    assert RankPlace.read({}) is None
    assert RankPlace.read({"LOCAL_RANK": "1"}) is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("RANK", "4"),
        ("RANK", "-1"),
        ("RANK", "first"),
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", ""),
        ("LOCAL_RANK", "2"),
        ("LOCAL_WORLD_SIZE", "0"),
    ],
)
def test_a_place_that_cannot_be(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: is "):
        RankPlace.read({**PLACE, name: text})


def test_what_the_operator_says_of_spinning_threads_stays() -> None:
    assert engine_environ({"A": "b"}) == {"A": "b", "GOMP_SPINCOUNT": "10000"}
    for said in ({"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}):
        assert engine_environ(said) == said
