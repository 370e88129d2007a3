"""Text on both sides of the engine, in the front end: torch-free, transformers-free, asyncio-free.

    text, chat ──▶ Tokenizer, ChatTemplates ──▶ token ids ──▶ engine
    engine ──▶ token ids ──▶ TextStream (IncrementalDetokenizer, StopMatcher) ──▶ text deltas

Importing this package costs `tokenizers` and `jinja2`, less than 0.1 s.
"""

from __future__ import annotations

from engine.text.chat_template import ChatTemplate, ChatTemplates, read_chat_template
from engine.text.conversation import JsonObject
from engine.text.detokenizer import IncrementalDetokenizer, incremental_detokenizer
from engine.text.stop_strings import StopMatch, StopMatcher, StopStrings
from engine.text.stream import TextStream
from engine.text.text_errors import (
    ChatTemplateError,
    ChatTemplateUnavailableError,
    TokenizerError,
    TokenizerMissingError,
)
from engine.text.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "ChatTemplateError",
    "ChatTemplateUnavailableError",
    "ChatTemplates",
    "IncrementalDetokenizer",
    "JsonObject",
    "StopMatch",
    "StopMatcher",
    "StopStrings",
    "TextStream",
    "Tokenizer",
    "TokenizerError",
    "TokenizerMissingError",
    "incremental_detokenizer",
    "read_chat_template",
]
