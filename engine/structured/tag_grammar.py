"""Writes a structural tag's nodes as a grammar for llguidance.

The lexer is greedy: of the terminals that may come next, it takes the one that matches the most
text, and it never backtracks. So open text, such as `any_text`, would take everything that follows
it. Therefore it is written together with the fixed texts that may follow it (its exits):

- before text, as one lazy terminal, which ends where the exit is first complete;
- before a special token, as a separate terminal, because no text contains the token;
- at the output's end, as a terminal that cannot contain an exit.

For this, what follows a choice is repeated after each of its members that ends with open text.
Equal nodes with equal successors become one rule, so the grammar stays as small as the tree.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple, NoReturn

from engine.structured.tag_nodes import (
    Alternatives,
    JsonNode,
    Lark,
    Literal,
    Node,
    Open,
    Repeated,
    Triggered,
    Value,
    flattened,
    is_open,
    may_be_empty,
)

MAX_RULES = 20_000
"""The most rules and terminals of a structural tag's grammar."""

_MAX_CHARACTERS = 420

_Nodes = tuple[Node, ...]


class TagError(Exception):
    """A caller's structural tag cannot be enforced. The text says why, with the location. The
    middle of a long text is left out.
    """

    def __init__(self, text: str, *, is_within: bool = False) -> None:
        """`is_within`: whether the text already includes the beginning of its tag."""
        long = len(text) > _MAX_CHARACTERS
        super().__init__(f"{text[:160]}…{text[-259:]}" if long else text)
        self._is_within = is_within

    def within(self, begin: str) -> TagError:
        """Return the same error with the beginning of its innermost tag."""
        if self._is_within:
            return self
        shown = json.dumps(begin, ensure_ascii=False)
        return TagError(f"{self} (in the tag that begins with {shown})", is_within=True)


class _Exit(NamedTuple):
    """Fixed text after open text, and what follows it."""

    literal: Literal
    behind: _Nodes


class TagGrammar:
    """Collects the rules of a grammar.

    Attributes:
        larks: the callers' Lark grammars; rules refer to them by index, as @lark_0.
        parts: the components described by other means than this format, by location, each as a
            separate grammar. Used to find which one cannot be compiled.
        notes: descriptions of what is enforced differently from what its schemas say. Set by the
            code that reads the schemas.
    """

    def __init__(self) -> None:
        self.larks: list[str] = []
        self.parts: dict[str, str] = {}
        self.notes: tuple[str, ...] = ()
        self._lines: list[str] = ["ANY: /(?s:.*)/"]
        self._rules: dict[tuple[int, ...], str] = {}
        self._named: dict[tuple[str, str], str] = {}
        self._kept: list[_Nodes] = []  # so that no id is used twice
        self._waiting: list[tuple[str, _Nodes]] = []  # rules that are named, but not written yet

    def source(self, node: Node) -> str:
        """Return the grammar's text, beginning with the rule `start`.

        Raises:
            TagError: no grammar can be written that can be followed.
        """
        body = self._rule((node,))
        while self._waiting:  # no recursion: a sequence may be long
            name, nodes = self._waiting.pop()
            self._add(f"{name}: {self._body(flattened(nodes))}")
        return "\n".join([f"start: {body}", *self._lines])

    # ---- names -----------------------------------------------------------------------------------

    def _rule(self, nodes: _Nodes) -> str:
        key = tuple(map(id, nodes))
        if key not in self._rules:
            self._kept.append(nodes)
            name = self._rules[key] = f"r_{len(self._rules)}"
            self._waiting.append((name, nodes))
        return self._rules[key]

    def _name(self, kind: str, body: str) -> str:
        """Return the name of the terminal or rule with this text, adding it if necessary.

        `kind` is T for a terminal, lazy for a rule whose terminal ends as soon as it can, and j for
        any other rule.
        """
        key = kind, body
        if key not in self._named:
            name = self._named[key] = f"{'l' if kind == 'lazy' else kind}_{len(self._named)}"
            self._add(f"{name}{'[lazy]' if kind == 'lazy' else ''}: {body}")
        return self._named[key]

    def _add(self, line: str) -> None:
        self._lines.append(line)
        if len(self._lines) > MAX_RULES:
            raise TagError("is too large; use fewer or smaller tags")

    # ---- bodies ----------------------------------------------------------------------------------

    def _body(self, nodes: _Nodes) -> str:
        parts: list[str] = []
        for index, node in enumerate(nodes):
            behind = nodes[index + 1 :]
            match node:
                case Open():
                    return " ".join([*parts, self._open(node, behind)])
                case Triggered():
                    return " ".join([*parts, self._triggered(node, behind)])
                case Alternatives() if behind and is_open((node,)):
                    return " ".join([*parts, self._distributed(node, behind)])
                case _:
                    parts.append(self._closed(node))
        return " ".join(parts)

    def _distributed(self, node: Alternatives, behind: _Nodes) -> str:
        """Write a choice with a member that ends with open text, together with what follows it."""
        return _any_of(
            self._rule((member, *behind))
            if is_open((member,))
            else f"{self._rule((member,))} {self._rule(behind)}"
            for member in node.nodes
        )

    def _closed(self, node: Node) -> str:
        match node:
            case Literal():
                return _written(node)
            case Value():
                return self._name("lazy", self._name("T", node.terminal))
            case JsonNode():
                self.parts[node.place] = f"start: %json {node.schema}"
                return self._name("j", f"%json {node.schema}")
            case Lark():
                self.parts[node.place] = node.grammar
                self.larks.append(node.grammar)
                return f"@lark_{len(self.larks) - 1}"
            case Alternatives():
                return _any_of(self._rule((choice,)) for choice in node.nodes)
            case Repeated():
                return f"({self._rule((node.node,))})*"
            case _:
                return self._rule((node,))

    def _open(self, node: Open, behind: _Nodes) -> str:
        if not node.needs_end:
            self.parts[node.place] = f"start: {node.terminal}"
        exits, may_end = _exits(behind)
        if exits is None:
            if node.needs_end:
                raise TagError(
                    f"has free text in {node.place} and no fixed text behind it, so that nothing "
                    "tells where it ends; put a const_string behind it, or make it the last"
                )
            return f"{self._name('T', node.terminal)} {self._rule(behind)}"
        return self._free(node, exits, may_end, [])

    def _triggered(self, node: Triggered, behind: _Nodes) -> str:
        exits, may_end = _exits(behind)
        if exits is None:
            raise TagError(
                f"has free text in {node.text.place} and no fixed text behind it, so that nothing "
                "tells where it ends; put a const_string behind it, or make it the last"
            )
        after = behind if node.stop_after_first else ()
        tags = [_Exit(tag.trigger, (tag.behind, *after)) for tag in node.tags]
        texts = _first_texts([*tags, *exits])
        if node.stop_after_first:
            if node.at_least_one:
                return self._free(node.text, tags, False, texts)
            return self._free(node.text, [*tags, *exits], may_end, texts)
        units = self._name("u", self._free(node.text, tags, False, texts))
        tail = self._free(node.text, exits, may_end, texts)
        return f"{units}{'+' if node.at_least_one else '*'} {tail}"

    def _free(self, node: Open, exits: list[_Exit], may_end: bool, also: list[str]) -> str:
        """Write open text up to one of these exits, or to the output's end.

        Args:
            node: the text.
            exits: what may end it.
            may_end: whether the output may end with it.
            also: other texts that would end it, and so cannot occur in it.
        """
        texts = list(dict.fromkeys([*_first_texts(exits), *also]))
        _check_overlaps(node, texts)
        closed = excluding(node.terminal, texts)
        heads: dict[str, list[str]] = {}  # what ends the text, and what may follow that
        for exit_ in exits:
            first, *others = exit_.literal.parts
            if isinstance(first, int):
                head, rest = f"{self._name('T', closed)} <[{first}]>", Literal(tuple(others))
            elif others:  # a special token behind it: only then the text has ended
                head = self._name("T", f"({closed}) {json.dumps(first)}")
                rest = Literal(tuple(others))
            else:
                end = next(text for text in texts if first.startswith(text))
                until = self._name("T", f"({node.terminal}) {json.dumps(end)}")
                head, rest = self._name("lazy", until), Literal((first[len(end) :],))
            behind = [_written(rest), self._rule(exit_.behind)]
            heads.setdefault(head, []).append(" ".join(filter(None, behind)))
        found = [f"{head} {_any_of(bodies)}" for head, bodies in heads.items()]
        return _any_of([*found, self._name("T", closed)] if may_end else found)


