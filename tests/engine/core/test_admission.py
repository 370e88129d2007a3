"""The bounds of a request's fields."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from engine.contract.errors import InvalidRequestError, UnsupportedFeatureError
from engine.contract.request import (
    MAX_CACHE_SALT_BYTES,
    MAX_CALLER_CHARS,
    MAX_WEIGHT,
    MIN_WEIGHT,
    GenerationRequest,
)
from engine.contract.sampling_params import MAX_CHOICES, MAX_LOGPROBS, LogprobParams, SamplingParams
from engine.contract.types import TokenId
from engine.core.admission import AdmissionLimits
from tests.engine.fake_runner import make_request

LIMITS = AdmissionLimits(vocab_size=10, model_context=16, cache_context=32)


def request(**changes: Any) -> GenerationRequest:
    return dataclasses.replace(make_request("a", [1, 2], 3), **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"n": 1},
        {"n": MAX_CHOICES},
        {"priority": 100},
        {"priority": -100},
        {"prompt_logprobs": 0},
        {"prompt_logprobs": MAX_LOGPROBS},
        {"cache_salt": b"x" * MAX_CACHE_SALT_BYTES},
        {"time_limit_s": 1e-9},
        {"sampling": SamplingParams(allowed_token_ids=(TokenId(0), TokenId(9)))},
        {"sampling": SamplingParams(banned_token_ids=(TokenId(9),))},
        {"logprobs": LogprobParams(token_ids=(TokenId(9),))},
        {"prompt": (TokenId(1),) * 15},
        {"caller": "c" * MAX_CALLER_CHARS},
        {"weight": MIN_WEIGHT},
        {"weight": MAX_WEIGHT},
    ],
)
def test_within(changes: dict[str, Any]) -> None:
    LIMITS.check(request(**changes))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"n": 0}, r"^n: is 0; .* from 1 to 128"),
        ({"n": MAX_CHOICES + 1}, "^n: is 129"),
        ({"n": True}, "^n: is True"),
        ({"priority": 101}, r"^priority: is 101; .* from -100 to 100"),
        ({"priority": -101}, r"^priority"),
        ({"prompt_logprobs": -1}, r"^prompt_logprobs"),
        ({"prompt_logprobs": MAX_LOGPROBS + 1}, r"^prompt_logprobs: is 129"),
        ({"cache_salt": b"x" * 257}, r"^cache_salt: has 257 bytes; at most 256"),
        ({"time_limit_s": 0.0}, r"^time_limit"),
        ({"time_limit_s": float("nan")}, r"^time_limit"),
        (
            {"sampling": SamplingParams(allowed_token_ids=(TokenId(0), TokenId(10)))},
            r"^sampling\.allowed_token_ids\[1\]: is 10",
        ),
        (
            {"sampling": SamplingParams(banned_token_ids=(TokenId(2**31 - 1),))},
            r"^sampling\.banned_token_ids\[0\]: is 2147483647; .* from 0 to 9",
        ),
        (
            {"logprobs": LogprobParams(token_ids=(TokenId(10),))},
            r"^logprob_token_ids\[0\]: is 10",
        ),
        ({"prompt": (TokenId(1),) * 16}, "at most 15 fit"),
        ({"caller": "c" * (MAX_CALLER_CHARS + 1)}, "^caller: has 513 characters; at most 512"),
        ({"caller_group": "c" * (MAX_CALLER_CHARS + 1)}, "^caller_group: has 513 characters"),
        ({"weight": 0.0}, r"^weight: is 0; it must be between 0\.001 and 1000"),
        ({"weight": MIN_WEIGHT / 2}, "^weight: is 0.0005"),
        ({"weight": 1001.0}, "^weight: is 1001"),
        ({"weight": float("inf")}, "^weight: is inf"),
        ({"weight": float("nan")}, "^weight: is nan"),
    ],
)
def test_beyond(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidRequestError, match=match):
        LIMITS.check(request(**changes))


def test_a_priority_that_the_scheduler_would_ignore() -> None:
    limits = dataclasses.replace(LIMITS, heeds_priorities=False)
    limits.check(request(priority=0))
    with pytest.raises(UnsupportedFeatureError, match=r"^priority: .*scheduler_type"):
        limits.check(request(priority=1))
