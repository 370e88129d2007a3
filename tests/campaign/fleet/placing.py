"""Where requests go: prefixes over several servers, and servers of unequal speed."""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import headrace
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_service_pb2 as rpc
from headrace.v1.generation_service_pb2_grpc import GenerationServiceStub

from tests.service.fake_server import PREFIX
from tests.service.real_server import ServerProcess

PREFIXES = 60


def timed_server(address: str, **options: float) -> ServerProcess:
    """Start a server around an engine that computes nothing, with options of
    `tests.service.fake_server`.
    """
    words = [f"--{name.replace('_', '-')}={value:g}" for name, value in options.items()]
    return ServerProcess([sys.executable, "-m", "tests.service.fake_server", address, *words])


@contextlib.contextmanager
def servers(*, count: int, step_ms: tuple[float, ...], **options: int) -> Iterator[list[str]]:
    started = [
        timed_server("127.0.0.1:0", step_ms=step_ms[i % len(step_ms)], **options)
        for i in range(count)
    ]
    try:
        for server in started:
            server.wait_until_ready()
        yield [server.addresses[0] for server in started]
    finally:
        for server in started:
            server.close()


def accepted(address: str) -> int:
    with headrace.Client(address) as client:
        return client.control.statistics().engine.requests_accepted


def prefixes(*, requests: int, in_flight: int, cached: int, seed: int = 1) -> dict[str, Any]:
    """Send requests with one of 60 equally frequent prefixes to three servers, and to one server
    with the cache of all three.
    """
    found: dict[str, Any] = {"requests": requests, "in_flight": in_flight, "cached": cached}
    for name, count in (("three", 3), ("one", 1)):
        with (
            servers(
                count=count,
                step_ms=(10,),
                running=in_flight,
                cached=cached * 3 // count,
            ) as addresses,
            headrace.Client(addresses) as client,
        ):
            source = random.Random(seed)
            heads = [[source.randrange(256) for _ in range(PREFIX)] for _ in range(PREFIXES)]
            order = [i % PREFIXES for i in range(requests)]
            source.shuffle(order)
            prompts = [[*heads[i], source.randrange(256), *range(16)] for i in order]
            outcomes = list(client.batch(prompts, max_tokens=6, max_in_flight=in_flight))
            results = [one for _, one in outcomes if isinstance(one, headrace.Result)]
            assert len(results) == requests, outcomes
            hits = sum(result.usage.cached_tokens > 0 for result in results)
            found[name] = {
                "requests_of_servers": [accepted(address) for address in addresses],
                "hits": hits,
            }
    counts = found["three"]["requests_of_servers"]
    found["furthest_from_even"] = max(abs(one * 3 / requests - 1) for one in counts)
    found["hits_beside_one"] = found["three"]["hits"] / found["one"]["hits"]
    return found


def speeds(*, turns: int, seconds: float, running: int) -> dict[str, Any]:
    """Measure the tokens per second of two servers with steps of 5 and 15 ms: each alone, both
    behind a client that chooses, and both by round_robin of RPCs. The variants alternate, each for
    the given seconds.
    """
    found = []
    with servers(count=2, step_ms=(5, 15), running=running, cached=1) as addresses:
        fast, slow = addresses
        for _ in range(turns):
            alone = [_batch_rate([one], seconds, running) for one in (fast, slow)]
            chosen = _batch_rate([fast, slow], seconds, 2 * running)
            by_turns = _round_robin_rate([fast, slow], seconds, 2 * running)
            found.append(
                {
                    "alone": alone,
                    "chosen": chosen,
                    "round_robin": by_turns,
                    "chosen_of_sum": chosen / sum(alone),
                    "round_robin_of_sum": by_turns / sum(alone),
                }
            )
    return {
        "running": running,
        "turns": found,
        "chosen_of_sum": statistics.median(one["chosen_of_sum"] for one in found),
        "round_robin_of_sum": statistics.median(one["round_robin_of_sum"] for one in found),
    }


def _batch_rate(addresses: list[str], seconds: float, in_flight: int) -> float:
    """Return the tokens per second of a batch that runs for the given time, without its beginning
    and its end.
    """
    end = time.monotonic() + seconds
    ends: list[tuple[float, int]] = []

    def prompts() -> Iterator[str]:
        number = itertools.count()
        while time.monotonic() < end:
            yield f"prompt {next(number)}"

    with headrace.Client(addresses) as client:
        for _, outcome in client.batch(prompts(), max_tokens=40, max_in_flight=in_flight):
            assert isinstance(outcome, headrace.Result), outcome
            ends.append((time.monotonic(), outcome.usage.completion_tokens))
    return _rate(ends, end - seconds * 0.8, end)


def _round_robin_rate(addresses: list[str], seconds: float, in_flight: int) -> float:
    """Measure the same with unary calls on one channel whose policy is round_robin."""
    target = "ipv4:" + ",".join(addresses)
    options = [("grpc.service_config", '{"loadBalancingConfig": [{"round_robin": {}}]}')]
    end = time.monotonic() + seconds
    ends: list[tuple[float, int]] = []
    with grpc.insecure_channel(target, options) as channel:
        stub: Any = GenerationServiceStub(channel)
        grpc.channel_ready_future(channel).result(30)

        def work(number: int) -> None:
            for i in itertools.count():
                if time.monotonic() >= end:
                    return
                spec = pb.GenerationSpec(
                    text=pb.TextInput(text=f"prompt {number} {i}"),
                    stop=pb.StopOptions(max_tokens=40),
                )
                answer = stub.Generate(rpc.GenerateRequest(spec=spec), timeout=60)
                ends.append((time.monotonic(), answer.usage.completion_tokens))

        with ThreadPoolExecutor(in_flight) as threads:
            list(threads.map(work, range(in_flight)))
    return _rate(ends, end - seconds * 0.8, end)


def _rate(ends: list[tuple[float, int]], begin: float, end: float) -> float:
    return sum(tokens for at, tokens in ends if begin <= at < end) / (end - begin)
