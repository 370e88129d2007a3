"""No step waits for the device to copy to it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import engine
from engine.native.device_copy import to_device

ENGINE = Path(engine.__file__).parent
IN_A_STEP = [
    *sorted((ENGINE / "attention").glob("*.py")),
    *sorted((ENGINE / "sampling").glob("*.py")),
    *(
        ENGINE / "runner" / f"{name}.py"
        for name in (
            "block_copies",
            "captured",
            "cuda_graph",
            "forward",
            "input_batch",
            "launched",
            "model_runner",
            "prompt_logprobs",
            "static_inputs",
        )
    ),
]
_FROM_HOST = {"from_numpy", "tensor", "as_tensor", "asarray"}
_COPIES = {"to", "cuda"}


def blocking_copies(source: str) -> Iterator[int]:
    """Lines that make a tensor of the host's numbers and copy it, or make it on the device, at
    once.
    """
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if _is_from_host(node) and any(word.arg == "device" for word in node.keywords):
            yield node.lineno
        if node.func.attr in _COPIES and _is_from_host(node.func.value):
            yield node.lineno


def _is_from_host(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _FROM_HOST
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
    )


@pytest.mark.parametrize(
    "planted",
    [
        "torch.from_numpy(rows).to(device)",
        "torch.tensor(rows).cuda()",
        "torch.tensor(rows, device=device)",
        "torch.as_tensor(rows).to(like)",
    ],
)
def test_a_blocking_copy_is_seen(planted: str) -> None:
    assert list(blocking_copies(f"rows = [1]\nx = {planted}.view(1)\n")) == [2]


def test_what_does_not_copy_is_not_taken_for_it() -> None:
    fine = "a = torch.zeros(3, device=device)\nb = to_device(rows, device)\nc = x.to(torch.int32)\n"
    assert not list(blocking_copies(fine))


@pytest.mark.parametrize("path", IN_A_STEP, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_step_copies_by_to_device(path: Path) -> None:
    lines = list(blocking_copies(path.read_text()))
    assert not lines, f"{path.name}, lines {lines}: use engine.native.device_copy.to_device"


def test_memory_is_pinned_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[torch.Tensor] = []

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor)
        return tensor

    copied: list[bool] = []
    to = torch.Tensor.to

    def watched(tensor: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        copied.append(bool(options.get("non_blocking")))
        return to(tensor, *args, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "to", watched)
    found = to_device(np.arange(6)[::2], torch.device("meta"), torch.float32)
    assert (found.device.type, found.dtype, tuple(found.shape)) == ("meta", torch.float32, (3,))
    assert [tensor.tolist() for tensor in pinned] == [[0, 2, 4]]
    assert copied[0], "to the device"


def test_on_a_cpu_nothing_is_copied_that_need_not_be() -> None:
    rows = np.arange(4)
    same = to_device(rows, torch.device("cpu"))
    rows[0] = 7
    assert same.tolist() == [7, 1, 2, 3]
    assert to_device([1, 2], torch.device("cpu"), torch.float32).tolist() == [1.0, 2.0]
