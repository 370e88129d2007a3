"""Protobuf by hand: messages of millions of parts are made by repeating one part's bytes."""

from __future__ import annotations


def varint(number: int) -> bytes:
    """A number as protobuf writes it."""
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def field(number: int, content: bytes | str) -> bytes:
    """A field of bytes: a string, a message or packed numbers."""
    content = content.encode() if isinstance(content, str) else content
    return varint(number << 3 | 2) + varint(len(content)) + content


def count(number: int, value: int) -> bytes:
    """A field of a number."""
    return varint(number << 3) + varint(value)


def filled(part: bytes, size: int) -> bytes:
    """The part as often as fits a size, at least once."""
    return part * max(1, size // len(part))


# GenerationSpec, and what is in it, by the fields' numbers in protos/headrace/v1/generation.proto.


def text_input(text: bytes | str) -> bytes:
    """A spec's `text`."""
    return field(2, field(1, text))


def token_input(ids: bytes) -> bytes:
    """A spec's `tokens`, from packed ids."""
    return field(3, field(1, ids))


def chat_input(content: bytes) -> bytes:
    """A spec's `chat`."""
    return field(4, content)


def message(content: bytes | str = "hi", role: int = 2) -> bytes:
    """A message of a chat."""
    return field(1, count(1, role) + field(2, content))


def sampling(content: bytes) -> bytes:
    """A spec's `sampling`."""
    return field(5, content)


def max_tokens(number: int, *, ignore_eos: bool = False) -> bytes:
    """A spec's `stop`."""
    return field(6, count(1, number) + (count(6, 1) if ignore_eos else b""))


def output(content: bytes) -> bytes:
    """A spec's `output`."""
    return field(7, content)


def structured(number: int, content: str) -> bytes:
    """A spec's `structured_output`: a form given as text."""
    return field(8, field(number, content))


def priority(number: int) -> bytes:
    """A spec's `scheduling`."""
    return field(9, count(1, number))


def choices(number: int) -> bytes:
    """A spec's `n`."""
    return count(13, number)


def request(spec: bytes) -> bytes:
    """The request of Generate, GenerateStream and AddRequest."""
    return field(1, spec)


def add(spec: bytes, command_id: int = 0) -> bytes:
    """A session's command `add`."""
    return (count(1, command_id) if command_id else b"") + field(3, field(1, spec))
