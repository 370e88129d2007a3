"""Headrace's batching engine: continuous batching over a paged KV cache for unmodified transformers
models.

This package exports the public Python API; docs/offline.md shows how to use it. Importing it
imports neither torch nor transformers, because each name is resolved on first use. Only `load`,
`from_model` and `LoadedModel` need them, and only `Telemetry` needs OpenTelemetry.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.api.manager import ContinuousBatchingManager
    from engine.api.offline import LoadedModel, from_model, load
    from engine.api.results import GenerationOutput, choice_name
    from engine.contract.config import ContinuousBatchingConfig, LoadConfig
    from engine.contract.errors import HeadraceError
    from engine.contract.outputs import FinishReason
    from engine.contract.request import RequestStatus
    from engine.telemetry.engine_telemetry import Telemetry

__all__ = [
    "ContinuousBatchingConfig",
    "ContinuousBatchingManager",
    "FinishReason",
    "GenerationOutput",
    "HeadraceError",
    "LoadConfig",
    "LoadedModel",
    "RequestStatus",
    "Telemetry",
    "choice_name",
    "from_model",
    "load",
]

_MODULES = {
    "ContinuousBatchingConfig": "contract.config",
    "ContinuousBatchingManager": "api.manager",
    "FinishReason": "contract.outputs",
    "GenerationOutput": "api.results",
    "HeadraceError": "contract.errors",
    "LoadConfig": "contract.config",
    "LoadedModel": "api.offline",
    "RequestStatus": "contract.request",
    "Telemetry": "telemetry.engine_telemetry",
    "choice_name": "api.results",
    "from_model": "api.offline",
    "load": "api.offline",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    return getattr(importlib.import_module(f"engine.{_MODULES[name]}"), name)
