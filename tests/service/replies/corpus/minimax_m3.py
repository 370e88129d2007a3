"""MiniMax M3: tags of the keys' names, which may nest."""

from __future__ import annotations

from tests.service.replies.cases import TAGGED, Case, Tags

TAGS = Tags(
    opening="]<]minimax[>[<tool_call>\n",
    closing="]<]minimax[>[</tool_call>",
    call=']<]minimax[>[<invoke name="',
    name_end='">',
    end="]<]minimax[>[</invoke>",
    key="]<]minimax[>[<",
    key_end=">",
    value_end="]<]minimax[>[</{key}>",
    reasoning=("<mm:think>", "</mm:think>"),
)
TOOLS = TAGGED
CASES = [
    Case("no reasoning", f"</mm:think>hi{TAGS.wrap('f')}", "hi", calls=[("f", "{}")]),
    *TAGS.cases(forgotten=False),
    Case(
        "nested",
        TAGS.wrap("f", l=TAGS.pair("item", "1") + TAGS.pair("item", TAGS.pair("k", "v w"))),
        calls=[("f", '{"l":[1, {"k": "v w"}]}')],
    ),
    Case(
        "another key's end",
        TAGS.opening + TAGS.call + "f" + TAGS.name_end + TAGS.key + "s>x]<]minimax[>[</t>",
        "t>",
        calls=[("f", '{"s":"x"', False)],
    ),
]
TRUNCATED = f"{TAGS.reasoning[0]}hm{TAGS.reasoning[1]}hi{TAGS.wrap('f', s='a', n='12')}"
