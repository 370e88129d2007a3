"""Messages that are large or have many or deeply nested elements.

They show how much work the server does before it refuses a message. Each message is sent just below
and far above the size that the server accepts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator

from tests.campaign.hostile import encoding as wire
from tests.campaign.hostile.inputs.kinds import Call, Group, invalid
from tests.campaign.hostile.sending import CONTROL, GENERATION, HEALTH, MODEL, Sender

GENERATE, SESSION = GENERATION + "Generate", GENERATION + "StreamResult"
TOKENIZE = MODEL + "Tokenize"
DEEPEST = 60
"""Nesting depth of lists; a template accepts at most 64 levels."""

JSON_BYTES = 256 << 10
"""The longest JSON text that the server accepts."""


def _either(field: str) -> tuple[str, ...]:
    """Return the answers of Generate and Tokenize to an invalid field of a conversation."""
    return invalid(field, f"spec.{field}")


def _arguments(value: str, size: int) -> bytes:
    """Return `template_arguments_json` of about the given size, with a list that repeats one
    value.
    """
    values = ",".join([value] * max(1, size // (len(value) + 1)))
    return wire.field(5, f'{{"a":[{values}]}}')


def _chats(s: Sender, more: Callable[[int], bytes]) -> Iterator[Call]:
    """Return chats with extra fields for Tokenize and Generate, of both message sizes."""
    for body in [wire.message() + more(size) for size in s.sizes]:
        yield Call(TOKENIZE, wire.field(2, body))
        yield Call(GENERATE, wire.request(wire.chat_input(body)))


def _with_ids(sampling_field: int, ids: bytes) -> bytes:
    return wire.text_input("hi") + wire.sampling(wire.field(sampling_field, ids))


def _generates(s: Sender, spec: Callable[[int], bytes]) -> Iterator[Call]:
    """Return specs for Generate and for a session, of both message sizes."""
    for raw in [wire.request(spec(size)) for size in s.sizes]:
        yield Call(GENERATE, raw)
        yield Call(SESSION, wire.field(3, raw))  # an `add`, whose field 1 is the spec as well


MESSAGES = Group("messages")


@MESSAGES.repeats(answers=_either("chat.tools"))
def chat_tools(s: Sender) -> Iterable[Call]:
    """Chats of as many tools as fit."""
    return _chats(s, lambda size: wire.filled(wire.field(2, wire.field(1, "f")), size))


@MESSAGES.repeats(answers=_either("chat.tools"))
def chat_empty_tools(s: Sender) -> Iterable[Call]:
    """Chats of as many empty tools as fit."""
    return _chats(s, lambda size: wire.filled(wire.field(2, b""), size))


@MESSAGES.repeats(answers=_either("chat.messages"))
def chat_messages(s: Sender) -> Iterable[Call]:
    """Chats of as many empty messages as fit."""
    return _chats(s, lambda size: wire.filled(wire.field(1, wire.count(1, 2)), size))


@MESSAGES.repeats(answers=_either("chat.messages"))
def chat_short_messages(s: Sender) -> Iterable[Call]:
    """Chats of as many messages of one letter as fit."""
    return _chats(s, lambda size: wire.filled(wire.message("a"), size))


@MESSAGES.repeats(answers=invalid("chat.messages.tool_calls"))
def chat_tool_calls(s: Sender) -> Iterable[Call]:
    """A message with as many calls of tools as fit."""
    for size in s.sizes:
        calls = wire.filled(wire.field(4, wire.field(2, "f")), size)
        yield Call(TOKENIZE, wire.field(2, wire.field(1, wire.count(1, 3) + calls)))


@MESSAGES.repeats(answers=_either("chat.template_arguments_json"))
def template_nulls(s: Sender) -> Iterable[Call]:
    """As many nulls among the template's arguments as fit."""
    return _chats(s, lambda size: _arguments("null", size))


