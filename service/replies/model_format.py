"""Chooses a model's format: the one that its chat template is proved to write, or a named one.

    --reply-parser, tokenizer ──▶ format_option ──▶ ModelFormat, and the reason for the choice

A format from outside the tree is named as package.module:NAME, and is never chosen by a template.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.contract.errors import ConfigError
from engine.contract.plugins import is_outside, outside_object
from service.replies.call_form import CallGrammar
from service.replies.families import FORMATS
from service.replies.format import Format, marked
from service.replies.response_template import NAME, declared_format

if TYPE_CHECKING:  # the options' names come from here, and need no tokenizer
    from engine.text import Tokenizer
    from service.replies.proof import Proof, Writings

_LOG = logging.getLogger(__name__)
_OPTION = "reply_parser"
_THINK = FORMATS["think"]


@dataclass(frozen=True, slots=True)
class ModelFormat:
    """How a model writes.

    Attributes:
        format: the format.
        shown: the special tokens that the parser must see, by id.
        special: the special tokens that are marks or occur in one, in order. Text that merely
            spells such a token is not a mark.
        reasons: whether the model knows the marks of reasoning, because its template or its
            vocabulary has one.
        call_form: how the model writes calls; None if calls cannot be constrained.
        proof: in words, why this format was chosen.
    """

    format: Format
    shown: Mapping[int, str]
    special: tuple[str, ...]
    reasons: bool
    call_form: CallGrammar | None
    proof: str


FormatOfModel = Callable[["Tokenizer | None"], ModelFormat | None]
"""Returns the format of the model with a given tokenizer. None means that replies are text, as they
are without a tokenizer.
"""


def format_option(name: str) -> FormatOfModel:
    """Read the value of --reply-parser: a format's name, "response_template" (the one that the
    tokenizer declares), "auto" (the one that the chat template is proved to write, or the declared
    one, or only reasoning), "none", or package.module:NAME.

    Raises:
        ConfigError: there is no such format outside the tree. The returned function raises it if
            the tokenizer declares no format that can be read.
    """
    if name == "none":
        return lambda _: None
    wanted: Format | None = None
    if name not in ("auto", NAME):
        wanted = outside_object(_OPTION, name, Format) if is_outside(name) else FORMATS[name]

    def of_model(tokenizer: Tokenizer | None) -> ModelFormat | None:
        from service.replies.proof import Writings

        if tokenizer is None:
            return None
        writings = Writings(tokenizer.chat_templates, _special_texts(tokenizer).values())
        if name == "auto":
            return _found(tokenizer, writings)
        return _named(_declared(tokenizer) if wanted is None else wanted, tokenizer, writings)

    return of_model


def choose(writings: Writings, also: Iterable[Format] = ()) -> tuple[Format, Proof] | None:
    """Return the format that a template is proved to write, from our formats and those in `also`;
    None if no parser reads what it writes. If several do, the one that leaves the least as text is
    chosen, then the first by name.
    """
    proved = [
        (proof.rank, format.name, format, proof)
        for format in (*also, *FORMATS.values())
        if (proof := writings.prove(format)) is not None
    ]
    if not proved:
        return None
    _, _, format, proof = min(proved, key=lambda one: one[:2])
    return format, proof


def _found(tokenizer: Tokenizer, writings: Writings) -> ModelFormat | None:
    declares = declared_format(tokenizer.response_template)
    found = choose(writings, () if declares is None else (declares,))
    if found is not None:
        format, proof = found
        why = f"reads back what the chat template writes: {', '.join(proof.read)}"
        if proof.reasoning is False:
            why += "; its reasoning comes as text"
        _LOG.info("Replies are read as %s, which %s", format.name, why)
        return _of_model(format, tokenizer, proof.form, why)
    if declares is not None and not writings.has_calls:
        why = "is declared by the tokenizer; the chat template writes no tool calls to prove it by"
        _LOG.info("Replies are read as %s, which %s", declares.name, why)
        return _of_model(declares, tokenizer, declares.form, why)
    why = (
        "no parser reads back the tool calls that the chat template writes"
        if writings.has_calls
        else "the chat template writes no tool calls that could prove a parser"
    )
    thinks = _reasoning_alone(tokenizer.chat_template_source)
    _LOG.info(
        "Replies come as text%s: %s. Tool calls are not read, and a choice of tools is not "
        "offered; --reply-parser names the format if the model has one",
        "" if thinks is None else f", reasoning between {_marks(thinks)} apart",
        why,
    )
    return None if thinks is None else _of_model(thinks, tokenizer, None, why)


def _reasoning_alone(source: str) -> Format | None:
    """Return a format for reasoning without calls, if its marks occur in a template."""
    opening, closing = _THINK.reasoning.opening, _THINK.reasoning.closing
    if opening in source or closing in source:
        return _THINK
    for format in FORMATS.values():
        marks = format.reasoning
        if marks.in_prompt and marks.opening in source and marks.closing in source:
            return marked(_THINK.name, {}, reasoning=(marks.opening, marks.closing))
    return None


def _marks(format: Format) -> str:
    return f"{format.reasoning.opening} and {format.reasoning.closing}"


def _named(format: Format, tokenizer: Tokenizer, writings: Writings) -> ModelFormat:
    proof = writings.prove(format)
    why = "was chosen by --reply-parser"
    if proof is not None:
        why += f" and reads back what the chat template writes: {', '.join(proof.read)}"
        _LOG.info("Replies are read as %s, which %s", format.name, why)
    elif format.marks > {format.reasoning.opening, format.reasoning.closing}:
        why += (
            ", and does not read back the tool calls that the chat template writes"
            if writings.has_calls
            else "; the chat template writes no tool calls to prove it by"
        )
        _LOG.warning("Replies are read as %s, which %s", format.name, why)
    form = format.form if proof is None else proof.form
    return _of_model(format, tokenizer, form, why)


def _declared(tokenizer: Tokenizer) -> Format:
    found = declared_format(tokenizer.response_template)
    if found is None:
        raise ConfigError(
            _OPTION,
            f"is {NAME}, and the model's tokenizer has none that can be read; see docs/chat.md, or "
            "choose another value",
        )
    return found


def _of_model(
    format: Format, tokenizer: Tokenizer, form: CallGrammar | None, proof: str
) -> ModelFormat:
    template = tokenizer.chat_template_source
    shown = special_marks(format, tokenizer)
    special = tuple(sorted(set(shown.values())))
    if form is not None and any(mark in special for mark in form.plain):
        form = None
    return ModelFormat(
        format,
        shown,
        special,
        reasons=any(
            mark in template or tokenizer.token_id(mark) is not None
            for mark in (format.reasoning.opening, format.reasoning.closing)
            if mark
        ),
        call_form=form,
        proof=proof,
    )


def special_marks(format: Format, tokenizer: Tokenizer) -> dict[int, str]:
    """Return the special tokens that are marks of a format or occur in one, by id."""
    special = _special_texts(tokenizer)
    return {id: text for id, text in special.items() if any(text in mark for mark in format.marks)}


def _special_texts(tokenizer: Tokenizer) -> dict[int, str]:
    return {id: tokenizer.token_text(id) for id in tokenizer.special_token_ids}
