"""The fuzz targets: the code that parses bytes from others, and the properties that must hold.

A test accepts an input or refuses it with one of the errors meant for the sender. Any other
exception, or a result that violates a property, is a finding.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import grpc
import msgspec
import numpy as np
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_service_pb2 as rpc

from benchmarks.processes import ROOT
from engine.contract.errors import ConfigError, EngineUnavailableError, HeadraceError
from engine.contract.outputs import RequestOutput, StepOutputs
from engine.contract.request import GenerationRequest
from engine.contract.sampling_params import GrammarKind, GrammarParams, SamplingParams, StopParams
from engine.contract.types import RequestId, TokenId
from engine.process import engine_messages as messages
from engine.process import verbs
from engine.structured import GrammarCompiler
from engine.text import TextStream, Tokenizer
from service.admission.accounts import account_of
from service.admission.served_adapters import ServedAdapters
from service.admission.text_pool import THREADS, TextPool
from service.config import ServiceConfig
from service.convert.converter import Converter
from service.convert.incoming import IncomingCheck
from service.convert.inputs import InputEncoder
from service.convert.lacking import why_lacking
from service.delivery.served_request import LivesBy
from service.door.callers_file import EVERYONE, parse_callers
from service.errors.status_table import to_status
from service.replies import FORMATS, Context, format_option
from service.server.server_limits import request_limits_of
from tests.campaign.bytes.mutating import (
    mutate_bytes,
    mutate_message,
    mutate_text,
)
from tests.campaign.bytes.target import Target, Test, demand
from tests.campaign.bytes.weights import WEIGHTS
from tests.service.fake_engine import VOCAB_SIZE, FakeEngine, byte_tokenizer, model_info
from tests.service.replies.cases import parse

REFUSALS = {
    one.value[0]
    for one in (
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    )
}
"""Codes that tell the sender of an input what to change."""
MOST_STATUS_BYTES = 4096
TEMPLATES = ROOT / "tests" / "chat" / "templates"
TOKENS_WALKED = 24
COMPILE_S = 2.0


def _check_refusal(error: HeadraceError) -> None:
    """Check that an error is meant for the sender and that its status is small."""
    status = to_status(error)
    demand(status.code in REFUSALS, f"{type(error).__name__} comes as code {status.code}")
    demand(bool(status.message), "a refusal without a message")
    demand(status.ByteSize() < MOST_STATUS_BYTES, f"a status of {status.ByteSize()} bytes")


def _encoder(tokenizer: Tokenizer) -> InputEncoder:
    pool = TextPool(ThreadPoolExecutor(THREADS), lambda: 0.0)
    return InputEncoder(tokenizer, pool, max_context_tokens=2048, max_receive_bytes=1 << 20)


# ---- conversion ----------------------------------------------------------------------------------


def _specs() -> list[bytes]:
    specs = [
        pb.GenerationSpec(text={"text": "hi"}, stop={"max_tokens": 5, "stop_strings": ["a", "é"]}),
        pb.GenerationSpec(
            chat={
                "messages": [{"role": pb.CHAT_ROLE_USER, "content": "hi"}],
                "tools": [{"name": "f", "parameters_json": '{"type": "object"}'}],
            },
            sampling={"temperature": 0.5, "top_k": 5, "seed": 7},
            n=3,
        ),
        pb.GenerationSpec(
            tokens={"ids": [1, 2, 3]},
            structured_output={"json_schema": '{"type": "object"}'},
            labels=[{"name": "team", "value": "x"}],
            output={"logprobs": 2},
        ),
    ]
    return [one.SerializeToString() for one in specs]


def _conversion() -> Test:
    tokenizer, info = byte_tokenizer(), model_info()
    encoder, limits = _encoder(tokenizer), request_limits_of(ServiceConfig())
    reply = format_option("hermes")(tokenizer)
    lacking = why_lacking(tokenizer, reply, "hermes")
    adapters = ServedAdapters(FakeEngine(), info, ("fake",))
    converter = Converter(info, encoder, limits, ("fake",), adapters, reply, lacking)
    check, account = IncomingCheck(), account_of("fuzz")
    check.capabilities = frozenset({"chat", "tools"})
    encode = msgspec.msgpack.Encoder().encode
    decode = msgspec.msgpack.Decoder(GenerationRequest).decode

    async def convert(spec: pb.GenerationSpec) -> None:
        message = rpc.AddRequestRequest(spec=spec)
        check.check(message)
        draft = converter.draft(message, EVERYONE.may_use)
        found = await converter.submission(
            draft,
            account=account,
            weight=1.0,
            max_priority=100,
            engine_id=RequestId("e"),
            lives_by=LivesBy.STREAM,
        )
        request = found.request
        demand(1 <= request.n <= 16, "choices")
        demand(len(request.prompt) <= 1 << 20, "the prompt's length")
        demand(found.reserved_tokens >= len(request.prompt), "reserved tokens")
        demand(found.footprint.size >= 0, "the footprint")
        demand(decode(encode(request)) == request, "the request changes on its way to the engine")

    def test(data: bytes) -> None:
        spec = pb.GenerationSpec()
        try:
            spec.ParseFromString(data)
        except Exception:  # protobuf's own, before our code is reached
            return
        try:
            asyncio.run(convert(spec))
        except HeadraceError as error:
            _check_refusal(error)

    return test


# ---- chat templates ------------------------------------------------------------------------------


def _chats() -> list[bytes]:
    chats = [
        pb.ChatInput(messages=[{"role": pb.CHAT_ROLE_USER, "content": "hi"}]),
        pb.ChatInput(
            messages=[
                {"role": pb.CHAT_ROLE_SYSTEM, "content": "be kind"},
                {"role": pb.CHAT_ROLE_USER, "content": "weather?"},
                {
                    "role": pb.CHAT_ROLE_ASSISTANT,
                    "tool_calls": [{"id": "1", "name": "f", "arguments_json": '{"a": 1}'}],
                },
                {"role": pb.CHAT_ROLE_TOOL, "content": "rain", "tool_call_id": "1"},
            ],
            tools=[{"name": "f", "description": "d", "parameters_json": '{"type": "object"}'}],
        ),
    ]
    return [bytes([0]) + one.SerializeToString() for one in chats]


def _templates() -> Test:
    sources = [path.read_text() for path in sorted(TEMPLATES.glob("*.jinja"))]
    encoders = [_encoder(byte_tokenizer(chat_template=source)) for source in sources]
    account, check = account_of("fuzz"), IncomingCheck()

    def test(data: bytes) -> None:
        chat = pb.ChatInput()
        try:
            chat.ParseFromString(data[1:])
        except Exception:  # protobuf's own
            return
        encoder = encoders[(data[:1] or b"\0")[0] % len(encoders)]
        try:
            check.check(rpc.AddRequestRequest(spec={"chat": chat}))
            ids = asyncio.run(encoder.encode_chat(account, chat, fits=True)).ids
        except HeadraceError as error:
            _check_refusal(error)
        else:
            demand(max(ids, default=0) < VOCAB_SIZE, "a token that is none")

    return test


def _mutate_chat(data: bytes, source: random.Random, most: int) -> bytes:
    head = bytes([source.randrange(256)]) if source.random() < 0.2 else data[:1].ljust(1, b"\0")
    return head + _CHAT(data[1:], source, most - 1)


_CHAT = mutate_message(pb.ChatInput)


# ---- replies -------------------------------------------------------------------------------------


TOOLS = {"f": {"n": frozenset({"integer"}), "o": frozenset({"object", "null"})}}
_REPLIES = (
    *(mark for one in FORMATS.values() for mark in sorted(one.marks)),
    '{"name": "f", "arguments": {"a": [1, true]}}', '{"name": "f"', '"arguments": {', "}", "]",
    "\\", '"', "<", "</", "f", "12", " to=functions.f", "```json\n", "\n\n", "é🙂", "x" * 40,
    " " * 70, "call:f{n:1}", "\\u0041", "\\ud800",
)  # fmt: skip


def _replies() -> Test:
    names = sorted(FORMATS)

    def test(data: bytes) -> None:
        head = data[:3].ljust(3, b"\0")
        raw = data[3:].decode(errors="replace")
        found = FORMATS[names[head[0] % len(names)]]
        context = Context(TOOLS if head[1] & 1 else {}, bool(head[1] & 2), "seed")
        whole = parse(found, [raw], context)
        source = random.Random(head[2])
        places = sorted(source.randint(0, len(raw)) for _ in range(5))
        parts = [raw[a:b] for a, b in pairwise((0, *places, len(raw)))]
        demand(parse(found, parts, context) == whole, f"{found.name}: it depends on the division")

    return test


# ---- grammars ------------------------------------------------------------------------------------

_KINDS = tuple(GrammarKind)
_GRAMMARS = (
    '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}',
    '{"enum": [1, "a", null]}', '{"anyOf": [{}, {"type": "string"}]}', '"pattern": "[a-z]+"',
    '"$ref": "#/$defs/a"', '"$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}', '"maxLength": 3',
    '"minimum": 1e400', '"multipleOf": 0', '"additionalProperties": false', "true", "[", "]", "{",
    "}", "(a|b)*", "a{1,5}", "a{99999}", "(?=a)", "\\p{L}", "[^", "\\", "^$", ".*", "(", ")",
    "start: a*\n", 'a: "x" | b b\n', "b: /[0-9]+/\n", "%ignore /\\s+/\n", "%json {}\n", "?", "+",
    '{"type": "structural_tag"}', '"format": {"type": "sequence", "elements": []}', "é", "\0",
)  # fmt: skip


def _grammar_seeds() -> list[bytes]:
    texts = {
        GrammarKind.JSON_SCHEMA: '{"type": "object", "properties": {"a": {"type": "string"}}}',
        GrammarKind.REGEX: "[a-c]{2,5}(x|yz)*",
        GrammarKind.LARK: 'start: a+\na: "b" | /[0-9]+/\n',
        GrammarKind.CHOICE: "yes\0no",
    }
    return [bytes([_KINDS.index(kind)]) + text.encode() for kind, text in texts.items()]


def _grammars() -> Test:
    compiler = GrammarCompiler(byte_tokenizer(), VOCAB_SIZE, time_limit_s=COMPILE_S, workers=1)
    compiler.warm_up()
    ending = frozenset({TokenId(256)})

    def test(data: bytes) -> None:
        kind = _KINDS[(data[:1] or b"\0")[0] % len(_KINDS)]
        text = data[1:].decode(errors="replace")
        choices = tuple(text.split("\0")) if kind is GrammarKind.CHOICE else ()
        bare = kind in (GrammarKind.CHOICE, GrammarKind.JSON_OBJECT)
        try:
            params = GrammarParams(kind=kind, text="" if bare else text, choices=choices)
            make = compiler.compile(params, ending)
            matcher = make()
        except HeadraceError as error:
            _check_refusal(error)
            return
        _walk(matcher, random.Random(data))

    return test


def _walk(matcher: Any, source: random.Random) -> None:
    """Follow a grammar at random; it must allow at least one token and accept every token it
    allows.
    """
    for _ in range(TOKENS_WALKED):
        if matcher.is_complete:
            return
        mask = np.zeros((VOCAB_SIZE + 31) // 32, dtype=np.int32)
        matcher.fill_mask(mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB_SIZE]
        tokens = np.flatnonzero(bits)
        if not len(tokens):
            demand(not matcher.can_go_on, "nothing is allowed, and it says that it can go on")
            return
        token = TokenId(int(source.choice(tokens)))
        if token == 256:
            return
        demand(matcher.accept(token), f"it allows token {token}, and does not accept it")


# ---- stop strings --------------------------------------------------------------------------------


def _stops() -> Test:
    tokenizer = byte_tokenizer()

    def test(data: bytes) -> None:
        head, _, rest = data.partition(b"\xff")
        stops = [one.decode(errors="replace") for one in head.split(b"\xfe") if one][:16]
        text = rest.decode(errors="replace")
        ids = list(text.encode())
        found = _first_stop(text, stops)
        for size in (1, 3, len(ids) or 1):
            stream = TextStream(tokenizer, stop_strings=stops)
            said = ""
            for start in range(0, len(ids), size):
                said += stream.push(ids[start : start + size])
                if stream.stop is not None:
                    break
            said += stream.finish()
            demand(said == found, f"in pieces of {size}: {said!r}, not {found!r}")

    return test


def _first_stop(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first complete stop string; on a tie, the longest stop string
    wins.
    """
    best: tuple[int, int] | None = None
    for stop in stops:
        place = text.find(stop)
        if place >= 0:
            ended = place + len(stop), place
            best = ended if best is None else min(best, ended)
    return text if best is None else text[: best[1]]


