"""A model's reply to a conversation becomes text, reasoning and tool calls, in the front end.

    TextStream ──▶ text, with the format's marks ──▶ ReplyParser ──▶ pieces
                                                     by a Format

A family of models has its own marks for what it thinks and calls. Each such format is one file,
registered by name, and found by what the model's chat template writes (`choose`). A parser takes
the text as it comes and hands it on as soon as it is certain what it is. What is not what a format
would have there is text: no character is lost, and the pieces' raw texts are the reply as the model
wrote it. Time is linear in the text, whatever it is; what is held back is bounded (`reader`).

Nothing here knows of the engine, of tokens or of gRPC.
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
