"""Which replies are split into text, reasoning and tool calls, and the parsers that split them."""

from __future__ import annotations

from headrace.v1 import generation_pb2

from service.replies import Context, ModelFormat, ToolTypes
from service.replies.reply_text import ReplyText

PROMPT_TAIL = 16
"""The number of tokens at the end of a prompt that determine how its output begins: in the middle
of a character, or of reasoning.
"""


def comes_apart(spec: generation_pb2.GenerationSpec) -> bool:
    """Return whether reasoning and tool calls are separated from the text, if the model marks them.
    With `echo` the prompt and the output are one text.
    """
    output = spec.output
    return spec.HasField("chat") and not (output.raw_text or output.omit_text or output.echo)


def reply_texts(
    reply: ModelFormat,
    prompt_tail: str,
    request_id: str,
    tools: ToolTypes,
    *,
    n: int,
    calls: bool,
) -> list[ReplyText]:
    """Return a parser for the reply of each of a request's n choices. `calls`: whether the replies
    may contain tool calls.
    """
    opened = reply.format.opens_reasoning(prompt_tail)
    special = frozenset(reply.special)
    contexts = (
        Context(tools, opened, f"{request_id}/{index}", special=special, calls=calls)
        for index in range(n)
    )
    return [ReplyText(reply.format.begin(context)) for context in contexts]
