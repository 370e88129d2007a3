"""Two sets of buffers: a step is launched before the last tokens are here; nothing changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine.api.offline import LoadedModel
from engine.contract.outputs import FinishReason, RequestOutput
from engine.contract.request import LogprobParams
from engine.contract.sampling_params import SamplingParams, StopParams
from engine.contract.types import GroupId, RequestKey, TokenId
from engine.kv_cache.copies import BlockCopy, StepCopies
from engine.loading.running import LoadedRunner
from engine.runner.launched import InputBuffers
from engine.runner.model_runner import ModelRunner
from engine.scheduler.runner_protocol import INVALID_TOKEN
from engine.scheduler.scheduled_batch import ScheduledBatch
from tests.engine.runner.fake_device import LateDevice
from tests.engine.runner.fake_graphs import RecordingBackend
from tests.engine.runner.steps import build, make_core, make_request, run, tokens_of
from tests.tiny_models import FAMILIES, VOCAB, greedy_reference, make_model, make_prompts

LENGTHS = (1, 2, 31, 64, 100)
NEW = 12


@pytest.fixture
def loaded(loaded_torch: Callable[[str], LoadedModel]) -> Callable[[str], LoadedModel]:
    return loaded_torch


def with_device(built: LoadedRunner, device: LateDevice, **options: Any) -> ModelRunner:
    """The built runner's parts around another device."""
    runner = built.runner
    other = ModelRunner(
        runner._forward,
        sampler=runner._sampler,
        options=runner.options,
        device=device,
        **options,
    )
    if options.get("graphs") is not None:
        other.warmup()
    return other


OF_HISTORY = SamplingParams(
    temperature=1.3,
    repetition_penalty=1.4,
    frequency_penalty=0.3,
    no_repeat_ngram_size=2,
    seed=77,
)


def sampled(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.3, top_p=0.95, seed=seed)


def generate(
    built: LoadedRunner, runner: ModelRunner | None = None, *, overlap: bool, **options: Any
) -> list[list[int]]:
    """Greedy requests, then the same prompts sampled, some of them with penalties; more requests
    than fit at once.
    """
    core = make_core(built, runner=runner, overlap=overlap)
    prompts = make_prompts(LENGTHS)
    requests = [make_request(f"g{i}", p, NEW, **options) for i, p in enumerate(prompts)]
    requests += [
        make_request(f"s{i}", p, NEW, sampling=sampled(i), **options) for i, p in enumerate(prompts)
    ]
    requests += [
        make_request(f"h{i}", p, NEW, sampling=OF_HISTORY, **options)
        for i, p in enumerate(prompts[1:3])
    ]
    outputs = run(core, requests)
    assert core.scheduler.kv_cache.num_used_blocks == 0
    return [tokens_of(outputs[request.request_id]) for request in requests]


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.slow), "gemma3"])
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(("blocks", "budget"), [(128, 1024), (20, 40)])
def test_overlap_changes_no_token(
    loaded: Callable[[str], LoadedModel], family: str, graphs: bool, blocks: int, budget: int
) -> None:
    """Greedy and seeded, with room and without: requests give up their blocks and come back."""
    options: dict[str, Any] = {
        "num_blocks": blocks,
        "max_batch_tokens": budget,
        "max_requests_per_batch": 6,
    }
    plain = build(loaded(family), **options)
    assert not plain.overlap
    expected = generate(plain, overlap=False)
    model = make_model(FAMILIES[family]())
    assert expected[: len(LENGTHS)] == [
        greedy_reference(model, prompt, NEW) for prompt in make_prompts(LENGTHS)
    ]
    device = LateDevice()
    backend = RecordingBackend() if graphs else None
    built = build(
        loaded(family),
        use_async_batching=True,
        graphs=backend,
        use_cuda_graph=(True, True) if graphs else None,
        **options,
    )
    assert built.overlap
    runner = with_device(built, device, graphs=backend)
    assert generate(built, runner, overlap=True) == expected
    assert device.most_pending == 2
    assert device.pending == 0
    assert generate(built, overlap=True) == expected, "on a plain CPU too"


