"""The limit on open files of the server's process. Each connection is an open file."""

from __future__ import annotations

import logging
import resource

logger = logging.getLogger(__name__)

RESERVED = 64
"""The number of files that the server itself needs: for its log, its sockets, and starting an
engine's process.
"""
_MAX = 65_536


def raise_limit() -> None:
    """Raise the soft limit to the hard one, but not above 65,536."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX if hard == resource.RLIM_INFINITY else min(hard, _MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    logger.info("open files: at most %d", allowed())


def allowed() -> int:
    """Return how many files may currently be open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX if soft == resource.RLIM_INFINITY else soft
