"""About how many bytes a request's message takes, as it came and as it was parsed.

It is there while the request is converted, and gRPC keeps it as long as an RPC of one request is.
What protobuf makes of a message is many times as large where it has many small parts; the
coefficients are what its parts were measured to take (protobuf 7, upb).
"""

from __future__ import annotations

from headrace.v1 import generation_pb2

from service.footprint import Footprint

_ID = 9
"""Of a token id of the input, beside the message itself."""
_LISTED_ID = 14
"""Of an allowed or banned one: two lists that grow in turns leave more behind."""
_ID_ON_THE_WIRE = 3
_MESSAGE = 115
"""Of a chat's message, of a bias and of a label."""
_CALL = 600
"""Of a tool, and of a tool call."""
_CHOICE = 45
_JSON = 3
"""For each byte of JSON: of tools, tool calls and template arguments."""
_JSON_VALUE = 250
"""For each value there, which is made twice: as it is parsed, and as the template sees it."""


def message_footprint(spec: generation_pb2.GenerationSpec) -> Footprint:
    """What a spec's message holds. Takes less time than parsing it took."""
    size = spec.ByteSize()
    sampling, chat = spec.sampling, spec.chat
    ids = len(spec.tokens.ids)
    listed = len(sampling.allowed_token_ids) + len(sampling.banned_token_ids)
    texts = [chat.template_arguments_json]
    texts += [text for tool in chat.tools for text in (tool.parameters_json, tool.definition_json)]
    calls = [call for message in chat.messages for call in message.tool_calls]
    texts += [call.arguments_json for call in calls]
    values = sum(text.count(mark) for text in texts for mark in ",[{")
    return Footprint(
        size
        + max(size - _ID_ON_THE_WIRE * (ids + listed), 0)
        + _ID * ids
        + _LISTED_ID * listed
        + _MESSAGE * (len(chat.messages) + len(sampling.logit_bias) + len(spec.labels))
        + _CHOICE * len(spec.structured_output.choice.choices)
        + _CALL * (len(calls) + len(chat.tools))
        + _JSON * sum(map(len, texts))
        + _JSON_VALUE * values,
        input_field(spec),
    )


def input_field(spec: generation_pb2.GenerationSpec) -> str:
    """What to call a spec's input."""
    return {"tokens": "tokens.ids", "text": "text.text"}.get(
        spec.WhichOneof("input") or "", "chat.messages"
    )
