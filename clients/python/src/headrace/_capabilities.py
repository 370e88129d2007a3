"""Finds which capabilities a request needs, from the annotations of the contract's fields.

The contract annotates fields, enum values and oneof members that not every server supports. The
names of those that a message sets are listed in its `required_capabilities`. A server that lacks
one of them refuses the message, even if it does not know the field.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, Protocol, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from headrace.v1 import capability_pb2


class _Request(Protocol):
    @property
    def required_capabilities(self) -> Any: ...


_R = TypeVar("_R", bound=_Request)


def with_capabilities(request: _R) -> _R:
    """Fills in the capabilities that a request needs. Returns the request."""
    found = set(_needed(request))  # type: ignore[arg-type]
    found.update(request.required_capabilities)  # what the caller asked for stays
    if found:
        request.required_capabilities[:] = sorted(found)
    return request


def _needed(message: Message) -> Iterator[str]:
    marks = _marks(message.DESCRIPTOR)
    if not marks:
        return
    for field, value in message.ListFields():
        mark = marks.get(field.number)
        if mark is None:
            continue
        name, values, inner = mark
        if name:
            yield name
        if values:
            for number in value if field.is_repeated else (value,):
                if number in values:
                    yield values[number]
        if inner:
            for one in value if field.is_repeated else (value,):
                yield from _needed(one)


_Mark = tuple[str, dict[int, str], bool]
"""The marks of a field: its capability, those of its enum values, and whether its messages have
marks.
"""


@cache
def _marks(kind: Descriptor) -> dict[int, _Mark]:
    """Returns the marked fields of a message type, by number. No other fields need checking."""
    marks = {}
    for field in kind.fields:
        mark = field.GetOptions().Extensions[capability_pb2.capability], _values(field), _has(field)
        if any(mark):
            marks[field.number] = mark
    return marks


def _values(field: FieldDescriptor) -> dict[int, str]:
    if field.enum_type is None:
        return {}
    named = {
        value.number: value.GetOptions().Extensions[capability_pb2.value_capability]
        for value in field.enum_type.values
    }
    return {number: name for number, name in named.items() if name}


def _has(field: FieldDescriptor) -> bool:
    kind = field.message_type
    if kind is None or not kind.full_name.startswith("headrace.") or kind.GetOptions().map_entry:
        return False
    return bool(_marks(kind))  # no message of the contract contains itself
