"""Fields that this server was not built with (a newer client's) are refused by their number, never
dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from service.errors import FieldError


def refuse_unknown(message: Message) -> None:
    """Look for unknown fields, at any depth.

    Raises:
        FieldError: there is one; its path and number are named.
    """
    for path, number in _unknown(message, ""):
        raise FieldError(
            f"{path}{number}",
            f"this server does not know field number {number} of "
            f"{path.rstrip('.') or message.DESCRIPTOR.name}; leave it out, or use a newer server",
        )


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
