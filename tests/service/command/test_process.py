"""The process around the server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.service.helpers import DEADLINE_S
from tests.service.readme import ROOT

_SERVES = """
import gc, os, signal, sys
from service.command import process
from service.config import ServiceConfig
from service.logs.output import Output
from tests.service.fake_engine import FakeEngine, byte_tokenizer

def welcome(*_):
    os.kill(os.getpid(), signal.SIGTERM)
    return f"frozen: {gc.get_freeze_count() > 10_000}"

process.welcome = welcome
config = ServiceConfig(listen=(f"unix:{sys.argv[1]}",), insecure=True)
with Output(config.log_format, config.log_level) as output:
    tokenizer = lambda _: byte_tokenizer()
    process.run_to_the_end(config, FakeEngine(), output, tokenizer_loader=tokenizer)
"""


def test_what_start_up_made_is_not_searched_for_garbage_while_serving(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SERVES, str(tmp_path / "door")],
        cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=True,
    )  # fmt: skip
    assert "frozen: True" in done.stderr + done.stdout
