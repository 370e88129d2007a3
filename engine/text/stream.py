"""One output's path from token ids to the text that is sent: detokeniser, then stop strings.

    token ids ──▶ IncrementalDetokenizer ──▶ StopMatcher ──▶ TextDelta
                  holds parts of characters   holds what may begin a stop string

The service keeps one `TextStream` for every choice of a request, and so does the offline API. Usual
course: `push` for every step's ids; where the engine says that the last id ended the output (a stop
or end-of-sequence id), with `ends_with_stop_token=True`; then `finish` once, whatever ended it.
When a delta has a `stop`, only its first `num_tokens_kept` ids count, and the engine is told
`finish(request, stop.num_tokens)`; later pushes give nothing.

The text of a stop or end-of-sequence id is left out, unless `include_stop`. A special token (most
end-of-sequence tokens are) also needs `skip_special_tokens=False` to show: the one says that the
ending belongs to the text, the other that special tokens do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.stop_strings import StopMatch, StopMatcher
from engine.text.tokenizer import Tokenizer


class TextDelta(NamedTuple):
    """What one push gave.

    Attributes:
        text: the new text; may be empty, and may belong to earlier tokens.
        num_tokens_kept: how many of the pushed ids belong to the output: all, or those up to the
            one that completed a stop string.
        stop: the stop string that ended the output with this push.
    """

    text: str
    num_tokens_kept: int
    stop: StopMatch | None = None


class TextStream:
    """Makes one output's text; for one output, on one thread at a time."""

    __slots__ = (
        "_detokenizer",
        "_include_stop",
        "_initial_text",
        "_matcher",
        "_num_tokens",
        "_stopped",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop_strings: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        prompt_tail: Sequence[int] = (),
        initial_text: str = "",
    ) -> None:
        """Begin an output.

        Args:
            tokenizer: the model's.
            stop_strings: end the output where they first appear in it; see `StopMatcher`.
            include_stop: whether the text that ended the output is part of it.
            min_tokens: stop strings that complete with fewer output tokens are ignored.
            skip_special_tokens: whether special tokens are left out of the text.
            prompt_tail: the prompt's ids, or the last of them; see `IncrementalDetokenizer`.
            initial_text: comes before the first text (echo: the prompt's); no stop strings are
                looked for in it.
        """
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special_tokens=skip_special_tokens, prompt_tail=prompt_tail
        )
        self._matcher = (
            StopMatcher(stop_strings, include_stop=include_stop, min_tokens=min_tokens)
            if stop_strings
            else None
        )
        self._include_stop = include_stop
        self._initial_text = initial_text
        self._num_tokens = 0
        self._stopped = False

    @property
    def num_tokens(self) -> int:
        """How many tokens belong to the output so far, the one that ended it included."""
        return self._num_tokens

    @property
    def stop(self) -> StopMatch | None:
        """The stop string that ended the output, if one did."""
        return self._matcher.match if self._matcher is not None else None

    def push(self, token_ids: Sequence[int], *, ends_with_stop_token: bool = False) -> TextDelta:
        """Take the output's next ids.

        Args:
            token_ids: the ids, in order; may be empty.
            ends_with_stop_token: whether the last of them is the stop or end-of-sequence id that
                ended the output.
        """
        if self._stopped:
            return TextDelta("", 0)
        visible = token_ids
        if ends_with_stop_token and not self._include_stop:
            visible = token_ids[:-1]
        text, self._initial_text = self._initial_text, ""
        if self._matcher is None:
            text += self._detokenizer.push(visible)
            self._num_tokens += len(token_ids)
            return TextDelta(text, len(token_ids))
        for index, token_id in enumerate(visible, 1):
            released, stop = self._matcher.push(
                self._detokenizer.push((token_id,)), self._num_tokens + index
            )
            text += released
            if stop is not None:
                self._stopped = True
                self._num_tokens = stop.num_tokens
                return TextDelta(text, index, stop)
        self._num_tokens += len(token_ids)
        return TextDelta(text, len(token_ids))

    def finish(self) -> str:
        """The output is over: what was held back. Empty after a stop string; may be called once
        more, for nothing.
        """
        text, self._initial_text = self._initial_text, ""
        if self._stopped:
            return text
        self._stopped = True
        rest = self._detokenizer.flush()
        if self._matcher is None:
            return text + rest
        released, stop = self._matcher.push(rest, self._num_tokens)
        return text + released + ("" if stop else self._matcher.flush())