def _mutate_stops(data: bytes, source: random.Random, most: int) -> bytes:
    letters = ("a", "b", "ab", "aba", "é", "🙂", " ")
    head, _, rest = data.partition(b"\xff")
    if source.random() < 0.4:
        stops = [
            "".join(source.choice(letters) for _ in range(source.randint(1, 5)))
            for _ in range(source.randint(1, 5))
        ]
        head = b"\xfe".join(one.encode() for one in stops)
    rest = mutate_text(letters)(rest, source, most - len(head) - 1)
    return (head + b"\xff" + rest)[:most]


# ---- the engine's codec --------------------------------------------------------------------------


def _frames() -> list[bytes]:
    encode = msgspec.msgpack.Encoder().encode
    request = GenerationRequest(
        request_id=RequestId("a"),
        prompt=(TokenId(1), TokenId(2)),
        sampling=SamplingParams(),
        stop=StopParams(max_tokens=3),
    )
    outputs = StepOutputs(1.0, (RequestOutput(RequestId("a"), 0, (TokenId(3),)),))
    found: list[Any] = [
        messages.Step(outputs),
        messages.Died("why"),
        messages.StartProgress("a line"),
        messages.Started(model_info()),
        messages.Call(1, "submit", verbs.raw((request,))),
        messages.Refused(2, messages.to_wire(EngineUnavailableError("no"))),
        messages.Start("m", {}, {}, "info"),
    ]
    return [encode(one) for one in found] + [encode((request,))]


