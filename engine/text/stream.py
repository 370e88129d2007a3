"""Converts the token ids of one output to the text that is sent: detokenizer, then stop strings.

    token ids ──▶ IncrementalDetokenizer ──▶ StopMatcher ──▶ text
                  holds parts of characters   holds what may begin a stop string

The service and the offline API keep one `TextStream` for every choice of a request. They call
`push` with the ids of every step (with `ends_with_stop_token=True` if the last id is a stop or
end-of-sequence id that ended the output). At the end they call `finish`, whatever ended the output.
Once there is a `stop`, only the output's first `stop.num_tokens` ids count, and the engine is told
`finish(request, stop.num_tokens)`. Later pushes return nothing.

The text of a stop or end-of-sequence id is left out unless `include_stop` is set. A special token
(most end-of-sequence tokens are) also needs `skip_special_tokens=False`. The first option says that
the ending belongs to the text, the second that special tokens do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from engine.text.detokenizer import incremental_detokenizer
from engine.text.stop_strings import StopMatch, StopMatcher, StopStrings
from engine.text.tokenizer import Tokenizer

_NONE: Mapping[int, str] = MappingProxyType({})


class TextStream:
    """Builds the text of one output. Not thread-safe.

    Attributes:
        num_tokens: how many tokens belong to the output so far, including the one that ended it.
        shown_at: the offsets of `shown` tokens in the output's text, in characters. They are added
            with that text, or earlier if the text is held back. The reader removes them.
        stop: the stop string that ended the output, if one did.
    """

    __slots__ = (
        "_detokenizer",
        "_include_stop",
        "_initial_text",
        "_matcher",
        "_num_chars",
        "_over",
        "_shown",
        "num_tokens",
        "shown_at",
        "stop",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop_strings: StopStrings | Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        prompt_tail: Sequence[int] = (),
        shown: Mapping[int, str] = _NONE,
        initial_text: str = "",
    ) -> None:
        """Begin an output.

        Args:
            tokenizer: the model's tokenizer.
            stop_strings: strings that end the output where they first occur; see `StopMatcher`.
            include_stop: whether the text that ended the output is part of it.
            min_tokens: stop strings that complete with fewer output tokens are ignored.
            skip_special_tokens: whether special tokens are left out of the text.
            prompt_tail: the prompt's ids, or the last of them; see `incremental_detokenizer`.
            shown: special tokens that are not left out, with their texts.
            initial_text: text that comes before the first text (the prompt's, for echo). It is not
                searched for stop strings.
        """
        self._detokenizer = incremental_detokenizer(
            tokenizer,
            skip_special_tokens=skip_special_tokens,
            prompt_tail=prompt_tail,
            shown=frozenset(shown),
        )
        self._shown = shown
        self._num_chars = 0
        self.shown_at: list[int] = []
        self._matcher = (
            StopMatcher(stop_strings, include_stop=include_stop, min_tokens=min_tokens)
            if stop_strings
            else None
        )
        self._include_stop = include_stop
        self._initial_text = initial_text
        self._over = False
        self.num_tokens = 0
        self.stop: StopMatch | None = None

    def push(self, token_ids: Sequence[int], *, ends_with_stop_token: bool = False) -> str:
        """Add the output's next ids.

        Args:
            token_ids: the ids, in order; may be empty.
            ends_with_stop_token: whether the last of them is the stop or end-of-sequence id that
                ended the output.

        Returns:
            The new text; may be empty, and may belong to earlier tokens.
        """
        if self._over:
            return ""
        visible = token_ids
        if ends_with_stop_token and not self._include_stop:
            visible = token_ids[:-1]
        text, self._initial_text = self._initial_text, ""
        if self._matcher is None:
            self.num_tokens += len(token_ids)
            return text + self._read(visible)
        for index, token_id in enumerate(visible, 1):
            released, stop = self._matcher.push(self._read((token_id,)), self.num_tokens + index)
            text += released
            if stop is not None:
                self._over = True
                self.stop = stop
                self.num_tokens = stop.num_tokens
                return text
        self.num_tokens += len(token_ids)
        return text

    def _read(self, token_ids: Sequence[int]) -> str:
        """Return the text of these ids, and the offsets of shown tokens in it."""
        if not self._shown:
            return self._detokenizer.push(token_ids)
        if len(token_ids) != 1:
            return "".join([self._read((token_id,)) for token_id in token_ids])
        text = self._detokenizer.push(token_ids)
        self._num_chars += len(text)
        own = self._shown.get(token_ids[0])
        if own is not None and text.endswith(own):
            self.shown_at.append(self._num_chars - len(own))
        return text

    def finish(self) -> str:
        """End the output, and return what was held back: nothing after a stop string, or when
        called again.
        """
        text, self._initial_text = self._initial_text, ""
        if self._over:
            return text
        self._over = True
        rest = self._detokenizer.flush()
        if self._matcher is None:
            return text + rest
        released, self.stop = self._matcher.push(rest, self.num_tokens)
        return text + released + ("" if self.stop else self._matcher.flush())
