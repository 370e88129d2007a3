"""Small values: durations, labels, enums, token ids."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf import duration_pb2
from google.protobuf.message import Message
from headrace.v1 import generation_pb2

from engine.contract.token_ids import TokenIds
from service.door.network_config import DAY_S
from service.errors.call_errors import FieldError

MIN_INTERVAL_S = 0.1
MAX_INTERVAL_S = 3600.0
DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000
MAX_LABELS = 16
MAX_LABEL_BYTES = 128
_LABEL_NAME = re.compile(r"[A-Za-z0-9._/-]{1,64}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_MAX_SECONDS = 315_576_000_000
_NANO = 1_000_000_000


def seconds(duration: duration_pb2.Duration, field: str) -> float:
    """Return a duration in seconds.

    Raises:
        FieldError: it is negative, or not a valid duration.
    """
    if duration.seconds < 0 or duration.nanos < 0:
        raise FieldError(field, "is negative; it must be a length of time")
    if duration.nanos >= _NANO or duration.seconds > _MAX_SECONDS:
        raise FieldError(field, "is not a valid google.protobuf.Duration")
    return duration.seconds + duration.nanos / _NANO


def interval_seconds(duration: duration_pb2.Duration, field: str) -> float:
    """Return the interval of reports, in seconds.

    Raises:
        FieldError: it is out of bounds, or not a valid duration.
    """
    interval_s = seconds(duration, field)
    if not MIN_INTERVAL_S <= interval_s <= MAX_INTERVAL_S:
        raise FieldError(
            field,
            f"is {interval_s:g} s; it must be between {MIN_INTERVAL_S:g} s and "
            f"{MAX_INTERVAL_S:g} s",
        )
    return interval_s


def bounded_seconds(message: Message, field: str) -> float | None:
    """Return the duration in a message's field in seconds, or None if there is none.

    Raises:
        FieldError: it is longer than a day, or invalid.
    """
    if not message.HasField(field):
        return None
    found = seconds(getattr(message, field), field)
    if found > DAY_S:
        raise FieldError(field, f"is {found:g} s; at most {DAY_S:g} s are allowed")
    return found


def page_size_of(asked: int) -> int:
    """Return how many entries a page has if this many are asked for; 0: it was not said."""
    return min(asked or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)


def to_duration(value: float) -> duration_pb2.Duration:
    """Return seconds as a duration, never negative."""
    nanos = max(0, round(value * _NANO))
    return duration_pb2.Duration(seconds=nanos // _NANO, nanos=nanos % _NANO)


def check_labels(labels: Sequence[generation_pb2.Label], field: str) -> dict[str, str]:
    """Return a request's labels, by name.

    Raises:
        FieldError: there are too many, or a name or a value is invalid.
    """
    if len(labels) > MAX_LABELS:  # before they are looked at
        raise FieldError(field, f"has {len(labels)} labels; at most {MAX_LABELS} are allowed")
    found = {label.name: label.value for label in sorted(labels, key=lambda label: label.name)}
    if len(found) < len(labels):
        raise FieldError(field, "has two labels of one name; which one is meant?")
    for name, value in found.items():
        if _LABEL_NAME.fullmatch(name) is None:
            raise FieldError(
                field,
                f"has the name {name[:64]!a}; a name must be 1 to 64 characters out of "
                "[A-Za-z0-9._/-]",
            )
        if len(value.encode()) > MAX_LABEL_BYTES:
            raise FieldError(f"{field}[{name}]", f"is longer than {MAX_LABEL_BYTES} bytes")
        if _CONTROL.search(value) is not None:
            raise FieldError(f"{field}[{name}]", "has a control character; leave it out")
    return found


def check_enum(enum: Any, value: int, field: str) -> None:
    """Refuse a value that a generated enum does not have (from a newer client)."""
    if value not in enum.values():
        raise FieldError(field, f"has the unknown value {value}")


def check_ids(
    ids: Sequence[int],
    field: str,
    vocab_size: int,
    *,
    most: int | None = None,
    kept: slice | None = None,
) -> TokenIds:
    """Check that token ids are in the vocabulary, and return them. There may be as many ids as the
    context or the vocabulary has tokens, and this runs on the event loop, so no id becomes a Python
    object.

    Args:
        ids: the ids from a message, so not negative.
        field: the field of the ids, for errors.
        vocab_size: the model's vocabulary size.
        most: the maximum number of ids, checked first. None allows as many as the vocabulary has,
            for lists in which a repeated id has no effect.
        kept: which ids are checked and returned, from its start to its stop, or None for all.

    Raises:
        FieldError: there are too many ids, or one is not in the vocabulary. The message names the
            first such id.
    """
    most = vocab_size if most is None else most
    if len(ids) > most:
        raise FieldError(field, f"has {len(ids)} token ids; at most {most} are allowed")
    taken: npt.NDArray[np.uint32] = np.array(ids, dtype=np.uint32)
    first = 0
    if kept is not None:
        first, taken = kept.start, taken[kept]
    beyond = np.flatnonzero(taken >= vocab_size)
    if len(beyond):
        index = int(beyond[0])
        raise FieldError(
            f"{field}[{first + index}]",
            f"is {taken[index]}; token ids are below {vocab_size} (ModelCard.vocab_size)",
        )
    return TokenIds(taken.astype(np.int32).tobytes())
