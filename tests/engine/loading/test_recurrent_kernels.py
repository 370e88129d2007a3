"""Recurrent modules that our kernels compute: which ones, and only if they compute the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.loading import recurrent_kernels
from engine.loading.loader import verify_model
from tests.tiny_models import FAMILIES, make_model

KNOWN = ("bailing_hybrid", "kimi_linear", "lfm2", "lfm2_moe", "lfm3", "olmo_hybrid", "qwen3_5",
         "qwen3_5_moe", "qwen3_next")  # fmt: skip
UNKNOWN = ("bamba", "jamba", "mamba2", "zaya")


def _line(family: str, **settings: Any) -> str:
    """What the log says of a tiny model's recurrent modules."""
    lines: list[str] = []
    verify_model(make_model(FAMILIES[family](**settings)), Path(), lines.append)
    [found] = [one for one in lines if one.startswith("recurrent modules: ")]
    return found


@pytest.mark.parametrize("family", KNOWN)
def test_our_kernels_compute_the_modules_that_they_know(family: str) -> None:
    assert _line(family) == "recurrent modules: our kernels compute 2 of 2"


@pytest.mark.parametrize("family", UNKNOWN)
def test_other_modules_keep_their_own_code(family: str) -> None:
    line = _line(family)
    assert line.startswith("recurrent modules: our kernels compute 0 of ")
    assert "request by request, which is slower: there is no kernel for " in line


def test_a_model_without_states_has_no_line() -> None:
    lines: list[str] = []
    verify_model(make_model(FAMILIES["llama"]()), Path(), lines.append)
    assert not any("recurrent modules" in one for one in lines)


def test_an_activation_that_the_kernel_lacks_is_named() -> None:
    line = _line("qwen3_5", hidden_act="gelu")
    assert "our kernels compute 0 of 2" in line
    assert "there is no kernel for a convolution with gelu" in line


Operation = Callable[..., torch.Tensor]


def _decays_late(operation: Operation) -> Operation:
    return lambda query, key, value, decay, *rest: operation(
        query, key, value, decay.roll(1, dims=0), *rest
    )


def _forgets(operation: Operation) -> Operation:
    return lambda *given: operation(*given[:-4], given[-4].clone(), *given[-3:])


def _takes_another_slot(operation: Operation) -> Operation:
    return lambda *given: operation(*given[:-1], given[-1].roll(1))


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("gated_delta_rule", _decays_late),
        *(
            (name, fault)
            for name in ("gated_delta_rule", "short_convolution")
            for fault in (_forgets, _takes_another_slot)
        ),
    ],
)
def test_a_kernel_that_computes_something_else_is_not_used(
    name: str, fault: Callable[[Operation], Operation], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrent_kernels, name, fault(getattr(recurrent_kernels, name)))
    line = _line("qwen3_5")
    assert "our kernels compute 0 of 2" in line
    assert "a trial differs by" in line
