"""Estimates how many bytes a request holds while it waits or runs, in the front end and the
engine's process together.

The estimate is made from the request's parts when it is accepted, and is the most that it can hold,
so an accepted request is never refused later. The coefficients were measured in CPython 3.11
(`python -m benchmarks.waiting_memory` measures them again in the processes themselves). It leaves
out four bytes for each token in the KV cache, and unread results, which have a limit of their own,
but for what a choice may bring until it is held.
`service.convert.weight` estimates the size of a request's message before that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.contract.request import GenerationRequest

_REQUEST = 5_000
"""The records and calls of any request, in both processes."""
_CHOICE = 1_100
"""Each choice: its record in the engine, and its log and text in the front end."""
_TOKEN = 4
_ENDING = 150
"""Each id that ends the output: in a set in each process, and packed."""
_BIAS = 24
_STOP_CHARACTER = 270
"""Each character of a stop string: a state of the search."""
_MATCHER = 42_000
_MATCHER_BYTE = 1.2
"""The matcher of one choice: a fixed part, and a part for each byte of the grammar's text, of which
llguidance keeps a copy for each (1.0 to 1.6 bytes, by the kind of grammar).
"""
_SEEN = 130
"""Each token that is counted for penalties."""
_NGRAM = 160
"""Each token that is indexed as the end of an n-gram."""
_LABEL = 200
"""Each label, without its characters: two strings in a map."""
UNTIL_HELD = 3
"""How many tokens a choice may still bring once it is to be held."""
_DESCRIBED = 200
_CANDIDATE = 130
"""Each prompt token with log-probabilities, and each candidate with it; once in each process."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """How much memory a request holds.

    Attributes:
        size: about how many bytes.
        field: the field that takes the most of them.
    """

    size: int
    field: str

    @classmethod
    def of_request(
        cls,
        request: GenerationRequest,
        *,
        input_field: str,
        output_tokens: int,
        token_bytes: int,
        stop_strings: tuple[str, ...],
        echo: str,
        labels: Mapping[str, str],
    ) -> Footprint:
        """The footprint of a converted request.

        Args:
            request: what the engine gets.
            input_field: the prompt's field name.
            output_tokens: the longest output of each choice.
            token_bytes: how many bytes one unread token of it takes.
            stop_strings, echo, labels: kept by the front end.
        """
        n, length, sampling = request.n, len(request.prompt), request.sampling
        tokens = length + output_tokens
        parts = {
            "n": _REQUEST + n * _CHOICE,
            # The request itself and each choice's own copy; with log-probabilities, in the front
            # end too.
            input_field: _TOKEN * length * (1 + n + (request.prompt_logprobs is not None)),
            "sampling.allowed_token_ids": 2 * _TOKEN * len(sampling.allowed_token_ids),
            "sampling.banned_token_ids": 2 * _TOKEN * len(sampling.banned_token_ids),
            "sampling.logit_bias": _BIAS * len(sampling.logit_bias),
            "stop": _ENDING * (len(request.stop.stop_token_ids) + len(request.stop.eos_token_ids)),
            "stop.stop_strings": _STOP_CHARACTER * sum(map(len, stop_strings)),
            "output.echo": len(echo),
            "output.logprobs": n * min(output_tokens, UNTIL_HELD) * token_bytes,
            "labels": sum(_LABEL + len(name) + 4 * len(text) for name, text in labels.items()),
        }
        if request.grammar is not None:
            form = request.grammar
            size = sum(len(text.encode()) for text in (form.text, *form.choices))
            parts["structured_output"] = size + n * (_MATCHER + round(_MATCHER_BYTE * size))
        if sampling.has_penalties:
            parts["sampling.repetition_penalty"] = _SEEN * n * tokens
        if sampling.no_repeat_ngram_size:
            parts["sampling.no_repeat_ngram_size"] = _NGRAM * n * tokens
        if request.prompt_logprobs is not None:
            parts["output.prompt_logprobs"] = (
                2 * length * (_DESCRIBED + _CANDIDATE * request.prompt_logprobs)
            )
        return cls(sum(parts.values()), max(parts, key=lambda part: parts[part]))
