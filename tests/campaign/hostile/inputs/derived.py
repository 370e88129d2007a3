"""Hostile values of every scalar field of the contract, derived from its descriptors.

    descriptors ──by type──▶ values of each field ──┐
    ANSWERS ──────by field─▶ what is answered ──────┴──▶ cases, taken by inputs

A field that `ANSWERS` does not have may take a value or refuse it, but a refusal must name the
field or its neighbour. So a new field is attacked with nothing written here: by the input that
takes its message, or by the last one, `other-fields`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from tests.campaign.hostile.inputs.kinds import MISSING, OK, Case, invalid
from tests.campaign.hostile.sending import CONTROL
from tests.service.methods import METHODS

MOST_32, MOST_63, MOST_64 = 2**32 - 1, 2**63 - 1, 2**64 - 1
MANY, MANY_TEXTS = 100_000, 16_000
"""How often a value of a list is repeated."""
ODD, LONG = "\x00\n\x1b[2J../../etc/passwd", "\u20ac" * 300_000
FLOATS = (math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-45, 1.5, 7.0, 1e9, 1e30)
VALUES: Mapping[int, tuple[Any, ...]] = {
    FieldDescriptor.CPPTYPE_BOOL: (False, True),
    FieldDescriptor.CPPTYPE_ENUM: (0, 99, -1),
    FieldDescriptor.CPPTYPE_UINT32: (0, MOST_32),
    FieldDescriptor.CPPTYPE_UINT64: (0, MOST_64),
    FieldDescriptor.CPPTYPE_INT32: (0, -1, 2**31 - 1, -(2**31)),
    FieldDescriptor.CPPTYPE_INT64: (0, -1, MOST_63, -MOST_63 - 1),
    FieldDescriptor.CPPTYPE_FLOAT: FLOATS,
    FieldDescriptor.CPPTYPE_DOUBLE: FLOATS,
    FieldDescriptor.CPPTYPE_STRING: ("", ODD, LONG),
}
WHOLE = (
    FieldDescriptor.CPPTYPE_UINT32,
    FieldDescriptor.CPPTYPE_UINT64,
    FieldDescriptor.CPPTYPE_INT32,
    FieldDescriptor.CPPTYPE_INT64,
)
DURATIONS = (
    *({"seconds": number} for number in (-1, 61, 3601, 86_401, 315_576_000_000, MOST_63)),
    *({"nanos": number} for number in (0, 1, -5, 2_000_000_000)),
)
BASES: Mapping[str, Mapping[str, Any]] = {
    "GenerationSpec": {
        "text": {"text": "Once upon a time"},
        "stop": {"max_tokens": 2},
        "scheduling": {"time_limit": {"seconds": 1}},
    },
    "ChatMessage": {"role": 2, "content": "hi"},
    "ChatInput": {"messages": [{"role": 2, "content": "hi"}]},
    "TruncationOptions": {"max_prompt_tokens": 1},
    "Tool": {"name": "f"},
    "ToolCall": {"name": "f"},
    "Label": {"name": "a"},
    "RequestName": {"identity": "nobody", "request_id": "none"},
    "TokenizeRequest": {"text": {"text": "hi"}},
    "DetokenizeRequest": {"token_ids": [1]},
    "GetResultRequest": {"request_id": "none"},
    "AttachCommand": {"request_id": "none"},
    "CancelCommand": {"request_id": "none"},
    "CreditCommand": {"request_id": "none", "tokens": 1},
    "CancelRequest": {"request_ids": ["none"]},
    "SetLogLevelRequest": {"level": 2},
    "LoadAdapterRequest": {"name": "none", "source": "none"},
    "UnloadAdapterRequest": {"name": "none"},
    "WatchStatisticsRequest": {"interval": {"seconds": 1}},
}
"""What a message needs so that a single field of it is looked at."""
STOPPING = frozenset({CONTROL + "Pause", CONTROL + "Drain"})
"""Methods that must not be obeyed; where a value may be right, their calls need a capability that
nobody has.
"""

Refuses = Callable[[Any], bool]
"""Whether a value is refused."""


@dataclass(frozen=True, slots=True)
class Outside:
    """Refuses what lies outside of bounds. Whole numbers next to the bounds are tried too."""

    least: float
    most: float

    def __call__(self, value: float) -> bool:
        return not self.least <= value <= self.most

    def next_to(self, one: FieldDescriptor) -> Iterator[int]:
        """Return the whole numbers just outside that the field can hold."""
        if one.cpp_type in WHOLE:
            extremes = VALUES[one.cpp_type]
            for value in (self.least - 1, self.most + 1):
                if min(extremes) <= value <= max(extremes):
                    yield int(value)


def seconds_outside(least: float, most: float) -> Refuses:
    def refuses(value: Mapping[str, int]) -> bool:
        nanos = value.get("nanos", 0)
        is_none = nanos < 0 or nanos > 999_999_999
        return is_none or not least <= value.get("seconds", 0) + nanos / 1e9 <= most

    return refuses


def is_long(value: str) -> bool:
    return len(value) > 1000


_NOBODY = ("NOT_FOUND REQUEST_NOT_FOUND",)
_ELSEWHERE = ("NOT_FOUND WRONG_INSTANCE",)
_NO_CREDIT = ("FAILED_PRECONDITION FAILED_PRECONDITION",)
_NO_ADAPTER = ("NOT_FOUND ADAPTER_NOT_LOADED",)
_NO_ROOT = ("FAILED_PRECONDITION ADAPTER_REFUSED",)
_UNKNOWN_ENUM = Outside(0, 90)
ANSWERS: Mapping[str, Refuses | tuple[str, ...]] = {
    "SamplingOptions.temperature": Outside(0, 100),
    "SamplingOptions.top_p": Outside(1e-46, 1),
    "SamplingOptions.min_p": Outside(0, 1),
    "SamplingOptions.typical_p": Outside(1e-46, 1),
    "SamplingOptions.repetition_penalty": Outside(1e-46, 10),
    "SamplingOptions.presence_penalty": Outside(-2, 2),
    "SamplingOptions.frequency_penalty": Outside(-2, 2),
    "SamplingOptions.no_repeat_ngram_size": Outside(0, 1024),
    "SamplingOptions.seed": Outside(0, MOST_63),
    "StopOptions.min_tokens": Outside(0, 2),
    "OutputOptions.delivery": _UNKNOWN_ENUM,
    "OutputOptions.logprobs": Outside(0, 9999),
    "OutputOptions.prompt_logprobs": Outside(0, 9999),
    "SchedulingOptions.priority": Outside(-100, 100),
    "SchedulingOptions.time_limit": seconds_outside(1e-9, 86_400),
    "CacheOptions.salt": is_long,
    "TruncationOptions.max_prompt_tokens": Outside(1, MOST_32),
    "TruncationOptions.side": _UNKNOWN_ENUM,
    "GenerationSpec.n": Outside(1, 9999),
    "OpenCommand.lease": seconds_outside(0, 1e12),
    "OpenCommand.load_interval": seconds_outside(0.1, 3600),
    "WatchStatisticsRequest.interval": seconds_outside(0.1, 3600),
    "GetResultRequest.wait": seconds_outside(0, 60),
    "DrainRequest.timeout": seconds_outside(0, 86_400),
    "DrainRequest.reason": is_long,
    "PauseRequest.reason": is_long,
    "SetLogLevelRequest.level": Outside(1, 4),
    **{f"LoadAdapterRequest.{one}": _NO_ROOT for one in ("name", "source", "pinned", "replace")},
    "UnloadAdapterRequest.name": _NO_ADAPTER,
    "UnloadAdapterRequest.timeout": _NO_ADAPTER,
    "AttachCommand.from_seq": _NOBODY,
    "AttachCommand.instance_id": (*_NOBODY, *_ELSEWHERE),
    "CancelCommand.instance_id": (OK, *_ELSEWHERE),
    "CancelRequest.instance_id": (OK, *_ELSEWHERE),
    "GetResultRequest.from_seq": _NOBODY,
    "GetResultRequest.until_done": _NOBODY,
    "GetResultRequest.instance_id": (*_NOBODY, *_ELSEWHERE),
    "ChatMessage.role": Outside(1, 90),
    "GenerationSpec.model": (OK, "NOT_FOUND MODEL_NOT_FOUND"),
    "CreditCommand.request_id": _NO_CREDIT,
    "CreditCommand.tokens": _NO_CREDIT,
}
"""What is answered, by message and field: whether a value is refused as invalid, or the answers to
all values.
"""


@dataclass(frozen=True, slots=True)
class Scalar:
    """A field without fields of the contract's own, and where it is.

    Attributes:
        method, kind: an RPC that takes it, and the RPC's message.
        fields: those that lead to it from the message, itself the last.
    """

    method: str
    kind: type[Message]
    fields: tuple[FieldDescriptor, ...]

    @property
    def path(self) -> str:
        """The field's name as the server tells it."""
        return ".".join(one.name + "[]" * one.is_repeated for one in self.fields)


