"""Drafts that are computed whenever there is a guess, whatever steps are measured to take."""

from __future__ import annotations

from typing import Any

import pytest

from engine import assembly
from engine.contract.request import Request
from engine.drafts import drafter
from engine.drafts.row_costs import RowTimes


def draft_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines that are built from now on ask for guesses in each step, and try them all."""

    def all_of_it(
        self: drafter.Drafter, requests: list[Request], asked: list[drafter._Asked], *rest: Any
    ) -> None:
        for one in asked:
            one.count = len(one.chances)

    free = RowTimes((1, 64), (1.0, 1.0), 0.0, 0.0)
    monkeypatch.setattr(assembly, "row_times", lambda *given: free)
    monkeypatch.setattr(drafter, "_CLEARLY", -1.0)
    monkeypatch.setattr(drafter.Drafter, "_choose", all_of_it)
