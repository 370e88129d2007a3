"""The formats by name: a row for each family of models, of what is declared about its calls.

A new format is a row here; nothing else lists it. What a structure of `declared` does not hold has
a module of its own (`harmony`, `gemma4`, `functionary`). Which row a model's is, is proved by its
chat template (`proof`), so no row says how to tell its templates.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from service.replies import functionary, gemma4, harmony
from service.replies.call_form import CallForm
from service.replies.declared import JsonCalls, NamedCalls, PythonCalls, TaggedCalls, declared
from service.replies.format import Format, marked


def _list_form(opening: str, closing: str, *also: str) -> CallForm:
    """A list of objects with `name` and `arguments` between two texts, of which the first is a
    mark, as are the others.
    """
    return CallForm(
        before='{"name": "',
        after='", "arguments": ',
        end="}",
        marks=(opening, *also),
        opening=opening + "[",
        closing="]" + closing,
        separator=", ",
    )


def _object_form(opening: str, closing: str) -> CallForm:
    """An object with `name` and `arguments` between two texts, of which the first is a mark."""
    return CallForm(
        before=opening + '{"name": "',
        after='", "arguments": ',
        end="}" + closing,
        marks=(opening.strip(),),
    )


def _named_form(
    before: str, after: str, end: str, *marks: str, around: tuple[str, str] = ("", ""),
    separator: str | None = "",
) -> CallForm:  # fmt: skip
    """A name and an object of arguments, between texts."""
    return CallForm(
        before=before,
        after=after,
        end=end,
        marks=marks,
        opening=around[0],
        closing=around[1],
        separator=separator,
        name_in_json=False,
    )


def _command_a_form(text: str) -> CallForm:
    return CallForm(
        before='{"tool_name": "',
        after='", "parameters": ',
        end="}",
        marks=("<|START_ACTION|>",),
        opening="<|START_ACTION|>[\n    ",
        closing="\n]<|END_ACTION|>",
        separator=",\n    ",
        text=text,
    )


_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
_DEEPSEEK_ENDS = ("<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>")
_DEEPSEEK_NAME = "<｜tool▁sep｜>"
_KIMI_K2 = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>")
_KIMI_K2_ENDS = ("<|tool_calls_section_end|>", "<|tool_call_end|>")
_KIMI_K2_NAME = "<|tool_call_argument_begin|>"
_M3 = "]<]minimax[>["


def _hy3(suffix: str) -> TaggedCalls:
    return TaggedCalls(
        section=(f"<tool_calls{suffix}>",),
        section_end=(f"</tool_calls{suffix}>",),
        call=f"<tool_call{suffix}>",
        name_end=f"<tool_sep{suffix}>",
        call_end=f"</tool_call{suffix}>",
        key=f"<arg_key{suffix}>",
        key_end=f"</arg_key{suffix}>",
        value=f"<arg_value{suffix}>",
        value_end=f"</arg_value{suffix}>",
    )


_ROWS = (
    declared(
        "apertus",
        JsonCalls(marks=("<|tools_prefix|>",), closing=("<|tools_suffix|>",), name=""),
        reasoning=("<|inner_prefix|>", "<|inner_suffix|>"),
        forms=(
            CallForm(
                before='{"',
                after='": ',
                end="}",
                marks=("<|tools_prefix|>",),
                opening="<|tools_prefix|>[",
                closing="]<|tools_suffix|>",
                separator=", ",
            ),
        ),
    ),
    declared(
        "apriel",
        JsonCalls(marks=("<tool_calls>",), closing=("</tool_calls>",), first="[{"),
        reasoning=("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
        forms=(_list_form("<tool_calls>", "</tool_calls>"),),
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
        forms=(
            CallForm(
                before='    {\n        "tool_name": "',
                after='",\n        "parameters": ',
                end="\n    }",
                marks=("Action:",),
                opening="Action:\n```json\n[\n",
                closing="\n]```",
                separator=",\n",
            ),
        ),
    ),
    declared(
        "deepseek",
        NamedCalls(
            section=_DEEPSEEK[0],
            section_end=_DEEPSEEK_ENDS[0],
            call=_DEEPSEEK[1],
            name_end=_DEEPSEEK_NAME,
            call_end=_DEEPSEEK_ENDS[1],
            fence="```json",
        ),
        forms=(
            _named_form(
                _DEEPSEEK[1],
                _DEEPSEEK_NAME,
                _DEEPSEEK_ENDS[1],
                *_DEEPSEEK,
                around=(_DEEPSEEK[0], _DEEPSEEK_ENDS[0]),
            ),
            _named_form(
                f"{_DEEPSEEK[1]}function{_DEEPSEEK_NAME}",
                "\n```json\n",
                f"\n```{_DEEPSEEK_ENDS[1]}",
                *_DEEPSEEK,
                around=(_DEEPSEEK[0], _DEEPSEEK_ENDS[0]),
                separator="\n",
            ),
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
            is_string='string="true"',
        ),
    ),
    declared(
        "functionary",
        NamedCalls(call="<function=", name_end=">", call_end="</function>"),
        forms=(_named_form("<function=", ">", "</function>", "<function="),),
    ),
    functionary.FORMAT,
    gemma4.FORMAT,
    declared(
        "gigachat3",
        JsonCalls(
            marks=("function call<|role_sep|>", "<|function_call|>"),
            closing=("<|message_sep|>",),
            first="{",
        ),
        silent=("<|message_sep|>",),
        forms=(
            CallForm(
                before='function call<|role_sep|>\n{"name": "',
                after='", "arguments": ',
                end="}",
                marks=("function call<|role_sep|>", "<|function_call|>"),
                separator=None,
            ),
        ),
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
        ),
    ),
    declared(
        "granite",
        JsonCalls(marks=("<|tool_call|>", "<tool_call>")),
        forms=(_list_form("<|tool_call|>", "", "<tool_call>"),),
    ),
    harmony.FORMAT,
    declared(
        "hermes",
        JsonCalls(marks=("<tool_call>",), closing=("</tool_call>",), first="{"),
        forms=(_object_form("<tool_call>\n", "\n</tool_call>"),),
    ),
    declared("hy3", _hy3(""), _hy3(":opensource")),
    declared(
        "kimi_k2",
        NamedCalls(
            section=_KIMI_K2[0],
            section_end=_KIMI_K2_ENDS[0],
            call=_KIMI_K2[1],
            name_end=_KIMI_K2_NAME,
            call_end=_KIMI_K2_ENDS[1],
            name_in_id=re.compile(r"(?:functions\.)?([^\s:](?:.*[^\s])?):[0-9]+\Z"),
        ),
        ends_reasoning=_KIMI_K2[:1],
        forms=(
            _named_form(  # the number in an id grows with each call, so a form has one call
                _KIMI_K2[1] + "functions.",
                ":0" + _KIMI_K2_NAME,
                _KIMI_K2_ENDS[1],
                *_KIMI_K2,
                around=(_KIMI_K2[0], _KIMI_K2_ENDS[0]),
                separator=None,
            ),
        ),
    ),
    declared(
        "kimi_k3",
        TaggedCalls(
            section=("<|open|>tools<|sep|>",),
            section_end=("<|close|>tools<|sep|>",),
            call='<|open|>call tool="',
            name_end='"',
            call_end="<|close|>call<|sep|>",
            key='<|open|>argument key="',
            key_end='"',
            value_end="<|close|>argument<|sep|>",
            attributes_end="<|sep|>",
            is_string='type="string"',
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
        JsonCalls(marks=("<|python_tag|>",), first="{", between=";", bare=True),
        forms=(
            CallForm(
                before='{"name": "',
                after='", "parameters": ',
                end="}",
                marks=("<|python_tag|>",),
                separator="; ",
                bare=True,
            ),
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
        JsonCalls(marks=("<tool_calls>",), closing=("</tool_calls>",), first="[{", between=","),
        forms=(
            CallForm(
                before='{"name": "',
                after='", "arguments": ',
                end="}",
                marks=("<tool_calls>",),
                opening="<tool_calls>\n",
                closing="\n</tool_calls>",
            ),
            _list_form("<tool_calls>", "</tool_calls>"),
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
        ),
    ),
    declared(
        "mistral",
        NamedCalls(call="[TOOL_CALLS]", name_end="[ARGS]", id="[CALL_ID]", or_list=True),
        reasoning=("[THINK]", "[/THINK]"),
        forms=(
            _list_form("[TOOL_CALLS]", ""),
            _named_form("[TOOL_CALLS]", "[ARGS]", "", "[TOOL_CALLS]"),
        ),
    ),
    declared(
        "nemotron",
        JsonCalls(marks=("<TOOLCALL>",), closing=("</TOOLCALL>",)),
        forms=(_list_form("<TOOLCALL>", "</TOOLCALL>"),),
    ),
    declared(
        "olmo3",
        PythonCalls(marks=("<function_calls>",), closing="</function_calls>", in_list=False),
    ),
    declared(
        "phi4_mini",
        JsonCalls(marks=("<|tool_call|>", "functools"), closing=("<|/tool_call|>",), first="[{"),
        forms=(_list_form("<|tool_call|>", "<|/tool_call|>", "functools["),),
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
            may_begin=True,
        ),
        forms=(
            CallForm(
                before="<tool_call>\n<function=",
                after=">\n",
                end="</function>\n</tool_call>",
                marks=("<tool_call>", "<function="),
                content=MappingProxyType({"type": "qwen_xml_parameter"}),
                plain=("<parameter=", "</parameter>"),
                name_in_json=False,
            ),
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
        ),
        reasoning=("<seed:think>", "</seed:think>"),
    ),
    marked("think", {}),
)
FORMATS: Mapping[str, Format] = MappingProxyType({format.name: format for format in _ROWS})
