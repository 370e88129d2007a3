"""Headrace's batching engine: continuous batching over a paged KV cache, around unmodified
transformers models.

This package module stays light: it imports neither torch nor transformers until `load` is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.config import ContinuousBatchingConfig
    from engine.offline import LoadedModel

__all__ = ["load"]


def load(path: str, config: ContinuousBatchingConfig | None = None, **options: Any) -> LoadedModel:
    """Load a model directory (or hub id) and give it continuous batching; see
    `engine.offline.load`.
    """
    from engine.offline import load as load_model

    return load_model(path, config, **options)
