"""How one request's tokens are chosen and when it stops. All defaults are filled in and all bounds
are checked.

This module does not import torch. `engine.sampling` applies the parameters of many requests in one
batch.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import NamedTuple

from engine.contract.errors import InvalidRequestError
from engine.contract.token_ids import NO_IDS, NO_VALUES, TokenIds, TokenValues
from engine.contract.types import TokenId

DEFAULT_TOP_K = 50
"""The default of top_k in transformers."""
MAX_LOGPROBS = 128
"""The maximum number of candidates that may be requested for each token."""
MAX_LOGIT_BIAS = 1024
"""The maximum number of logit_bias entries in one request."""
MAX_LOGPROB_TOKEN_IDS = 128
"""The maximum number of ids for which log-probabilities may be requested with each token."""
MAX_LISTED_TOKEN_IDS = 1 << 18
"""The maximum number of allowed token ids in one request, and of banned ones."""
MAX_NGRAM_SIZE = 1024
"""The maximum value of no_repeat_ngram_size."""
MAX_CHOICES = 128
"""The maximum number of choices in one request."""
MAX_GRAMMAR_BYTES = 256 * 1024
"""The maximum size of a schema, regular expression or grammar, in bytes of UTF-8; for a list of
choices, of all of them together.
"""
MAX_MARK_BYTES = 256
"""The maximum length of a mark around reasoning, in bytes of UTF-8."""
MAX_MARK_BLANKS = 64
"""The maximum number of blanks between reasoning and structured output."""
MAX_FORBIDDEN = 64
"""The maximum number of special tokens that may be forbidden within reasoning."""
MAX_STOP_TOKEN_IDS = 256
"""The maximum number of stop ids in one request, and of end-of-sequence ids."""
MAX_STOP_STRINGS = 16
"""The maximum number of stop strings in one request."""
MAX_STOP_STRING_BYTES = 256
"""The maximum length of a stop string, in bytes of UTF-8."""


_RANGES = (
    ("temperature", 0.0, 100.0, False, "0 is greedy"),
    ("top_p", 0.0, 1.0, True, "1 keeps all tokens"),
    ("min_p", 0.0, 1.0, False, "0 keeps all tokens"),
    ("typical_p", 0.0, 1.0, True, "1 keeps all tokens"),
    ("repetition_penalty", 0.0, 10.0, True, "1 is none"),
    ("presence_penalty", -2.0, 2.0, False, "0 is none"),
    ("frequency_penalty", -2.0, 2.0, False, "0 is none"),
)
"""For each field of SamplingParams: its lowest and highest value, whether it must be above the
lowest, and a hint that includes the neutral value.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen. The defaults are neutral. Lists may be given as any sequence,
    and are stored packed.

    Attributes:
        temperature: divides the logits; 0 is greedy. 0 to 100.
        top_k: keep the k most likely tokens; 0, or more than the vocabulary has, keeps all.
        top_p: keep the fewest most likely tokens whose probabilities reach this sum. Above 0, at
            most 1.
        min_p: keep tokens at least this likely relative to the most likely one. 0 to 1.
        typical_p: keep the fewest most typical tokens (by information content) whose probabilities
            reach this sum (Meister et al. 2022, Locally Typical Sampling). Above 0, at most 1.
        repetition_penalty: divides positive and multiplies negative logits of the tokens seen in
            prompt and output (Keskar et al. 2019, CTRL). Above 0, at most 10.
        presence_penalty: subtracted from the logits of the tokens seen in the output. -2 to 2.
        frequency_penalty: subtracted per occurrence in the output. -2 to 2.
        no_repeat_ngram_size: no sequence of this many tokens occurs twice in prompt and output. 0:
            no restriction.
        logit_bias: (token id, bias) pairs; -100 to 100 each.
        allowed_token_ids: only these tokens are generated. Empty: all are allowed.
        banned_token_ids: tokens that are never generated.
        seed: 64 bits; the draws depend only on (seed, choice, position).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    logit_bias: TokenValues = NO_VALUES
    allowed_token_ids: TokenIds = NO_IDS
    banned_token_ids: TokenIds = NO_IDS
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low, high, above_low, hint in _RANGES:
            value = getattr(self, name)
            if not low <= value <= high or (above_low and value == low):  # NaN is out of bounds
                bound = f"above {low:g} and at most" if above_low else f"between {low:g} and"
                raise InvalidRequestError(
                    f"sampling.{name}", f"is {value:g}; it must be {bound} {high:g} ({hint})"
                )
        if self.top_k < 0:
            raise InvalidRequestError(
                "sampling.top_k", f"is {self.top_k}; it must be 0 (all tokens) or more"
            )
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequestError(
                "sampling.logit_bias",
                f"has {len(self.logit_bias)} entries; at most {MAX_LOGIT_BIAS} are allowed",
            )
        for token_id, bias in self.logit_bias:
            if not -100.0 <= bias <= 100.0:
                raise InvalidRequestError(
                    f"sampling.logit_bias[{token_id}]",
                    f"is {bias:g}; it must be between -100 and 100 (0 is none)",
                )
        biases = TokenValues.of(self.logit_bias, "sampling.logit_bias")
        object.__setattr__(self, "logit_bias", biases)
        if not 0 <= self.no_repeat_ngram_size <= MAX_NGRAM_SIZE:
            raise InvalidRequestError(
                "sampling.no_repeat_ngram_size",
                f"is {self.no_repeat_ngram_size}; it must be between 0 (off) and {MAX_NGRAM_SIZE}",
            )
        for name, ids in (
            ("allowed_token_ids", self.allowed_token_ids),
            ("banned_token_ids", self.banned_token_ids),
        ):
            if len(ids) > MAX_LISTED_TOKEN_IDS:
                raise InvalidRequestError(
                    f"sampling.{name}",
                    f"has {len(ids)} entries; at most {MAX_LISTED_TOKEN_IDS} are allowed",
                )
            object.__setattr__(self, name, TokenIds.of(ids, f"sampling.{name}"))
        if not 0 <= self.seed < 2**64:
            raise InvalidRequestError(
                "sampling.seed", f"is {self.seed}; it must be an unsigned number of 64 bits"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def needs_history(self) -> bool:
        """Whether the next token depends on the previous tokens, so that they must be known."""
        return self.has_penalties or self.no_repeat_ngram_size > 0

    @property
    def has_penalties(self) -> bool:
        """Whether a penalty depends on the tokens seen so far."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


SCALARS = MappingProxyType(
    {
        field.name: field.default
        for field in fields(SamplingParams)
        if isinstance(field.default, (int, float)) and field.name != "seed"
    }
)
"""The fields of SamplingParams that are a single number each, with their neutral values.

Code that reads or writes requests iterates over these, so a new field is added only here. If no
seed is given, one is drawn.
"""


class SamplingSteps(NamedTuple):
    """Which operations choosing a token needs. Rows that need the same ones are computed together.

    Attributes:
        edits: bias, penalties, n-grams or min_tokens, which change individual logits.
        masks: allowed or banned ids, or a grammar, which may change all logits.
        draws: whether the token is drawn at random, not chosen greedily.
        filters: top_k or top_p.
        whole: whether the filters examine the whole row, not only its top.
        min_p, typical: the other filters.
    """

    edits: bool = False
    masks: bool = False
    draws: bool = False
    filters: bool = False
    whole: bool = False
    min_p: bool = False
    typical: bool = False

    @property
    def keeps_all(self) -> bool:
        """Whether no filter removes tokens."""
        return not (self.filters or self.min_p or self.typical)


@dataclass(frozen=True, slots=True, kw_only=True)
class StopParams:
    """When the engine stops generation. Stop strings are not included; the detokenizer matches
    them.

    Attributes:
        max_tokens: the maximum number of tokens to generate; 0 processes the prompt only.
        min_tokens: stop and end-of-sequence ids cannot be chosen until this many tokens were
            generated.
        stop_token_ids: ids that end the output.
        eos_token_ids: the end-of-sequence ids in effect: the model's, or the request's own.
        ignore_eos: whether eos_token_ids are treated like any other token.
    """

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: TokenIds = NO_IDS
    eos_token_ids: TokenIds = NO_IDS
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 0:
            raise InvalidRequestError(
                "stop.max_tokens",
                f"is {self.max_tokens}; it must be 0 (process the prompt only) or more",
            )
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise InvalidRequestError(
                "stop.min_tokens",
                f"is {self.min_tokens}; it must be between 0 and max_tokens, "
                f"which is {self.max_tokens}",
            )
        for name, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("eos_token_ids", self.eos_token_ids),
        ):
            if len(ids) > MAX_STOP_TOKEN_IDS:
                raise InvalidRequestError(
                    f"stop.{name}",
                    f"has {len(ids)} entries; at most {MAX_STOP_TOKEN_IDS} are allowed",
                )
            object.__setattr__(self, name, TokenIds.of(ids, f"stop.{name}"))

    @property
    def ending_token_ids(self) -> frozenset[TokenId]:
        """All ids that end the output."""
        if self.ignore_eos:
            return frozenset(self.stop_token_ids)
        return frozenset(self.stop_token_ids) | frozenset(self.eos_token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobParams:
    """Which log-probabilities to report with each generated token.

    Attributes:
        top_n: the number of most likely candidates; 0 reports only the chosen token. At most
            MAX_LOGPROBS.
        token_ids: ids whose log-probabilities are reported with every token, in addition to the
            candidates.
    """

    top_n: int = 0
    token_ids: TokenIds = NO_IDS

    def __post_init__(self) -> None:
        if not 0 <= self.top_n <= MAX_LOGPROBS:
            raise InvalidRequestError(
                "logprobs", f"is {self.top_n}; it must be between 0 and {MAX_LOGPROBS}"
            )
        if len(self.token_ids) > MAX_LOGPROB_TOKEN_IDS:
            raise InvalidRequestError(
                "logprob_token_ids",
                f"has {len(self.token_ids)} entries; at most {MAX_LOGPROB_TOKEN_IDS} are allowed",
            )
        ids = TokenIds.of(self.token_ids, "logprob_token_ids")
        object.__setattr__(self, "token_ids", ids)


class GrammarKind(enum.Enum):
    """How the structure of an output is described."""

    JSON_SCHEMA = "json_schema"
    """A JSON value that satisfies a JSON Schema, given as JSON text."""
    JSON_OBJECT = "json_object"
    """Any JSON object."""
    REGEX = "regex"
    """Text that a regular expression matches in full."""
    LARK = "grammar"
    """Text of a context-free grammar in Lark syntax."""
    CHOICE = "choice"
    """One of several strings."""
    STRUCTURAL_TAG = "structural_tag"
    """Text that contains tags whose contents have their own grammars, given as JSON text."""
    FREE = "free"
    """Any output; only the length of its reasoning is limited."""


@dataclass(frozen=True, slots=True)
class ReasoningParams:
    """How the model marks its reasoning before the answer, and how long the reasoning may be.

    In marks, names of special tokens stand for the tokens themselves.

    Attributes:
        opening: the mark that the output may begin with; empty: no mark.
        closing: the mark that ends the reasoning.
        then: what must immediately follow the closing mark before structured output.
        is_open: whether the prompt ends within the reasoning.
        max_tokens: the maximum number of reasoning tokens, not counting the marks; then the closing
            mark is forced. 0: it is forced immediately. None: no limit.
        max_blanks: the maximum number of blanks between the marks and the structured output.
        forbidden: special tokens that may not occur within reasoning before structured output.
    """

    opening: str
    closing: str
    then: str = ""
    is_open: bool = False
    max_tokens: int | None = None
    max_blanks: int = 16
    forbidden: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        field = "grammar.reasoning"
        marks = (("opening", self.opening), ("closing", self.closing), ("then", self.then))
        for name, mark in marks:
            if not _is_encodable(mark) or len(mark.encode()) > MAX_MARK_BYTES:
                raise InvalidRequestError(
                    field, f"{name} must be text of at most {MAX_MARK_BYTES} bytes of UTF-8"
                )
        if not self.closing:
            raise InvalidRequestError(field, "closing is empty; reasoning must end")
        if self.max_tokens is not None and self.max_tokens < 0:
            raise InvalidRequestError(
                field, f"max_tokens is {self.max_tokens}; it must be 0 (ended at once) or more"
            )
        if not 0 <= self.max_blanks <= MAX_MARK_BLANKS:
            raise InvalidRequestError(
                field,
                f"max_blanks is {self.max_blanks}; it must be between 0 and {MAX_MARK_BLANKS}",
            )
        if len(self.forbidden) > MAX_FORBIDDEN or not all(map(_is_encodable, self.forbidden)):
            raise InvalidRequestError(
                field, f"forbidden must be at most {MAX_FORBIDDEN} names of special tokens"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarParams:
    """The structure that the output must have.

    Attributes:
        kind: how the structure is described.
        text: the schema, expression, grammar or structural tag; empty for JSON_OBJECT, CHOICE and
            FREE.
        choices: the strings of CHOICE, at least one; empty for other kinds.
        flexible_whitespace: whether the model chooses the white space of JSON. If not, the JSON is
            one line with one space after each comma and colon.
        reasoning: the reasoning that may precede the structured output; None: there is none.
        field: the field name used in errors; empty: grammar.<kind>.
    """

    kind: GrammarKind
    text: str = ""
    choices: tuple[str, ...] = ()
    flexible_whitespace: bool = False
    reasoning: ReasoningParams | None = None
    field: str = ""

    def __post_init__(self) -> None:
        if not self.field:
            object.__setattr__(self, "field", f"grammar.{self.kind.value}")
        field, size = self.field, 0
        for part in (self.text, *self.choices):
            if not _is_encodable(part):
                raise InvalidRequestError(field, "is not text that UTF-8 can hold")
            size += len(part.encode())
        if size > MAX_GRAMMAR_BYTES:
            raise InvalidRequestError(
                field, f"has {size} bytes; at most {MAX_GRAMMAR_BYTES} are allowed"
            )
        if self.kind is GrammarKind.CHOICE:
            if not self.choices or not all(self.choices):
                raise InvalidRequestError(
                    field, "needs at least one string, and none that is empty"
                )
        elif self.kind is GrammarKind.FREE:
            if self.reasoning is None or self.reasoning.max_tokens is None:
                raise InvalidRequestError(field, "needs `reasoning` with a bound, max_tokens")
            if size:
                raise InvalidRequestError(field, "takes no text and no choices: it is any output")
        elif self.kind is not GrammarKind.JSON_OBJECT and not self.text:
            raise InvalidRequestError(field, "is empty; describe the form, or leave it out")


def check_stop_strings(stop_strings: tuple[object, ...]) -> None:
    """Check a request's stop strings against their bounds.

    Raises:
        InvalidRequestError: there are too many, or one is not text, empty or too long.
    """
    if len(stop_strings) > MAX_STOP_STRINGS:
        raise InvalidRequestError(
            "stop_strings",
            f"has {len(stop_strings)} entries; at most {MAX_STOP_STRINGS} are allowed",
        )
    for index, text in enumerate(stop_strings):
        if not isinstance(text, str) or not _is_encodable(text):
            raise InvalidRequestError(
                f"stop_strings[{index}]", f"is {text!r}; it must be text that UTF-8 can hold"
            )
        size = len(text.encode())
        if not 1 <= size <= MAX_STOP_STRING_BYTES:
            raise InvalidRequestError(
                f"stop_strings[{index}]",
                f"is {size} bytes long; it must have between 1 and {MAX_STOP_STRING_BYTES} bytes",
            )


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
