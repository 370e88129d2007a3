"""Converts a GenerationSpec to a `delivery.Submission`, checked and with every default filled in.

Every field either has an effect or is refused by name: in `unsupported`, here, or in `sampling`.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from headrace.v1 import generation_pb2, generation_service_pb2

from engine.contract.engine_client import ModelInfo
from engine.contract.errors import AdapterNotLoadedError
from engine.contract.request import MAX_PRIORITY, MIN_WEIGHT, GenerationRequest
from engine.contract.sampling_params import (
    MAX_LOGPROB_TOKEN_IDS,
    MAX_LOGPROBS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    LogprobParams,
    StopParams,
    check_stop_strings,
)
from engine.contract.token_ids import NO_IDS, TokenIds
from engine.contract.types import CallerKey, RequestId
from engine.text import StopStrings, TextStream
from service.admission.accounts import Account
from service.admission.footprint import Footprint
from service.admission.served_adapters import MayUse, ServedAdapters
from service.convert.expected_output import predicted_ids
from service.convert.forms import ReplyPlan, reply_plan
from service.convert.inputs import InputEncoder, Rendered, Truncation
from service.convert.reply_texts import PROMPT_TAIL, reply_texts
from service.convert.sampling import check_min_tokens, sampling_params
from service.convert.unsupported import refuse_unsupported
from service.convert.values import check_enum, check_ids, check_labels, seconds
from service.convert.weight import input_field, message_footprint
from service.delivery.events import DeliveryOptions
from service.delivery.flow import WholeLimits
from service.delivery.submission import NO_LABELS, LivesBy, Submission
from service.errors.call_errors import FieldError, ModelNotFoundError, NoTokenizerError
from service.replies import ModelFormat

MAX_SALT_BYTES = 128
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/-]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """The service's limits for a request.

    Attributes:
        default_max_tokens: max_tokens of requests that do not set it.
        default_time_limit_s: the time limit of requests that do not set one, or None for no limit.
        max_time_limit_s: the longest time limit that may be requested, or None for no maximum.
        max_choices: the most choices of one request.
        max_send_bytes: the largest message that can be sent.
        whole: the limits for results that are kept or sent in one message.
    """

    default_max_tokens: int
    default_time_limit_s: float | None
    max_time_limit_s: float | None
    max_choices: int
    max_send_bytes: int
    whole: WholeLimits


def check_request_id(request_id: str, field: str = "request_id") -> None:
    """Check a request id against the contract's pattern.

    Raises:
        FieldError: it does not match.
    """
    if _REQUEST_ID.fullmatch(request_id) is None:
        raise FieldError(
            field, "must be 1 to 128 characters out of [A-Za-z0-9._:/-]; choose another id"
        )


def make_request_id() -> str:
    """Return a request id that cannot be guessed."""
    return f"req-{secrets.token_urlsafe(18)}"


SpecMessage = (
    generation_service_pb2.AddRequestRequest
    | generation_service_pb2.GenerateRequest
    | generation_service_pb2.GenerateStreamRequest
    | generation_service_pb2.AddCommand
)
"""The messages that contain a spec."""
_RETRIED = (generation_service_pb2.AddRequestRequest, generation_service_pb2.GenerateRequest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A checked spec that has not been converted yet.

    Attributes:
        spec: the caller's spec.
        field: the spec's path in the caller's message. Errors name its fields by the whole path.
        request_id: the client's id, or a new one.
        labels: the caller's labels.
        footprint: the memory that the message takes.
        digest: the hash of the call's content if it may be retried, otherwise empty.
        may_use: says which adapters the caller may use.
    """

    spec: generation_pb2.GenerationSpec
    field: str
    request_id: str
    labels: Mapping[str, str]
    footprint: Footprint
    digest: bytes
    may_use: MayUse


