from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import headrace
import pytest
from headrace.cli.app import app
from headrace.cli.bench.load import Load, LoadRun
from headrace.cli.bench.measures import Goals, Histogram, Progress, Tally, Timeline
from headrace.cli.bench.prompts import FilePrompts, Lengths
from headrace.results import Result
from typer.testing import CliRunner

from tests.clients.python.command import start
from tests.clients.python.scripted import WAIT, ScriptedServer

Bench = Callable[..., Any]


@pytest.fixture
def bench(server: ScriptedServer) -> Bench:
    def call(*words: str | Path, code: int = 0) -> dict[str, Any]:
        is_random = not {"--prompts", "--edits"} & set(words)
        lengths = ["--prompt-tokens", "6"] if is_random else []
        own = ["--json", "-", *lengths, "--output-tokens", "5", *map(str, words)]
        found = CliRunner().invoke(app, ["--target", server.target, "bench", *own])
        assert found.exit_code == code, found.output
        told: dict[str, Any] = json.loads(found.stdout)
        return told

    return call


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


# ---- what is sent ----


def test_a_closed_loop(bench: Bench, server: ScriptedServer) -> None:
    told = bench("-n", "12", "-c", "3", "--prompt-tokens", "8", "--output-tokens", "5")
    assert told["requests"] == {
        "started": 12, "done": 12, "refused": {}, "failed": {}, "interrupted": 0,
        "sent_again": {}, "finish_reasons": {"LENGTH": 12},
    }  # fmt: skip
    assert told["tokens"] == {
        "prompt": 96, "cached": 0, "output": 60, "draft": 0, "accepted_draft": 0,
    }  # fmt: skip
    counts = {name: times["count"] for name, times in told["times"].items()}
    assert counts == {"ttft": 12, "itl": 48, "stall": 12, "whole": 12, "late": 12}
    assert sum(told["timeline"]["output_tokens"]) == 60
    assert told["server"]["model"] == "scripted"
    assert told["goodput"] is None
    assert len(server.specs) == 13  # one warms it up
    for spec in server.specs:
        assert len(spec.tokens.ids) == 8
        assert max(spec.tokens.ids) < 100
        assert (spec.stop.max_tokens, spec.stop.ignore_eos) == (5, True)
    warm, *measured = [tuple(spec.tokens.ids) for spec in server.specs]
    assert warm not in measured
    assert len(set(measured)) == 12


def test_how_many_run_at_a_time(bench: Bench, server: ScriptedServer, tmp_path: Path) -> None:
    server.finish_at, server.total = 3, 9  # each ends when three are there
    told = bench("-n", "9", "-c", "3", "--warmup", "0", "--sessions", "3")
    assert told["requests"]["done"] == 9
    assert server.peak == 3
    numbers = sorted(live.number for live in server.kept.values())
    assert numbers == [1, 1, 1, 2, 2, 2, 3, 3, 3]  # three sessions have three each


def test_all_requests_have_the_adapter(bench: Bench, server: ScriptedServer) -> None:
    told = bench("-n", "3", "--adapter", "team")
    assert told["requests"]["done"] == 3
    assert [spec.adapter for spec in server.specs] == ["team"] * 4  # one warms it up


def test_sessions_on_connections_of_their_own(bench: Bench) -> None:
    told = bench("-n", "8", "--sessions", "4", "--connections", "2", "--arrivals", "constant")
    assert told["requests"]["done"] == 8
    assert (told["load"]["sessions"], told["load"]["connections"]) == (4, 2)


def test_several_servers(server: ScriptedServer) -> None:
    other = ScriptedServer()
    targets = f"{server.target},{other.target}"
    words = ["bench", "-n", "20", "--warmup", "0", "--prompt-tokens", "4", "--output-tokens", "4"]
    found = CliRunner().invoke(app, ["--target", targets, *words, "--json", "-"])
    other.stop()
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["requests"]["done"] == 20
    assert len(server.specs) + len(other.specs) == 20
    assert server.specs
    assert other.specs


def test_an_open_loop(bench: Bench, server: ScriptedServer) -> None:
    told = bench("--rate", "2000", "-n", "20", "--output-tokens", "3", "--prompt-tokens", "3:5")
    assert told["requests"]["done"] == 20
    assert told["times"]["late"]["count"] == 20
    assert {len(spec.tokens.ids) for spec in server.specs} == {3, 4, 5}
    assert (told["load"]["arrivals"], told["load"]["concurrency"]) == ("poisson", 4096)


