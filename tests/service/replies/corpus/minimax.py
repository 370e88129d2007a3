"""MiniMax M2's XML."""

from __future__ import annotations

from tests.service.replies.cases import TAGGED, Case, Tags

TAGS = Tags(
    opening="<minimax:tool_call>\n",
    closing="</minimax:tool_call>",
    call='<invoke name="',
    name_end='">\n',
    end="</invoke>\n",
    key='<parameter name="',
    key_end='">',
    value_end="</parameter>",
)
TOOLS = TAGGED
OPEN, CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"
BEGUN = f'{OPEN}<invoke name="f">'


def none(id: str, raw: str) -> Case:
    return Case(id, raw, raw)


CASES = [
    *TAGS.cases(),
    none("text in the call", f"{BEGUN}hi</invoke>"),
    none("a name without its end", f'{OPEN}<invoke name="f" x="y"></invoke>'),
    none("no call", f"{OPEN}x{CLOSE}"),
    none("an empty block", f"{OPEN}{CLOSE}"),
    none("a call without the mark", TAGS.one("f", s="x")),
    none("mark begun at the end", "a <minimax:to"),
    none("ends alone", f"a{CLOSE}</invoke>b"),
    Case("mark repeated", OPEN + TAGS.wrap("f"), OPEN, calls=[("f", "{}")]),
]
TRUNCATED = f"<think>hm</think>hi\n{TAGS.wrap('f', s='a', n='12')}"
