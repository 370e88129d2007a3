"""What all tests share."""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

# The same examples in every run: a failure is there for whoever runs the tests next, and a change
# is never blamed for what chance has found. To search on, give `--hypothesis-profile=random`.
settings.register_profile("repeatable", derandomize=True, database=None)
settings.register_profile("random", derandomize=False)
settings.load_profile("repeatable")

# Also where the environment says no: without their bytecode, each of the hundreds of processes that
# tests start compiles torch and transformers again, for six seconds.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell has its background jobs ignore SIGINT, and what tests start there inherits that: it could
# not be interrupted.
signal.signal(signal.SIGINT, signal.default_int_handler)

WORKER_BYTES = 4 << 30
"""What a process that runs tests may come to hold: 2 GB of its own, and the servers it starts."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--with-telemetry`: see tests/service/conftest.py; `--chat-model`: see test_chat_model.py
    there; `--campaign-…`: see tests/campaign.
    """
    parser.addoption("--with-telemetry", action="store_true", help="servers make spans and metrics")
    parser.addoption("--chat-model", type=Path, help="a chat model's directory, to test it too")
    add = parser.getgroup("campaign", "the campaign (-m campaign)").addoption
    add("--campaign-part", action="append", default=[], help="only this one; may be repeated")
    add("--campaign-seed", type=int, default=1, help="of everything drawn (default 1)")
    add("--campaign-minutes", type=float, default=180, help="begin no part after so many")
    add("--campaign-cut", action="store_true", help="the few minutes of it that CI runs")
    add("--campaign-again", action="store_true", help="also what is recorded already")
    add("--campaign-only", default="", help="only rows whose names contain this")
    add("--campaign-seconds", type=float, help="of each thing whose time can be chosen")
    add("--campaign-record", type=Path, help="the file of the records")


def pytest_collection_finish() -> None:
    """No garbage collection looks again at the modules and tests that are there before the first
    test, and stay: a full one takes half a second with them, and a hundredth without.
    """
    gc.freeze()


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's: not everybody who runs tests has it
def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`: a process for each core, if memory is enough for them."""
    room = psutil.virtual_memory().available // WORKER_BYTES
    return max(min(os.cpu_count() or 1, room), 1)