def _codec() -> Test:
    readers = [
        msgspec.msgpack.Decoder(messages.Message),
        msgspec.msgpack.Decoder(messages.Command),
        *(verb.arguments for verb in verbs.VERBS.values()),
        *(verb.answer for verb in verbs.VERBS.values()),
    ]
    encode = msgspec.msgpack.Encoder().encode

    def test(data: bytes) -> None:
        for reader in readers:
            try:
                found = reader.decode(data)
            except (msgspec.DecodeError, ValueError):
                continue
            except HeadraceError:
                continue  # a value that the type itself refuses
            again = encode(found)
            demand(encode(reader.decode(again)) == again, "what was read is not what is written")

    return test


# ---- the callers' file ---------------------------------------------------------------------------

_DIGEST = "0123456789abcdef" * 4
_CALLERS = (
    "[[callers]]\n", 'identity = "search"\n', f'token_sha256 = "{_DIGEST}"\n',
    'token_sha256 = []\n', 'services = ["*"]\n', 'services = ["GenerationService"]\n',
    "services = []\n", "weight = 2.0\n", "weight = nan\n", "weight = -inf\n", "weight = true\n",
    "max_priority = 101\n", "max_priority = 1\n", "may_call_for_others = true\n",
    'certificate = "ops.example"\n', 'certificate = ""\n', "identity = 1\n", "callers = 1\n",
    "[callers]\n", "# é\n", "'''", '"""', "\\u0000", "=", ".", "1979-05-27", "0x7fffffffffffffff",
)  # fmt: skip