def _digest(message: SpecMessage, spec: generation_pb2.GenerationSpec) -> bytes:
    """Return a hash that tells whether a call repeats an earlier one with the same request id;
    empty for calls that cannot be retried.

    The spec is hashed as it was sent: setting a field to its default differs from leaving it out,
    and fields that this server does not know count too. So no caller gets the answer to a different
    request. A client that retries sends the same bytes.
    """
    if not isinstance(message, _RETRIED):
        return b""
    digest = hashlib.sha256(type(message).__name__.encode())
    digest.update(spec.SerializeToString(deterministic=True))
    return digest.digest()


class Converter:
    """Converts specs for one loaded model."""

    def __init__(
        self,
        info: ModelInfo,
        encoder: InputEncoder | None,
        limits: RequestLimits,
        names: Sequence[str],
        adapters: ServedAdapters,
        reply: ModelFormat | None,
        lacking: Mapping[str, str],
    ) -> None:
        """`encoder`: None if the model has no tokenizer. `names`: the names by which requests may
        refer to the model, starting with its own. `adapters`: those that they may name. `reply`:
        the format of its replies to conversations, or None if they are plain text. `lacking`: why
        tool choices or reasoning limits are unavailable, by capability name.
        """
        self._info = info
        self._encoder = encoder
        self._limits = limits
        self._names = tuple(names)
        self._adapters = adapters
        self._reply = reply
        self._lacking = lacking

    @property
    def _text(self) -> InputEncoder:
        if self._encoder is None:
            raise NoTokenizerError
        return self._encoder

    def draft(self, message: SpecMessage, may_use: MayUse, field: str = "spec") -> Draft:
        """Check a message's spec before any work is done for it. `may_use`: says which adapters the
        caller may use. `field`: the spec's path in the message.

        Raises:
            FieldError: the spec is missing, or the request's id or labels are invalid.
        """
        if not message.HasField("spec"):
            raise FieldError(field, "is missing; say what to generate")
        spec = message.spec
        if spec.request_id:
            check_request_id(spec.request_id, f"{field}.request_id")
        return Draft(
            spec=spec,
            field=field,
            request_id=spec.request_id or make_request_id(),
            labels=check_labels(spec.labels, f"{field}.labels") if spec.labels else NO_LABELS,
            footprint=message_footprint(spec),
            digest=_digest(message, spec) if spec.request_id else b"",
            may_use=may_use,
        )

    def _adapter(self, draft: Draft) -> str:
        """Return the name of the adapter that a spec names; its model's name may be one."""
        adapters, model, adapter = self._adapters, draft.spec.model, draft.spec.adapter
        if model and model not in self._names:
            if not adapters.has(model, draft.may_use):
                raise ModelNotFoundError(f"{draft.field}.model", model, self._names)
            if adapter not in ("", model):
                raise FieldError(
                    "adapter", "is another adapter than the one that model names; name one"
                )
            return model
        if adapter and adapters.are_served and not adapters.has(adapter, draft.may_use):
            raise AdapterNotLoadedError(adapter, f"{draft.field}.adapter")
        return adapter

    async def submission(
        self,
        draft: Draft,
        *,
        account: Account,
        weight: float,
        max_priority: int,
        engine_id: RequestId,
        lives_by: LivesBy = LivesBy.STREAM,
    ) -> Submission:
        """Convert a spec. Cheap checks come before the input is tokenized.

        Args:
            draft, account: the caller's draft, and the account that is charged.
            weight, max_priority: the account's current weight, and its highest allowed priority.
            engine_id: the request's id in the engine.
            lives_by: what the request needs in order not to be cancelled. Results for waiting calls
                are delivered in one message, whatever the spec says.

        Raises:
            ModelNotFoundError: the spec names another model.
            AdapterNotLoadedError: the spec names an adapter that is not loaded, or that the caller
                may not use.
            FieldError: a field is wrong. The error names it by its path in the spec.
            InvalidRequestError, UnsupportedFeatureError: a field is wrong. The error names it as in
                the engine.
            ChatTemplateUnavailableError: the model has no template.
        """
        spec = draft.spec
        output, field = spec.output, input_field(spec)
        request = self._without_prompt(draft, account, weight, max_priority, engine_id)
        plan = reply_plan(spec, self._reply, self._lacking)
        has_text = self._encoder is not None and not output.omit_text
        options = _delivery(output, request.logprobs, lives_by is LivesBy.CALLS, has_text)
        stop_strings = _stop_strings(spec)
        skip = output.skip_special_tokens if output.HasField("skip_special_tokens") else True
        make_text = self._text_maker(spec, request.stop.min_tokens, plan, stop_strings, skip)
        prompt, rendered = await self._prompt(account, spec, field, plan)
        prediction = await predicted_ids(account, spec, self._info, self._encoder)
        if options.describe_prompt:
            options.check_prompt(len(prompt), self._limits.max_send_bytes)
        echo = await self._text.decode(account, prompt, skip) if output.echo else ""
        ending, tail = prompt[-PROMPT_TAIL:], ""
        if plan.model is not None:
            tail = self._text.tokenizer.decode(ending, skip_special_tokens=False)
        grammar = plan.grammar(tail, rendered.form)
        texts = [
            make_text and make_text(prompt_tail=ending, initial_text=echo) for _ in range(request.n)
        ]
        room, stop = self._info.max_context_tokens - len(prompt), request.stop
        output_tokens = min(stop.max_tokens, room)
        given = spec.stop.HasField("max_tokens")
        if (whole := self._limits.whole.limit(options, lives_by)) is not None:
            output_tokens = whole.fitting(output_tokens, request.n, is_given=given)
        if not given:
            stop = replace(stop, max_tokens=output_tokens)
        request = replace(request, prompt=prompt, prediction=prediction, stop=stop, grammar=grammar)
        return Submission(
            account=account,
            request_id=draft.request_id,
            request=request,
            reserved_tokens=len(prompt) + request.n * output_tokens,
            footprint=Footprint.of_request(
                request,
                input_field=field,
                output_tokens=output_tokens,
                token_bytes=options.unread_per_token,
                stop_strings=stop_strings,
                echo=echo,
                labels=draft.labels,
                speculates=self._info.speculates,
            ),
            options=options,
            texts=texts,
            replies=[]
            if plan.parser is None
            else reply_texts(
                plan.parser, tail, draft.request_id, rendered.types, n=request.n, calls=plan.calls
            ),
            stop_strings=stop_strings,
            include_stop=spec.stop.include_stop,
            max_reasoning_tokens=plan.max_reasoning_tokens,
            lives_by=lives_by,
            digest=draft.digest,
            labels=draft.labels,
        )

    def _text_maker(
        self,
        spec: generation_pb2.GenerationSpec,
        min_tokens: int,
        plan: ReplyPlan,
        stop_strings: tuple[str, ...],
        skip_special: bool,
    ) -> Callable[..., TextStream] | None:
        """Return a factory for the text stream of a choice, or None if no text is wanted. Its
        caller adds the arguments that depend on the prompt.
        """
        if self._encoder is None or spec.output.omit_text:
            return None
        return partial(
            TextStream,
            self._encoder.tokenizer,
            stop_strings=StopStrings(stop_strings) if stop_strings else (),
            include_stop=spec.stop.include_stop,
            min_tokens=min_tokens,
            skip_special_tokens=skip_special,
            shown=plan.shown,
        )

    def _without_prompt(
        self,
        draft: Draft,
        account: Account,
        weight: float,
        max_priority: int,
        engine_id: RequestId,
    ) -> GenerationRequest:
        """Return the engine's request without the prompt and what depends on its length."""
        spec, adapter = draft.spec, self._adapter(draft)
        refuse_unsupported(
            spec,
            has_adapters=self._adapters.are_served,
            heeds_priorities=self._info.heeds_priorities,
            has_tokenizer=self._encoder is not None,
        )
        output = spec.output
        check_enum(generation_pb2.Delivery, output.delivery, "output.delivery")
        request = GenerationRequest(
            request_id=engine_id,
            prompt=NO_IDS,
            adapter=adapter,
            n=self._choices(spec),
            priority=_priority(spec.scheduling, max_priority),
            cache_salt=cache_salt(account.identity, spec.cache.salt),
            bypass_prefix_cache=spec.cache.bypass_prefix_cache,
            sampling=sampling_params(spec.sampling, self._info),
            logprobs=self._logprobs(output),
            prompt_logprobs=output.prompt_logprobs if output.HasField("prompt_logprobs") else None,
            stop=self._stop(spec.stop),
            time_limit_s=self._time_limit(spec.scheduling),
            caller=account.key,
            caller_group=CallerKey(account.group),
            weight=max(weight, MIN_WEIGHT),
            ticket=spec.request_id,
        )
        check_min_tokens(request.sampling, request.stop)
        return request

    async def _prompt(
        self, account: Account, spec: generation_pb2.GenerationSpec, field: str, plan: ReplyPlan
    ) -> tuple[TokenIds, Rendered]:
        """Return the token ids of the input, truncated as the spec asks and checked for length, and
        the whole input. `field`: the input's field.
        """
        truncation = Truncation.of(spec)
        whole = truncation.most is None
        # A prompt that fills the context can still be processed if max_tokens is 0.
        alone = spec.stop.HasField("max_tokens") and spec.stop.max_tokens == 0
        limit = self._info.max_context_tokens - (0 if alone else 1)
        match spec.WhichOneof("input"):
            case "tokens":
                # Only kept ids are checked, and no more than fit.
                ids = spec.tokens.ids
                kept = truncation.kept(len(ids))
                length = kept.stop - kept.start
                if not 1 <= length <= limit:
                    raise _wrong_length(field, length, limit, alone)
                size = self._info.vocab_size
                return check_ids(ids, field, size, most=len(ids), kept=kept), Rendered(())
            case "text":
                input = Rendered(await self._text.encode_text(account, spec.text, fits=whole))
            case "chat":
                input = await self._text.encode_chat(
                    account, spec.chat, fits=whole, hold=plan.tool_form
                )
            case _:
                raise FieldError("input", "is missing; set one of text, tokens and chat")
        encoded = input.ids[truncation.kept(len(input.ids))]
        if not 1 <= len(encoded) <= limit:
            raise _wrong_length(field, len(encoded), limit, alone)
        return TokenIds.of(encoded), input

    def _choices(self, spec: generation_pb2.GenerationSpec) -> int:
        n = spec.n if spec.HasField("n") else 1
        most = self._limits.max_choices
        if not 1 <= n <= most:
            raise FieldError("n", f"is {n}; it must be between 1 and {most} (limits.max_choices)")
        return n

    def _logprobs(self, output: generation_pb2.OutputOptions) -> LogprobParams | None:
        if output.HasField("prompt_logprobs") and output.prompt_logprobs > MAX_LOGPROBS:
            raise FieldError(
                "output.prompt_logprobs",
                f"is {output.prompt_logprobs}; it must be between 0 and {MAX_LOGPROBS} "
                "(limits.max_logprobs)",
            )
        if not output.HasField("logprobs") and not output.logprob_token_ids:
            return None
        ids = check_ids(
            output.logprob_token_ids,
            "output.logprob_token_ids",
            self._info.vocab_size,
            most=MAX_LOGPROB_TOKEN_IDS,
        )
        return LogprobParams(top_n=output.logprobs, token_ids=ids)

    def _stop(self, options: generation_pb2.StopOptions) -> StopParams:
        given = options.HasField("max_tokens")
        check, size, most = check_ids, self._info.vocab_size, MAX_STOP_TOKEN_IDS
        eos = check(options.eos_token_ids, "stop.eos_token_ids", size, most=most)
        stop_ids = check(options.stop_token_ids, "stop.stop_token_ids", size, most=most)
        return StopParams(
            max_tokens=options.max_tokens if given else self._limits.default_max_tokens,
            min_tokens=options.min_tokens,
            stop_token_ids=stop_ids,
            eos_token_ids=eos or TokenIds.of(self._info.eos_token_ids),
            ignore_eos=options.ignore_eos,
        )

    def _time_limit(self, options: generation_pb2.SchedulingOptions) -> float | None:
        if not options.HasField("time_limit"):
            return self._limits.default_time_limit_s
        limit = seconds(options.time_limit, "scheduling.time_limit")
        if limit <= 0:
            raise FieldError("scheduling.time_limit", "is 0; it must be above zero")
        most = self._limits.max_time_limit_s
        if most is not None and limit > most:
            raise FieldError(
                "scheduling.time_limit", f"is {limit:g} s; at most {most:g} s are allowed here"
            )
        return limit


