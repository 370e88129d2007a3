"""The formats by name, and how to find the one that a model's chat template writes.

A new format is a file in `service.replies.formats`; nothing else lists it. A format from outside
the tree is named as package.module:NAME, and is never found by a template.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from engine.errors import ConfigError
from engine.plugins import is_outside, outside_object
from engine.text import Tokenizer
from service.replies import declared, formats
from service.replies.call_form import CallForm
from service.replies.format import Format

_OPTION = "reply_parser"


def _found() -> dict[str, Format]:
    """The formats of the package's modules, in the order of their names."""
    names = sorted(module.name for module in pkgutil.iter_modules(formats.__path__))
    return {name: importlib.import_module(f"{formats.__name__}.{name}").FORMAT for name in names}


FORMATS: Mapping[str, Format] = MappingProxyType(_found())


def choose(template: str) -> Format | None:
    """The format of a chat template's source; None: all is text.

    A template may match several formats, because some share marks. The set that says most decides:
    the one with the most texts, then with the longest ones, then the first format by name.
    """
    matching = [
        (-len(texts), -sum(map(len, texts)), format.name)
        for format in FORMATS.values()
        for texts in format.templates
        if all(text in template for text in texts)
    ]
    return FORMATS[min(matching)[-1]] if matching else None


@dataclass(frozen=True, slots=True)
class ModelFormat:
    """How a model writes.

    Attributes:
        format: its format.
        shown: the special tokens that the parser must be shown, by id.
        special: the marks that are special tokens, in order. Only that token is such a mark: text
            that spells it is not.
        reasons: whether the model knows the marks of reasoning: its template or its vocabulary has
            one.
        call_form: how it writes calls; None: it has none.
    """

    format: Format
    shown: Mapping[int, str]
    special: tuple[str, ...]
    reasons: bool
    call_form: CallForm | None


FormatOfModel = Callable[[Tokenizer | None], ModelFormat | None]
"""The format of the model with this tokenizer. None: replies are text, as they are without a
tokenizer.
"""


def format_option(name: str) -> FormatOfModel:
    """Read the value of --reply-parser: a format's name, "response_template" (the one that the
    tokenizer declares), "auto" (the one that the chat template writes, or, if we know none of its
    calls, the declared one), "none", or package.module:NAME.

    Raises:
        ConfigError: there is no such format outside the tree. What is returned raises it where the
            tokenizer declares no format that can be read.
    """
    if name == "none":
        return lambda _: None
    if name == "auto":
        return lambda tokenizer: _shown(_found_by(tokenizer), tokenizer)
    if name == declared.NAME:
        return lambda tokenizer: _shown(_declared_by(tokenizer), tokenizer)
    wanted = outside_object(_OPTION, name, Format) if is_outside(name) else FORMATS[name]
    return lambda tokenizer: _shown(wanted, tokenizer)


def _found_by(tokenizer: Tokenizer | None) -> Format | None:
    if tokenizer is None:
        return None
    found = choose(tokenizer.chat_template_source)
    if found is None or found is FORMATS["think"]:
        return declared.declared_format(tokenizer.response_template) or found
    return found


def _declared_by(tokenizer: Tokenizer | None) -> Format | None:
    if tokenizer is None:
        return None
    found = declared.declared_format(tokenizer.response_template)
    if found is None:
        raise ConfigError(
            _OPTION,
            f"is {declared.NAME}, and the model's tokenizer has none that can be read; see "
            "docs/chat.md, or choose another value",
        )
    return found


def _shown(format: Format | None, tokenizer: Tokenizer | None) -> ModelFormat | None:
    if format is None or tokenizer is None:
        return None
    template = tokenizer.chat_template_source
    shown = special_marks(format, tokenizer)
    special = tuple(sorted(format.marks.intersection(shown.values())))
    form = format.call_form(template)
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
    )


def special_marks(format: Format, tokenizer: Tokenizer) -> dict[int, str]:
    """The special tokens that are marks of a format, or parts of one, by id."""
    special = {id: tokenizer.token_text(id) for id in tokenizer.special_token_ids}
    return {id: text for id, text in special.items() if any(text in mark for mark in format.marks)}
