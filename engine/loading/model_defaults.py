"""Reads a checkpoint's defaults: context length, end tokens, and sampling.

They apply to requests that do not set their own.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from transformers import GenerationConfig

from engine.contract.errors import InvalidRequestError
from engine.contract.rope import RopeLengths
from engine.contract.sampling_params import DEFAULT_TOP_K, SamplingParams
from engine.contract.types import TokenId

logger = logging.getLogger(__name__)

_NO_LIMIT = 1 << 20
"""The context assumed for a model without a limit. The cache's size limits it anyway."""
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies depend on the length beyond the original one."""


def context_length(text_config: Any, rope: RopeLengths | None = None) -> int:
    """Return the longest request that the model allows, in tokens.

    `rope` says how rotary frequencies depend on a request's length, if steps support that.
    """
    if rope is not None:
        return rope.longest
    length = getattr(text_config, "max_position_embeddings", None) or _NO_LIMIT
    parameters = getattr(text_config, "rope_parameters", None) or {}
    # Either one set of parameters, or one for each kind of layer.
    nested = [one for one in parameters.values() if isinstance(one, dict)]
    for entry in nested or [parameters]:
        if entry.get("rope_type") not in _LENGTH_DEPENDENT_ROPE:
            continue
        original = entry.get("original_max_position_embeddings") or getattr(
            text_config, "original_max_position_embeddings", None
        )
        if original and original < length:
            logger.warning(
                "context limited to %d of %d tokens: beyond that, %s rotary embeddings depend on "
                "a request's length, which this model's steps cannot follow",
                original,
                length,
                entry["rope_type"],
            )
            length = original
    return int(length)


def eos_token_ids(
    generation_config: GenerationConfig | None, config: Any, vocab_size: int
) -> tuple[TokenId, ...]:
    """Return the model's end-of-sequence ids, in ascending order.

    Ids outside the vocabulary are dropped, because configs often contain those of another
    tokenizer.
    """
    ids = generation_config.eos_token_id if generation_config is not None else None
    if ids is None:
        ids = getattr(config.get_text_config(), "eos_token_id", None)
    if ids is None:
        return ()
    named = sorted({ids} if isinstance(ids, int) else set(ids))
    outside = [token for token in named if not 0 <= token < vocab_size]
    if outside:
        logger.warning("end-of-sequence ids %s are not in the vocabulary: left out", outside)
    return tuple(TokenId(token) for token in named if token not in outside)


def default_sampling(generation_config: GenerationConfig | None) -> SamplingParams:
    """Return the sampling that `model.generate` uses with this generation config.

    It is greedy unless the config requests sampling. Filters such as top_k come from the config, or
    else from transformers' defaults. This also applies to a greedy config, because a request may
    enable sampling.
    """
    neutral_params = SamplingParams(top_k=DEFAULT_TOP_K)
    if generation_config is None:
        return neutral_params

    def value(name: str, neutral: float) -> float:
        found = getattr(generation_config, name, None)
        return neutral if found is None or not math.isfinite(found) else float(found)

    sampled = bool(generation_config.do_sample)
    try:
        return SamplingParams(
            temperature=value("temperature", 1.0) if sampled else 0.0,
            top_k=int(value("top_k", DEFAULT_TOP_K)),
            top_p=value("top_p", 1.0),
            min_p=value("min_p", 0.0),
            typical_p=value("typical_p", 1.0),
            repetition_penalty=value("repetition_penalty", 1.0),
            no_repeat_ngram_size=int(value("no_repeat_ngram_size", 0)),
        )
    except InvalidRequestError as error:
        logger.warning("the model's generation config is not usable, sampling is greedy: %s", error)
        return neutral_params
