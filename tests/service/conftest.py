"""One real server for all tests that only talk to it."""

from __future__ import annotations

import pytest

from tests.service.real_server import RealServer, demo_server


@pytest.fixture(scope="session")
def demo() -> RealServer:
    """A ready server with the demo model, on TCP and on a Unix socket."""
    return demo_server()
