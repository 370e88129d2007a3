"""The witness sees what goes wrong: stalls, wrong and lost tokens, refusals, memory.

The server runs on the test's own event loop, so that a stall is as long as the test says, in the
witness's ticks.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from benchmarks.processes import ROOT
from benchmarks.usage import resident
from engine.contract.errors import QueueFullError
from engine.contract.request import GenerationRequest
from tests.campaign.witness.memory import Watched
from tests.campaign.witness.probes import TICK_S
from tests.campaign.witness.process import Witness
from tests.campaign.witness.report import Memory, Report, Timer, Waits, Watch, WitnessError
from tests.service.fake_engine import FakeEngine, default_script, says
from tests.service.helpers import DEADLINE_S, Harness, serving

TOKENS = 40
MIB = 1 << 20


class SteadyEngine(FakeEngine):
    """A step every few milliseconds, so that there is always a request to disturb."""

    async def _run_loop(self) -> None:
        while True:
            self.step()
            await asyncio.sleep(0.002)


async def ask(witness: Witness, wanted: Callable[[Report], bool]) -> Report:
    """Reports, while the server runs, until one fits."""
    async with asyncio.timeout(DEADLINE_S):
        while not wanted(report := await asyncio.to_thread(witness.report)):
            pass
    return report


@asynccontextmanager
async def witnessed(engine: FakeEngine | None = None) -> AsyncIterator[tuple[Witness, Harness]]:
    pid = os.getpid()
    async with serving(engine or SteadyEngine()) as h:
        witness = Witness(h.server.addresses[0], {"both": pid}, tokens=TOKENS)
        await asyncio.to_thread(witness.start)
        try:
            yield witness, h
        finally:
            await asyncio.to_thread(witness.close)


async def test_nothing_is_wrong_where_nothing_is_tried() -> None:
    async with witnessed() as (witness, _):
        report = await ask(
            witness, lambda found: found.requests > 2 and min(counts(found).values()) > 3
        )
    assert report.tokens >= 3 * TOKENS
    assert (report.wrong_tokens, report.lost_tokens, report.wrong_texts) == (0, 0, 0)
    assert (report.not_serving, dict(report.refusals)) == (0, {})
    assert report.memory["both"].pid == os.getpid()
    assert 0 < report.memory["both"].start <= report.memory["both"].peak


def counts(report: Report) -> dict[str, int]:
    return {
        name: getattr(report, name).count for name in ("gaps", "tokenize", "health", "first_tokens")
    }


async def test_it_sees_the_server_stand_still() -> None:
    """The event loop of the server stands still while the witness's timer fires 100 times."""
    async with witnessed() as (witness, _):
        await ask(witness, lambda found: found.tokens > 0)
        witness.begin()
        before = witness.report()
        ticks = 100
        while (during := witness.report()).ticks < before.ticks + ticks:
            pass
        after = await ask(witness, lambda found: found.requests > 0)
    # What it waits for counts at once, not when it is over. Between two calls it pauses.
    least = ticks * TICK_S / 2
    assert during.gaps.worst_s + during.first_tokens.worst_s >= least
    assert after.health.worst_s >= least
    assert after.tokenize.worst_s >= least
    assert after.ticks > ticks
    assert after.wrong_tokens == after.lost_tokens == 0


async def test_it_sees_wrong_tokens() -> None:
    one_is_wrong = False

    def script(request: GenerationRequest, choice: int) -> list[int]:
        tokens = list(default_script(request, choice))
        if one_is_wrong:
            tokens[7] += 1
        return tokens

    async with witnessed(SteadyEngine(script=script)) as (witness, _):
        await ask(witness, lambda found: found.requests > 0)
        one_is_wrong = True
        report = await ask(witness, lambda found: found.wrong_tokens > 1)
        assert report.lost_tokens == 0
        # One in each request that began since.
        assert report.wrong_tokens <= report.tokens // TOKENS + 1


async def test_it_sees_lost_tokens_and_failures() -> None:
    async with witnessed(SteadyEngine(restartable=True)) as (witness, h):
        await ask(witness, lambda found: found.tokens > 0)
        h.engine.die(RuntimeError("planted"))
        report = await ask(witness, lambda found: found.lost_tokens > 0)
        assert 0 < report.lost_tokens <= TOKENS
        assert report.wrong_tokens == 0
        assert any(name.startswith("failed: UNAVAILABLE") for name in report.refusals)
        requests = report.requests
        await ask(witness, lambda found: found.requests > requests)


