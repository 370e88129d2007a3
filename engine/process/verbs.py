"""The verbs as they cross the socket, made of the signatures of `engine.client.EngineVerbs`.

    front end        EngineVerbs.finish, ("a", 3, 0) ──Call "finish"──▶ engine process
    engine process   decodes the arguments as (RequestId, int, int), and calls its engine's `finish`
    front end        ◀──Answer── decodes what it returned, as the signature says

Most verbs need nothing else on the front end's side: `sends_the_rest` makes the client's methods
for them. The client writes those whose effect it has to know itself.

The set is closed: it is made of the protocol when this module is imported, and what arrives only
chooses from it. Arguments and answers that do not fit the signature are errors.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from types import GenericAlias
from typing import Any, TypeVar

import msgspec

from engine.client import EngineVerbs

T = TypeVar("T")

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


def sends_the_rest(kind: type[T]) -> type[T]:
    """Give a client a method for each verb that it does not write itself: the verb is sent by the
    client's `_call`, which waits for the answer.
    """
    for method, verb in VERBS.items():
        if verb.name not in vars(kind):
            setattr(kind, verb.name, _sender(typing.cast(Callable[..., Any], method)))
    return kind


def _sender(method: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(method)

    @functools.wraps(method)
    async def send(*arguments: Any, **named: Any) -> Any:
        given = signature.bind(*arguments, **named)
        given.apply_defaults()
        client, *sent = given.args
        return await client._call(method, *sent)

    return send
