"""What admission refuses, and when it says to come again."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from service.errors.call_errors import LimitReachedError
from tests.service.helpers import Refused


def no_jitter() -> float:
    return 0.0


def limit_of(call: Any) -> LimitReachedError:
    with pytest.raises(LimitReachedError) as caught:
        call()
    return caught.value


def check_advice(error: Refused, seconds: float) -> None:
    """RetryInfo, and the same in the trailer that retry policies read."""
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.details["RetryInfo"].retry_delay.ToTimedelta().total_seconds() == pytest.approx(
        seconds, abs=0.002
    )
    told = error.details["RetryInfo"].retry_delay.ToMilliseconds()
    assert error.trailers["grpc-retry-pushback-ms"] == str(told)
