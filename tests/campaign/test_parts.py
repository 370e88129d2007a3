"""That the campaign's parts find what they look for, that its record goes on where it was stopped,
and that docs/trust.md is what the record says.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from headrace.v1 import generation_pb2 as pb

from benchmarks.processes import ROOT
from benchmarks.proxies.running import ENVOY
from engine.text.stop_strings import StopMatcher
from service.delivery.registry import Registry
from tests.campaign.bytes.fuzz import Fuzzing
from tests.campaign.bytes.mutating import mutate_message
from tests.campaign.bytes.target import Finding, Target
from tests.campaign.bytes.targets import TARGETS
from tests.campaign.campaign import RESULTS, Campaign, Plan
from tests.campaign.document import PROMISES, render, update
from tests.campaign.ends.crowd import Crowd, crowds
from tests.campaign.ends.faults import FAULTS
from tests.campaign.ends.play import allowed, play
from tests.campaign.load.flat import Sample, not_flat
from tests.campaign.load.part import traced
from tests.campaign.parts import Course, Part, Tried
from tests.campaign.planted.part import planted
from tests.campaign.planted.plants import LOG, PLANTS, WITNESS
from tests.campaign.proxy import flood
from tests.campaign.proxy import part as proxy
from tests.campaign.record import Record
from tests.campaign.storms.calls import Crowd as CallCrowd
from tests.campaign.storms.calls import Refused
from tests.service.ends import CELLS, TABLE, Cell


def row(name: str, **more: Any) -> Tried:
    values: dict[str, Any] = {"what": "a thing", "promises": (1,), "count": 3, **more}
    return Tried(name=name, **values)


def campaign(folder: Path, **more: Any) -> Campaign:
    values: dict[str, Any] = {"seed": 1, "is_cut": False, "again": False, "minutes": 1.0, **more}
    return Campaign(Plan(path=folder / "trust.json", **values))


def part(run: Any) -> Part:
    return Part(name="one", meaning="tries one thing", run=run, has_calm=False)


def course(folder: Path, **more: Any) -> Course:
    values: dict[str, Any] = {
        "seed": 1, "is_cut": True, "known": (), "record": lambda one: None,
        "say": lambda text: None, **more,
    }  # fmt: skip
    return Course(folder=folder, **values)


# ---- the campaign --------------------------------------------------------------------------------


def test_a_part_that_was_stopped_goes_on_at_the_row_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.campaign.record.commit", lambda: "abc")
    tried: list[str] = []

    def run(course: Course) -> None:
        for name in ("a", "b", "c"):
            if course.is_wanted(name):
                if name == "b" and "b" not in tried:
                    tried.append("b")
                    raise KeyboardInterrupt
                tried.append(name)
                course.add(row(name))

    with pytest.raises(KeyboardInterrupt):
        campaign(tmp_path).run(part(run))
    assert not Record(tmp_path / "trust.json").parts["one"][0]["is_whole"]
    campaign(tmp_path).run(part(run))
    assert tried == ["a", "b", "b", "c"]
    campaign(tmp_path).run(part(run))
    assert tried == ["a", "b", "b", "c"]  # all of it is recorded
    campaign(tmp_path, again=True).run(part(run))
    assert tried == ["a", "b", "b", "c", "a", "b", "c"]


def test_another_commit_or_seed_begins_anew_and_the_other_seed_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = ["abc"]
    monkeypatch.setattr("tests.campaign.record.commit", lambda: now[0])

    def begun(seed: int, *rows: Tried) -> set[str]:
        record = Record(tmp_path / "trust.json")
        run = record.begin("one", seed=seed, is_cut=False, again=False)
        known = set(run["rows"])
        for tried in rows:
            record.add(run, tried)
        return known

    begun(1, row("a"))
    assert begun(1) == {"a"}
    assert begun(2, row("a")) == set()
    assert begun(1) == {"a"}
    now[0] = "def"
    assert begun(2) == set()
    assert begun(1) == set()


def test_parts_share_a_file(tmp_path: Path) -> None:
    for name in ("one", "two"):
        campaign(tmp_path).run(
            replace(part(lambda course: course.add(row("a"))), name=name),
        )
    assert list(Record(tmp_path / "trust.json").parts) == ["one", "two"]


def test_no_part_begins_after_the_minutes(tmp_path: Path) -> None:
    assert campaign(tmp_path).has_time
    assert not campaign(tmp_path, minutes=0).has_time


def test_what_is_wrong_is_told_unless_it_is_not_judged(tmp_path: Path) -> None:
    def run(course: Course) -> None:
        course.add(row("good"))
        course.add(row("bad", wrong=("it broke",)))
        course.add(row("odd", wrong=("it broke",), not_judged="it is a machine's"))

    assert campaign(tmp_path).run(part(run)) == {"one/bad": "it broke"}


def test_what_is_drawn_depends_on_the_seed_and_the_name_alone(tmp_path: Path) -> None:
    def drawn(seed: int, name: str) -> float:
        return course(tmp_path, seed=seed).source(name).random()

    assert drawn(1, "a") == drawn(1, "a")
    assert drawn(1, "a") != drawn(1, "b")
    assert drawn(1, "a") != drawn(2, "a")


# ---- the document --------------------------------------------------------------------------------


def test_the_document_is_what_the_records_say() -> None:
    """Else run `make trust-report`."""
    assert update(RESULTS, check=True)


def test_a_promise_that_was_not_tried_is_told_so(tmp_path: Path) -> None:
    parts = [part(lambda course: None)]
    record = Record(tmp_path / "trust.json")
    for seed, more in ((1, {"wrong": ("it | broke",)}), (2, {"worst": "0.2 s"})):
        run = record.begin("one", seed=seed, is_cut=False, again=False)
        record.add(run, row("a", promises=(1, 3), **more))
    text = render(PROMISES.read_text(), parts, record.parts)
    lines = {line.split(" | ")[0]: line for line in text.splitlines() if line.startswith("| ")}
    assert "[one](#one) (1) | 3 | — |" in lines["| 1"]
    assert "not tried" in lines["| 2"]
    assert "other verdicts: a." in text
    assert "| a | a thing | 1, 3 | 3 | 0.2 s | held |" in text
    assert "it \\| broke" in render(PROMISES.read_text(), parts, {"one": record.parts["one"][1:]})


# ---- ends ----------------------------------------------------------------------------------------


def test_every_cell_that_is_possible_is_played_beside_every_fault() -> None:
    assert {(cell.event, cell.kind) for cell in CELLS} == {
        place for place, cell in TABLE.items() if cell != "—"
    }
    assert set(FAULTS) == {
        "forward", "sampler", "allocator", "device memory", "tokenizer", "exporter", "log",
        "clock", "slow step", "engine killed", "engine stopped", "pipe cut", "client cut",
    }  # fmt: skip


def test_beside_a_fault_a_cell_may_end_as_the_table_says_of_either() -> None:
    cell = Cell("Generate", "RPC cancelled, another waits", "decoding")
    assert allowed(cell, FAULTS["client cut"]) == {
        ("CANCELLED", "goes on"),
        ("UNAVAILABLE", "goes on"),
    }
    assert allowed(cell, FAULTS["log"]) == {("CANCELLED", "goes on")}
    assert allowed(cell, FAULTS["forward"]) == {("CANCELLED", "goes on"), ("INTERNAL", "no end")}


@pytest.mark.parametrize("fault", [name for name, one in FAULTS.items() if not one.process])
async def test_a_cell_beside_a_fault(fault: str, tmp_path: Path) -> None:
    cell = Cell("StreamResult", "RPC cancelled, lease", "decoding")
    for is_first in (True, False):
        assert await play(cell, FAULTS[fault], is_first=is_first, folder=tmp_path) == []


async def test_a_cell_beside_a_fault_of_the_engine_s_process(tmp_path: Path) -> None:
    cell = Cell("StreamResult", "finish", "decoding")
    assert await play(cell, FAULTS["engine killed"], is_first=True, folder=tmp_path) == []


async def test_a_request_that_is_left_behind_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: ids are not freed. The patience of `until` is shortened for what never comes."""
    monkeypatch.setattr(Registry, "forget", lambda *_: None)
    monkeypatch.setattr("tests.campaign.ends.play.LEFT_S", 0.2)
    cell = Cell("GenerateStream", "finish", "decoding")
    wrong = await play(cell, FAULTS["slow step"], is_first=True, folder=tmp_path)
    assert any("requests are left" in one for one in wrong)


