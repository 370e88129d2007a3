"""What becomes of calls to the engine that nobody waits for."""

from __future__ import annotations

import logging
from typing import cast

import pytest

from engine.contract.engine_client import EngineClient
from engine.contract.errors import EngineUnavailableError
from engine.contract.types import RequestId
from service.delivery.engine_calls import EngineCalls


class _Raising:
    """An engine whose calls raise."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def cancel(self, request_id: RequestId) -> bool:
        raise self._error


@pytest.mark.parametrize(
    ("error", "level", "has_traceback"),
    [
        (EngineUnavailableError("the engine ended"), logging.INFO, False),
        (ValueError("a mistake of ours"), logging.ERROR, True),
    ],
    ids=["an engine that died", "anything else"],
)
async def test_what_a_call_raises_is_logged(
    error: Exception, level: int, has_traceback: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    calls = EngineCalls(cast(EngineClient, _Raising(error)))
    calls.cancel(RequestId("a"))
    await calls.settle()
    (record,) = caplog.records
    assert record.levelno == level
    assert (record.exc_info is not None) == has_traceback
    assert "cancelling a" in record.getMessage()
