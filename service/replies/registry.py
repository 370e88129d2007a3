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

from engine.plugins import is_outside, outside_object
from engine.text import Tokenizer
from service.replies import formats
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
        shown: those of the format's marks that are special tokens of the model, by id. The parser
            must be shown them, and only these tokens are such a mark: text that spells one is not.
        special: these marks, in order.
        reasons: whether the model knows the marks of reasoning: its template or its vocabulary has
            them.
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
    """Read the value of --reply-parser: a format's name, "auto" (the one that the model's template
    writes), "none", or package.module:NAME.

    Raises:
        ConfigError: there is no such format outside the tree.
    """
    if name == "none":
        return lambda _: None
    if name == "auto":
        return lambda tokenizer: _shown(
            None if tokenizer is None else choose(tokenizer.chat_template_source), tokenizer
        )
    wanted = outside_object(_OPTION, name, Format) if is_outside(name) else FORMATS[name]
    return lambda tokenizer: _shown(wanted, tokenizer)


def _shown(format: Format | None, tokenizer: Tokenizer | None) -> ModelFormat | None:
    if format is None or tokenizer is None:
        return None
    template = tokenizer.chat_template_source
    shown = special_marks(format, tokenizer)
    closing = format.reasoning.closing
    return ModelFormat(
        format,
        shown,
        special=tuple(sorted(shown.values())),
        reasons=closing in template or tokenizer.token_id(closing) is not None,
        call_form=format.call_form(template),
    )


def special_marks(format: Format, tokenizer: Tokenizer) -> dict[int, str]:
    """Those of a format's marks that are special tokens, by id."""
    special = tokenizer.special_token_ids
    ids = {tokenizer.token_id(mark): mark for mark in format.marks}
    return {id: mark for id, mark in ids.items() if id is not None and id in special}
