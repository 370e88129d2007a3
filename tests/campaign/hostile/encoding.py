"""Messages as bytes, also those of millions of elements, which are built by repeating the bytes of
one: protobuf reads concatenated messages as one message with all their elements.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message
from headrace.v1 import generation_service_pb2 as rpc

from tests.service.helpers import spec as spec_of

ONCE = "Once upon a time"


def spec(text: str = ONCE, **fields: Any) -> bytes:
    """Encode a spec; fields as of the message, `tokens` or `chat` in the place of the text."""
    return spec_of(text, **fields).SerializeToString()


def request(text: str = ONCE, **fields: Any) -> bytes:
    """Encode the request of Generate, GenerateStream and AddRequest, as of `spec`."""
    return rpc.GenerateRequest(spec=spec_of(text, **fields)).SerializeToString()


def add(text: str = ONCE, **fields: Any) -> bytes:
    """Encode a session's `add` command, as of `spec`."""
    return rpc.StreamResultRequest(add={"spec": spec_of(text, **fields)}).SerializeToString()


def inside(kind: type[Message], path: str, content: bytes | str) -> bytes:
    """Encode a message that has one field alone, given by its path, such as "spec.chat.tools".

    content: a string, a message, or packed numbers.
    """
    numbers, descriptor = [], kind.DESCRIPTOR
    for name in path.split("."):
        one = descriptor.fields_by_name[name]
        numbers.append(one.number)
        descriptor = one.message_type
    found = content.encode() if isinstance(content, str) else content
    for number in reversed(numbers):
        found = varint(number << 3 | 2) + varint(len(found)) + found
    return found


def varint(number: int) -> bytes:
    """Encode a number, such as one of a packed list."""
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def packed(numbers: range) -> bytes:
    return b"".join(map(varint, numbers))


UNKNOWN = varint(1000 << 3) + varint(1)
"""A field that no message of the contract has."""


def filled(part: bytes, size: int) -> bytes:
    """Repeat the element as often as fits in the size, at least once."""
    return part * max(1, size // len(part))
