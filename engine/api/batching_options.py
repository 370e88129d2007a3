"""Merges the different ways callers of the Python API can set continuous batching options into a
single config.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from engine.api.generation_options import REQUEST_KEYS
from engine.contract.config import ContinuousBatchingConfig
from engine.contract.errors import ConfigError, InvalidRequestError

logger = logging.getLogger(__name__)

_FIELDS = frozenset(field.name for field in dataclasses.fields(ContinuousBatchingConfig))
_MOVED = _FIELDS - REQUEST_KEYS
"""Options that older code sets on the generation config."""
_ELSEWHERE: dict[str, object] = {
    # options of transformers' config that mean nothing here, with the values at which they are
    # ignored
    "auto_switch_to_flash": True,
    "disable_nccl_graph_mixing": True,
    "cpu_group_timeout": 300.0,
}


def resolve_config(
    generation_config: object,
    given: object | None,
    default: ContinuousBatchingConfig,
    options: Mapping[str, Any],
) -> ContinuousBatchingConfig:
    """Return the config that results from all of these sources.

    Args:
        generation_config: read only if `given` is None. Its continuous_batching_config is used, or
            options set on it as attributes, as older code does. Its compile_config is used for
            paths that have none of their own.
        given: a ContinuousBatchingConfig, either ours or transformers', or None.
        default: used if neither of the above sets anything.
        options: individual fields that override those of the config.

    Raises:
        InvalidRequestError: an option is not a field of the config.
        ConfigError: a value is out of bounds, or a field of transformers' config has no meaning
            here.
    """
    unknown = sorted(set(options) - _FIELDS)
    if unknown:
        raise InvalidRequestError(
            unknown[0],
            "is no keyword of generate_batch; use a generation config, or the fields of "
            f"ContinuousBatchingConfig: {', '.join(sorted(_FIELDS))}",
        )
    attributes = {
        name: value
        for name in sorted(_MOVED)
        if (value := getattr(generation_config, name, None)) is not None
    }
    nested = getattr(generation_config, "continuous_batching_config", None)
    if given is not None:
        config = _of(given)
        if attributes or nested is not None:
            logger.warning(
                "the generation config's %s is not used: a continuous_batching_config was given",
                ", ".join(attributes) or "continuous_batching_config",
            )
    else:
        config = default if nested is None else _of(nested)
        config = dataclasses.replace(config, **attributes)
    config = dataclasses.replace(config, **options)
    compile_config = getattr(generation_config, "compile_config", None)
    if compile_config is not None:
        config = dataclasses.replace(
            config,
            varlen_compile_config=config.varlen_compile_config or compile_config,
            decode_compile_config=config.decode_compile_config or compile_config,
        )
    return config


def _of(given: object) -> ContinuousBatchingConfig:
    """Return our config unchanged, or build one from the fields of transformers' config."""
    if isinstance(given, ContinuousBatchingConfig):
        return given
    if not dataclasses.is_dataclass(given) or isinstance(given, type):
        raise ConfigError(
            "continuous_batching_config",
            f"is a {type(given).__name__}; it must be a ContinuousBatchingConfig",
        )
    values = {}
    for field in dataclasses.fields(given):
        value = getattr(given, field.name)
        if field.name in _FIELDS:
            if value is not None:
                values[field.name] = value
        elif value != _ELSEWHERE.get(field.name, field.default):
            raise ConfigError(field.name, f"is {value!r}; it has no meaning here, leave it out")
    return ContinuousBatchingConfig(**values)
