"""The load gate: refuses a model that would run incorrectly, and gives the reason.

1. `check_config`, before any weight is read: the class must route its attention through
    AttentionInterface, and every layer must be of a supported kind.
2. `probe_layers`: an eager forward that watches the attention calls and the masks. Each layer must
    make exactly one call. The shapes of its keys and values are recorded, because the config may be
    wrong about them. The window is found by evaluating the mask's rule for positions up to the end
    of the context (`engine.loading.mask_rules`), because the prompts are too short to show it. At
    each call, our backend computes the same attention, with queries scaled up until the scores are
    large. This reveals a missing softcap, sink or window, which ordinary small scores would not.
3. `self_check`: two prompts in one ragged batch, one of them in chunks, through the paged cache.
    The logits are compared with the eager logits of each prompt alone.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import MODEL_MAPPING, PreTrainedModel

from engine.attention.interface import AttentionBackend, AttentionParams
from engine.attention.registry import (
    ATTENTION_NAME,
    AttentionUnavailableError,
)
from engine.attention.small_cache import SmallCache, Span, zeros
from engine.contract.errors import ModelRefusedError, NoStepError
from engine.contract.types import TokenId
from engine.loading.eager import check_users_own, eager_attention, is_users_own
from engine.loading.float32_layers import in_float32, rounded_and_not
from engine.loading.recurrent import (
    ATTENTION_KINDS,
    STATE_KINDS,
    STATELESS_KINDS,
    recurs,
    uses_states,
)
from engine.loading.watching import ObservedCall, observe
from engine.models.description import Decoder
from engine.models.recording import Observation
from engine.runner.forward import CausalModel

_PROBE_TOKENS = (43, 11)
"""The lengths of the two prompts: more than one small block, but not a multiple of it."""
_PROBE_BLOCK_SIZE = 8
_PROBE_CHUNK = 29
_TARGET_SCORE = 60.0
"""Scores are scaled up to about this value, which exceeds the usual softcaps (30 to 50)."""
_LAYER_TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Tolerances for one layer's output, relative to its largest element. The type is float32, or
another one if our backend does not support float32.
"""
_LOGITS_TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 8e-2, torch.float16: 2e-2}
"""Tolerances for the logits: |difference| / |reference| over all logits."""
_NOISE = 1.5
"""The allowed error of logits relative to the largest one of rounding."""
_FAR = 0.75
"""The largest allowed error, relative to the distance of two prompts' logits."""

SUPPORTED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_WITH_STATES = SUPPORTED_LAYER_TYPES | STATE_KINDS | STATELESS_KINDS


def check_config(config: Any, model_class: type[PreTrainedModel]) -> None:
    """Refuse a model based on its config, before its weights are read.

    Raises:
        ModelRefusedError: the architecture is not supported.
    """
    name = model_class.__name__
    text_config = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        raise ModelRefusedError(f"{name} is an encoder-decoder model; only decoders are served")
    text_class = MODEL_MAPPING.get(type(text_config), model_class)  # other files have the towers
    kinds = set(getattr(text_config, "layer_types", None) or ())
    carries = recurs(kinds) and any(map(uses_states, (model_class, text_class)))
    attends = not carries or bool(kinds & ATTENTION_KINDS)
    if attends and not any(map(_names_attention_interface, (model_class, text_class))):
        raise ModelRefusedError(
            f"{name} does not route its attention through transformers' AttentionInterface, "
            "so the paged KV cache cannot be put behind it"
        )
    if recurs(kinds) and not carries:
        raise ModelRefusedError(
            f"{name} has layers of kind {', '.join(sorted(kinds & STATE_KINDS))} that keep their "
            "states in a cache of their own, not in transformers'"
        )
    supported = _WITH_STATES if carries else SUPPORTED_LAYER_TYPES
    unknown = sorted(kinds - supported)
    if unknown:
        raise ModelRefusedError(
            f"{name} has layers of kind {', '.join(unknown)}; "
            f"supported are {', '.join(sorted(supported))}"
        )
    if getattr(text_config, "attn_temperature_tuning", False):
        raise ModelRefusedError(
            f"{name} scales queries by a token's place in the row that is computed, not by its "
            "position (attn_temperature_tuning): in a batch, neighbours would change each other"
        )


def _names_attention_interface(model_class: type[PreTrainedModel]) -> bool:
    """Return whether a class may route its attention through AttentionInterface.

    This is true if the class declares it or its file mentions the interface (as BioGPT's does,
    although its class does not declare it). The probe finds out whether the class really does.
    """
    file = sys.modules.get(model_class.__module__)
    return model_class._supports_attention_backend or hasattr(file, "ALL_ATTENTION_FUNCTIONS")


class NotFiniteError(ModelRefusedError):
    """The model's own results are NaN or infinite.

    The message says where; more text may follow it.
    """