async def test_a_round_by_chance(tmp_path: Path) -> None:
    crowd = Crowd(random.Random(3), 150)
    await crowds(crowd, tmp_path)
    assert crowd.wrong == []
    assert sum(crowd.ends.values()) == 150


# ---- proxy ---------------------------------------------------------------------------------------


@pytest.fixture
def small_flood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flood, "CAP_BYTES", 128_000_000)


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("small_flood")
def test_headers_that_never_end_are_kept_by_grpc(tmp_path: Path) -> None:
    """If this fails, gRPC bounds them now, and docs/promises.md, SECURITY.md and the part's
    LACK say less than is true.
    """
    tried = proxy.flooded(course(tmp_path, seconds=3.0), proxy.STRAIGHT, "long headers")
    [wrong] = tried.wrong
    assert wrong.startswith("front end grew by")
    assert tried.not_judged


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("small_flood")
@pytest.mark.skipif(ENVOY.path is None, reason=ENVOY.missing)
@pytest.mark.parametrize("kind", flood.BLOCKS)
def test_headers_that_never_end_are_ended_by_the_proxy(kind: str, tmp_path: Path) -> None:
    tried = proxy.flooded(course(tmp_path, seconds=3.0), proxy.THROUGH, kind)
    assert not tried.wrong
    assert not tried.not_judged
    assert tried.count > 1  # each was left open


def test_a_flood_stops_where_too_much_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        grown = iter((0, flood.CAP_BYTES + 1))
        sent = flood.flood(port, b"", 60.0, lambda: next(grown))
    assert sent.is_capped
    assert sent.connections == 1


