"""The tree that represents a structural tag. It has few kinds of nodes, which `tag_grammar` writes
as a grammar.

    const_string, begin, end  Literal     regex, any_text   Open
    json_schema               JsonNode    …_parameters      Sequence of Literal, Value and JsonNode
    grammar                   Lark        or, ends          Alternatives
    sequence, tag             Sequence    triggered_tags    Triggered
    tags_with_separator       Sequence of Alternatives and Repeated

Nodes are compared by identity, because the same node followed by the same nodes becomes one rule.
"""

from __future__ import annotations

from collections.abc import Sequence as Listed
from dataclasses import dataclass

from engine.structured.special_names import Part


@dataclass(frozen=True, slots=True, eq=False)
class Literal:
    """Fixed text: segments of text, which any tokens may write, and special tokens between them. No
    two text segments are adjacent, and none is empty.
    """

    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Open:
    """Text without a defined end: it ends where a text that may follow it begins.

    Attributes:
        terminal: an expression of Lark's terminals.
        place: where the caller described it, for messages.
        needs_end: whether it could continue with anything, so that fixed text must follow it.
    """

    terminal: str
    place: str
    needs_end: bool


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """Text that ends where this expression of Lark's terminals first matches."""

    terminal: str


@dataclass(frozen=True, slots=True, eq=False)
class JsonNode:
    """A JSON value with a schema that is ready for llguidance; `place`: where it was described."""

    schema: str
    place: str


@dataclass(frozen=True, slots=True, eq=False)
class Lark:
    """The text of a Lark grammar; `place`: where it was described."""

    grammar: str
    place: str


@dataclass(frozen=True, slots=True, eq=False)
class Sequence:
    """Several nodes in order."""

    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Alternatives:
    """One of several nodes."""

    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Repeated:
    """A node that may occur any number of times."""

    node: Node


@dataclass(frozen=True, slots=True, eq=False)
class Tag:
    """A tag of `Triggered`: its trigger, and what comes after that."""

    trigger: Literal
    behind: Node


@dataclass(frozen=True, slots=True, eq=False)
class Triggered:
    """Free text with tags in it: once a trigger was written, one of its tags follows.

    Attributes:
        text: the free text.
        tags: the tags.
        at_least_one: whether there must be a tag.
        stop_after_first: whether the free text must end after the first tag.
    """

    text: Open
    tags: tuple[Tag, ...]
    at_least_one: bool
    stop_after_first: bool


Node = Literal | Open | Value | JsonNode | Lark | Sequence | Alternatives | Repeated | Triggered

EMPTY = Literal(())


def flattened(nodes: Listed[Node]) -> tuple[Node, ...]:
    """Return the nodes with sequences flattened, empty literals removed and adjacent literals
    joined.
    """
    flat: list[Node] = []
    waiting = list(reversed(nodes))
    while waiting:
        node = waiting.pop()
        if isinstance(node, Sequence):
            waiting += reversed(node.nodes)
        elif isinstance(node, Literal) and flat and isinstance(last := flat[-1], Literal):
            flat[-1] = joined(last, node)
        elif not isinstance(node, Literal) or node.parts:
            flat.append(node)
    return tuple(flat)


def joined(first: Literal, second: Literal) -> Literal:
    """Join two literals."""
    head, tail = first.parts, second.parts
    if head and tail and isinstance(head[-1], str) and isinstance(tail[0], str):
        return Literal((*head[:-1], head[-1] + tail[0], *tail[1:]))
    return Literal(head + tail)


def without_prefix(literal: Literal, prefix: Literal) -> Literal | None:
    """Return what is left of a literal after a prefix, or None if it does not begin with the
    prefix.
    """
    rest = list(literal.parts)
    for index, part in enumerate(prefix.parts):
        if not rest:
            return None
        if rest[0] == part:
            rest.pop(0)
            continue
        first = rest[0]
        is_last = index == len(prefix.parts) - 1
        if not (is_last and isinstance(part, str) and isinstance(first, str)):
            return None
        if not first.startswith(part):
            return None
        rest[0] = first[len(part) :]
    return Literal(tuple(rest))


def is_open(nodes: Listed[Node]) -> bool:
    """Whether these nodes may end with text without a defined end."""
    for node in reversed(nodes):
        match node:
            case Open() | Triggered():
                return True
            case Sequence():
                if is_open(node.nodes):
                    return True
            case Alternatives():
                if any(is_open((choice,)) for choice in node.nodes):
                    return True
            case Repeated():
                if is_open((node.node,)):
                    return True
            case _:
                pass
        if not may_be_empty(node):
            return False
    return False


def may_be_empty(node: Node) -> bool:
    """Whether a node may be empty. An expression counts as if it could not."""
    match node:
        case Literal():
            return not node.parts
        case Sequence():
            return all(map(may_be_empty, node.nodes))
        case Alternatives():
            return any(map(may_be_empty, node.nodes))
        case Repeated():
            return True
        case _:
            return False
