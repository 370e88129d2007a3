"""Nothing waits in the loop on CUDA, and nothing is copied to it but from pinned memory, whatever
joins, ends, is preempted or prefilled, and whatever it asks for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from engine.contract.sampling_params import LogprobParams, SamplingParams
from engine.contract.types import RequestId, TokenId
from engine.runner.device import CudaDevice
from engine.sampling.sampler import Sampler
from tests.engine.cuda.steps import Engine, engine, verified
from tests.engine.runner.steps import make_request
from tests.long_rope import MODELS, ORIGINAL
from tests.tiny_models import make_prompts

pytest.importorskip("triton", reason="Triton is not installed here")

DRAWN: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 1.0, "seed": 1},
    "top k": {"temperature": 0.7, "top_k": 5, "seed": 2},
    "top p": {"temperature": 0.7, "top_p": 0.9, "seed": 3},
    "min p": {"temperature": 0.7, "min_p": 0.1, "top_p": 0.9, "top_k": 20, "seed": 4},
    "typical": {"temperature": 0.7, "typical_p": 0.8, "seed": 5},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.2, "presence_penalty": 0.5},
    "frequency": {"temperature": 1.0, "frequency_penalty": 0.5, "seed": 6},
    "n-grams": {"temperature": 0.0, "no_repeat_ngram_size": 2},
}


def options_of(name: str) -> SamplingParams:
    return SamplingParams(**DRAWN[name])


def traffic(rig: Engine) -> None:
    """Requests that come, end and are cancelled while others run, with every option."""
    prompts = make_prompts((40, 3, 90, 17, 61, 33, 8, 25, 50), seed=3)
    for index, (name, prompt) in enumerate(zip(DRAWN, prompts, strict=True)):
        rig.add(make_request(name, prompt, 6 + index, sampling=options_of(name)))
        rig.steps(1 + index % 3)
    greedy = SamplingParams(temperature=0.0)
    rig.add(make_request("choices", prompts[0], 12, n=3, sampling=options_of("plain")))
    rig.add(
        make_request("grammar", prompts[3], 12, sampling=options_of("top p")),
        make_request("greedy grammar", prompts[4], 12, sampling=greedy),
        grammar=True,
    )
    rig.steps(2)
    rig.add(
        make_request(
            "logprobs",
            prompts[5],
            9,
            logprobs=LogprobParams(top_n=3, token_ids=(TokenId(5), TokenId(9))),
        ),
        make_request("prompt", prompts[7], 9, sampling=greedy, prompt_logprobs=2),
        make_request("again", prompts[2], 9, sampling=greedy),
        make_request("cancelled", prompts[1], 50, sampling=greedy),
    )
    rig.steps(4)
    assert rig.core.cancel(RequestId("cancelled"))
    rig.steps()


def check(rig: Engine) -> None:
    assert rig.watch.faults == []
    assert rig.failures == []
    assert not rig.core.has_work
    for name in DRAWN:
        assert rig.outputs[name][-1].finish is not None
    rig.core.scheduler.kv_cache.check_integrity()


SMALL = {"num_hidden_layers": 1}
LENGTHENED = ["llama, dynamic", "llama, longrope", "phi3, longrope", "phimoe, longrope"]


DECODERS = ("own", "transformers")


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", SMALL),
        pytest.param("gemma2", {}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", {}, marks=pytest.mark.slow),
    ],
)
def test_nothing_waits(family: str, changes: dict[str, Any], decoder: str) -> None:
    """Steps are replayed, or run as they come where no graph is kept for them."""
    with engine(verified(family, **changes), max_batch_tokens=64, decoder=decoder) as rig:
        assert (rig.model.decoder is not None) == (decoder == "own")
        traffic(rig)
        check(rig)
        stats = rig.core.stats()
        assert rig.capture.captured > 0
        assert rig.capture.replays > 0
        assert any(not kind.is_replayed for kind in rig.runner.steps)
        assert stats.prefix_hits > 0
        assert rig.watch.copies > stats.steps


@pytest.mark.parametrize("name", LENGTHENED)
def test_nothing_waits_where_requests_outgrow_the_original_length(name: str) -> None:
    """Each token is rotated for its own length, in replayed steps too."""
    family, settings = MODELS[name]
    model = verified(family, **settings)
    assert model.rope is not None
    assert model.rope.original == ORIGINAL
    with engine(model, max_batch_tokens=64) as rig:
        assert rig.watch.faults == []
        traffic(rig)
        check(rig)
        assert rig.capture.abandoned == 0
        assert rig.capture.captured > 0
        assert rig.capture.replays > 0
        assert any(not kind.is_replayed for kind in rig.runner.steps)


@pytest.mark.parametrize("space", [0.0, 0.01])
def test_nothing_waits_where_blocks_are_few(space: float) -> None:
    """Requests are preempted, computed again, or kept on the host and brought back."""
    options = {"max_batch_tokens": 48, "num_blocks": 24, "cpu_offload_space": space}
    with engine(verified("llama", **SMALL), use_cuda_graph=False, **options) as rig:
        traffic(rig)
        check(rig)
        stats = rig.core.stats()
        assert stats.preemptions > 0
        assert (stats.restores > 0) == (space > 0)


# ---- planted faults ----------------------------------------------------------------------------


def few(rig: Engine) -> None:
    """A prompt, and a request that joins it and asks for more."""
    prompts = make_prompts((20, 9))
    rig.add(make_request("first", prompts[0], 6, sampling=options_of("greedy")))
    rig.steps(3)
    rig.add(make_request("second", prompts[1], 6, sampling=options_of("penalties")))
    rig.steps()


def plain_copy(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device, dtype)


def pageable_buffer(device: CudaDevice, size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.int64)


def blocking_download(device: CudaDevice, source: torch.Tensor) -> torch.Tensor:
    return source.cpu()


def test_without_a_fault_there_is_none() -> None:
    with engine(verified("llama", **SMALL)) as rig:
        few(rig)
        assert (rig.watch.faults, rig.failures) == ([], [])
        assert rig.capture.replays > 0


@pytest.mark.parametrize(
    ("place", "planted", "fault"),
    [
        ("engine.runner.forward.to_device", plain_copy, "pageable memory waits"),
        ("engine.attention.triton_backend.to_device", plain_copy, "pageable memory waits"),
        ("engine.sampling.sampler.to_device", plain_copy, "pageable memory waits"),
        ("engine.runner.device.CudaDevice.host_buffer", pageable_buffer, "pageable memory waits"),
        ("engine.runner.device.CudaDevice.download", blocking_download, "to the host waits"),
    ],
)
def test_a_planted_copy_is_caught(
    place: str, planted: Any, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Around steps as they come; the buffers of the host are those of captured steps."""
    monkeypatch.setattr(place, planted)
    is_captured = planted is pageable_buffer
    with engine(verified("llama", **SMALL), use_cuda_graph=is_captured) as rig:
        few(rig)
        assert any(fault in one for one in rig.watch.faults)
        assert rig.failures


