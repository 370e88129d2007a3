"""Runs a batch of prompts through a manager, adding prompts as the queue has room and reading
results as they arrive.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from engine.api.manager import ContinuousBatchingManager
from engine.api.request_builder import token_ids
from engine.api.results import GenerationOutput, Mailbox, choice_name
from engine.contract.errors import (
    AdapterNotLoadedError,
    CompileQueueFullError,
    EngineUnavailableError,
    HeadraceError,
    InvalidRequestError,
    QueueFullError,
)
from engine.contract.outputs import FinishReason
from engine.contract.request import RequestStatus

_FULL_QUEUE_WAIT_S = 0.05


@dataclass(slots=True)
class _Batch:
    """A batch of requests and its results so far. Other users of the manager do not see these
    results.
    """

    manager: ContinuousBatchingManager
    bar: tqdm[Any]
    mailbox: Mailbox = field(default_factory=Mailbox)
    results: dict[str, GenerationOutput] = field(default_factory=dict)

    def add(self, name: str, prompt: Sequence[int], **options: Any) -> int:
        """Add a request as soon as the queue has room for it. Return its number of choices."""
        while True:
            try:
                return self.manager.add_to(self.mailbox, name, prompt, **options)
            except QueueFullError:
                self.take(_FULL_QUEUE_WAIT_S)  # reading results makes room

    def take(self, timeout: float | None) -> bool:
        """Read one result. Return False if none arrived in time or the engine has ended."""
        output = self.manager.get_from(self.mailbox, timeout)
        if output is not None:
            self.put(output)
        return output is not None

    def put(self, output: GenerationOutput) -> None:
        self.results[output.request_id] = output
        self.bar.update()


def generate(
    manager: ContinuousBatchingManager,
    inputs: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | None,
    eos_token_id: int | Iterable[int] | None,
    record_timestamps: bool,
    progress_bar: bool,
    adapter: str | Sequence[str | None] | None = None,
) -> dict[str, GenerationOutput]:
    """Generate for each prompt; see `LoadedModel.generate_batch`."""
    adapters = [adapter] * len(inputs) if adapter is None or isinstance(adapter, str) else adapter
    if len(adapters) != len(inputs):
        raise InvalidRequestError(
            "adapter", f"has {len(adapters)} names for {len(inputs)} prompts; give one for each"
        )
    names: list[str] = []
    with tqdm(
        total=len(inputs),
        desc=f"Generating for {len(inputs)} prompts",
        unit="request",
        disable=not progress_bar,
    ) as bar:
        batch = _Batch(manager, bar)
        for index, (prompt, own) in enumerate(zip(inputs, adapters, strict=True)):
            name = manager.new_name()
            try:
                num_choices = batch.add(
                    name,
                    prompt,
                    max_new_tokens=max_new_tokens,
                    eos_token_id=eos_token_id,
                    record_timestamps=record_timestamps,
                    adapter=own,
                )
            except (
                *(InvalidRequestError, AdapterNotLoadedError),
                *(CompileQueueFullError, EngineUnavailableError),
            ) as error:
                num_choices = 1
                batch.put(_refused(name, prompt, error))
            names.extend(choice_name(name, choice) for choice in range(num_choices))
            bar.total = len(names) + len(inputs) - index - 1
            while batch.take(timeout=0):
                pass  # they are also read while prompts are added, for the bar
        while len(batch.results) < len(names) and batch.take(timeout=None):
            pass
    return {name: batch.results[name] for name in names if name in batch.results}


def _refused(name: str, prompt: Sequence[int], error: HeadraceError) -> GenerationOutput:
    return GenerationOutput(
        request_id=name,
        prompt_ids=list(token_ids(prompt)),
        error=str(error),
        status=RequestStatus.FAILED,
        finish_reason=FinishReason.ERROR,
    )
