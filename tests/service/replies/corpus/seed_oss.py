"""Seed-OSS: Qwen3-coder's XML without line breaks around values."""

from __future__ import annotations

from tests.service.replies.cases import TAGGED, Case, Tags

TAGS = Tags(
    opening="<seed:tool_call>\n",
    closing="</seed:tool_call>",
    call="<function=",
    name_end=">",
    end="</function>",
    key="<parameter=",
    key_end=">",
    value_end="</parameter>",
    reasoning=("<seed:think>", "</seed:think>"),
)
TOOLS = TAGGED
CASES = [
    *TAGS.cases(),
    Case("line breaks", TAGS.wrap("f", s="\n x\n"), calls=[("f", '{"s":"\\n x\\n"}')]),
]
TRUNCATED = f"{TAGS.reasoning[0]}hm{TAGS.reasoning[1]}hi{TAGS.wrap('f', s='a', n='12')}"