class _Judge:
    """Compares our backend with each attention call of a model.

    Attributes:
        users_own: the attention classes whose forward is defined outside transformers.
    """

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend
        self.users_own: set[str] = set()

    def __call__(self, call: ObservedCall) -> None:
        """Judge a call; see `engine.loading.watching.Judge`."""
        if is_users_own(call.module):
            self.users_own.add(type(call.module).__name__)
        if not all(bool(one.isfinite().all()) for one in call.tensors):
            raise NotFiniteError(
                f"what {type(call.module).__name__} of layer {call.layer} is given is NaN or "
                "infinite"
            )
        self._compare(call)

    def _compare(self, call: ObservedCall) -> None:
        """Compare our backend with the model's own attention on large scores.

        Both are computed in float32 if our backend supports it.
        """
        known, name = self._backend.dtypes, f"{type(call.module).__name__}, layer {call.layer}"
        query, key, value = (one.float() for one in call.tensors)
        dtype = call.tensors[1].dtype
        if known is None or torch.float32 in known:
            dtype = torch.float32
        groups = query.shape[1] // key.shape[1]
        scores = query @ key.repeat_interleave(groups, dim=1).transpose(-1, -2) * call.scaling
        query = query * (_TARGET_SCORE / scores.abs().max().clamp(min=1e-6))
        query, key, value = (one.to(dtype).float() for one in (query, key, value))
        sinks = call.options.get("s_aux")
        sinks = None if sinks is None else sinks.float()
        expected = eager_attention(call.module)(
            *(call.module, query, key, value),
            None if call.mask is None else call.mask.float(),
            scaling=call.scaling,
            **(call.options if sinks is None else {**call.options, "s_aux": sinks}),
        )[0][0].float()
        if not bool(expected.isfinite().all()):
            raise NotFiniteError(f"what {name} makes is NaN or infinite")
        params = AttentionParams(call.scaling, call.options.get("softcap"), sinks)
        reason = self._backend.why_not(call.shape, params)
        if reason is not None:
            raise AttentionUnavailableError(f"{name}, {reason}")
        query, key, value = (one.to(dtype) for one in (query, key, value))
        small = SmallCache(
            self._backend,
            {call.layer: call.shape},
            [query.shape[2]],
            _block_size(self._backend),
            zeros(dtype, query.device),
        )
        context = small.step([Span(0, 0, query.shape[2])]).context
        actual = context.attend(call.layer, query[0], key[0], value[0], params).float()
        error = (actual - expected).abs().max() / expected.abs().max().clamp(min=1e-6)
        if not error < _LAYER_TOLERANCE[dtype]:
            raise ModelRefusedError(
                f"{name}: paged attention differs from the model's own by {error.item():.2%}; the "
                "layer does something that this engine does not know"
            )


def _block_size(backend: AttentionBackend) -> int:
    """Return the smallest block size that a backend supports, but at least the usual one here."""
    return math.lcm(_PROBE_BLOCK_SIZE, backend.block_multiple)


def probe_layers(
    model: PreTrainedModel, backend: AttentionBackend, decoder: Decoder | None = None
) -> Observation:
    """Run the model eagerly on two prompts and watch it.

    Args:
        model: in evaluation mode, not in use.
        backend: the backend that is compared with the model's attention.
        decoder: the model's description, if its layers are to be recorded with the second prompt,
            where attention is then not compared.

    Raises:
        ModelRefusedError: a layer makes no attention call, several calls, or one that our backend
            would compute incorrectly.
        NotFiniteError: the model's own results are not finite.
        AttentionUnavailableError: the backend does not support a layer.
    """
    judge, generator = _Judge(backend), torch.Generator().manual_seed(0)
    prompts = [
        tuple(map(TokenId, torch.randint(0, num_embeddings(model), (count,), generator=generator)
                  .tolist()))
        for count in _PROBE_TOKENS
    ]  # fmt: skip
    found = observe(model, prompts, judge, decoder)
    for logits in found.logits:
        if bool(logits.isnan().any()) or not math.isfinite(logits.max()):
            raise NotFiniteError("the logits are NaN or infinite")
    if judge.users_own:
        check_users_own(model, judge.users_own, found)
    return found


def num_embeddings(model: PreTrainedModel) -> int:
    """Return the number of token ids in the model's input embeddings."""
    embeddings = model.get_input_embeddings()
    # Reading a packed weight would unpack it.
    count: int = getattr(embeddings, "num_embeddings", None) or embeddings.weight.shape[0]
    return count


