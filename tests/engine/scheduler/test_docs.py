"""The policy that docs/schedulers.md shows is one: it is registered, used and starves nobody."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from engine.contract.config import ContinuousBatchingConfig
from engine.scheduler import policies as registry
from engine.scheduler.policies import scheduler_class
from engine.scheduler.prefill_first import PATIENCE
from tests.engine.core_machine import ENDING
from tests.engine.fake_runner import make_core, make_request
from tests.engine.ledger import Ledger, drain

DOCS = Path(__file__).parents[3] / "docs" / "schedulers.md"


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs the example; its name."""
    monkeypatch.setattr(registry, "_SCHEDULERS", dict(registry._SCHEDULERS))
    (example,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    exec(compile(example, str(DOCS), "exec"), {"__name__": "example"})
    return "shortest_first"


def test_short_prompts_start_first(shown: str) -> None:
    config = ContinuousBatchingConfig(scheduler_type=shown)
    assert scheduler_class(config.scheduler_type).__name__ == "ShortestFirstScheduler"
    core, runner, _ = make_core(policy=shown, max_requests=1)
    started: list[str] = []
    runner.hook = lambda batch: started.append(batch.requests[0].request.request_id)
    for length in (9, 3, 8, 2, 7):
        core.add(make_request(f"r{length}", range(length), 1), 100.0)
    while core.has_work:
        core.step()
    assert started == ["r2", "r3", "r7", "r9", "r8"]  # the fourth is the one that waited longest


@pytest.mark.parametrize("overlap", [False, True])
def test_it_starves_nobody_and_is_right(shown: str, overlap: bool) -> None:
    core, _, kv_cache = make_core(
        policy=shown, num_blocks=14, overlap=overlap, late=overlap, share_blocks=True
    )
    ledger, chance = Ledger(), random.Random(3)
    for index in range(200):
        prompt = [chance.randrange(3) for _ in range(chance.randint(1, 25))]
        spec = make_request(
            f"r{index}", prompt, chance.randint(0, 12), n=chance.choice((1, 1, 3)), ending=ENDING
        )
        ledger.add(spec)
        core.add(spec, 100.0)
    drain(core, ledger)
    ledger.check(core.max_context_tokens)
    assert core.stats().preemptions > 0
    assert kv_cache.num_used_blocks == 0


def test_the_figures_in_the_text_are_the_codes() -> None:
    assert f"at most {PATIENCE} steps in a row" in DOCS.read_text()
    for name in registry._SCHEDULERS:
        assert f"| `{name}`" in DOCS.read_text()
