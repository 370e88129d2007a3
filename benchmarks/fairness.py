"""What a caller gets beside another's backlog: `python -m benchmarks fairness`, about ten minutes.

    first    one caller keeps a backlog of requests of 128 tokens; another repeatedly asks for
             something short. Its time to the first token, at its client, over gRPC, is measured in
             units of the loaded server's median step
    paired   both together under `fair` and under `fifo`, alternately, with alternating order,
             since a machine's speed drifts: tokens per second of all callers
    shares   sixteen callers of equal weight, and three of weights 1, 2 and 4, which always have
             requests of random sizes waiting: how far apart their services are after 60 s. The
             scheduler and core are real; a scripted runner takes as long for a step as a real one

The first two use `headrace-server serve` with the demo model and a callers' file, on loopback; the
clients are in this process. The first seconds of each load warm up and do not count.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import headrace
from headrace.cli.bench.prompts import Lengths

from benchmarks.markdown import Aim, aims
from benchmarks.measures import compared, quantile, ratio_span
from benchmarks.records import Record
from benchmarks.rig.load import Calls, Stories, connect, loaded, measured, running, until
from benchmarks.rig.measurement import DTYPE, MODEL, THREADS, Measurement, option, paired
from benchmarks.rig.serving import Process, flags_of, serve
from engine.contract.request import GenerationRequest, Request
from engine.contract.sampling_params import SamplingParams, StopParams
from engine.contract.token_ids import TokenIds
from engine.contract.types import CallerKey, GroupId, RequestId, RequestKey, TokenId
from engine.core.engine_core import EngineCore
from engine.kv_cache.group_kinds import FullAttention
from engine.kv_cache.groups import LayerGroup
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.scheduler.fair import FairScheduler
from engine.scheduler.runner_protocol import SampledTokens
from engine.scheduler.scheduled_batch import ScheduledBatch
from engine.scheduler.step_plan import StepPlan

BACKLOG_TOKENS = 128
SHORT_TOKENS = 8
_CALLERS = ("backlog", "other", "operator")
_STEP_S, _TOKEN_S = 0.002, 0.00002
"""The approximate time of a step of the demo model, and what each of its tokens adds."""
_PAUSE_S = 0.1
"""About how long the short requests' client pauses, so that it does not synchronise with the
server.
"""
_WATCH_S = 0.1
QUEUED = 20
"""How many requests of each caller wait: more than a step can begin."""


@contextlib.contextmanager
def serving(options: argparse.Namespace, *schedulers: str) -> Iterator[dict[str, Process]]:
    """Run a server for each policy, with a token for each caller."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        callers = Path(folder) / "callers.toml"
        callers.write_text(
            "\n".join(
                f'[[callers]]\nidentity = "{name}"\nservices = ["*"]\n'
                f'token_sha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\n'
                for name in _CALLERS
            )
        )
        flags = flags_of(options, "--auth-file", str(callers), "--no-prefix-cache")
        yield {
            name: stack.enter_context(serve(*flags, "--scheduler", name, model=options.model))
            for name in schedulers
        }


def backlog(
    client: headrace.AsyncClient, options: argparse.Namespace
) -> contextlib.AbstractAsyncContextManager[object]:
    lengths = Lengths(BACKLOG_TOKENS - options.spread, BACKLOG_TOKENS + options.spread)
    return loaded(Calls(client, streamed=False), Stories(lengths, seed=1), options.backlog)


async def watch(operator: headrace.AsyncClient, steps: list[float]) -> None:
    """Record the time of the server's last step, a few times per second."""
    async for now in operator.control.watch(_WATCH_S):
        steps.append(now.engine.last_step_duration.ToNanoseconds() / 1e9)


async def ask_short(
    client: headrace.AsyncClient, seed: int, found: list[float], count: int | None = None
) -> None:
    """Send short requests, one after the other, and record their times to the first token. None:
    endlessly.
    """
    stories, chance = Stories(Lengths(SHORT_TOKENS, SHORT_TOKENS), seed), random.Random(seed)
    for number in itertools.count() if count is None else range(count):
        await asyncio.sleep(chance.uniform(0, 2 * _PAUSE_S))
        began, first = time.perf_counter(), 0.0
        async with client.stream(stories.request(number)) as stream:
            async for chunk in stream:
                if not first and chunk.token_ids:
                    first = time.perf_counter() - began
        found.append(first)
        if number % 50 == 49 and count is not None:
            print(f"  {number + 1} of {count} short requests", flush=True)