class Alternating:
    """Allows the tokens whose remainder by 3 is not that of the token before."""

    is_free = is_complete = False
    expected_s = spent_s = 0.0
    failure: str | None = None

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def fill_mask(self, row: npt.NDArray[np.int32]) -> None:
        last = self.accepted[-1] % 3 if self.accepted else 0
        bits = np.zeros(len(row) * 32, dtype=bool)
        bits[:VOCAB] = np.arange(VOCAB) % 3 != last
        row[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token: TokenId) -> bool:
        allowed = token % 3 != (self.accepted[-1] % 3 if self.accepted else 0)
        self.accepted.append(token)
        return allowed


def test_grammars_overlap_and_change_no_token(loaded: Callable[[str], LoadedModel]) -> None:
    """One greedy request and one sampled with penalties follow grammars, beside two without."""
    prompts = make_prompts((9, 20, 5, 31))

    def tokens(overlap: bool, device: LateDevice | None = None) -> list[list[int]]:
        built = build(loaded("llama"), use_async_batching=overlap)
        runner = None if device is None else with_device(built, device)
        core = make_core(built, runner=runner, overlap=overlap)
        outputs: dict[str, list[int]] = {}
        for index, prompt in enumerate(prompts):
            sampling = OF_HISTORY if index == 2 else sampled(index) if index else SamplingParams()
            spec = make_request(str(index), prompt, NEW, sampling=sampling)
            core.add(spec, 0.0, Alternating if index in (0, 2) else None)
            outputs[str(index)] = []
        while core.has_work:
            for output in core.step().outputs:
                assert output.finish is None or output.finish.reason is FinishReason.LENGTH
                outputs[output.request_id] += output.token_ids
        assert core.stats().steps == NEW
        return list(outputs.values())

    expected = tokens(overlap=False)
    assert [len(one) for one in expected] == [NEW] * 4
    for index in (0, 2):
        assert all(a % 3 != b % 3 for a, b in pairwise(expected[index]))
    assert tokens(overlap=True) == expected
    device = LateDevice()
    assert tokens(overlap=True, device=device) == expected
    assert device.pending == 0