def test_a_planted_item_in_the_sampler_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Sampler.begin

    def waits(sampler: Sampler, logits: torch.Tensor, *rest: Any) -> Any:
        assert logits.sum().item() == 0.0
        return begin(sampler, logits, *rest)

    with engine(verified("llama", **SMALL)) as rig:
        monkeypatch.setattr(Sampler, "begin", waits)
        few(rig)
    assert "_local_scalar_dense waits for the device" in rig.watch.faults[0]


def hooked(rig: Engine, act: Callable[[torch.Tensor], object]) -> None:
    """Have what computes the steps do something with what its last norm gives."""
    ours: Any = rig.model.decoder
    if ours is None:

        def hook(module: torch.nn.Module, given: Any, made: torch.Tensor) -> None:
            act(made)

        rig.model.model.base_model.norm.register_forward_hook(hook)
        return
    output = ours.output

    def acting(normed: torch.Tensor) -> torch.Tensor:
        act(normed)
        made: torch.Tensor = output(normed)
        return made

    ours.output = acting


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_wait_in_the_model_is_found_before_anything_is_captured(
    decoder: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And said. Steps then run as they come, where the wait is seen as well."""

    def plant(rig: Engine) -> None:
        hooked(rig, lambda made: rig.watch.is_on and made.sum().item())

    with (
        caplog.at_level(logging.WARNING),
        engine(verified("llama", **SMALL), prepare=plant, decoder=decoder) as rig,
    ):
        assert "_local_scalar_dense waits for the device" in rig.watch.faults[0]
        assert rig.failures == []
        few(rig)
        assert rig.capture.captured == rig.capture.abandoned == rig.capture.replays == 0
        assert rig.failures
    said = "decode steps run as they come: the forward cannot be captured (aten::_local_scalar"
    assert said in caplog.text


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_wait_that_only_a_capture_meets_leaves_the_device_as_it_was(decoder: str) -> None:
    def plant(rig: Engine) -> None:
        hooked(rig, lambda made: rig.capture.is_capturing and made.sum().item())

    with engine(verified("llama", **SMALL), prepare=plant, decoder=decoder) as rig:
        few(rig)
        assert rig.capture.captured == rig.capture.replays == 0
        assert not rig.capture.is_capturing
        assert rig.failures == [], "steps run as they come"
        assert len(rig.watch.faults) == rig.capture.abandoned > 0
        assert all("_local_scalar_dense" in fault for fault in rig.watch.faults)


def test_a_capture_that_raises_at_its_exit() -> None:
    def plant(rig: Engine) -> None:
        rig.capture.fails = RuntimeError("operation failed due to a previous error")

    with engine(verified("llama", **SMALL), prepare=plant) as rig:
        few(rig)
        assert rig.capture.captured == rig.capture.replays == 0
        assert rig.capture.abandoned > 0
        assert not rig.capture.is_capturing
        assert (rig.watch.faults, rig.failures) == ([], [])


# ---- what a step launches besides its graph ----------------------------------------------------


@pytest.mark.parametrize(
    ("names", "replays"),
    [
        (("greedy", "greedy"), 1),
        (("plain",), 2),
        (("plain", "top k", "greedy", "min p", "top p"), 2),
    ],
)
def test_a_plain_step_launches_nothing_besides_its_graphs(
    names: tuple[str, ...], replays: int
) -> None:
    """One copy to the device, whoever it is for; tokens are carried and chosen within graphs."""
    prompts = make_prompts((20, 9, 3, 14, 30))
    with engine(verified("llama", **SMALL)) as rig:
        for index, name in enumerate(names):
            request = make_request(
                f"{index}", prompts[index], 9 + 4 * index, sampling=options_of(name)
            )
            rig.add(request)
        rig.steps(3)
        rig.watch.launches.clear()
        rig.watch.copies = rig.capture.replays = 0
        rig.steps(3)
        assert rig.watch.launches == []
        assert (rig.watch.copies, rig.capture.replays) == (3, 3 * replays)
        rig.steps()
        assert rig.watch.launches == [], "nor as requests end"
        assert (rig.watch.faults, rig.failures) == ([], [])


def test_a_wait_in_a_draw_is_found_before_it_is_captured(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And said. Tokens are then drawn as they come; the forward and greedy steps are replayed."""

    rigs: list[Engine] = []

    def waits(kind: Any, logits: torch.Tensor, numbers: torch.Tensor, *rest: Any) -> None:
        if rigs[0].watch.is_on:
            numbers.sum().item()

    monkeypatch.setattr("engine.runner.captured_choices.choose_draws", lambda logits: waits)
    with (
        caplog.at_level(logging.WARNING),
        engine(verified("llama", **SMALL), prepare=rigs.append) as rig,
    ):
        assert len(rig.watch.faults) == 2
        assert "_local_scalar_dense waits for the device" in rig.watch.faults[0]
        rig.watch.faults.clear()
        rig.add(make_request("drawn", make_prompts((9,))[0], 6, sampling=options_of("plain")))
        rig.steps()
        assert (rig.watch.faults, rig.failures) == ([], [])
        assert rig.capture.captured == 3
        assert rig.capture.replays == 6
    assert "drawn tokens are chosen as they come: that cannot be captured (aten::_l" in caplog.text
