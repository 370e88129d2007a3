"""Hand-written protobuf encoding.

Messages with millions of elements are built by repeating the bytes of one element.
"""

from __future__ import annotations


def varint(number: int) -> bytes:
    """Encode a number as a varint."""
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def field(number: int, content: bytes | str) -> bytes:
    """Encode a length-delimited field: a string, a message or packed numbers."""
    content = content.encode() if isinstance(content, str) else content
    return varint(number << 3 | 2) + varint(len(content)) + content


def count(number: int, value: int) -> bytes:
    """Encode a varint field."""
    return varint(number << 3) + varint(value)


def filled(part: bytes, size: int) -> bytes:
    """Repeat the element as often as fits in the size, at least once."""
    return part * max(1, size // len(part))


# GenerationSpec, and what is in it, by the fields' numbers in protos/headrace/v1/generation.proto.


def text_input(text: bytes | str) -> bytes:
    """Encode a spec's `text`."""
    return field(2, field(1, text))


def token_input(ids: bytes) -> bytes:
    """Encode a spec's `tokens` from packed ids."""
    return field(3, field(1, ids))


def chat_input(content: bytes) -> bytes:
    """Encode a spec's `chat`."""
    return field(4, content)


def message(content: bytes | str = "hi", role: int = 2) -> bytes:
    """Encode one chat message."""
    return field(1, count(1, role) + field(2, content))


def sampling(content: bytes) -> bytes:
    """Encode a spec's `sampling`."""
    return field(5, content)


def max_tokens(number: int, *, ignore_eos: bool = False) -> bytes:
    """Encode a spec's `stop`."""
    return field(6, count(1, number) + (count(6, 1) if ignore_eos else b""))


def output(content: bytes) -> bytes:
    """Encode a spec's `output`."""
    return field(7, content)


def structured(number: int, content: str) -> bytes:
    """Encode a spec's `structured_output` from a format given as text."""
    return field(8, field(number, content))


def priority(number: int) -> bytes:
    """Encode a spec's `scheduling`."""
    return field(9, count(1, number))


def choices(number: int) -> bytes:
    """Encode a spec's `n`."""
    return count(13, number)


def request(spec: bytes) -> bytes:
    """Encode the request of Generate, GenerateStream and AddRequest."""
    return field(1, spec)


def add(spec: bytes, command_id: int = 0) -> bytes:
    """Encode a session's `add` command."""
    return (count(1, command_id) if command_id else b"") + field(3, field(1, spec))
