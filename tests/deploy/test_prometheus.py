"""The alerts and the dashboard of deploy/prometheus, run by a real Prometheus against live pages.

It is skipped, visibly, where Debian's package `prometheus` is not installed.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from headrace.v1 import generation_service_pb2 as rpc

from engine.contract.engine_client import Admission
from engine.contract.errors import QueueFullError
from engine.contract.outputs import (
    Finish,
    FinishReason,
    RequestFailure,
    RequestOutput,
    StepOutputs,
    StepRecord,
    Timings,
    Usage,
)
from engine.contract.request import GenerationRequest
from engine.contract.stats import AdapterStats, CallerStats, EngineStats
from engine.contract.types import CallerKey, RequestId
from service.telemetry.telemetry_config import TelemetryConfig
from tests.deploy.chart import HELM, only, rendered
from tests.service.fake_engine import FakeEngine, says
from tests.service.helpers import DEADLINE_S, Harness, refused, serving, spec, until
from tests.service.readme import ROOT

FILES = ROOT / "deploy" / "prometheus"
PAGE = TelemetryConfig(metrics=("prometheus",), prometheus_host="127.0.0.1", prometheus_port=0)
TOOLS = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="Prometheus is not installed (apt-get install prometheus)",
)

RULES = [
    rule
    for group in yaml.safe_load((FILES / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]
DASHBOARD = json.loads((FILES / "dashboard.json").read_text(encoding="utf-8"))
PANELS = [
    (panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel["targets"]
]


def test_every_alert_is_explained() -> None:
    runbook = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
    sections = re.split(r"^## ", runbook, flags=re.M)[1:]
    told = {section.partition("\n")[0]: section for section in sections}
    for rule in RULES:
        section = rule["alert"].lower()  # as pages make anchors of headings
        assert rule["annotations"]["runbook_url"] == f"https://headrace.dev/runbook#{section}"
        assert rule["annotations"].keys() == {"summary", "runbook_url"}
        for part in ("**It means**", "**Look at**", "**Do**"):
            assert part in told[rule["alert"]]
    assert {name for name in told if name.startswith("Headrace")} == {
        rule["alert"] for rule in RULES
    }


@TOOLS
def test_promtool_passes_the_rules() -> None:
    subprocess.run(["promtool", "check", "rules", str(FILES / "alerts.yaml")], check=True)


def scaling() -> dict[str, str]:
    """The queries by which the chart scales, where Helm is installed."""
    if HELM is None:
        return {}
    scaled = only(rendered({"autoscaling": {"enabled": True}}), "ScaledObject")
    return {one["name"]: one["metadata"]["query"] for one in scaled["spec"]["triggers"]}


class Loaded(FakeEngine):
    """An engine whose figures tell of trouble; requests named "broken" fail."""

    async def submit(self, request: GenerationRequest) -> Admission:
        admission = await super().submit(request)
        if "broken" in request.request_id:
            self.fail(request.request_id, RequestFailure("it broke", "id"))
        return admission

    async def stats(self) -> EngineStats:
        plain = await super().stats()
        return replace(
            plain,
            preemptions=plain.steps,
            offloads=plain.steps,
            restores=plain.steps,
            prompt_tokens=plain.steps,
            prefix_queries=2 * plain.steps,
            prefix_hits=plain.steps,
            draft_tokens=2 * plain.steps,
            accepted_draft_tokens=plain.steps,
            accepted_prediction_draft_tokens=plain.steps,
            callers=(CallerStats(CallerKey("a"), 1.0, 1, 1, plain.steps),),
            adapters=1,
            adapter_bytes=1,
            max_adapter_bytes=2,
            adapter_loads=plain.steps,
            adapter_evictions=plain.steps,
            by_adapter=(AdapterStats("a", 1, 1, plain.steps, plain.steps),),
        )


class Prometheus:
    """A running Prometheus."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def ask(self, query: str) -> list[Any]:
        """What a query gives now."""
        asked = f"{self._url}/api/v1/query?" + urllib.parse.urlencode({"query": query})

        def get() -> list[Any]:
            with urllib.request.urlopen(asked, timeout=DEADLINE_S) as answer:
                result: list[Any] = json.load(answer)["data"]["result"]
                return [one for one in result if one["value"][1] != "NaN"]

        return await asyncio.to_thread(get)

    async def gives_data(self, queries: dict[str, str]) -> None:
        """Wait until every query has given data."""
        left = dict(queries)
        with suppress(TimeoutError):
            async with asyncio.timeout(DEADLINE_S):
                while left:
                    for name, query in list(left.items()):
                        with suppress(OSError):  # it is starting
                            if await self.ask(query):
                                del left[name]
        assert not left


