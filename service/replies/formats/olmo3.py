"""OLMo 3: calls as in Python, one a line.

<function_calls>name(key="text", other=[1, 2])
name()</function_calls>
"""

from __future__ import annotations

from service.replies.format import Context, marked
from service.replies.pieces import PieceWriter
from service.replies.python_calls import python_call
from service.replies.reader import Reader, Steps

_CALLS = "<function_calls>"
_CALLS_END = "</function_calls>"


def _calls(reader: Reader, out: PieceWriter, context: Context) -> Steps:
    while True:
        yield from reader.blanks()
        yield from python_call(reader, out)
        ahead = yield from reader.behind_blanks()
        if not ahead or (ahead == "<" and (yield from reader.past(_CALLS_END))):
            return


FORMAT = marked(
    "olmo3",
    {_CALLS: _calls},
    marks=(_CALLS_END,),
    templates=((_CALLS,),),
)
