"""Captured steps: replayed operation by operation, they give what `model.generate` gives."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from functools import cache

import pytest
import torch

from engine.api.offline import LoadedModel
from engine.contract.config import ContinuousBatchingConfig
from engine.contract.errors import ConfigError
from engine.contract.startup import Stages
from engine.loading.running import LoadedRunner, build_runner
from engine.runner.buckets import decode_sizes, mixed_sizes, request_sizes
from engine.runner.captured import planned_shapes
from engine.runner.model_runner import StepKind
from engine.runner.runner_options import RunnerOptions, StepPath
from tests.engine.runner.fake_attention import CapturableAttention
from tests.engine.runner.fake_graphs import RecordedGraph, RecordingBackend
from tests.engine.runner.steps import build, make_core, make_request, run, tokens_of
from tests.tiny_models import (
    CONTEXT,
    FAMILIES,
    WINDOW,
    greedy_reference,
    make_model,
    make_prompts,
)

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
        max_batch_tokens=40,
        max_requests_per_batch=6,
        q_padding_interval_size=8,
    )
    captured = len(graphs.graphs)
    assert generate(built) == reference(family)
    counts = replayed(built)
    assert counts[StepPath.DECODE] > 5
    assert counts[StepPath.VARLEN] > 3
    assert counts.total() == built.runner.steps.total()
    assert sum(graph.replays for graph in graphs.graphs) == counts.total()
    assert len(graphs.graphs) == captured, "nothing is captured while requests run"


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


def test_both_paths_are_captured_by_default(loaded: Callable[[str], LoadedModel]) -> None:
    built = build(loaded("llama"), graphs=RecordingBackend())
    assert generate(built) == reference("llama")
    assert built.runner.steps == Counter(
        {StepKind(StepPath.VARLEN, True): 1, StepKind(StepPath.DECODE, True): NEW - 1}
    )
    off = build(loaded("llama"), graphs=RecordingBackend(), use_cuda_graph=False)
    assert generate(off) == reference("llama")
    assert not replayed(off)


def test_a_graph_serves_any_context(loaded: Callable[[str], LoadedModel]) -> None:
    """One request, then a longer one in the same graph, up to the longest that there may be."""
    graphs = RecordingBackend()
    built = build(loaded("llama"), graphs=graphs, max_requests_per_batch=1, max_batch_tokens=32)
    for prompt in make_prompts((3, 200, CONTEXT - NEW - 1)):
        tokens = tokens_of(run(make_core(built), [make_request("a", prompt, NEW)])["a"])
        assert tokens == greedy_reference(loaded("llama").model, prompt, NEW)
    steps, draws = graphs.graphs[:2], graphs.graphs[2:]
    assert len(draws) == 2, "behind one of decode steps, one of mixed ones"
    assert all(graph.replays > 10 for graph in steps)
    assert not any(graph.replays for graph in draws)
    assert replayed(built).total() == built.runner.steps.total()


def test_graphs_share_their_inputs_and_the_place_of_their_logits(
    loaded: Callable[[str], LoadedModel],
) -> None:
    built = build(loaded("llama"), graphs=RecordingBackend(), max_requests_per_batch=6)
    captured = built.runner._captured
    assert captured is not None
    with torch.inference_mode():
        places = {step.graph.replay().data_ptr() for step in captured.steps}
    inputs = {step.inputs.positions.untyped_storage().data_ptr() for step in captured.steps}
    assert len(captured.steps) > 5
    assert (len(places), len(inputs)) == (1, 1)


def test_fewer_graphs_than_shapes(loaded: Callable[[str], LoadedModel]) -> None:
    """The largest of each path are kept: other steps are padded to them."""
    graphs = RecordingBackend()
    built = build(
        loaded("llama"),
        graphs=graphs,
        max_cached_graphs=2,
        max_batch_tokens=40,
        max_requests_per_batch=5,
    )
    assert generate(built) == reference("llama")
    assert built.runner._captured is not None
    assert len(built.runner._captured.steps) == 2
    assert replayed(built).total() == built.runner.steps.total()


def test_what_cannot_be_captured_runs_as_it_comes(
    loaded: Callable[[str], LoadedModel], caplog: pytest.LogCaptureFixture
) -> None:
    graphs = RecordingBackend()
    graphs.fail = RuntimeError("operation not permitted when stream is capturing\nand more")
    built = build(loaded("llama"), graphs=graphs)
    assert generate(built) == reference("llama")
    assert not replayed(built)
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 2, "one for each path"
    assert all("(operation not permitted when stream is capturing)" in line for line in warnings)


class Scarce(RecordingBackend):
    """Has no memory for the first captures, which are the largest."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.failures = failures

    def capture(self, run: Callable[[], torch.Tensor]) -> RecordedGraph:
        if self.failures:
            self.failures -= 1
            raise torch.OutOfMemoryError("no memory")
        return super().capture(run)


