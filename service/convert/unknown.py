"""What is looked at before anything of a message is: how many parts it has, and whether it has
fields that this server was not built with (a newer client's). Such fields are refused by their
number, never dropped.

A message is cheap to send and dear to walk: a megabyte can have half a million parts. So their
number is bounded, and each list is measured before it is entered; whoever converts the message
later never meets more. Unknown fields are looked for by size first, which costs no walk, and named
only where they are few enough to be listed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from service.errors import FieldError

MAX_PARTS = 16_384
"""The most messages within a message, at any depth: a chat's messages, tools and tool calls, and
each value of their JSON. To walk them all takes about 20 ms.
"""
_MAX_NAMED_BYTES = 4096
"""With more unknown fields than this, in bytes, none of them is named."""


def refuse_unknown(message: Message) -> None:
    """Check the number of parts, and look for unknown fields at any depth.

    Raises:
        FieldError: there are too many parts, or there is an unknown field; its path is named.
    """
    _check_parts(message)
    known = type(message)()
    known.CopyFrom(message)
    known.DiscardUnknownFields()
    unknown_bytes = message.ByteSize() - known.ByteSize()
    if not unknown_bytes:
        return
    if unknown_bytes > _MAX_NAMED_BYTES:
        name = message.DESCRIPTOR.name
        raise FieldError(
            name,
            f"has {unknown_bytes} bytes of fields that this server does not know; leave them out, "
            "or use a newer server",
        )
    for path, number in _unknown(message, ""):
        raise FieldError(
            f"{path}{number}",
            f"this server does not know field number {number} of "
            f"{path.rstrip('.') or message.DESCRIPTOR.name}; leave it out, or use a newer server",
        )


def _check_parts(message: Message) -> None:
    left = MAX_PARTS
    waiting: list[tuple[Message, str]] = [(message, "")]
    while waiting:
        part, path = waiting.pop()
        for descriptor, value in part.ListFields():
            kind = descriptor.message_type
            if kind is None:
                continue
            name = path + descriptor.name
            if isinstance(value, Message):
                left -= 1
                waiting.append((value, f"{name}."))
                continue
            left -= len(value)
            if left < 0:
                raise FieldError(
                    name,
                    f"has {len(value)} entries; a message may have at most {MAX_PARTS} parts "
                    "(messages, tools, tool calls and values of JSON together): send fewer",
                )
            entries = value
            if kind.GetOptions().map_entry:
                if kind.fields_by_name["value"].message_type is None:
                    continue
                entries = value.values()
            below = f"{name}."
            waiting += [(entry, below) for entry in entries]


def _unknown(message: Message, path: str) -> Iterator[tuple[str, int]]:
    unknown_fields: Any = UnknownFieldSet(message)  # iterable, which its stubs do not say
    for unknown in unknown_fields:
        yield path, unknown.field_number
    for descriptor, value in message.ListFields():
        kind = descriptor.message_type
        if kind is None:
            continue
        name = path + descriptor.name
        if kind.GetOptions().map_entry:
            if kind.fields_by_name["value"].message_type is not None:
                for key, entry in value.items():
                    yield from _unknown(entry, f"{name}[{str(key)[:40]}].")
        elif isinstance(value, Message):
            yield from _unknown(value, f"{name}.")
        else:
            for index, entry in enumerate(value):
                yield from _unknown(entry, f"{name}[{index}].")
