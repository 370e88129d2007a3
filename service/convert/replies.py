"""Which replies come apart, and what takes them apart."""

from __future__ import annotations

from headrace.v1 import generation_pb2

from engine.text import Tokenizer
from engine.token_ids import TokenIds
from service.replies import Context, ModelFormat, ToolTypes
from service.replies.parts import ReplyText

_PROMPT_TAIL = 16
"""So many tokens say whether a prompt ends with the opening of reasoning."""


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
    prompt: TokenIds,
    tools: ToolTypes,
    n: int,
) -> list[ReplyText]:
    """What takes the reply of each of n choices apart."""
    tail = tokenizer.decode(prompt[-_PROMPT_TAIL:], skip_special_tokens=False)
    opened = reply.format.opens_reasoning(tail)
    return [
        ReplyText(reply.format.begin(Context(tools, opened, f"{request_id}/{index}")))
        for index in range(n)
    ]
