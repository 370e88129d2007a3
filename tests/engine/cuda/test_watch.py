"""Everything that a step must not do on CUDA is seen, and nothing else is taken for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from engine.native.device_copy import to_device
from tests.engine.cuda.watch import AMPERE, CUDA, HOPPER, DeviceFault, Properties, Watch, fake_cuda

Act = Callable[[torch.Tensor], object]

FAULTS: dict[str, tuple[Act, str]] = {
    "item": (lambda x: x.sum().item(), "_local_scalar_dense waits"),
    "truth": (lambda x: bool(x[0, 0] > 0), "_local_scalar_dense waits"),
    "list": (lambda x: x[0].tolist(), "waits"),
    "nonzero": (lambda x: x.nonzero(), "aten::nonzero waits"),
    "where": (lambda x: torch.where(x > 0), "aten::nonzero"),
    "unique": (lambda x: torch.unique(x), "unique"),
    "equal": (lambda x: torch.equal(x, x + 1), "aten::equal waits"),
    "a mask": (lambda x: x[x > 0], "by a mask waits"),
    "a mask of rows": (lambda x: x.index_put_((x[:, 0] > 0,), x[:2]), "by a mask waits"),
    "a mask, and a number of the device's": (
        lambda x: x.index_put_((x > 0,), torch.zeros((), device=CUDA)),
        "by a mask waits",
    ),
    "a fill by a number of the device's": (
        lambda x: x.masked_fill(x > 0, torch.zeros((), device=CUDA)),
        "reads its value",
    ),
    "a number of the host's into rows": (
        lambda x: x.index_put_((torch.arange(2, device=CUDA),), torch.tensor(1.0)),
        "its value is in pageable memory",
    ),
    "a choice of a number of the host's": (
        lambda x: torch.where(x > 0, x, torch.tensor(1.0)),
        "a number is in pageable memory",
    ),
    "counts": (lambda x: x.repeat_interleave(x[:, 0].long(), 0), "by counts waits"),
    "to the host": (lambda x: x.cpu(), "a copy to the host waits"),
    "numpy": (lambda x: x.to("cpu", non_blocking=True).numpy(), "a copy to the host waits"),
    "a tensor of numbers": (lambda x: torch.tensor([1.0], device=CUDA), "pageable memory"),
    "a number": (lambda x: torch.tensor(1.0).to(x), "pageable memory"),
    "a pageable copy": (lambda x: torch.from_numpy(np.ones(3)).to(CUDA), "pageable memory"),
    "not awaited, but pageable": (
        lambda x: torch.ones(3).to(CUDA, non_blocking=True),
        "pageable memory",
    ),
    "pinned, but awaited": (lambda x: torch.ones(3).pin_memory().to(CUDA), "pageable memory"),
    "indices of the host": (lambda x: x[torch.tensor([1, 0])], "indices are on the host"),
    "experts in float32": (
        lambda x: torch._grouped_mm(x, torch.ones(2, 8, 8, device=CUDA), offs=x[0, :2].int()),
        "_grouped_mm in",
    ),
}
FINE: dict[str, Act] = {
    "a view": lambda x: x.view(-1)[3:].unsqueeze(0),
    "a mask that fills": lambda x: x.masked_fill(x > 0, 0.0),
    "the same by an index": lambda x: x.index_put_((x > 0,), torch.zeros(())),
    "a choice": lambda x: torch.where(x > 0, x, 0.0),
    "rows": lambda x: x.index_select(0, torch.arange(2, device=CUDA)),
    "the house's copy": lambda x: to_device([1, 2], CUDA, torch.float32),
    "a number of the host's": lambda x: x * torch.tensor(2.0),
    "work of the host": lambda x: torch.ones(4).cumsum(0).tolist(),
    "a filled one": lambda x: torch.full((3,), 7, device=CUDA),
}


@pytest.fixture
def watch() -> Iterator[Watch]:
    watch = Watch()
    with fake_cuda(watch):
        yield watch


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen(watch: Watch, name: str, inference: bool) -> None:
    act, message = FAULTS[name]
    with torch.inference_mode(inference):
        x = torch.ones(8, 8, device=CUDA)
        with watch.watching(), pytest.raises(DeviceFault, match=message):
            act(x)
    assert [fault.partition(", in ")[2] for fault in watch.faults] == ["<lambda>"]


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("name", FINE)
def test_what_is_fine_is_not_taken_for_a_fault(watch: Watch, name: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        x = torch.ones(8, 8, device=CUDA)
        with watch.watching():
            FINE[name](x)


def test_a_captured_pass_may_not_even_copy_what_is_pinned(watch: Watch) -> None:
    with watch.watching(allows_copies=False), pytest.raises(DeviceFault, match="from the host"):
        to_device([1], CUDA)


@pytest.mark.parametrize("properties", [HOPPER, AMPERE], ids=lambda one: one.name)
def test_experts_in_bfloat16_wait_on_older_devices(properties: Properties) -> None:
    watch = Watch()
    with fake_cuda(watch, properties=properties):
        x = torch.ones(8, 8, device=CUDA, dtype=torch.bfloat16)
        ends = torch.zeros(2, dtype=torch.int32, device=CUDA)
        waits = properties is AMPERE
        with watch.watching(), pytest.raises(DeviceFault) if waits else nullcontext():
            torch._grouped_mm(x, x.new_ones(2, 8, 8), offs=ends)


@pytest.mark.parametrize("inference", [True, False])
def test_launches_are_counted_and_views_are_not(watch: Watch, inference: bool) -> None:
    with torch.inference_mode(inference):
        x = torch.ones(1, 4, 8, device=CUDA, dtype=torch.bfloat16)
        layer = torch.nn.Linear(8, 8, bias=False, device=CUDA, dtype=torch.bfloat16)
        watch.launches.clear()
        y = layer(x).view(4, 2, 4).transpose(0, 1)
        torch.nn.functional.silu(y).reshape(8, 4)
        torch.empty_like(y)
    assert watch.launches == ["mm", "silu", "clone"]
