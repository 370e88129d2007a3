"""The verbs as they cross the socket, made of the signatures of `engine.client.EngineVerbs`.

    front end        EngineVerbs.finish, ("a", 3, 0) ──Call "finish"──▶ engine process
    engine process   decodes the arguments as (RequestId, int, int), and calls its engine's `finish`
    front end        ◀──Answer── decodes what it returned, as the signature says

The set is closed: it is made of the protocol when this module is imported, and what arrives only
chooses from it. Arguments and answers that do not fit the signature are errors.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from types import GenericAlias
from typing import Any

import msgspec

from engine.client import EngineVerbs

_ENCODER = msgspec.msgpack.Encoder()


class Verb:
    """One method of the protocol: its name, and what reads its arguments and its answer."""

    def __init__(self, method: Callable[..., object]) -> None:
        types = typing.get_type_hints(method)
        answer = types.pop("return")
        self.name = method.__name__
        self.arguments: msgspec.msgpack.Decoder[tuple[Any, ...]] = msgspec.msgpack.Decoder(
            GenericAlias(tuple, tuple(types.values()))
        )
        self.answer: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(answer)


def raw(value: object) -> msgspec.Raw:
    """Arguments or an answer, as they are sent."""
    return msgspec.Raw(_ENCODER.encode(value))


VERBS: dict[object, Verb] = {
    method: Verb(method)
    for method in vars(EngineVerbs).values()
    if inspect.iscoroutinefunction(method)
}
"""The verbs, by the protocol's methods."""
