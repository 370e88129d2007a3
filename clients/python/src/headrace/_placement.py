"""Which server a request goes to: the one that has the beginning of its prompt, unless that server
has more than its share of the load. docs/fleet.md specifies this exactly, for clients in other
languages.

1. `prefix_keys` computes the keys of a prompt: one for the prefix it shares with others, and one
   for the prompt itself.
2. Rendezvous hashing (Thaler and Ravishankar, 1998) puts the servers in an order for each key, the
   same in every client. Adding or removing a server moves only that server's keys.
3. The request goes to the first server in this order that is within its bound (consistent hashing
   with bounded loads: Mirrokni, Thorup and Zadimoghaddam, SODA 2018, arXiv:1608.01350): at most
   `BOUND` times its share of the total load, plus one.
4. The choice is remembered for the key and comes first the next time, so that a key that had to
   move does not move back and forth.

A prompt without a key goes to the least loaded server.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headrace.v1 import generation_pb2 as pb

BOUND = 1.25
"""How far above its share a server's load may be to keep a prefix there."""
HEAD_BYTES = 1024
"""The length of a text's prefix, in bytes of UTF-8."""
HEAD_TOKENS = 256
"""The length of the prefix of a prompt given as token ids."""
CHAT_BYTES = 4096
"""The length of the prefix of a conversation's instructions, and of its first message, in bytes."""
LEAST_BYTES = 256
"""The minimum length of a prefix, in bytes; shorter ones are not worth a preference."""
LEAST_TOKENS = 64
_REMEMBERED = 4096

_INSTRUCTIONS = (pb.CHAT_ROLE_SYSTEM, pb.CHAT_ROLE_DEVELOPER)


@dataclass(frozen=True, slots=True)
class PrefixKeys:
    """The keys of a prompt.

    Attributes:
        shared: the key of the prefix it probably shares with other prompts; determines the order of
            servers.
        own: the key of the conversation, under which the chosen server is remembered. The same as
            `shared` for other prompts.
    """

    shared: bytes
    own: bytes


@dataclass(frozen=True, slots=True)
class Candidate:
    """A server that can be chosen.

    Attributes:
        name: its instance id, the name that all clients use for it.
        load: the number of requests it has.
        capacity: the number of requests it can run at the same time; at least 1.
        turn: when it was last chosen, as an increasing number; breaks ties.
    """

    name: str
    load: int
    capacity: int
    turn: int = 0


def prefix_keys(spec: pb.GenerationSpec) -> PrefixKeys | None:
    """Returns the keys of a request's prompt, or None if it has no prefix worth a preference."""
    if spec.cache.bypass_prefix_cache:
        return None
    salt = spec.cache.salt.encode() + b"\0"
    kind = spec.WhichOneof("input")
    if kind == "text":
        head = spec.text.text[:HEAD_BYTES].encode()[:HEAD_BYTES]
        if len(head) < LEAST_BYTES:
            return None
    elif kind == "tokens":
        ids = spec.tokens.ids[:HEAD_TOKENS]
        if len(ids) < LEAST_TOKENS:
            return None
        head = b"".join(token_id.to_bytes(4, "big") for token_id in ids)
    elif kind == "chat":
        return _chat_keys(salt, spec.chat)
    else:
        return None
    key = _digest(salt + head)
    return PrefixKeys(key, key)


def order(key: bytes, names: Iterable[str]) -> list[str]:
    """Returns the servers in a key's order of preference."""
    return sorted(names, key=lambda name: (_digest(key + name.encode()), name), reverse=True)


class Placement:
    """Chooses servers and remembers where prefixes went. Not thread-safe."""

    def __init__(self) -> None:
        self._homes: OrderedDict[bytes, str] = OrderedDict()

    def choose(self, keys: PrefixKeys | None, candidates: Sequence[Candidate]) -> str:
        """Returns the name of the server for a request.

        There must be at least one candidate, and names must be unique.
        """
        if keys is None:
            return _least_loaded(candidates).name
        if len(candidates) == 1:
            chosen = candidates[0].name
        else:
            chosen = self._within_bounds(keys, {one.name: one for one in candidates})
        self._homes[keys.own] = chosen
        self._homes.move_to_end(keys.own)
        if len(self._homes) > _REMEMBERED:
            self._homes.popitem(last=False)
        return chosen

    def _within_bounds(self, keys: PrefixKeys, by_name: dict[str, Candidate]) -> str:
        total = sum(one.load for one in by_name.values()) + 1
        room = sum(one.capacity for one in by_name.values())
        someone_is_free = any(one.load < one.capacity for one in by_name.values())
        home = self._homes.get(keys.own)
        preferred = order(keys.shared, by_name)
        for name in [home, *preferred] if home in by_name else preferred:
            one = by_name[name]
            bound = math.ceil(BOUND * total * one.capacity / room) + 1
            # A prefix is not worth a wait where another server would begin at once.
            if one.load < bound and (one.load < one.capacity or not someone_is_free):
                return name
        return _least_loaded(list(by_name.values())).name


def _least_loaded(candidates: Sequence[Candidate]) -> Candidate:
    return min(candidates, key=lambda one: (one.load / one.capacity, one.turn))


def _chat_keys(salt: bytes, chat: pb.ChatInput) -> PrefixKeys | None:
    """Computes the keys of a conversation.

    The shared prefix is the instructions (tools and leading system messages). The conversation is
    identified by the instructions and the first message after them.
    """
    parts = [
        f"{tool.definition_json}\0{tool.name}\0{tool.description}\0{tool.parameters_json}\0"
        for tool in chat.tools
    ]
    opening = next(
        (i for i, one in enumerate(chat.messages) if one.role not in _INSTRUCTIONS),
        len(chat.messages),
    )
    parts += [_message(one) for one in chat.messages[:opening]]
    head = "".join(parts).encode()[:CHAT_BYTES]
    first = "".join(_message(one) for one in chat.messages[opening : opening + 1])
    own = _digest(salt + head + b"\0" + first.encode()[:CHAT_BYTES])
    shared = own if len(head) < LEAST_BYTES else _digest(salt + head)
    return PrefixKeys(shared, own)


def _message(one: pb.ChatMessage) -> str:
    texts = [one.content, *(part.text for part in one.content_parts.parts)]
    return f"{one.role:d}\0{''.join(texts)}\0"


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:8]
