"""Small values: durations, enums, Struct."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

from google.protobuf import duration_pb2, struct_pb2

from engine.errors import InvalidRequestError
from engine.types import TokenId

_MAX_SECONDS = 315_576_000_000
_NANO = 1_000_000_000


def seconds(duration: duration_pb2.Duration, field: str) -> float:
    """A duration in seconds.

    Raises:
        InvalidRequestError: it is negative, or not a valid duration.
    """
    if duration.seconds < 0 or duration.nanos < 0:
        raise InvalidRequestError(field, "is negative; it must be a length of time")
    if duration.nanos >= _NANO or duration.seconds > _MAX_SECONDS:
        raise InvalidRequestError(field, "is not a valid google.protobuf.Duration")
    return duration.seconds + duration.nanos / _NANO


def to_duration(value: float) -> duration_pb2.Duration:
    """Seconds as a duration; never negative."""
    nanos = max(0, round(value * _NANO))
    return duration_pb2.Duration(seconds=nanos // _NANO, nanos=nanos % _NANO)


def check_enum(enum: Any, value: int, field: str) -> None:
    """Refuse a number that the enum (a generated one) does not have: a newer client's."""
    if value not in enum.values():
        raise InvalidRequestError(field, f"has the unknown value {value}")


def check_ids(
    ids: Sequence[int], field: str, vocab_size: int, *, most: int | None = None, skipped: int = 0
) -> list[TokenId]:
    """The token ids, which must all be in the vocabulary.

    Args:
        ids: of a message: not negative.
        field: what to call them.
        vocab_size: of the model.
        most: how many there may be, which is looked at first; None: no more than the vocabulary
            has, for lists in which an id says nothing twice.
        skipped: how many were left out before the first of them.

    Raises:
        InvalidRequestError: there are too many, or one is not in the vocabulary: with the first
            that is not.
    """
    most = vocab_size if most is None else most
    if len(ids) > most:
        raise InvalidRequestError(field, f"has {len(ids)} token ids; at most {most} are allowed")
    if ids and max(ids) >= vocab_size:
        index = next(i for i, token_id in enumerate(ids) if token_id >= vocab_size)
        raise InvalidRequestError(
            f"{field}[{index + skipped}]",
            f"is {ids[index]}; token ids are below {vocab_size} (ModelCard.vocab_size)",
        )
    return cast(list[TokenId], list(ids))


def from_struct(struct: struct_pb2.Struct, field: str) -> dict[str, object]:
    """A Struct as plain values; whole numbers become integers again."""
    return {
        name: _from_value(value, f"{field}.{name[:40]}") for name, value in struct.fields.items()
    }


def _from_value(value: struct_pb2.Value, field: str) -> object:
    match value.WhichOneof("kind"):
        case "bool_value":
            return value.bool_value
        case "string_value":
            return value.string_value
        case "number_value":
            number = value.number_value
            if not math.isfinite(number):
                raise InvalidRequestError(field, "is not a finite number")
            whole = abs(number) < 2**53 and number == int(number)
            return int(number) if whole else number
        case "struct_value":
            return from_struct(value.struct_value, field)
        case "list_value":
            return [_from_value(entry, field) for entry in value.list_value.values]
        case _:
            return None
