"""Scores replies to heldout.jsonl, and what drafts from the text so far would have given.

These are plain functions of prompts, replies and token ids; `measure.py` gets the replies.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

CALL_MARK = "<tool_call>"
"""If it is left in a text, the model began a call that is not valid."""
DRAFTED_COPIES = 20
"""How many copies of each size are drafted; all edits are drafted."""
DRAFT_TOKENS = 5
SUFFIX_TOKENS = (2, 6)
"""The shortest and the longest suffix of the text that is looked up."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply to a prompt.

    Attributes:
        text: the text without the calls.
        calls: names, and arguments as JSON text.
        token_ids: all generated tokens.
        error: why there is no reply; empty if there is one.
    """

    text: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    token_ids: tuple[int, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class Tally:
    """How often something was right: `right` is a sum of scores from 0 to 1, `of` is their
    number.
    """

    right: float = 0.0
    of: int = 0

    @property
    def share(self) -> float:
        """The average score, from 0 to 1; 0 if there are no scores."""
        return self.right / self.of if self.of else 0.0


# ---- marks -------------------------------------------------------------------------------------


def marks(row: dict[str, Any], reply: Reply) -> dict[str, float]:
    """Return the scores of a reply, from 0 to 1, by the criteria of its kind."""
    expect, kind = row["expect"], row["kind"]
    calls_none = not reply.calls and CALL_MARK not in reply.text and not reply.error
    if kind == "call":
        found = reply.calls[0] if len(reply.calls) == 1 else ("", "")
        right = found[0] == expect["name"]
        whole = right and same(parsed(found[1]), expect["arguments"])
        return {"right tool": float(right), "whole call": float(whole)}
    if kind == "no_call":
        return {"no call": float(calls_none)}
    if kind == "result":
        told = all(holds(reply.text, value) for value in expect["contains"])
        return {"answer": float(calls_none and told)}
    if kind == "form":
        value = parsed(reply.text)
        wanted = expect["object"]
        filled = value if isinstance(value, dict) else {}
        fields = sum(key in filled and same(filled[key], wanted[key]) for key in wanted)
        return {"fields": fields / len(wanted), "object": float(same(value, wanted))}
    name = f"copy {row['size']}" if kind == "copy" else kind
    return {name: float(reply.text.strip() == expect["text"])}


def holds(text: str, value: str) -> bool:
    """Whether a text contains a value as separate words or numbers, ignoring case: 4.2 is neither
    in 14.2 nor in 4.25.
    """
    own = rf"(?<!\w)(?<!\d[.,]){re.escape(value.casefold())}(?!\w)(?![.,]\d)"
    return re.search(own, text.casefold()) is not None


def same(left: Any, right: Any) -> bool:
    """Whether two JSON values are equal: 7 equals 7.0, but true does not equal 1."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def parsed(text: str) -> Any:
    """Parse a text as a JSON value; None if it is not one."""
    with contextlib.suppress(ValueError):
        return json.loads(text)
    return None


def tallied(pairs: Iterable[tuple[dict[str, Any], Reply]]) -> dict[str, Tally]:
    """Return the scores of all prompts, summed by criterion."""
    found: dict[str, Tally] = {}
    for row, reply in pairs:
        for name, share in marks(row, reply).items():
            old = found.get(name, Tally())
            found[name] = Tally(old.right + share, old.of + 1)
    return found


# ---- drafts ------------------------------------------------------------------------------------


def draft(tokens: Sequence[int]) -> Sequence[int]:
    """Return the continuation that the text itself suggests: find its longest suffix that also
    occurs earlier, and return what followed the latest of these occurrences. Empty if there is
    none.
    """
    shortest, longest = SUFFIX_TOKENS
    for size in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        end = list(tokens[-size:])
        for start in range(len(tokens) - size - 1, -1, -1):
            if list(tokens[start : start + size]) == end:
                return tokens[start + size : start + size + DRAFT_TOKENS]
    return ()


@dataclass(frozen=True, slots=True)
class Drafted:
    """Drafts of one or more replies, in tokens. Each step yields the accepted part of a draft plus
    one token.
    """

    drafted: int = 0
    kept: int = 0
    output: int = 0
    steps: int = 0

    def __add__(self, other: Drafted) -> Drafted:
        return Drafted(
            self.drafted + other.drafted,
            self.kept + other.kept,
            self.output + other.output,
            self.steps + other.steps,
        )


def drafted(prompt: Sequence[int], output: Sequence[int]) -> Drafted:
    """Count what drafts from the prompt and the output so far would have given for a reply."""
    place = found = kept = steps = 0
    while place < len(output):
        proposed = draft([*prompt, *output[:place]])
        right = 0
        for token, actual in zip(proposed, output[place:], strict=False):
            if token != actual:
                break
            right += 1
        found, kept, steps = found + len(proposed), kept + right, steps + 1
        place += right + 1
    return Drafted(found, kept, len(output), steps)


def drafted_rows(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the prompts whose replies are drafted: all edits, and `DRAFTED_COPIES` of each
    size.
    """
    found, copies = [], {30: 0, 60: 0}
    for row in rows:
        if row["kind"] == "copy" and copies[row["size"]] < DRAFTED_COPIES:
            copies[row["size"]] += 1
            found.append(row)
        elif row["kind"] == "edit":
            found.append(row)
    return found
