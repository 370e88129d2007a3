"""Tokens that captured work chooses and carries: those of the sampler, whoever comes and goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.api.offline import LoadedModel
from engine.contract.sampling_params import LogprobParams, SamplingParams
from engine.loading.profiling import measure_graphs
from engine.loading.running import LoadedRunner
from engine.runner import captured_choices
from engine.runner.captured import CapturedStep, CapturedSteps
from engine.runner.model_runner import ModelRunner
from engine.runner.static_inputs import StaticInputs
from engine.sampling.plain import PlainKind
from tests.engine.runner.fake_device import LateDevice
from tests.engine.runner.fake_graphs import RecordedGraph, RecordingBackend
from tests.engine.runner.steps import build, make_core, make_request
from tests.tiny_models import make_prompts

OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.2, "seed": 1},
    {"temperature": 0.9, "top_k": 9, "seed": 2},
    {"temperature": 1.5, "top_p": 0.8, "seed": 3},
    {"temperature": 1.5, "min_p": 0.05, "top_k": 40, "top_p": 0.9, "seed": 4},
    {"temperature": 0.0},
)
NEEDS_MORE: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "typical_p": 0.7, "seed": 5},
    {"temperature": 1.0, "seed": 6, "no_repeat_ngram_size": 2},
)


@pytest.fixture
def loaded(loaded_torch: Callable[[str], LoadedModel]) -> LoadedModel:
    return loaded_torch("llama")


class Counting:
    """Counts the steps whose tokens the sampler was asked for."""

    def __init__(self, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        begin = runner._sampler.begin

        def counted(*args: Any) -> Any:
            self.calls += 1
            return begin(*args)

        monkeypatch.setattr(runner._sampler, "begin", counted)


def traffic(
    built: LoadedRunner,
    *,
    runner: ModelRunner | None = None,
    overlap: bool = False,
    extra: tuple[dict[str, Any], ...] = (),
    **options: Any,
) -> list[list[int]]:
    """A request joins every second step and stays for a while: their tokens."""
    core = make_core(built, runner=runner, overlap=overlap)
    wanted = (*OPTIONS, *extra)
    prompts = make_prompts((20, 9, 31, 3, 14, 30, 11, 8, 25)[: len(wanted)])
    outputs: dict[str, list[int]] = {}
    for index, (one, prompt) in enumerate(zip(wanted, prompts, strict=True)):
        name = str(index)
        core.add(
            make_request(name, prompt, 6 + index % 4, sampling=SamplingParams(**one), **options),
            0.0,
        )
        outputs[name] = []
        for _ in range(2):
            for output in core.step().outputs:
                outputs[output.request_id] += output.token_ids
    while core.has_work:
        for output in core.step().outputs:
            assert output.finish is None or output.finish.failure is None
            outputs[output.request_id] += output.token_ids
    return list(outputs.values())


def late(built: LoadedRunner) -> ModelRunner:
    """The built runner's parts around a device that lags."""
    runner = ModelRunner(
        built.runner._forward,
        sampler=built.runner._sampler,
        options=built.runner.options,
        device=LateDevice(),
        graphs=RecordingBackend(),
    )
    runner.warmup()
    runner.steps.clear()
    return runner


def replays(runner: ModelRunner) -> dict[PlainKind, int]:
    captured = runner._captured
    assert captured is not None
    draws = captured.steps[0].choices.draws
    return {kind: sum(graph.replays for _, graph in found) for kind, found in draws.items()}  # type: ignore[attr-defined]  # of the stand-in