@asynccontextmanager
async def scraping(folder: Path, servers: list[Harness]) -> AsyncIterator[Prometheus]:
    """A Prometheus that scrapes these servers."""
    pages = [h.server._telemetry.page for h in servers]
    targets = [page.url.split("/")[2] for page in pages if page is not None]
    where = {"targets": targets, "labels": {"namespace": "here", "pod": "it-headrace-0"}}
    config = {
        "global": {"scrape_interval": "250ms", "scrape_timeout": "250ms"},
        "rule_files": [str(FILES / "alerts.yaml")],
        "scrape_configs": [{"job_name": "headrace", "static_configs": [where]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            stdout=log,
            stderr=log,
        )
    try:
        yield Prometheus(f"http://127.0.0.1:{port}")
    finally:
        process.kill()
        await process.wait()


async def work(h: Harness, engine: FakeEngine) -> None:
    """Answers, refusals for want of room, requests that fail, and slow ones."""
    slow = Timings(0.0, 100.0, 150.0, 160.0, 160.0, 1)
    finish = Finish(FinishReason.STOP, Usage(5, 0, 5), slow)
    output = RequestOutput(RequestId("slow"), finish=finish, ends_request=True, prompt_done=1)
    metrics = h.server._telemetry.metrics
    assert metrics is not None
    while True:
        await h.generate(spec())
        engine.refuse_next.append(QueueFullError(5, 1.0))
        assert (await refused(h.generate(spec()))).code is grpc.StatusCode.RESOURCE_EXHAUSTED
        metrics.adapter_loaded(0.1)
        metrics.on_step(StepOutputs(1.0, (output,), StepRecord(0.25, 2, 40, 7)))
        await refused(h.generate(spec(request_id="broken")))
        await asyncio.sleep(0.05)  # the scraper and Prometheus need the processor too


def alert(*names: str) -> dict[str, str]:
    """The expressions of these alerts."""
    return {rule["alert"]: rule["expr"] for rule in RULES if rule["alert"] in names}


@asynccontextmanager
async def running(make: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """While something runs."""
    task = asyncio.ensure_future(make())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@TOOLS
async def test_every_query_gives_data_when_it_is_provoked(tmp_path: Path) -> None:
    later = ("HeadraceDown", "HeadraceNotReady", "HeadraceEngineRestarted")
    queries = {rule["alert"]: rule["expr"] for rule in RULES if rule["alert"] not in later}
    queries |= scaling()
    for title, expression in PANELS:
        query = expression.replace("$__rate_interval", "5m").replace("$instance", ".*")
        queries[f"{title}: {expression}"] = query
    short, endless = says("abc"), says("abc" * 1000)

    def script(request: GenerationRequest, choice: int) -> Sequence[int]:
        return (endless if "unread" in request.request_id else short)(request, choice)

    engine = Loaded(script, restartable=True, blocks=(99, 100))
    frozen = FakeEngine(auto=False)
    async with (
        serving(engine, telemetry=PAGE, max_unread_tokens=1) as h,
        serving(frozen, telemetry=PAGE) as stuck,
    ):
        await stuck.generation.AddRequest(rpc.AddRequestRequest(spec=spec()))
        stalled = h.session()  # which grants no more than a token
        await stalled.send(open=rpc.OpenCommand(initial_credit=1))
        await stalled.add(spec(request_id="unread", stop={"max_tokens": 10_000}))
        frozen.step()
        metrics = stuck.server._telemetry.metrics
        assert metrics is not None
        await until(lambda: (known := metrics.view().stats) and known.steps)
        await provoke(tmp_path, h, engine, stuck, queries)


async def provoke(
    folder: Path, h: Harness, engine: FakeEngine, stuck: Harness, queries: dict[str, str]
) -> None:
    """Let everything go wrong, and see that every query gives data."""
    async with scraping(folder, [h, stuck]) as prometheus:
        async with running(lambda: work(h, engine)):
            await prometheus.gives_data(queries)
        engine.load_gate = asyncio.Event()
        engine.die(RuntimeError("killed"))
        await prometheus.gives_data(alert("HeadraceNotReady"))
        engine.load_gate.set()
        await prometheus.gives_data(alert("HeadraceEngineRestarted"))
        await stuck.server.stop()
        await prometheus.gives_data(alert("HeadraceDown"))
