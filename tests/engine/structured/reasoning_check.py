"""A slow reading of reasoning before a form: it looks at the whole output anew for each token, as
symbols, where a special token is one symbol and every other byte is one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.contract.sampling_params import ReasoningParams
from engine.text import Tokenizer

Symbols = tuple[int, ...]
BLANKS = frozenset(b" \t\r\n")


@dataclass
class SlowReasoning:
    """Says which tokens fit. The form is one of several strings, none of which begins with a blank.

    Attributes:
        params: the reasoning.
        choices: the form; empty: there is none.
        tokenizer: the model's.
        endings: the ids that end the output.
    """

    params: ReasoningParams
    choices: tuple[str, ...]
    tokenizer: Tokenizer
    endings: frozenset[int]
    _special: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        ids = self.tokenizer.special_token_ids
        self._special = {self.tokenizer.token_text(i): i for i in ids}
        self.opening = self.symbols_of(self.params.opening)
        self.closing = self.symbols_of(self.params.closing)
        self.then = self.symbols_of(self.params.then)
        self.banned = {self._special[name] for name in self.params.forbidden} | self.endings

    def symbols_of(self, text: str) -> Symbols:
        found: list[int] = []
        for index, part in enumerate(
            re.split("(" + "|".join(map(re.escape, self._special)) + ")", text)
        ):
            found += [1000 + self._special[part]] if index % 2 else list(part.encode())
        return tuple(found)

    def write(self, token: int) -> Symbols:
        if token in self.tokenizer.special_token_ids:
            return (1000 + token,)
        return tuple(self.tokenizer.token_bytes(token))

    def fits(self, output: Sequence[int], token: int) -> bool:
        """Whether a token may follow an output that fits itself."""
        tokens = [*output, token]
        if self.params.is_open:
            return self._reasoning(tokens, 0, ())
        return self._form(tokens) or self._opened(tokens)

    # ---- each way to read the output -------------------------------------------------------------

    def _form(self, tokens: list[int]) -> bool:
        *before, last = tokens
        if any(token in self.endings for token in before):
            return False
        text = [symbol for token in before for symbol in self.write(token)]
        if last in self.endings:
            return any(tuple(choice.encode()) == tuple(text) for choice in self.choices)
        written = self.write(last)
        whole = (*text, *written)
        return bool(written) and any(_begins(choice.encode(), whole) for choice in self.choices)

    def _opened(self, tokens: list[int]) -> bool:
        whole: Symbols = ()
        for count, token in enumerate(tokens):
            written = self.write(token)
            if not written or not self.opening:
                return False
            whole += written
            if not _begins(self.opening, whole):
                rest = whole[len(self.opening) :]
                if whole[: len(self.opening)] != self.opening or _find(rest, self.closing) >= 0:
                    return False
                return self._reasoning(tokens[count + 1 :], 0, rest)
            if whole == self.opening:
                return self._reasoning(tokens[count + 1 :], 0, ())
        return True

    def _reasoning(self, tokens: list[int], num_before: int, body: Symbols) -> bool:
        """Read tokens of reasoning, of which `num_before` came before, and what follows."""
        if not tokens:
            return True
        token, *others = tokens
        written = self.write(token)
        most = self.params.max_tokens
        is_last = most is not None and num_before >= most
        if token in self.banned and (self.choices or not is_last):
            return False
        if not is_last and token in self.banned:
            return False
        state = _longest(body, self.closing)
        place = _find((*body, *written), self.closing)
        if is_last:
            if not written:
                return False
            rest = self.closing[state:]
            if not (_begins(rest, written) or written[: len(rest)] == rest):
                return False
        if place < 0:
            return self._reasoning(others, num_before + 1, (*body, *written))
        behind = (*body, *written)[place + len(self.closing) :]
        if not self._begins_behind(behind):
            return False
        return self._behind(others, behind)

    def _begins_behind(self, behind: Symbols) -> bool:
        blanks = behind[len(self.then) :]
        begins = _begins(self.then, behind[: len(self.then)])
        return begins and len(blanks) <= self.params.max_blanks and BLANKS.issuperset(blanks)

    def _behind(self, tokens: list[int], behind: Symbols) -> bool:
        """Read what follows the closing mark: `then`, blanks, and the form from a token's start."""
        if not tokens:
            return True
        if len(behind) >= len(self.then) and self._form(tokens):
            return True
        token, *others = tokens
        written = self.write(token)
        further = (*behind, *written)
        is_fit = bool(written) and token not in self.endings and self._begins_behind(further)
        return is_fit and self._behind(others, further)


def _begins(whole: Sequence[int], part: Sequence[int]) -> bool:
    return tuple(whole[: len(part)]) == tuple(part)


def _find(whole: Symbols, part: Symbols) -> int:
    ends = range(len(whole) - len(part) + 1)
    return next((place for place in ends if whole[place : place + len(part)] == part), -1)


def _longest(body: Symbols, mark: Symbols) -> int:
    lengths = range(min(len(body), len(mark) - 1), 0, -1)
    return next((n for n in lengths if body[-n:] == mark[:n]), 0)
