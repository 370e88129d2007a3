"""The limit on open files of the server's process; each connection is one."""

from __future__ import annotations

import logging
import resource

logger = logging.getLogger(__name__)

RESERVED = 64
"""How many the server itself needs: for its log, its sockets, the start of an engine's process."""
_MAX = 65_536


def raise_limit() -> None:
    """Raise the soft limit to the hard one, but not above 65,536."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX if hard == resource.RLIM_INFINITY else min(hard, _MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    logger.info("open files: at most %d", allowed())


def allowed() -> int:
    """How many files may be open at present."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX if soft == resource.RLIM_INFINITY else soft
