"""A GenerationSpec becomes a `delivery.Submission`: checked, with every default filled in.

Every field acts, or is refused. Two are taken and change nothing, because nothing is shared among
requests yet, which is exactly what they ask for at most: `cache.salt` and
`cache.bypass_prefix_cache`.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace.v1 import generation_pb2

from engine.client import ModelInfo
from engine.errors import InvalidRequestError
from engine.request import GenerationRequest
from engine.sampling_params import LogprobParams, SamplingParams, StopParams, check_stop_strings
from engine.text import TextStream, Tokenizer
from engine.types import RequestId, TokenId
from service.convert.inputs import InputEncoder, truncate
from service.convert.unsupported import refuse_unsupported
from service.convert.values import check_enum, seconds
from service.delivery.events import DeliveryOptions
from service.delivery.registry import Submission

MAX_SALT_BYTES = 128
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/-]{1,128}")
_PROMPT_TAIL = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """The service's own limits of a request.

    Attributes:
        default_max_tokens: max_tokens where a request does not say.
        default_time_limit_s: the time limit where a request does not say; None: none.
        max_time_limit_s: the longest one that may be asked for; None: any.
    """

    default_max_tokens: int
    default_time_limit_s: float | None
    max_time_limit_s: float | None


def check_request_id(request_id: str, field: str = "request_id") -> None:
    """Check a request id against the contract's pattern.

    Raises:
        InvalidRequestError: it does not fit.
    """
    if _REQUEST_ID.fullmatch(request_id) is None:
        raise InvalidRequestError(
            field, "must be 1 to 128 characters out of [A-Za-z0-9._:/-]; choose another id"
        )


def make_request_id() -> str:
    """An id that cannot be guessed."""
    return f"req-{secrets.token_urlsafe(18)}"


class Converter:
    """Converts specs for one loaded model."""

    def __init__(
        self, info: ModelInfo, tokenizer: Tokenizer, encoder: InputEncoder, limits: RequestLimits
    ) -> None:
        self._info = info
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._limits = limits

    def check_id(self, spec: generation_pb2.GenerationSpec) -> str:
        """The request's id: the client's, checked, or a new one.

        Raises:
            InvalidRequestError: the client's does not fit.
        """
        if not spec.request_id:
            return make_request_id()
        check_request_id(spec.request_id)
        return spec.request_id

    async def submission(
        self,
        spec: generation_pb2.GenerationSpec,
        *,
        identity: str,
        request_id: str,
        engine_id: Callable[[str, str], RequestId],
        final: bool = False,
    ) -> Submission:
        """Convert a spec. `final`: whatever it says, deliver everything at the end.

        Raises:
            InvalidRequestError, UnsupportedFeatureError, ChatTemplateUnavailableError: as they say.
        """
        refuse_unsupported(spec)
        _check_cache(spec.cache)
        output = spec.output
        check_enum(generation_pb2.Delivery, output.delivery, "output.delivery")
        # Everything that is cheap to check comes before the input is tokenized.
        sampling = self._sampling(spec.sampling)
        logprobs = LogprobParams(top_n=output.logprobs) if output.HasField("logprobs") else None
        options = _delivery(output, logprobs, final)
        stop_strings = tuple(spec.stop.stop_strings)
        check_stop_strings(stop_strings)
        if stop_strings and output.omit_text:
            raise InvalidRequestError(
                "stop.stop_strings", "are matched in the text; they exclude output.omit_text"
            )
        if output.echo and output.omit_text:
            raise InvalidRequestError("output.echo", "asks for text; it excludes output.omit_text")
        time_limit_s = self._time_limit(spec.scheduling)
        prompt = truncate(spec, await self._encoder.encode_spec(spec))
        self._check_prompt(spec, len(prompt))
        stop = self._stop(spec.stop, len(prompt))
        skip = output.skip_special_tokens if output.HasField("skip_special_tokens") else True
        echo = await self._encoder.decode(prompt, skip) if output.echo else ""

        def make_text() -> TextStream:
            return TextStream(
                self._tokenizer,
                stop_strings=stop_strings,
                include_stop=spec.stop.include_stop,
                min_tokens=stop.min_tokens,
                skip_special_tokens=skip,
                prompt_tail=prompt[-_PROMPT_TAIL:],
                initial_text=echo,
            )

        return Submission(
            identity=identity,
            request_id=request_id,
            request=GenerationRequest(
                request_id=engine_id(identity, request_id),
                prompt=prompt,
                sampling=sampling,
                stop=stop,
                logprobs=logprobs,
                time_limit_s=time_limit_s,
            ),
            options=options,
            make_text=None if output.omit_text else make_text,
            stop_strings=stop_strings,
            include_stop=spec.stop.include_stop,
        )

    def _sampling(self, options: generation_pb2.SamplingOptions) -> SamplingParams:
        """The effective parameters: the field's value, else what the model's generation config
        says.
        """
        default = self._info.default_sampling
        bias: list[tuple[TokenId, float]] = []
        for token_id, value in options.logit_bias.items():
            if token_id >= self._info.vocab_size:
                raise InvalidRequestError(
                    f"sampling.logit_bias[{token_id}]",
                    f"is not a token id; token ids are below {self._info.vocab_size}",
                )
            bias.append((TokenId(token_id), value))

        given: Any = options.HasField  # its stubs want literal names

        def pick(name: str) -> float:
            source = options if given(name) else default
            value: float = getattr(source, name)
            return value

        return SamplingParams(
            temperature=pick("temperature"),
            top_k=options.top_k if options.HasField("top_k") else default.top_k,
            top_p=pick("top_p"),
            min_p=pick("min_p"),
            repetition_penalty=pick("repetition_penalty"),
            presence_penalty=pick("presence_penalty"),
            frequency_penalty=pick("frequency_penalty"),
            logit_bias=tuple(bias) or default.logit_bias,
            seed=options.seed if options.HasField("seed") else secrets.randbits(64),
        )

    def _check_prompt(self, spec: generation_pb2.GenerationSpec, length: int) -> None:
        field = {"tokens": "tokens.ids", "text": "text.text"}.get(
            spec.WhichOneof("input") or "", "chat.messages"
        )
        if length == 0:
            raise InvalidRequestError(field, "comes to no token at all; at least one is needed")
        # A prompt that fills the context can still be processed, where nothing is to follow it.
        alone = spec.stop.HasField("max_tokens") and spec.stop.max_tokens == 0
        limit = self._info.max_context_tokens - (0 if alone else 1)
        if length > limit:
            name = "max_context_tokens" if alone else "max_prompt_tokens"
            raise InvalidRequestError(
                field,
                f"comes to {length} tokens; at most {limit} fit (limits.{name}): "
                "shorten it, or set truncation",
            )

    def _stop(self, options: generation_pb2.StopOptions, prompt_tokens: int) -> StopParams:
        if options.HasField("max_tokens"):
            max_tokens = options.max_tokens
        else:
            room = self._info.max_context_tokens - prompt_tokens
            max_tokens = min(self._limits.default_max_tokens, room)
        check = self._encoder.check_ids
        eos = check(options.eos_token_ids, "stop.eos_token_ids")
        stop_ids = check(options.stop_token_ids, "stop.stop_token_ids")
        return StopParams(
            max_tokens=max_tokens,
            min_tokens=options.min_tokens,
            stop_token_ids=tuple(TokenId(token_id) for token_id in stop_ids),
            eos_token_ids=tuple(TokenId(token_id) for token_id in eos) or self._info.eos_token_ids,
            ignore_eos=options.ignore_eos,
        )

    def _time_limit(self, options: generation_pb2.SchedulingOptions) -> float | None:
        if not options.HasField("time_limit"):
            return self._limits.default_time_limit_s
        limit = seconds(options.time_limit, "scheduling.time_limit")
        if limit <= 0:
            raise InvalidRequestError("scheduling.time_limit", "is 0; it must be above zero")
        most = self._limits.max_time_limit_s
        if most is not None and limit > most:
            raise InvalidRequestError(
                "scheduling.time_limit", f"is {limit:g} s; at most {most:g} s are allowed here"
            )
        return limit


def _check_cache(cache: generation_pb2.CacheOptions) -> None:
    if len(cache.salt.encode()) > MAX_SALT_BYTES:
        raise InvalidRequestError("cache.salt", f"is longer than {MAX_SALT_BYTES} bytes")


def _delivery(
    output: generation_pb2.OutputOptions, logprobs: LogprobParams | None, final: bool
) -> DeliveryOptions:
    at_least = output.min_tokens_per_delta if output.HasField("min_tokens_per_delta") else 1
    if at_least == 0:
        raise InvalidRequestError("output.min_tokens_per_delta", "is 0; it must be 1 or more")
    return DeliveryOptions(
        final=final or output.delivery == generation_pb2.DELIVERY_FINAL,
        min_tokens_per_delta=at_least,
        token_details=output.token_details or output.record_timestamps or logprobs is not None,
        candidates=logprobs.top_n if logprobs is not None else 0,
        record_times=output.record_timestamps,
    )