def _callers() -> Test:
    def test(data: bytes) -> None:
        text = data.decode(errors="replace")
        try:
            table = parse_callers(text)
        except ConfigError as error:
            demand(_DIGEST not in str(error), "an error shows a digest")
            return
        for _, caller in table.tokens:
            demand(0 < caller.weight < float("inf"), "a weight that is none")
            demand(bool(caller.identity), "nobody's token")
        demand(table.by_digest(b"\0" * 32) is None, "a digest that nobody has")

    return test


def _caller_seeds() -> list[bytes]:
    one = f'[[callers]]\nidentity = "search"\ntoken_sha256 = "{_DIGEST}"\nservices = ["*"]\n'
    two = '[[callers]]\nidentity = "ops"\ncertificate = "ops.example"\nservices = ["*"]\n'
    return [(one + two).encode(), one.encode()]


TARGETS: dict[str, Target] = {
    one.name: one
    for one in (
        Target(
            name="conversion",
            what="specs of the contract, with fields changed, converted to requests",
            promises=(3, 7, 9),
            prepare=_conversion,
            mutate=mutate_message(pb.GenerationSpec),
            seeds=_specs,
        ),
        Target(
            name="templates",
            what="conversations with fields changed, laid out by 20 models' templates",
            promises=(3, 9, 14),
            prepare=_templates,
            mutate=_mutate_chat,
            seeds=_chats,
        ),
        Target(
            name="replies",
            what="texts of marks and halves of calls, taken apart as a whole and in pieces",
            promises=(3, 15),
            prepare=_replies,
            mutate=mutate_text(_REPLIES, head=3),
            seeds=lambda: [bytes([i, 1, i]) + b"hi" for i in range(len(FORMATS))],
        ),
        Target(
            name="grammars",
            what="schemas, expressions, grammars and tags, compiled and then followed at random",
            promises=(3, 9),
            prepare=_grammars,
            mutate=mutate_text(_GRAMMARS, head=1),
            seeds=_grammar_seeds,
        ),
        Target(
            name="stop-strings",
            what="texts and stop strings, found as a plain search finds them, however divided",
            promises=(2, 3),
            prepare=_stops,
            mutate=_mutate_stops,
            seeds=lambda: [b"ab\xfeba\xffaabba", "é\0🙂".encode() + b"\xff abc"],
        ),
        Target(
            name="codec",
            what="frames between front end and engine, read as messages and as arguments",
            promises=(3,),
            prepare=_codec,
            mutate=mutate_bytes,
            seeds=_frames,
        ),
        Target(
            name="callers",
            what="files of callers",
            promises=(9, 10),
            prepare=_callers,
            mutate=mutate_text(_CALLERS),
            seeds=_caller_seeds,
        ),
    )
} | WEIGHTS
