"""Qwen3-coder's XML:

    <tool_call>
    <function=name>
    <parameter=key>
    value
    </parameter>
    </function>
    </tool_call>

The values have no types: see `typed_values`. A value is what stands between the marks, without the
line break behind the opening one and the one before the closing one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from service.replies.call_form import CallForm
from service.replies.calls import begin
from service.replies.format import Context, marked
from service.replies.formats.hermes import CLOSE, OPEN
from service.replies.pieces import PieceWriter
from service.replies.reader import MAX_BLANKS, MalformedError, Marks, Reader, Steps
from service.replies.typed_values import MAX_PARAMETERS, TypedValue

_FUNCTION = "<function="
_FUNCTION_END = "</function>"
_PARAMETER = "<parameter="
_PARAMETER_END = "</parameter>"
_VALUE_ENDS = Marks({_PARAMETER_END})


def _call(reader: Reader, out: PieceWriter, context: Context) -> Steps:
    """Read a call after <tool_call>."""
    yield from reader.blanks()
    if not (yield from reader.literal(_FUNCTION)):
        raise MalformedError
    yield from _function(reader, out, context)


def _function(reader: Reader, out: PieceWriter, context: Context) -> Steps:
    """Read a call after <function=, because models sometimes leave out the mark around it."""
    name = yield from reader.name(">\n")
    yield from reader.expect(">")
    if (yield from reader.behind_blanks()) not in ("<", ""):
        raise MalformedError
    begin(reader, out, name)
    types = context.tools.get(name, {})
    out.arguments("{", "")
    try:
        yield from _parameters(reader, out, types)
    except MalformedError:
        out.end(complete=False)
        raise
    out.arguments("}", reader.take())
    out.end(complete=True)
    yield from reader.blanks(MAX_BLANKS)
    yield from reader.literal(CLOSE)


def _parameters(reader: Reader, out: PieceWriter, types: Mapping[str, frozenset[str]]) -> Steps:
    keys: set[str] = set()
    while True:
        yield from reader.blanks()
        if (yield from reader.literal(_FUNCTION_END)):
            return
        if not (yield from reader.literal(_PARAMETER)):
            raise MalformedError
        key = yield from reader.name(">\n")
        yield from reader.expect(">")
        if key in keys or len(keys) >= MAX_PARAMETERS:
            raise MalformedError
        out.arguments(("," if keys else "") + json.dumps(key, ensure_ascii=False) + ":", "")
        keys.add(key)
        yield from reader.literal("\n")
        value = TypedValue(out, types.get(key, frozenset()))
        yield from value.read(reader, _VALUE_ENDS, trimmed="\n")


def _form(template: str) -> CallForm:
    return CallForm(
        before=f"{OPEN}\n{_FUNCTION}",
        after=">\n",
        end=f"{_FUNCTION_END}\n{CLOSE}",
        marks=(OPEN, _FUNCTION),
        arguments="qwen_xml_parameter",
        plain=(_PARAMETER, _PARAMETER_END),
        name_in_json=False,
    )


FORMAT = marked(
    "qwen3_coder",
    {OPEN: _call, _FUNCTION: _function},
    marks=(CLOSE, _FUNCTION_END, _PARAMETER, _PARAMETER_END),
    templates=((OPEN, _FUNCTION),),
    call_form=_form,
)
