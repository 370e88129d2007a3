"""Estimates how many bytes a request takes while it waits or runs, in the front end's and the
engine's processes together.

The estimate is computed from the request's fields when it is accepted, and is an upper limit, so an
accepted request is never refused later. The coefficients were measured in CPython 3.11
(`python -m benchmarks waiting_memory` measures them again in the processes themselves). The
estimate leaves out four bytes for each token in the KV cache, and unread results, which have a
separate limit. It includes only the results that a choice may still produce before it is held.
`service.convert.weight` estimates the size of a request's message before that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.contract.request import GenerationRequest

_REQUEST = 5_000
"""Bytes per request: its records and calls, in both processes."""
_CHOICE = 1_100
"""Bytes per choice: its record in the engine, and its log and text in the front end."""
_TOKEN = 4
_DRAFTER = 9_000
"""Bytes per choice for what guesses its tokens."""
_SEEN_PROMPT, _SEEN_OUTPUT = 36, 32
"""Bytes per token of the prompt, and of an output, for the tables that say where tokens stood."""
_PREDICTED = 45
"""Bytes per token of an expected output: in both processes, and in the tables that find it."""
_ENDING = 150
"""Bytes per token id that ends the output: in a set in each process, and packed."""
_BIAS = 24
_STOP_CHARACTER = 270
"""Bytes per character of a stop string: one state of the search."""
_MATCHER = 42_000
_MATCHER_BYTE = 1.2
"""Bytes for the matcher of one choice: a constant, and an amount per byte of the grammar's text.
llguidance keeps a copy of the text for each matcher (1.0 to 1.6 bytes per byte, depending on the
kind of grammar).
"""
_SEEN = 130
"""Bytes per token that is counted for penalties."""
_NGRAM = 160
"""Bytes per token that is indexed as the end of an n-gram."""
_LABEL = 200
"""Bytes per label, without its characters: two strings in a map."""
UNTIL_HELD = 3
"""The number of tokens that a choice may still produce after the decision to hold it."""
_DESCRIBED = 200
_CANDIDATE = 130
"""Bytes per prompt token with log-probabilities (`_DESCRIBED`), and per candidate of it
(`_CANDIDATE`), in each process.
"""


@dataclass(frozen=True, slots=True)
class Footprint:
    """How much memory a request takes.

    Attributes:
        size: the approximate number of bytes.
        field: the field that takes the most bytes.
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
        speculates: bool,
    ) -> Footprint:
        """Return the footprint of a converted request.

        Args:
            request: the request for the engine.
            input_field: the prompt's field name.
            output_tokens: the length of the longest output of each choice.
            token_bytes: the number of bytes that one unread token takes.
            stop_strings, echo, labels: the values that the front end keeps.
            speculates: whether the engine may guess tokens.
        """
        n, length, sampling = request.n, len(request.prompt), request.sampling
        tokens = length + output_tokens
        parts = {
            "n": _REQUEST + n * (_CHOICE + speculates * (_DRAFTER + _SEEN_OUTPUT * output_tokens)),
            # The request itself and each choice's own copy; with log-probabilities, in the front
            # end too.
            input_field: _TOKEN * length * (1 + n + (request.prompt_logprobs is not None))
            + speculates * _SEEN_PROMPT * length,
            "prediction": _PREDICTED * len(request.prediction),
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
