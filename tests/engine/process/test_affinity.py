"""CPUs that are taken away and given back while a request runs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

from engine.api.offline import load
from engine.api.results import GenerationOutput
from engine.contract.request import RequestStatus

DEMO = Path(__file__).resolve().parents[3] / "models" / "demo"
CPUS = os.sched_getaffinity(0)


def _allow(cpus: Iterable[int]) -> None:
    """For every thread of this process, as `taskset -ap` does from outside."""
    for task in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(task.name), cpus)
        except ProcessLookupError:
            continue  # it has ended


@pytest.mark.skipif(len(CPUS) < 2, reason="there is no CPU to take away")
def test_tokens_go_on_and_stay_equal() -> None:
    threads = torch.get_num_threads()
    prompt, length = list(range(3, 60)), 24
    manager = load(str(DEMO), threads=2, dtype="float32").init_continuous_batching(
        GenerationConfig(do_sample=False, max_new_tokens=length, eos_token_id=-1)
    )
    manager.start()

    def tokens(name: str, changes: dict[int, Iterable[int]]) -> list[int]:
        manager.add_request(prompt, request_id=name, streaming=True)
        output: GenerationOutput | None = None
        for output in manager.request_id_iter(name):
            if (cpus := changes.get(len(output.generated_tokens))) is not None:
                _allow(cpus)
            if output.status == RequestStatus.FINISHED:
                break
        assert output is not None
        return list(output.generated_tokens)

    try:
        before = tokens("before", {})
        assert len(before) == length
        assert tokens("changing", {4: {min(CPUS)}, 14: CPUS}) == before
        _allow({max(CPUS)})
        assert tokens("one", {}) == before
        _allow(CPUS)
        assert tokens("again", {}) == before
    finally:
        _allow(CPUS)
        manager.stop()
        torch.set_num_threads(threads)
