"""The line that tells what a busy server does, and the levels of modules."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from dataclasses import replace

import pytest

from engine.contract.errors import ConfigError, QueueFullError
from engine.contract.stats import EngineStats
from engine.logs.levels import set_levels
from service.config import ServiceConfig
from service.errors.refusals import Refusals
from service.logs.output import Output
from service.telemetry import summary
from service.telemetry.summary import Summary
from tests.service.fake_engine import FakeEngine, says
from tests.service.helpers import refused, serving, spec, until

IDLE = EngineStats(blocks_total=100)
METHOD = "headrace.v1.GenerationService/Generate"


def test_the_line_tells_what_happened_since_the_last_one() -> None:
    now = [0.0]
    refusals = Refusals()
    told = Summary(FakeEngine(), refusals, 5.0, lambda: now[0])
    now[0] += 5
    assert told.line(IDLE) == ""
    now[0] += 5
    busy = replace(
        IDLE, running=3, waiting=2, held=1, blocks_used=45, steps=10, generated_tokens=1000,
        prompt_tokens=500, prefix_queries=80, prefix_hits=20, preemptions=4,
    )  # fmt: skip
    for _ in range(2):
        refusals.add(METHOD, QueueFullError(5, 1.0))
    assert told.line(busy) == (
        "3 running, 2 waiting, 1 held; 200 tokens/s; 100 of prompts; KV cache 45%; "
        "prefix hits 25%; 4 preempted; 2 refused (2 QUEUE_FULL)"
    )
    now[0] += 10
    done = replace(busy, running=0, waiting=0, held=0, blocks_used=0, steps=11)
    assert told.line(done) == (
        "0 running, 0 waiting, 0 held; 0 tokens/s; 0 of prompts; KV cache 0%"
    )
    assert told.line(done) == ""
    now[0] += 5
    new = replace(IDLE, running=1, steps=3, generated_tokens=50)  # of another engine
    assert "; 10 tokens/s" in told.line(new)


async def test_a_busy_server_logs_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sleep = asyncio.sleep

    async def soon(seconds: float) -> None:
        await sleep(0.001 if seconds == 86_400.0 else seconds)

    class Patched:
        """asyncio with short nights."""

        sleep = staticmethod(soon)

    monkeypatch.setattr(summary, "asyncio", Patched)
    with caplog.at_level(logging.INFO, "service.telemetry.summary"):
        async with serving(FakeEngine(script=says("abc")), log_summary_s=86_400.0) as h:
            await h.generate(spec())
            h.engine.refuse_next.append(QueueFullError(5, 1.0))
            await refused(h.generate(spec()))

            def lines() -> list[str]:
                records = caplog.records
                return [
                    one.getMessage() for one in records if one.name == "service.telemetry.summary"
                ]

            await until(lambda: any("1 refused (1 QUEUE_FULL)" in line for line in lines()))


async def test_the_phases_of_the_start_are_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "service.server"):
        async with serving(FakeEngine(script=says("abc"))):
            pass
    assert re.search(r"started in 3\.\d s: process 0\.0, weights 3\.5, front_end \d", caplog.text)


@pytest.mark.parametrize("wrong", ["engine", "engine=loud", "=debug", "a\n=info"])
def test_levels_that_are_none_are_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"engine\.scheduler=debug"):
        ServiceConfig(log_level_of=(wrong,))


def test_modules_have_levels_of_their_own(capfd: pytest.CaptureFixture[str]) -> None:
    noisy, other = logging.getLogger("service.noisy.part"), logging.getLogger("service.other")
    with Output("json", "error", ("service.noisy=debug",)):
        noisy.debug("seen")
        other.warning("not seen")
    lines = [json.loads(line)["message"] for line in capfd.readouterr().err.splitlines()]
    assert "seen" in lines
    assert "not seen" not in lines
    assert logging.getLogger("service.noisy").level == logging.NOTSET
    before = set_levels(["service.noisy=info"])
    assert before == {"service.noisy": logging.NOTSET}
    logging.getLogger("service.noisy").setLevel(logging.NOTSET)
