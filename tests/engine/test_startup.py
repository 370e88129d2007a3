"""The phases of a start are measured, also in an engine's own process."""

from __future__ import annotations

from engine.config import ContinuousBatchingConfig, LoadConfig
from engine.process.client import ProcessEngineClient
from engine.startup import Stages, enter

PHASES = ["import", "weights", "kernels", "verify", "cache", "vocabulary", "warm_up"]


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


async def test_an_engine_tells_how_long_its_phases_took() -> None:
    client = ProcessEngineClient(
        "models/demo",
        ContinuousBatchingConfig(num_blocks=16, block_size=32),
        LoadConfig(threads=1, device="cpu"),
    )
    info = await client.start(lambda _step: None, lambda _line: None)
    await client.close()
    assert [phase for phase, _ in info.startup] == PHASES
    assert all(seconds > 0 for _, seconds in info.startup)
