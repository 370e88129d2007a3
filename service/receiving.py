"""How large a message may be that the server receives, where the operator does not say.

A message is parsed in one piece on the event loop, which nothing else shares meanwhile (at worst
about 30 ms a MiB), so the bound is not larger than prompts need: 8 bytes for each token of the
model's context, and 1 MiB at least. The port opens before the model is loaded, so the context is
read from config.json, which needs no more than a JSON parser.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

MIN_RECEIVE_BYTES = 1 << 20
BYTES_OF_TOKEN = 8
"""Text in most languages comes to 2 to 6 bytes a token; an id takes 5 at most."""
UNKNOWN_RECEIVE_BYTES = 8 << 20
"""For a model that is not on this machine yet: enough for a context of a million tokens."""
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len")
_MAX_CONFIG_BYTES = 16 << 20


def default_receive_bytes(model: str) -> int:
    """The bound for a model: a directory, or a hub id."""
    path = _config_of(model)
    if path is None:
        return UNKNOWN_RECEIVE_BYTES
    return max(MIN_RECEIVE_BYTES, BYTES_OF_TOKEN * _context_of(path))


def _config_of(model: str) -> Path | None:
    """Where its config.json is; None: the hub's cache does not have it."""
    directory = Path(model).expanduser()
    if directory.is_dir():
        return directory / "config.json"
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model, "config.json")
    except HFValidationError:  # no hub id; loading it will say so
        return None
    return Path(found) if isinstance(found, str) else None


def _context_of(path: Path) -> int:
    """The context that a config.json declares, in tokens; 0: none that can be read. (What is wrong
    with it is said when the model is loaded.)
    """
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            return 0
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return 0
    return max(_lengths(content), default=0)


def _lengths(content: object) -> Iterator[int]:
    """The lengths that a config declares, its parts' included (text_config, ...)."""
    if not isinstance(content, dict):
        return
    for key in _CONTEXT_KEYS:
        if isinstance(length := content.get(key), int):
            yield min(length, 1 << 27)
    for part in content.values():
        if isinstance(part, dict):
            yield from _lengths(part)