def test_a_shape_without_memory_runs_as_it_comes(loaded: Callable[[str], LoadedModel]) -> None:
    """And the smaller ones are replayed."""
    options = {"use_cuda_graph": (False, True), "max_requests_per_batch": 2}
    built = build(loaded("llama"), graphs=Scarce(1), **options)
    prompt = make_prompts((5,))[0]
    expected = greedy_reference(loaded("llama").model, prompt, 4)
    two = run(make_core(built), [make_request(name, prompt, 4) for name in "ab"])
    assert [tokens_of(two[name]) for name in "ab"] == [expected] * 2
    assert not replayed(built)
    assert tokens_of(run(make_core(built), [make_request("c", prompt, 4)])["c"]) == expected
    assert replayed(built)[StepPath.DECODE] == 3


def test_what_no_graph_has_room_for_runs_as_it_comes(
    loaded: Callable[[str], LoadedModel],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """More tokens, or wider block tables; it is told once."""
    caplog.set_level("INFO", logger="engine.runner.captured")
    monkeypatch.setattr("engine.runner.captured.MOST_MIXED_TOKENS", 64)
    monkeypatch.setattr("engine.runner.captured._MOST_TABLE_ENTRIES", 8 * 8)
    built = build(loaded("llama"), graphs=RecordingBackend(), max_requests_per_batch=8)
    assert generate(built) == reference("llama")
    assert not replayed(built)[StepPath.VARLEN]
    assert "is computed without a graph, as are all" in caplog.text
    told = caplog.text.count("without a graph")
    built.runner.steps.clear()
    run(make_core(built), [make_request("a", make_prompts((30,))[0], 3)])
    assert replayed(built).total() == built.runner.steps.total() == 3
    assert caplog.text.count("without a graph") == told <= 2


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


def test_warmup_captures_all_shapes(loaded: Callable[[str], LoadedModel]) -> None:
    graphs = RecordingBackend()
    lines: list[str] = []
    config = ContinuousBatchingConfig(
        block_size=8, num_blocks=128, max_requests_per_batch=16, max_batch_tokens=200
    )
    stages = Stages(lines.append)
    verified = dataclasses.replace(loaded("llama")._verified, backend=CapturableAttention())
    built = build_runner(verified, config, stages, graphs=graphs)
    keys = [cache.keys.clone() for cache in built.runner.kv.caches.values()]
    built.runner.warmup()
    # 1, 2, 4, 8 and 16 decodes; 64, 128 and 256 tokens of 4 or 16 requests; two draws of each size.
    assert len(graphs.graphs) == 5 + 3 * 2 + 2 * 5
    assert "captured 11 shapes of steps in" in lines[-1]
    assert [phase for phase, _ in stages.end()] == ["cache", "capture"]
    for before, cache_ in zip(keys, built.runner.kv.caches.values(), strict=True):
        assert torch.equal(before[8:], cache_.keys[8:]), "the null block alone was touched"
    built.runner.warmup()
    assert generate(built) == reference("llama")
    assert len(graphs.graphs) == 21, "nothing was left to capture"


BOTH_PATHS = frozenset(StepPath)


def test_planned_shapes() -> None:
    options = RunnerOptions(
        captured_paths=BOTH_PATHS,
        max_decode_blocks=640,
        max_blocks=640,
        max_tokens=8192,
        max_requests=256,
    )
    shapes = planned_shapes(options, 64)
    decode = [shape.tokens for shape in shapes if shape.is_decode]
    mixed = [(shape.tokens, shape.requests) for shape in shapes if not shape.is_decode]
    assert decode == [256, 224, 192, 160, 128, 96, 64, 32, 24, 16, 8, 4, 2, 1]
    assert mixed == [
        *((tokens, requests) for tokens in (1024, 512, 256) for requests in (256, 64, 16, 4)),
        *((tokens, requests) for tokens in (128, 64) for requests in (64, 16, 4)),
    ]
    order = [(shape.tokens, shape.requests) for shape in shapes]
    assert order == sorted(order, reverse=True), "the largest first"
    assert all(shape.requests == shape.tokens for shape in shapes if shape.is_decode)
    assert {shape.blocks for shape in shapes} == {640}


@pytest.mark.parametrize("limit", range(1, 33))
def test_planned_shapes_keep_to_max_graphs(limit: int) -> None:
    options = RunnerOptions(
        captured_paths=BOTH_PATHS,
        max_decode_blocks=1,
        max_tokens=8192,
        max_requests=256,
        max_graphs=limit,
    )
    shapes = planned_shapes(options, 64)
    assert limit // 2 <= len(shapes) <= limit
    assert next(shape.tokens for shape in shapes if shape.is_decode) == 256
    if limit > 1:
        assert (shapes[0].tokens, shapes[0].requests) == (1024, 256)


def test_wide_block_tables_are_bounded() -> None:
    options = RunnerOptions(
        captured_paths=frozenset({StepPath.DECODE}),
        max_decode_blocks=1 << 16,
        max_blocks=1 << 16,
        max_requests=64,
    )
    for shape in planned_shapes(options, 16):
        assert shape.blocks == min(1 << 16, (1 << 20) // shape.requests)


def test_warmup_captures_no_decode_steps_where_that_path_is_off(
    loaded: Callable[[str], LoadedModel],
) -> None:
    built = build(loaded("llama"), graphs=RecordingBackend(), max_blocks_per_request=0)
    captured = built.runner._captured
    assert captured is not None
    assert {step.inputs.shape.is_decode for step in captured.steps} == {False}


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
    assert list(decode_sizes(0).up_to(70)) == [1, 2, 4, 8, 16, 24, 32, 64, 96]
    assert list(decode_sizes(24).up_to(50)) == [24, 48, 72]
    assert list(decode_sizes(5).up_to(0)) == []
    assert list(mixed_sizes(0).up_to(1024)) == [64, 128, 256, 512, 1024]
    assert list(mixed_sizes(0).up_to(65)) == [64, 128]
    assert [decode_sizes(24).at_most(size) for size in (-1, 23, 24, 50)] == [0, 0, 24, 48]
    at_most = mixed_sizes(0).at_most
    assert [at_most(size) for size in (0, 63, 64, 127, 1023, 1024)] == [0, 0, 64, 64, 512, 1024]
    assert at_most(1500) == mixed_sizes(0).at_least(1500) == 1500, "beyond it, nothing is padded"
    assert [list(request_sizes(n)) for n in (1, 15, 64, 256)] == [
        [1], [15], [64, 16, 4], [256, 64, 16, 4],
    ]  # fmt: skip


@pytest.mark.parametrize("inference", [True, False])
def test_a_capture_refuses_what_cuda_refuses(inference: bool) -> None:
    """The stand-in for CUDA graphs itself."""
    with torch.inference_mode(inference):
        place = torch.tensor([1.0, 2.0])
        graph = RecordingBackend().capture(lambda: (place * 2).add_(1.0).sum())
        place.fill_(5.0)
        assert graph.replay().item() == 22.0
        for look in (lambda: place * place.sum().item(), lambda: torch.nonzero(place)):
            with pytest.raises(RuntimeError, match="not permitted"):
                RecordingBackend().capture(look)
