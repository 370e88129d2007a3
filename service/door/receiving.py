"""The default for the largest message that the server accepts.

A message is parsed as a whole on the event loop and blocks it meanwhile (for at most about 30 ms
per MiB). So the limit is no larger than prompts need: 8 bytes for each token of the model's
context, and at least 1 MiB. The port opens before the model is loaded, so the context is read from
config.json, which only takes a JSON parser.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

MIN_RECEIVE_BYTES = 1 << 20
BYTES_OF_TOKEN = 8
"""Text in most languages has 2 to 6 bytes per token, and an id takes at most 5."""
UNKNOWN_RECEIVE_BYTES = 8 << 20
"""The default for a model that is not on this machine yet: enough for a context of a million
tokens.
"""
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len")
_MAX_CONFIG_BYTES = 16 << 20


def default_receive_bytes(model: str) -> int:
    """Return the default for a model, which is a directory or a hub id."""
    path = _config_of(model)
    if path is None:
        return UNKNOWN_RECEIVE_BYTES
    return max(MIN_RECEIVE_BYTES, BYTES_OF_TOKEN * _context_of(path))


def _config_of(model: str) -> Path | None:
    """Return the path of the model's config.json, or None if it is not in the hub's cache."""
    directory = Path(model).expanduser()
    if directory.is_dir():
        return directory / "config.json"
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model, "config.json")
    except HFValidationError:  # not a hub id; loading the model will report that
        return None
    return Path(found) if isinstance(found, str) else None


def _context_of(path: Path) -> int:
    """Return the context that a config.json declares, in tokens, or 0 if it cannot be read.
    (Loading the model reports what is wrong with it.)
    """
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            return 0
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return 0
    return max(_lengths(content), default=0)


def _lengths(content: object) -> Iterator[int]:
    """Yield the lengths that a config declares, including its nested configs (text_config, ...)."""
    if not isinstance(content, dict):
        return
    for key in _CONTEXT_KEYS:
        if isinstance(length := content.get(key), int):
            yield min(length, 1 << 27)
    for part in content.values():
        if isinstance(part, dict):
            yield from _lengths(part)
