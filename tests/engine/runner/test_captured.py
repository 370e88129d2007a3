"""Captured steps: replayed operation by operation, they give what `model.generate` gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache

import pytest
import torch

from engine.api.offline import LoadedModel
from engine.config import ContinuousBatchingConfig
from engine.errors import ConfigError
from engine.loading.loader import LoadedRunner, build_runner
from engine.runner.buckets import context_sizes, token_sizes
from engine.runner.model_runner import StepKind
from engine.runner.runner_options import StepPath
from engine.startup import Stages
from tests.engine.runner.fake_graphs import RecordingBackend
from tests.engine.runner.steps import build, make_core, make_request, run, tokens_of
from tests.tiny_models import FAMILIES, WINDOW, greedy_reference, make_model, make_prompts

LENGTHS = (1, 2, 31, WINDOW + 40, 100)
NEW = 12
BOTH = (True, True)


@pytest.fixture
def loaded(loaded_torch: Callable[[str], LoadedModel]) -> Callable[[str], LoadedModel]:
    return loaded_torch


@cache
def reference(family: str) -> list[list[int]]:
    model = make_model(FAMILIES[family]())
    return [greedy_reference(model, prompt, NEW) for prompt in make_prompts(LENGTHS)]


def generate(built: LoadedRunner) -> list[list[int]]:
    requests = [make_request(str(i), p, NEW) for i, p in enumerate(make_prompts(LENGTHS))]
    outputs = run(make_core(built), requests)
    return [tokens_of(outputs[request.request_id]) for request in requests]


def replayed(built: LoadedRunner) -> Counter[StepPath]:
    return Counter({kind.path: n for kind, n in built.runner.steps.items() if kind.is_replayed})


@pytest.mark.parametrize(
    "family", ["llama", "gemma2", "gemma3", "gpt_oss", "mistral", "mixtral", "deepseek_v3"]
)
def test_captured_steps_equal_generate(loaded: Callable[[str], LoadedModel], family: str) -> None:
    """Prompts in chunks, so that one-token and longer parts mix; every step is replayed."""
    graphs = RecordingBackend()
    built = build(
        loaded(family),
        graphs=graphs,
        use_cuda_graph=BOTH,
        max_batch_tokens=40,
        max_requests_per_batch=6,
        q_padding_interval_size=8,
        kv_padding_interval_size=48,
    )
    assert generate(built) == reference(family)
    counts = replayed(built)
    assert counts[StepPath.DECODE] > 5
    assert counts[StepPath.VARLEN] > 3
    assert counts.total() == built.runner.steps.total()
    assert sum(graph.replays for graph in graphs.graphs) == counts.total()
    assert len(graphs.graphs) < counts.total(), "graphs are used again"


@pytest.mark.parametrize("block_size", [4, 16, 256])
def test_default_sizes_and_preemption(
    loaded: Callable[[str], LoadedModel], block_size: int
) -> None:
    built = build(
        loaded("gemma3"),
        graphs=RecordingBackend(),
        use_cuda_graph=BOTH,
        block_size=block_size,
        num_blocks=-(-112 // block_size),
        max_requests_per_batch=5,
    )
    assert generate(built) == reference("gemma3")
    assert replayed(built).total() == built.runner.steps.total()


def test_by_default_the_decode_path_alone_is_captured(
    loaded: Callable[[str], LoadedModel],
) -> None:
    built = build(loaded("llama"), graphs=RecordingBackend())
    assert generate(built) == reference("llama")
    assert built.runner.steps == Counter(
        {StepKind(StepPath.VARLEN, False): 1, StepKind(StepPath.DECODE, True): NEW - 1}
    )
    off = build(loaded("llama"), graphs=RecordingBackend(), use_cuda_graph=False)
    assert generate(off) == reference("llama")
    assert not replayed(off)


def test_max_cached_graphs(loaded: Callable[[str], LoadedModel]) -> None:
    """One graph is kept at a time: it is captured anew whenever the shape changes."""
    graphs = RecordingBackend()
    built = build(
        loaded("llama"),
        graphs=graphs,
        use_cuda_graph=BOTH,
        max_cached_graphs=1,
        max_batch_tokens=40,
        max_requests_per_batch=5,
    )
    assert generate(built) == reference("llama")
    captured = built.runner._captured
    assert captured is not None
    assert len(captured.cache) == 1
    assert len(graphs.graphs) > 3


def test_what_cannot_be_captured_runs_as_it_comes(
    loaded: Callable[[str], LoadedModel], caplog: pytest.LogCaptureFixture
) -> None:
    graphs = RecordingBackend()
    graphs.fail = RuntimeError("operation not permitted when stream is capturing\nand more")
    built = build(loaded("llama"), graphs=graphs, use_cuda_graph=BOTH)
    assert generate(built) == reference("llama")
    assert not replayed(built)
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 2, "one for each path"
    assert all("(operation not permitted when stream is capturing)" in line for line in warnings)


def test_a_shape_without_memory_runs_as_it_comes(
    loaded: Callable[[str], LoadedModel],
) -> None:
    graphs = RecordingBackend()
    graphs.fail = torch.OutOfMemoryError("no memory")
    built = build(loaded("llama"), graphs=graphs)
    core = make_core(built)
    first = make_prompts((5,))[0]
    expected = greedy_reference(loaded("llama").model, first, 4)
    assert tokens_of(run(core, [make_request("a", first, 4)])["a"]) == expected
    assert not replayed(built)
    graphs.fail = None
    assert tokens_of(run(core, [make_request("b", first, 4)])["b"]) == expected
    assert not replayed(built), "it is not tried again"
    two = run(core, [make_request(name, first, 4) for name in "cd"])
    assert [tokens_of(two[name]) for name in "cd"] == [expected] * 2
    assert replayed(built)[StepPath.DECODE] == 3, "but another shape is"


def test_steps_beyond_the_limits_run_as_they_come(
    loaded: Callable[[str], LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.attention.torch_static._MAX_DECODE_CONTEXT", 8 * 64)
    built = build(loaded("llama"), graphs=RecordingBackend(), kv_padding_interval_size=64)
    assert generate(built) == reference("llama")
    assert not replayed(built)
    run(make_core(built), [make_request("a", make_prompts((30,))[0], 3)])
    assert replayed(built)[StepPath.DECODE] == 2


def test_prompt_logprobs_are_not_lost(loaded: Callable[[str], LoadedModel]) -> None:
    prompts = make_prompts((20, 1))
    found = []
    for graphs in (None, RecordingBackend()):
        built = build(loaded("llama"), graphs=graphs, use_cuda_graph=BOTH if graphs else None)
        core = make_core(built)
        requests = [make_request(str(i), p, 3, prompt_logprobs=2) for i, p in enumerate(prompts)]
        outputs = run(core, requests)
        found.append([outputs[str(i)][0].prompt_logprobs for i in range(2)])
        assert bool(replayed(built)) == (graphs is not None)
    assert found[0] == found[1]
    assert len(found[0][0] or ()) == 19


# ---- warm-up and options ---------------------------------------------------------------------


def test_warmup_captures_the_decode_shapes(loaded: Callable[[str], LoadedModel]) -> None:
    graphs = RecordingBackend()
    lines: list[str] = []
    config = ContinuousBatchingConfig(block_size=8, num_blocks=128, max_requests_per_batch=6)
    stages = Stages(lines.append)
    built = build_runner(loaded("llama")._verified, config, stages, graphs=graphs)
    keys = [cache.keys.clone() for cache in built.runner.kv.caches]
    built.runner.warmup()
    # 1, 2, 4 and 8 tokens, with contexts of 256 and, as far as a request can be, 512.
    assert len(graphs.graphs) == 4 * 2
    assert "captured 8 shapes of decode steps in" in lines[-1]
    assert [phase for phase, _ in stages.end()] == ["cache", "capture"]
    for before, cache_ in zip(keys, built.runner.kv.caches, strict=True):
        assert torch.equal(before[8:], cache_.keys[8:]), "the null block alone was touched"
    assert generate(built) == reference("llama")
    assert len(graphs.graphs) == 4 * 2, "nothing was left to capture"


def test_warmup_keeps_to_max_cached_graphs(loaded: Callable[[str], LoadedModel]) -> None:
    graphs = RecordingBackend()
    built = build(loaded("llama"), graphs=graphs, max_cached_graphs=3, max_requests_per_batch=16)
    built.runner.warmup()
    assert len(graphs.graphs) == 3


def test_warmup_captures_nothing_where_the_decode_path_is_off(
    loaded: Callable[[str], LoadedModel],
) -> None:
    graphs = RecordingBackend()
    built = build(loaded("llama"), graphs=graphs, max_blocks_per_request=0)
    built.runner.warmup()
    assert graphs.graphs == []


@pytest.mark.parametrize("asked", [True, (True, False), (False, True)])
def test_graphs_are_refused_without_a_cuda_device(
    loaded: Callable[[str], LoadedModel], asked: bool | tuple[bool, bool]
) -> None:
    with pytest.raises(ConfigError, match=r"use_cuda_graph: .* is on cpu: .* set it to False"):
        build(loaded("llama"), use_cuda_graph=asked)


@pytest.mark.parametrize("asked", [None, False, (False, False)])
def test_without_graphs_nothing_is_refused(
    loaded: Callable[[str], LoadedModel], asked: bool | tuple[bool, bool] | None
) -> None:
    assert build(loaded("llama"), use_cuda_graph=asked).runner._captured is None


def test_sizes() -> None:
    assert list(token_sizes(0).up_to(150)) == [1, 2, 4, 8, 16, 32, 64, 128, 192]
    assert list(token_sizes(24).up_to(50)) == [24, 48, 72]
    assert list(context_sizes(0).up_to(8193)) == [256, 1024, 4096, 8192, 12288]
    assert list(context_sizes(300).up_to(300)) == [300]
    assert list(token_sizes(5).up_to(0)) == []
    assert [token_sizes(0).at_most(size) for size in (0, 1, 7, 64, 127, 200)] == [
        0, 1, 4, 64, 64, 192,
    ]  # fmt: skip
    assert [token_sizes(24).at_most(size) for size in (-1, 23, 24, 50)] == [0, 0, 24, 48]


def test_a_capture_refuses_what_cuda_refuses() -> None:
    """The stand-in for CUDA graphs itself."""
    place = torch.tensor([1.0, 2.0])
    graph = RecordingBackend().capture(lambda: (place * 2).add_(1.0).sum())
    place.fill_(5.0)
    assert graph.replay().item() == 22.0
    for look in (lambda: place * place.sum().item(), lambda: torch.nonzero(place)):
        with pytest.raises(RuntimeError, match="not permitted"):
            RecordingBackend().capture(look)
