"""Which replies come apart, and what takes them apart."""

from __future__ import annotations

from headrace.v1 import generation_pb2

from engine.request import GenerationRequest
from engine.text import Tokenizer
from service.replies import Context, ModelFormat, ToolTypes
from service.replies.parts import ReplyText

PROMPT_TAIL = 16
"""So many of a prompt's last tokens say how its output begins: in the middle of a character, or of
reasoning.
"""


def comes_apart(spec: generation_pb2.GenerationSpec) -> bool:
    """Whether reasoning and tool calls come apart from the text, if the model marks them. A form
    leaves no room for marks, and with `echo` the prompt and the output are one text.
    """
    output = spec.output
    return (
        spec.HasField("chat")
        and not spec.HasField("structured_output")
        and not (output.raw_text or output.omit_text or output.echo)
    )


def reply_texts(
    reply: ModelFormat,
    tokenizer: Tokenizer,
    request_id: str,
    request: GenerationRequest,
    tools: ToolTypes,
) -> list[ReplyText]:
    """What takes the reply of each of the request's choices apart."""
    tail = tokenizer.decode(request.prompt[-PROMPT_TAIL:], skip_special_tokens=False)
    opened = reply.format.opens_reasoning(tail)
    special = frozenset(reply.special)
    return [
        ReplyText(
            reply.format.begin(Context(tools, opened, f"{request_id}/{index}", special=special))
        )
        for index in range(request.n)
    ]
