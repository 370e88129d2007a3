"""Command R and R+: `Action:` and a block of Markdown with a list of calls.

Action:
```json
[
    {
        "tool_name": …,
        "parameters": {…}
    }
]```

The model answers in words by a call of `directly-answer`, a tool that its prompt names; it comes as
the call that it is.
"""

from __future__ import annotations

from service.replies.call_form import CallForm
from service.replies.calls import call_list
from service.replies.format import Context, marked
from service.replies.pieces import PieceWriter
from service.replies.reader import MalformedError, Reader, Steps

_ACTION = "Action:"
_FENCE = "```"


def _calls(reader: Reader, out: PieceWriter, context: Context) -> Steps:
    yield from reader.blanks()
    if not (yield from reader.literal(_FENCE + "json")):
        raise MalformedError
    yield from reader.blanks()
    yield from call_list(reader, out, name="tool_name")
    yield from reader.past(_FENCE)


def _form(template: str) -> CallForm:
    return CallForm(
        before='    {\n        "tool_name": "',
        after='",\n        "parameters": ',
        end="\n    }",
        marks=(_ACTION,),
        opening=f"{_ACTION}\n{_FENCE}json\n[\n",
        closing=f"\n]{_FENCE}",
        separator=",\n",
    )


FORMAT = marked(
    "command_r",
    {_ACTION: _calls},
    templates=((_ACTION, _FENCE + "json", "tool_name"),),
    call_form=_form,
)
