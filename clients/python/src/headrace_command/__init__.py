"""The entry point of the `headrace` command.

It is a separate package because gRPC reads its settings from the environment when it is imported,
and every module of `headrace` imports it.
"""

from __future__ import annotations

import os


def main() -> None:
    """Runs the command."""
    # Errors come as messages of ours: the lines of gRPC itself on stderr say less.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from headrace.cli.app import app

    app()