def excluding(terminal: str, texts: Iterable[str]) -> str:
    """Return an expression of Lark's terminals for texts of `terminal` that contain none of
    `texts`.
    """
    listed = " | ".join(map(json.dumps, texts))
    return f"({terminal}) & ~(ANY ({listed}) ANY)" if listed else terminal


def _written(literal: Literal) -> str:
    # As ASCII JSON, a text contains nothing that is special in the grammar's syntax.
    return " ".join(
        json.dumps(part) if isinstance(part, str) else f"<[{part}]>"
        for part in literal.parts
        if part != ""
    )


def _any_of(bodies: Iterable[str]) -> str:
    return f"({' | '.join(dict.fromkeys(bodies))})"


def _exits(nodes: _Nodes) -> tuple[list[_Exit] | None, bool]:
    """Return the fixed texts with which these nodes may begin (None if they may also begin with
    something else), and whether the nodes may be empty.
    """
    found: list[_Exit] = []
    nodes = flattened(nodes)
    for index, node in enumerate(nodes):
        behind = nodes[index + 1 :]
        match node:
            case Literal():
                return [*found, _Exit(node, behind)], False
            case Alternatives() | Repeated():
                for inner in node.nodes if isinstance(node, Alternatives) else (node.node,):
                    exits, _ = _exits((inner,))
                    if exits is None:
                        return None, False
                    again = (node,) if isinstance(node, Repeated) else ()
                    found += [_Exit(e.literal, (*e.behind, *again, *behind)) for e in exits]
                if not may_be_empty(node):
                    return found, False
            case _:
                return None, False
    return found, True


def _first_texts(exits: Iterable[_Exit]) -> list[str]:
    """Return the texts of the exits that consist of text alone. If one is a prefix of others, only
    the shortest is returned.
    """
    firsts = dict.fromkeys(
        first
        for literal, _ in exits
        if len(literal.parts) == 1 and isinstance(first := literal.parts[0], str)
    )
    return [text for text in firsts if not any(text.startswith(o) for o in firsts if o != text)]


def _check_overlaps(node: Open, texts: list[str]) -> None:
    for text in texts:
        for other in texts:
            if other is not text and text in other:
                _refuse_overlap(node, text, other)


def _refuse_overlap(node: Open, text: str, other: str) -> NoReturn:
    raise TagError(
        f"has {json.dumps(other, ensure_ascii=False)}, which may end the free text in "
        f"{node.place}, but contains {json.dumps(text, ensure_ascii=False)}, which ends it earlier"
    )
