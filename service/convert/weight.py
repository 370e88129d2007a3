"""About how many bytes a request's message takes, as it came and as it was parsed.

It is there while the request is converted, and gRPC keeps it as long as an RPC of one request is.
What protobuf makes of a message is many times as large where it has many small parts; the
coefficients are what its parts were measured to take (protobuf 7, upb).
"""

from __future__ import annotations

from sys import getsizeof

from headrace.v1 import generation_pb2

from service.footprint import Footprint

_ID = 9
"""Of a token id of the input, beside the message itself."""
_LISTED_ID = 14
"""Of an allowed or banned one: two lists that grow in turns leave more behind."""
_ID_ON_THE_WIRE = 3
_BIAS = 115
"""Of a bias, and of a label."""
_MESSAGE = 480
"""Of a chat's message: parsed, as the converter makes it, and as the template sees it."""
_PART = 420
"""Likewise of a part of its content."""
_CALL = 1_000
"""Likewise of a tool, and of a tool call, beside their JSON."""
_CHOICE = 45
_JSON = 3
"""For each byte of JSON, as Python keeps the text: itself, its strings, and the prompt's."""
_JSON_MARKS = (("{", 210), ("[", 165), (",", 30), (":", 150), ('"', 25))
"""For each of these in it: objects, lists, further values, members and strings, which are made
twice: as the text is parsed, and as the template sees them. In strings they count too much.
"""


def message_footprint(spec: generation_pb2.GenerationSpec) -> Footprint:
    """What a spec's message holds. Takes less time than parsing it took."""
    size = spec.ByteSize()
    sampling = spec.sampling
    ids = len(spec.tokens.ids)
    listed = len(sampling.allowed_token_ids) + len(sampling.banned_token_ids)
    return Footprint(
        size
        + max(size - _ID_ON_THE_WIRE * (ids + listed), 0)
        + _ID * ids
        + _LISTED_ID * listed
        + _BIAS * (len(sampling.logit_bias) + len(spec.labels))
        + _CHOICE * len(spec.structured_output.choice.choices)
        + (_chat(spec.chat) if spec.HasField("chat") else 0),
        input_field(spec),
    )


def _chat(chat: generation_pb2.ChatInput) -> int:
    calls = [call for message in chat.messages for call in message.tool_calls]
    texts = [chat.template_arguments_json]
    texts += [text for tool in chat.tools for text in (tool.parameters_json, tool.definition_json)]
    texts += [call.arguments_json for call in calls]
    texts = [text for text in texts if text]
    return (
        _MESSAGE * len(chat.messages)
        + _PART * sum(len(message.content_parts.parts) for message in chat.messages)
        + _CALL * (len(calls) + len(chat.tools))
        + _JSON * sum(map(getsizeof, texts))
        + sum(size * text.count(mark) for text in texts for mark, size in _JSON_MARKS)
    )


def input_field(spec: generation_pb2.GenerationSpec) -> str:
    """What to call a spec's input."""
    return {"tokens": "tokens.ids", "text": "text.text"}.get(
        spec.WhichOneof("input") or "", "chat.messages"
    )