def _wrong_length(field: str, length: int, limit: int, alone: bool) -> FieldError:
    """Return the error for a prompt that has no tokens or too many. `alone`: whether no output is
    requested.
    """
    if length == 0:
        return FieldError(field, "comes to no token at all; at least one is needed")
    name = "max_context_tokens" if alone else "max_prompt_tokens"
    return FieldError(
        field,
        f"comes to {length} tokens; at most {limit} fit (limits.{name}): "
        "shorten it, or set truncation",
    )


def cache_salt(identity: str, salt: str) -> bytes:
    """Return the key by which cached prefixes are shared: 32 bytes that are equal only for the same
    identity and the same salt.

    Raises:
        FieldError: the salt is too long.
    """
    raw = salt.encode()
    if len(raw) > MAX_SALT_BYTES:
        raise FieldError("cache.salt", f"is longer than {MAX_SALT_BYTES} bytes")
    # Each part is hashed separately, so that bytes cannot be moved from one to the other.
    name = hashlib.sha256(identity.encode()).digest()
    return hashlib.sha256(name + hashlib.sha256(raw).digest()).digest()


def _stop_strings(spec: generation_pb2.GenerationSpec) -> tuple[str, ...]:
    given, output = spec.stop.stop_strings, spec.output
    if len(given) > MAX_STOP_STRINGS:  # before they are walked
        raise FieldError(
            "stop.stop_strings",
            f"has {len(given)} entries; at most {MAX_STOP_STRINGS} are allowed "
            "(limits.max_stop_strings)",
        )
    stop_strings = tuple(given)
    if stop_strings:
        check_stop_strings(stop_strings)
    if stop_strings and output.omit_text:
        raise FieldError(
            "stop.stop_strings", "are matched in the text; they exclude output.omit_text"
        )
    if output.echo and output.omit_text:
        raise FieldError("output.echo", "asks for text; it excludes output.omit_text")
    return stop_strings


