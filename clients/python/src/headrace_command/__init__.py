"""The entry of the `headrace` command.

It is a package of its own since gRPC reads its settings from the environment as it is imported, and
whatever is in `headrace` imports it.
"""

from __future__ import annotations

import os


def main() -> None:
    """Runs the command."""
    # Errors come as messages of ours: the lines of gRPC itself on stderr say less.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from headrace.cli.app import app

    app()
