"""Steps between their launch and their results.

    launch ─▶ take buffers ─▶ … ─▶ tokens on the device ──queued copy──▶ tokens on the host
                                       │                                     ▲
                                       └▶ carried into the next step         └── result: waits,
                                                                                 frees the buffers

A step's inputs are written to a set of buffers on the host. With two sets, a step can be launched
while the previous one is still running. A request's next token is then not on the host yet, and is
carried over on the device. A step's own tokens may depend on tokens that must be on the host first.
In this case, the launch queues its work only up to the logits, and `LaunchedStep.sample` queues the
rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from engine.contract.request import Request
from engine.native.device_copy import to_device
from engine.runner.device import DeviceEvent, StepDevice
from engine.runner.input_batch import InputBatch
from engine.runner.prompt_logprobs import PromptReport
from engine.sampling.sampler import SampledRows
from engine.scheduler.runner_protocol import SampledTokens


class InputBuffers:
    """Which sets of input buffers are in use."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))

    def take(self) -> int:
        """Take a set that is not in use.

        Raises:
            RuntimeError: all sets are in use, because the results of their steps have not been
                collected.
        """
        if not self._free:
            raise RuntimeError("a step was launched while all input buffers are in use")
        return self._free.pop(0)

    def free(self, index: int) -> None:
        """Return a set."""
        self._free.append(index)


class CarriedTokens:
    """The tokens of the last launched step, which may not be on the host yet."""

    def __init__(self) -> None:
        self._requests: Sequence[Request] = ()
        self._token_ids = torch.empty(0, dtype=torch.int64)

    def keep(self, requests: Sequence[Request], token_ids: torch.Tensor) -> None:
        """Store a step's tokens: int64 [S] on the device, one for each sampled row, with the rows'
        requests. The next step carries none over of a request with several rows.
        """
        self._requests = requests
        self._token_ids = token_ids

    def places(self, inputs: InputBatch) -> tuple[list[int], list[int]]:
        """Return the indices of the missing tokens of a step, and their indices in the last step's
        tokens.
        """
        if not inputs.carried:
            return [], []
        rows = {request.key: row for row, request in enumerate(self._requests)}
        return [row for row, _ in inputs.carried], [rows[key] for _, key in inputs.carried]

    def fill_in(self, inputs: InputBatch, token_ids: torch.Tensor) -> None:
        """Fill in the missing tokens of a step in its inputs, int64 [T] on the device."""
        targets, sources = self.places(inputs)
        if not targets:
            return
        # A request without a valid token fails when its step is collected; this step must not fail.
        known = self._token_ids.clamp(min=0)
        if sources != list(range(len(known))):
            known = known.index_select(0, self._index(sources))
        if targets == list(range(len(targets))):
            token_ids[: len(targets)] = known
        else:
            token_ids.index_copy_(0, self._index(targets), known)

    def _index(self, rows: list[int]) -> torch.Tensor:
        return to_device(np.array(rows, dtype=np.int64), self._token_ids.device)


class LaunchedStep:
    """A launched step; see `engine.scheduler.runner_protocol.PendingStep`."""

    def __init__(
        self,
        buffers: InputBuffers,
        index: int,
        device: StepDevice,
        choose: Callable[[], SampledRows],
        prompts: PromptReport,
    ) -> None:
        """Wrap a step whose logits are queued. The step takes over the buffers.

        Args:
            buffers, index: the set of buffers that it uses.
            device: queues copies.
            choose: queues the choice of its tokens. Called once, by `sample`.
            prompts: the results for prompts.
        """
        self._buffers = buffers
        self._index = index
        self._device = device
        self._choose: Callable[[], SampledRows] | None = choose  # None: it was called
        self._prompts = prompts
        self._sampled: tuple[SampledRows, DeviceEvent] | None = None

    def sample(self) -> None:
        """Queue the choice of the tokens and their copies to the host, and mark the step's end."""
        if self._choose is None:
            return
        choose, self._choose = self._choose, None  # it keeps the logits
        try:
            with torch.inference_mode():
                rows = choose().copied(self._device.download)
                self._prompts = self._prompts.copied(self._device.download)
        except BaseException:
            self._buffers.free(self._index)
            raise
        self._sampled = rows, self._device.record()

    def result(self) -> SampledTokens:
        """Wait for this step, but not for later ones."""
        try:
            if self._sampled is None:
                raise RuntimeError("a step's results were wanted before its tokens were chosen")
            rows, end = self._sampled
            end.wait()
            token_ids, logprobs = rows.result()
            return SampledTokens(token_ids, logprobs, self._prompts.result())
        finally:
            self._buffers.free(self._index)