def test_without_envoy_nothing_is_said_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = replace(ENVOY, name="no-such-envoy")
    monkeypatch.setattr(proxy, "ENVOY", absent)
    rows: list[Tried] = []
    proxy.run(course(tmp_path, only=proxy.THROUGH, record=rows.append))
    assert [row.not_judged for row in rows] == [absent.missing] * len(flood.BLOCKS)


# ---- bytes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_takes_its_seeds_and_what_becomes_of_them(name: str, tmp_path: Path) -> None:
    target = TARGETS[name]
    fuzzing = Fuzzing(target, tmp_path, 1, 1.0)
    fuzzing.by_chance()
    assert fuzzing.tried > len(target.seeds())
    assert not (tmp_path / "findings.jsonl").exists()


def test_a_finding_is_told_once_with_its_input(tmp_path: Path) -> None:
    def test(data: bytes) -> None:
        if b"!" in data:
            raise ZeroDivisionError("planted")

    target = Target(
        name="planted",
        what="a planted fault",
        promises=(3,),
        prepare=lambda: test,
        mutate=lambda data, source, most: data + source.choice((b"!", b"?")),
        seeds=lambda: [b"a"],
    )
    Fuzzing(target, tmp_path, 1, 0.1).by_chance()
    [line] = (tmp_path / "findings.jsonl").read_text().splitlines()
    found = json.loads(line)
    assert found["what"].startswith("ZeroDivisionError at test_parts.py:")
    assert b"!" in bytes.fromhex(found["input"])


def test_a_message_is_changed_by_its_fields() -> None:
    mutate, source = mutate_message(pb.GenerationSpec), random.Random(5)
    data, set_fields = b"", set()
    for _ in range(400):
        data = mutate(data, source, 4096)
        spec = pb.GenerationSpec()
        with contextlib.suppress(DecodeError):
            spec.ParseFromString(data)
            set_fields |= {descriptor.name for descriptor, _ in spec.ListFields()}
    assert set_fields == {one.name for one in pb.GenerationSpec.DESCRIPTOR.fields}


def test_a_stop_string_that_is_not_found_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: what is complete with the last character of a piece is missed."""
    test = TARGETS["stop-strings"].prepare()
    push = StopMatcher.push

    def late(self: StopMatcher, text: str, num_tokens: int) -> Any:
        said, match = push(self, text[:-1], num_tokens)
        return (said, match) if match is not None else (said + text[-1:], None)

    monkeypatch.setattr(StopMatcher, "push", late)
    with pytest.raises(Finding):
        test(b"ab\xffxxab")


# ---- load ----------------------------------------------------------------------------------------


def samples(*memory: int, threads: int = 5, files: int = 20) -> list[Sample]:
    return [Sample(one << 20, threads, files) for one in memory]


def test_what_grows_is_not_flat_and_a_warm_up_is() -> None:
    assert not_flat("engine", samples(*range(100, 110), *[110] * 30)) == []
    [wrong] = not_flat("engine", samples(*range(100, 140)))
    assert wrong == "engine: memory grew by 21.0 MB, above 8.4"
    again = samples(*[100] * 20) + samples(*[100] * 20, threads=9, files=40)
    assert not_flat("x", again) == ["x: 4 more threads, above 2", "x: 20 more files, above 8"]
    assert not_flat("x", samples(1)) == ["x: only 1 samples"]


def test_a_kilobyte_that_stays_of_each_request_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not traced(200).wrong  # so many that what others leave behind counts little
    kept: list[bytes] = []
    ended = Registry.has_ended

    def leaky(self: Registry, request: Any) -> None:
        kept.append(bytes(1000))
        ended(self, request)

    monkeypatch.setattr(Registry, "has_ended", leaky)
    assert traced(50).wrong


# ---- planted -------------------------------------------------------------------------------------


def test_each_promise_has_a_fault_that_is_planted() -> None:
    promised = {int(number) for number in re.findall(r"^\| (\d+) \|", PROMISES.read_text(), re.M)}
    assert {number for plant in PLANTS.values() for number in plant.promises} == promised
    for plant in PLANTS.values():
        for place in plant.caught_by:
            assert place in (WITNESS, LOG) or (ROOT / place.partition("::")[0]).is_file()


def test_a_planted_fault_is_caught_and_none_is_not() -> None:
    assert not planted(PLANTS["a-grant-for-all"]).wrong
    harmless = replace(PLANTS["a-grant-for-all"], name="a-stall")
    [wrong] = planted(harmless).wrong
    assert wrong.startswith("not caught: pytest ended with 0")


# ---- storms --------------------------------------------------------------------------------------


def test_advice_is_judged_by_when_a_place_came_free() -> None:
    crowd = CallCrowd()
    assert crowd.judge() == ("none was refused", [])
    crowd.ends = [1.0, 2.0, 3.0]
    crowd.refused = [Refused(0.0, 2.0, is_in=True), Refused(0.5, 3.0, is_in=True)]
    assert crowd.judge()[1] == []
    crowd.refused += [Refused(1.0, 5.0, is_in=False)]
    assert crowd.judge()[1] == [
        "67% got in at their first return, fewer than 90%",
        "1 were told to wait too long, at worst 0.50 s too long",
    ]
