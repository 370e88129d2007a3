"""What is copied to the device for a captured step: as much as its contexts are long."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.attention.interface import BatchLayout, LayerShape, StaticShape
from engine.attention.step_arrays import count_cuts, most_cuts
from engine.loading.kv_memory import allocate_caches, make_groups
from engine.runner.device import SynchronousDevice
from engine.runner.input_batch import InputBatch
from engine.runner.kv_tensors import KVTensors
from engine.runner.runner_options import StepPath
from engine.runner.static_inputs import InputMemory, StaticInputs
from engine.sampling.plain import COLUMNS
from tests.engine.runner.fake_attention import CapturableAttention

BLOCK = 64
CONTEXT = 131_072
REQUESTS = 256
WINDOW = 1024
HEADS = 8
SHAPE = StaticShape(True, REQUESTS, REQUESTS, CONTEXT // BLOCK, BLOCK)


class Counting(SynchronousDevice):
    """Notes how many bytes each copy has."""

    def __init__(self) -> None:
        self.copies: list[int] = []

    def upload(self, host: torch.Tensor, target: torch.Tensor) -> None:
        self.copies.append(host.nbytes)
        super().upload(host, target)


def make_inputs(device: Counting) -> tuple[StaticInputs, InputMemory]:
    """Inputs of a model with full layers and others with a window."""
    shapes = {0: LayerShape(HEADS, 4, 4, None), 1: LayerShape(HEADS, 4, 4, WINDOW)}
    groups = make_groups(shapes, torch.float32)
    caches = allocate_caches(shapes, groups, [1, 1], BLOCK, torch.float32, torch.device("cpu"))
    kv, backend = KVTensors(groups, caches, {}, BLOCK), CapturableAttention()
    memory = InputMemory([SHAPE], backend, kv, device, 2, REQUESTS)
    return StaticInputs(SHAPE, backend, kv, memory), memory


def make_step(lengths: list[int]) -> InputBatch:
    """Each request computes the last token of its context."""
    positions = np.array(lengths, dtype=np.int64) - 1
    rows, width = len(lengths), -(-max(lengths) // BLOCK)
    ones = np.ones(rows, dtype=np.int64)
    layouts = [
        BatchLayout(
            starts=positions,
            counts=ones,
            num_decodes=rows,
            positions=positions,
            tables=first + np.arange(rows * width, dtype=np.int32).reshape(rows, width),
            block_size=BLOCK,
        )
        for first in (1, 10**6)
    ]
    return InputBatch(
        path=StepPath.DECODE,
        num_tokens=rows,
        token_ids=ones,
        positions=positions,
        logit_rows=np.arange(rows),
        wants_all_rows=True,
        sampling=(),
        lengths=lengths,
        prompts=(),
        layouts=tuple(layouts),
    )


def entries_of(lengths: list[int]) -> int:
    """The blocks and cuts of both groups."""
    blocks = sum(-(-length // BLOCK) for length in lengths)
    cuts = [
        count_cuts(np.array(lengths) - 1, window, most_cuts(HEADS, window)).sum()
        for window in (None, WINDOW)
    ]
    return 2 * blocks + int(sum(cuts))


FIXED = REQUESTS * (COLUMNS + 3) + 2 * (5 * REQUESTS + 1 + 5)
"""What does not depend on lengths: parameters of the choice, token ids with their sources and
positions, and the arrays of two groups.
"""


@pytest.mark.parametrize(
    ("lengths", "most"),
    [
        pytest.param([1], 40_000, id="one token"),
        pytest.param([1100] * REQUESTS, 135_000, id="usual contexts"),
        pytest.param([1100] * 255 + [CONTEXT], 170_000, id="a long one among them"),
        pytest.param([CONTEXT], 75_000, id="a long one"),
    ],
)
def test_one_copy_as_long_as_the_contexts(lengths: list[int], most: int) -> None:
    """Not as long as the longest contexts that all requests may have, 8.4 MB."""
    device = Counting()
    inputs, _ = make_inputs(device)
    inputs.fill(make_step(lengths), 0, ([], []), None)
    assert device.copies == [8 * (FIXED + entries_of(lengths))]
    assert device.copies[0] < most


def test_each_group_finds_its_own_tables() -> None:
    """A short step's are read from where it has put them, not from where a longer one had them."""
    inputs, memory = make_inputs(Counting())
    for buffers, lengths in enumerate(([CONTEXT, 3, 7000], [65, 1, 3000, 640])):
        step = make_step(lengths)
        inputs.fill(step, buffers, ([], []), None)
        ends = []
        for layout, window, metadata in zip(
            step.layouts, (None, WINDOW), inputs.metadata(), strict=True
        ):
            fields: dict[str, Any] = metadata.fields  # type: ignore[attr-defined]
            entries = fields["entries"].numpy()
            for row, length in enumerate(lengths):
                begin, width = int(fields["table_offsets"][row]), -(-length // BLOCK)
                assert (
                    entries[begin : begin + width].tolist() == layout.tables[row, :width].tolist()
                )
            most = most_cuts(HEADS, window)
            cuts = count_cuts(layout.starts, window, most).tolist()
            requests, others, tokens, total, first = fields["extent"].tolist()
            assert (requests, others, tokens) == (len(lengths), 0, len(lengths))
            assert entries[first : first + total].tolist() == [
                row * most + cut for row, count in enumerate(cuts) for cut in range(count)
            ]
            assert not fields["counts"][len(lengths) :].any()
            ends.append(first + total)
        assert ends[1] == entries_of(lengths)
    assert memory.whole.nbytes > 8 << 20