def test_a_duration(bench: Bench) -> None:
    told = bench("-d", "0.3", "-c", "2")
    assert told["requests"]["done"] == told["requests"]["started"] > 0
    told = bench("-d", "1000", "-n", "3")
    assert told["requests"]["done"] == 3
    told = bench("-d", "0.2", "--rate", "1", "--arrivals", "constant")  # the first is due at 1 s
    assert told["requests"]["started"] == 0
    assert told["times"]["ttft"] == {
        "count": 0, "mean": None, "min": None, "p50": None, "p90": None, "p99": None,
        "max": None, "buckets": [],
    }  # fmt: skip


def test_a_seed_repeats_a_load(bench: Bench, server: ScriptedServer) -> None:
    words = ("-n", "5", "-c", "2", "--prompt-tokens", "2:9", "--shared-prefix", "4")
    seeds = [bench(*words, "--seed", seed)["load"]["seed"] for seed in ("7", "7", "8")]
    assert seeds == [7, 7, 8]
    seen = [sorted(tuple(s.tokens.ids) for s in server.specs[i : i + 6]) for i in (0, 6, 12)]
    assert seen[0] == seen[1] != seen[2]
    assert len({prompt[:4] for prompt in seen[0]}) == 1
    assert len({prompt[:4] for prompt in seen[0] + seen[2]}) == 2
    assert bench(*words)["load"]["seed"] != bench(*words)["load"]["seed"]


def test_arrivals() -> None:
    def gaps(arrivals: Any, seed: int = 1) -> list[float]:
        load = Load(None, 1.0, 1, 4.0, arrivals, 0.0, seed)
        return [gap for _, gap in zip(range(4000), load.gaps(4.0), strict=False)]

    assert set(gaps("constant")) == {0.25}
    drawn = gaps("poisson")
    assert drawn == gaps("poisson") != gaps("poisson", seed=2)
    assert sum(drawn) / 4000 == pytest.approx(0.25, rel=0.1)
    assert sum(gap > 0.25 for gap in drawn) / 4000 == pytest.approx(0.368, rel=0.1)  # 1/e


def test_prompts_of_a_file(bench: Bench, server: ScriptedServer, tmp_path: Path) -> None:
    texts = write(tmp_path / "it.txt", "to be or", "", "not to be\r", '{"prompt": 1}')
    bench("-n", "4", "-c", "1", "--warmup", "0", "--prompts", texts, "--output-tokens", "7")
    assert [spec.text.text for spec in server.specs] == [
        "to be or", "not to be", '{"prompt": 1}', "to be or",
    ]  # fmt: skip
    assert {spec.stop.max_tokens for spec in server.specs} == {7}
    del server.specs[:]
    requests = write(
        tmp_path / "it.jsonl",
        '{"id": 1, "prompt": "a b", "max_tokens": 2, "temperature": 0}',
        '{"id": 1, "token_ids": [5, 6]}',
        '{"messages": [{"role": "user", "content": "c"}], "ignore_eos": false}',
    )
    bench(
        "-n", "3", "-c", "1", "--warmup", "0", "--prompts", requests, "-t", "0.5",
        "--output-tokens", "3:3", "-o", "top_k=4", "--heed-eos",
    )  # fmt: skip
    first, second, third = server.specs
    assert (first.text.text, first.stop.max_tokens, first.sampling.temperature) == ("a b", 2, 0)
    assert (list(second.tokens.ids), second.stop.max_tokens) == ([5, 6], 3)
    assert second.sampling.temperature == 0.5
    assert third.chat.messages[0].content == "c"
    assert {spec.sampling.top_k for spec in server.specs} == {4}
    assert not any(spec.stop.ignore_eos for spec in server.specs)


def test_edits(bench: Bench, server: ScriptedServer) -> None:
    told = bench("-n", "3", "-c", "1", "--warmup", "0", "--edits", "20", "--changed", "0.15")
    assert told["load"]["edits"] == {"lines": "20", "changed": 0.15, "prediction": True}
    assert told["load"]["prompt_tokens"] is None
    for spec in server.specs:
        _, file, asked, _ = spec.text.text.split("```\n")
        before, after = file.splitlines(), spec.prediction.text.splitlines()
        assert len(before) == len(after) == 20
        changes = [new for old, new in zip(before, after, strict=True) if old != new]
        assert f": {'; '.join(changes)}.\n" in asked
        assert len(changes) == 3
        assert spec.stop.max_tokens == 5
    assert len({spec.prediction.text for spec in server.specs}) == 3


