"""The model's tokenizer, as the front end uses it: text to token ids, token ids to text and bytes,
chats to text.

Prompts pass through `encode` (or `apply_chat_template`, then `encode` with
add_special_tokens=False, because a template writes the special tokens itself). Output passes
through `IncrementalDetokenizer`, which uses the tables built here; `decode` is for complete texts.
`token_text` and `token_bytes` describe single tokens, for log-probabilities.

Thread-safe: the library's tokenizer is not changed after loading. The tables are filled on first
use, and their entries do not depend on the order in which that happens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from engine.contract.errors import InvalidRequestError
from engine.text.chat_template import ChatTemplates
from engine.text.files import read_tokenizer_files
from engine.text.token_bytes import PieceRules, encode_utf8, read_decoder

_FEW_IDS = 256
"""The most ids that are decoded with the interpreter's lock held. Decoding them takes less time
than waiting for another thread to release the lock.
"""


class PieceTable(dict[int, bytes]):
    """Token id → the bytes that it adds to the text; filled on first use, and never larger than the
    vocabulary.

    Ids without a token add nothing, and neither do special tokens that are skipped.
    """

    def __init__(self, backend: Backend, rules: PieceRules, skipped: frozenset[int]) -> None:
        super().__init__()
        self._backend = backend
        self._rules = rules
        self._skipped = skipped

    def __missing__(self, token_id: int) -> bytes:
        name = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if name is None:
            return b""
        piece = b"" if token_id in self._skipped else self._rules.piece(name)
        self[token_id] = piece
        return piece


class Tokenizer:
    """A model's tokenizer; see `load`.

    Attributes:
        response_template: how replies are marked, as declared in the tokenizer's files.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        response_template: object = None,
        vocab_size: int | None = None,
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Wrap a tokenizer of the `tokenizers` library, which must not be changed any more.

        Args:
            backend: the tokenizer.
            special_tokens: the special tokens by name, such as {"eos_token": "</s>"}.
            chat_templates: Jinja sources by name.
            response_template: how replies are marked, as the tokenizer declares it.
            vocab_size: the model's vocabulary size; token ids are below it. The default is the
                tokenizer's.
            clock: returns the current time, for chat templates that print the date.
        """
        self._backend = backend
        self.response_template = response_template
        self._clock = clock
        self._special_tokens = dict(special_tokens or {})
        self._templates = ChatTemplates(
            dict(chat_templates or {}), self._special_tokens, clock=clock
        )
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        highest = max(added, default=-1) + 1
        self._vocab_size = vocab_size or max(
            backend.get_vocab_size(with_added_tokens=True), highest
        )
        self._longest_token = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)
        decoder: Any = backend.decoder  # its pickled state is its part of tokenizer.json
        self._rules = read_decoder(None if decoder is None else json.loads(decoder.__getstate__()))
        self._tables: dict[frozenset[int], PieceTable] = {}

    @classmethod
    def load(
        cls,
        directory: Path,
        vocab_size: int | None = None,
        *,
        clock: Callable[[], datetime] = datetime.now,
    ) -> Tokenizer:
        """Load the tokenizer of a local model directory, as transformers' `PreTrainedTokenizerFast`
        would. `clock`: returns the current time, for chat templates that print the date.

        Raises:
            TokenizerMissingError: there is no tokenizer.json.
            TokenizerError: a file cannot be read.
        """
        files = read_tokenizer_files(Path(directory))
        return cls(
            files.backend,
            special_tokens=files.special_tokens,
            chat_templates=files.chat_templates,
            response_template=files.response_template,
            vocab_size=vocab_size,
            clock=clock,
        )

    @property
    def vocab_size(self) -> int:
        """The upper limit of token ids: the model's size if it was given, which may exceed the
        tokenizer's.
        """
        return self._vocab_size

    @property
    def longest_token(self) -> int:
        """The length of the longest token's name, in characters: no token of a text stands for more
        characters than that.
        """
        return self._longest_token

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """The named special tokens, such as {"bos_token": "<s>"}."""
        return dict(self._special_tokens)

    @property
    def special_token_ids(self) -> frozenset[int]:
        """The ids that `skip_special_tokens` leaves out."""
        return self._special_ids

    @property
    def bos_token(self) -> str | None:
        """The begin-of-sequence token, if there is one."""
        return self._special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """The end-of-sequence token, if there is one."""
        return self._special_tokens.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        """The padding token, if there is one."""
        return self._special_tokens.get("pad_token")

    @property
    def unk_token(self) -> str | None:
        """The token for text that the vocabulary lacks, if there is one."""
        return self._special_tokens.get("unk_token")

    def token_id(self, token: str) -> int | None:
        """Return the id of a token, by its name in the vocabulary."""
        found = self._backend.token_to_id(token)
        return None if found is None else int(found)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Text that looks like a special token becomes that token.

        Args:
            text: any text.
            add_special_tokens: whether the tokenizer adds its special tokens, such as a
                begin-of-sequence token.

        Raises:
            InvalidRequestError: the text has lone surrogates.
        """
        ids: list[int] = self._encoding(text, add_special_tokens).ids
        return ids

    def count(self, text: str) -> int:
        """Return the number of tokens of a text, without those that the tokenizer adds.

        Raises:
            InvalidRequestError: the text has lone surrogates.
        """
        return len(self._encoding(text, add_special_tokens=False))

    def _encoding(self, text: str, add_special_tokens: bool) -> Any:
        try:
            # As a batch of one: `encode` holds the interpreter's lock all the while, and works out
            # where in the text each token was.
            [encoding] = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        except (UnicodeError, TypeError) as error:
            raise InvalidRequestError("text", "is not valid Unicode") from error
        return encoding

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids, without cleaning up blanks. Ids without a token add
        nothing.

        Raises:
            InvalidRequestError: an id is negative or above 32 bits.
        """
        try:
            if len(ids) <= _FEW_IDS:
                return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))
            # As a batch of one: `decode` holds the interpreter's lock all the while.
            [text] = self._backend.decode_batch(
                [list(ids)], skip_special_tokens=skip_special_tokens
            )
        except OverflowError as error:
            raise InvalidRequestError(
                "token_ids", f"must be between 0 and {self._vocab_size - 1}"
            ) from error
        return str(text)

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, with U+FFFD for an incomplete character. So the joined
        texts of several tokens are not always their text as a whole.
        """
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, which may be an incomplete character. The joined bytes of
        several tokens are their text in UTF-8.

        A special token has the bytes of its name. An id of the model that the tokenizer lacks has
        none. A blank that the tokenizer drops at the beginning of a text is included
        (▁he → b" he").

        Raises:
            InvalidRequestError: the id is outside the model's vocabulary.
        """
        if not 0 <= token_id < self._vocab_size:
            raise InvalidRequestError(
                "token_ids",
                f"{token_id} is not a token id; it must be between 0 and {self._vocab_size - 1}",
            )
        if token_id in self._special_ids:
            return encode_utf8(self._backend.id_to_token(token_id) or "")
        return self.pieces(skip_special_tokens=False)[token_id]

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template for ordinary conversations."""
        return self._templates.available

    @property
    def chat_template_source(self) -> str:
        """The Jinja sources of its chat templates, concatenated."""
        return "\n".join(self._templates.sources)

    def use_chat_template(self, source: str) -> None:
        """Use only this template for conversations, instead of the model's own."""
        self._templates = ChatTemplates(
            {"default": source}, self._special_tokens, clock=self._clock
        )

    @property
    def chat_templates(self) -> ChatTemplates:
        """The chat templates, to find out what they do."""
        return self._templates

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        template_arguments: Mapping[str, object] | None = None,
    ) -> str:
        """Convert a conversation to text; encode the result with add_special_tokens=False. See
        `ChatTemplates.render`.
        """
        return self._templates.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_arguments=template_arguments,
        )

    # For the detokeniser.

    @property
    def piece_rules(self) -> PieceRules:
        """How tokens become bytes."""
        return self._rules

    def pieces(
        self, *, skip_special_tokens: bool, shown: frozenset[int] = frozenset()
    ) -> PieceTable:
        """Return the table from token id to bytes in the text. Their concatenation is the text if
        `piece_rules.concatenates`. `shown`: special tokens that are not skipped. There is a table
        for each such set, so a process should use only one or a few.
        """
        skipped = self._special_ids - shown if skip_special_tokens else frozenset[int]()
        table = self._tables.get(skipped)
        if table is None:
            table = self._tables.setdefault(
                skipped, PieceTable(self._backend, self._rules, skipped)
            )
        return table

    def first_piece(self, token_id: int) -> bytes:
        """Return the bytes of a token if it is the first in its text."""
        name = self._backend.id_to_token(token_id)
        return b"" if name is None else self._rules.first_piece(name)
