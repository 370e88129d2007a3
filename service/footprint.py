"""About how many bytes a request holds while it waits or runs: in the front end and in the engine's
process, together.

It is reckoned from the request's parts when it is taken in, as what it may come to hold: so nothing
that was accepted is refused later. The coefficients are what these parts were measured to take in
CPython 3.11 (`python -m benchmarks.waiting_memory` measures them again in the processes
themselves). Left out is what grows with the tokens in the KV cache, four bytes for each, and what
results take that were not read, which has a bound of its own. `service.convert.weight` tells what a
request's message takes before that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.request import GenerationRequest

_REQUEST = 5_000
"""Records and calls of any request, in both processes."""
_CHOICE = 1_100
"""Of each choice: its record in the engine; its log and its text in the front end."""
_TOKEN = 4
_ENDING = 150
"""Of an id that ends the output: in a set of each process, and packed."""
_BIAS = 24
_STOP_CHARACTER = 270
"""The state of the search that has come to it."""
_MATCHER = 42_000
_MATCHER_BYTE = 1.2
"""Of what follows one choice through a form: of any, and for each byte of the form's text, which
llguidance keeps once more for each (1.0 to 1.6, by the kind of form).
"""
_SEEN = 130
"""Of a token whose occurrences are counted, for penalties."""
_NGRAM = 160
"""Of a token that an n-gram ends with."""
_LABEL = 200
"""Of a label, beside its characters: two texts in a map."""
_DESCRIBED = 200
_CANDIDATE = 130
"""Of a prompt's token that is described, and of each candidate with it; once in each process."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a request holds.

    Attributes:
        size: about how many bytes.
        field: what takes the most of them.
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
        stop_strings: tuple[str, ...],
        echo: str,
        labels: Mapping[str, str],
    ) -> Footprint:
        """Of what was made of the message.

        Args:
            request: what the engine gets.
            input_field: what to call the prompt.
            output_tokens: the most that each choice may have.
            stop_strings, echo, labels: what the front end keeps.
        """
        n, length, sampling = request.n, len(request.prompt), request.sampling
        tokens = length + output_tokens
        parts = {
            "n": _REQUEST + n * _CHOICE,
            # What was asked for, and each choice's own; where described, in the front end too.
            input_field: _TOKEN * length * (1 + n + (request.prompt_logprobs is not None)),
            "sampling.allowed_token_ids": 2 * _TOKEN * len(sampling.allowed_token_ids),
            "sampling.banned_token_ids": 2 * _TOKEN * len(sampling.banned_token_ids),
            "sampling.logit_bias": _BIAS * len(sampling.logit_bias),
            "stop": _ENDING * (len(request.stop.stop_token_ids) + len(request.stop.eos_token_ids)),
            "stop.stop_strings": _STOP_CHARACTER * sum(map(len, stop_strings)),
            "output.echo": len(echo),
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
