"""On SIGHUP, rereads the options that can change while the server runs.

    SIGHUP ──▶ the config file, and the files that it names ──▶ a mistake: nothing changes
                  └──▶ the differences from the running config
                         ├─ may change ──▶ HeadraceServer.apply
                         └─ may not    ──▶ reported, and left for a restart

Each option's field declares whether it may change (`Option.reloads`). Flags and variables keep
their values, and take precedence over the file as they did at the start. Without a config file,
only the callers' file and the TLS files are read again. Any number of signals that arrive while
files are being read cause one more reading.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.contract.errors import ConfigError
from service.admission.phases import Phase
from service.command.config_file import Changes, compare, filled
from service.command.flags import FILE, Given, describe, flags
from service.config import ServiceConfig

if TYPE_CHECKING:
    from service.server import HeadraceServer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ConfigSource:
    """The source of a server's options. `config_of`: checks all of them, and raises ConfigError."""

    given: Given
    config_of: Callable[[Given], ServiceConfig]


class Reloading:
    """Handles SIGHUP; see the module. All methods run on one event loop."""

    def __init__(
        self, server: HeadraceServer, config: ServiceConfig, source: ConfigSource | None
    ) -> None:
        """`config`: the config that the server was started with. `source`: where it comes from, or
        None if it comes from no file.
        """
        self._server = server
        self._config = config
        self._source = source if source is not None and source.given.path is not None else None
        self._running = {} if source is None else {name: source.given[name] for name in flags()}
        self._task: asyncio.Task[None] | None = None
        self._is_wanted = False

    def begin(self) -> None:
        """Read the files again, after any reading that is in progress."""
        self._is_wanted = True
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while self._is_wanted:
            self._is_wanted = False
            if self._server.state.phase is Phase.DRAINING:
                logger.info("SIGHUP: nothing is read again, since the server drains")
            elif self._source is None:
                self._server.reload()
            else:
                await self._reload(self._source)

    async def _reload(self, source: ConfigSource) -> None:
        given = source.given
        try:
            given = await asyncio.to_thread(filled, given)
            config, changes = await asyncio.to_thread(self._read, source, given)
        except ConfigError as error:
            told = describe(error, given).replace("\n", "; ")
            logger.error("SIGHUP: nothing has changed: %s", told)
        except RuntimeError as error:  # no thread can be started
            logger.error("SIGHUP: nothing has changed: %s", error)
        else:
            self._config = config
            self._running |= {field: after for field, (_, after) in changes.now.items()}
            level = logging.WARNING if changes.now or changes.later else logging.INFO
            is_told = logger.isEnabledFor(level)  # afterwards it may not be
            if is_told:
                self._tell(level, changes)
            await self._server.apply(config)
            if not is_told:
                self._tell(level, changes)

    def _tell(self, level: int, changes: Changes) -> None:
        parts = {
            "changed": changes.told(changes.now),
            "left for a restart": changes.told(changes.later),
        }
        logger.log(
            level,
            "SIGHUP: %s was read again, with the files that it names: %s",
            self._running[FILE],
            "; ".join(f"{what}: {which}" for what, which in parts.items() if which)
            or "nothing has changed",
        )

    def _read(self, source: ConfigSource, given: Given) -> tuple[ServiceConfig, Changes]:
        """Check what the file sets, read the files that it names, and use their content if
        everything is valid. Runs in a thread.

        Raises:
            ConfigError: something is not valid.
        """
        asked = source.config_of(given)
        changes = compare(self._running, given)
        new = {field: getattr(asked, field) for field in changes.now}
        try:
            config = dataclasses.replace(self._config, **new)
        except ConfigError as error:
            told = f"{error} (what needs a restart is as it runs)".removeprefix(f"{error.option}: ")
            raise ConfigError(error.option, told).naming(*error.mentions) from error
        self._server.read_credentials(config)
        return config, changes