@MESSAGES.repeats(answers=_either("chat.template_arguments_json"))
def template_keys(s: Sender) -> Iterable[Call]:
    """As many names of template arguments as fit."""

    def arguments(size: int) -> bytes:
        names = ",".join(f'"k{number}":0' for number in range(size // 12))
        return wire.field(5, f"{{{names}}}")

    return _chats(s, arguments)


@MESSAGES.repeats(answers=_either("chat.template_arguments_json"))
def template_deep(s: Sender) -> Iterable[Call]:
    """Lists in lists among the template's arguments, some as deep as they are long."""
    yield from _chats(s, lambda size: _arguments("[" * (size // 2) + "]" * (size // 2), size))
    yield from _chats(s, lambda size: _arguments("[" * DEEPEST + "]" * DEEPEST, size))


@MESSAGES.repeats(answers=_either("chat.tools[].parameters_json"))
def deep_tool_schema(s: Sender) -> Iterable[Call]:
    """Tools whose parameters are 60 objects deep."""
    deep = '{"a":' * DEEPEST + "1" + "}" * DEEPEST
    tool = wire.field(2, wire.field(1, "f") + wire.field(3, deep))
    return _chats(s, lambda size: wire.filled(tool, size))


@MESSAGES.repeats(answers=_either("chat.template_arguments_json"))
def template_names_twice(s: Sender) -> Iterable[Call]:
    """Template arguments that name one member as often as fits."""
    return _chats(s, lambda size: wire.field(5, "{" + ",".join(['"k":0'] * (size // 6)) + "}"))


@MESSAGES.repeats(answers=_either("chat.messages.content_parts.parts"))
def content_parts(s: Sender) -> Iterable[Call]:
    """A message of as many empty parts as fit."""

    def message(size: int) -> bytes:
        parts = wire.filled(wire.field(1, wire.field(1, "")), size)
        return wire.field(1, wire.count(1, 2) + wire.field(7, parts))

    return _chats(s, message)


@MESSAGES.repeats(answers=invalid("required_capabilities"))
def required_capabilities(s: Sender) -> Iterable[Call]:
    """As many required capabilities as fit, and one of the largest size."""
    hi = wire.request(wire.text_input("hi"))
    for size in s.sizes:
        yield Call(GENERATE, hi + wire.filled(wire.field(15, "x"), size))
        yield Call(GENERATE, hi + wire.field(15, "x" * size))


@MESSAGES.repeats(answers=_either("chat.template_arguments_json"))
def json_escapes(s: Sender) -> Iterable[Call]:
    """JSON of quotes and escapes, and strings without an end."""
    commas = b"[," * 9000
    texts = [
        b'{"a":"' + commas + b'\\"' * ((JSON_BYTES - 20_000) // 2),
        b'"' * JSON_BYTES,
        b"\\" * JSON_BYTES,
        b'{"a":"' + b"\\ud83d\\ude00" * (JSON_BYTES // 13) + b'"}',
        b'{"a":' + b"9" * (JSON_BYTES - 8) + b"}",
    ]
    for text in texts:
        yield from _chats(s, lambda _, text=text: wire.field(5, text))  # type: ignore[misc]


@MESSAGES.repeats(answers=_either("chat.messages[].tool_calls[].arguments_json"))
def json_of_many_calls(s: Sender) -> Iterable[Call]:
    """As many calls with 16,000 values each as fit."""
    arguments = b'{"a":[' + b"0," * 16_000 + b"0]}"
    call = wire.field(4, wire.field(2, "f") + wire.field(3, arguments))
    return _chats(s, lambda size: wire.field(1, wire.count(1, 3) + wire.filled(call, size)))


@MESSAGES.repeats()
def unknown_fields(s: Sender) -> Iterable[Call]:
    """As many unknown fields as fit, in eight methods."""
    methods = [
        GENERATE,
        TOKENIZE,
        MODEL + "GetModel",
        MODEL + "Detokenize",
        GENERATION + "Cancel",
        GENERATION + "GetResult",
        GENERATION + "AddRequest",
    ]
    bodies = [wire.filled(wire.count(1000, 1), size) for size in s.sizes]
    yield from (Call(method, body) for method in methods for body in bodies)
    yield Call(SESSION, bodies[0])


@MESSAGES.repeats(name="stranger-unknown-fields", stranger=True)
def unknown_fields_of_strangers(s: Sender) -> Iterable[Call]:
    """The same in four methods, without a token."""
    body = wire.filled(wire.count(1000, 1), s.below)
    methods = (HEALTH + "Check", HEALTH + "List", GENERATE, CONTROL + "GetStatistics")
    return [Call(method, body, token="") for method in methods]


@MESSAGES.repeats(answers=invalid("spec.sampling.banned_token_ids"))
def banned_ids(s: Sender) -> Iterable[Call]:
    """As many banned ids as fit."""
    return _generates(s, lambda size: _with_ids(12, b"\x05" * size))


@MESSAGES.repeats(answers=invalid("spec.sampling.allowed_token_ids"))
def allowed_ids(s: Sender) -> Iterable[Call]:
    """As many allowed ids as fit."""
    few = min(262_144, s.below)
    ids = b"".join(wire.varint(number) for number in range(min(few // 3, s.card.vocabulary)))
    twice = wire.request(_with_ids(11, ids * 2))
    yield from (Call(GENERATE, twice), Call(SESSION, wire.field(3, twice)))
    yield from _generates(s, lambda size: _with_ids(11, b"\x05" * size))


@MESSAGES.repeats(answers=invalid("spec.tokens.ids"))
def token_ids(s: Sender) -> Iterable[Call]:
    """A prompt of as many ids as fit."""
    return _generates(s, lambda size: wire.token_input(b"\x05" * size))


@MESSAGES.repeats(answers=invalid("spec.stop.eos_token_ids", "spec.stop.stop_token_ids"))
def stop_ids(s: Sender) -> Iterable[Call]:
    """As many stop and end ids as fit."""

    def spec(size: int) -> bytes:
        ids = b"\x05" * (size // 2)
        return wire.text_input("hi") + wire.field(6, wire.field(4, ids) + wire.field(5, ids))

    return _generates(s, spec)


@MESSAGES.repeats(answers=invalid("spec.stop.stop_strings"))
def many_stop_strings(s: Sender) -> Iterable[Call]:
    """As many stop strings as fit."""
    stop = wire.field(3, "a")
    return _generates(s, lambda n: wire.text_input("hi") + wire.field(6, wire.filled(stop, n)))


@MESSAGES.repeats(answers=invalid("spec.request_id", "request_id", "request_ids"))
def long_names(s: Sender) -> Iterable[Call]:
    """Request ids of the largest size, and as many cancels as fit."""
    name = wire.field(1, b"a" * s.below)
    yield Call(GENERATE, wire.request(name + wire.text_input("hi")), gzip=False)
    yield Call(GENERATION + "GetResult", name, gzip=False)
    yield Call(GENERATION + "Cancel", name, gzip=False)
    yield Call(GENERATION + "Cancel", wire.filled(wire.field(1, "a"), s.below))
    yield Call(SESSION, wire.count(1, 1) + wire.field(5, name))


@MESSAGES.repeats()
def gzip_bombs(s: Sender) -> Iterable[Call]:
    """64 MiB of zeros, compressed."""
    bomb = bytes(64 << 20)
    methods = (GENERATE, TOKENIZE, GENERATION + "GenerateStream")
    return [*(Call(method, bomb) for method in methods), Call(HEALTH + "Check", bomb, token="")]


@MESSAGES.sends()
async def malformed(s: Sender) -> None:
    """Random bytes for ten methods."""
    methods = [
        *(GENERATION + name for name in ("Generate", "GenerateStream", "AddRequest", "Cancel")),
        *(MODEL + name for name in ("GetModel", "Tokenize", "Detokenize")),
        GENERATION + "GetResult",
        GENERATION + "Nothing",
        HEALTH + "Check",
    ]

    async def one(_: int) -> None:
        raw = s.source.randbytes(s.source.choice([1, 20, 300, 100_000]))
        await s.call(s.source.choice(methods), raw)
        await asyncio.sleep(0)

    await s.again(16, one)