async def test_it_goes_on_after_refusals() -> None:
    async with witnessed() as (witness, h):
        requests = (await ask(witness, lambda found: found.requests > 0)).requests
        h.engine.refuse_next += [QueueFullError(1024, 0.05), QueueFullError(1024, 0.05)]
        report = await ask(
            witness, lambda found: found.refusals != {} and found.requests > requests + 1
        )
    assert dict(report.refusals) == {"RESOURCE_EXHAUSTED QUEUE_FULL": 2}
    assert report.lost_tokens == 0


async def test_it_sees_health_that_is_not_serving() -> None:
    async with witnessed() as (witness, h):
        await ask(witness, lambda found: found.health.count > 0)
        await h.server.stop()
        await ask(witness, lambda found: found.not_serving > 0)


async def test_it_sees_memory_grow() -> None:
    async with witnessed() as (witness, _):
        witness.begin()
        grown = bytearray(64 * MIB)
        grown[:: 1 << 12] = b"x" * len(grown[:: 1 << 12])  # every page is there
        found = witness.report()
        del grown
        assert found.memory["both"].growth >= 60 * MIB
        witness.begin()
        assert witness.report().memory["both"].growth < 60 * MIB


async def test_a_server_whose_tokens_change_is_none_to_witness() -> None:
    runs = iter(range(1000))

    def script(_request: GenerationRequest, _choice: int) -> bytes:
        return bytes([97 + next(runs)]) * TOKENS

    async with serving(SteadyEngine(script=script)) as h:
        witness = Witness(h.server.addresses[0], {}, tokens=TOKENS)
        with pytest.raises(WitnessError, match="serve the model in float32"):
            await asyncio.to_thread(witness.start)


async def test_too_many_tokens() -> None:
    async with serving(SteadyEngine(script=says("x", eos=False))) as h:
        witness = Witness(h.server.addresses[0], {}, tokens=5000)
        with pytest.raises(WitnessError, match="tokens came where 5000 were asked for"):
            await asyncio.to_thread(witness.start)


async def test_a_server_that_is_not_there_is_none_to_witness() -> None:
    witness = Witness("unix:/nowhere/s", {}, ready_s=0.1)
    with pytest.raises(WitnessError, match=r"was not ready within 0\.1 s"):
        await asyncio.to_thread(witness.start)


async def test_a_witness_that_has_ended_is_told_so() -> None:
    async with witnessed() as (witness, _):
        os.kill(witness._process.pid or 0, signal.SIGKILL)
        with pytest.raises(WitnessError, match="has ended"):
            await asyncio.to_thread(witness.report)


def test_it_needs_the_client_alone() -> None:
    blocked = "import sys\nfor name in ('torch', 'engine', 'service', 'psutil', 'transformers'):\n"
    blocked += "    sys.modules[name] = None\nimport tests.campaign.witness.process\n"
    done = subprocess.run([sys.executable, "-c", blocked], cwd=ROOT, timeout=DEADLINE_S)
    assert done.returncode == 0


def test_a_wait_is_told_from_the_witness_own_lag() -> None:
    timer, watch = Timer(), Watch()
    for key, (began, ended) in enumerate([(0.0, 0.1), (1.0, 1.5), (2.0, 2.2)]):
        watch.begin(key, began)
        watch.end(key, ended)
    timer.tick(0.1, 0.08, noted=0.01)
    timer.tick(1.4, 0.3, noted=0.01)
    timer.tick(1.9, 0.35, noted=0.01)
    watch.begin("open", 3.0)
    found = watch.waits(3.25, timer)
    assert (found.count, found.worst_s, found.late_s) == (4, 0.5, 0.3)
    assert watch.waits(4.0, timer).worst_s == 1.0
    assert watch.waits(4.0, timer).late_s == 0.0
    watch.reset(5.0)
    assert watch.waits(5.5, timer).count == 1
    watch.drop("open")
    assert watch.waits(6.0, timer) == Waits()


def test_many_waits_keep_their_worst() -> None:
    watch = Watch()
    for index in range(1000):
        watch.begin(index, index)
        watch.end(index, index + (0.9 if index == 17 else 0.1))
    assert watch.waits(2000.0, Timer()).worst_s == pytest.approx(0.9)


def test_memory_of_a_process_that_ends() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        watched = Watched(process.pid)
        watched.begin()
        assert watched.memory().start > 0
        assert not watched.memory().is_gone
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
    assert watched.memory().is_gone
    assert watched.memory().peak >= watched.start
    assert resident(process.pid) == (0, 0)
    assert Memory(1, 10, 12, 15).growth == 5
