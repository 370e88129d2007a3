"""Messages that are large or have many or deeply nested elements.

They show how much work the server does before it refuses a message. Each message is sent just below
and far above the size that the server accepts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_service_pb2 as rpc
from headrace.v1 import model_service_pb2 as model

from tests.campaign.hostile import encoding as wire
from tests.campaign.hostile.inputs.kinds import Call, Group, invalid, named
from tests.campaign.hostile.sending import (
    CANCEL,
    CONTROL,
    DETOKENIZE,
    GENERATE,
    GENERATION,
    GET,
    HEALTH,
    MODEL,
    SESSION,
    STREAM,
    TOKENIZE,
    Sender,
)

DEEPEST = 60
"""Nesting depth of lists; a template accepts at most 64 levels."""
JSON_BYTES = 256 << 10
"""The longest JSON text that the server accepts."""
USER, ASSISTANT = pb.CHAT_ROLE_USER, pb.CHAT_ROLE_ASSISTANT
FIVE = b"\x05"
"""A token id."""

Body = Callable[[int], bytes]
"""Returns a part of a message, of about a given size."""
_HI = wire.spec("hi")


def _either(field: str) -> tuple[str, ...]:
    """Return the answers of Generate and Tokenize to an invalid field of a conversation."""
    return invalid(field, f"spec.{field}")


def _chat(**fields: Any) -> bytes:
    return pb.ChatInput(**fields).SerializeToString()


def _chats(s: Sender, more: Body) -> Iterator[Call]:
    """Return chats with extra fields for Tokenize and Generate, of both message sizes."""
    hi = _chat(messages=[{"role": USER, "content": "hi"}])
    for body in [hi + more(size) for size in s.sizes]:
        yield Call(TOKENIZE, wire.inside(model.TokenizeRequest, "chat", body))
        yield Call(GENERATE, wire.inside(rpc.GenerateRequest, "spec.chat", body))


def _generates(s: Sender, spec: Body) -> Iterator[Call]:
    """Return specs for Generate and for a session, of both message sizes."""
    for body in map(spec, s.sizes):
        yield Call(GENERATE, wire.inside(rpc.GenerateRequest, "spec", body))
        yield Call(SESSION, wire.inside(rpc.StreamResultRequest, "add.spec", body))


MESSAGES = Group("messages")


def _chats_with(field: str) -> Callable[[Body], Body]:
    """Add the input of chats with the part that a function returns. `field`: the one refused."""

    def add(body: Body) -> Body:
        @MESSAGES.repeats(answers=_either(field), **named(body))
        def calls(s: Sender) -> Iterable[Call]:
            return _chats(s, body)

        return body

    return add


@_chats_with("chat.tools")
def chat_tools(size: int) -> bytes:
    """Chats of as many tools as fit."""
    return wire.filled(_chat(tools=[{"name": "f"}]), size)


@_chats_with("chat.tools")
def chat_empty_tools(size: int) -> bytes:
    """Chats of as many empty tools as fit."""
    return wire.filled(_chat(tools=[{}]), size)


@_chats_with("chat.messages")
def chat_messages(size: int) -> bytes:
    """Chats of as many empty messages as fit."""
    return wire.filled(_chat(messages=[{"role": USER}]), size)


@_chats_with("chat.messages")
def chat_short_messages(size: int) -> bytes:
    """Chats of as many messages of one letter as fit."""
    return wire.filled(_chat(messages=[{"role": USER, "content": "a"}]), size)


def _message(role: pb.ChatRole, parts: bytes) -> bytes:
    """Return a chat of one message, which has the given parts."""
    head = pb.ChatMessage(role=role).SerializeToString()
    return wire.inside(pb.ChatInput, "messages", head + parts)


def _calls(size: int, **call: Any) -> bytes:
    """Return a message with as many calls of tools as fit."""
    one = pb.ChatMessage(tool_calls=[{"name": "f", **call}]).SerializeToString()
    return _message(ASSISTANT, wire.filled(one, size))


@MESSAGES.repeats(answers=invalid("chat.messages.tool_calls"))
def chat_tool_calls(s: Sender) -> Iterable[Call]:
    """A message with as many calls of tools as fit."""
    for size in s.sizes:
        yield Call(TOKENIZE, wire.inside(model.TokenizeRequest, "chat", _calls(size)))


def _arguments(text: str) -> bytes:
    return _chat(template_arguments_json=text)


def _list(value: str, size: int) -> bytes:
    """Return template arguments with a list that repeats one value."""
    return _arguments(f'{{"a":[{",".join([value] * max(1, size // (len(value) + 1)))}]}}')


@_chats_with("chat.template_arguments_json")
def template_nulls(size: int) -> bytes:
    """As many nulls among the template's arguments as fit."""
    return _list("null", size)


