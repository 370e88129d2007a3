"""The formats by name. Each row declares how a family of models writes calls.

To add a format, add a row here; nothing else lists formats. Formats that no structure of `declared`
can express have their own modules (`harmony`, `gemma4`, `functionary`). The chat template proves
which row applies to a model (`proof`), so rows do not say how to recognise templates.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from service.replies import functionary, gemma4, harmony
from service.replies.call_form import CallGrammar
from service.replies.declared import JsonCalls, NamedCalls, PythonCalls, TaggedCalls, declared
from service.replies.format import Format, marked

_M3 = "]<]minimax[>["


def _command_a_form(text: str) -> CallGrammar:
    return CallGrammar(
        before='{"tool_name": "',
        after='", "parameters": ',
        end="}",
        marks=("<|START_ACTION|>",),
        opening="<|START_ACTION|>[\n    ",
        closing="\n]<|END_ACTION|>",
        separator=",\n    ",
        text=text,
    )


_COMMAND_R_FORM = CallGrammar(
    before='    {\n        "tool_name": "',
    after='",\n        "parameters": ',
    end="\n    }",
    marks=("Action:",),
    opening="Action:\n```json\n[\n",
    closing="\n]```",
    separator=",\n",
)


_ROWS = (
    declared(
        "apertus",
        JsonCalls(marks=("<|tools_prefix|>",), closing=("<|tools_suffix|>",), name=""),
        reasoning=("<|inner_prefix|>", "<|inner_suffix|>"),
    ),
    declared(
        "apriel",
        JsonCalls(marks=("<tool_calls>",), closing=("</tool_calls>",), first="[{"),
        reasoning=("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    ),
    declared(
        "command_a",
        JsonCalls(marks=("<|START_ACTION|>",), closing=("<|END_ACTION|>",), name="tool_name"),
        reasoning=("<|START_THINKING|>", "<|END_THINKING|>"),
        silent=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        forms=(_command_a_form("<|START_RESPONSE|>"), _command_a_form("<|START_TEXT|>")),
    ),
    declared(
        "command_r",
        JsonCalls(marks=("Action:",), fence="```json", closing=("```",), name="tool_name"),
        forms=(_COMMAND_R_FORM,),
    ),
    declared(
        "deepseek",
        NamedCalls(
            section="<｜tool▁calls▁begin｜>",
            section_end="<｜tool▁calls▁end｜>",
            call="<｜tool▁call▁begin｜>",
            name_end="<｜tool▁sep｜>",
            call_end="<｜tool▁call▁end｜>",
            fence="```json",
        ),
    ),
    declared(
        "dsml",
        TaggedCalls(
            section=("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"),
            section_end=("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"),
            call='<｜DSML｜invoke name="',
            name_end='"',
            call_end="</｜DSML｜invoke>",
            key='<｜DSML｜parameter name="',
            key_end='"',
            value_end="</｜DSML｜parameter>",
            attributes_end=">",
            attributes={"string": ' string="true"', "other": ' string="false"'},
        ),
    ),
    declared("functionary", NamedCalls(call="<function=", name_end=">", call_end="</function>")),
    functionary.FORMAT,
    gemma4.FORMAT,
    declared(
        "gigachat3",
        JsonCalls(
            marks=("function call<|role_sep|>", "<|function_call|>"),
            first="{",
            written=("function call<|role_sep|>\n", ""),
        ),
        silent=("<|message_sep|>",),
    ),
    declared(
        "glm",
        TaggedCalls(
            call="<tool_call>",
            call_end="</tool_call>",
            key="<arg_key>",
            key_end="</arg_key>",
            value="<arg_value>",
            value_end="</arg_value>",
            gaps=("\n", ""),
        ),
    ),
    declared("granite", JsonCalls(marks=("<|tool_call|>", "<tool_call>"))),
    harmony.FORMAT,
    declared(
        "hermes",
        JsonCalls(
            marks=("<tool_call>",),
            closing=("</tool_call>",),
            first="{",
            written=("<tool_call>\n", "\n</tool_call>"),
        ),
    ),
    declared(
        "hy3",
        TaggedCalls(
            section=("<tool_calls:opensource>",),
            section_end=("</tool_calls:opensource>",),
            call="<tool_call:opensource>",
            name_end="<tool_sep:opensource>",
            call_end="</tool_call:opensource>",
            key="<arg_key:opensource>",
            key_end="</arg_key:opensource>",
            value="<arg_value:opensource>",
            value_end="</arg_value:opensource>",
        ),
        reasoning=("<think:opensource>", "</think:opensource>"),
    ),
    declared(
        "kimi_k2",
        NamedCalls(
            section="<|tool_calls_section_begin|>",
            section_end="<|tool_calls_section_end|>",
            call="<|tool_call_begin|>",
            name_end="<|tool_call_argument_begin|>",
            call_end="<|tool_call_end|>",
            name_in_id=re.compile(r"(?:functions\.)?([^\s:](?:.*[^\s])?):[0-9]+\Z"),
            written=("functions.", ":0"),
        ),
        ends_reasoning=("<|tool_calls_section_begin|>",),
    ),
    declared(
        "kimi_k3",
        TaggedCalls(
            section=("<|open|>tools<|sep|>",),
            section_end=("<|close|>tools<|sep|>",),
            call='<|open|>call tool="',
            name_end='"',
            name_attributes=' index="1"',
            call_end="<|close|>call<|sep|>",
            key='<|open|>argument key="',
            key_end='"',
            value_end="<|close|>argument<|sep|>",
            attributes_end="<|sep|>",
            attributes={
                **{kind: f' type="{kind}"' for kind in ("string", "boolean", "null", "object")},
                **{"array": ' type="array"', "other": ' type="number"'},
            },
            gaps=("",),
        ),
        reasoning=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        silent=(
            "<|open|>response<|sep|>",
            "<|close|>response<|sep|>",
            "<|close|>message<|sep|>",
            "<|end_of_msg|>",
        ),
    ),
    declared("lfm2", PythonCalls(marks=("<|tool_call_start|>",), closing="<|tool_call_end|>")),
    declared(
        "llama3_json",
        JsonCalls(
            marks=("<|python_tag|>",), first="{", between=";", bare=True, arguments="parameters"
        ),
    ),
    declared(
        "llama_python",
        PythonCalls(marks=("<|python_start|>",), closing="<|python_end|>", bare=True),
    ),
    declared(
        "minimax",
        TaggedCalls(
            section=("<minimax:tool_call>",),
            section_end=("</minimax:tool_call>",),
            call='<invoke name="',
            name_end='">',
            call_end="</invoke>",
            key='<parameter name="',
            key_end='">',
            value_end="</parameter>",
        ),
    ),
    declared(
        "minimax_m1",
        JsonCalls(
            marks=("<tool_calls>",),
            closing=("</tool_calls>",),
            first="{[",
            between=",",
            written=("<tool_calls>\n", "\n</tool_calls>"),
        ),
    ),
    declared(
        "minimax_m3",
        TaggedCalls(
            section=(_M3 + "<tool_call>",),
            section_end=(_M3 + "</tool_call>",),
            call=_M3 + '<invoke name="',
            name_end='">',
            call_end=_M3 + "</invoke>",
            key=_M3 + "<",
            key_end=">",
            value_end=_M3 + "</",
            key_again=True,
            nests=True,
            gaps=("",),
        ),
        reasoning=("<mm:think>", "</mm:think>"),
        silent=("</mm:think>",),  # alone where it does not think
    ),
    declared(
        "mistral",
        NamedCalls(call="[TOOL_CALLS]", name_end="[ARGS]", id="[CALL_ID]", or_list=True),
        reasoning=("[THINK]", "[/THINK]"),
    ),
    declared("nemotron", JsonCalls(marks=("<TOOLCALL>",), closing=("</TOOLCALL>",))),
    declared(
        "olmo3",
        PythonCalls(marks=("<function_calls>",), closing="</function_calls>", in_list=False),
    ),
    declared(
        "phi4_mini",
        JsonCalls(marks=("<|tool_call|>", "functools["), closing=("<|/tool_call|>",), first="[{"),
    ),
    declared(
        "qwen3_coder",
        TaggedCalls(
            section=("<tool_call>",),
            section_end=("</tool_call>",),
            call="<function=",
            name_end=">",
            call_end="</function>",
            key="<parameter=",
            key_end=">",
            value_end="</parameter>",
            trimmed="\n",
            each=True,
            may_begin=True,
            plain=True,
        ),
    ),
    declared(
        "seed_oss",
        TaggedCalls(
            section=("<seed:tool_call>",),
            section_end=("</seed:tool_call>",),
            call="<function=",
            name_end=">",
            call_end="</function>",
            key="<parameter=",
            key_end=">",
            value_end="</parameter>",
            each=True,
        ),
        reasoning=("<seed:think>", "</seed:think>"),
    ),
    marked("think", {}),
)
FORMATS: Mapping[str, Format] = MappingProxyType({format.name: format for format in _ROWS})
