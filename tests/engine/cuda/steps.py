"""An engine on a CUDA device that is not there: the real core, scheduler, runner, sampler and
device, around a tiny model whose tensors have no contents (see `watch`). Tokens are scripted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.contract.config import ContinuousBatchingConfig
from engine.contract.outputs import RequestOutput
from engine.contract.request import GenerationRequest
from engine.contract.types import TokenId
from engine.core.engine_core import EngineCore
from engine.loading.loader import verify_model
from engine.loading.running import build_runner
from engine.loading.verified import VerifiedModel
from engine.models.choosing import describe_steps
from engine.models.experts import choose_experts
from engine.models.torch_decoder import TorchDecoder
from engine.runner.cuda_graph import CapturingBackend
from engine.scheduler.runner_protocol import PendingStep, SampledTokens
from engine.scheduler.scheduled_batch import ScheduledBatch
from tests.engine.cuda.watch import CUDA, HOPPER, Properties, Watch, fake_cuda, to_fake_cuda
from tests.engine.runner.steps import make_core
from tests.model_recipes import RECIPES
from tests.tiny_models import VOCAB, make_model


class Matcher:
    """A grammar that allows everything but token 0."""

    is_complete = False
    is_free = False
    expected_s = spent_s = 0.0
    failure = None

    def fill_mask(self, row: Any) -> None:
        row[:] = -1
        row[0] = -2

    def accept(self, token: TokenId) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


@dataclass
class Capture:
    """The device as a capture needs it; keeps account of what it was left with.

    Attributes:
        fails: raised at a capture's exit.
    """

    watch: Watch
    fails: RuntimeError | None = None
    captured: int = 0
    abandoned: int = 0
    replays: int = 0
    _capturing: AbstractContextManager[None] | None = None

    def side_stream(self) -> AbstractContextManager[None]:
        return nullcontext()

    def refusing_waits(self) -> AbstractContextManager[None]:
        return self.watch.watching(allows_copies=False)

    def begin(self) -> Any:
        self._capturing = self.watch.watching(allows_copies=False)
        self._capturing.__enter__()
        return self

    def end(self, graph: Any) -> None:
        if self.fails is not None:
            raise self.fails
        self._leave()
        self.captured += 1

    def abandon(self, graph: Any) -> None:
        self._leave()
        self.abandoned += 1

    def replay(self) -> None:
        self.replays += 1

    def _leave(self) -> None:
        assert self._capturing is not None
        self._capturing.__exit__(None, None, None)
        self._capturing = None

    @property
    def is_capturing(self) -> bool:
        return self._capturing is not None


class _Memory:
    def available(self) -> int:
        return 1 << 30

    def peak(self, run: Callable[[], None]) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class _Watched:
    """A step that is watched until its results are collected."""

    step: PendingStep
    watch: Watch

    def sample(self) -> None:
        with self.watch.watching():
            self.step.sample()

    def result(self) -> SampledTokens:
        return self.step.result()


@dataclass
class Engine:
    """What a test drives. `outputs`: by request."""

    core: EngineCore
    watch: Watch
    capture: Capture
    runner: Any
    model: VerifiedModel
    outputs: dict[str, list[RequestOutput]] = field(default_factory=dict)

    def add(self, *requests: GenerationRequest, grammar: bool = False) -> None:
        for request in requests:
            self.outputs[request.request_id] = []
            self.core.add(request, 0.0, Matcher if grammar else None)

    def steps(self, count: int = 10_000) -> None:
        """Take steps, until all is done or for so many."""
        for _ in range(count):
            if not self.core.has_work:
                return
            for output in self.core.step().outputs:
                self.outputs[output.request_id].append(output)

    @property
    def failures(self) -> list[str]:
        """What requests ended with, apart from tokens."""
        ends = [output.finish for found in self.outputs.values() for output in found]
        return [end.failure.message for end in ends if end is not None and end.failure is not None]


def verified(family: str, **changes: Any) -> VerifiedModel:
    """A tiny model that has passed the load gate on the CPU, in float32. changes: of its config."""
    model = make_model(RECIPES[family].config(eos_token_id=None, **changes))
    return verify_model(model, Path(), lambda line: None, "torch")


@contextmanager
def engine(
    model: VerifiedModel,
    *,
    prepare: Callable[[Engine], None] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    properties: Properties = HOPPER,
    decoder: str = "own",
    **options: Any,
) -> Iterator[Engine]:
    """An engine around a model, which is moved away from the CPU for good. Steps are watched.

    Args:
        model: it.
        prepare: what is done to the engine before its warm-up.
        dtype: the type to which it is moved.
        properties: those of the device.
        decoder: "transformers", or "own": ours, if it knows the family.
        options: those of ContinuousBatchingConfig.
    """
    watch = Watch()
    capture = Capture(watch)
    drawn = 0

    def tokens(host: torch.Tensor) -> None:
        nonlocal drawn
        if host.dtype == torch.int64 and host.dim() == 1:
            values = np.arange(drawn, drawn + len(host)) % (VOCAB - 3) + 3
            host.copy_(torch.from_numpy(values))
            drawn += len(host)

    watch.downloads = tokens
    plan = describe_steps(model.model, CUDA, None, is_packed=False)
    with fake_cuda(watch, properties=properties):
        from engine.attention.triton_backend import TritonAttentionBackend
        from engine.models.triton_operations import TritonOperations

        to_fake_cuda(model.model, dtype)
        backend = TritonAttentionBackend()
        choose_experts(model.model, backend, lambda line: None)
        ours = None
        if decoder == "own" and not isinstance(plan, str):
            ours = TorchDecoder(model.model, plan, TritonOperations(), backend)
        moved = replace(
            model,
            decoder=ours,
            device=CUDA,
            dtype=dtype,
            backend=backend,
            probe=replace(model.probe, dtype=dtype),
            step_bytes={},
            view=None,
        )
        sizes = {"block_size": 8, "num_blocks": 128, "max_cached_graphs": 3}
        config = ContinuousBatchingConfig(**{**sizes, **options})
        built = build_runner(
            moved, config, lambda line: None, graphs=CapturingBackend(capture), memory=_Memory()
        )
        runner: Any = built.runner
        core = make_core(built, share_blocks=True, overlap=built.overlap, rope=moved.rope)
        rig = Engine(core, watch, capture, runner, moved)
        if prepare is not None:
            prepare(rig)
        runner.warmup()
        launch = runner.launch

        def watched(batch: ScheduledBatch) -> _Watched:
            with watch.watching():
                return _Watched(launch(batch), watch)

        runner.launch = watched
        yield rig