@contextlib.asynccontextmanager
async def connected(server: Process) -> AsyncIterator[Sequence[headrace.AsyncClient]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(connect(server, name)) for name in _CALLERS]


async def measure_first(server: Process, options: argparse.Namespace) -> dict[str, Any]:
    steps: list[float] = []
    alone: list[float] = []
    beside: list[float] = []
    async with connected(server) as (many, other, operator):
        await ask_short(other, 2, alone, options.alone)
        async with backlog(many, options):
            await asyncio.sleep(options.warm_up)
            engine = (await operator.control.statistics()).engine
            async with running(watch(operator, steps)):
                await ask_short(other, 3, beside, options.samples)
    step = statistics.median(steps)
    return {
        "samples": len(beside),
        "waiting": engine.waiting,
        "running": engine.running,
        "step_p50_s": step,
        "step_p99_s": quantile(steps, 99),
        "alone_p50_s": statistics.median(alone),
        "ttft_p50_s": statistics.median(beside),
        "ttft_p99_s": quantile(beside, 99),
        "ttft_max_s": max(beside),
        "ttft_p50_steps": statistics.median(beside) / step,
        "ttft_p99_steps": quantile(beside, 99) / step,
    }


async def turn(server: Process, options: argparse.Namespace) -> dict[str, float]:
    """Run an endless backlog and short requests, and return what the server did meanwhile. A batch
    that empties at the end would measure its end rather than the policy.
    """
    times: list[float] = []
    async with connected(server) as (many, other, operator):
        async with backlog(many, options), running(ask_short(other, 4, times)):
            await asyncio.sleep(options.warm_up)
            found = await measured(operator, server, options.turn_seconds)
        await until(operator, lambda now: not now.engine.running)
    return {**found, "short_tokens": SHORT_TOKENS * len(times)}


def measure_paired(servers: Mapping[str, Process], options: argparse.Namespace) -> dict[str, Any]:
    turns = paired(
        tuple(servers), options.turns, lambda name: asyncio.run(turn(servers[name], options))
    )
    ratios = compared(turns["fair"], turns["fifo"], "tokens_per_s")
    return {**turns, "ratios": ratios["ratios"], "ratio": ratios["median"]}


class NoModel:
    """A runner that computes nothing. Implements `Runner` and `PendingStep`."""

    def __init__(self) -> None:
        self._sampled = SampledTokens(())

    def launch(self, batch: ScheduledBatch) -> NoModel:
        """Sample the same token everywhere."""
        self._sampled = SampledTokens([TokenId(1)] * sum(one.num_sampled for one in batch.requests))
        return self

    def sample(self) -> None:
        """Do nothing."""

    def result(self) -> SampledTokens:
        return self._sampled

    def release(self, key: RequestKey) -> None:
        """Do nothing."""

    def forget_model(self) -> None:
        """Do nothing."""

    def warmup(self) -> None:
        """Do nothing."""


class CountingScheduler(FairScheduler):
    """The policy, which also counts how often a request is set aside."""

    given_up = 0

    def set_aside(self, plan: StepPlan, request: Request) -> None:
        self.given_up += 1
        super().set_aside(plan, request)


