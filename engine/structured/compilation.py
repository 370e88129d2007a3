"""Compiles one grammar, from what the caller sent to a matcher at its start, and tries it out.

llguidance compiles without the interpreter's lock and cannot be interrupted. The limits here, and
the checks of `source`, keep compilation to seconds.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from functools import partial

from llguidance import LLMatcher, LLParserLimits

from engine.contract.errors import InvalidRequestError
from engine.contract.sampling_params import GrammarParams
from engine.structured.grammar_errors import explain
from engine.structured.matcher import CompiledGrammar
from engine.structured.root import Root
from engine.structured.source import Source, translate
from engine.structured.trial import try_out
from engine.structured.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

_LEXER_FUEL = 200_000
"""The cost limit for building the lexer: enough for a choice of thousands of strings."""
_LARK_LEXER_FUEL = 20_000
"""The cost limit for Lark grammars. Their terminals can double in size with every line if each uses
another twice. At this limit, compilation takes at most about a second and 250 MB.
"""
_SEARCH_S = 1.0
"""How long to search for the part of a structural tag that cannot be compiled."""


@dataclass(frozen=True, slots=True, eq=False)
class CompiledRoot:
    """A compiled grammar at its start.

    `token_s` is the cost of a token (see `Trial.token_s`). `notes` says what is enforced
    differently from what the grammar says.
    """

    root: Root
    token_s: float
    notes: tuple[str, ...] = ()


def compile_grammar(params: GrammarParams, vocabulary: Vocabulary, vocab_size: int) -> CompiledRoot:
    """Compile a grammar and take its first steps, which show whether it can be followed at all.

    Raises:
        InvalidRequestError: the grammar is wrong, empty or too complex.
    """
    field_name = params.field
    try:
        source = translate(params, vocabulary.names)
    except InvalidRequestError as error:
        raise InvalidRequestError(field_name, error.description) from error
    limits = _limits(source.has_lark)
    make = partial(LLMatcher, vocabulary.tokens, source.text, log_level=0, limits=limits)
    root = Root(make, vocabulary.tokens)
    if root.matcher.is_error():
        place, reason = _at_fault(source, vocabulary, root.matcher.get_error())
        raise InvalidRequestError(field_name, place + explain(params.kind, reason))
    first = CompiledGrammar(params.kind, root, vocab_size, frozenset()).make_matcher()
    if first.can_go_on():
        trial = try_out(root, params, vocabulary, vocab_size)
        if trial.error is not None:
            raise InvalidRequestError(field_name, trial.error)
        if source.notes:
            logger.info("a form is held with these notes: %s", "; ".join(source.notes))
        return CompiledRoot(root, trial.token_s, source.notes)
    if first.failure is not None:
        raise InvalidRequestError(field_name, first.failure)
    if root.matcher.is_accepting():
        raise InvalidRequestError(
            field_name, "matches the empty text alone, so that nothing could be generated"
        )
    raise InvalidRequestError(
        field_name, "matches no text, or none that this model's tokens can write"
    )


def _at_fault(source: Source, vocabulary: Vocabulary, error: str) -> tuple[str, str]:
    """Return the location of the part of a structural tag that cannot be compiled, followed by a
    space, and its error. The location is empty if no such part was found in time.
    """
    end = time.monotonic() + _SEARCH_S
    for place, part in source.parts.items():
        if time.monotonic() > end:
            break
        limits = _limits(source.has_lark)
        grammar = LLMatcher.grammar_from_lark(part)
        alone = LLMatcher(vocabulary.tokens, grammar, log_level=0, limits=limits)
        if alone.is_error():
            return f"{place} ", alone.get_error()
    return "", error


def _limits(has_lark: bool) -> LLParserLimits:
    return LLParserLimits(
        initial_lexer_fuel=_LARK_LEXER_FUEL if has_lark else _LEXER_FUEL,
        # Because the steps are taken on the engine's thread: some milliseconds each, with few
        # exceptions. `engine.core.grammar_budget` limits their sum. All of the fuel was seen to
        # last 8 ms at most (500,000 units 33 ms, and 2,000,000 units 170 ms).
        step_lexer_fuel=200_000,
        step_max_items=5_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )
