"""Checks requests before they are accepted, so that an invalid one is refused immediately instead
of after a wait in the queue.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from engine.contract.errors import InvalidRequestError, UnsupportedFeatureError
from engine.contract.loaded_adapters import LoadedAdapters
from engine.contract.request import (
    MAX_CACHE_SALT_BYTES,
    MAX_CALLER_CHARS,
    MAX_PRIORITY,
    MAX_WEIGHT,
    MIN_WEIGHT,
    GenerationRequest,
)
from engine.contract.sampling_params import MAX_CHOICES, MAX_LOGPROBS
from engine.contract.token_ids import TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """The bounds of a loaded model and its cache.

    Attributes:
        vocab_size: token ids are below this.
        max_context_tokens: prompt and output together; the smaller of the next two.
        model_context, cache_context: what the model allows, and what the KV cache can hold for one
            request.
        heeds_priorities: whether the scheduler uses priorities; if not, they are refused.
        adapters: those that requests may name.
    """

    vocab_size: int
    model_context: int
    cache_context: int
    heeds_priorities: bool = True
    adapters: LoadedAdapters = dataclasses.field(default_factory=LoadedAdapters)

    @property
    def max_context_tokens(self) -> int:
        """The maximum length of a request, prompt and output together, in tokens."""
        return min(self.model_context, self.cache_context)

    def check(self, request: GenerationRequest) -> None:
        """Check a request against the bounds.

        Raises:
            InvalidRequestError: a field is out of bounds; the message names the bound and the
                remedy.
            UnsupportedFeatureError: the request has a priority, and the scheduler does not use
                priorities.
            AdapterNotLoadedError: the request names an adapter that is not loaded.
        """
        if request.adapter:
            self.adapters.of_request(request.adapter)
        prompt = request.prompt
        if not prompt:
            raise InvalidRequestError(
                "prompt", "is empty; at least one token is needed to continue"
            )
        self._check_ids("prompt", prompt)
        length = len(prompt)
        # A prompt that fills the context can still be processed (max_tokens 0), but nothing can
        # follow it.
        longest = self.max_context_tokens - (1 if request.stop.max_tokens > 0 else 0)
        if length > longest:
            source = (
                "the model's context"
                if self.model_context <= self.cache_context
                else "what the KV cache can hold for one request (num_blocks, block_size)"
            )
            raise InvalidRequestError(
                "prompt",
                f"has {length} tokens; at most {longest} fit, because {source} is "
                f"{self.max_context_tokens} tokens; shorten or truncate it",
            )
        if len(request.prediction) > self.max_context_tokens:
            raise InvalidRequestError(
                "prediction",
                f"has {len(request.prediction)} tokens; at most {self.max_context_tokens} (the "
                "context) can come; shorten it",
            )
        self._check_ids("prediction", request.prediction)
        self._check_ids("stop.stop_token_ids", request.stop.stop_token_ids)
        self._check_ids("stop.eos_token_ids", request.stop.eos_token_ids)
        sampling = request.sampling
        for token, _ in sampling.logit_bias:
            if token >= self.vocab_size:
                raise InvalidRequestError(
                    f"sampling.logit_bias[{token}]", f"token ids are 0 to {self.vocab_size - 1}"
                )
        self._check_ids("sampling.allowed_token_ids", sampling.allowed_token_ids)
        self._check_ids("sampling.banned_token_ids", sampling.banned_token_ids)
        if request.logprobs is not None:
            self._check_ids("logprob_token_ids", request.logprobs.token_ids)
        self._check_options(request)
        if request.priority != 0 and not self.heeds_priorities:
            raise UnsupportedFeatureError(
                "priority",
                "is not heeded by this scheduler; leave it out, or choose another "
                '(scheduler_type="priority" or "fair")',
            )

    def _check_ids(self, field: str, ids: TokenIds) -> None:
        beyond = np.flatnonzero(ids.array >= self.vocab_size)
        if len(beyond):
            position = int(beyond[0])
            raise InvalidRequestError(
                f"{field}[{position}]",
                f"is {ids[position]}; token ids are whole numbers from 0 to {self.vocab_size - 1}",
            )

    def _check_options(self, request: GenerationRequest) -> None:
        """Check the options that do not depend on the model.

        Up to MAX_CHOICES choices can always be served. Choices that do not fit together wait, and
        each one is no longer than a single-choice request.
        """
        for field, value, low, high in (
            ("n", request.n, 1, MAX_CHOICES),
            ("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY),
            ("prompt_logprobs", request.prompt_logprobs or 0, 0, MAX_LOGPROBS),
        ):
            if type(value) is not int or not low <= value <= high:
                raise InvalidRequestError(
                    field, f"is {value!r}; it must be a whole number from {low} to {high}"
                )
        if len(request.cache_salt) > MAX_CACHE_SALT_BYTES:
            raise InvalidRequestError(
                "cache_salt",
                f"has {len(request.cache_salt)} bytes; at most {MAX_CACHE_SALT_BYTES} are allowed, "
                "use a hash of it",
            )
        if request.time_limit_s is not None and not request.time_limit_s > 0:
            raise InvalidRequestError(
                "time_limit_s", f"is {request.time_limit_s} s; it must be above zero"
            )
        for field, name in (("caller", request.caller), ("caller_group", request.caller_group)):
            if len(name) > MAX_CALLER_CHARS:
                raise InvalidRequestError(
                    field,
                    f"has {len(name)} characters; at most {MAX_CALLER_CHARS} are allowed, shorten "
                    "the name",
                )
        if not MIN_WEIGHT <= request.weight <= MAX_WEIGHT:
            raise InvalidRequestError(
                "weight",
                f"is {request.weight:g}; it must be between {MIN_WEIGHT:g} and {MAX_WEIGHT:g}",
            )
