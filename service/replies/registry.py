"""The formats by name, and how to find the one that a model's chat template writes.

A new format is a file with a `Format`, a row in FORMATS and one in _MARKS.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from engine.text import Tokenizer
from service.replies.deepseek import DEEPSEEK
from service.replies.format import Format
from service.replies.harmony import HARMONY
from service.replies.hermes import HERMES
from service.replies.llama import LLAMA3_JSON
from service.replies.mistral import MISTRAL
from service.replies.qwen_coder import QWEN3_CODER
from service.replies.thinking import THINK

FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        format.name: format
        for format in (HERMES, LLAMA3_JSON, MISTRAL, QWEN3_CODER, DEEPSEEK, HARMONY, THINK)
    }
)


@dataclass(frozen=True, slots=True)
class _Row:
    """A template that contains all of the first texts and none of the second ones has this
    format.
    """

    format: Format
    all_of: tuple[str, ...]
    none_of: tuple[str, ...] = ()


_MARKS = (
    _Row(HARMONY, ("<|channel|>", "<|message|>")),
    _Row(DEEPSEEK, ("<｜tool▁call▁begin｜>",)),
    _Row(MISTRAL, ("[TOOL_CALLS]",)),
    _Row(QWEN3_CODER, ("<tool_call>", "<function=")),
    _Row(HERMES, ("<tool_call>", "arguments"), ("<arg_key>",)),  # GLM's calls are others
    _Row(LLAMA3_JSON, ("<|python_tag|>",)),
    _Row(LLAMA3_JSON, ("<|start_header_id|>", '"parameters"')),
    _Row(THINK, ("</think>",)),
    _Row(THINK, ("<think>",)),
)
"""The first row that matches is used."""


def choose(template: str) -> Format | None:
    """The format of a chat template's source; None: all is text."""
    for row in _MARKS:
        if all(mark in template for mark in row.all_of) and not any(
            mark in template for mark in row.none_of
        ):
            return row.format
    return None


@dataclass(frozen=True, slots=True)
class ModelFormat:
    """How a model writes, and which of its special tokens a parser must be shown."""

    format: Format
    shown: frozenset[int]


def format_of(name: str, tokenizer: Tokenizer | None) -> ModelFormat | None:
    """The format of this name; of "auto", the one that the model's template writes. None: replies
    are text, as they are where `name` is "none" or the model has no tokenizer.
    """
    if tokenizer is None or name == "none":
        return None
    format = choose(tokenizer.chat_template_source) if name == "auto" else FORMATS[name]
    return None if format is None else ModelFormat(format, special_marks(format, tokenizer))


def special_marks(format: Format, tokenizer: Tokenizer) -> frozenset[int]:
    """The special tokens, by their text, that a parser of this format must see."""
    special = tokenizer.special_token_ids
    ids = (tokenizer.token_id(mark) for mark in format.marks)
    return frozenset(id for id in ids if id is not None and id in special)
