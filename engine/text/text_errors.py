"""Errors of a model's tokenizer or chat template."""

from __future__ import annotations

from engine.contract.errors import HeadraceError, InvalidRequestError


class TokenizerError(HeadraceError):
    """The model's directory has no tokenizer that can be used here. The message says what to do
    about it.
    """


class TokenizerMissingError(TokenizerError):
    """The directory has no tokenizer, so only token ids can be sent and read."""


class ChatTemplateUnavailableError(HeadraceError):
    """The model has no chat template, or one that cannot be compiled, so conversations cannot be
    converted to text.
    """


class ChatTemplateError(InvalidRequestError):
    """The model's chat template refused this conversation, or failed on it."""

    def __init__(self, message: str) -> None:
        super().__init__("conversation", message)
