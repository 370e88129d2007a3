"""Parses a model's reply to a conversation into text, reasoning and tool calls, in the front
end.

    TextStream ──▶ text, with the format's marks ──▶ ReplyParser ──▶ pieces ──▶ parts of deltas
                                                     by a Format               (`reply_text`)

Each family of models has its own marks for reasoning and tool calls. Such a format is a row of data
(`families`, `declared`), and it is a model's if its parser reads back what the model's chat
template writes (`proof`). A parser reads the text as it comes, and passes it on as soon as its
meaning is certain. Anything that does not follow the format is text, so no character is lost, and
the pieces' raw texts together are the reply as the model wrote it. Time is linear in the text; the
text that is held back is bounded (`reader`).

transformers parses replies by a `response_template` of the tokenizer. What such a template declares
by plain text and JSON becomes such a row (`response_template`). transformers' own parser is not
used: the front end does not import it, a template's regular expressions are a stranger's, the whole
text is kept and copied again and again, arguments are written anew at a call's end, and what cannot
be parsed is dropped or raises.

Nothing here depends on the engine's work or on gRPC, and only `reply_text` on tokens: it counts
them, and tells the parser where special tokens stand, because text that spells such a token is no
mark.
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