def share_for(seconds: float, weights: Sequence[float], max_requests: int) -> dict[str, Any]:
    """Return what callers were given after this time, each divided by its weight. Caller number i
    has QUEUED requests waiting, with prompts of up to 16 + 8 (i % 5) tokens and outputs of up to
    8 + 24 (i % 4).
    """
    layer = LayerGroup(group_id=GroupId(0), kind=FullAttention(), layers=(0,), bytes_per_token=8)
    kv_cache = KVCacheManager([layer], [4096], 4, share_blocks=False)
    scheduler = CountingScheduler(
        kv_cache, max_batch_tokens=256, max_requests_per_batch=max_requests
    )
    core = EngineCore(scheduler, NoModel(), max_context_tokens=4096)
    chance, names = random.Random(0), itertools.count()
    callers = [CallerKey(f"c{index}") for index in range(len(weights))]

    def add(index: int) -> None:
        prompt = TokenIds.of([1] * chance.randint(1, 16 + 8 * (index % 5)), "prompt")
        request = GenerationRequest(
            request_id=RequestId(f"r{next(names)}"),
            prompt=prompt,
            sampling=SamplingParams(),
            stop=StopParams(max_tokens=chance.randint(1, 8 + 24 * (index % 4))),
            caller=callers[index],
            weight=weights[index],
        )
        core.add(request, time.monotonic())

    due = end = time.perf_counter()
    end += seconds
    steps, given = 0, 0
    while due < end:
        rows = {one.caller: one.waiting for one in core.stats().callers}
        for index, name in enumerate(callers):
            for _ in range(QUEUED - rows.get(name, 0)):
                add(index)
        core.step()
        service = {one.caller: one.service for one in core.stats().callers}
        steps += 1
        due += _STEP_S + _TOKEN_S * (sum(service.values()) - given)
        given = sum(service.values())
        time.sleep(max(0.0, due - time.perf_counter()))
    shares = [service[name] / weight for name, weight in zip(callers, weights, strict=True)]
    return {
        "weights": list(weights),
        "max_requests": max_requests,
        "seconds": seconds,
        "steps": steps,
        "service": [service[name] for name in callers],
        "apart": max(shares) / min(shares) - 1,
        "places_given_up": scheduler.given_up,
    }


def measure_shares(options: argparse.Namespace, record: Record) -> None:
    for name, weights in (("equal", (1.0,) * 16), ("weighted", (1.0, 2.0, 4.0))):
        found = share_for(options.seconds, weights, max_requests=8)
        print(f"  {name}: {found['apart']:.2%} apart", flush=True)
        record.put(found, "shares", name)


def table(record: Mapping[str, Any]) -> str:
    rows = []
    if (first := record.get("first")) is not None:
        backlog = f"a backlog of {record['options']['backlog']} × {BACKLOG_TOKENS}"
        step = f"{first['step_p50_s'] * 1e3:.2f} ms"
        for what, most, name in (
            (f"time to the first token beside {backlog}, median, in steps of {step}", 3, "p50"),
            (f"its p99 of {first['samples']}", 8, "p99"),
        ):
            steps, seconds = first[f"ttft_{name}_steps"], first[f"ttft_{name}_s"]
            rows.append(Aim(what, steps, f"{steps:.2f} ({seconds * 1e3:.1f} ms)", most=most))
    if (both := record.get("paired")) is not None:
        what = f"throughput of fair / fifo, median of {len(both['ratios'])} turns"
        rows.append(Aim(what, both["ratio"], ratio_span(both["ratios"]), least=0.98))
    for name, found in record.get("shares", {}).items():
        what = f"{len(found['weights'])} callers, {name}: most / least service for its weight "
        ratio = 1 + found["apart"]
        rows.append(Aim(f"{what}after {found['seconds']:g} s", ratio, f"{ratio:.4f}", most=1.05))
    return aims(rows)


def measure(options: argparse.Namespace, record: Record) -> None:
    if "first" in options.parts:
        print("first: short requests alone, then beside the backlog", flush=True)
        with serving(options, "fair") as servers:
            record.put(asyncio.run(measure_first(servers["fair"], options)), "first")
    if "paired" in options.parts:
        print("paired: throughput under fair and under fifo", flush=True)
        with serving(options, "fair", "fifo") as servers:
            record.put(measure_paired(servers, options), "paired")
    if "shares" in options.parts:
        print("shares: callers that always wait", flush=True)
        measure_shares(options, record)


MEASUREMENT = Measurement(
    measure=measure,
    table=table,
    options=(
        *(MODEL, DTYPE, THREADS),
        option("parts", "first,paired,shares", type=lambda text: text.split(",")),
        option("backlog", 500, "requests that wait or run"),
        option(
            "spread",
            0,
            "how many tokens shorter or longer than 128 they are (default 0: requests that begin "
            "together end together, and a step with prompts is rare)",
        ),
        option("samples", 250, "short requests beside it"),
        option("alone", 50, "short requests before it"),
        option("warm_up", 4.0, "seconds of a load before it counts"),
        option("turns", 7, "pairs that count"),
        option("turn_seconds", 12.0, "of each turn"),
        option("seconds", 60.0, "of each part of shares"),
    ),
    quick={
        **{"backlog": 100, "samples": 5, "alone": 2, "warm_up": 0.5},
        **{"turns": 1, "turn_seconds": 1.0, "seconds": 1.0},
    },
)
