"""Builds checked requests from what a manager's callers pass in: a prompt and transformers-style
options.

    prompt, keyword options ─▶ GenerationDefaults.resolve ─▶ GenerationRequest ─▶ admission's checks
                            its stop strings ─▶ a stop finder; its grammar ─▶ compilation begins
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine.api.generation_options import REQUEST_KEYS, GenerationDefaults
from engine.api.results import StopFinder
from engine.contract.errors import InvalidRequestError, UnsupportedFeatureError
from engine.contract.request import GenerationRequest, MatcherFactory
from engine.contract.types import TokenId
from engine.core.admission import AdmissionLimits

_FREE_KEYS = frozenset(
    {
        "n", "num_return_sequences", "seed", "stop_strings", "stop_token_ids", "ignore_eos",
        "logprobs", "logprob_token_ids", "prompt_logprobs", "grammar", "priority", "time_limit_s",
        "cache_salt", "bypass_prefix_cache", "adapter",
    }
)  # fmt: skip
"""Per-request options that need no processor; `grammar` uses a matcher instead."""
StopFinderFactory = Callable[[tuple[str, ...]], StopFinder]


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A checked request."""

    spec: GenerationRequest
    make_stop_finder: Callable[[], StopFinder] | None = None
    compiling: Future[MatcherFactory] | None = None

    @property
    def make_matcher(self) -> MatcherFactory | None:
        """The matcher factory of the request's grammar, or None. Waits until the grammar is
        compiled.
        """
        return None if self.compiling is None else self.compiling.result()


class RequestBuilder:
    """Builds checked requests from a manager's arguments."""

    def __init__(
        self,
        limits: AdmissionLimits,
        defaults: GenerationDefaults,
        compile_grammar: Callable[[GenerationRequest], Future[MatcherFactory] | None],
        make_stop_finder: StopFinderFactory | None,
        *,
        per_request_processors: bool,
    ) -> None:
        """Wire a builder.

        Args:
            limits: the limits that admission checks.
            defaults: the options of requests that do not set their own.
            compile_grammar: see EngineLoop.
            make_stop_finder: makes a stop string matcher. If None, there is no tokenizer, and stop
                strings are refused.
            per_request_processors: whether requests may set their own sampling options.
        """
        self._limits = limits
        self._defaults = defaults
        self._compile_grammar = compile_grammar
        self._make_stop_finder = make_stop_finder
        self._per_request_processors = per_request_processors

    def build(
        self,
        name: str,
        input_ids: Sequence[int],
        max_new_tokens: int | None,
        eos_token_id: int | Iterable[int] | None,
        overrides: dict[str, Any],
    ) -> PreparedRequest:
        """Build and check a request from the caller's arguments. If it has a grammar, start
        compiling it.

        Raises:
            InvalidRequestError, UnsupportedFeatureError: the request is refused.
        """
        if overrides and not self._per_request_processors:
            known = sorted(set(overrides) & (REQUEST_KEYS - _FREE_KEYS))
            if known:
                raise InvalidRequestError(
                    known[0], "is set for one request; that needs per_request_processors=True"
                )
        spec, stop_strings = self._defaults.resolve(
            name,
            token_ids(input_ids),
            max_new_tokens=max_new_tokens,
            eos_token_id=eos_token_id,
            overrides=overrides,
        )
        self._limits.check(spec)
        find_stop = self._stop_finder(stop_strings)
        return PreparedRequest(spec, find_stop, self._compile_grammar(spec))

    def _stop_finder(self, stop_strings: tuple[str, ...]) -> Callable[[], StopFinder] | None:
        if not stop_strings:
            return None
        if self._make_stop_finder is None:
            raise UnsupportedFeatureError(
                "stop_strings",
                "need the model's tokenizer.json, which is not there; use stop_token_ids",
            )
        return partial(self._make_stop_finder, stop_strings)


def token_ids(prompt: Iterable[Any]) -> tuple[TokenId, ...]:
    """Return a prompt's token ids from a list, a numpy array or a torch tensor.

    Values that are not integers are left unchanged; admission refuses them and names the position.
    """
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()  # one call; iterating would make an array or tensor of each entry
    ids = tuple(prompt)
    if all(type(token) is int for token in ids):
        return ids
    return tuple(TokenId(token.item()) if hasattr(token, "item") else token for token in ids)
