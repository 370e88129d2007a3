"""LFM2: a list of calls as in Python, or of JSON objects.

<|tool_call_start|>[name(key='text', other=[1, 2]), name()]<|tool_call_end|>
"""

from __future__ import annotations

from service.replies.calls import call_items
from service.replies.format import Context, marked
from service.replies.pieces import PieceWriter
from service.replies.python_calls import python_call
from service.replies.reader import Reader, Steps

_CALLS = "<|tool_call_start|>"
_CALLS_END = "<|tool_call_end|>"


def _calls(reader: Reader, out: PieceWriter, context: Context) -> Steps:
    yield from reader.blanks()
    yield from reader.expect("[")
    yield from reader.blanks()
    if (yield from reader.peek()) in ("{", "]"):
        yield from call_items(reader, out)
    else:
        yield from _python(reader, out)
    yield from reader.past(_CALLS_END)


def _python(reader: Reader, out: PieceWriter) -> Steps:
    while True:
        yield from python_call(reader, out)
        yield from reader.blanks()
        if not (yield from reader.peek()) or (yield from reader.expect(",]")) == "]":
            return
        yield from reader.blanks()


FORMAT = marked(
    "lfm2",
    {_CALLS: _calls},
    marks=(_CALLS_END,),
    templates=((_CALLS,), ("<|tool_list_start|>",)),
)
