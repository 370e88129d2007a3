"""DeepSeek's marks. V3 and R1 have the arguments in a block of Markdown, V3.1 as they are:

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>name
```json
{…}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

from service.replies.call_form import CallForm
from service.replies.calls import arguments, begin
from service.replies.format import Context, marked
from service.replies.pieces import PieceWriter
from service.replies.reader import MalformedError, Reader, Steps

_CALLS = "<｜tool▁calls▁begin｜>"
_CALLS_END = "<｜tool▁calls▁end｜>"
_CALL = "<｜tool▁call▁begin｜>"
_CALL_END = "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_FENCE = "```"


def _calls(reader: Reader, out: PieceWriter, context: Context) -> Steps:
    """Read the list of calls, after its opening mark."""
    yield from reader.blanks()
    if (yield from reader.literal(_CALL)):
        yield from _call(reader, out, context)
    elif not (yield from reader.literal(_CALLS_END)):
        raise MalformedError


def _call(reader: Reader, out: PieceWriter, context: Context) -> Steps:
    """Read a call, after its opening mark, and the calls after it."""
    while True:
        name = yield from reader.name("<")
        if not (yield from reader.literal(_SEPARATOR)):
            raise MalformedError
        yield from reader.blanks()
        fenced = (yield from reader.peek()) != "{"
        if fenced:
            name = yield from reader.name("`")
            if not (yield from reader.literal(_FENCE + "json")):
                raise MalformedError
            yield from reader.blanks()
            if (yield from reader.peek()) != "{":
                raise MalformedError
        begin(reader, out, name)
        yield from arguments(reader, out)
        if fenced:
            yield from reader.past(_FENCE)
        yield from reader.past(_CALL_END)
        if not (yield from reader.past(_CALL)):
            yield from reader.past(_CALLS_END)
            return


def _form(template: str) -> CallForm:
    fenced = _FENCE + "json" in template
    return CallForm(
        before=f"{_CALL}function{_SEPARATOR}" if fenced else _CALL,
        after=f"\n{_FENCE}json\n" if fenced else _SEPARATOR,
        end=f"\n{_FENCE}{_CALL_END}" if fenced else _CALL_END,
        marks=(_CALLS, _CALL),
        opening=_CALLS,
        closing=_CALLS_END,
        separator="\n" if fenced else "",
        name_in_json=False,
    )


FORMAT = marked(
    "deepseek",
    {_CALLS: _calls, _CALL: _call},
    marks=(_CALLS_END, _CALL_END, _SEPARATOR),
    templates=((_CALL,),),
    call_form=_form,
)
