"""Hy3: each mark has a suffix."""

from __future__ import annotations

from tests.service.replies.cases import TAGGED, Tags

TAGS = Tags(
    opening="<tool_calls:opensource>\n",
    closing="</tool_calls:opensource>",
    call="<tool_call:opensource>",
    name_end="<tool_sep:opensource>",
    end="</tool_call:opensource>",
    key="<arg_key:opensource>",
    key_end="</arg_key:opensource><arg_value:opensource>",
    value_end="</arg_value:opensource>",
    reasoning=("<think:opensource>", "</think:opensource>"),
)
TOOLS = TAGGED
CASES = [
    *TAGS.cases(),
]
TRUNCATED = f"{TAGS.reasoning[0]}hm{TAGS.reasoning[1]}hi{TAGS.wrap('f', s='a', n='12')}"