def test_the_late_device_sees_a_buffer_that_is_overwritten(
    loaded: Callable[[str], LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one set for two pending steps, the stand-in fails: so with two, it proves something."""
    monkeypatch.setattr(InputBuffers, "take", lambda self: 0)
    monkeypatch.setattr(InputBuffers, "free", lambda self, index: None)
    graphs = RecordingBackend()
    built = build(loaded("llama"), use_async_batching=True, graphs=graphs)
    core = make_core(built, runner=with_device(built, LateDevice(), graphs=graphs), overlap=True)
    (outputs,) = run(core, [make_request("a", make_prompts((9,))[0], NEW)]).values()
    finish = outputs[-1].finish
    assert finish is not None
    assert finish.reason is FinishReason.ERROR


def test_a_third_step_is_refused(loaded: Callable[[str], LoadedModel]) -> None:
    """One set, and a core that overlaps: wired wrongly, the step fails and says why."""
    buffers = InputBuffers(1)
    buffers.take()
    with pytest.raises(RuntimeError, match="all input buffers are in use"):
        buffers.take()
    buffers.free(0)
    assert buffers.take() == 0


def test_logprobs_and_ends_under_overlap(loaded: Callable[[str], LoadedModel]) -> None:
    """A stop id, log-probabilities and a length of one, as without overlap."""
    llama = loaded("llama")
    prompts = make_prompts((9, 20, 5))
    stop = greedy_reference(llama.model, prompts[0], 6)[3]

    def outputs(overlap: bool) -> list[list[RequestOutput]]:
        core = make_core(build(llama, use_async_batching=overlap), overlap=overlap)
        requests = [
            make_request("a", prompts[0], 6, stop=StopParams(max_tokens=6, stop_token_ids=(stop,))),
            make_request("b", prompts[1], 5, logprobs=LogprobParams(top_n=2), prompt_logprobs=1),
            make_request("c", prompts[2], 1),
        ]
        return list(run(core, requests).values())

    for late, early in zip(outputs(True), outputs(False), strict=True):
        assert tokens_of(late) == tokens_of(early)
        for ours, theirs in zip(late, early, strict=True):
            assert (ours.logprobs is None) == (theirs.logprobs is None)
            for entry, other in zip(ours.logprobs or (), theirs.logprobs or (), strict=True):
                assert (entry.rank, len(entry.candidates)) == (other.rank, 2)
                assert entry.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert late[0].prompt_logprobs == early[0].prompt_logprobs
        assert late[-1].finish is not None
        assert early[-1].finish is not None
        assert late[-1].finish.reason is early[-1].finish.reason
        assert late[-1].finish.usage == early[-1].finish.usage


def test_an_invalid_token_fails_its_request_alone(
    loaded: Callable[[str], LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step behind it was launched with it; the neighbour does not notice."""
    llama = loaded("llama")
    prompts = make_prompts((9, 20))
    built = build(llama, use_async_batching=True)
    sampler = built.runner._sampler
    begin = sampler.begin
    calls = 0

    def spoil(logits: torch.Tensor, requests: Any, lengths: Any) -> Any:
        nonlocal calls
        calls += 1
        rows = begin(logits, requests, lengths)
        if calls == 3:
            names = [request.request_id for request in requests]
            rows.token_ids[names.index("a")] = INVALID_TOKEN
        return rows

    monkeypatch.setattr(sampler, "begin", spoil)
    core = make_core(built, overlap=True)
    outputs = run(core, [make_request("a", prompts[0], 8), make_request("b", prompts[1], 8)])
    finish = outputs["a"][-1].finish
    assert finish is not None
    assert finish.reason is FinishReason.ERROR
    assert tokens_of(outputs["b"]) == greedy_reference(llama.model, prompts[1], 8)


def test_a_step_that_fails_gives_its_buffers_back(
    loaded: Callable[[str], LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    llama = loaded("llama")
    built = build(llama, use_async_batching=True)
    prompt = make_prompts((9,))[0]
    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(built.runner, "_run", _fail)
            (outputs,) = run(
                make_core(built, overlap=True), [make_request("a", prompt, 4)]
            ).values()
            assert outputs[-1].finish is not None
            assert outputs[-1].finish.reason is FinishReason.ERROR
    (outputs,) = run(make_core(built, overlap=True), [make_request("a", prompt, 4)]).values()
    assert tokens_of(outputs) == greedy_reference(llama.model, prompt, 4)


def _fail(*args: object) -> None:
    raise RuntimeError("scripted failure")


def test_copies_alone_take_no_buffers(loaded: Callable[[str], LoadedModel]) -> None:
    runner = build(loaded("llama")).runner
    batch = ScheduledBatch((), 0, StepCopies(forks=(BlockCopy(GroupId(0), 1, 2),)))
    for _ in range(3):
        assert runner.launch(batch).result().token_ids == ()
    runner.release(RequestKey(1))


@pytest.mark.parametrize(("family", "overlap"), [("llama", False), ("gemma3", True)])
def test_offloaded_blocks_and_shared_prefixes_over_a_real_model(
    loaded: Callable[[str], LoadedModel], family: str, overlap: bool
) -> None:
    """Few blocks: what is preempted goes to the host and back, choices fork, prefixes are found."""
    built = build(
        loaded(family),
        num_blocks=24,
        cpu_offload_space=0.01,
        max_batch_tokens=64,
        use_async_batching=overlap,
    )
    copied: Counter[str] = Counter()
    copier = built.runner._copier
    copy = copier.run

    def count(copies: StepCopies) -> None:
        copied["offloads"] += len(copies.offloads)
        copied["restores"] += len(copies.restores)
        copied["forks"] += len(copies.forks)
        copy(copies)

    copier.run = count  # type: ignore[method-assign]
    core = make_core(built, overlap=overlap, share_blocks=True)
    prompts = make_prompts((70, 61, 44, 33))
    prompts.append(prompts[0][:40] + prompts[3])
    stop = StopParams(max_tokens=40, eos_token_ids=(TokenId(2),))
    requests = [make_request(str(i), p, 40, n=2, stop=stop) for i, p in enumerate(prompts)]
    outputs = run(core, requests)
    for index, prompt in enumerate(prompts):
        expected = greedy_reference(loaded(family).model, prompt, 40)
        for choice in (0, 1):
            mine = [output for output in outputs[str(index)] if output.choice == choice]
            assert tokens_of(mine) == expected
    assert copied["offloads"] > 0
    assert copied["restores"] > 0
    assert copied["forks"] > 0
