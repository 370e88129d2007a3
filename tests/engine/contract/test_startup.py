"""The phases of a start are measured; those of an engine's process: see test_process_client.py."""

from __future__ import annotations

from engine.contract.startup import Stages, enter


def test_a_phase_ends_where_the_next_begins() -> None:
    now, lines = [10.0], list[str]()
    stages = Stages(lines.append, lambda: now[0])
    for phase, seconds in (("import", 2.0), ("weights", 3.0), ("import", 0.5)):
        enter(stages, phase)
        stages(f"in {phase}")
        now[0] += seconds
    assert stages.end() == (("import", 2.5), ("weights", 3.0))
    assert lines == ["in import", "in weights", "in import"]
    enter(lines.append, "import")  # a sink that measures nothing
    assert len(lines) == 3
