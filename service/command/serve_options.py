"""The options given to `serve`, as configs.

Given (flags, variables, a file) ─▶ options_of ─▶ Options: checked, with every default filled in
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from engine.contract.config import ContinuousBatchingConfig, LoadConfig
from service.command import flags
from service.config import ProcessConfig, ServiceConfig


def default_model() -> str:
    """Return the path of the demo model. It is next to this package, both in a checkout and in an
    installation.
    """
    return str(Path(__file__).resolve().parents[2] / "models" / "demo")


class Options(NamedTuple):
    """All options of `serve`, checked. `model`: the path or the hub id."""

    process: ProcessConfig
    model: str
    service: ServiceConfig
    load: LoadConfig
    batching: ContinuousBatchingConfig


def options_of(given: flags.Given) -> Options:
    """Check the given options.

    Raises:
        ConfigError: an option is out of bounds, or contradicts another.
    """
    from service.door.receiving import default_receive_bytes

    process = given.config(ProcessConfig)
    model = process.model or default_model()
    receive = given["max_receive_bytes"]
    service = given.config(
        ServiceConfig,
        max_receive_bytes=default_receive_bytes(model) if receive is None else receive,
        log_level=given["log_level"].lower(),
        log_format=given["log_format"].lower(),
    )
    batching = given.config(
        ContinuousBatchingConfig,
        max_queue_size=service.max_queue_size,
        scheduler_type=service.scheduler,
        allow_block_sharing=service.prefix_cache,
        per_request_processors=True,
    )
    return Options(process, model, service, given.config(LoadConfig), batching)
