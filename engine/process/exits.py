"""Explains the exit code of the engine's process to an operator."""

from __future__ import annotations

import signal

_KILLED = (
    "it was killed; unless a line before says that it hung, memory was short: give it more, or a "
    "smaller share to the KV cache (max_memory_percent); headrace-server plan says what a model "
    "takes"
)
MENTIONS = ("max_memory_percent",)
"""The options that a description may mention."""


def describe_exit(code: int) -> str:
    """Describe an exit code in words. Negative ones are signals."""
    if code == -signal.SIGKILL:
        return f"exit code {code}: {_KILLED}"
    return f"exit code {code}"
