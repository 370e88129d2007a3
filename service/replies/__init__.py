"""Parses a model's reply to a conversation into text, reasoning and tool calls, in the front
end.

    TextStream ──▶ text, with the format's marks ──▶ ReplyParser ──▶ pieces
                                                     by a Format

Each family of models has its own marks for reasoning and tool calls. Each such format is one file,
registered by name, and found by what the model's chat template writes (`choose`). A parser reads
the text as it comes, and passes it on as soon as its meaning is certain. Anything that does not
follow the format is text, so no character is lost, and the pieces' raw texts together are the reply
as the model wrote it. Time is linear in the text; the text that is held back is bounded (`reader`).

Nothing here depends on the engine, on tokens or on gRPC.
"""

from __future__ import annotations

from service.replies.format import Context, Format, ReplyParser
from service.replies.pieces import (
    Arguments,
    CallBegin,
    CallEnd,
    Mark,
    Piece,
    Reasoning,
    Reply,
    Text,
    ToolCall,
    fold,
)
from service.replies.registry import FORMATS, choose, special_marks

__all__ = [
    "FORMATS",
    "Arguments",
    "CallBegin",
    "CallEnd",
    "Context",
    "Format",
    "Mark",
    "Piece",
    "Reasoning",
    "Reply",
    "ReplyParser",
    "Text",
    "ToolCall",
    "choose",
    "fold",
    "special_marks",
]
