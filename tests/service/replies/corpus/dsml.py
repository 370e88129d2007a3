"""DeepSeek V3.2 and V4: marks that tell whether a value is text."""

from __future__ import annotations

from tests.service.replies.cases import TAGGED, Case, Tags

TAGS = Tags(
    opening="<｜DSML｜function_calls>",
    closing="</｜DSML｜function_calls>",
    call='<｜DSML｜invoke name="',
    name_end='">',
    end="</｜DSML｜invoke>",
    key='<｜DSML｜parameter name="',
    key_end='" string="true">',
    other_end='" string="false">',
    value_end="</｜DSML｜parameter>",
)
TOOLS = TAGGED
CASES = [
    *TAGS.cases(),
    Case(
        "V4",
        "<｜DSML｜tool_calls>\n" + TAGS.one("f") + "\n</｜DSML｜tool_calls>",
        calls=[("f", "{}")],
    ),
    Case("the mark tells the type", TAGS.wrap("g", n="[1]"), calls=[("g", '{"n":[1]}')]),
]
TRUNCATED = f"{TAGS.reasoning[0]}hm{TAGS.reasoning[1]}hi{TAGS.wrap('f', s='a', n='12')}"
