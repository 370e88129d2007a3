"""Which capabilities a request needs: read from the marks of the contract's fields.

The contract marks fields, enum values and members of oneofs that not every server has. Those that a
message sets are listed by name in its `required_capabilities`, so that a server that lacks one
refuses the message, even if it does not know the field.
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
    """Fill in the capabilities that a request of the contract needs; returns the request."""
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
"""For each field: its capability, those of its enum's values, and whether its messages have
marks.
"""


@cache
def _marks(kind: Descriptor) -> dict[int, _Mark]:
    """The marked fields of a type, by number: those alone need a look."""
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
