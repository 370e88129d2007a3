"""Hostile inputs: that they say what they mean, how runs are judged, and how they are tried."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorSet
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessages
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_service_pb2 as rpc
from headrace.v1 import model_service_pb2 as model

from benchmarks.models import DEMO
from benchmarks.processes import ROOT
from tests.campaign.hostile import encoding as wire
from tests.campaign.hostile import http2, judging, part
from tests.campaign.hostile.attacker import attack
from tests.campaign.hostile.inputs import CHATS, GROUPS, INPUTS, Input
from tests.campaign.hostile.inputs.derived import FIELDS, FLOATS, of, scalars
from tests.campaign.hostile.inputs.kinds import invalid
from tests.campaign.hostile.inputs.requests import answered
from tests.campaign.hostile.inputs.strangers import CHECK
from tests.campaign.hostile.long_model import write_tokenizer
from tests.campaign.hostile.part import Attacks
from tests.campaign.hostile.sending import GENERATION, HEALTH, MODEL, Sender, fits
from tests.campaign.hostile.server import Server
from tests.campaign.parts import Course, Tried
from tests.campaign.witness.report import Memory, Report, Waits
from tests.service.helpers import DEADLINE_S, serving, until
from tests.service.methods import METHODS

CARD = model.ModelCard(
    vocab_size=258,
    limits={
        "max_context_tokens": 2048,
        "max_message_bytes": 64 << 10,
        "max_choices": 16,
        "max_logprobs": 20,
        "max_logit_bias": 1024,
        "max_stop_strings": 16,
        "max_stop_string_bytes": 256,
    },
)
RAW = {
    one.name
    for group in GROUPS
    for one in group.inputs
    if one.send.__module__.endswith("strangers") and one.name not in ("watches", "check-storm")
} - {"metadata"}
"""Those that speak to sockets."""
MOST = 200
"""Messages of an input that are looked at."""


class Enough(Exception):
    """As many messages came as are looked at."""


class Listener(Sender):
    """Sends nothing, and looks at what would be sent: one round of it."""

    def __init__(self) -> None:
        super().__init__("unix:/nowhere", CARD, token="t", operator="o")
        self.sent: list[tuple[str, bytes]] = []

    async def call(self, method: str, raw: bytes = b"", **_: Any) -> None:
        self._note(method, raw)

    async def session(
        self, messages: Iterable[bytes], *, method: str = GENERATION + "StreamResult", **_: Any
    ) -> None:
        for raw in messages:
            self._note(method, raw)

    async def ask(self, method: str, raw: bytes, answers: Sequence[str], **_: Any) -> str:
        self._note(method, raw)
        return answers[0]

    async def crowd(self, number: int, one: Callable[[int], Awaitable[object]]) -> None:
        for index in range(min(number, 3)):
            await one(index)

    async def again(self, number: int, one: Callable[[int], Awaitable[object]]) -> None:
        await one(0)

    def _note(self, method: str, raw: bytes) -> None:
        self.sent.append((method, raw))
        if len(self.sent) == MOST:
            raise Enough


def test_each_input_is_named_once_and_says_what_it_is() -> None:
    assert len(INPUTS) == sum(len(group.inputs) for group in GROUPS)
    assert len({group.name for group in GROUPS}) == len(GROUPS)
    for one in INPUTS.values():
        assert one.meaning
        assert "\n" not in one.meaning


async def sent_by(name: str) -> list[tuple[str, bytes]]:
    """What an input sends, by method."""
    listener = Listener()
    try:
        await INPUTS[name].send(listener)
    except Enough:
        pass
    finally:
        await listener.close()
    return listener.sent


@pytest.mark.parametrize("name", sorted(set(INPUTS) - RAW - {"lost-leases"}))
async def test_what_is_sent_is_what_the_contract_reads(name: str) -> None:
    """But for what is meant to be malformed; and no message lies within 1 KiB beyond the bound."""
    sent, most = await sent_by(name), CARD.limits.max_message_bytes
    assert sent
    for method, raw in sent:
        assert not most < len(raw) < most + 1024
        if method in METHODS and name not in ("malformed", "gzip-bombs"):
            message = METHODS[method][0].FromString(raw)
            if "unknown" not in name and raw:
                known = type(message)()
                known.CopyFrom(message)
                known.DiscardUnknownFields()
                assert known.ByteSize() == message.ByteSize(), method


def test_every_scalar_field_of_the_contract_is_attacked() -> None:
    cases = [case for one in INPUTS.values() for case in one.cases if case.field]
    assert {case.field for case in cases} == set(FIELDS)
    for case in cases:
        one = FIELDS[case.field]
        assert type(case.message(None)) is one.kind  # type: ignore[arg-type]


def test_a_new_field_of_the_contract_is_attacked_with_nothing_written_by_hand() -> None:
    files = FileDescriptorSet.FromString((ROOT / "protos" / "contract.binpb").read_bytes())
    for file in files.file:
        for message in file.message_type:
            if message.name == "SamplingOptions":
                kind = FieldDescriptorProto.TYPE_DOUBLE
                label = FieldDescriptorProto.LABEL_OPTIONAL
                message.field.add(name="new_thing", number=999, type=kind, label=label)
    generate = GetMessages(files.file)["headrace.v1.GenerateRequest"]
    fields = scalars({GENERATION + "Generate": generate})
    found = [
        case for case in of("SamplingOptions", fields=fields) if case.field.endswith(".new_thing")
    ]
    sent = [case.message(None).spec.sampling.new_thing for case in found]  # type: ignore[arg-type,attr-defined]
    assert len(sent) == len(FLOATS)
    assert float("inf") in sent
    assert all(invalid("spec.sampling*")[0] in case.answers for case in found)


def test_protobuf_by_hand() -> None:
    raw = wire.request("hi", n=3) + wire.inside(
        rpc.GenerateRequest, "spec.sampling.banned_token_ids", wire.packed(range(300))
    )
    read = rpc.GenerateRequest.FromString(raw).spec
    assert (read.text.text, read.n, len(read.sampling.banned_token_ids)) == ("hi", 3, 300)
    many = wire.filled(pb.ChatInput(tools=[{"name": "f"}]).SerializeToString(), 10)
    chat = wire.inside(model.TokenizeRequest, "chat", many)
    assert [one.name for one in model.TokenizeRequest.FromString(chat).chat.tools] == ["f"] * 2
    assert wire.add("hi") == wire.inside(rpc.StreamResultRequest, "add.spec", wire.spec("hi"))
    assert len(wire.filled(b"abc", 10)) == 9
    with pytest.raises(DecodeError):
        rpc.GenerateRequest.FromString(raw[:-1])


async def test_http2_by_hand() -> None:
    """A body beyond the first windows arrives, a half one does not; floods are cut or borne."""
    whole = bytes(5)
    large = b"\x00" + (150_000).to_bytes(4, "big") + wire.filled(wire.UNKNOWN, 150_000)
    tally: Counter[str] = Counter()
    async with serving() as h:
        target = h.server.addresses[0]
        connection = await http2.connect(target, tally)
        try:
            async with asyncio.timeout(DEADLINE_S):
                for body in (whole, large):
                    before = tally["frame headers"]
                    await connection.data(await connection.open(CHECK), body, ended=True)
                    await until(lambda before=before: tally["frame headers"] > before)
                half = await connection.open(CHECK, [(b"x-long", b"a" * 300)])
                before = tally["frame headers"]
                await connection.data(half, large[:-1])
                await connection.data(await connection.open(CHECK), whole, ended=True)
                await until(lambda: tally["frame headers"] > before)
        finally:
            connection.close()


@pytest.mark.parametrize(
    "name",
    ["metadata", "rapid-reset", "odd-paths", "header-bytes", "session-cancels", "lost-leases"],
)
async def test_an_attack_tells_what_was_answered(name: str) -> None:
    async with serving() as h:
        target = h.server.addresses[0]
        async with asyncio.timeout(DEADLINE_S):
            answers, connections = await attack(
                name, 0.3, target=target, card=CARD, token="t", operator="o", seed="1/one"
            )
    assert sum(answers.values()) > 0
    assert connections > 0


async def test_answers_are_told_apart() -> None:
    async with serving() as h:
        found = Sender(h.server.addresses[0], CARD)
        try:
            await found.call(HEALTH + "Check")
            await found.call(MODEL + "Tokenize", b"\xff")
            await found.call("/nothing.Nothing/Nothing")
            await found.call(GENERATION + "GenerateStream", wire.request("hi"))
            await found.session([b""])
        finally:
            await found.close()
    assert found.tally["OK"] == 3
    assert found.tally["INVALID_ARGUMENT MALFORMED_MESSAGE"] == 1
    assert found.tally.total() - found.tally["messages of sessions"] == 5


def test_a_crowd_needs_reasons_and_times() -> None:
    assert answered({"OK": 7, "RESOURCE_EXHAUSTED QUEUE_FULL": 3}) is None
    wrong = answered({"OK": 7, "CANCELLED (bare)": 3})
    assert wrong is not None
    assert "3 CANCELLED (bare)" in wrong
    assert answered({"RESOURCE_EXHAUSTED QUEUE_FULL (no retry time)": 1}) is not None
    assert answered({"no answer": 2}) is not None


ONE = INPUTS["chat-tools"]
STRANGER = INPUTS["half-bodies"]


def waits(worst: float, late: float = 0.0) -> Waits:
    return Waits(10, worst, late)


def seen(**more: Any) -> Report:
    values: dict[str, Any] = {
        "seconds": 5.0, "tokens": 100, "requests": 1, "gaps": waits(0.02),
        "first_tokens": waits(0.02), "tokenize": waits(0.01), "health": waits(0.01),
        "wrong_tokens": 0, "lost_tokens": 0, "wrong_texts": 0, "not_serving": 0, "refusals": {},
        "ticks": 1000, "lag": waits(0.001),
        "memory": {"front_end": Memory(1, 100_000_000, 110_000_000, 120_000_000),
                   "engine": Memory(2, 800_000_000, 800_000_000, 800_000_000)},
    }  # fmt: skip
    return Report(**{**values, **more})


def run(calm: Report | None = None, beside: Report | None = None, **more: Any) -> judging.Run:
    values: dict[str, Any] = {
        "calm": calm or seen(),
        "seen": beside or seen(),
        "first": {"front_end": 100_000_000, "engine": 800_000_000},
        "highest": {"front_end": 100_000_000, "engine": 800_000_000},
        "cache_bytes": 500_000_000,
        "answers": {"OK": 3, ONE.answers[0]: 1},
        "connections": 2,
        "secrets": (),
        "died": "",
        "recovered_s": 0.3,
    }
    return judging.Run(**{**values, **more})


def grown(front_end: int, engine: int) -> Report:
    return seen(
        memory={
            "front_end": Memory(1, 100_000_000, 0, 100_000_000 + front_end),
            "engine": Memory(2, 800_000_000, 0, 800_000_000 + engine),
        }
    )


@pytest.mark.parametrize(
    ("one", "what", "fault"),
    [
        (ONE, run(), None),
        (ONE, run(beside=seen(gaps=waits(0.25))), None),
        (ONE, run(beside=seen(gaps=waits(0.26))), "gap between tokens 0.260 s, above 0.250"),
        (ONE, run(beside=seen(health=waits(0.3))), "health's answer 0.300 s, above 0.250"),
        # A calm time that was not calm allows more.
        (ONE, run(calm=seen(gaps=waits(0.06)), beside=seen(gaps=waits(0.26))), None),
        (ONE, run(calm=seen(gaps=waits(0.04)), beside=seen(gaps=waits(0.26))), "above 0.250"),
        (ONE, run(calm=seen(gaps=waits(0.1)), beside=seen(gaps=waits(0.31))), "above 0.300"),
        (ONE, run(calm=seen(gaps=waits(2.1, 2.0)), beside=seen(gaps=waits(0.31))), "above 0.300"),
        (ONE, run(beside=seen(tokenize=waits(9.0), first_tokens=waits(9.0))), None),
        (ONE, run(beside=seen(wrong_tokens=1)), "1 wrong tokens"),
        (ONE, run(beside=seen(lost_tokens=2)), "2 lost tokens"),
        (ONE, run(beside=seen(wrong_texts=3)), "3 wrong answers of Tokenize"),
        (ONE, run(beside=seen(not_serving=4)), "4 health checks that were not SERVING"),
        (ONE, run(beside=grown(257_000_000, 0)), "the front end grew by 257 MB, above 256"),
        (ONE, run(beside=grown(257_000_000, 0), highest={"front_end": 400_000_000}), None),
        (ONE, run(beside=grown(0, 750_000_000)), None),
        (ONE, run(beside=grown(0, 757_000_000)), "the engine grew by 757 MB, above 756"),
        (STRANGER, run(beside=grown(65_000_000, 0)), "strangers took 65 MB, above 64"),
        (STRANGER, run(beside=grown(100_000_000, 0), connections=1000), None),
        # Connections beyond the bound take nothing.
        (STRANGER, run(beside=grown(140_000_000, 0), connections=9000), "above 131"),
        (ONE, run(died="the engine", recovered_s=None), "the engine ended"),
        (ONE, run(recovered_s=None), "not as before in time"),
        (ONE, run(secrets=("mallory",)), "the log shows the token of mallory"),
        (INPUTS["calls-at-once"], run(answers={"CANCELLED (bare)": 1}), "1 CANCELLED (bare)"),
        (ONE, run(answers={"CANCELLED (bare)": 1, ONE.answers[0]: 1}), None),
        (ONE, run(answers={"CANCELLED (bare)": 1, "OK": 3}), "did not reach"),
        (ONE, run(answers={"unexpected: OK, not X": 2}), "2 unexpected: OK, not X"),
        (INPUTS["labels"], run(answers={"no answer": 2}), "did not reach"),
    ],
)  # fmt: skip
def test_what_is_a_fault(one: Input, what: judging.Run, fault: str | None) -> None:
    found = "; ".join(judging.faults(one, what))
    assert (fault in found) if fault is not None else not found, found


def test_a_late_witness_says_nothing() -> None:
    late = run(beside=seen(health=waits(0.4, late=0.2)))
    assert judging.why_discarded(late) is not None
    assert judging.why_discarded(run(beside=seen(health=waits(0.2, late=0.15)))) is None
    assert judging.why_discarded(run(beside=seen(gaps=waits(0.4, late=0.02)))) is None


def test_the_long_models_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    write_tokenizer(tmp_path, 30_000)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 30_000
    encoded = tokenizer.encode("aaaaaaaa river<|eos|>é")
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == "aaaaaaaa river<|eos|>é"
    assert len(encoded.ids) < 12


# ---- the part ------------------------------------------------------------------------------------


class Scripted(Attacks):
    """Tries nothing, and is told what came of it."""

    runs: ClassVar[list[judging.Run]] = []
    servers = 0

    def _once(self, one: Input, place: Any, calm: Report) -> judging.Run:
        return self.runs.pop(0)


def cut_run(**more: Any) -> judging.Run:
    """One that reaches what any input of the cut is for."""
    answers = {answer: 1 for name in part.CUT for answer in INPUTS[name].answers}
    return run(answers={**answers, "OK": 3}, **more)


@contextmanager
def no_server(*options: str, **_: Any) -> Iterator[tuple[Any, Any]]:
    Scripted.servers += 1
    server = SimpleNamespace(log_bytes=lambda: 0, log=lambda since: "what the server said")
    yield server, SimpleNamespace(begin=lambda: None, report=lambda: seen())


def tried(
    runs: list[judging.Run], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **more: Any
) -> list[Tried]:
    """What the part records of so many runs."""
    monkeypatch.setattr(part, "witnessed", no_server)
    monkeypatch.setattr(part, "low_priority", nullcontext)
    monkeypatch.setattr(part, "look", lambda witness, seconds: seen())
    monkeypatch.setattr(part, "Attacks", Scripted)
    monkeypatch.setattr(part, "MODELS", {"demo": Path})
    Scripted.runs, Scripted.servers = runs, 0
    rows: list[Tried] = []
    values: dict[str, Any] = {"seed": 1, "is_cut": True, "folder": tmp_path, "known": (), **more}
    part.run(Course(record=rows.append, say=lambda text: None, **values))
    return rows


def test_each_input_is_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = tried([cut_run(beside=grown(20_000_000, 0))] * len(part.CUT), monkeypatch, tmp_path)
    assert [one.name for one in rows] == [f"demo/{name}" for name in part.CUT]
    assert not any(one.wrong or one.not_judged for one in rows)
    assert rows[0].worst.startswith(
        "gap 20 ms (calm 20), health 10 ms (calm 10); front end +20 MB, engine +0 MB; 3 OK, 1 INV"
    )
    assert Scripted.servers == 1


def test_what_is_known_or_not_wanted_is_not_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert tried([], monkeypatch, tmp_path, known=[f"demo/{name}" for name in part.CUT]) == []
    assert Scripted.servers == 0
    [row] = tried([run()], monkeypatch, tmp_path, is_cut=False, only="demo/chat-tools")
    assert row.name == "demo/chat-tools"


def test_a_run_that_says_nothing_is_repeated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    late = run(beside=seen(health=waits(0.4, late=0.2)))
    whole = {"only": "demo/chat-tools", "is_cut": False}
    [row] = tried([late, run()], monkeypatch, tmp_path, **whole)
    assert (row.wrong, row.not_judged) == ([], "")
    [row] = tried([late] * part.TRIES, monkeypatch, tmp_path, **whole)
    assert row.not_judged.startswith("the witness itself was 0.200 s late")


def test_the_cut_judges_all_but_the_waits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slow = run(beside=seen(health=waits(0.4), wrong_tokens=1))
    [row] = tried([slow], monkeypatch, tmp_path, only="demo/chat-tools")
    assert row.wrong == ["1 wrong tokens"]
    [row] = tried([slow], monkeypatch, tmp_path, only="demo/chat-tools", is_cut=False)
    assert row.wrong == ["health's answer 0.400 s, above 0.250", "1 wrong tokens"]


def test_a_server_that_is_lost_is_exchanged_and_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    late = seen(health=waits(0.4, late=0.2))
    lost = run(died="the engine", recovered_s=None, beside=late)
    rows = tried([cut_run(), lost, *[cut_run()] * len(part.CUT)], monkeypatch, tmp_path)
    assert [bool(one.wrong) for one in rows] == [False, True, *[False] * (len(part.CUT) - 2)]
    assert "the engine ended" in rows[1].wrong
    assert not rows[1].not_judged
    assert Scripted.servers == 2


def test_every_input_is_planned_on_each_of_its_models() -> None:
    course = Course(
        seed=1, is_cut=False, folder=Path(), known=(), record=lambda row: None,
        say=lambda text: None,
    )  # fmt: skip
    for name in part.MODELS:
        planned = [one.name for _, inputs in part._plan(course, name) for one in inputs]
        assert planned == list(INPUTS)
    assert set(part.CUT) <= set(INPUTS)


@pytest.mark.slow
def test_an_input_on_a_real_server(tmp_path: Path) -> None:
    rows: list[Tried] = []
    course = Course(
        seed=1, is_cut=True, folder=tmp_path, known=(), record=rows.append,
        say=lambda text: None, only="demo/banned-ids", seconds=2.0,
    )  # fmt: skip
    part.run(course)
    [row] = rows
    assert row.count > 0
    assert "INVALID_FIELD spec.sampling.banned_token_ids" in row.worst
    assert not row.wrong


@pytest.mark.timeout(300)
async def test_each_case_is_answered_as_it_tells(tmp_path: Path) -> None:
    """Those that are single messages, on the demo model: each reaches the field that it is for."""
    wrong, asked = [], set[tuple[str, bytes]]()
    with closing(Server(DEMO, tmp_path, more=CHATS.options)) as server:
        async with server.sender("1") as s:
            for one in INPUTS.values():
                for number, case in enumerate(one.cases):
                    raw = case.message(s).SerializeToString()
                    if (case.method, raw) in asked:
                        continue
                    asked.add((case.method, raw))
                    found = await case.ask(s, raw)
                    if not any(fits(found, wanted) for wanted in case.answers):
                        wrong.append(f"{one.name}[{number}]: {found}, not {case.answers}")
    assert not wrong
    assert len(asked) > 400
