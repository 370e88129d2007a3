"""Kimi K3: parts between tokens, whose attributes tell the types."""

from __future__ import annotations

from tests.service.replies.cases import TAGGED, Case, Tags

TAGS = Tags(
    opening="<|open|>tools<|sep|>",
    closing="<|close|>tools<|sep|>",
    call='<|open|>call tool="',
    name_end='" index="1"<|sep|>',
    end="<|close|>call<|sep|>",
    key='<|open|>argument key="',
    key_end='" type="string"<|sep|>',
    other_end='" type="number"<|sep|>',
    value_end="<|close|>argument<|sep|>",
    reasoning=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
)
TOOLS = TAGGED
CASES = [
    *TAGS.cases(),
    Case(
        "a whole reply",
        "hm<|close|>think<|sep|><|open|>response<|sep|>hi<|close|>response<|sep|>"
        + TAGS.wrap("f", s="x")
        + "<|close|>message<|sep|><|end_of_msg|>",
        "hi",
        "hm",
        [("f", '{"s":"x"}')],
        in_reasoning=True,
    ),
    Case(
        "escapes",
        TAGS.wrap("f", s="x").replace('"s"', '"a&quot;&amp;b"'),
        calls=[("f", '{"a\\"&b":"x"}')],
    ),
]
TRUNCATED = f"{TAGS.reasoning[0]}hm{TAGS.reasoning[1]}hi{TAGS.wrap('f', s='a', n='12')}"
