"""Parses a model's reply to a conversation into text, reasoning and tool calls, in the front end.

    TextStream ──▶ text, with the format's marks ──▶ ReplyParser ──▶ pieces ──▶ parts of deltas
                                                     by a Format               (`reply_text`)

Each family of models has its own marks for reasoning and tool calls. Such a format is a row of data
(`families`, `declared`). A format is used for a model if its parser reads back what the model's
chat template writes (`proof`). A parser reads the text as it arrives and passes it on as soon as
its meaning is certain. Anything that does not follow the format is text, so no character is lost:
the raw texts of the pieces add up to the reply as the model wrote it. Parsing time is linear in
the length of the text, and the amount of text that is held back is bounded (`reader`).

transformers parses replies by a `response_template` of the tokenizer. Whatever such a template
declares in plain text and JSON becomes a row of data, too (`response_template`). transformers' own
parser is not used for several reasons. The front end does not import transformers. A template's
regular expressions are untrusted code. The parser keeps and repeatedly copies the whole text,
rewrites arguments at the end of a call, and drops what it cannot parse, or raises.

Nothing here depends on the engine's work or on gRPC. Only `reply_text` depends on tokens: it counts
them, and tells the parser where special tokens are, because text that merely spells such a token is
not a mark.
"""

from __future__ import annotations

from service.replies.call_form import CallGrammar, ToolMode, ToolSchema
from service.replies.families import FORMATS
from service.replies.format import Context, Format, ReplyParser
from service.replies.model_format import ModelFormat, choose, format_option, special_marks
from service.replies.pieces import (
    Arguments,
    CallBegin,
    CallEnd,
    Mark,
    ParsedCall,
    Piece,
    Reasoning,
    Reply,
    Text,
    fold,
)
from service.replies.tool_types import ToolTypes, tool_types

__all__ = [
    "FORMATS",
    "Arguments",
    "CallBegin",
    "CallEnd",
    "CallGrammar",
    "Context",
    "Format",
    "Mark",
    "ModelFormat",
    "ParsedCall",
    "Piece",
    "Reasoning",
    "Reply",
    "ReplyParser",
    "Text",
    "ToolMode",
    "ToolSchema",
    "ToolTypes",
    "choose",
    "fold",
    "format_option",
    "special_marks",
    "tool_types",
]
