"""Structured mutations: messages are changed by field, texts by their significant characters.

All random choices come from the given source.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

Mutate = Callable[[bytes, random.Random, int], bytes]
"""Mutates an input. Takes the input, a random source and the maximum size of the result in bytes.
"""

INTEGERS = (0, 1, 2, 3, 5, 16, 17, 100, 257, 258, 1000, 2047, 2048, 1 << 16, 2**31 - 1, 2**32 - 1)
WIDE = (2**53, 2**63 - 1, 2**64 - 1)
FLOATS = (0.0, -0.0, 1.0, 0.5, 2.0, -1.0, 1e-45, 1e-9, 1e9, 3.4e38, float("inf"), float("nan"))
TEXTS = (
    "", "a", "user", "assistant", "system", "tool", "{}", "[]", '{"type": "object"}', "null", "\0",
    "é", "🙂", "\N{REPLACEMENT CHARACTER}", "\u202e", "a" * 300, " ", "\n", "{{ 7*7 }}",
    "{% raw %}", "<eos>", "<bos>", "%s%n", "../../etc/passwd", '{"a": 1e999}', '{"a": NaN}',
    '{"a":' * 40 + "1" + "}" * 40, '{"$ref": "#"}', '{"pattern": "(a+)+$"}',
)  # fmt: skip
_MOST_ADDED = 40


def mutate_message(kind: type[Message]) -> Mutate:
    """Change some fields of a message. Bytes that are not a message are replaced with one."""

    def mutate(data: bytes, source: random.Random, most: int) -> bytes:
        message = kind()
        try:
            message.ParseFromString(data)
        except DecodeError:
            message = kind()
        for _ in range(source.choice((1, 1, 2, 4))):
            _change(message, source, 0)
        found = message.SerializeToString()
        if source.random() < 0.03 and found:  # what no library would write
            at = source.randrange(len(found))
            found = found[:at] + source.randbytes(source.randint(0, 4)) + found[at + 1 :]
        return found if len(found) <= most else data[:most]

    return mutate


def _change(message: Any, source: random.Random, depth: int) -> None:
    fields = message.DESCRIPTOR.fields
    if not fields:
        return
    descriptor = source.choice(fields)
    name = descriptor.name
    if source.random() < 0.1:
        message.ClearField(name)
        return
    is_message = descriptor.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE
    if descriptor.is_repeated:
        _change_list(getattr(message, name), descriptor, source, depth)
    elif is_message:
        part = getattr(message, name)
        part.SetInParent()
        if depth < 6:
            _change(part, source, depth + 1)
    else:
        setattr(message, name, _value(descriptor, source))


def _change_list(values: Any, descriptor: Any, source: random.Random, depth: int) -> None:
    """Add, change or remove an element of a list or of a map of scalars."""
    entry = descriptor.message_type
    if entry is not None and entry.GetOptions().map_entry:
        key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
        values[_value(key, source)] = _value(value, source)
        return
    if values and source.random() < 0.2:
        del values[source.randrange(len(values))]
        return
    count = source.choice((1, 1, 1, 2, 5, _MOST_ADDED))
    if descriptor.cpp_type != FieldDescriptor.CPPTYPE_MESSAGE:
        values.extend(_value(descriptor, source) for _ in range(count))
        return
    if values and depth < 6 and source.random() < 0.5:
        _change(source.choice(values), source, depth + 1)
        return
    for _ in range(min(count, 5)):
        part = values.add()
        if depth < 6:
            _change(part, source, depth + 1)
            _change(part, source, depth + 1)


def _value(descriptor: Any, source: random.Random) -> Any:
    kinds = FieldDescriptor
    match descriptor.cpp_type:
        case kinds.CPPTYPE_INT32:
            return source.choice((*(n for n in INTEGERS if n < 2**31), -1, -(2**31)))
        case kinds.CPPTYPE_INT64:
            return source.choice((*INTEGERS, *(n for n in WIDE if n < 2**63), -1, -(2**63)))
        case kinds.CPPTYPE_UINT32:
            return source.choice(INTEGERS)
        case kinds.CPPTYPE_UINT64:
            return source.choice((*INTEGERS, *WIDE))
        case kinds.CPPTYPE_BOOL:
            return source.random() < 0.5
        case kinds.CPPTYPE_ENUM:
            numbers = [value.number for value in descriptor.enum_type.values]
            return source.choice((*numbers, max(numbers) + 7))
        case kinds.CPPTYPE_FLOAT | kinds.CPPTYPE_DOUBLE:
            return source.choice((*FLOATS, source.uniform(-2, 2)))
    text = source.choice(TEXTS) + source.choice(("", "", source.choice(TEXTS)))
    return text.encode() if descriptor.type == kinds.TYPE_BYTES else text


def mutate_text(snippets: Sequence[str], head: int = 0) -> Mutate:
    """Change a UTF-8 text that follows `head` control bytes."""

    def mutate(data: bytes, source: random.Random, most: int) -> bytes:
        first = bytearray(data[:head].ljust(head, b"\0"))
        if head and source.random() < 0.2:
            first[source.randrange(head)] = source.randrange(256)
        text = data[head:].decode(errors="replace")
        for _ in range(source.choice((1, 1, 2, 4))):
            text = _edit(text, source, snippets)
        return bytes(first) + text.encode(errors="replace")[: most - head]

    return mutate


def _edit(text: str, source: random.Random, snippets: Sequence[str]) -> str:
    at = source.randint(0, len(text))
    to = min(len(text), at + source.choice((1, 2, 8, 30)))
    match source.randrange(6):
        case 0:
            return text[:at] + text[to:]
        case 1:
            return text[:at] + text[at:to] * source.choice((2, 3, 20)) + text[to:]
        case 2:
            return text[:at] + chr(source.choice((0, 9, 34, 92, 123, 233, 0x1F642))) + text[to:]
    return text[:at] + source.choice(snippets) + text[source.choice((at, at, to)) :]


def mutate_bytes(data: bytes, source: random.Random, most: int) -> bytes:
    found = bytearray(data)
    for _ in range(source.choice((1, 1, 2, 4, 8))):
        at = source.randint(0, len(found))
        match source.randrange(4):
            case 0 if at < len(found):
                found[at] ^= 1 << source.randrange(8)
            case 1:
                found[at:at] = source.randbytes(source.randint(1, 8))
            case 2:
                del found[at : at + source.choice((1, 2, 16))]
            case _:
                found[at : at + 4] = source.choice((b"\xff" * 4, b"\0" * 4, b"\x7f\xff\xff\xff"))
    return bytes(found[:most])
