"""Estimates how many bytes a request's message takes, as received and as parsed.

The message exists while the request is converted. In an RPC with one request, gRPC keeps it until
the end. A parsed message with many small submessages is many times as large as received. The
coefficients were measured (protobuf 7, upb).
"""

from __future__ import annotations

from sys import getsizeof

from headrace.v1 import generation_pb2

from service.admission.footprint import Footprint

_ID = 9
"""Bytes per token id of the input, in addition to the message itself."""
_LISTED_ID = 14
"""Bytes per allowed or banned id. Two lists that grow alternately waste more memory."""
_ID_ON_THE_WIRE = 3
_BIAS = 115
"""Bytes per bias, and per label."""
_MESSAGE = 480
"""Bytes per message of a chat: as parsed, as converted, and as passed to the template."""
_PART = 420
"""Bytes per content part of a message, counted in the same way."""
_CALL = 1_000
"""Bytes per tool and tool call, counted in the same way, without their JSON."""
_CHOICE = 45
_JSON = 3
"""Bytes per byte of JSON, for the copies that Python keeps: the text, its strings, and the prompt.
"""
_JSON_MARKS = (("{", 210), ("[", 165), (",", 30), (":", 150), ('"', 25))
"""Bytes per occurrence of each of these characters in JSON. They stand for objects, lists, further
values, members and strings, which exist twice: as parsed, and as passed to the template. Characters
inside strings are also counted, so this is an overestimate.
"""


def message_footprint(spec: generation_pb2.GenerationSpec) -> Footprint:
    """Return the footprint of a spec's message. Takes less time than parsing the message."""
    size = spec.ByteSize()
    sampling = spec.sampling
    ids = len(spec.tokens.ids) + len(spec.prediction.tokens.ids)
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
    """Return the field name of a spec's input."""
    return {"tokens": "tokens.ids", "text": "text.text"}.get(
        spec.WhichOneof("input") or "", "chat.messages"
    )