def self_check(
    model: PreTrainedModel,
    probe: Observation,
    backend: AttentionBackend,
    device: torch.device,
    decoder: CausalModel | None = None,
    *,
    is_whole: bool = True,
) -> None:
    """Run both prompts through the paged cache and compare the logits with the eager ones.

    The prompts form a ragged batch, and one is computed in chunks. The model is left with our
    attention implementation. If there is a decoder, it runs instead of the model. If the tolerance
    is exceeded by a model that `is_whole`, not split, it becomes what rounding makes of the model's
    own results.

    Raises:
        ModelRefusedError: the logits differ.
    """
    model.set_attn_implementation(ATTENTION_NAME)
    errors = _paged_errors(decoder or model, model, probe, backend, device)
    allowed = logits_tolerance(probe.dtype)
    if is_whole and not all(error < allowed for error in errors):
        allowed = max(allowed, _rounding_noise(model, probe, backend, device))
    model.set_attn_implementation(ATTENTION_NAME)
    for error in errors:
        if not error < allowed:
            raise ModelRefusedError(
                f"{type(model).__name__}: logits through the paged cache differ from the model's "
                f"own by {error:.2%}; it would be run wrongly"
            )


def _paged_errors(
    computed_by: CausalModel,
    model: PreTrainedModel,
    probe: Observation,
    backend: AttentionBackend,
    device: torch.device,
) -> list[float]:
    """Return the errors of both prompts' logits, computed in several steps."""
    long, short = map(len, probe.prompts)
    allocate = zeros(probe.dtype, device)
    small = SmallCache(
        *(backend, probe.shapes, (long, short), _block_size(backend), allocate), probe.recurrence
    )
    ids = torch.tensor(list(itertools.chain(*probe.prompts)), device=device)
    # The last token of each part is requested: in one step a few of many rows, in another every
    # row.
    steps = (
        [Span(0, 0, _PROBE_CHUNK)],
        [Span(0, _PROBE_CHUNK, long - 1), Span(1, 0, short - 1)],
        [Span(0, long - 1, long), Span(1, short - 1, short)],
    )
    actual = torch.empty(0)
    for parts in steps:
        actual = _paged_logits(model, computed_by, small, parts, ids)
    return list(map(logits_error, actual, probe.logits))


def _rounding_noise(
    model: PreTrainedModel, probe: Observation, backend: AttentionBackend, device: torch.device
) -> float:
    """Return how far logits may be off because the model itself rounds.

    Each token of the prompts shows it once, and one whose experts are nearly as good as others
    shows it best, so the largest error counts. The bound stays below the distance of the prompts'
    logits. It is 0 if the model does not run in float32, or does not do so through the paged cache
    as by itself. The model's attention is left as it may be.
    """
    if probe.dtype is torch.float32:
        return 0.0
    try:
        rounded, wide = rounded_and_not(model, probe.prompts)
        if backend.dtypes is None or torch.float32 in backend.dtypes:
            ends = len(probe.prompts[0]) - 1, -1
            exact = replace(
                probe,
                dtype=torch.float32,
                logits=tuple(wide[end] for end in ends),
                recurrence=probe.recurrence.in_float32(),
            )
            model.set_attn_implementation(ATTENTION_NAME)
            with in_float32(model):
                errors = _paged_errors(model, model, exact, backend, device)
            if not all(error < logits_tolerance(torch.float32) for error in errors):
                return 0.0
    except ModelRefusedError:
        return 0.0
    noise = max(map(logits_error, wide, rounded))
    return min(_NOISE * noise, _FAR * logits_error(*probe.logits))


def logits_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return |difference| / |reference| over all logits of a token, [V] each.

    The result is infinity if different logits are minus infinity. A bias sets logits to minus
    infinity for ids that represent no token.
    """
    finite = expected.isfinite()
    if not torch.equal(actual[~finite].float(), expected[~finite]):
        return math.inf
    expected = expected[finite]
    return float((actual[finite].float() - expected).norm() / expected.norm().clamp(min=1e-6))


def logits_tolerance(dtype: torch.dtype) -> float:
    """Return the error from which a model with keys and values of this type is refused."""
    return _LOGITS_TOLERANCE.get(dtype, 8e-2)


def _paged_logits(
    model: PreTrainedModel,
    computed_by: CausalModel,
    small: SmallCache,
    parts: Sequence[Span],
    ids: torch.Tensor,
) -> torch.Tensor:
    """Return the logits of a step's parts only."""
    name = type(model).__name__
    try:
        logits = small.step(parts).logits(computed_by, ids)
    except NoStepError as error:
        raise ModelRefusedError(
            f"{name} does not hand the keyword arguments of its forward on to its attention, so "
            "the paged KV cache cannot reach it"
        ) from error
    except (IndexError, TypeError, ValueError, RuntimeError) as error:
        raise ModelRefusedError(f"{name} fails on a ragged batch: {error}") from error
    if len(logits) != len(parts):
        raise ModelRefusedError(
            f"{name} gives logits of {len(logits)} tokens where {len(parts)} were asked for: "
            "it does not know logits_to_keep"
        )
    return logits