def test_edits_without_predictions_or_changes(bench: Bench, server: ScriptedServer) -> None:
    words = ("-n", "2", "--seed", "3", "--edits", "2:5", "--changed")
    bench(*words, "0")
    changed, *_ = server.specs
    assert f"```\n{changed.prediction.text}```" in changed.text.text  # nothing is to be changed
    del server.specs[:]
    bench(*words, "1", "--no-prediction")
    assert not any(spec.HasField("prediction") for spec in server.specs)


# ---- what goes wrong ----


def test_refusals_and_failures_by_reason(
    bench: Bench, server: ScriptedServer, tmp_path: Path
) -> None:
    lines = write(tmp_path / "it.txt", "busy a", "refuse", "fail", "a b")
    words = ("-n", "8", "-c", "1", "--warmup", "0", "--prompts", lines)
    told = bench(*words, code=1)["requests"]
    assert told["sent_again"] == {"QUEUE_FULL": 2}  # the second time there is room at once
    assert told["failed"] == {"BAD_FIELD": 2, "ENGINE_FAULT": 2}
    assert (told["done"], told["refused"]) == (4, {})
    server.busy_left = 1
    found = bench(*words, "--room-timeout", "0", "--goal-ttft", "1000", code=1)
    assert found["requests"]["refused"] == {"QUEUE_FULL": 1}
    assert found["requests"]["sent_again"] == {}
    assert (found["goodput"]["good"], found["goodput"]["share"]) == (3, 3 / 8)


def test_a_warm_up_that_fails_is_all(server: ScriptedServer, tmp_path: Path) -> None:
    lines = write(tmp_path / "it.txt", "refuse")
    words = ["--target", server.target, "bench", "--prompts", str(lines)]
    found = CliRunner().invoke(app, words)
    assert (found.exit_code, found.stdout) == (1, "")
    assert "sampling.top_p: must be above 0" in found.stderr
    assert len(server.specs) == 1


def test_a_server_that_goes_away(bench: Bench, tmp_path: Path) -> None:
    lines = write(tmp_path / "it.txt", "a b", "drop")
    told = bench("-n", "9", "-c", "1", "--warmup", "0", "--prompts", lines, code=3)
    assert told["ended_early"] == "going away"
    assert told["requests"]["done"] == 1
    assert told["requests"]["failed"] == {"DRAINING": 2}  # one lost, one that could not be sent
    gone = CliRunner().invoke(app, ["--target", "127.0.0.1:1", "bench"])
    assert gone.exit_code == 3
    assert "cannot reach a Headrace server" in gone.stderr


def test_ctrl_c_tells_what_was_measured(server: ScriptedServer, tmp_path: Path) -> None:
    lines = write(tmp_path / "it.txt", "hold")
    out = tmp_path / "out.json"
    words = ("bench", "-n", "9", "-c", "2", "--warmup", "0", "--prompts", lines, "--json", out)
    with start(server, *words, stdout=-1, stderr=-1) as running:
        server.wait_for(lambda: len(server.live) == 2)
        server.release(next(iter(server.live)))
        server.wait_for(lambda: len(server.specs) == 3 and len(server.live) == 2)
        running.send_signal(signal.SIGINT)
        said, errors = running.communicate(timeout=WAIT)
    assert running.returncode == 130, errors
    assert "ended early: interrupted" in said
    assert "1 done, 0 refused, 0 failed, 2 interrupted" in said
    assert len(server.cancelled) == 2
    told = json.loads(out.read_text())
    assert told["ended_early"] == "interrupted"
    assert told["tokens"]["output"] >= 2  # of one that was cancelled too


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--rate 0", "--rate is 0; it must be above 0"),
        ("--rate nan", "--rate is nan"),
        ("--duration -1", "--duration is -1"),
        ("--goal-ttft 0", "--goal-ttft is 0"),
        ("--goal-itl inf", "--goal-itl is inf"),
        ("--room-timeout -1", "--room-timeout is -1"),
        ("--concurrency 0", "--concurrency"),
        ("--requests 0", "--requests"),
        ("--sessions 0", "--sessions"),
        ("--connections 2", "it must be at most --sessions, 1"),
        ("--prompt-tokens 9:3", "the lesser one first"),
        ("--prompt-tokens many", "a number or LEAST:MOST"),
        ("--output-tokens 0", "--output-tokens is 0; its numbers must be 1 to"),
        ("--output-tokens 60", "this server's requests have 64 at most"),
        ("--arrivals never", "--arrivals"),
        ("--prompts {none}", "cannot read --prompts"),
        ("--prompts {empty}", "has no lines"),
        ("--prompts {bad}", "bad.jsonl, line 2: "),
        ("--prompts {empty} --shared-prefix 3", "leave them or --prompts out"),
        ("--edits 9:3", "the lesser one first"),
        ("--edits 4 --changed 1.5", "--changed"),
        ("--edits 4 --prompts {empty}", "leave it or --prompts out"),
        ("--edits 4 --shared-prefix 3", "leave them or --edits out"),
        ("--json {none}/out.json", "cannot write"),
        ("--svg {folder}", "cannot write"),
        ("-o max_tokens=3", "-o max_tokens: it is --output-tokens here"),
        ("-o n=2", "one choice"),
        ("-o top_k=many", "top_k"),
    ],
)
def test_wrong_usage(server: ScriptedServer, tmp_path: Path, words: str, says: str) -> None:
    paths = {
        "none": tmp_path / "none",
        "empty": write(tmp_path / "empty.txt", ""),
        "bad": write(tmp_path / "bad.jsonl", '{"prompt": "a"}', '{"prompt": 1}'),
        "folder": tmp_path,
    }
    own = words.format(**paths).split()
    is_random = not any(word in words for word in ("tokens", "{", "--edits"))
    lengths = ["--prompt-tokens", "5"] if is_random else []
    found = CliRunner().invoke(app, ["--target", server.target, "bench", *lengths, *own])
    assert found.exit_code == 2, found.output
    assert says in " ".join(found.stderr.replace("│", "").split())
    assert server.specs == []


