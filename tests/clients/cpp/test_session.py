"""The C++ example of a session against a real server, with an engine whose output is known. It is
built by `make test-clients`, which takes minutes the first time.
"""

from __future__ import annotations

import subprocess

import pytest

from tests.clients.go_ts.programs import REPOSITORY, running_server

PROGRAM = REPOSITORY / ".tools" / "cpp" / "session"


@pytest.mark.skipif(not PROGRAM.exists(), reason="not built: make test-clients does it")
def test_the_example_prints_each_text() -> None:
    with running_server("service_server") as server:
        done = subprocess.run(
            [str(PROGRAM), server.unix, "abcd", "river"], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        # The engine says the prompt again, from its second byte on.
        assert done.stdout == f"prompt-1:{'bcda' * 8}\nprompt-2:{('iverr' * 7)[:32]}\n"
