"""The command that divides a decode step between the model and the engine."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.step_cost import steps_of
from tests.tiny_models import FAMILIES, make_model


def test_each_step_has_a_part_of_the_model_and_one_of_the_engine(tmp_path: Path) -> None:
    make_model(FAMILIES["llama"]()).save_pretrained(tmp_path)
    steps = steps_of(
        argparse.Namespace(
            model=str(tmp_path), dtype="float32", requests=2, steps=5, temperature=0.0, threads=1
        )
    )
    assert len(steps) == 5
    assert all(model > 0 and engine > 0 for model, engine in steps)
