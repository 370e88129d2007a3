"""Messages that are large or have many or deeply nested elements.

They show how much work the server does before it refuses a message. Each message is sent just below
and far above the size that the server accepts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from benchmarks.hostile import encoding as wire
from benchmarks.hostile.inputs.kinds import Group, Input, invalid
from benchmarks.hostile.sending import CONTROL, GENERATION, HEALTH, MODEL, Sender

GENERATE = GENERATION + "Generate"
TOKENIZE = MODEL + "Tokenize"
DEEPEST = 60
"""Nesting depth of lists; a template accepts at most 64 levels."""

JSON_BYTES = 256 << 10
"""The longest JSON text that the server accepts."""


def _either(field: str) -> tuple[str, ...]:
    """Return the answers of Generate and Tokenize to an invalid field of a conversation."""
    return invalid(field, f"spec.{field}")


async def _chats(s: Sender, part: bytes) -> None:
    """Send a chat that repeats an element to Generate and Tokenize, with two concurrent callers."""
    bodies = [wire.message() + wire.filled(part, size) for size in s.sizes]

    async def one(index: int) -> None:
        for body in bodies:
            await s.call(GENERATE, wire.request(wire.chat_input(body)), gzip=True)
            await s.call(TOKENIZE, wire.field(2, body), gzip=True)

    await s.again(2, one)


async def chat_tools(s: Sender) -> None:
    """Send chats with many tools that have one-letter names."""
    await _chats(s, wire.field(2, wire.field(1, "f")))


async def chat_empty_tools(s: Sender) -> None:
    """Send chats with many empty tools."""
    await _chats(s, wire.field(2, b""))


async def chat_messages(s: Sender) -> None:
    """Send chats with many empty user messages."""
    await _chats(s, wire.field(1, wire.count(1, 2)))


async def chat_short_messages(s: Sender) -> None:
    """Send chats with many one-letter messages, each of which produces tokens."""
    await _chats(s, wire.message("a"))


async def chat_tool_calls(s: Sender) -> None:
    """Send an assistant message with a very large number of tool calls."""

    async def one(_: int) -> None:
        for size in s.sizes:
            calls = wire.filled(wire.field(4, wire.field(2, "f")), size)
            body = wire.field(1, wire.count(1, 3) + calls)
            await s.call(TOKENIZE, wire.field(2, body), gzip=True)

    await s.again(2, one)


def _arguments(value: str, size: int) -> bytes:
    """Return `template_arguments_json` of about the given size, with a list that repeats one
    value.
    """
    values = ",".join([value] * max(1, size // (len(value) + 1)))
    return wire.field(5, f'{{"a":[{values}]}}')


async def template_nulls(s: Sender) -> None:
    """Send template arguments with a long list of nulls."""
    await _chats_once(s, lambda size: _arguments("null", size))


async def template_deep(s: Sender) -> None:
    """Send nested lists as template arguments: one as deep as fits, and many at the allowed
    depth.
    """
    await _chats_once(s, lambda size: _arguments("[" * (size // 2) + "]" * (size // 2), size))
    await _chats_once(s, lambda size: _arguments("[" * DEEPEST + "]" * DEEPEST, size))


async def deep_tool_schema(s: Sender) -> None:
    """Send as many tools as fit, each with deeply nested objects as its parameters."""
    deep = '{"a":' * DEEPEST + "1" + "}" * DEEPEST
    tool = wire.field(2, wire.field(1, "f") + wire.field(3, deep))
    await _chats_once(s, lambda size: wire.filled(tool, size))


async def template_keys(s: Sender) -> None:
    """Send many template arguments with distinct names."""

    def arguments(size: int) -> bytes:
        names = ",".join(f'"k{number}":0' for number in range(size // 12))
        return wire.field(5, f"{{{names}}}")

    await _chats_once(s, arguments)


async def template_names_twice(s: Sender) -> None:
    """Send a JSON object that repeats one member name as often as fits."""
    await _chats_once(s, lambda size: wire.field(5, "{" + ",".join(['"k":0'] * (size // 6)) + "}"))


async def content_parts(s: Sender) -> None:
    """Send a message with as many empty content parts as fit."""

    def message(size: int) -> bytes:
        parts = wire.filled(wire.field(1, wire.field(1, "")), size)
        return wire.field(1, wire.count(1, 2) + wire.field(7, parts))

    await _chats_once(s, message)


async def required_capabilities(s: Sender) -> None:
    """Send as many required capabilities as fit, and one whose name is as long as fits."""
    short = wire.field(15, "x")

    async def one(_: int) -> None:
        for size in s.sizes:
            for body in (wire.filled(short, size), wire.field(15, "x" * size)):
                await s.call(GENERATE, wire.request(wire.text_input("hi")) + body, gzip=True)

    await s.again(2, one)


async def json_escapes(s: Sender) -> None:
    """Send template arguments with many quotes, escapes, commas and digits, and unterminated
    strings.

    A careless JSON parser takes quadratic time on such texts.
    """
    commas = b"[," * 9000
    texts = [
        b'{"a":"' + commas + b'\\"' * ((JSON_BYTES - 20_000) // 2),
        b'"' * JSON_BYTES,
        b"\\" * JSON_BYTES,
        b'{"a":"' + b"\\ud83d\\ude00" * (JSON_BYTES // 13) + b'"}',
        b'{"a":' + b"9" * (JSON_BYTES - 8) + b"}",
    ]
    for text in texts:
        await _chats_once(s, lambda _, text=text: wire.field(5, text))  # type: ignore[misc]


async def json_of_many_calls(s: Sender) -> None:
    """Send as many tool calls as fit, each with as many argument values as one JSON text may
    have.
    """
    arguments = b'{"a":[' + b"0," * 16_000 + b"0]}"
    call = wire.field(4, wire.field(2, "f") + wire.field(3, arguments))
    await _chats_once(s, lambda size: wire.field(1, wire.count(1, 3) + wire.filled(call, size)))


async def _chats_once(s: Sender, more: Callable[[int], bytes]) -> None:
    """Send a chat with extra fields, at both message sizes."""
    bodies = [wire.message() + more(size) for size in s.sizes]

    async def one(_: int) -> None:
        for body in bodies:
            await s.call(TOKENIZE, wire.field(2, body), gzip=True)
            await s.call(GENERATE, wire.request(wire.chat_input(body)), gzip=True)

    await s.again(2, one)


async def unknown_fields(s: Sender) -> None:
    """Send messages full of unknown field numbers to several methods."""
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

    async def one(index: int) -> None:
        for method in methods:
            for body in bodies:
                await s.call(method, body, gzip=True)
        await s.session([bodies[0]])

    await s.again(2, one)


async def unknown_fields_of_strangers(s: Sender) -> None:
    """Send unknown fields without a token, to health checks and to methods that refuse
    strangers.
    """
    body = wire.filled(wire.count(1000, 1), s.below)

    async def one(_: int) -> None:
        for method in (HEALTH + "Check", HEALTH + "List", GENERATE, CONTROL + "GetStatistics"):
            await s.call(method, body, gzip=True, token="")

    await s.again(2, one)


def _spec_with_ids(sampling_field: int, ids: bytes) -> bytes:
    return wire.request(wire.text_input("hi") + wire.sampling(wire.field(sampling_field, ids)))


async def banned_ids(s: Sender) -> None:
    """Send one banned token id a very large number of times."""
    await _generates(s, [_spec_with_ids(12, b"\x05" * size) for size in s.sizes])


async def allowed_ids(s: Sender) -> None:
    """Send as many allowed ids as the contract permits, each twice, and then far more ids."""
    few = min(262_144, s.below)
    ids = b"".join(wire.varint(number) for number in range(min(few // 3, s.card.vocabulary)))
    await _generates(
        s, [_spec_with_ids(11, ids * 2), *(_spec_with_ids(11, b"\x05" * n) for n in s.sizes)]
    )


async def token_ids(s: Sender) -> None:
    """Send a prompt of far more token ids than fit in the context."""
    await _generates(s, [wire.request(wire.token_input(b"\x05" * size)) for size in s.sizes])


async def stop_ids(s: Sender) -> None:
    """Send very many stop ids and end-of-sequence ids."""
    specs = [
        wire.request(
            wire.text_input("hi")
            + wire.field(6, wire.field(4, b"\x05" * (n // 2)) + wire.field(5, b"\x05" * (n // 2)))
        )
        for n in s.sizes
    ]
    await _generates(s, specs)


async def many_stop_strings(s: Sender) -> None:
    """Send very many one-letter stop strings."""
    specs = [
        wire.request(wire.text_input("hi") + wire.field(6, wire.filled(wire.field(3, "a"), n)))
        for n in s.sizes
    ]
    await _generates(s, specs)


async def long_names(s: Sender) -> None:
    """Send request ids of the largest possible size in several methods, and very many short ids."""
    name, names = b"a" * s.below, wire.filled(wire.field(1, "a"), s.below)

    async def one(_: int) -> None:
        await s.call(GENERATE, wire.request(wire.field(1, name) + wire.text_input("hi")))
        await s.call(GENERATION + "GetResult", wire.field(1, name))
        await s.call(GENERATION + "Cancel", wire.field(1, name))
        await s.call(GENERATION + "Cancel", names, gzip=True)
        await s.session([wire.count(1, 1) + wire.field(5, wire.field(1, name))])

    await s.again(2, one)


async def _generates(s: Sender, messages: list[bytes]) -> None:
    async def one(_: int) -> None:
        for raw in messages:
            await s.call(GENERATE, raw, gzip=True)
            await s.session([raw_add(raw)])

    await s.again(2, one)


def raw_add(request: bytes) -> bytes:
    """Return a session's `add` command with the spec of a request; both use field 1 for the
    spec.
    """
    return wire.field(3, request)


async def gzip_bombs(s: Sender) -> None:
    """Send 64 MiB of zeros, compressed to 64 KB, to several methods and as a stranger's health
    check.
    """
    bomb = bytes(64 << 20)

    async def one(_: int) -> None:
        for method in (GENERATE, TOKENIZE, GENERATION + "GenerateStream"):
            await s.call(method, bomb, gzip=True)
        await s.call(HEALTH + "Check", bomb, gzip=True, token="")

    await s.again(2, one)


async def malformed(s: Sender) -> None:
    """Send random bytes to randomly chosen methods."""
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


MESSAGES = Group(
    "messages",
    (
        Input(
            name="chat-tools",
            meaning="chats of as many tools as fit",
            send=chat_tools,
            answers=_either("chat.tools"),
            fields=("Tool.name",),
        ),
        Input(
            name="chat-empty-tools",
            meaning="chats of as many empty tools as fit",
            send=chat_empty_tools,
            answers=_either("chat.tools"),
        ),
        Input(
            name="chat-messages",
            meaning="chats of as many empty messages as fit",
            send=chat_messages,
            answers=_either("chat.messages"),
            fields=("ChatMessage.role",),
        ),
        Input(
            name="chat-short-messages",
            meaning="chats of as many messages of one letter as fit",
            send=chat_short_messages,
            answers=_either("chat.messages"),
            fields=("ChatMessage.content",),
        ),
        Input(
            name="chat-tool-calls",
            meaning="a message with as many calls of tools as fit",
            send=chat_tool_calls,
            answers=invalid("chat.messages.tool_calls"),
            fields=("ToolCall.name",),
        ),
        Input(
            name="template-nulls",
            meaning="as many nulls among the template's arguments as fit",
            send=template_nulls,
            answers=_either("chat.template_arguments_json"),
            fields=("ChatInput.template_arguments_json",),
        ),
        Input(
            name="template-keys",
            meaning="as many names of template arguments as fit",
            send=template_keys,
            answers=_either("chat.template_arguments_json"),
            fields=("ChatInput.template_arguments_json",),
        ),
        Input(
            name="template-deep",
            meaning="lists in lists among the template's arguments, some as deep as they are long",
            send=template_deep,
            answers=_either("chat.template_arguments_json"),
            fields=("ChatInput.template_arguments_json",),
        ),
        Input(
            name="deep-tool-schema",
            meaning="tools whose parameters are 60 objects deep",
            send=deep_tool_schema,
            answers=_either("chat.tools[].parameters_json"),
            fields=("Tool.parameters_json",),
        ),
        Input(
            name="template-names-twice",
            meaning="template arguments that name one member as often as fits",
            send=template_names_twice,
            answers=_either("chat.template_arguments_json"),
            fields=("ChatInput.template_arguments_json",),
        ),
        Input(
            name="content-parts",
            meaning="a message of as many empty parts as fit",
            send=content_parts,
            answers=_either("chat.messages.content_parts.parts"),
            fields=("ContentPart.text",),
        ),
        Input(
            name="required-capabilities",
            meaning="as many required capabilities as fit, and one of the largest size",
            send=required_capabilities,
            answers=invalid("required_capabilities"),
            fields=("GenerateRequest.required_capabilities",),
        ),
        Input(
            name="json-escapes",
            meaning="JSON of quotes and escapes, and strings without an end",
            send=json_escapes,
            answers=_either("chat.template_arguments_json"),
            fields=("ChatInput.template_arguments_json",),
        ),
        Input(
            name="json-of-many-calls",
            meaning="as many calls with 16,000 values each as fit",
            send=json_of_many_calls,
            answers=_either("chat.messages[].tool_calls[].arguments_json"),
            fields=("ToolCall.arguments_json",),
        ),
        Input(
            name="unknown-fields",
            meaning="as many unknown fields as fit, in eight methods",
            send=unknown_fields,
        ),
        Input(
            name="stranger-unknown-fields",
            meaning="the same in four methods, without a token",
            send=unknown_fields_of_strangers,
            stranger=True,
        ),
        Input(
            name="banned-ids",
            meaning="as many banned ids as fit",
            send=banned_ids,
            answers=invalid("spec.sampling.banned_token_ids"),
            fields=("SamplingOptions.banned_token_ids",),
        ),
        Input(
            name="allowed-ids",
            meaning="as many allowed ids as fit",
            send=allowed_ids,
            answers=invalid("spec.sampling.allowed_token_ids"),
            fields=("SamplingOptions.allowed_token_ids",),
        ),
        Input(
            name="token-ids",
            meaning="a prompt of as many ids as fit",
            send=token_ids,
            answers=invalid("spec.tokens.ids"),
            fields=("TokenInput.ids",),
        ),
        Input(
            name="stop-ids",
            meaning="as many stop and end ids as fit",
            send=stop_ids,
            answers=invalid("spec.stop.eos_token_ids", "spec.stop.stop_token_ids"),
            fields=("StopOptions.stop_token_ids", "StopOptions.eos_token_ids"),
        ),
        Input(
            name="many-stop-strings",
            meaning="as many stop strings as fit",
            send=many_stop_strings,
            answers=invalid("spec.stop.stop_strings"),
            fields=("StopOptions.stop_strings",),
        ),
        Input(
            name="long-names",
            meaning="request ids of the largest size, and as many cancels as fit",
            send=long_names,
            answers=invalid("spec.request_id", "request_id", "request_ids"),
            fields=(
                "GenerationSpec.request_id",
                "GetResultRequest.request_id",
                "CancelRequest.request_ids",
                "CancelCommand.request_id",
            ),
        ),
        Input(name="gzip-bombs", meaning="64 MiB of zeros, compressed", send=gzip_bombs),
        Input(name="malformed", meaning="random bytes for ten methods", send=malformed),
    ),
)