def _priority(options: generation_pb2.SchedulingOptions, most: int) -> int:
    if abs(options.priority) > MAX_PRIORITY:
        raise FieldError(
            "scheduling.priority",
            f"is {options.priority}; it must be between -{MAX_PRIORITY} and {MAX_PRIORITY}",
        )
    if options.priority > most:
        raise FieldError(
            "scheduling.priority",
            f"is {options.priority}; at most {most} is allowed to this caller (max_priority of its "
            "entry in the callers' file): ask for less",
        )
    return options.priority


def _delivery(
    output: generation_pb2.OutputOptions,
    logprobs: LogprobParams | None,
    final: bool,
    has_text: bool,
) -> DeliveryOptions:
    at_least = output.min_tokens_per_delta if output.HasField("min_tokens_per_delta") else 1
    if at_least == 0:
        raise FieldError("output.min_tokens_per_delta", "is 0; it must be 1 or more")
    return DeliveryOptions(
        final=final or output.delivery == generation_pb2.DELIVERY_FINAL,
        min_tokens_per_delta=at_least,
        token_details=output.token_details or output.record_timestamps or logprobs is not None,
        candidates=logprobs.top_n + len(logprobs.token_ids) if logprobs is not None else None,
        describe_prompt=output.HasField("prompt_logprobs"),
        prompt_candidates=output.prompt_logprobs,
        record_times=output.record_timestamps,
        has_text=has_text,
    )
