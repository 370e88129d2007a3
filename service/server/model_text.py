"""What the front end reads from a model that the engine has loaded: its tokenizer, its chat
template, and the format of its replies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from engine.contract.engine_client import ModelInfo
from engine.contract.errors import ConfigError
from engine.text import Tokenizer, TokenizerMissingError, read_chat_template
from service.config import ServiceConfig
from service.replies import ModelFormat, format_option

logger = logging.getLogger(__name__)

TokenizerLoader = Callable[[ModelInfo], Tokenizer | None]


def load_tokenizer(info: ModelInfo) -> Tokenizer | None:
    """Load the tokenizer of the loaded model; None if it has none, so that only token ids are
    served.

    Raises:
        TokenizerError: it has one that cannot be read.
    """
    try:
        return Tokenizer.load(Path(info.path), info.vocab_size)
    except TokenizerMissingError as error:
        logger.warning("%s", error)
        return None


class ModelText:
    """Reads the tokenizers and chat templates of the models that the engine loads, according to the
    options. Created when the server starts, before a model is loaded.
    """

    def __init__(self, config: ServiceConfig, load: TokenizerLoader) -> None:
        """Check the options. `load` loads a model's tokenizer.

        Raises:
            ConfigError: a format of replies from outside the tree, or the chat template's file,
                cannot be used.
        """
        self._load = load
        self._format_of = format_option(config.reply_parser)
        template = config.chat_template
        self._chat_template = None if template is None else read_chat_template(template)

    def read(self, info: ModelInfo) -> tuple[Tokenizer | None, ModelFormat | None]:
        """Read a model's tokenizer and determine how the model writes. This runs its chat template,
        which is untrusted code. It is slow and may be called from any thread.

        Raises:
            TokenizerError: the tokenizer cannot be read.
            ConfigError: there is a chat template, but no tokenizer.
        """
        tokenizer = self._load(info)
        if self._chat_template is not None:
            if tokenizer is None:
                raise ConfigError(
                    "chat_template",
                    "needs the model's tokenizer.json, which its directory lacks",
                )
            tokenizer.use_chat_template(self._chat_template)
        return tokenizer, self._format_of(tokenizer)