@_chats_with("chat.template_arguments_json")
def template_keys(size: int) -> bytes:
    """As many names of template arguments as fit."""
    return _arguments("{" + ",".join(f'"k{number}":0' for number in range(size // 12)) + "}")


@MESSAGES.repeats(answers=_either("chat.template_arguments_json"))
def template_deep(s: Sender) -> Iterable[Call]:
    """Lists in lists among the template's arguments, some as deep as they are long."""
    yield from _chats(s, lambda size: _list("[" * (size // 2) + "]" * (size // 2), size))
    yield from _chats(s, lambda size: _list("[" * DEEPEST + "]" * DEEPEST, size))


@_chats_with("chat.tools[].parameters_json")
def deep_tool_schema(size: int) -> bytes:
    """Tools whose parameters are 60 objects deep."""
    deep = '{"a":' * DEEPEST + "1" + "}" * DEEPEST
    return wire.filled(_chat(tools=[{"name": "f", "parameters_json": deep}]), size)


@_chats_with("chat.template_arguments_json")
def template_names_twice(size: int) -> bytes:
    """Template arguments that name one member as often as fits."""
    return _arguments("{" + ",".join(['"k":0'] * (size // 6)) + "}")


@_chats_with("chat.messages.content_parts.parts")
def content_parts(size: int) -> bytes:
    """A message of as many empty parts as fit."""
    one = pb.ContentParts(parts=[{"text": ""}]).SerializeToString()
    return _message(USER, wire.inside(pb.ChatMessage, "content_parts", wire.filled(one, size)))


@MESSAGES.repeats(answers=invalid("required_capabilities"))
def required_capabilities(s: Sender) -> Iterable[Call]:
    """As many required capabilities as fit, and one of the largest size."""
    for size in s.sizes:
        for name, count in (("x", size // 3), ("x" * size, 1)):
            raw = rpc.GenerateRequest(required_capabilities=[name] * count).SerializeToString()
            yield Call(GENERATE, wire.request("hi") + raw)


@MESSAGES.repeats(answers=_either("chat.template_arguments_json"))
def json_escapes(s: Sender) -> Iterable[Call]:
    """JSON of quotes and escapes, and strings without an end."""
    for text in (
        '{"a":"' + "[," * 9000 + '\\"' * ((JSON_BYTES - 20_000) // 2),
        '"' * JSON_BYTES,
        "\\" * JSON_BYTES,
        '{"a":"' + "\\ud83d\\ude00" * (JSON_BYTES // 13) + '"}',
        '{"a":' + "9" * (JSON_BYTES - 8) + "}",
    ):
        yield from _chats(s, lambda _, text=text: _arguments(text))  # type: ignore[misc]


@_chats_with("chat.messages[].tool_calls[].arguments_json")
def json_of_many_calls(size: int) -> bytes:
    """As many calls with 16,000 values each as fit."""
    return _calls(size, arguments_json='{"a":[' + "0," * 16_000 + "0]}")


@MESSAGES.repeats()
def unknown_fields(s: Sender) -> Iterable[Call]:
    """As many unknown fields as fit, in eight methods."""
    methods = [
        *(GENERATE, TOKENIZE, MODEL + "GetModel", DETOKENIZE),
        *(GENERATION + name for name in ("Cancel", "GetResult", "AddRequest")),
    ]
    bodies = [wire.filled(wire.UNKNOWN, size) for size in s.sizes]
    yield from (Call(method, body) for method in methods for body in bodies)
    yield Call(SESSION, bodies[0])


@MESSAGES.repeats(name="stranger-unknown-fields", stranger=True)
def unknown_fields_of_strangers(s: Sender) -> Iterable[Call]:
    """The same in four methods, without a token."""
    body = wire.filled(wire.UNKNOWN, s.below)
    methods = (HEALTH + "Check", HEALTH + "List", GENERATE, CONTROL + "GetStatistics")
    return [Call(method, body, token="") for method in methods]


def _with_ids(name: str, ids: bytes) -> bytes:
    return _HI + wire.inside(pb.GenerationSpec, f"sampling.{name}", ids)


@MESSAGES.repeats(answers=invalid("spec.sampling.banned_token_ids"))
def banned_ids(s: Sender) -> Iterable[Call]:
    """As many banned ids as fit."""
    return _generates(s, lambda size: _with_ids("banned_token_ids", FIVE * size))


@MESSAGES.repeats(answers=invalid("spec.sampling.allowed_token_ids"))
def allowed_ids(s: Sender) -> Iterable[Call]:
    """As many allowed ids as fit."""
    ids = wire.packed(range(min(min(262_144, s.below) // 3, s.card.vocab_size)))
    twice = _with_ids("allowed_token_ids", ids * 2)
    yield Call(GENERATE, wire.inside(rpc.GenerateRequest, "spec", twice))
    yield Call(SESSION, wire.inside(rpc.StreamResultRequest, "add.spec", twice))
    yield from _generates(s, lambda size: _with_ids("allowed_token_ids", FIVE * size))


@MESSAGES.repeats(answers=invalid("spec.tokens.ids"))
def token_ids(s: Sender) -> Iterable[Call]:
    """A prompt of as many ids as fit."""
    return _generates(s, lambda size: wire.inside(pb.GenerationSpec, "tokens.ids", FIVE * size))


@MESSAGES.repeats(answers=invalid("spec.stop.eos_token_ids", "spec.stop.stop_token_ids"))
def stop_ids(s: Sender) -> Iterable[Call]:
    """As many stop and end ids as fit."""

    def spec(size: int) -> bytes:
        names, ids = ("stop.stop_token_ids", "stop.eos_token_ids"), FIVE * (size // 2)
        return _HI + b"".join(wire.inside(pb.GenerationSpec, name, ids) for name in names)

    return _generates(s, spec)


@MESSAGES.repeats(answers=invalid("spec.stop.stop_strings"))
def many_stop_strings(s: Sender) -> Iterable[Call]:
    """As many stop strings as fit."""
    one = pb.StopOptions(stop_strings=["a"]).SerializeToString()
    return _generates(
        s, lambda size: _HI + wire.inside(pb.GenerationSpec, "stop", wire.filled(one, size))
    )


@MESSAGES.repeats(answers=invalid("spec.request_id", "request_id", "request_ids"))
def long_names(s: Sender) -> Iterable[Call]:
    """Request ids of the largest size, and as many cancels as fit."""
    name = "a" * s.below
    cancel = rpc.CancelRequest(request_ids=[name]).SerializeToString()
    result = rpc.GetResultRequest(request_id=name).SerializeToString()
    command = rpc.StreamResultRequest(command_id=1, cancel={"request_id": name})
    yield Call(GENERATE, wire.request("hi", request_id=name), gzip=False)
    yield Call(GET, result, gzip=False)
    yield Call(CANCEL, cancel, gzip=False)
    many = wire.filled(rpc.CancelRequest(request_ids=["a"]).SerializeToString(), s.below)
    yield Call(CANCEL, many)
    yield Call(SESSION, command.SerializeToString())


@MESSAGES.repeats()
def gzip_bombs(s: Sender) -> Iterable[Call]:
    """64 MiB of zeros, compressed."""
    bomb = bytes(64 << 20)
    methods = (GENERATE, TOKENIZE, STREAM)
    return [*(Call(method, bomb) for method in methods), Call(HEALTH + "Check", bomb, token="")]


@MESSAGES.sends()
async def malformed(s: Sender) -> None:
    """Random bytes for ten methods."""
    methods = [
        *(GENERATION + name for name in ("Generate", "GenerateStream", "AddRequest", "Cancel")),
        *(MODEL + name for name in ("GetModel", "Tokenize", "Detokenize")),
        *(GET, GENERATION + "Nothing", HEALTH + "Check"),
    ]

    async def one(_: int) -> None:
        raw = s.source.randbytes(s.source.choice([1, 20, 300, 100_000]))
        await s.call(s.source.choice(methods), raw)
        await asyncio.sleep(0)

    await s.again(16, one)