# ---- what is measured ----


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Told(Histogram):
    def __init__(self, event: asyncio.Event) -> None:
        super().__init__()
        self.event = event

    def add(self, seconds: float, count: int = 1) -> None:
        super().add(seconds, count)
        self.event.set()


async def test_an_open_loop_counts_from_when_a_request_was_due(
    server: ScriptedServer, aclient: headrace.AsyncClient, tmp_path: Path
) -> None:
    lines = write(tmp_path / "it.txt", "hold", "a b")
    prompts = FilePrompts(lines, output=Lengths(5, 5), options={}, seed=0)
    clock, first = Clock(), asyncio.Event()
    tally = Tally(Goals(ttft=1.0), ttft=Told(first))
    load = Load(2, None, 1, 1e6, "constant", 0.0, 0)  # due at 1 and at 2 µs, one at a time
    async with aclient.session() as session:
        running = asyncio.create_task(LoadRun([session], prompts, load, tally, clock).run())
        await asyncio.to_thread(server.wait_for, lambda: len(server.live) == 1)
        await first.wait()
        clock.now = 5.0  # the first one takes so long, and the second one waits behind it
        server.release(next(iter(server.live)))
        await running
    assert tally.late.greatest == tally.ttft.greatest == pytest.approx(4.999998)
    assert tally.whole.least == pytest.approx(4.999998)
    assert (tally.done, tally.good) == (2, 1)
    assert tally.seconds == 5.0


def test_percentiles() -> None:
    times = Histogram()
    assert (times.percentile(50), times.mean) == (None, None)
    for milliseconds in range(1, 101):
        times.add(milliseconds / 1000)
    for percent in (1, 50, 90, 99):
        assert times.percentile(percent) == pytest.approx(percent / 1000, rel=0.005)
    assert (times.percentile(100), times.percentile(0)) == (0.1, pytest.approx(0.001, rel=0.005))
    assert (times.least, times.greatest, times.count) == (0.001, 0.1, 100)
    assert times.mean == pytest.approx(0.0505)
    times.add(0.5, 900)  # nine tenths of all
    assert times.percentile(10) == pytest.approx(0.1, rel=0.005)
    assert times.percentile(11) == pytest.approx(0.5, rel=0.005)
    assert sum(count for _, _, count in times.buckets()) == 1000


def test_memory_is_bounded() -> None:
    times, line = Histogram(), Timeline()
    for step in range(30_000):
        times.add(1e-9 * 1.002**step)  # up to far beyond a year
        line.add(step * 10.0, 2)
    assert len(list(times.buckets())) <= 2778
    assert len(line.cells) <= 240
    assert sum(line.cells) == 60_000
    assert line.cell_seconds == 0.25 * 2**13
    assert set(line.cells[:-1]) <= {408, 410}  # 2,048 s of steps of 10 s, 2 each


