"""Derives how each verb is sent over the socket from the signatures of
`engine.contract.engine_client.EngineVerbs`.

    front end        EngineVerbs.finish, ("a", 3, 0) ──Call "finish"──▶ engine process
    engine process   decodes the arguments as (RequestId, int, int), and calls its engine's `finish`
    front end        ◀──Answer── decodes the result according to the signature

Most verbs need no other code in the front end, because `sends_the_rest` creates the client's
methods for them. The client defines the others itself, because it has to track their effects.

The set of verbs is fixed when this module is imported, and a received name only selects one of
them. Arguments and answers that do not match the signature are errors.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from types import GenericAlias
from typing import Any, TypeVar

import msgspec

from engine.contract.engine_client import EngineVerbs

T = TypeVar("T")

_ENCODER = msgspec.msgpack.Encoder()


class Verb:
    """A method of the protocol: its name, and the decoders of its arguments and its answer."""

    def __init__(self, method: Callable[..., object]) -> None:
        types = typing.get_type_hints(method)
        answer = types.pop("return")
        self.name = method.__name__
        self.arguments: msgspec.msgpack.Decoder[tuple[Any, ...]] = msgspec.msgpack.Decoder(
            GenericAlias(tuple, tuple(types.values()))
        )
        self.answer: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(answer)


def raw(value: object) -> msgspec.Raw:
    """Encode arguments or an answer."""
    return msgspec.Raw(_ENCODER.encode(value))


VERBS: dict[object, Verb] = {
    method: Verb(method)
    for method in vars(EngineVerbs).values()
    if inspect.iscoroutinefunction(method)
}
"""The verbs, by method name."""


def sends_the_rest(kind: type[T]) -> type[T]:
    """Give a client class a method for each verb that it does not define itself.

    The method sends the verb with the client's `_call`, which waits for the answer.
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
