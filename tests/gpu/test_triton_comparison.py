"""The comparison of our decoder at load, with attention by Triton: a request that begins and one
that goes on behind it are one step, so what a step writes must be there before it is read.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from engine.attention.interface import AttentionMetadata, BatchLayout
from engine.attention.registry import register
from engine.attention.triton_backend import TritonAttentionBackend
from engine.contract.types import TokenId
from engine.loading.watching import observe
from engine.models import choosing
from engine.models.description import Decoder
from engine.models.torch_decoder import TorchDecoder
from engine.models.triton_operations import TritonOperations
from tests.engine.models.decoders import make

pytestmark = pytest.mark.gpu

PROMPT = tuple(map(TokenId, (3, 40, 7, 99, 12)))


class Late(TritonAttentionBackend):
    """A request's context is not there if it was written in the same step: here, if the request
    goes on with several tokens.
    """

    def prepare(self, layout: BatchLayout, *others: Any) -> AttentionMetadata:
        tables = layout.tables.copy()
        for row in np.flatnonzero((layout.starts > 0) & (layout.counts > 1)):
            tables[row, : layout.starts[row] // layout.block_size] = 0
        return super().prepare(dataclasses.replace(layout, tables=tables), *others)


def compared(
    backend: TritonAttentionBackend, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> object:
    """Our decoder of a tiny model, behind the comparison."""
    if device.type == "cpu":  # by the interpreter
        monkeypatch.setattr(choosing, "TORCH_DEVICES", frozenset({"cpu"}))
        monkeypatch.setattr(choosing, "operations_for", lambda *wanted: TritonOperations())
    register()
    model = make("llama", num_hidden_layers=1).float().to(device)
    plan = choosing.describe_steps(model, device, backend, is_packed=False)
    assert isinstance(plan, Decoder)
    with choosing.exact_sums():
        found = observe(model, [PROMPT], decoder=plan)
    lines: list[str] = []
    return choosing.make_decoder(model, plan, backend, found, lines.append) or lines[-1]


@pytest.mark.timeout(300)
def test_a_step_reads_what_it_writes(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(compared(TritonAttentionBackend(), device, monkeypatch), TorchDecoder)


@pytest.mark.timeout(300)
def test_a_context_that_is_late_is_found(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.models.comparison._BLOCK_SIZE", 2)
    found = compared(Late(), device, monkeypatch)
    assert "layer 0, attention, with inputs times 1 differs" in str(found)