def test_the_times_of_a_request() -> None:
    tally = Tally(Goals(ttft=0.5, itl=0.11))
    tally.began = 10.0
    one = Progress(tally, due=10.0)
    one.sent(10.25)
    for tokens, now in ((0, 10.3), (1, 10.5), (1, 10.6), (2, 10.8)):
        one.output(tokens, now)
    usage = headrace.Usage(7, 3, 4, draft_tokens=9, accepted_draft_tokens=2)
    choice = headrace.Choice(0, "", (), headrace.FinishReason.LENGTH, usage=usage)
    result = Result("a", (choice,), usage)
    one.finished(result, 10.9)
    assert tally.late.greatest == 0.25
    assert tally.ttft.greatest == 0.5
    assert (tally.itl.count, tally.itl.greatest) == (3, pytest.approx(0.1))
    assert tally.stall.greatest == pytest.approx(0.2)
    assert tally.whole.greatest == pytest.approx(0.9)
    assert (tally.prompt_tokens, tally.cached_tokens, tally.output_tokens) == (7, 3, 4)
    assert (tally.draft_tokens, tally.accepted_draft_tokens) == (9, 2)
    assert tally.timeline.cells == [0, 0, 2, 2]
    assert tally.good == 1
    slow = Progress(tally, due=10.0)
    slow.output(1, 10.2)
    slow.output(1, 10.35)
    slow.finished(result, 10.4)
    assert (tally.done, tally.good) == (2, 1)


# ---- how it is told ----


def test_the_table(server: ScriptedServer) -> None:
    words = ["--target", server.target, "bench", "-n", "5", "--prompt-tokens", "4"]
    found = CliRunner().invoke(app, [*words, "--output-tokens", "4", "--goal-itl", "1000"])
    assert found.exit_code == 0, found.output
    lines = found.stdout.splitlines()
    assert lines[0] == f"scripted (, ) at {server.target}"
    assert lines[1].startswith("closed loop, 16 at a time, 1 session; prompts of 4 tokens, outputs")
    assert lines[3].split() == ["p50", "p90", "p99", "mean", "max"]
    assert [line[:20].strip() for line in lines[4:8]] == [
        "time to first token", "token to token", "longest wait", "whole request",
    ]  # fmt: skip
    told = {line[:20].strip(): line[20:].split("  ")[0] for line in lines[9:]}
    assert told["requests"] == "5 done, 0 refused, 0 failed"
    assert told["output tokens"] == "20"
    assert told["goodput"].startswith("100.0%")
    assert told["ended by"] == "STOP 5"


@pytest.mark.parametrize("words", ["-n 6", "-d 0.1 --rate 1 --arrivals constant"])
def test_the_picture(server: ScriptedServer, tmp_path: Path, words: str) -> None:
    out = tmp_path / "it.svg"
    call = ["--target", server.target, "bench", "--prompt-tokens", "4", "--output-tokens", "3"]
    found = CliRunner().invoke(app, [*call, "--svg", str(out), *words.split()])
    assert found.exit_code == 0, found.output
    space = "{http://www.w3.org/2000/svg}"
    picture = ElementTree.fromstring(out.read_text())
    texts = [element.text or "" for element in picture.iter(f"{space}text")]
    for title in ("Time to first token", "From token to token", "Output tokens per second"):
        assert title in texts
    measured = "-n" in words
    assert sum(text.startswith(("p50 ", "p90 ", "p99 ")) for text in texts) == 6 * measured
    assert ("nothing was measured" in texts) is not measured
    style = next(picture.iter(f"{space}style")).text or ""
    assert "prefers-color-scheme: dark" in style
    assert any(e.get("class") == "bar" for e in picture.iter(f"{space}rect")) is measured


def test_a_progress_bar_on_a_terminal(server: ScriptedServer, tmp_path: Path) -> None:
    lines = write(tmp_path / "it.txt", "hold")
    master, slave = pty.openpty()
    words = ("bench", "-n", "1", "--warmup", "0", "--prompts", lines)
    with start(server, *words, stdout=-1, stderr=slave) as running:
        os.close(slave)
        seen = b""
        while b"1 going" not in seen:
            seen += os.read(master, 65536)
        server.release(next(iter(server.live)))
        said, _ = running.communicate(timeout=WAIT)
    os.close(master)
    assert running.returncode == 0
    assert "\x1b" not in said
    assert "1 done" in said
