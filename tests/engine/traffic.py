"""Requests of all kinds through a core, by chance and fast."""

from __future__ import annotations

import random

from engine.core.engine_core import EngineCore
from tests.engine.core_machine import ENDING, draft
from tests.engine.fake_runner import FakeRunner, make_request
from tests.engine.ledger import Ledger


def traffic(
    core: EngineCore,
    runner: FakeRunner,
    count: int,
    chance: random.Random,
    *,
    first: int = 0,
    most_drafts: int = 0,
) -> Ledger:
    """Requests of all kinds through a core, with cancels, finishes, holds and failing steps; at
    most 300 are live at a time.
    """
    drafter = random.Random(count)
    ledger = Ledger()
    added = steps = 0
    while core.has_work or added < count:
        while added < count and len(core._live.by_id) < 300:
            prompt = [chance.choice((1, 2)) for _ in range(chance.randint(1, 24))]
            spec = make_request(
                f"r{first + added}",
                prompt,
                chance.randint(0, 7),
                ending=ENDING if chance.random() < 0.5 else (),
                n=3 if chance.random() < 0.05 else 1,
                priority=chance.randint(-2, 2),
                time_limit_s=1e6 if chance.random() < 0.5 else None,
                prompt_logprobs=0 if chance.random() < 0.1 else None,
                history=chance.random() < 0.02,
                caller=chance.choice("abcd"),
                weight=chance.choice((1.0, 1.0, 3.0)),
            )
            added += 1
            ledger.add(spec)
            core.add(spec, core.clock())
        runner.fail = 1 if steps % 101 == 100 else 0
        runner.fail_results = 1 if steps % 101 == 50 else 0
        if steps % 7 == 0 and core._live.by_id:
            core.cancel(chance.choice(list(core._live.by_id)))
        if steps % 11 == 0 and core.scheduler.running:
            request = chance.choice(list(core.scheduler.running.values()))
            core.finish(request.request_id, chance.randint(0, 3), request.choice)
        if steps % 5 == 0 and core._live.by_id:
            core.hold(chance.choice(list(core._live.by_id)))
        if steps % 40 == 0 or added == count:
            core.unhold_all()
        draft(core, most_drafts, drafter)
        ledger.take(core.step())
        steps += 1
        assert steps < 20 * count
    return ledger
