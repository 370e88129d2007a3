"""Tells the caller why a server lacks a capability that depends on its model and its options. The
text names what is missing, and what the operator may do about it, or says that no option provides
it.

    tokenizer, format of replies ──▶ why_lacking ──▶ incoming (required_capabilities)
    --reply-parser                                ──▶ forms (the field that asks)

`INSTEAD` says what the caller may do instead.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.text import Tokenizer
from service.replies import ModelFormat

_NO_TOKENIZER = "the model's directory has no tokenizer.json, which its operator may add"
_NO_TEMPLATE = (
    "the model's directory has no chat template (chat_template.jinja, or a member of "
    "tokenizer_config.json), which its operator may add"
)
_NONE = (
    "the server was told to take no replies apart (--reply-parser none); its operator may start it "
    "with --reply-parser auto, or with the format that the model writes"
)
_UNKNOWN = (
    "no parser here reads back what the model's chat template writes; its operator may name the "
    "format that the model writes, such as --reply-parser hermes"
)

_LAID_OUT = (
    "send token ids (or text, where the model card's input.text says so), laid out as the model "
    "expects"
)
INSTEAD = {
    "chat": _LAID_OUT,
    "tools": _LAID_OUT,
    "content_parts": _LAID_OUT,
    "adapters": (
        "it has none, which its operator adds with --adapter or --adapter-root; leave adapter out"
    ),
    "priorities": (
        "its scheduler heeds none, which its operator changes with --scheduler fair; leave "
        "scheduling.priority out"
    ),
    "structured_output": "leave structured_output out",
    "structural_tag": "leave structured_output out",
    "typed_replies": "do not require it, and read each reply as text",
    "tool_choice": "leave chat.tool_choice out",
    "reasoning_budget": "leave stop.max_reasoning_tokens out",
}
"""What a caller may do instead if this server's configuration lacks a capability."""


def why_lacking(
    tokenizer: Tokenizer | None, reply: ModelFormat | None, option: str
) -> Mapping[str, str]:
    """Return the reasons by capability name, for missing capabilities only.

    Args:
        tokenizer: the model's tokenizer, or None if it has none.
        reply: the format of its replies, or None if they are plain text.
        option: the value of --reply-parser.
    """
    if tokenizer is None:
        names = ("structured_output", "structural_tag", *_OF_CHAT, *_OF_REPLIES)
        return dict.fromkeys(names, _NO_TOKENIZER)
    if not tokenizer.has_chat_template:
        return dict.fromkeys((*_OF_CHAT, *_OF_REPLIES), _NO_TEMPLATE)
    if reply is None:
        return dict.fromkeys(_OF_REPLIES, _NONE if option == "none" else _UNKNOWN)
    why = {}
    if reply.call_form is None:
        why["tool_choice"] = _no_calls(reply)
    if not reply.reasons:
        why["reasoning_budget"] = _no_reasoning(reply)
    return why


_OF_CHAT = ("chat", "tools", "content_parts")
_OF_REPLIES = ("typed_replies", "tool_choice", "reasoning_budget")


def _no_calls(reply: ModelFormat) -> str:
    """Return why tool calls cannot be constrained although the format of replies is known."""
    format = reply.format
    if format.marks <= {format.reasoning.opening, format.reasoning.closing}:
        return (
            f"replies are read as {format.name}, which has no tool calls ({reply.proof}); if the "
            "model writes them, its operator may name their format, such as --reply-parser hermes"
        )
    plain = [mark for form in format.forms for mark in form.plain]
    if not format.forms:
        return (
            f"calls in the model's format ({format.name}) cannot be held to a choice, and no "
            "option changes that"
        )
    barred = ", ".join(mark for mark in plain if mark in reply.special)
    if not barred:
        return (
            f"the model's chat template writes calls with other marks than those in which the "
            f"format {format.name} can be held, and no option changes that"
        )
    return (
        f"the model's vocabulary has {barred} as special tokens, and in its format ({format.name}) "
        "they are held as text alone; no option changes that"
    )


def _no_reasoning(reply: ModelFormat) -> str:
    marks = reply.format.reasoning
    named = " and ".join(mark for mark in (marks.opening, marks.closing) if mark)
    if not named:
        return f"replies in the model's format ({reply.format.name}) have no marks of reasoning"
    return (
        "neither the model's chat template nor its vocabulary has the marks of reasoning "
        f"({named} in the format {reply.format.name}), and no option adds them"
    )