def scalars(kinds: Mapping[str, type[Message]]) -> dict[str, Scalar]:
    """Return the scalar fields of messages, given by method, as "Message.field"."""
    found: dict[str, Scalar] = {}
    for method, kind in sorted(kinds.items(), key=lambda one: "Generate" not in one[0]):
        for fields in _leaves(kind.DESCRIPTOR, ()):
            last = fields[-1]
            key = f"{last.containing_type.name}.{last.name}"
            found.setdefault(key, Scalar(method, kind, fields))
    return found


def _leaves(
    kind: Descriptor, before: tuple[FieldDescriptor, ...]
) -> Iterator[tuple[FieldDescriptor, ...]]:
    for one in kind.fields:
        inner = one.message_type
        is_ours = inner is not None and inner.full_name.startswith("headrace.")
        if is_ours and inner.fields and not inner.GetOptions().map_entry:
            yield from _leaves(inner, (*before, one))
        else:
            yield (*before, one)


def values_of(one: FieldDescriptor) -> Iterator[Any]:
    """Return a scalar field's hostile values; those of a list are lists."""
    inner = one.message_type
    if inner is not None and inner.GetOptions().map_entry:
        key, value = inner.fields_by_name["key"], inner.fields_by_name["value"]
        yield from ({k: v} for k in (1, *values_of(key)) for v in values_of(value))
        return
    values = VALUES.get(one.cpp_type) or (DURATIONS if inner.name == "Duration" else ({},))
    if one.type == FieldDescriptor.TYPE_BYTES:
        values = (b"", b"\x89PNG" * 3000)
    if not one.is_repeated:
        yield from values
        return
    yield from ([value] for value in values)
    yield [values[1]] * (MANY_TEXTS if isinstance(values[1], str) else MANY)