def test_no_step_of_plain_requests_is_left_to_the_sampler(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy, drawn and filtered rows in one step; rows join and leave while two are under way."""
    expected = traffic(build(loaded))
    built = build(loaded, graphs=RecordingBackend(), use_async_batching=True)
    counting = Counting(built.runner, monkeypatch)
    assert traffic(built) == expected
    assert traffic(built, overlap=True) == expected
    runner = late(built)
    assert traffic(built, runner=runner, overlap=True) == expected
    assert counting.calls == 2, "the warm-up's own steps, before anything is captured"
    found = replays(runner)
    assert found[PlainKind.DRAWN] > 0
    assert found[PlainKind.FILTERED] > 3
    steps = runner.steps.total()
    assert sum(found.values()) < steps, "greedy steps need no draw"


def test_steps_between_them_are_the_sampler_s(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens go from one kind of step to the other, and none is changed by it."""
    expected = traffic(build(loaded), extra=NEEDS_MORE)
    built = build(loaded, graphs=RecordingBackend(), use_async_batching=True)
    counting = Counting(built.runner, monkeypatch)
    assert traffic(built, extra=NEEDS_MORE, overlap=True) == expected
    assert 0 < counting.calls < built.runner.steps.total()
    assert traffic(built, runner=late(built), extra=NEEDS_MORE, overlap=True) == expected


@pytest.mark.parametrize("options", [{"n": 3}, {"logprobs": LogprobParams(top_n=2)}])
def test_several_choices_are_captured_and_logprobs_are_not(
    loaded: LoadedModel, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"max_requests_per_batch": 12}
    expected = traffic(build(loaded, **sizes), **options)
    built = build(loaded, graphs=RecordingBackend(), **sizes)
    counting = Counting(built.runner, monkeypatch)
    assert traffic(built, **options) == expected
    steps = built.runner.steps
    assert all(kind.is_replayed for kind in steps)
    assert counting.calls == (0 if "n" in options else steps.total())


# ---- what is captured --------------------------------------------------------------------------


def captured_of(built: LoadedRunner) -> CapturedSteps:
    found = built.runner._captured
    assert found is not None
    return found


def test_draws_have_the_numbers_of_requests_of_steps(loaded: LoadedModel) -> None:
    graphs = RecordingBackend()
    built = build(loaded, graphs=graphs, max_requests_per_batch=16, max_batch_tokens=200)
    steps = captured_of(built).steps
    draws = steps[0].choices.draws
    rows = sorted({step.inputs.shape.requests for step in steps})
    assert rows == [1, 2, 4, 8, 16]
    assert {kind: [size for size, _ in found] for kind, found in draws.items()} == {
        PlainKind.DRAWN: rows,
        PlainKind.FILTERED: rows,
    }
    assert len(graphs.graphs) == len(steps) + 2 * len(rows)
    assert all(step.choices is steps[0].choices for step in steps)


def test_draws_are_measured_before_the_cache_is_sized(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[tuple[PlainKind, int]] = []
    is_measuring = False

    def seen(kind: PlainKind, logits: torch.Tensor, *rest: Any) -> None:
        assert is_measuring
        measured.append((kind, len(logits)))

    class Memory:
        def available(self) -> int:
            return 1 << 30

        def peak(self, run: Callable[[], None]) -> int:
            nonlocal is_measuring
            is_measuring = True
            run()
            is_measuring = False
            return 7

    built = build(loaded, graphs=RecordingBackend(), max_requests_per_batch=16)
    runner, verified = built.runner, loaded._verified
    monkeypatch.setattr(captured_choices, "choose_draws", lambda logits: seen)
    needed = measure_graphs(
        Memory(),
        *(verified.model, runner._forward.backend, verified.probe, built.groups),
        device=runner.kv.device,
        options=runner.options,
        block_size=runner.kv.block_size,
    )
    assert needed == 7
    assert set(measured) == {(PlainKind.DRAWN, 16), (PlainKind.FILTERED, 16)}


class Scarce(RecordingBackend):
    """Has no memory for a few captures behind some."""

    def __init__(self, after: int, failures: int) -> None:
        super().__init__()
        self.left = range(after, after + failures)
        self.calls = 0

    def capture(self, run: Callable[[], torch.Tensor]) -> RecordedGraph:
        self.calls += 1
        if self.calls - 1 in self.left:
            raise torch.OutOfMemoryError("no memory")
        return super().capture(run)


def test_draws_without_memory_are_the_sampler_s(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of the most rows of the first kind; all others are replayed."""
    sizes = {"max_requests_per_batch": 4, "max_batch_tokens": 64}
    expected = traffic(build(loaded, **sizes))
    whole = captured_of(build(loaded, graphs=RecordingBackend(), **sizes))
    built = build(loaded, graphs=Scarce(len(whole.steps), 1), **sizes)
    draws = captured_of(built).steps[0].choices.draws
    assert [rows for rows, _ in draws[PlainKind.DRAWN]] == [1, 2]
    assert [rows for rows, _ in draws[PlainKind.FILTERED]] == [1, 2, 4]
    assert "not enough memory to capture how 4 tokens are drawn" in caplog.text
    assert traffic(built, **{}) == expected


def test_without_memory_for_any_draw_all_are_the_sampler_s(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def scarce(logits: torch.Tensor) -> Any:
        raise torch.OutOfMemoryError("no memory")

    expected = traffic(build(loaded))
    monkeypatch.setattr(captured_choices, "choose_draws", scarce)
    built = build(loaded, graphs=RecordingBackend())
    assert traffic(built) == expected
    assert "not enough memory to capture how tokens are drawn" in caplog.text
    assert captured_of(built).steps[0].choices.draws == {
        PlainKind.DRAWN: [],
        PlainKind.FILTERED: [],
    }


# ---- planted faults ----------------------------------------------------------------------------


def test_a_choice_that_looks_at_numbers_is_not_captured(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is found at warm-up and said; tokens are then chosen as they come, and are right."""
    draw = captured_choices.choose_draws(torch.empty(1, 1))

    def looks(kind: Any, logits: torch.Tensor, numbers: torch.Tensor, *rest: Any) -> None:
        if kind is PlainKind.FILTERED and (numbers[:, 2] > 5).any().item():
            return
        draw(kind, logits, numbers, *rest)

    expected = traffic(build(loaded))
    monkeypatch.setattr(captured_choices, "choose_draws", lambda logits: looks)
    built = build(loaded, graphs=RecordingBackend())
    assert traffic(built) == expected
    assert "filtered tokens are chosen as they come: that cannot be captured (op" in caplog.text
    found = replays(built.runner)
    assert found[PlainKind.FILTERED] == 0
    assert found[PlainKind.DRAWN] > 0


def stale_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers are written when the number of rows changes."""
    fill, last = StaticInputs.fill, [0]

    def fills(self: StaticInputs, inputs: Any, buffers: int, carried: Any, choice: Any) -> None:
        count = len(inputs.sampling)
        fill(self, inputs, buffers, carried, choice if count != last[0] else None)
        last[0] = count

    monkeypatch.setattr(StaticInputs, "fill", fills)


def stale_carry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are carried to the rows that they came from."""
    run = CapturedStep.run

    def runs(self: CapturedStep, inputs: Any, buffers: int, carried: Any, choice: Any) -> Any:
        return run(self, inputs, buffers, (carried[0], carried[0]), choice)

    monkeypatch.setattr(CapturedStep, "run", runs)


def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the sampler chose is not put where captured steps look."""
    monkeypatch.setattr(CapturedSteps, "keep", lambda self, token_ids: None)


@pytest.mark.parametrize("plant", [stale_numbers, stale_carry, forgotten])
def test_what_is_stale_would_be_seen(
    plant: Callable[[pytest.MonkeyPatch], None],
    loaded: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = traffic(build(loaded), extra=NEEDS_MORE)
    built = build(loaded, graphs=RecordingBackend(), use_async_batching=True)
    assert traffic(built, extra=NEEDS_MORE, overlap=True) == expected
    plant(monkeypatch)
    assert traffic(built, extra=NEEDS_MORE, overlap=True) != expected
