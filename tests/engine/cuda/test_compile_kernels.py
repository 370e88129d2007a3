"""`tests/compile_kernels.py`: a fault ends it with 1 and keeps no other case from being told."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests import compile_kernels
from tests.compile_kernels import compile_case, describe, main
from tests.engine.cuda.kernel_cases import Case, faults
from tests.engine.cuda.kernels import Found

RIGHT = Found(
    "rotate_kernel",
    shared=64,
    spilled=0,
    products=(),
    copies=(),
    ahead=frozenset(),
    starts_early=True,
)
WRONG = dataclasses.replace(RIGHT, spilled=24)
CASE = Case("a layer", lambda: None, torch.bfloat16)


def test_what_does_not_compile_is_a_fault() -> None:
    def run() -> None:
        raise RuntimeError("out of registers")

    result = compile_case(dataclasses.replace(CASE, run=run))
    lines = ["a layer: WRONG: it does not compile: RuntimeError: out of registers"]
    assert describe("a layer", result) == (lines, 1)


def test_each_kernel_is_told_with_its_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_kernels, "compile_all", lambda *given: [RIGHT, WRONG])
    result = compile_case(CASE)
    assert result == ([(RIGHT, []), (WRONG, faults(CASE, WRONG))], None)
    lines, wrong = describe("a layer", result)
    assert wrong == 1
    assert [("WRONG" in line) for line in lines] == [False, True]
    assert lines[1].endswith("; WRONG: 24 bytes of a thread's registers are spilled")


def test_no_case_at_all_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert not main(["--only", "nothing like that", "--jobs", "1"])
    assert capsys.readouterr().out.startswith("0 cases in 0 s; no kernels are")
