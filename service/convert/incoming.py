"""The first checks of each message: how many nested messages it has, which capabilities it
requires, and whether it has fields that this server does not know (from a newer client).

A newer client lists by name what it needs from the server (`required_capabilities`). The server
refuses the message if it lacks one of them, and names it. So unknown fields that need no capability
can be ignored. Messages with such fields are counted for the metrics.

A message is cheap to send but expensive to traverse: a megabyte can have half a million nested
messages. So their number is limited, and each list is counted before it is traversed. Later code
never has to handle more. Unknown fields are found by comparing sizes, without a traversal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from service.convert.lacking import INSTEAD
from service.errors.call_errors import CapabilityMissingError, FieldError

MAX_PARTS = 16_384
"""The most messages within a message, at any depth: a chat's messages and their parts, tools and
tool calls. Traversing that many takes about 12 ms.
"""
MAX_REQUIRED = 64
"""The most capabilities that one message may require."""
_MAX_NAME = 64
_REQUIRED = "required_capabilities"


_SCALAR, _MESSAGE, _MESSAGES, _SCALAR_MAP, _MESSAGE_MAP = range(5)
"""The kinds of fields. They are integers because they are compared for each nested message, and
comparing enums is slower.
"""
_Path = tuple[Any, FieldDescriptor] | None
"""The path of a field: the path of the message that contains it, and the field itself. None for the
outermost message.
"""


class IncomingCheck:
    """Checks each message of a client before any other code reads it.

    Attributes:
        capabilities: the names that a message may require; empty before the model is loaded.
        lacking: why other capabilities are missing, if that depends on the model
            (`convert.lacking`).
        unknown: the number of messages that had fields unknown to this server.
    """

    def __init__(self) -> None:
        self.capabilities: frozenset[str] = frozenset()
        self.lacking: Mapping[str, str] = {}
        self.unknown = 0

    def check(self, message: Message) -> None:
        """Check the number of nested messages and the required capabilities, and count unknown
        fields.

        Raises:
            FieldError: there are too many nested messages, or too many capabilities.
            CapabilityMissingError: this server lacks a required capability.
        """
        _check_parts(message)
        required: Sequence[str] = getattr(message, _REQUIRED, ())
        if len(required) > MAX_REQUIRED:
            raise FieldError(
                _REQUIRED, f"has {len(required)} names; at most {MAX_REQUIRED} are allowed"
            )
        for name in required:
            if name not in self.capabilities:
                why = "; ".join(filter(None, (self.lacking.get(name), INSTEAD.get(name))))
                raise CapabilityMissingError(name[:_MAX_NAME], self.capabilities, why)
        known = type(message)()
        known.CopyFrom(message)
        known.DiscardUnknownFields()
        if message.ByteSize() != known.ByteSize():
            self.unknown += 1


def _check_parts(message: Message) -> None:
    """Traverse the nested messages as fast as Python allows. The kind of each field is looked up
    once, and paths are only built for a refusal.
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
                    "(messages, their parts, tools and tool calls together): send fewer",
                )
            if field != _SCALAR_MAP:
                if field == _MESSAGE_MAP:  # its values() are a generator of Python's
                    value = [value[key] for key in value]
                for entry in value:
                    add((entry, here))


def _kind_of(descriptor: FieldDescriptor, value: object) -> int:
    """Return the kind of a field, determined from one of its values."""
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
