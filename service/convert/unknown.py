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

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from service.call_errors import FieldError

MAX_PARTS = 16_384
"""The most messages within a message, at any depth: a chat's messages, tools and tool calls, and
each value of their JSON. To walk them all takes about 12 ms.
"""
_MAX_NAMED_BYTES = 4096
"""With more unknown fields than this, in bytes, none of them is named."""


_SCALAR, _MESSAGE, _MESSAGES, _SCALAR_MAP, _MESSAGE_MAP = range(5)
"""What a field has. Numbers, since they are compared for each part: enums take longer."""
_Path = tuple[Any, FieldDescriptor] | None
"""Of a field: the path of the message that has it, and the field itself. None: of the outermost."""


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
    """Walk the parts, as few steps for each as Python allows: what a field is, is looked up once,
    and paths are only put together for a refusal.
    """
    left = MAX_PARTS
    fields: dict[FieldDescriptor, int] = {}
    waiting: list[tuple[Message, _Path]] = [(message, None)]
    add = waiting.append
    while waiting:
        part, path = waiting.pop()
        for descriptor, value in part.ListFields():
            field = fields.get(descriptor)
            if field is None:
                field = fields[descriptor] = _kind_of(descriptor, value)
            if field == _SCALAR:
                continue
            here = (path, descriptor)
            if field == _MESSAGE:
                left -= 1
                add((value, here))
                continue
            left -= len(value)
            if left < 0:
                raise FieldError(
                    _written(here),
                    f"has {len(value)} entries; a message may have at most {MAX_PARTS} parts "
                    "(messages, tools, tool calls and values of JSON together): send fewer",
                )
            if field != _SCALAR_MAP:
                if field == _MESSAGE_MAP:  # its values() are a generator of Python's
                    value = [value[key] for key in value]
                for entry in value:
                    add((entry, here))


def _kind_of(descriptor: FieldDescriptor, value: object) -> int:
    """What a field is, by one value of it."""
    kind = descriptor.message_type
    if kind is None:
        return _SCALAR
    if isinstance(value, Message):
        return _MESSAGE
    if not kind.GetOptions().map_entry:
        return _MESSAGES
    has_messages = kind.fields_by_name["value"].message_type is not None
    return _MESSAGE_MAP if has_messages else _SCALAR_MAP


def _written(path: _Path) -> str:
    names = []
    while path is not None:
        path, descriptor = path
        names.append(descriptor.name)
    return ".".join(reversed(names))


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
