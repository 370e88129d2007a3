"""What all tests share."""

from __future__ import annotations

import signal

from hypothesis import settings

# The same examples in every run: a failure is there for whoever runs the tests next, and a change
# is never blamed for what chance has found. To search on, give `--hypothesis-profile=random`.
settings.register_profile("repeatable", derandomize=True, database=None)
settings.register_profile("random", derandomize=False)
settings.load_profile("repeatable")

# A shell has its background jobs ignore SIGINT, and what tests start there inherits that: it could
# not be interrupted.
signal.signal(signal.SIGINT, signal.default_int_handler)