def of(*names: str, fields: Mapping[str, Scalar] | None = None) -> list[Case]:
    """Return the cases of messages ("Label") and of fields ("Label.name")."""
    return [
        _case(key, one, value)
        for key, one in (fields or FIELDS).items()
        if key in names or key.partition(".")[0] in names
        for value in (*values_of(one.fields[-1]), *_next_to_bounds(key, one.fields[-1]))
    ]


def _next_to_bounds(key: str, one: FieldDescriptor) -> Iterator[int]:
    known = ANSWERS.get(key)
    return known.next_to(one) if isinstance(known, Outside) else iter(())


def _case(key: str, one: Scalar, value: Any) -> Case:
    answers = _answers(key, one, value)
    needs = one.method in STOPPING and OK in answers
    if needs:
        answers += MISSING

    def message(_: object) -> Message:
        found: Any = one.kind(**BASES.get(one.kind.DESCRIPTOR.name, {}))
        if needs:
            found.required_capabilities.append("none")
        _set(found, one.fields, value)
        return found

    is_operator = one.method.startswith(CONTROL)
    return Case(one.method, message, answers, is_operator=is_operator, field=key)


def _set(message: Any, fields: tuple[FieldDescriptor, ...], value: Any) -> None:
    for one in fields[:-1]:
        base = BASES.get(one.message_type.name, {})
        if one.is_repeated:
            message.ClearField(one.name)
        part = getattr(message, one.name)
        if one.is_repeated:
            message = part.add(**base)
        else:
            if not message.HasField(one.name):
                part.MergeFrom(type(part)(**base))
            message = part
            message.SetInParent()
    last = fields[-1]
    message.ClearField(last.name)
    if last.message_type is None and not last.is_repeated:
        setattr(message, last.name, value)
        return
    part = getattr(message, last.name)
    if last.message_type is None:
        part.extend(value)
    elif last.is_repeated:
        part.update(value)
    else:
        part.SetInParent()
        part.MergeFrom(type(part)(**value))


def _answers(key: str, one: Scalar, value: Any) -> tuple[str, ...]:
    if one.path == "required_capabilities[]":
        return (OK, *MISSING, *invalid("required_capabilities*"))
    known = ANSWERS.get(key)
    # Of lists, the list is named; and whatever is too long makes a chat too long.
    beside = invalid(one.path.rpartition(".")[0].partition("[]")[0] + "*")
    if one.path.startswith("spec.chat."):
        beside += invalid("spec.chat.messages")
    if isinstance(known, tuple):
        return (*known, *beside)
    if known is not None:
        return invalid(one.path) if known(value) else _NOBODY if "GetResult" in key else (OK,)
    return (OK, *beside, "UNIMPLEMENTED UNSUPPORTED_FIELD *")


FIELDS = scalars({method: kind for method, (kind, _, _) in METHODS.items()})
